"""Tests of metrics."""

import functools
import itertools

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import diagnostics
from nvfp4_jax.rl import metrics
from tests.rl import numpy_oracle

_mismatch = functools.partial(
    jax.jit(metrics.mismatch, static_argnames='cap'), cap=1.2
)


class MismatchTest(chex.TestCase):

  def test_by_hand(self):
    # Ratios 2 and 1/2.
    learner = jnp.log(jnp.array([[0.4, 0.25, 0.9]]))
    sampler = jnp.log(jnp.array([[0.2, 0.5, 0.1]]))
    mask = np.array([[True, True, False]])
    want = {
        'train_rollout_logprob_abs_diff': np.log(2),
        'train_rollout_logprob_abs_diff_max': np.log(2),
        'train_rollout_k1': 0.0,
        'train_rollout_kl': (1 - 0.5) / 2,
        'token_mult_prob_error': 2.0,
        'ess_ratio': 2.5**2 / (2 * 4.25),
        'chi_square': 4.25 / 2 - 1,
        'logprob_pearson': -1.0,
        'tis_clipfrac': 0.5,
        'ratio_clamped': 0,
        'missing_logprobs': 0,
    }
    got = _mismatch(learner, sampler, mask)
    self.assertEqual(got.keys(), want.keys())
    for name, value in want.items():
      np.testing.assert_allclose(
          got[name], value, rtol=1e-5, atol=1e-6, err_msg=name
      )
    self.assertNotIn('tis_clipfrac', metrics.mismatch(learner, sampler, mask))

  @hypothesis.settings(
      max_examples=20, deadline=None, database=None, derandomize=True
  )
  @hypothesis.given(
      seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-3, 0.3, 3.0])
  )
  def test_equals_the_oracle(self, seed, scale):
    learner, sampler, _, mask = numpy_oracle.ragged(seed, scale=scale, bad=True)
    live = mask & np.isfinite(learner) & np.isfinite(sampler)
    hypothesis.assume(live.sum() > 2)
    got = _mismatch(learner, sampler, mask)
    want = numpy_oracle.mismatch(learner, sampler, mask, 1.2)
    self.assertEqual(got.keys(), want.keys())
    for name, value in want.items():
      np.testing.assert_allclose(
          got[name], value, rtol=2e-3, atol=2e-6, err_msg=name
      )

  def test_small_gaps_do_not_cancel(self):
    gap = np.full((1, 3), 2.0**-10, np.float32)
    got = _mismatch(gap, 0 * gap, np.ones((1, 3), bool))
    np.testing.assert_allclose(got['train_rollout_kl'], 2.0**-21, rtol=2e-3)
    gap = np.full((1, 3), 2.0**-16, np.float32)
    got = _mismatch(gap, 0 * gap, np.ones((1, 3), bool))
    np.testing.assert_allclose(got['chi_square'], 2.0**-15, rtol=1e-4)

  def test_equal_log_probs(self):
    learner, _, _, mask = numpy_oracle.ragged(0)
    got = _mismatch(learner, learner, mask)
    ones = ('token_mult_prob_error', 'ess_ratio', 'logprob_pearson')
    for name, value in got.items():
      np.testing.assert_allclose(value, float(name in ones), rtol=1e-6)

  def test_is_that_of_diagnostics_bit_for_bit(self):
    learner, sampler, _, mask = numpy_oracle.ragged(0)
    got = _mismatch(learner, sampler, mask)
    for name, function in (
        ('train_rollout_logprob_abs_diff', diagnostics.logprob_gap),
        ('train_rollout_kl', diagnostics.kl_k3),
    ):
      want = jax.jit(function)(learner, sampler, mask)
      np.testing.assert_array_equal(got[name], want, name)

  def test_values_under_the_mask_change_no_bit(self):
    learner, sampler, _, mask = numpy_oracle.ragged(1)
    learner, sampler = (np.where(mask, x, 0) for x in (learner, sampler))
    want = _mismatch(learner, sampler, mask)
    for bad in (np.nan, np.inf, -np.inf, 1e30):
      fill = lambda x, bad=bad: np.where(mask, x, np.float32(bad))
      for given in ((fill(learner), sampler), (learner, fill(sampler))):
        chex.assert_trees_all_equal(_mismatch(*given, mask), want)

  def test_report_13_missing_log_probs_are_left_out_and_counted(self):
    learner = np.float32([[-1.0, -2.0, np.nan, -1.5]])
    sampler = np.float32([[-1.5, -1.0, -1.0, -np.inf]])
    got = _mismatch(learner, sampler, np.ones((1, 4), bool))
    self.assertEqual(int(got.pop('missing_logprobs')), 2)
    want = _mismatch(learner, sampler, np.isfinite(learner + sampler))
    for name, value in got.items():
      self.assertEqual(value, want[name], name)

  def test_extreme_gaps_stay_finite_and_are_counted(self):
    gap = np.float32([[200.0, -200.0, 1e4, -1e4, 0.0]])
    got = _mismatch(gap, 0 * gap, np.ones((1, 5), bool))
    self.assertEqual(int(got['ratio_clamped']), 4)
    for name, value in got.items():
      self.assertTrue(np.isfinite(value), name)

  def test_nothing_trained_gives_zero(self):
    learner, sampler, _, mask = numpy_oracle.ragged(0)
    for name, value in _mismatch(learner, sampler, 0 * mask > 0).items():
      self.assertEqual(float(value), 0, name)

  def test_one_token_and_constants_have_no_correlation(self):
    for shape in ((1, 1), (1, 7)):
      x = np.full(shape, -0.1, np.float32)
      got = _mismatch(x, x - np.float32(0.3), np.ones(shape, bool))
      self.assertEqual(float(got['logprob_pearson']), 0)


