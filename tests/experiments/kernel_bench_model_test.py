"""The benchmark of whole models runs, and its rows say what they should."""

import math
from unittest import mock

from absl.testing import absltest
import chex
import jax
import pytest

from experiments import kernel_bench_model
from tests.experiments import smoke

# Times of a smoke run mean nothing.
pytestmark = pytest.mark.quick_compile

_MODEL = '0.033 M bfloat16'
_SYNC = f'weight sync {_MODEL}'
_ROLLOUT = f'rollout {_MODEL}, 8 + 4, B = 2'
_LONG = f'{_ROLLOUT}, cache of 32'
_STEP = f'GRPO step {_MODEL}, 8 + 4, 1 x 2'


class KernelBenchModelTest(chex.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    device = jax.devices()[0].device_kind
    recorded = {device: {_ROLLOUT: (50.0, 8.0), _STEP: (20.0, 9.0)}}
    with mock.patch.object(kernel_bench_model, '_RECORDED', recorded):
      cls.rows = smoke.rows(kernel_bench_model)[1:]

  def test_every_workload_of_every_recipe_is_timed(self):
    self.assertEqual(
        [(row['candidate'], row['workload']) for row in self.rows],
        [
            *(('bf16', name) for name in (_SYNC, _ROLLOUT, _LONG, _STEP)),
            *(('nvfp4_w4a16', name) for name in (_SYNC, _ROLLOUT)),
        ],
    )
    for row in self.rows:
      self.assertNotIn('error', row)
      for name, value in row.items():
        if name not in ('workload', 'candidate', 'step', 'load'):
          self.assertTrue(math.isfinite(value) and value > 0, (name, value))
      self.assertLessEqual(row['min_ms'], row['ms'])
      self.assertLessEqual(row['ms'], row['max_ms'])

  def test_tokens_are_those_that_were_generated(self):
    for row in self.rows:
      if row['workload'] != _SYNC:
        tokens = 1e-3 * row['ms'] * row['tokens_per_s']
        self.assertAlmostEqual(tokens, 2 * 4, places=5)

  def test_ratios_are_those_of_the_recorded_peer(self):
    for row in self.rows:
      self.assertEqual('cache_ratio' in row, row['workload'] == _LONG)
      if row['workload'] in (_SYNC, _LONG):
        self.assertNotIn('recorded_peer', row)
        continue
      self.assertAlmostEqual(
          row['peer_ratio'] * row['recorded_peer'], row['tokens_per_s']
      )
      self.assertAlmostEqual(
          row['peer_first_ratio'] * row['first_call_s'],
          row['recorded_peer_first_s'],
      )

  def test_recorded_peers_are_of_workloads_of_the_presets(self):
    for preset, device in (('h200', 'NVIDIA H200'), ('cpu', 'cpu')):
      cfg = kernel_bench_model.PRESETS[preset][1]
      names = {name for name, *_ in kernel_bench_model.workloads(cfg)}
      recorded = kernel_bench_model._RECORDED[device]
      self.assertContainsSubset(recorded, names)

  def test_what_cannot_run_is_a_row_with_the_reason(self):
    rows = smoke.rows(
        kernel_bench_model, only='cache', long_cache=8, recipes=('bf16',)
    )
    self.assertLen(rows, 2)
    self.assertIn('do not fit a cache of 8', rows[1]['error'])


if __name__ == '__main__':
  absltest.main()
