"""Triton's grouped matmuls in its interpreter: `make aot`.

The interpreter adds in an order of its own, so that only a GPU can show that a
row's bits do not depend on the tile.
"""

import contextlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import kernels
from nvfp4_jax import kv_cache
from nvfp4_jax import layers
from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from tests.kernels import cases

triton = pytest.importorskip('triton')
if not triton.knobs.runtime.interpret:
  pytest.skip('TRITON_INTERPRET is not set.', allow_module_level=True)

from nvfp4_jax.kernels import choice  # noqa: E402
from nvfp4_jax.kernels import reference  # noqa: E402
from nvfp4_jax.kernels import triton_grouped  # noqa: E402
from tests.kernels import interpreter  # noqa: E402

pytestmark = pytest.mark.aot

_TENSOR = quantization.QuantSpec('nvfp4', four_over_six='mse')
_TOKEN = quantization.QuantSpec('nvfp4', 'token')
_MXFP8 = quantization.QuantSpec('mxfp8')
_N, _K = 64, 128
_UNQUANTIZED = ('matmul', 'dgrad', 'wgrad')
# Rows, and sizes of groups: blocks have 16 rows or more.
_SIZES = {
    'ragged': (75, (17, 0, 33, 5, 20)),
    'one_has_all': (40, (0, 40, 0)),
    'dead_rows': (50, (3, 0, 18, 0)),
    'none_lives': (20, (0, 0)),
    'single_row': (1, (0, 1, 0)),
    'large_blocks': (300, (150, 130)),
}


def _run(name, *operands, tile=None):
  """Returns what a function of `triton_grouped` does, interpreted."""
  with interpreter.installed():
    y = getattr(triton_grouped, name)(*operands, tile=tile)
    return jax.tree.map(np.asarray, y)


def _operands(rows, sizes, n=_N, k=_K):
  """Returns x `[M, K]`, dy `[M, N]`, w `[E, N, K]` and the sizes.

  Rows after the last group are NaN.
  """
  groups = len(sizes)
  x, w = cases.operands(rows, groups * n, k)
  dy, _ = cases.operands(rows, n, n, seed=1)
  dead = (jnp.arange(rows) >= sum(sizes))[:, None]
  x, dy = (jnp.where(dead, jnp.nan, a) for a in (x, dy))
  return x, dy, w.reshape(groups, n, k), jnp.array(sizes, jnp.int32)


def _quantize_dead(x, spec, sizes):
  """Returns x quantized; the codes' scales of dead rows are NaN."""
  dead = jnp.arange(x.shape[0]) >= jnp.sum(sizes)
  xq = quantization.quantize(jnp.where(dead[:, None], 0, x), spec)
  nan = jnp.full_like(xq.block_scale, jnp.nan)
  return xq.replace(block_scale=jnp.where(dead[:, None], nan, xq.block_scale))


def _ranges(sizes):
  ends = np.cumsum(sizes)
  return list(zip(ends - sizes, ends, strict=True))