class PassAtKTest(chex.TestCase):

  @parameterized.parameters(
      (4, 1, 1, 0.25),
      (4, 1, 2, 0.5),
      (4, 2, 2, 5 / 6),
      (4, 0, 4, 0.0),
      (4, 1, 4, 1.0),
      (5, 3, 3, 1.0),
      (1, 1, 1, 1.0),
  )
  def test_by_hand(self, n, c, k, want):
    got = metrics.pass_at_k(n, c, k)
    self.assertEqual(got.dtype, np.float64)
    np.testing.assert_array_equal(got, want)

  def test_is_the_share_of_subsets_with_a_right_one(self):
    for n in range(1, 8):
      for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        hits = [
            any(i < c for i in subset)
            for subset in itertools.combinations(range(n), k)
        ]
        np.testing.assert_allclose(
            metrics.pass_at_k(n, c, k), np.mean(hits), rtol=1e-15
        )

  def test_is_exact_for_many_samples(self):
    # 1 - c / n for k = n - 1... in floats the binomials would overflow.
    got = metrics.pass_at_k(np.array([5000, 5000]), np.array([1, 2500]), 2500)
    np.testing.assert_array_equal(got, [0.5, 1.0])

  def test_broadcasts(self):
    got = metrics.pass_at_k(4, np.array([[0, 1], [2, 4]]), 2)
    np.testing.assert_allclose(got, [[0, 0.5], [5 / 6, 1]], rtol=1e-15)

  @parameterized.parameters(
      (4, 1, 5, r'k 5 is not in \[1, 4 '),
      (4, 1, 0, 'k 0 is not in'),
      (4, 5, 2, 'num_correct 5 is not in'),
      (4, -1, 2, 'num_correct -1 is not in'),
      (4.0, 1, 2, 'not ints'),
  )
  def test_bad_counts_raise(self, n, c, k, message):
    with self.assertRaisesRegex(ValueError, message):
      metrics.pass_at_k(n, c, k)

  def test_k_above_any_n_raises(self):
    with self.assertRaisesRegex(ValueError, 'k 3 is not in'):
      metrics.pass_at_k(np.array([8, 2]), np.array([1, 1]), 3)

  def test_avg_at_k_is_the_mean_of_the_first_k(self):
    rewards = [[1, 0, 0, 1], [1, 1, 0, 0]]
    self.assertEqual(metrics.avg_at_k(rewards, 2), 0.75)
    self.assertEqual(metrics.avg_at_k(rewards, 4), 0.5)
    correct = np.sum(rewards, axis=1)
    self.assertEqual(np.mean(metrics.pass_at_k(4, correct, 1)), 0.5)

  @parameterized.parameters(0, 5)
  def test_avg_at_k_out_of_range_raises(self, k):
    with self.assertRaisesRegex(ValueError, f'k {k} is not in'):
      metrics.avg_at_k(np.zeros((2, 4)), k)

  def test_avg_at_k_of_no_problems_raises(self):
    with self.assertRaisesRegex(ValueError, 'problems'):
      metrics.avg_at_k(np.zeros((0, 4)), 1)
