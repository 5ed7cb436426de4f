"""Matmuls in every pair of formats, and the 'quantized' backward mode."""

import dataclasses
import functools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import formats
from nvfp4_jax import matmul
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

_Spec = quantization.QuantSpec
NVFP4, TOKEN = _Spec('nvfp4'), _Spec('nvfp4', 'token')
MXFP8, MXFP4 = _Spec('mxfp8'), _Spec('mxfp4')
FP8, FP8_2D = _Spec('fp8_block'), _Spec('fp8_block', block_2d=True)

PAIRS = {
    'w4a16': (None, NVFP4),
    'w4a8': (MXFP8, NVFP4),
    'mxfp8': (MXFP8, MXFP8),
    'mxfp8_2d': (MXFP8, _Spec('mxfp8', block_2d=True)),
    'mxfp4': (MXFP4, MXFP4),
    'fp8_block': (FP8, FP8_2D),
    'w8a16': (None, FP8_2D),
}
QUANTIZED = {
    'mxfp8': matmul.MatmulPrecision(MXFP8, MXFP8, MXFP8, 'quantized'),
    'nvfp4_token': matmul.MatmulPrecision(TOKEN, NVFP4, NVFP4, 'quantized'),
    # NVIDIA's pretraining recipe (arXiv 2509.25149).
    'nvfp4_pretraining': matmul.MatmulPrecision(
        lhs=_Spec('nvfp4', hadamard=True),
        rhs=_Spec('nvfp4', block_2d=True),
        grad=_Spec('nvfp4', rounding='stochastic', hadamard=True),
        backward='quantized',
    ),
    'fp8_block': matmul.MatmulPrecision(FP8, FP8_2D, FP8, 'quantized'),
}
GROUP_SIZES = (13, 0, 13, 1)  # of 29 rows, two of them in no group
KEY = jax.random.key(7)


def _operands(m=29, n=96, k=64, experts=None):
  kx, kw, ky = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(kx, (m, k), jnp.bfloat16)
  w = jax.random.normal(kw, (n, k) if experts is None else (experts, n, k))
  dy = jax.random.normal(ky, (m, n), jnp.bfloat16)
  return x, w.astype(jnp.bfloat16), dy


def _scaled_dot(xq, wq):
  """Dot of decoded operands along their last axes, then f32(D_x * D_w)."""
  x, w = (
      qtensor.decode(t) if isinstance(t, qtensor.QTensor) else t
      for t in (xq, wq)
  )
  precision = None
  if jnp.float32 in (x.dtype, w.dtype):
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    precision = lax.Precision.HIGHEST  # a GPU would take TF32
  y = lax.dot_general(
      x,
      w,
      (((1,), (1,)), ((), ())),
      precision=precision,
      preferred_element_type=jnp.float32,
  )
  scale = np.float32(1)
  for t, turn in ((xq, lambda d: d), (wq, np.transpose)):
    d = getattr(t, 'global_scale', None)
    if d is not None:
      scale = scale * turn(np.asarray(d))
  return np.asarray(y) * scale


@functools.partial(jax.jit, static_argnums=0)
def _jitted(precision, x, w, dy, group_sizes, key):
  if group_sizes is None:
    fn = lambda x, w: matmul.quantized_matmul(x, w, precision, key=key)
  else:
    fn = lambda x, w: matmul.quantized_grouped_matmul(
        x, w, group_sizes, precision, key=key
    )
  y, vjp = jax.vjp(fn, x, w)
  return y, *vjp(dy)


def _run(precision, x, w, dy, group_sizes=None, key=KEY):
  """Returns y, dgrad and wgrad."""
  if not (precision.grad and precision.grad.rounding == 'stochastic'):
    key = None
  return jax.tree.map(
      np.asarray, _jitted(precision, x, w, dy, group_sizes, key)
  )


