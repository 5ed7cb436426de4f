"""What must hold on a GPU, with default XLA flags: `pytest -m gpu`."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import grpo
from experiments import run
from nvfp4_jax import kernels
from nvfp4_jax import kv_cache
from nvfp4_jax import layers
from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax import self_check
from nvfp4_jax.kernels import choice
from nvfp4_jax.kernels import reference
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from tests import byte_table
from tests import golden_cases
from tests import numpy_oracle
from tests.kernels import cases

_Spec = quantization.QuantSpec
_GOLDENS = {
    'nvfp4_te_1d': _Spec('nvfp4', 'tensor'),
    'nvfp4_te_2d': _Spec('nvfp4', block_2d=True),
    'nvfp4_te_rowscaled': _Spec('nvfp4', 'token'),
    'nvfp4_te_46_1d_mse_256_strict': _Spec('nvfp4', four_over_six='mse'),
    'nvfp4_te_46_2d_mae_448_fast': _Spec(
        'nvfp4',
        block_2d=True,
        four_over_six='mae',
        scale_max=448,
        error='fast',
    ),
    'nvfp4_te_46_row_mse_256_strict': _Spec(
        'nvfp4', 'token', four_over_six='mse'
    ),
    'mxfp8_e4m3_te': _Spec('mxfp8'),
    'mxfp4_fouroversix': _Spec('mxfp4'),
}


@pytest.mark.gpu
class GpuTest(chex.TestCase):

  @parameterized.parameters(*_GOLDENS.items())
  def test_quantizer_gives_the_golden_bytes(self, file, spec):
    # Subnormal numbers are kept on a GPU; fouroversix has its own rule there.
    exclude = golden_cases.NON_FINITE
    if 'fouroversix' in file:
      exclude += golden_cases.FLUSHED_ON_CPU
    cases = golden_cases.load(file, exclude)
    compared = 0
    for case, q in zip(
        cases, golden_cases.quantize_all(cases, spec), strict=True
    ):
      codes = case.want['data' if 'data' in case.want else 'codes']
      for got, want in ((q.data, codes), (q.block_scale, case.want['scales'])):
        np.testing.assert_array_equal(got.view(np.uint8), want, case.name)
        compared += got.size
    self.assertGreater(compared, 60_000)

  @parameterized.parameters(*byte_table.SPECS)
  def test_quantizer_equals_numpy_on_five_million_bytes(self, name):
    spec, x = byte_table.SPECS[name], byte_table.matrix()
    q = jax.jit(quantization.quantize, static_argnames='spec')(x, spec=spec)
    want = numpy_oracle.quantize(x, spec)
    compared, different = byte_table.different_bytes(q, want)
    self.assertGreater(compared, 5_000_000)
    self.assertEqual(different, 0)

  def test_self_check_passes(self):
    self.assertEqual(list(self_check.faults()), [])

  def test_matmul_has_exact_products(self):
    spec = quantization.QuantSpec('nvfp4', 'token', four_over_six='mse')
    precision = matmul.MatmulPrecision(
        spec, dataclasses.replace(spec, outer='tensor')
    )
    kx, kw = jax.random.split(jax.random.key(0))
    x = jax.random.normal(kx, (512, 1024), jnp.bfloat16)
    w = jax.random.normal(kw, (256, 1024), jnp.bfloat16)
    fn = lambda x, w: matmul.quantized_matmul(x, w, precision)
    y = jax.jit(fn)(x.astype(jnp.float32), w.astype(jnp.float32))
    xq = qtensor.dequantize(
        quantization.quantize(x, precision.lhs), jnp.float32
    )
    wq = qtensor.dequantize(
        quantization.quantize(w, precision.rhs), jnp.float32
    )
    want = np.asarray(xq, np.float64) @ np.asarray(wq, np.float64).T
    self.assertLess(np.abs(y - want).max(), 1e-5 * np.abs(want).max())

  @parameterized.parameters(64, 128, 1024)
  def test_bits_of_a_row_depend_on_the_batch_in_bfloat16_only(self, k):
    # Why experiments set flags: by default, XLA's own matmuls differ.
    kx, kw = jax.random.split(jax.random.key(0))
    x = jax.random.normal(kx, (2048, k), jnp.bfloat16)
    w = jax.random.normal(kw, (k, k), jnp.bfloat16)
    spec = quantization.QuantSpec('nvfp4', 'token', four_over_six='mse')
    xq = quantization.quantize(x, spec)
    wq = quantization.quantize(w, dataclasses.replace(spec, outer='tensor'))
    first = lambda tree: jax.tree.map(lambda leaf: leaf[:128], tree)
    differing = lambda fn, x, w: float(
        jnp.mean(jax.jit(fn)(first(x), w) != jax.jit(fn)(x, w)[:128])
    )
    self.assertGreater(differing(reference.matmul, x, w), 0.1)
    self.assertEqual(differing(kernels.scaled_matmul, xq, wq), 0.0)

  @parameterized.parameters('bf16', 'nvfp4_final')
  def test_learner_and_sampler_are_one_policy(self, recipe):
    # In a process of its own: flags count before a device is used.
    with tempfile.TemporaryDirectory() as folder:
      command = [sys.executable, '-m', 'experiments.consistency', 'tiny']
      command += [f'--recipe={recipe}', f'--workdir={folder}/run']
      env = os.environ | {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
      done = subprocess.run(command, env=env, check=False)
    self.assertEqual(done.returncode, 0)

  def test_smoke_preset_runs(self):
    with tempfile.TemporaryDirectory() as folder:
      workdir = pathlib.Path(folder) / 'run'
      run.launch(grpo.main, grpo.PRESETS, ['smoke', f'--workdir={workdir}'])
      rows = run.read_rows(workdir / 'metrics.jsonl')
    self.assertLen(rows, grpo.PRESETS['smoke'][1].steps)
    for row in rows:
      self.assertTrue(all(np.isfinite(value) for value in row.values()))


# Rows, N, K and sizes of groups.
_GROUPS = [
    (75, 64, 128, (17, 0, 33, 5, 20)),
    (50, 192, 256, (3, 0, 18, 0)),
    (20, 64, 128, (0, 0)),
    (1, 64, 128, (0, 1, 0)),
    (300, 320, 384, (150, 0, 130)),
    (4096, 512, 512, (0, 300, 1, 800, *([250] * 10), 128, 300)),
]


_quantize = jax.jit(
    kernels.quantize, static_argnames=('spec', 'implementation')
)


@pytest.mark.gpu
class TritonTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    if problem := choice.cannot_run_triton():
      self.skipTest(problem)

  def assert_same_bytes(self, x, spec, **options):
    # Both jitted, so that a shape and spec are compiled once in a test.
    x = jnp.asarray(x)
    got, want = (
        _quantize(x, spec=spec, implementation=name, **options)
        for name in ('triton', 'reference')
    )
    as_bytes = lambda leaf: np.asarray(leaf).view(np.uint8)
    chex.assert_trees_all_equal(*jax.tree.map(as_bytes, (got, want)))

  @pytest.mark.skipif(jax.device_count() > 1, reason='chosen on one device')
  def test_quantize_is_triton_by_default(self):
    choice.log_once.cache_clear()
    with self.assertLogs(kernels.__name__, 'INFO') as logs:
      kernels.quantize(jnp.ones((4, 64)), cases.SPECS[0])
    self.assertIn("implementation 'triton'", logs.output[0])

  @parameterized.parameters(*cases.SPECS)
  def test_bytes(self, spec):
    # Random rows of different size; edges, among them and alone; not finite.
    x = byte_table.matrix()[:1024]
    edges = np.tile(cases.edges(), (64, 36))
    mixed = np.concatenate([x[:992], edges[:32]])
    for given in (x, mixed, edges, 0 * x, edges * (np.abs(edges) < 1e-37)):
      self.assert_same_bytes(given, spec)
    for value in (np.nan, np.inf, -np.inf):
      given = mixed.copy()
      given[3, 7] = value
      self.assert_same_bytes(given, spec)

  def test_nine_million_elements(self):
    for spec in (cases.SPECS[0], _Spec('nvfp4', 'token', four_over_six='mse')):
      self.assert_same_bytes(byte_table.matrix(), spec)

  @parameterized.parameters(*_GOLDENS.items())
  def test_golden_inputs(self, file, spec):
    inputs = [case.x for case in golden_cases.load(file, ())]
    self.assert_same_bytes(golden_cases.stack(inputs), spec)

  @parameterized.parameters(
      ((1, 16),), ((1, 4096),), ((3, 32768),), ((2, 32784),), ((17, 14336),)
  )
  def test_shapes(self, shape):
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    for spec in (_Spec('nvfp4', 'token'), _Spec('nvfp4')):
      self.assert_same_bytes(x, spec)

  @parameterized.parameters(jnp.float32, jnp.float16)
  def test_other_dtypes(self, dtype):
    x = jax.random.normal(jax.random.key(0), (2, 3, 48)).astype(dtype)
    self.assert_same_bytes(x, _Spec('nvfp4', 'token'))

  @parameterized.parameters('token', 'tensor')
  def test_given_amax(self, outer):
    x = jax.random.normal(jax.random.key(0), (2, 3, 48), jnp.bfloat16)
    spec = _Spec('nvfp4', outer)
    amax = 2 * quantization.compute_amax(x, spec)
    self.assert_same_bytes(x, spec, amax=amax)

  def test_every_scaled_value_near_a_boundary(self):
    near = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    bits = near.view(np.int32)[:, None] + np.arange(-8192, 8192)
    v = bits.astype(np.int32).view(np.float32).reshape(-1)[: 15 * 7640]
    x = np.full((7640, 16), 6, np.float32)
    x[:, 1:] = v.reshape(-1, 15)
    self.assert_same_bytes(np.concatenate([x, -x]), _Spec('nvfp4', 'token'))

  def test_jit_vmap_and_vjp(self):
    spec = _Spec('nvfp4', 'token', four_over_six='mse')
    x = jax.random.normal(jax.random.key(0), (3, 5, 64), jnp.bfloat16)
    fn = lambda x: kernels.quantize(x, spec, implementation='triton')
    want = kernels.quantize(x, spec, implementation='reference')
    chex.assert_trees_all_equal(jax.jit(jax.vmap(fn))(x), want)
    precision = matmul.MatmulPrecision(spec, _Spec('nvfp4'))
    w = jax.random.normal(jax.random.key(1), (32, 64))
    loss = lambda x, w: jnp.sum(matmul.quantized_matmul(x, w, precision) ** 2)
    gradients = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    self.assertTrue(all(jnp.isfinite(g).all() for g in gradients))

  @parameterized.product(
      shape=((1, 64, 128), (5, 70, 256), (33, 130, 1024), (130, 4096, 4096)),
      lhs=(None, _Spec('nvfp4', 'token'), _Spec('nvfp4'), _Spec('mxfp8')),
  )
  def test_matmul_is_exact_but_for_sums(self, shape, lhs):
    x, w = cases.operands(*shape)
    x = x if lhs is None else quantization.quantize(x, lhs)
    wq = quantization.quantize(w, _Spec('nvfp4', four_over_six='mse'))
    y = kernels.scaled_matmul(x, wq, implementation='triton')
    want, magnitude = cases.exact_product(x, wq)
    # The tensor cores of Hopper truncate what they add.
    self.assertLess(np.max(np.abs(y - want) / magnitude), 1e-5)

  @parameterized.product(
      shape=((14336, 4096), (4096, 4096), (512, 1024)),
      lhs=(None, _Spec('nvfp4', 'token')),
  )
  def test_bits_of_a_row_do_not_depend_on_the_batch(self, shape, lhs):
    x, w = cases.operands(512, *shape)
    x = jnp.where(jnp.arange(shape[1]) % 97 == 5, 300 * x, x)
    x = x if lhs is None else quantization.quantize(x, lhs)
    wq = quantization.quantize(w, _Spec('nvfp4', four_over_six='mse'))
    multiply = lambda n: kernels.scaled_matmul(
        jax.tree.map(lambda leaf: leaf[:n], x), wq, implementation='triton'
    )
    want = multiply(512)
    for rows in (1, 2, 16, 17, 32, 33, 64, 129):
      np.testing.assert_array_equal(multiply(rows), want[:rows])

  def assert_close(self, y, want):
    # Sums of other order; the tensor cores of Hopper truncate what they add.
    scale = np.max(np.abs(want))
    self.assertLessEqual(np.max(np.abs(np.asarray(y) - want)), 2e-5 * scale)

  @parameterized.parameters(*_GROUPS)
  def test_grouped_matmuls(self, rows, n, k, sizes):
    x, dy, w, sizes, is_dead = _grouped(rows, n, k, sizes)
    wq = quantization.quantize(w, _Spec('nvfp4', four_over_six='mse'))
    xq = quantization.quantize(
        jnp.where(is_dead, 0, x), _Spec('nvfp4', 'token')
    )
    for function, operands in (
        (kernels.matmul, (x, w)),
        (kernels.dgrad, (dy, w)),
        (kernels.wgrad, (dy, x)),
        (kernels.scaled_matmul, (x, wq)),
        (kernels.scaled_matmul, (xq, wq)),
    ):
      y = np.asarray(function(*operands, sizes, implementation='triton'))
      want = np.asarray(function(*operands, sizes, implementation='reference'))
      self.assert_close(y, want)
      if function is kernels.wgrad:
        np.testing.assert_array_equal(y[np.asarray(sizes) == 0], 0)
      else:
        np.testing.assert_array_equal(y[np.asarray(is_dead)[:, 0]], 0)

  def test_decoded_experts_give_the_same_sums_every_time(self):
    # What waits for too little may be right most of the time.
    x, _, w, sizes, _ = _grouped(*_GROUPS[-1])
    wq = quantization.quantize(w, _Spec('nvfp4', four_over_six='mse'))
    multiply = lambda: kernels.scaled_matmul(
        x, wq, sizes, implementation='triton'
    )
    want = np.asarray(multiply())
    for _ in range(20):
      np.testing.assert_array_equal(multiply(), want)

  @parameterized.parameters('matmul', 'dgrad', 'W4A16', 'W4A4')
  def test_bits_of_a_row_do_not_depend_on_its_group(self, name):
    k, groups = 1024, 4
    x, w = cases.operands(512, groups * k, k)
    x = jnp.where(jnp.arange(k) % 97 == 5, 300 * x, x)
    w = w.reshape(groups, k, k)
    if name == 'W4A4':
      x = quantization.quantize(x, _Spec('nvfp4', 'token'))
    if name in ('W4A16', 'W4A4'):
      w = quantization.quantize(w, _Spec('nvfp4', four_over_six='mse'))
    function = {'matmul': kernels.matmul, 'dgrad': kernels.dgrad}.get(
        name, kernels.scaled_matmul
    )

    def multiply(sizes):  # the first rows, all of which meet w[2] in `want`
      rows = jax.tree.map(lambda leaf: leaf[: sum(sizes)], x)
      sizes = jnp.array(sizes, jnp.int32)
      return np.asarray(function(rows, w, sizes, implementation='triton'))

    # Of tiles of 16, 32, 64 and 128 tokens.
    want = multiply([0, 0, 512, 0])
    for count in (1, 2, 16, 17, 33, 65, 128, 129, 200, 300):
      y = multiply([0, 0, count, 0])
      np.testing.assert_array_equal(y, want[:count])
    y = multiply([100, 7, 393, 12])
    np.testing.assert_array_equal(y[107:500], want[107:500])

  def test_grouped_matmuls_under_jit_and_vmap(self):
    x, dy, w, _, _ = _grouped(40, 64, 128, (40, 0))
    sizes = jnp.array([[7, 33], [40, 0], [0, 12]], jnp.int32)
    for function, operands in (
        (kernels.matmul, (x, w)),
        (kernels.dgrad, (dy, w)),
        (kernels.wgrad, (dy, x)),
    ):
      fn = lambda s, f=function, o=operands: f(*o, s, implementation='triton')
      y = jax.jit(jax.vmap(fn))(sizes)
      for lane in range(3):
        np.testing.assert_array_equal(y[lane], fn(sizes[lane]))

  @pytest.mark.skipif(jax.device_count() > 1, reason='chosen on one device')
  @parameterized.parameters('matmul', 'dgrad', 'wgrad', 'scaled_matmul')
  def test_grouped_matmuls_are_triton_by_default(self, name):
    x, dy, w, sizes, _ = _grouped(*_GROUPS[0])
    operands = {
        'matmul': (x, w),
        'dgrad': (dy, w),
        'wgrad': (dy, x),
        'scaled_matmul': (x, quantization.quantize(w, _Spec('nvfp4'))),
    }[name]
    function = getattr(kernels, name)
    choice.log_once.cache_clear()
    with self.assertLogs(kernels.__name__, 'INFO') as logs:
      y = function(*operands, sizes)
    self.assertIn(f"{name}: implementation 'triton'", logs.output[0])
    want = function(*operands, sizes, implementation='triton')
    np.testing.assert_array_equal(y, want)

  @pytest.mark.skipif(jax.device_count() > 1, reason='chosen on one device')
  @parameterized.parameters('bf16', 'nvfp4_w4a16', 'nvfp4_dequantized')
  def test_bits_of_experts_do_not_depend_on_the_batch(self, recipe):
    quantizer, tree = _moe_tree(recipe)
    segment = jax.tree.map(lambda leaf: leaf[0], tree['layers'][0])
    (precisions,) = policy.segment_precisions(quantizer.policy, tree)
    weights = layers.LayerWeights(segment, {}, precisions)
    x, _ = cases.operands(1024, 8, _MOE.embed_dim)

    @jax.jit
    def experts(x, sizes):
      return layers.mlp(x, weights, 'mlp.experts', group_sizes=sizes)

    want = np.asarray(experts(x, jnp.array([0, 1024, *[0] * 6])))
    self.assertTrue(np.isfinite(want).all())
    for rows in (1, 5, 16, 40, 130, 600):
      sizes = jnp.array([0, rows, *[0] * 6])
      np.testing.assert_array_equal(experts(x[:rows], sizes), want[:rows])
    sizes = jnp.array([300, 333, 0, 391, *[0] * 4])
    np.testing.assert_array_equal(experts(x, sizes)[300:633], want[300:633])

  @pytest.mark.skipif(jax.device_count() > 1, reason='chosen on one device')
  @parameterized.parameters('bf16', 'nvfp4_w4a16', 'nvfp4_dequantized')
  def test_learner_and_sampler_of_experts_have_the_same_bits(self, recipe):
    quantizer, tree = _moe_tree(recipe)
    batch, prompt, length = 4, 20, 32
    tokens = jax.random.randint(
        jax.random.key(1), (batch, length), 0, _MOE.vocab_size
    )
    choice.log_once.cache_clear()
    with self.assertLogs(kernels.__name__, 'INFO') as logs:
      forward = cases.jit(
          lambda tree, tokens: transformer.forward(
              _MOE, tree, tokens, quantizer
          )
      )
      want = np.asarray(forward(tree, tokens))
      prefill = cases.jit(
          lambda tree, tokens, lengths, cache: transformer.prefill(
              _MOE, tree, tokens, lengths, quantizer, cache
          )
      )
      step = cases.jit(
          lambda tree, tokens, cache: transformer.decode_step(
              _MOE, tree, tokens, quantizer, cache, 64
          )
      )
      cache = kv_cache.init(
          _MOE.num_layers, batch, _MOE.num_kv_heads, 64, _MOE.head_dim
      )
      hidden, cache, _ = prefill(
          tree, tokens[:, :prompt], jnp.full((batch,), prompt), cache
      )
      np.testing.assert_array_equal(hidden, want[:, prompt - 1])
      for i in range(prompt, length):
        hidden, cache, _ = step(tree, tokens[:, i], cache)
        np.testing.assert_array_equal(hidden, want[:, i])
    name = 'matmul' if recipe == 'bf16' else 'scaled_matmul'
    chosen = [line for line in logs.output if f':{name}: ' in line]
    self.assertLen(chosen, 1)
    self.assertIn("implementation 'triton'", chosen[0])


_MOE = model_config.ModelConfig(
    vocab_size=64,
    num_layers=2,
    embed_dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_experts=8,
    experts_per_token=2,
    moe_dim=128,
)


def _moe_tree(recipe):
  """Returns a recipe's quantizer and its tree of a small model, stacked."""
  quantizer = policy.Quantizer(recipes.get(recipe).learner)
  params = transformer.init_params(jax.random.key(0), _MOE)
  params = transformer.stack(params, (_MOE.num_layers,))
  return quantizer, policy.quantize_params(quantizer, params)


def _grouped(rows, n, k, sizes):
  """Returns x, dy and w, the sizes, and which rows, of NaN, have no group."""
  groups = len(sizes)
  x, w = cases.operands(rows, groups * n, k)
  dy, _ = cases.operands(rows, n, n, seed=1)
  is_dead = (jnp.arange(rows) >= sum(sizes))[:, None]
  x, dy = (jnp.where(is_dead, jnp.nan, a) for a in (x, dy))
  return x, dy, w.reshape(groups, n, k), jnp.array(sizes, jnp.int32), is_dead
