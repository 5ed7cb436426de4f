"""The benchmark of a linear layer runs, and its rows say what they should."""

from absl.testing import absltest
import chex
import pytest

from experiments import kernel_bench_linear
from tests.experiments import smoke

# Times of a smoke run mean nothing.
pytestmark = pytest.mark.quick_compile


class KernelBenchLinearTest(chex.TestCase):

  def test_bytes_of_residuals_are_those_of_what_is_kept(self):
    rows = smoke.rows(kernel_bench_linear)
    kept = {row['candidate']: row.get('residual_bytes') for row in rows[1:]}
    m, n, k = kernel_bench_linear.PRESETS['smoke'][1].linear
    nvfp4 = lambda rows: rows * (k // 2 + k // 16)  # codes and block scales
    xq, wq = nvfp4(m) + 4 * m, nvfp4(n) + 4
    self.assertEqual(kept['nvfp4 dequantized'], xq + wq)
    self.assertEqual(kept['nvfp4 dequantized, wq given'], xq)
    self.assertEqual(kept['nvfp4 high_precision'], 2 * m * k)
    self.assertEqual(kept['jax bf16'], 2 * m * k)
    self.assertIn('qwix nvfp4', kept)  # or its error


if __name__ == '__main__':
  absltest.main()