class ForwardTest(chex.TestCase):

  @parameterized.named_parameters((name, *PAIRS[name]) for name in PAIRS)
  def test_is_dot_of_decoded_operands(self, lhs, rhs):
    x, w, _ = _operands()
    xq = x if lhs is None else quantization.quantize(x, lhs)
    want = _scaled_dot(xq, quantization.quantize(w, rhs))
    precision = matmul.MatmulPrecision(lhs, rhs)
    y = jax.jit(matmul.quantized_matmul, static_argnums=2)(x, w, precision)
    chex.assert_trees_all_equal(y, jnp.asarray(want).astype(jnp.bfloat16))

  @parameterized.named_parameters(
      (name, *PAIRS[name]) for name in ('w4a16', 'mxfp8', 'fp8_block')
  )
  def test_row_does_not_depend_on_other_rows(self, lhs, rhs):
    x, w, _ = _operands()
    precision = matmul.MatmulPrecision(lhs, rhs)
    fn = jax.jit(matmul.quantized_matmul, static_argnums=2)
    whole = fn(x, w, precision)
    for rows in (1, 5):
      chex.assert_trees_all_equal(fn(x[:rows], w, precision), whole[:rows])

  def test_fp8_block_sums_are_within_float32_of_float64(self):
    x, w, _ = _operands(k=300)  # ragged
    xq, wq = quantization.quantize(x, FP8), quantization.quantize(w, FP8_2D)
    a, b = (
        np.asarray(qtensor.dequantize(q, jnp.float32), np.float64)
        for q in (xq, wq)
    )
    y = matmul.quantized_matmul(
        x.astype(jnp.float32), w, matmul.MatmulPrecision(FP8, FP8_2D)
    )
    bound = 300 * 2.0**-24 * (np.abs(a) @ np.abs(b).T)
    self.assertTrue(np.all(np.abs(np.asarray(y) - a @ b.T) <= bound))

  @parameterized.named_parameters(
      (name, *PAIRS[name]) for name in ('w4a16', 'w4a8', 'mxfp8', 'fp8_block')
  )
  def test_grouped_equals_a_loop_over_groups(self, lhs, rhs):
    precision = matmul.MatmulPrecision(lhs, rhs)
    x, w, dy = _operands(experts=len(GROUP_SIZES))
    got = _run(precision, x, w, dy, jnp.array(GROUP_SIZES))
    _assert_equals_loop(self, precision, x, w, dy, got)


