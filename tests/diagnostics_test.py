"""Tests of diagnostics."""

import dataclasses

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import diagnostics
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

# Statistics within tolerances.
pytestmark = pytest.mark.quick_compile

# Compiling dominates the time of these tests.
_quantize = jax.jit(quantization.quantize, static_argnames='spec')
_error_parts = jax.jit(diagnostics.error_parts)
_stats = jax.jit(diagnostics.quantization_stats)
_FUNCTIONS = (
    jax.jit(diagnostics.logprob_gap),
    jax.jit(diagnostics.kl_k3),
    jax.jit(diagnostics.kl_median),
)
_logprob_gap, _kl_k3, _kl_median = _FUNCTIONS


class LogprobGapTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_is_the_mean_distance_over_the_mask(self):
    got = self.variant(diagnostics.logprob_gap)(
        jnp.array([[-1.0, -2.0, -9.0], [-0.5, -9.0, -9.0]]),
        jnp.array([[-1.5, -1.0, -0.0], [-0.5, -0.0, -0.0]]),
        jnp.array([[True, True, False], [True, False, False]]),
    )
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, (0.5 + 1.0 + 0.0) / 3, rtol=1e-6)

  def test_is_symmetric(self):
    a, b, mask = _random_logprobs()
    self.assertEqual(_logprob_gap(a, b, mask), _logprob_gap(b, a, mask))


class KlK3Test(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_is_ratio_minus_one_minus_log_ratio(self):
    # a is twice, then half as likely as b: 2 - 1 - ln 2, 1/2 - 1 + ln 2.
    got = self.variant(diagnostics.kl_k3)(
        jnp.log(jnp.array([[0.8, 0.2, 0.1]])),
        jnp.log(jnp.array([[0.4, 0.4, 0.9]])),
        jnp.array([[True, True, False]]),
    )
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, 0.5 / 2, rtol=1e-5)

  def test_is_the_kl_from_b_to_a_in_expectation(self):
    # Weighted by b, k3 is KL(b || a); KL(a || b) would be 0.184.
    a, b = np.array([0.7, 0.2, 0.1]), np.array([0.4, 0.4, 0.2])
    each = [
        _kl_k3(
            jnp.log(a[None, i : i + 1]),
            jnp.log(b[None, i : i + 1]),
            jnp.ones((1, 1), bool),
        )
        for i in range(3)
    ]
    np.testing.assert_allclose(b @ each, b @ np.log(b / a), rtol=1e-5)

  @chex.variants(with_jit=True, without_jit=True)
  def test_is_never_negative(self):
    rng = np.random.default_rng(0)
    sizes = np.geomspace(1e-40, 1e3, 256)
    a = np.float32(rng.normal(size=(64, 256)) * sizes)
    each = self.variant(jax.vmap(diagnostics.kl_k3))(
        jnp.asarray(a.reshape(-1, 1)),
        jnp.zeros((a.size, 1)),
        jnp.ones((a.size, 1), bool),
    )
    self.assertGreaterEqual(float(jnp.min(each)), 0)
    self.assertTrue(np.all(np.isfinite(each)))

  def test_small_differences_do_not_cancel(self):
    # x**2 / 2 for x = 2**-10, where exp(x) - 1 - x has one good digit.
    got = _kl_k3(
        jnp.array([[2.0**-10]]), jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
    )
    np.testing.assert_allclose(got, 2.0**-21, rtol=1e-3)

  @parameterized.parameters((200.0, np.exp(20) - 21), (-200.0, 19.0))
  def test_huge_differences_are_held(self, x, want):
    got, gradient = jax.value_and_grad(_kl_k3)(
        jnp.array([[x]]), jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_array_equal(gradient, [[0]])


class KlMedianTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_is_the_median_of_the_means_of_sequences(self):
    gap = jnp.array([[1.0, 3.0, 9.0], [2.0, 9.0, 9.0], [0.0, 1.0, 2.0]])
    mask = jnp.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
    fn = self.variant(diagnostics.kl_median)
    got = fn(gap, jnp.zeros_like(gap), mask)  # of 2.5, 2 and 5 / 6
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, 2.0, rtol=1e-6)
    # A sequence without tokens is no sequence; of two, the mean.
    got = fn(gap, jnp.zeros_like(gap), mask.at[0].set(False))
    np.testing.assert_allclose(got, (2 + 5 / 6) / 2, rtol=1e-6)

  def test_a_few_wild_sequences_do_not_matter(self):
    rng = np.random.default_rng(0)
    a = np.float32(0.1 * rng.normal(size=(16, 32)))
    mask = jnp.ones(a.shape, bool)
    zeros = jnp.zeros(a.shape)
    before = _kl_median(jnp.asarray(a), zeros, mask)
    a[:3, 0] = -200.0
    after = _kl_median(jnp.asarray(a), zeros, mask)
    np.testing.assert_allclose(after, before, rtol=0.2)
    self.assertGreater(_kl_k3(-jnp.asarray(a), zeros, mask), 1e5)


