"""Tests of corrections."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax.rl import corrections

_ALL = np.ones((1, 4), bool)


class TokenTisTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_is_the_ratio_of_learner_to_sampler_up_to_the_cap(self):
    learner = np.log([[0.5, 0.2, 0.9, 0.4]])
    sampler = np.log([[0.25, 0.4, 0.1, 0.4]])
    got = self.variant(lambda *args: _weights(*args, cap=3))(
        learner, sampler, _ALL
    )
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, [[2.0, 0.5, 3.0, 1.0]], rtol=1e-6)

  def test_equal_log_probs_give_exactly_one(self):
    logprobs = -np.geomspace(1e-8, 50, 4)[None]
    got = _weights(logprobs, logprobs, _ALL)
    np.testing.assert_array_equal(got, np.ones((1, 4)))

  def test_a_cap_of_one_only_lowers(self):
    got = _weights([[0.0, -1.0]], [[-1.0, 0.0]], _ALL[:, :2], cap=1)
    np.testing.assert_allclose(got, [[1.0, np.exp(-1)]], rtol=1e-6)

  @parameterized.parameters(0.99, 0.0, -1.0, float('nan'))
  def test_a_cap_below_one_raises(self, cap):
    with self.assertRaisesRegex(ValueError, f'cap {cap} is below 1'):
      _weights([[0.0]], [[0.0]], _ALL[:, :1], cap=cap)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(float('nan'), float('-inf'), float('inf'))
  def test_a_log_prob_that_is_not_finite_is_neutral(self, bad):
    # Learner, sampler and both; the fourth token keeps its own weight.
    learner = np.array([[bad, -1.0, bad, -0.5]])
    sampler = np.array([[-1.0, bad, bad, 0.0]])
    got = self.variant(_weights)(learner, sampler, _ALL)
    np.testing.assert_allclose(got, [[1, 1, 1, np.exp(-0.5)]], rtol=1e-6)
    np.testing.assert_array_equal(got[:, :3], np.ones((1, 3)))

  def test_the_weight_is_one_outside_the_mask(self):
    learner = np.array([[5.0, -5.0, np.nan, 0.5]])
    mask = np.array([[False, False, False, True]])
    got = _weights(learner, np.zeros((1, 4)), mask)
    np.testing.assert_array_equal(got[:, :3], np.ones((1, 3)))
    np.testing.assert_allclose(got[:, 3], [np.exp(0.5)], rtol=1e-6)

  def test_a_huge_log_ratio_stays_finite(self):
    log_ratio = np.array([[200.0, -200.0, 3e38, -3e38]])
    got = _weights(log_ratio, np.zeros((1, 4)), _ALL, cap=1e30)
    want = np.exp([[20.0, -20.0, 20.0, -20.0]])
    np.testing.assert_allclose(got, want, rtol=1e-5)

  @chex.variants(with_jit=True, without_jit=True)
  def test_has_no_gradient_in_the_learner(self):
    learner = jnp.array([[-0.3, jnp.nan, 200.0, -0.1]])
    sampler = jnp.array([[-0.2, -1.0, 0.0, -0.1]])
    gradient = self.variant(
        jax.grad(lambda learner: jnp.sum(_weights(learner, sampler, _ALL)))
    )(learner)
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))

  def test_has_no_gradient_in_the_sampler(self):
    gradient = jax.grad(
        lambda sampler: _weights([[-0.3]], sampler, [[True]])[0, 0]
    )(jnp.array([[-0.2]]))
    np.testing.assert_array_equal(gradient, [[0.0]])

  def test_unequal_shapes_raise(self):
    with self.assertRaises(AssertionError):
      _weights([[0.0, 0.0]], [[0.0]], _ALL[:, :2])


def _weights(learner, sampler, mask, cap=10.0):
  return corrections.token_tis(
      jnp.asarray(learner, jnp.float32),
      jnp.asarray(sampler, jnp.float32),
      jnp.asarray(mask),
      cap=cap,
  )