class TritonGroupedTest(chex.TestCase):

  def assert_close(self, y, want, magnitude):
    # A rounding of the sum for each step and scale, and to spare.
    error = np.abs(y - want) / np.maximum(magnitude, 1e-30)
    self.assertLess(np.max(error, initial=0), 1e-6)

  def assert_rows_close(self, y, sizes, group_product):
    """Checks rows of groups against `group_product(group, rows)`, and zeros."""
    for group, (first, end) in enumerate(_ranges(sizes)):
      if first < end:
        rows = slice(first, end)
        self.assert_close(y[rows], *group_product(group, rows))
    np.testing.assert_array_equal(y[sum(sizes) :], 0)

  @parameterized.named_parameters((k, *v) for k, v in _SIZES.items())
  def test_matmul(self, rows, sizes):
    x, _, w, group_sizes = _operands(rows, sizes)
    y = _run('matmul', x, w, group_sizes)
    product = lambda g, at: cases.exact_product(x[at], w[g])
    self.assert_rows_close(y, sizes, product)
    want = reference.matmul(x, w, group_sizes)
    chex.assert_trees_all_close(y, np.asarray(want), rtol=1e-5, atol=1e-3)

  @parameterized.named_parameters((k, *v) for k, v in _SIZES.items())
  def test_dgrad(self, rows, sizes):
    _, dy, w, group_sizes = _operands(rows, sizes)
    dx = _run('dgrad', dy, w, group_sizes)
    product = lambda g, at: cases.exact_product(dy[at], w[g].T)
    self.assert_rows_close(dx, sizes, product)
    want = reference.dgrad(dy, w, group_sizes)
    chex.assert_trees_all_close(dx, np.asarray(want), rtol=1e-5, atol=1e-3)

  @parameterized.named_parameters((k, *v) for k, v in _SIZES.items())
  def test_wgrad(self, rows, sizes):
    x, dy, _, group_sizes = _operands(rows, sizes)
    dw = _run('wgrad', dy, x, group_sizes)
    for group, (first, end) in enumerate(_ranges(sizes)):
      at = slice(first, end)
      want, magnitude = cases.exact_product(dy[at].T, x[at].T)
      self.assert_close(dw[group], want, magnitude)
      if first == end:
        np.testing.assert_array_equal(dw[group], 0)
    want = reference.wgrad(dy, x, group_sizes)
    chex.assert_trees_all_close(dw, np.asarray(want), rtol=1e-5, atol=1e-2)

  @parameterized.named_parameters((k, *v) for k, v in _SIZES.items())
  def test_scaled_matmul(self, rows, sizes):
    x, _, w, group_sizes = _operands(rows, sizes)
    # Experts of different size have different global scales.
    wq = quantization.quantize(
        w * 3.0 ** jnp.arange(len(sizes))[:, None, None], _TENSOR
    )
    every = (None, _TOKEN, _TENSOR, _MXFP8)
    for spec in every if rows == 75 else (_TOKEN,):
      xq = x if spec is None else _quantize_dead(x, spec, group_sizes)
      y = _run('scaled_matmul', xq, wq, group_sizes)
      decoded = np.asarray(
          x if spec is None else qtensor.dequantize(xq, jnp.float32), np.float64
      )
      values = np.asarray(qtensor.dequantize(wq, jnp.float32), np.float64)
      for group, (first, end) in enumerate(_ranges(sizes)):
        a, b = decoded[first:end], values[group].T
        self.assert_close(y[first:end], a @ b, np.abs(a) @ np.abs(b))
      np.testing.assert_array_equal(y[sum(sizes) :], 0)
      want = np.asarray(reference.scaled_matmul(xq, wq, group_sizes))
      scale = np.max(np.abs(want), initial=1e-30)
      self.assertLess(np.max(np.abs(y - want)), 1e-5 * scale)

  def test_every_number_of_the_tile(self):
    x, dy, w, sizes = _operands(150, (70, 0, 31), 256, 128)
    wq = quantization.quantize(w, _TENSOR)
    for tile in ((16, 64, 4, 2), (64, 256, 8, 3), (128, 128, 8, 3)):
      for name, operands in (
          ('matmul', (x, w)),
          ('dgrad', (dy, w)),
          ('wgrad', (dy, x)),
          ('scaled_matmul', (x, wq)),
      ):
        y = _run(name, *operands, sizes, tile=tile)
        want = np.asarray(getattr(reference, name)(*operands, sizes))
        scale = np.max(np.abs(want))
        self.assertLess(np.max(np.abs(y - want)), 1e-5 * scale, (name, tile))

  @parameterized.parameters('matmul', 'dgrad', 'scaled_matmul')
  def test_row_does_not_depend_on_the_others(self, name):
    # Integers, whose sums are exact: the interpreter's dots of few and of many
    # columns add in another order.
    tile = (32, 64, 4, 2)
    x, dy, w, _ = _operands(90, (90, 0, 0))
    x, dy, w = (jnp.clip(jnp.round(2 * a), -6, 6) for a in (x, dy, w))
    x = dy if name == 'dgrad' else x
    w = quantization.quantize(w, _TENSOR) if name == 'scaled_matmul' else w
    want = _run(name, x, w, jnp.array([0, 90, 0]), tile=tile)
    for first, last in ((0, 1), (31, 33), (40, 90)):
      # These rows in group 1; neighbours, in groups 0 and 2, are NaN.
      rows = jnp.concatenate([x[:5] * jnp.nan, x[first:last], x[:7] * jnp.nan])
      sizes = jnp.array([5, last - first, 7])
      y = _run(name, rows, w, sizes, tile=tile)
      np.testing.assert_array_equal(y[5:-7], want[first:last])
      self.assertTrue(np.isnan(y[:5]).all() and np.isnan(y[-7:]).all())

  def test_wgrad_of_a_group_does_not_see_others(self):
    x, dy, _, _ = _operands(70, (70,))
    at = jnp.arange(70)[:, None]
    other = (at < 20) | (at >= 47)
    x, dy = (jnp.where(other, jnp.nan, a) for a in (x, dy))
    dw = _run('wgrad', dy, x, jnp.array([20, 27, 10]))
    self.assertTrue(np.isfinite(dw[1]).all())
    self.assertTrue(np.isnan(dw[[0, 2]]).all())
    alone = _run('wgrad', dy[20:47], x[20:47], jnp.array([27]))
    np.testing.assert_array_equal(dw[1], alone[0])

  def test_sizes_beyond_the_rows_are_cut(self):
    x, _, w, _ = _operands(20, (20, 0))
    y = _run('matmul', x, w, jnp.array([12, 100]))
    want = _run('matmul', x, w, jnp.array([12, 8]))
    np.testing.assert_array_equal(y, want)

  def test_vmap(self):
    x, dy, w, _ = _operands(40, (40, 0))
    sizes = jnp.array([[7, 33], [40, 0], [0, 12]], jnp.int32)
    w = jnp.stack([w, 2 * w, 3 * w])
    for name, axes, operands in (
        ('matmul', (None, 0, 0), (x, w)),
        ('dgrad', (None, 0, 0), (dy, w)),
        ('wgrad', (None, None, 0), (dy, x)),
    ):
      with interpreter.installed():
        fn = getattr(triton_grouped, name)
        y = np.asarray(jax.vmap(fn, axes)(*operands, sizes))
        for lane in range(3):
          one = [
              a if axis is None else a[lane]
              for a, axis in zip(operands, axes, strict=False)
          ]
          np.testing.assert_array_equal(y[lane], fn(*one, sizes[lane]))

  def test_layer_of_a_stack(self):
    x, _, w, sizes = _operands(40, (9, 0, 20))
    xq = quantization.quantize(jnp.nan_to_num(x), _TOKEN)
    wq = quantization.quantize(jnp.stack([w, 2 * w, 3 * w]), _TENSOR)
    fn = triton_grouped.scaled_matmul
    with interpreter.installed():
      for i in range(3):
        layer = qtensor.Layer(wq, jnp.int32(i))
        got = jax.jit(fn)(xq, layer, sizes)
        np.testing.assert_array_equal(got, fn(xq, layer.take(), sizes))
      stacks = jax.tree.map(lambda leaf: leaf[None], wq)
      lanes = jax.vmap(fn, (None, 0, None))
      got = lanes(xq, qtensor.Layer(stacks, jnp.array([2])), sizes)
      np.testing.assert_array_equal(got[0], fn(xq, layer.take(), sizes))

  def test_vmap_of_vmap_with_dead_rows(self):
    x, _, w, _ = _operands(41, (20, 20))
    sizes = jnp.array([[[7, 9], [20, 0]], [[0, 3], [0, 0]]], jnp.int32)
    w = jnp.stack([w, 2 * w])  # of the outer lanes
    xq = quantization.quantize(x, quantization.QuantSpec('nvfp4', 'token'))
    wq = quantization.quantize(w, quantization.QuantSpec('nvfp4'))
    fn = triton_grouped.scaled_matmul
    inner = jax.vmap(fn, (None, None, 0))
    take = lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree)
    with interpreter.installed():
      y = np.asarray(jax.vmap(inner, (None, 0, 0))(xq, wq, sizes))
      for i, j in np.ndindex(2, 2):
        want = fn(xq, take(wq, i), sizes[i, j])
        np.testing.assert_array_equal(y[i, j], want)

  @parameterized.parameters(
      (1, 128, 16),
      (128, 8, 16),
      (32768, 128, 128),
      (8192, 128, 64),
      (70, 1, 128),
  )
  def test_block_rows_follow_from_shapes(self, rows, groups, block):
    self.assertEqual(triton_grouped.block_rows(rows, groups), block)

  def test_says_what_it_cannot_do(self):
    x, dy, w, sizes = _operands(20, (20, 0))
    wq = quantization.quantize(w, _TENSOR)
    why = triton_grouped.unsupported
    self.assertIsNone(why(x, wq, sizes, 9.0))
    self.assertIn('9.0, not 10.0', why(x, wq, sizes, 10.0))
    self.assertIn('float32', why(x.astype(jnp.float32), wq, sizes, 9.0))
    self.assertIn('no rows', why(x[:0], wq, sizes, 9.0))
    mxfp8 = quantization.quantize(w, _MXFP8)
    self.assertIn('mxfp8', why(x, mxfp8, sizes, 9.0))
    narrow = quantization.quantize(w[..., :64], _TENSOR)
    self.assertIn('multiple of 128', why(x[:, :64], narrow, sizes, 9.0))
    short = quantization.quantize(w[:, :32], _TENSOR)
    self.assertIn('multiple of 64', why(x, short, sizes, 9.0))
    scales = wq.replace(global_scale=jnp.ones((2, _N, 1)))
    self.assertIn('one global scale', why(x, scales, sizes, 9.0))
    why = triton_grouped.unsupported_bfloat16
    for operands in ((x, w), (dy, w), (dy, x)):
      self.assertIsNone(why(*operands, sizes, 9.0))
    self.assertIn('9.0, not 8.9', why(x, w, sizes, 8.9))
    self.assertIn('float32', why(x, w.astype(jnp.float32), sizes, 9.0))
    self.assertIn('size of 32', why(x, w[:, :32], sizes, 9.0))
    self.assertIn('no groups', why(x, w[:0], sizes[:0], 9.0))


