"""Tests of advantages."""

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax.rl import advantages
from tests.rl import numpy_oracle

_EPS = 1e-6
_ONE_GROUP = np.zeros(8, np.int32)
# float32 sums of a few rewards near 1, in another order.
_TOLERANCE = {'rtol': 1e-5, 'atol': 1e-6}

# Compiling dominates the time of these tests, so that all have eight rewards.
_group_relative = jax.jit(advantages.group_relative)
_compute = jax.jit(advantages.compute, static_argnames='config')
_metrics = jax.jit(advantages.group_metrics)
_CONFIGS = tuple(
    advantages.AdvantageConfig(name)
    for name in (
        'grpo',
        'dr_grpo',
        'leave_one_out',
        'reinforce_pp',
        'reinforce_pp_baseline',
    )
)


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


class ComputeTest(chex.TestCase):

  @parameterized.parameters(
      ('grpo', [0.5, -0.5, 0.0, 2.0, -2.0, 0.0, 0.0, 0.0]),
      ('dr_grpo', [0.5, -0.5, 0.0, 2.0, -2.0, 0.0, 0.0, 0.0]),
      # Each less the mean of the two others; 0 for the single one.
      ('leave_one_out', [1.0, -1.0, 0.0, 3.0, -3.0, 0.0, 0.0, 0.0]),
  )
  def test_by_hand(self, estimator, want):
    # Groups {1, 0}, {3, -1, 1}, {2} and the equal {5, 5}.
    rewards = jnp.array([1.0, 0, 2, 3, -1, 1, 5, 5])
    group = np.array([0, 0, 1, 2, 2, 2, 3, 3])
    if estimator == 'grpo':
      want = np.array(want) / (2 * [0.5**0.5 + _EPS] + 6 * [2.0 + _EPS])
    got = _compute(advantages.AdvantageConfig(estimator), rewards, group)
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, want, rtol=1e-6)

  @parameterized.parameters(0, 1)
  def test_reinforce_pp_by_hand(self, ddof):
    # Reward 8 has one token and reward 0 three: mean 2, and the variance is
    # (36 + 3 * 4) / (4 - ddof). Rows without a token get 0.
    mask = np.zeros((8, 4), bool)
    mask[0, 0], mask[1, :3] = True, True
    got = _compute(
        advantages.AdvantageConfig('reinforce_pp', ddof=ddof),
        jnp.array([8.0, 0, 1, 2, 3, 4, 5, 6]),
        _ONE_GROUP,
        mask=mask,
    )
    std = (48 / (4 - ddof)) ** 0.5 + _EPS
    np.testing.assert_allclose(got[:2], np.array([6, -2]) / std, rtol=1e-6)
    np.testing.assert_array_equal(got[2:], np.zeros(6))

  def test_reinforce_pp_baseline_sees_groups_only_by_their_mean(self):
    group, mask = np.array([0] * 4 + [1] * 4), np.ones((8, 4), bool)
    rewards = jnp.array([1.0, 0, 1, 0, 101, 100, 101, 100])
    config = advantages.AdvantageConfig('reinforce_pp_baseline', ddof=0)
    got = _compute(config, rewards, group, mask=mask)
    np.testing.assert_allclose(got, [1.0, -1.0] * 4, rtol=1e-5)

  def test_grpo_is_group_relative_bit_for_bit(self):
    rng = np.random.default_rng(0)
    rewards, group = jnp.float32(rng.normal(size=8)), rng.integers(0, 3, 8)
    got = _compute(_CONFIGS[0], rewards, group)
    chex.assert_trees_all_equal(got, _group_relative(rewards, group))

  @hypothesis.settings(
      max_examples=15, deadline=None, database=None, derandomize=True
  )
  @hypothesis.given(
      seed=st.integers(0, 2**32 - 1),
      levels=st.sampled_from([2, 3, 1000]),
      groups=st.integers(1, 8),
      ddof=st.sampled_from([0, 1]),
  )
  def test_equals_the_oracle(self, seed, levels, groups, ddof):
    rng = np.random.default_rng(seed)
    rewards = np.float32(rng.integers(0, levels, 8) / (levels - 1))
    group = rng.integers(0, groups, 8)
    valid = rng.random(8) < 0.8
    mask = np.arange(4) < rng.integers(0, 5, (8, 1))
    given = np.where(valid, rewards, np.nan)
    for config in _CONFIGS:
      if ddof == 0 and config.estimator in ('dr_grpo', 'leave_one_out'):
        continue
      config = advantages.AdvantageConfig(config.estimator, ddof)
      got = _compute(config, given, group, valid=valid, mask=mask)
      want = numpy_oracle.advantages(
          config.estimator, rewards, group, valid, mask, ddof
      )
      np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-6)
      np.testing.assert_array_equal(np.asarray(got)[~valid], 0)

  @parameterized.parameters(*_CONFIGS)
  def test_rejected_samples_change_no_bit(self, config):
    rng = np.random.default_rng(3)
    rewards, group = np.float32(rng.normal(size=8)), rng.integers(0, 3, 8)
    valid, mask = np.arange(8) % 3 > 0, np.ones((8, 4), bool)

    @jax.jit
    def run(rewards):
      fn = lambda rewards: advantages.compute(
          config, rewards, group, valid=valid, mask=mask
      )
      got, vjp = jax.vjp(fn, rewards)
      return got, *vjp(jnp.arange(8.0))

    want = run(rewards)
    for bad in (np.nan, np.inf, -np.inf):
      got = run(np.where(valid, rewards, np.float32(bad)))
      chex.assert_trees_all_equal(got, want)
      for x in got:
        np.testing.assert_array_equal(x[~valid], np.zeros(3))
        self.assertTrue(np.all(np.isfinite(x)))

  @parameterized.product(config=_CONFIGS, reward=(0.35, 0.7, 1 / 3))
  def test_report_a10_equal_rewards_give_exactly_zero(self, config, reward):
    mask = np.arange(4) < np.arange(1, 9)[:, None] % 4 + 1
    got = _compute(config, jnp.full(8, reward), _ONE_GROUP, mask=mask)
    np.testing.assert_array_equal(got, np.zeros(8))

  def test_report_a10_leave_one_out_is_not_blown_up(self):
    got = _compute(_CONFIGS[2], jnp.array([0.35] * 7 + [0.95]), _ONE_GROUP)
    np.testing.assert_allclose(got, [-0.6 / 7] * 7 + [0.6], rtol=1e-5)

  @parameterized.parameters(*_CONFIGS)
  def test_no_valid_sample_gives_zero(self, config):
    got = _compute(
        config,
        jnp.full(8, jnp.nan),
        _ONE_GROUP,
        valid=np.zeros(8, bool),
        mask=np.ones((8, 4), bool),
    )
    np.testing.assert_array_equal(got, np.zeros(8))

  @parameterized.parameters(*_CONFIGS)
  def test_a_nan_of_a_valid_sample_is_seen(self, config):
    rewards = jnp.array([jnp.nan, 0, 1, 0, 1, 0, 1, 0])
    mask = np.ones((8, 4), bool)
    got = _compute(config, rewards, _ONE_GROUP, mask=mask)
    self.assertTrue(np.all(np.isnan(got)))

  @parameterized.parameters(
      ({'estimator': 'ppo'}, "'ppo' is not one of .*leave_one_out"),
      ({'ddof': 2}, 'ddof 2'),
      ({'eps': -1.0}, 'eps -1.0'),
      ({'estimator': 'dr_grpo', 'ddof': 0}, 'not use ddof 0'),
      ({'estimator': 'leave_one_out', 'eps': 0.0}, 'not use eps 0.0'),
  )
  def test_bad_configs_raise(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      advantages.AdvantageConfig(**fields)

  @parameterized.parameters(*_CONFIGS[3:])
  def test_whitening_needs_the_mask(self, config):
    with self.assertRaisesRegex(ValueError, 'needs the mask'):
      advantages.compute(config, jnp.zeros(8), _ONE_GROUP)


class GroupsTest(chex.TestCase):

  def test_metrics_by_hand(self):
    # Groups {1, 0}, {7} alone, equal {2, 2}, and two rejected samples.
    got = _metrics(
        jnp.array([1.0, 0, 7, 2, 2, 100, jnp.nan, 1]),
        np.array([0, 0, 1, 2, 2, 1, 5, 0]),
        np.array([True] * 5 + [False, False, True]),
    )
    self.assertEqual(int(got['groups']), 3)
    self.assertEqual(int(got['groups_skipped']), 2)
    self.assertEqual(int(got['samples_rejected']), 2)
    np.testing.assert_allclose(got['frac_reward_zero_std'], 2 / 3)
    np.testing.assert_allclose(got['reward_mean'], 13 / 6)
    want = np.std([1, 0, 7, 2, 2, 1], ddof=1)
    np.testing.assert_allclose(got['reward_std'], want, rtol=1e-6)

  def test_metrics_equal_the_oracle(self):
    rng = np.random.default_rng(0)
    for _ in range(20):
      rewards = np.float32(rng.integers(0, 2, 8))
      group, valid = rng.integers(0, 5, 8), rng.random(8) < 0.7
      got = _metrics(np.where(valid, rewards, np.nan), group, valid)
      want = numpy_oracle.group_metrics(rewards, group, valid)
      self.assertEqual(got.keys(), want.keys())
      for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)

  def test_metrics_of_nothing_are_zero(self):
    got = _metrics(jnp.full(8, jnp.nan), _ONE_GROUP, np.zeros(8, bool))
    self.assertEqual(int(got.pop('samples_rejected')), 8)
    for value in got.values():
      self.assertEqual(float(value), 0)

  def test_informative_groups_are_those_with_an_advantage(self):
    rewards = jnp.array([1.0, 0, 7, 2, 2, 9, jnp.nan, 1])
    group = np.array([0, 0, 1, 2, 2, 2, 5, 0])
    valid = np.array([True] * 5 + [False, False, True])
    got = jax.jit(advantages.informative_groups)(rewards, group, valid)
    want = [True, True] + [False] * 5 + [True]
    np.testing.assert_array_equal(got, want)

  def test_one_answer_under_two_ids_stays_two_groups(self):
    # The same problem sampled twice: by id, never by prompt.
    got = advantages.informative_groups(
        jnp.array([1.0, 1, 0, 0]), np.array([0, 0, 1, 1])
    )
    np.testing.assert_array_equal(got, [False] * 4)

  @chex.variants(with_jit=True, without_jit=True)
  def test_overlong_penalty(self):
    lengths = np.array([0, 12, 13, 14, 16, 17, 1000])
    got = self.variant(lambda x: advantages.overlong_penalty(x, 16, 4))(lengths)
    chex.assert_type(got, jnp.float32)
    np.testing.assert_array_equal(got, [0, 0, -0.25, -0.5, -1, -1, -1])
    want = [numpy_oracle.overlong(n, 16, 4) for n in lengths]
    np.testing.assert_array_equal(got, want)

  @parameterized.parameters(0, -1, 17)
  def test_overlong_cache_out_of_range_raises(self, cache):
    with self.assertRaisesRegex(ValueError, f'cache {cache} '):
      advantages.overlong_penalty(jnp.zeros(1, jnp.int32), 16, cache)


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
