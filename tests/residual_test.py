"""The residual of activations: patterns, operands, and what they multiply."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import exact
from nvfp4_jax import matmul
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import residual

# Only samplers have residuals: there are no bits to agree on.
pytestmark = pytest.mark.quick_compile

TOKEN = quantization.QuantSpec('nvfp4', 'token')
WEIGHT = quantization.QuantSpec('nvfp4', 'tensor')
TOKEN_46 = quantization.QuantSpec('nvfp4', 'token', four_over_six='mse')
WEIGHT_46 = quantization.QuantSpec('nvfp4', 'tensor', four_over_six='mse')
CHANNELS = residual.Residual('channels', 0.125)
ELEMENTS = residual.Residual('elements', 0.5)
GROUP_SIZES = (4, 0, 4, 4)  # of 14 rows, two of them in no group


def _activations(rows, columns, seed=0):
  """Activations with a few channels that stand out."""
  x = jax.random.normal(jax.random.key(seed), (rows, columns))
  loud = jnp.zeros((columns,)).at[jnp.array([3, 17, 40])].set(30.0) + 1.0
  return exact.to_bfloat16(x * loud)


def _precision(extra, lhs=TOKEN, rhs=WEIGHT):
  return matmul.MatmulPrecision(
      lhs, rhs, backward='high_precision', residual=extra
  )


def _oracle_channels(x, lhs, share):
  """The worst channels of some rows, by numpy."""
  values = np.asarray(
      qtensor.dequantize(quantization.quantize(x, lhs), jnp.float32)
  )
  energy = np.square(np.asarray(x, np.float32) - values).sum(0)
  count = -(-int(np.ceil(share * x.shape[1])) // 16) * 16
  return np.sort(np.argsort(-energy, kind='stable')[:count])


class ResidualTest(parameterized.TestCase):

  @parameterized.product(
      extra=(CHANNELS, ELEMENTS, residual.Residual('channels', 1.0)),
      specs=((TOKEN, WEIGHT), (TOKEN_46, WEIGHT_46), (WEIGHT, WEIGHT)),
  )
  def test_matmul_multiplies_what_compensated_says(self, extra, specs):
    lhs, rhs = specs
    x = _activations(15, 64)
    w = jax.random.normal(jax.random.key(1), (24, 64), jnp.bfloat16)
    wq = quantization.quantize(w, rhs)
    y = matmul.quantized_matmul(
        x.astype(jnp.float32), w, _precision(extra, lhs, rhs)
    )
    values = np.asarray(residual.compensated(x, lhs, extra), np.float64)
    want = values @ np.asarray(qtensor.dequantize(wq, jnp.float32)).T
    scale = np.abs(want).max()
    # Columns that are taken one by one are quantized again.
    tolerance = 2e-6 if extra.pattern == 'elements' else 0.01
    np.testing.assert_allclose(y, want, atol=tolerance * scale, rtol=0)

  @parameterized.parameters((CHANNELS, 0.9), (ELEMENTS, 0.6))
  def test_output_is_nearer_to_that_of_unquantized_activations(
      self, extra, bound
  ):
    x = _activations(32, 64)
    w = jax.random.normal(jax.random.key(1), (24, 64), jnp.bfloat16)
    wq = quantization.quantize(w, WEIGHT)
    values = np.asarray(qtensor.dequantize(wq, jnp.float32), np.float64)
    want = np.asarray(x, np.float64) @ values.T

    def error(extra):
      y = matmul.quantized_matmul(
          x.astype(jnp.float32), w, _precision(extra), wq=wq
      )
      return np.linalg.norm(np.asarray(y, np.float64) - want)

    self.assertLess(error(extra), bound * error(None))

  def test_channels_are_those_of_largest_error(self):
    x = _activations(32, 64)
    xq = quantization.quantize(x, TOKEN)
    wq = quantization.quantize(
        jax.random.normal(jax.random.key(1), (16, 64), jnp.bfloat16), WEIGHT
    )
    longer = residual.extend(x, xq, wq, TOKEN, WEIGHT, CHANNELS)
    channels = _oracle_channels(x, TOKEN, CHANNELS.share)
    self.assertLen(channels, 16)
    error = x.astype(jnp.float32) - qtensor.dequantize(xq, jnp.float32)
    want = quantization.quantize(
        exact.to_bfloat16(error[:, channels]),
        TOKEN,
        amax=quantization.compute_amax(x, TOKEN),
    )
    chex.assert_trees_all_equal(longer.x.data[:, 32:], want.data)
    chex.assert_trees_all_equal(longer.x.block_scale[:, 4:], want.block_scale)
    chex.assert_trees_all_equal(longer.x.global_scale, xq.global_scale)
    # The old columns are untouched, the new ones near the weight's own.
    chex.assert_trees_all_equal(longer.w.data[:, :32], wq.data)
    values = qtensor.dequantize(longer.w, jnp.float32)
    chex.assert_trees_all_close(
        values[:, 64:], values[:, channels], atol=0.7, rtol=0
    )

  def test_elements_are_the_largest_of_every_four(self):
    x = _activations(8, 64)
    error = np.asarray(x, np.float32) - np.asarray(
        qtensor.dequantize(quantization.quantize(x, TOKEN), jnp.float32)
    )
    kept = np.asarray(residual._keep_largest(jnp.asarray(error), 2))
    groups, kept = error.reshape(-1, 4), kept.reshape(-1, 4)
    for row, values in zip(groups, kept, strict=True):
      largest = np.argsort(-np.abs(row), kind='stable')[:2]
      want = np.where(np.isin(np.arange(4), largest), row, 0)
      np.testing.assert_array_equal(values, want)

  @parameterized.parameters(CHANNELS, ELEMENTS)
  def test_each_group_is_a_matmul_of_its_own(self, extra):
    x = _activations(14, 64)
    w = jax.random.normal(jax.random.key(1), (4, 24, 64), jnp.bfloat16)
    sizes = jnp.array(GROUP_SIZES)
    run = jax.jit(
        lambda x, w, sizes: matmul.quantized_grouped_matmul(
            x, w, sizes, _precision(extra)
        )
    )
    y, start = run(x, w, sizes), 0
    for group, size in enumerate(GROUP_SIZES):
      rows = slice(start, start + size)
      if size:
        want = matmul.quantized_matmul(x[rows], w[group], _precision(extra))
        chex.assert_trees_all_equal(y[rows], want)
      start += size
    chex.assert_trees_all_equal(y[start:], jnp.zeros_like(y[start:]))

  def test_rows_depend_on_others_by_the_choice_of_channels_only(self):
    x = _activations(16, 64)
    w = jax.random.normal(jax.random.key(1), (24, 64), jnp.bfloat16)
    run = lambda x, extra: matmul.quantized_matmul(x, w, _precision(extra))
    alone = x[:4]
    chex.assert_trees_all_equal(run(x, ELEMENTS)[:4], run(alone, ELEMENTS))
    self.assertFalse(
        bool(jnp.all(run(x, CHANNELS)[:4] == run(alone, CHANNELS)))
    )

  @parameterized.parameters(CHANNELS, ELEMENTS)
  def test_rows_that_are_not_finite_stay_alone(self, extra):
    x = _activations(16, 64)
    w = jax.random.normal(jax.random.key(1), (24, 64), jnp.bfloat16)
    run = lambda x: matmul.quantized_matmul(x, w, _precision(extra))
    y = run(x.at[3].set(jnp.nan))
    self.assertTrue(bool(jnp.all(jnp.isnan(y[3]))))
    self.assertTrue(bool(jnp.all(jnp.isfinite(jnp.delete(y, 3, axis=0)))))
    zeros = run(jnp.zeros_like(x))
    chex.assert_trees_all_equal(zeros, jnp.zeros_like(zeros))

  def test_gradients_are_those_at_the_originals(self):
    x = _activations(16, 64)
    w = jax.random.normal(jax.random.key(1), (24, 64), jnp.bfloat16)

    def gradients(extra):
      fn = lambda x, w: matmul.quantized_matmul(x, w, _precision(extra))
      y, vjp = jax.vjp(fn, x, w)
      return vjp(jnp.ones_like(y))

    chex.assert_trees_all_equal(gradients(CHANNELS), gradients(None))

  def test_underflow_falls(self):
    x = _activations(64, 64)
    values = residual.compensated(x, TOKEN, ELEMENTS)
    before = qtensor.dequantize(quantization.quantize(x, TOKEN), jnp.float32)
    share = lambda v: float(jnp.mean((v == 0) & (x != 0)))
    self.assertGreater(share(before), 0.05)
    self.assertLess(share(values), 0.6 * share(before))

  @parameterized.parameters(
      (dict(pattern='rows'), "pattern 'rows' is not one of"),
      (dict(share=0.0), 'share 0.0'),
      (dict(pattern='elements', share=0.3), 'multiples of 1/4'),
  )
  def test_bad_residuals_raise(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      residual.Residual(**options)

  @parameterized.parameters(
      (dict(backward='dequantized'), 'has no operands for it'),
      (dict(lhs=quantization.QuantSpec('mxfp8')), 'must be nvfp4, not mxfp8'),
      (dict(lhs=None), 'must be nvfp4, not None'),
  )
  def test_bad_precisions_raise(self, options, message):
    precision = _precision(CHANNELS)
    with self.assertRaisesRegex(ValueError, message):
      matmul.MatmulPrecision(
          **{
              'lhs': precision.lhs,
              'rhs': precision.rhs,
              'backward': 'high_precision',
              'residual': CHANNELS,
          }
          | options
      )

  def test_a_split_contraction_axis_raises(self):
    x, w = _activations(4, 64), jnp.ones((8, 64), jnp.bfloat16)
    with self.assertRaisesRegex(ValueError, 'must not be split'):
      matmul.quantized_matmul(x, w, _precision(CHANNELS), axis_name='tensor')


if __name__ == '__main__':
  absltest.main()
