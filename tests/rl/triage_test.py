"""Tests of triage."""

import functools

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax.rl import triage
from tests.rl import numpy_oracle

_Config = triage.TriageConfig
_CONFIGS = (
    _Config(window=1),
    _Config(0.2, window=0, strength=1.0, severe=0.4, repair_bounds=(0.1, 3.0)),
    _Config(None, 0.9, window=2),
    _Config(None, 0.5, window=1, severe=1.0),
)


class TriageTest(chex.TestCase):

  def test_by_hand(self):
    # Tails at 2 and 8; 4 is severe as well. Row 1 contracts, at its end.
    gap = np.zeros((2, 10), np.float32)
    gap[0, [2, 4]] = 1.0, 3.0
    gap[1, [8, 9]] = 1.0, 0.5
    got = _run(
        _Config(window=1), gap, 0 * gap, _ones(gap), jnp.array([1.0, -1])
    )
    segments = np.zeros((2, 10), int)
    segments[0, 1:6], segments[1, 7:] = 1, 2
    np.testing.assert_array_equal(got.segments, segments)
    weights = np.ones((2, 10))
    weights[0, 1:6], weights[1, 7:] = 0.5, 1.5  # 1 -+ strength
    # Token 4: exp(3) is held at 1, so that its weight stays.
    np.testing.assert_allclose(got.weights, weights, rtol=1e-6)
    metrics = {name: float(value) for name, value in got.metrics.items()}
    self.assertEqual(metrics['triage_segments'], 2)
    self.assertEqual(metrics['triage_segment_length'], 4)
    self.assertEqual(metrics['triage_segment_length_max'], 5)
    self.assertEqual(metrics['triage_repaired'], 1)
    np.testing.assert_allclose(metrics['triage_touched'], 8 / 20)
    np.testing.assert_allclose(
        [
            metrics['triage_mass_positive_positive'],
            metrics['triage_mass_negative_positive'],
            metrics['triage_mass_positive_negative'],
            metrics['triage_mass_negative_negative'],
        ],
        [4 / 5.5, 1.5 / 5.5, 0, 0],
        rtol=1e-6,
    )

  @parameterized.parameters(
      (1.0, 1.0, 0.5), (-1.0, -1.0, 0.5), (1.0, -1.0, 1.5), (-1.0, 1.0, 1.5)
  )
  def test_amplifying_quadrants_lose_and_contracting_ones_gain(
      self, advantage, gap, want
  ):
    got = _run(
        _Config(window=1),
        np.full((2, 10), gap, np.float32),
        np.zeros((2, 10), np.float32),
        np.ones((2, 10), bool),
        np.full(2, advantage),
    )
    np.testing.assert_allclose(got.weights, np.full((2, 10), want), rtol=1e-6)

  def test_repair_is_the_importance_weight_within_its_bounds(self):
    gap = np.zeros((2, 10), np.float32)
    gap[0, :4] = -2.5, -1.0, 2.5, -9.0
    config = _Config(9.5, severe=0.5, repair_bounds=(0.1, 3.0))
    got = _run(config, gap, 0 * gap, _ones(gap), jnp.ones(2))
    want = [0.1, np.exp(-1), 3.0, 0.1]
    np.testing.assert_allclose(got.weights[0, :4], want, rtol=1e-6)
    np.testing.assert_array_equal(got.weights[0, 4:], np.ones(6))

  @hypothesis.settings(
      max_examples=15, deadline=None, database=None, derandomize=True
  )
  @hypothesis.given(
      seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.1, 0.5, 2.0])
  )
  def test_equals_the_oracle_and_is_bounded(self, seed, scale):
    batch = numpy_oracle.ragged(seed, (2, 10), scale, bad=True)
    learner, sampler, advantage, mask = batch
    hypothesis.assume(
        (mask & np.isfinite(learner) & np.isfinite(sampler)).any()
    )
    for config in _CONFIGS:
      got = _run(config, learner, sampler, mask, advantage)
      weights, segments, metrics = numpy_oracle.triage(
          config, learner, sampler, mask, advantage
      )
      np.testing.assert_array_equal(got.segments, segments)
      np.testing.assert_allclose(got.weights, weights, rtol=1e-4, atol=1e-5)
      for name, value in got.metrics.items():
        np.testing.assert_allclose(
            value, metrics.get(name, 0.0), rtol=1e-4, atol=1e-6, err_msg=name
        )
      self.assertEmpty(metrics.keys() - got.metrics.keys())
      low, high = config.repair_bounds
      slack = 1e-6
      inside = (got.weights >= (1 - config.strength) * low - slack) & (
          got.weights <= (1 + config.strength) * max(high, 1) + slack
      )
      self.assertTrue(np.all(inside))

  def test_masked_and_missing_tokens_end_a_segment(self):
    gap = np.ones((2, 10), np.float32)
    mask = _ones(gap)
    mask[0, 3], gap[0, 6] = False, np.nan
    got = _run(_Config(window=1), gap, 0 * gap, mask, jnp.ones(2))
    want = [1] * 3 + [0] + [2] * 2 + [0] + [3] * 3
    np.testing.assert_array_equal(got.segments, [want, [4] * 10])
    np.testing.assert_array_equal(got.weights[0, [3, 6]], [1, 1])
    self.assertEqual(int(got.metrics['missing_logprobs']), 1)

  def test_equal_log_probs_and_equal_gaps_have_no_tail(self):
    # Equal gaps are above a threshold, but never above their quantile.
    ones = np.ones((2, 10), np.float32)
    for config in _CONFIGS:
      got = _run(config, ones, ones, _ones(ones), jnp.ones(2))
      np.testing.assert_array_equal(got.weights, ones)
      self.assertEqual(int(got.metrics['triage_segments']), 0)
    got = _run(_CONFIGS[2], ones, 0 * ones, _ones(ones), jnp.ones(2))
    self.assertEqual(int(got.metrics['triage_segments']), 0)

  def test_without_advantage_nothing_is_rebalanced(self):
    gap = np.ones((2, 10), np.float32)
    got = _run(_CONFIGS[0], gap, 0 * gap, _ones(gap), jnp.zeros(2))
    np.testing.assert_array_equal(got.weights, gap)
    self.assertEqual(int(got.metrics['triage_segments']), 2)

  @parameterized.parameters(*_CONFIGS)
  def test_values_under_the_mask_change_no_bit(self, config):
    *batch, advantage, mask = numpy_oracle.ragged(1, (2, 10))
    batch = [np.where(mask, x, 0) for x in batch]
    want = _run(config, *batch, mask, advantage)
    for argument in range(2):
      for bad in (np.nan, np.inf, -np.inf, 1e30):
        given = list(batch)
        given[argument] = np.where(mask, batch[argument], np.float32(bad))
        got = _run(config, *given, mask, advantage)
        chex.assert_trees_all_equal(got, want)
    np.testing.assert_array_equal(want.weights[~mask], 1)

  def test_advantages_under_the_mask_change_no_bit(self):
    *batch, advantage, mask = numpy_oracle.ragged(1, (2, 10))
    advantage = np.broadcast_to(advantage[:, None], mask.shape)
    want = _run(_CONFIGS[0], *batch, mask, advantage)
    for bad in (np.nan, np.inf, -np.inf):
      given = np.where(mask, advantage, np.float32(bad))
      got = _run(_CONFIGS[0], *batch, mask, given)
      chex.assert_trees_all_equal(got, want)

  @parameterized.parameters(*_CONFIGS)
  def test_extreme_gaps_and_empty_batches(self, config):
    gap = np.zeros((2, 10), np.float32)
    gap[0, :4] = 200, -200, 1e4, -1e4
    got = _run(config, gap, 0 * gap, _ones(gap), jnp.ones(2))
    for leaf in jax.tree.leaves(got):
      self.assertTrue(np.all(np.isfinite(leaf)))
    empty = _run(config, gap, 0 * gap, ~_ones(gap), jnp.ones(2))
    np.testing.assert_array_equal(empty.weights, np.ones((2, 10)))
    for name, value in empty.metrics.items():
      self.assertEqual(float(value), 0, name)
    one = ~_ones(gap)
    one[0, 0] = True
    alone = _run(config, gap, 0 * gap, one, jnp.ones(2))
    self.assertTrue(np.isfinite(alone.weights[0, 0]))

  def test_has_no_gradient(self):
    fn = lambda x: triage.triage(_CONFIGS[2], x, 0 * x, _ones(x), x[:, 0])
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(fn(x).weights)))(
        np.linspace(-3, 3, 20, dtype=np.float32).reshape(2, 10)
    )
    np.testing.assert_array_equal(gradient, np.zeros((2, 10)))

  @parameterized.parameters(
      ({'quantile': 0.9}, 'Exactly one of threshold 0.5 and quantile 0.9'),
      ({'threshold': None}, 'Exactly one'),
      ({'threshold': -1.0}, 'threshold -1.0'),
      ({'threshold': None, 'quantile': 1.0}, 'quantile 1.0'),
      ({'window': -1}, 'window -1'),
      ({'strength': 1.5}, 'strength 1.5'),
      ({'severe': 0.0}, 'severe 0.0'),
      ({'repair_bounds': (0.5, float('inf'))}, 'repair_bounds'),
      ({'repair_bounds': (1.5, 2.0)}, 'repair_bounds'),
  )
  def test_bad_configs_raise(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      _Config(**fields)


def _ones(x):
  return np.ones(x.shape, bool)


@functools.partial(jax.jit, static_argnums=0)
def _run(config, learner, sampler, mask, advantages):
  return triage.triage(config, learner, sampler, mask, advantages)