@pytest.mark.quick_compile  # bits are those of forward passes, above
class QuantizedBackwardTest(chex.TestCase):

  @parameterized.named_parameters(QUANTIZED.items())
  def test_gradients_are_of_column_copies_of_the_originals(self, precision):
    x, w, dy = _operands()
    _, dgrad, wgrad = _run(precision, x, w, dy)
    grad = precision.grad
    row_key, column_key = (None, None)
    if grad.rounding == 'stochastic':
      row_key, column_key = jax.random.split(KEY)
    quantize = jax.jit(quantization.quantize, static_argnames='spec')
    dyq = quantize(
        dy, spec=dataclasses.replace(grad, hadamard=False), key=row_key
    )
    want = _scaled_dot(dyq, quantize(w.T, spec=precision.rhs))
    np.testing.assert_array_equal(dgrad, want.astype(jnp.bfloat16))

    block = formats.FORMATS[grad.format].block
    pad = lambda t: jnp.pad(t, ((0, -t.shape[0] % block), (0, 0)))
    want = _scaled_dot(
        quantize(pad(dy).T, spec=grad, key=column_key),
        quantize(pad(x).T, spec=precision.lhs),
    )
    np.testing.assert_array_equal(wgrad, want.astype(jnp.bfloat16))

  @parameterized.named_parameters(QUANTIZED.items())
  def test_gradients_are_near_the_plain_ones(self, precision):
    x, w, dy = _operands()
    _, dgrad, wgrad = _run(precision, x, w, dy)
    x, w, dy = (np.asarray(t, np.float64) for t in (x, w, dy))
    limit = 0.2 if precision.lhs.format == 'nvfp4' else 0.05
    for got, want in ((dgrad, dy @ w), (wgrad, dy.T @ x)):
      error = np.linalg.norm(got.astype(np.float64) - want)
      self.assertLess(error, limit * np.linalg.norm(want))

  @parameterized.named_parameters(
      (name, QUANTIZED[name]) for name in ('mxfp8', 'fp8_block')
  )
  def test_grouped_equals_a_loop_over_groups(self, precision):
    # These formats have no global scale, which all groups would share.
    x, w, dy = _operands(experts=len(GROUP_SIZES))
    got = _run(precision, x, w, dy, jnp.array(GROUP_SIZES))
    _assert_equals_loop(self, precision, x, w, dy, got)

  def test_grouped_blocks_hold_one_group_only(self):
    # Group 2's tokens are huge: with them in a block, group 0's would vanish.
    precision = QUANTIZED['mxfp8']
    x, w, dy = _operands(experts=len(GROUP_SIZES))
    sizes = jnp.array(GROUP_SIZES)
    _, _, before = _run(precision, x, w, dy, sizes)
    _, _, after = _run(precision, x.at[13:26].mul(2.0**40), w, dy, sizes)
    np.testing.assert_array_equal(after[[0, 3]], before[[0, 3]])

  @parameterized.parameters('nvfp4_token', 'nvfp4_pretraining')
  def test_groups_have_global_scales_of_their_own(self, name):
    precision = QUANTIZED[name]
    x, w, dy = _operands(experts=len(GROUP_SIZES))
    sizes = jnp.array(GROUP_SIZES)
    _, _, before = _run(precision, x, w, dy, sizes)
    _, _, after = _run(precision, x.at[13:26].mul(2.0**40), w, dy, sizes)
    np.testing.assert_array_equal(after[[0, 3]], before[[0, 3]])
    np.testing.assert_array_equal(
        after[2].astype(np.float32), before[2].astype(np.float32) * 2.0**40
    )
    plain = np.asarray(dy[:13], np.float32).T @ np.asarray(x[:13], np.float32)
    error = np.linalg.norm(before[0].astype(np.float32) - plain)
    self.assertLess(error, 0.25 * np.linalg.norm(plain))

  @parameterized.parameters(
      QUANTIZED['nvfp4_pretraining'],
      matmul.MatmulPrecision(NVFP4, NVFP4),
      matmul.MatmulPrecision(NVFP4, NVFP4, backward='high_precision'),
  )
  def test_rows_in_no_group_change_nothing(self, precision):
    x, w, dy = _operands(experts=len(GROUP_SIZES))
    sizes = jnp.array(GROUP_SIZES)
    want = _run(precision, x, w, dy, sizes)
    for value in (1e30, np.nan, np.inf):
      x, dy = x.at[27:].set(value), dy.at[27:].set(value)
      for got, right in zip(
          _run(precision, x, w, dy, sizes), want, strict=True
      ):
        np.testing.assert_array_equal(got, right)

  def test_infinity_in_one_group_stays_there(self):
    precision = matmul.MatmulPrecision(TOKEN, NVFP4, backward='high_precision')
    x, w, dy = _operands(experts=len(GROUP_SIZES))
    x = x.at[13].set(np.inf)
    _, _, wgrad = _run(precision, x, w, dy, jnp.array(GROUP_SIZES))
    self.assertTrue(np.isfinite(wgrad[[0, 3]].astype(np.float32)).all())

  def test_column_copies_are_of_x_not_of_its_dequantized_rows(self):
    x, w, dy = _operands()
    precision = QUANTIZED['nvfp4_token']
    _, _, wgrad = _run(precision, x, w, dy)
    rows = qtensor.dequantize(quantization.quantize(x, TOKEN), jnp.bfloat16)
    _, _, other = _run(precision, rows, w, dy)
    self.assertGreater(np.mean(wgrad != other), 0.5)

  def test_residuals_hold_codes_and_scales_only(self):
    x, w, _ = _operands()
    fn = functools.partial(
        matmul.quantized_matmul, precision=QUANTIZED['mxfp8']
    )
    saved = jax.tree.leaves(
        jax.eval_shape(lambda x, w: jax.vjp(fn, x, w)[1], x, w)
    )
    self.assertEqual(
        {leaf.dtype.name for leaf in saved}, {'uint8', 'float8_e8m0fnu'}
    )

  def test_same_key_same_gradients(self):
    precision = QUANTIZED['nvfp4_pretraining']
    x, w, dy = _operands()
    chex.assert_trees_all_equal(
        _run(precision, x, w, dy), _run(precision, x, w, dy)
    )
    one = _run(precision, x, w, dy)
    other = _run(precision, x, w, dy, key=jax.random.key(8))
    np.testing.assert_array_equal(one[0], other[0])
    for a, b in zip(one[1:], other[1:], strict=True):
      self.assertGreater(np.mean(a != b), 0.5)

  def test_given_quantized_operands_change_nothing(self):
    precision = QUANTIZED['mxfp8']
    x, w, dy = _operands()
    xq, wq = (quantization.quantize(t, MXFP8) for t in (x, w))

    @jax.jit
    def run(x, w, dy):
      fn = lambda x, w: matmul.quantized_matmul(x, w, precision, xq=xq, wq=wq)
      y, vjp = jax.vjp(fn, x, w)
      return y, *vjp(dy)

    chex.assert_trees_all_equal(run(x, w, dy), _run(precision, x, w, dy))


class RefusedTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(lhs=None, grad=MXFP8), 'needs lhs and grad'),
      (dict(grad=None), 'needs lhs and grad'),
      (dict(lhs=_Spec('nvfp4', 'token', four_over_six='mse')), 'no column'),
      (dict(grad=_Spec('nvfp4', 'token', four_over_six='mse')), 'no column'),
      (dict(lhs=_Spec('nvfp4', hadamard=True)), 'both of its operands'),
      (dict(lhs=_Spec('nvfp4', rounding='stochastic')), 'only gradients'),
      (dict(rhs=_Spec('nvfp4', hadamard=True)), 'weights are not rotated'),
      (dict(lhs=_Spec('mxfp8', block_2d=True)), 'for weights'),
      (dict(rhs=None), 'rhs None is not'),
      (dict(backward='dequantized'), 'grad must be None'),
      (
          dict(
              lhs=_Spec('nvfp4', hadamard=True),
              grad=None,
              backward='high_precision',
          ),
          'no column copy to',
      ),
  )
  def test_pairs_that_make_no_sense(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(QUANTIZED['mxfp8'], **changes)

  def test_operands(self):
    x, w, _ = _operands(n=40)
    call = functools.partial(matmul.quantized_matmul, x, w)
    with self.assertRaisesRegex(
        ValueError, '40, which is not a multiple of 32'
    ):
      call(QUANTIZED['mxfp8'])
    with self.assertRaisesRegex(ValueError, 'needs a key'):
      matmul.quantized_matmul(x, w[:32], QUANTIZED['nvfp4_pretraining'])
    with self.assertRaisesRegex(ValueError, 'key must be None'):
      call(matmul.MatmulPrecision(MXFP8, MXFP8), key=KEY)
    with self.assertRaisesRegex(TypeError, 'Cannot quantize int32'):
      matmul.quantized_matmul(
          x.astype(jnp.int32), w, matmul.MatmulPrecision(None, MXFP8)
      )
    wq = quantization.quantize(w, MXFP8)
    with self.assertRaisesRegex(ValueError, 'wq is mxfp8, not nvfp4'):
      call(matmul.MatmulPrecision(MXFP8, NVFP4), wq=wq)
    with self.assertRaisesRegex(ValueError, r'wq is of shape \(8, 64\)'):
      call(
          matmul.MatmulPrecision(MXFP8, MXFP8),
          wq=quantization.quantize(w[:8], MXFP8),
      )
    with self.assertRaisesRegex(ValueError, 'precision.lhs is None'):
      call(
          matmul.MatmulPrecision(None, MXFP8),
          xq=quantization.quantize(x, MXFP8),
      )


def _assert_equals_loop(test, precision, x, w, dy, got):
  """Compares y, dgrad and wgrad with those of each group by itself."""
  y, dgrad, wgrad = got
  start = 0
  for e, size in enumerate(GROUP_SIZES):
    rows = slice(start, start + size)
    start += size
    if size:
      # All groups in one program: rows of zeros change no other row, no sum.
      pad = ((0, max(GROUP_SIZES) - size), (0, 0))
      alone_x, alone_dy = (jnp.pad(a[rows], pad) for a in (x, dy))
      want = _run(precision, alone_x, w[e], alone_dy)
      np.testing.assert_array_equal(y[rows], want[0][:size])
      np.testing.assert_array_equal(dgrad[rows], want[1][:size])
      # Blocks of rows are added in turn: one ulp of bfloat16.
      np.testing.assert_allclose(
          wgrad[e].astype(np.float32),
          want[2].astype(np.float32),
          rtol=2.0**-7,
          atol=1e-3,
      )
    else:
      np.testing.assert_array_equal(wgrad[e], 0)
  test.assertLess(start, x.shape[0])
  np.testing.assert_array_equal(y[start:], 0)
  np.testing.assert_array_equal(dgrad[start:], 0)