class MaskTest(chex.TestCase):

  @parameterized.parameters(*_FUNCTIONS)
  def test_equal_log_probs_give_exactly_zero(self, function):
    a, _, mask = _random_logprobs()
    self.assertEqual(function(a, a, mask), 0)

  @parameterized.parameters(*_FUNCTIONS)
  def test_an_empty_mask_gives_zero(self, function):
    a, b, mask = _random_logprobs()
    value, gradient = jax.value_and_grad(function)(a, b, jnp.zeros_like(mask))
    self.assertEqual(value, 0)
    np.testing.assert_array_equal(gradient, np.zeros_like(a))

  @parameterized.product(
      function=_FUNCTIONS, bad=(200.0, float('nan'), float('-inf'))
  )
  def test_values_outside_the_mask_do_not_matter(self, function, bad):
    a, b, mask = _random_logprobs()
    self.assertEqual(
        function(jnp.where(mask, a, bad), b, mask), function(a, b, mask)
    )

  def test_nan_outside_the_mask_gets_no_gradient(self):
    a, b, mask = _random_logprobs()
    gradient = jax.grad(_kl_k3)(a, jnp.where(mask, b, jnp.nan), mask)
    np.testing.assert_array_equal(gradient[~mask], jnp.zeros_like(a)[~mask])


def _random_logprobs():
  rng = np.random.default_rng(0)
  a, b = -rng.exponential(size=(2, 4, 6))
  mask = rng.random((4, 6)) < 0.5
  return jnp.float32(a), jnp.float32(b), jnp.asarray(mask)


class QuantizationErrorTest(chex.TestCase):

  def _random(self):
    x = jax.random.normal(jax.random.key(0), (32, 256))
    return x * jnp.exp(2 * jax.random.normal(jax.random.key(1), (32, 1)))

  @parameterized.parameters(
      quantization.QuantSpec('nvfp4'),
      quantization.QuantSpec('nvfp4', 'token', four_over_six='mse'),
      quantization.QuantSpec('mxfp4'),
      quantization.QuantSpec('mxfp8'),
      quantization.QuantSpec('fp8_block'),
  )
  def test_parts_sum_to_the_error(self, spec):
    x = self._random()
    q = _quantize(x, spec)
    parts = _error_parts(x, q)
    parts = [np.asarray(p, np.float64) for p in jax.tree.leaves(parts)]
    error = np.asarray(qtensor.dequantize(q, jnp.float32) - x, np.float64)
    # Each part is a float32 difference: half an ulp of the block's amax each.
    bound = 2.0**-22 * np.abs(np.asarray(x)).max(axis=1, keepdims=True)
    self.assertTrue(np.all(np.abs(sum(parts) - error) <= bound))

  def test_parts_are_zero_where_their_cause_is_missing(self):
    grid = jnp.array([0.5, 1, 1.5, 2, 3, 4, 6, -6] * 4)
    q = _quantize(grid[None], quantization.QuantSpec('mxfp4'))
    parts = _error_parts(grid[None], q)
    for part in jax.tree.leaves(parts):
      np.testing.assert_array_equal(part, 0.0)
    # 7 does not fit; MXFP4's scale doubles. 0.05 is in the deadzone.
    x = grid.at[0].set(7.0).at[1].set(0.05)[None]
    q = _quantize(x, quantization.QuantSpec('mxfp4'))
    parts = _error_parts(x, q)
    self.assertEqual(float(parts.deadzone[0, 1]), np.float32(-0.05))
    self.assertEqual(int(jnp.sum(parts.deadzone != 0)), 1)
    self.assertGreater(float(jnp.abs(parts.scale_bias).sum()), 1.0)
    self.assertEqual(float(parts.grid_noise[0, 0]), 0.0)

  def test_report_a2_counts_underflow(self):
    # pytorch/ao#4598: the small block's scale underflows.
    x = jnp.full((1, 32), 1e-6, jnp.bfloat16).at[0, 16].set(1.0)
    q = _quantize(x, quantization.QuantSpec('nvfp4'))
    stats = _stats(x, q)
    self.assertEqual(float(stats.underflow_blocks), 1)
    self.assertEqual(float(stats.underflow_elements), 16)
    self.assertEqual(float(stats.zeroed_elements), 15)

  def test_counts_saturation(self):
    x = jnp.ones((1, 32))
    q = _quantize(x, quantization.QuantSpec('nvfp4'))
    stats = _stats(x.at[0, 3].set(1.5), q)
    self.assertEqual(float(stats.saturated_elements), 1)

  def test_sqnr_of_formats_is_ordered(self):
    x = self._random()
    sqnr = {
        name: float(
            _stats(x, _quantize(x, quantization.QuantSpec(name))).sqnr_db
        )
        for name in ('mxfp4', 'nvfp4', 'mxfp8')
    }
    self.assertLess(sqnr['mxfp4'], sqnr['nvfp4'])
    self.assertLess(sqnr['nvfp4'], sqnr['mxfp8'])
    self.assertGreater(sqnr['nvfp4'], 18)

  def test_zero_tensor_has_no_error_and_no_nan(self):
    x = jnp.zeros((2, 32))
    stats = _stats(x, _quantize(x, quantization.QuantSpec('nvfp4')))
    self.assertEqual(float(stats.sqnr_db), np.inf)
    for leaf in jax.tree.leaves(dataclasses.replace(stats, sqnr_db=0.0)):
      self.assertEqual(float(leaf), 0.0)