@contextlib.contextmanager
def _hopper(devices=1):
  """A context in which kernels are chosen as on Hopper, and interpreted."""
  gpu = mock.patch.multiple(
      choice,
      cannot_run_triton=lambda: None,
      compute_capability=lambda: 9.0,
  )
  count = mock.patch.object(jax, 'device_count', lambda: devices)
  choice.log_once.cache_clear()
  with interpreter.installed(), gpu, count:
    yield


_W4A4 = matmul.MatmulPrecision(_TOKEN, _TENSOR)
_W4A16 = matmul.MatmulPrecision(None, _TENSOR, backward='high_precision')
_PRECISIONS = {
    'bf16': None,
    'W4A4': _W4A4,
    'W4A16': _W4A16,
    'quantized': matmul.MatmulPrecision(
        _TOKEN, quantization.QuantSpec('nvfp4'), _TOKEN, 'quantized'
    ),
}


class ChoiceTest(chex.TestCase):
  """What is chosen does not depend on who asks."""

  def choices(self, fn, *args, devices=1):
    """Returns what `fn` logs for each function of `kernels`."""
    logs = self.assertLogs(kernels.__name__, 'INFO')
    with _hopper(devices), logs as logs:
      jax.eval_shape(fn, *args)
    messages = [record.getMessage() for record in logs.records]
    chosen = {m.split(':')[0]: m.split("'")[1] for m in messages}
    self.assertLen(messages, len(chosen))
    return chosen

  def multiply(self, precision, rows=4096, n=128, k=128, dtype=jnp.bfloat16):
    """Returns a grouped matmul and its operands, masters."""
    x = jax.ShapeDtypeStruct((rows, k), dtype)
    w = jax.ShapeDtypeStruct((4, n, k), jnp.float32)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def fn(x, w, sizes):
      if precision is None:
        return matmul.unquantized_matmul(x, w, sizes, dtype=x.dtype)
      return matmul.quantized_grouped_matmul(x, w, sizes, precision)

    return fn, x, w, sizes

  @parameterized.parameters('bf16', 'W4A4', 'W4A16')
  def test_learner_and_sampler_choose_alike(self, name):
    precision = _PRECISIONS[name]
    function = 'matmul' if precision is None else 'scaled_matmul'
    for rows in (1, 8, 500, 4096):
      chosen = self.choices(*self.multiply(precision, rows))
      self.assertEqual(chosen[function], 'triton')
      if precision is None:
        continue
      _, x, w, sizes = self.multiply(precision, rows)
      wq = jax.eval_shape(lambda w: quantization.quantize(w, _TENSOR), w)
      stack = jax.tree.map(
          lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype), wq
      )
      layer = qtensor.Layer(stack, jax.ShapeDtypeStruct((), jnp.int32))
      fn = lambda x, wq, sizes: matmul.quantized_grouped_matmul(
          x, None, sizes, precision, wq=wq
      )
      for given in (wq, layer):
        chosen = self.choices(fn, x, given, sizes)
        self.assertEqual(chosen[function], 'triton')

  @parameterized.parameters('bf16', 'W4A4', 'W4A16', 'quantized')
  def test_gradients_are_triton(self, name):
    fn, *args = self.multiply(_PRECISIONS[name])
    loss = lambda *args: jnp.sum(fn(*args))
    chosen = self.choices(jax.grad(loss, (0, 1)), *args)
    self.assertEqual(set(chosen.values()), {'triton'})
    if name != 'quantized':
      self.assertContainsSubset(('dgrad', 'wgrad'), chosen)

  def test_reference_is_chosen_for_the_rest(self):
    odd = self.choices(*self.multiply(None, n=96))
    narrow = self.choices(*self.multiply(_W4A16, k=64))
    short = self.choices(*self.multiply(_W4A4, n=32))
    several = self.choices(*self.multiply(_W4A16), devices=2)
    self.assertEqual(odd['matmul'], 'reference')
    for chosen in (narrow, short, several):
      self.assertEqual(chosen['scaled_matmul'], 'reference')
    fn, *args = self.multiply(None, dtype=jnp.float32)
    loss = lambda *args: jnp.sum(fn(*args))
    chosen = self.choices(jax.grad(loss, (0, 1)), *args)
    self.assertEqual(chosen, dict.fromkeys(_UNQUANTIZED, 'reference'))


