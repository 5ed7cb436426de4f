"""The benchmark of kernels runs, and its rows say what they should."""

from absl.testing import absltest
import chex
import jax

from experiments import kernel_bench
from tests.experiments import smoke


class KernelBenchTest(chex.TestCase):

  def test_smoke_times_every_workload_and_compares_it(self):
    rows = smoke.rows(kernel_bench)
    names = {row['workload'].split()[0] for row in rows}
    self.assertEqual(
        names, {'machine', 'copy', 'quantize', 'linear', 'decode', 'rows'}
    )
    timed = [row for row in rows if 'us' in row]
    self.assertLen(timed, 1 + 5 + 2 + 2 * 3)
    for row in timed:
      self.assertLessEqual(row['min_us'], row['us'])
      self.assertLessEqual(row['us'], row['max_us'])
    reference = [r for r in rows if r.get('candidate') == 'reference']
    self.assertEqual({row['different'] for row in reference}, {0})

  def test_what_cannot_run_is_a_row_with_the_reason(self):
    if jax.default_backend() != 'cpu':
      self.skipTest('Triton runs here.')
    rows = smoke.rows(
        kernel_bench, implementations=('triton',), only='per token'
    )
    rows = [row for row in rows if row.get('candidate') == 'triton']
    self.assertLen(rows, 2)
    for row in rows:
      self.assertIn('NotImplementedError', row['error'])

  def test_only_chooses_workloads(self):
    rows = smoke.rows(kernel_bench, only='mxfp8')
    self.assertEqual(
        {row['workload'] for row in rows}, {'machine', 'copy', 'quantize mxfp8'}
    )


if __name__ == '__main__':
  absltest.main()
