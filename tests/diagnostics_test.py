"""Tests of diagnostics."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import diagnostics

# Compiling dominates the time of these tests.
_FUNCTIONS = (jax.jit(diagnostics.logprob_gap), jax.jit(diagnostics.kl_k3))
_logprob_gap, _kl_k3 = _FUNCTIONS


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