class MoETest(chex.TestCase):
  """Layers and models whose experts are multiplied in Triton."""

  def assert_close(self, got, want, rtol):
    for y, z in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      y, z = (np.asarray(t, np.float64) for t in (y, z))
      self.assertLess(np.linalg.norm(y - z), rtol * np.linalg.norm(z))

  def operands(self, precision):
    """Returns x `[M, D]`, masters, what is quantized, and precisions."""
    gate, up, down = (f'mlp.experts.{n}_proj' for n in ('gate', 'up', 'down'))
    keys = jax.random.split(jax.random.key(0), 5)
    normal = lambda key, *shape: jax.random.normal(key, shape) / 8
    params = {
        'mlp.gate': normal(keys[0], 4, 128),
        gate: normal(keys[1], 4, 128, 128),
        up: normal(keys[2], 4, 128, 128),
        down: normal(keys[3], 4, 128, 128),
    }
    names = (gate, up, down)
    quantized = {}
    if precision is not None:
      quantized = {
          n: quantization.quantize(params[n], precision.rhs) for n in names
      }
    x = jax.random.normal(keys[4], (2, 8, 128), jnp.bfloat16)
    return x, params, quantized, dict.fromkeys(names, precision)

  @parameterized.parameters(*_PRECISIONS)
  def test_layer_and_its_gradient(self, name):
    x, params, quantized, precisions = self.operands(_PRECISIONS[name])

    def loss(x, params):
      weights = layers.LayerWeights(params, quantized, precisions)
      y, _ = layers.moe(x, weights, 2)
      return jnp.sum(jnp.sin(y)), y

    # For two lanes, as a sweep does it.
    gradient = jax.grad(loss, (0, 1), has_aux=True)
    lanes = jax.vmap(gradient, (0, None))
    want = jax.jit(lanes)(x, params)
    with _hopper():
      got = jax.jit(lambda *args: lanes(*args))(x, params)
      jax.block_until_ready(got)
    # A bfloat16 whose sum is near a tie may be the next one, and then move a
    # code of four bits.
    self.assert_close(got, want, 3e-3 if name in ('bf16', 'W4A16') else 1e-2)

  @parameterized.parameters('W4A4', 'W4A16')
  def test_layer_of_a_stack(self, name):
    x, params, quantized, precisions = self.operands(_PRECISIONS[name])
    stacks = jax.tree.map(
        lambda leaf: jnp.stack([jnp.zeros_like(leaf), leaf]), quantized
    )

    def moe(x, experts):
      weights = layers.LayerWeights(params | experts, {}, precisions)
      return layers.moe(x, weights, 2)[0]

    want = jax.jit(moe)(x[0], quantized)
    with _hopper():
      self.assertTrue(all(map(kernels.reads_layers, stacks.values())))
      layer = {n: qtensor.Layer(s, jnp.int32(1)) for n, s in stacks.items()}
      run = jax.jit(lambda *args: moe(*args))
      got, taken = (np.asarray(run(x[0], q)) for q in (layer, quantized))
    np.testing.assert_array_equal(got, taken)
    self.assert_close(got, want, 1e-2 if name == 'W4A4' else 1e-3)

  @parameterized.parameters('nvfp4_w4a16', 'nvfp4_final', 'resq')
  def test_prefill_reads_experts_in_their_stack(self, recipe):
    config = model_config.ModelConfig(
        vocab_size=32,
        num_layers=2,
        embed_dim=128,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        num_experts=4,
        experts_per_token=2,
        moe_dim=128,
    )
    quantizer = policy.Quantizer(recipes.get(recipe).sampler)
    params = transformer.init_params(jax.random.key(0), config)
    tree = policy.quantize_params(quantizer, transformer.stack(params, (2,)))
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 32)
    lengths = jnp.array([6, 4])
    cache = kv_cache.init(2, 2, 1, 8, 32)
    prefill = lambda tree: transformer.prefill(
        config, tree, tokens, lengths, quantizer, cache
    )[0]
    want = jax.jit(prefill)(tree)
    read = []

    def scaled_matmul(x, wq, *args, **kwargs):
      read.append(isinstance(wq, qtensor.Layer))
      return grouped(x, wq, *args, **kwargs)

    grouped = triton_grouped.scaled_matmul
    with (
        _hopper(),
        mock.patch.object(triton_grouped, 'scaled_matmul', scaled_matmul),
    ):
      got = np.asarray(jax.jit(lambda tree: prefill(tree))(tree))
    # A residual takes columns of the weights, and so the layer.
    self.assertEqual(set(read), {recipe != 'resq'})
    self.assert_close(got, want, 2e-2)


if __name__ == '__main__':
  absltest.main()
