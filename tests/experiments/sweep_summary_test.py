"""Tests of sweep_summary."""

import math

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from experiments import sweep_summary


def _curves(reward, **changes):
  steps = len(reward)
  names = ('mismatch_abs_logprob', 'mismatch_kl', 'ref_kl', 'ref_kl_median')
  names += ('entropy', 'clip_fraction', 'skipped')
  curves = {name: np.zeros(steps) for name in names}
  curves |= {'reward': np.asarray(reward), 'grad_norm': np.ones(steps)}
  return curves | changes


def _summary(reward, **changes):
  accuracies = {'pass_at_1': np.array([0.1, 0.3])}
  return sweep_summary.summarize(_curves(reward, **changes), accuracies)


class SummarizeTest(parameterized.TestCase):

  def test_means_of_the_last_steps(self):
    row = _summary(np.arange(100) / 100)
    self.assertAlmostEqual(row['start_reward'], 0.095)
    self.assertAlmostEqual(row['end_reward'], 0.895)
    self.assertEqual(row['pass_at_1'], 0.3)
    self.assertEqual(row['collapsed'], 0.0)
    self.assertIsNone(row['collapse_step'])

  def test_collapse_is_a_fall_below_half_of_the_best(self):
    row = _summary(np.r_[np.full(40, 0.75), np.zeros(40)])
    self.assertEqual(row['collapsed'], 1.0)
    # The mean of 20 steps is below .375 when 11 of them are 0.
    self.assertEqual(row['collapse_step'], 50)
    self.assertAlmostEqual(row['best_reward'], 0.75)

  @parameterized.parameters((0.8, 0.5), (0.09, 0.0))
  def test_no_collapse(self, high, low):
    row = _summary(np.r_[np.full(40, high), np.full(40, low)])
    self.assertEqual(row['collapsed'], 0.0)

  def test_grad_norm_spread_is_around_a_local_median(self):
    self.assertEqual(_summary(np.ones(50))['grad_norm_spread'], 0.0)
    norms = np.where(np.arange(300) % 10 == 0, math.e, 1.0)
    row = _summary(np.ones(300), grad_norm=norms)
    self.assertAlmostEqual(row['peak_grad_norm'], math.e)
    self.assertAlmostEqual(row['grad_norm_spread'], 0.3)  # sqrt(.1 * .9)
    # A slow rise is no spread; what is 0 or not finite is left out.
    norms = np.exp(np.arange(300) / 100)
    norms[5], norms[7] = 0.0, np.inf
    row = _summary(np.ones(300), grad_norm=norms)
    self.assertLess(row['grad_norm_spread'], 0.05)
    self.assertAlmostEqual(row['peak_grad_norm'], math.exp(2.99))

  def test_what_is_not_finite_is_none(self):
    row = _summary(np.ones(5), ref_kl=np.full(5, np.nan))
    self.assertIsNone(row['ref_kl'])


class TableTest(absltest.TestCase):

  def _rows(self, recipe, values):
    return [
        {
            'recipe': recipe,
            'scope': 'all',
            'setting': 'base',
            'warm_start': start,
            'seed': seed,
            'end_reward': value,
            'collapse_step': None,
        }
        for start, seeds in enumerate(values)
        for seed, value in enumerate(seeds)
    ]

  def test_warm_starts_are_the_unit(self):
    rows = self._rows('bf16', [(0.5, 0.7), (0.9, 0.9), (0.2, 0.4)])
    rows += self._rows('other', [(0.5, 0.5), (0.8, 0.8), (0.2, 0.2)])
    bf16, other = sweep_summary.table(rows)
    self.assertEqual((bf16['warm_starts'], bf16['runs']), (3, 6))
    self.assertAlmostEqual(bf16['end_reward'], 0.6)
    # Means 0.6, 0.9, 0.3: s = 0.3, t = 4.303.
    self.assertAlmostEqual(
        bf16['end_reward_interval'],
        4.303 * 0.3 / math.sqrt(3),
        places=3,
    )
    self.assertAlmostEqual(other['end_reward_difference'], -0.1)
    self.assertAlmostEqual(other['end_reward_difference_interval'], 0.0)
    self.assertIn('-0.100 +- 0.000', sweep_summary.text(_full(bf16, other)))

  def test_one_warm_start_has_no_interval(self):
    (line,) = sweep_summary.table(self._rows('other', [(0.5, 0.7)]))
    self.assertIsNone(line['end_reward_interval'])
    self.assertIsNone(line['end_reward_difference'])


def _full(*lines):
  """Returns lines with all columns that are printed."""
  names = ('pass_at_1', 'greedy_accuracy', 'best_reward', 'collapsed')
  names += ('peak_grad_norm', 'grad_norm_spread', 'mismatch_mean')
  return [dict.fromkeys((*names, 'ref_kl_median')) | line for line in lines]


if __name__ == '__main__':
  absltest.main()
