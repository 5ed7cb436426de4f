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


if __name__ == '__main__':
  absltest.main()
