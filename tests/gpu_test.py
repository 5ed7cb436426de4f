"""What must hold on a GPU, with default XLA flags: `pytest -m gpu`."""

import dataclasses
import pathlib
import tempfile

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import grpo
from experiments import run
from nvfp4_jax import matmul
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from tests import golden_cases
from tests import numpy_oracle

_GOLDENS = {
    'nvfp4_te_1d': quantization.QuantSpec('nvfp4', 'tensor'),
    'nvfp4_te_rowscaled': quantization.QuantSpec('nvfp4', 'token'),
    'nvfp4_te_46_1d_mse_256_strict': quantization.QuantSpec(
        'nvfp4', 'tensor', 'mse'
    ),
    'nvfp4_te_46_row_mse_256_strict': quantization.QuantSpec(
        'nvfp4', 'token', 'mse'
    ),
}


@pytest.mark.gpu
class GpuTest(chex.TestCase):

  @parameterized.parameters(*_GOLDENS.items())
  def test_quantizer_gives_the_golden_bytes(self, file, spec):
    quantize = jax.jit(lambda x: quantization.quantize(x, spec))
    compared = 0
    for case in golden_cases.load(file):
      q = jax.tree.map(np.asarray, quantize(case.x))
      for name, got in (('codes', q.data), ('scales', q.block_scale)):
        np.testing.assert_array_equal(
            got.view(np.uint8), case.want[name], err_msg=f'{case.name} {name}'
        )
        compared += got.size
    self.assertGreater(compared, 60_000)

  @parameterized.parameters(*_GOLDENS.values())
  def test_quantizer_equals_numpy_on_five_million_bytes(self, spec):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, 2304)) * np.exp(3 * rng.normal(size=(4096, 1)))
    x = jnp.asarray(x, jnp.bfloat16)
    q = jax.jit(lambda x: quantization.quantize(x, spec))(x)
    data, scales, global_scale = numpy_oracle.quantize(x, spec)
    self.assertGreater(data.size + scales.size, 5_000_000)
    np.testing.assert_array_equal(q.data, data)
    np.testing.assert_array_equal(
        np.asarray(q.block_scale).view(np.uint8), scales
    )
    np.testing.assert_array_equal(q.global_scale, global_scale)

  def test_matmul_has_exact_products(self):
    spec = quantization.QuantSpec('nvfp4', 'token', 'mse')
    precision = matmul.MatmulPrecision(
        spec, dataclasses.replace(spec, outer='tensor')
    )
    kx, kw = jax.random.split(jax.random.key(0))
    x = jax.random.normal(kx, (512, 1024), jnp.bfloat16)
    w = jax.random.normal(kw, (256, 1024), jnp.bfloat16)
    fn = lambda x, w: matmul.quantized_matmul(x, w, precision)
    y = jax.jit(fn)(x.astype(jnp.float32), w.astype(jnp.float32))
    xq = qtensor.dequantize(
        quantization.quantize(x, precision.lhs), jnp.float32
    )
    wq = qtensor.dequantize(
        quantization.quantize(w, precision.rhs), jnp.float32
    )
    want = np.asarray(xq, np.float64) @ np.asarray(wq, np.float64).T
    self.assertLess(np.abs(y - want).max(), 1e-5 * np.abs(want).max())

  def test_smoke_preset_runs(self):
    with tempfile.TemporaryDirectory() as folder:
      workdir = pathlib.Path(folder) / 'run'
      run.launch(grpo.main, grpo.PRESETS, ['smoke', f'--workdir={workdir}'])
      rows = run.read_rows(workdir / 'metrics.jsonl')
    self.assertLen(rows, grpo.PRESETS['smoke'][1].steps)
    for row in rows:
      self.assertTrue(all(np.isfinite(value) for value in row.values()))
