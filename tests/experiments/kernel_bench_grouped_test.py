"""The benchmark of grouped matmuls runs, and its rows say what they should."""

from absl.testing import absltest
import chex
import jax
import numpy as np

from experiments import kernel_bench_grouped
from tests.experiments import smoke


class KernelBenchGroupedTest(chex.TestCase):

  def test_smoke_times_every_workload_and_compares_it(self):
    rows = smoke.rows(kernel_bench_grouped)
    workloads = {row['workload'] for row in rows} - {'machine', 'copy'}
    self.assertLen(workloads, 8)
    for name in workloads:
      mine = {r['candidate']: r for r in rows if r['workload'] == name}
      for candidate in ('reference', 'dense ideal'):
        self.assertIn('us', mine[candidate])
      self.assertEqual(mine['reference']['different'], 0)
      self.assertNotIn('different', mine['dense ideal'])
      if 'W4A4' not in name:
        self.assertLess(mine['lax.ragged_dot']['error'], 1e-5)
      if jax.default_backend() == 'cpu' and 'ragged_dot_mgpu 64' in mine:
        self.assertIn('error', mine['ragged_dot_mgpu 64'])

  def test_sizes_are_those_of_all_rows_and_one_is_empty(self):
    sizes = kernel_bench_grouped.group_sizes(32768, 128)
    self.assertEqual(sizes.sum(), 32768)
    self.assertEqual(np.sum(sizes == 0), 1)


if __name__ == '__main__':
  absltest.main()
