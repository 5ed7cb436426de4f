"""The benchmark on CPUs runs, and its rows say what they should."""

from absl.testing import absltest
import chex
import pytest

from experiments import kernel_bench_cpu
from tests.experiments import smoke

# Times of a smoke run mean nothing.
pytestmark = pytest.mark.quick_compile


class KernelBenchCpuTest(chex.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.rows = smoke.rows(kernel_bench_cpu)

  def test_every_workload_is_timed_and_a_missing_peer_is_named(self):
    workloads = {row['workload'].split(' ')[0] for row in self.rows[1:]}
    expected = {'copy', 'quantize', 'linear', 'grouped', 'export'}
    self.assertEqual(workloads, expected)
    for row in self.rows:
      self.assertContainsSubset({'jax', 'qwix', 'load'}, row)
    for row in self.rows[1:]:
      if row['qwix'] is None and row['candidate'].startswith('qwix'):
        self.assertIn('qwix', row['error'])
      else:
        self.assertIn('us', row)

  def test_peers_compute_the_same_groups(self):
    row = next(r for r in self.rows if r.get('candidate') == 'lax.ragged_dot')
    self.assertLess(row['error'], 1e-5)

  def test_bytes_of_residuals_are_those_of_what_is_kept(self):
    kept = {
        row['candidate']: row['residual_bytes']
        for row in self.rows
        if row['workload'].startswith('linear') and 'residual_bytes' in row
    }
    m, n, k = kernel_bench_cpu.PRESETS['smoke'][1].linear
    nvfp4 = lambda rows: rows * (k // 2 + k // 16)  # codes and block scales
    xq, wq = nvfp4(m) + 4 * m, nvfp4(n) + 4
    self.assertEqual(kept['nvfp4 dequantized'], xq + wq)
    self.assertEqual(kept['nvfp4 dequantized, wq given'], xq)
    self.assertEqual(kept['nvfp4 high_precision'], 2 * m * k)
    self.assertEqual(kept['jax bf16'], 2 * m * k)


if __name__ == '__main__':
  absltest.main()
