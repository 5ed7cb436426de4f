"""Tests of advantages."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax.rl import advantages

_EPS = 1e-6
_ONE_GROUP = np.zeros(8, np.int32)
# float32 sums of a few rewards near 1, in another order.
_TOLERANCE = {'rtol': 1e-5, 'atol': 1e-6}

# Compiling dominates the time of these tests, so that all have eight rewards.
_group_relative = jax.jit(advantages.group_relative)


class GroupRelativeTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_of_two_right_answers_in_eight(self):
    # Mean 1/4; variance (2 * 9/16 + 6 * 1/16) / 7 = 3/14, not 3/16.
    got = self.variant(advantages.group_relative)(
        jnp.array([1.0, 0, 0, 0, 1, 0, 0, 0]), _ONE_GROUP
    )
    chex.assert_type(got, jnp.float32)
    want = np.array([0.75, -0.25, -0.25, -0.25] * 2) / ((3 / 14) ** 0.5 + _EPS)
    np.testing.assert_allclose(got, want, rtol=1e-6)

  def test_of_two_is_plus_and_minus_one_over_root_two(self):
    # Dividing by n instead of n - 1 would give 1.
    got = _advantages([0.0, 1.0] * 4, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_allclose(got, [-(2**-0.5), 2**-0.5] * 4, rtol=1e-5)

  def test_eps_is_added_to_the_standard_deviation(self):
    rewards = jnp.array([1.0, 0, 0, 0, 1, 0, 0, 0])
    got = advantages.group_relative(rewards, _ONE_GROUP, eps=0.5)
    want = (rewards - 0.25) / ((3 / 14) ** 0.5 + 0.5)
    np.testing.assert_allclose(got, want, rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_groups_may_be_interleaved_and_of_any_size(self):
    group = np.array([5, 0, 5, 2, 0, 0, 5, 0])
    rewards = np.array([1.0, 0.25, 0.0, 3.0, 2.0, -1.0, 0.5, 0.0], np.float32)
    got = self.variant(advantages.group_relative)(rewards, group)
    want = _advantages_in_numpy(rewards, group)
    np.testing.assert_allclose(got, want, **_TOLERANCE)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(0.35, 0.7, 0.1, 1 / 3, 0.0, -1e8)
  def test_equal_rewards_give_exactly_zero(self, reward):
    # The standard deviation of eight float32 0.35 is 3e-8.
    got = self.variant(advantages.group_relative)(
        jnp.full(8, reward), _ONE_GROUP
    )
    np.testing.assert_array_equal(got, np.zeros(8))

  @parameterized.parameters(0.35, 0.7)
  def test_equal_rewards_have_gradient_zero(self, reward):
    gradient = _gradient(jnp.full(8, reward), _ONE_GROUP)
    np.testing.assert_array_equal(gradient, np.zeros(8))

  def test_an_equal_group_leaves_the_others_alone(self):
    group = np.array([1, 0, 0, 0, 1, 2, 2, 2])
    rewards = np.array([0.35, 1, 0, 1, 0.35, 3, 2, 1], np.float32)
    got = _advantages(rewards, group)
    np.testing.assert_array_equal(got[[0, 4]], [0, 0])
    want = _advantages_in_numpy(rewards, group)
    np.testing.assert_allclose(got, want, **_TOLERANCE)
    gradient = np.asarray(_gradient(rewards, group))
    np.testing.assert_array_equal(gradient[[0, 4]], [0, 0])
    self.assertTrue(np.all(np.isfinite(gradient)))

  def test_a_group_of_one_gives_zero(self):
    rewards, group = np.arange(0.5, 8), np.array([7, 1, 1, 3, 1, 4, 1, 1])
    alone = group != 1
    self.assertEqual(np.sum(alone), 3)
    np.testing.assert_array_equal(_advantages(rewards, group)[alone], [0] * 3)
    gradient = np.asarray(_gradient(np.float32(rewards), group))
    np.testing.assert_array_equal(gradient[alone], [0] * 3)
    self.assertTrue(np.all(np.isfinite(gradient)))

  def test_rewards_one_ulp_apart_are_neither_equal_nor_blown_up(self):
    other = np.nextafter(np.float32(0.35), np.float32(1))
    got = _advantages([0.35] * 7 + [other], _ONE_GROUP)
    self.assertGreater(np.min(np.abs(got)), 0)
    self.assertLess(np.max(np.abs(got)), 0.1)  # by the deviation alone: 2.5

  def test_one_other_reward_gets_what_eight_samples_allow(self):
    # The largest of n standardized values is (n - 1) / sqrt(n).
    got = _advantages([0.35] * 7 + [0.95], _ONE_GROUP)
    np.testing.assert_allclose(got[7], 7 / 8**0.5, rtol=1e-4)

  def test_permuting_rows_permutes_advantages(self):
    rng = np.random.default_rng(0)
    rewards, group = rng.uniform(0, 1, 8), rng.integers(0, 3, 8)
    order = rng.permutation(8)
    np.testing.assert_allclose(
        _advantages(rewards[order], group[order]),
        _advantages(rewards, group)[order],
        **_TOLERANCE,
    )

  def test_names_of_groups_do_not_matter(self):
    rng = np.random.default_rng(1)
    rewards, group = rng.uniform(0, 1, 8), rng.integers(0, 3, 8)
    names = np.array([7, 3, 0])
    np.testing.assert_array_equal(
        _advantages(rewards, names[group]), _advantages(rewards, group)
    )

  def test_jit_changes_no_bit(self):
    rng = np.random.default_rng(2)
    rewards = jnp.asarray(rng.normal(size=8), jnp.float32)
    group = jnp.asarray(rng.integers(0, 3, 8), jnp.int32)
    chex.assert_trees_all_equal(
        _group_relative(rewards, group),
        advantages.group_relative(rewards, group),
    )

  @chex.variants(with_jit=True, without_jit=True)
  def test_an_empty_batch_raises(self):
    with self.assertRaisesRegex(ValueError, 'empty'):
      self.variant(advantages.group_relative)(
          jnp.zeros(0), jnp.zeros(0, jnp.int32)
      )

  @parameterized.parameters((((3,), (2,)),), (((2, 3), (2, 3)),))
  def test_wrong_shapes_raise(self, shapes):
    with self.assertRaises(AssertionError):
      advantages.group_relative(
          jnp.zeros(shapes[0]), jnp.zeros(shapes[1], jnp.int32)
      )


@jax.jit
@jax.grad
def _gradient(rewards, group):
  weights = jnp.arange(1.0, rewards.size + 1)
  return jnp.sum(weights * advantages.group_relative(rewards, group))


def _advantages(rewards, group):
  rewards, group = np.asarray(rewards, np.float32), np.asarray(group)
  return np.asarray(_group_relative(rewards, group))


def _advantages_in_numpy(rewards, group):
  rewards = np.asarray(rewards, np.float64)
  result = np.zeros_like(rewards)
  for name in set(group.tolist()):
    mine = rewards[group == name]
    if mine.min() < mine.max():
      std = mine.std(ddof=1)
      result[group == name] = (mine - mine.mean()) / (std + _EPS)
  return result
