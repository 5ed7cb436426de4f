"""Triton's quantizers in its interpreter: `make aot`.

Run with TRITON_INTERPRET=1; compilation_test.py covers what is compiled.
"""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import quantization
from tests import golden_cases
from tests import numpy_oracle
from tests.kernels import cases

triton = pytest.importorskip('triton')
if not triton.knobs.runtime.interpret:
  pytest.skip('TRITON_INTERPRET is not set.', allow_module_level=True)

from nvfp4_jax.kernels import triton_quantize  # noqa: E402
from tests.kernels import interpreter  # noqa: E402

pytestmark = pytest.mark.aot

_Spec = quantization.QuantSpec
_GOLDENS = {
    'nvfp4_te_1d': _Spec('nvfp4'),
    'nvfp4_te_rowscaled': _Spec('nvfp4', 'token'),
    'nvfp4_te_46_row_mae_448_fast': _Spec(
        'nvfp4', 'token', four_over_six='mae', scale_max=448, error='fast'
    ),
    'mxfp8_e4m3_te': _Spec('mxfp8'),
}


def _quantize(x, spec, **options):
  with interpreter.installed():
    return triton_quantize.quantize(jnp.asarray(x), spec, **options)


class TritonQuantizeTest(chex.TestCase):

  def assert_same_bytes(self, q, want):
    arrays = (q.data, q.block_scale, q.global_scale)
    for got, array in zip(arrays, want, strict=True):
      if array is None:
        self.assertIsNone(got)
        continue
      got, array = (
          np.ascontiguousarray(a).view(np.uint8) for a in (got, array)
      )
      np.testing.assert_array_equal(got, array)

  @parameterized.parameters(*cases.SPECS)
  def test_bytes_are_those_of_numpy(self, spec):
    x = cases.matrix(64, 352)
    self.assert_same_bytes(_quantize(x, spec), numpy_oracle.quantize(x, spec))

  @parameterized.parameters(*[s for s in cases.SPECS if s.outer != 'tensor'])
  def test_edges_are_those_of_numpy(self, spec):
    x = np.concatenate([cases.edges(), cases.edges()[::-1]])
    with np.errstate(all='ignore'):
      want = numpy_oracle.quantize(x, spec)
    self.assert_same_bytes(_quantize(x, spec), want)

  @parameterized.product(
      value=(np.nan, np.inf, -np.inf),
      spec=(
          _Spec('nvfp4', 'token'),
          _Spec('nvfp4', 'token', four_over_six='mse'),
          _Spec('nvfp4'),
          _Spec('nvfp4', block_2d=True),
          _Spec('mxfp8'),
          _Spec('mxfp4'),
      ),
  )
  def test_what_is_not_finite_is_as_defined(self, value, spec):
    x = cases.matrix(32, 64)
    x[3, 7] = value
    q = quantization.quantize(jnp.asarray(x), spec)
    want = (q.data, q.block_scale, q.global_scale)
    self.assert_same_bytes(_quantize(x, spec), want)

  @parameterized.parameters(*_GOLDENS.items())
  def test_bytes_are_golden(self, file, spec):
    exclude = golden_cases.NON_FINITE
    if spec.outer == 'tensor':  # their amax comes from XLA
      exclude += golden_cases.FLUSHED_ON_CPU
    compared = 0
    for case in golden_cases.load(file, exclude):
      q = _quantize(case.x, spec)
      codes = case.want['data' if 'data' in case.want else 'codes']
      for got, want in ((q.data, codes), (q.block_scale, case.want['scales'])):
        got = np.asarray(got).view(np.uint8)
        np.testing.assert_array_equal(got, want, case.name)
        compared += got.size
    self.assertGreater(compared, 60_000)

  @parameterized.parameters(
      ((1, 16),), ((3, 32),), ((2, 4096),), ((1, 32768),), ((2, 3, 48),)
  )
  def test_shapes(self, shape):
    x = cases.matrix(int(np.prod(shape[:-1])), shape[-1]).reshape(shape)
    for spec in (_Spec('nvfp4', 'token'), _Spec('nvfp4')):
      self.assert_same_bytes(_quantize(x, spec), numpy_oracle.quantize(x, spec))

  def test_rows_too_long_for_one_program(self):
    x, spec = cases.matrix(2, 32768 + 16), _Spec('nvfp4', 'token')
    self.assert_same_bytes(_quantize(x, spec), numpy_oracle.quantize(x, spec))

  @parameterized.parameters(np.float32, np.float16)
  def test_other_dtypes(self, dtype):
    x, spec = cases.matrix(8, 64, dtype), _Spec('nvfp4', 'token')
    self.assert_same_bytes(_quantize(x, spec), numpy_oracle.quantize(x, spec))

  @parameterized.parameters((1, 512, 2), (16, 512, 1))
  def test_tile_changes_nothing(self, *tile):
    x, spec = cases.matrix(19, 352), _Spec(
        'nvfp4', 'token', four_over_six='mse'
    )
    q = _quantize(x, spec, tile=tile)
    self.assert_same_bytes(q, numpy_oracle.quantize(x, spec))

  def test_tile_that_cuts_rows_or_squares_raises(self):
    with self.assertRaisesRegex(ValueError, 'whole rows'):
      _quantize(cases.matrix(2, 352), _Spec('nvfp4', 'token'), tile=(1, 256, 4))
    with self.assertRaisesRegex(ValueError, 'squares of 16 rows'):
      spec = _Spec('nvfp4', block_2d=True)
      _quantize(cases.matrix(32, 352), spec, tile=(8, 256, 4))

  @parameterized.parameters('token', 'tensor')
  def test_given_amax(self, outer):
    x, spec = cases.matrix(8, 64), _Spec('nvfp4', outer)
    amax = 3 * quantization.compute_amax(jnp.asarray(x), spec)
    q = quantization.quantize(jnp.asarray(x), spec, amax=amax)
    want = (q.data, q.block_scale, q.global_scale)
    self.assert_same_bytes(_quantize(x, spec, amax=amax), want)
    with self.assertRaisesRegex(ValueError, 'amax has shape'):
      _quantize(x, spec, amax=amax[..., 0])

  @parameterized.parameters(
      _Spec('nvfp4', 'token'), _Spec('nvfp4'), _Spec('mxfp8')
  )
  def test_jit_and_vmap_give_the_same_bytes(self, spec):
    x = cases.matrix(12, 64).reshape(3, 4, 64)
    want = numpy_oracle.quantize(x, spec)
    with interpreter.installed():
      one = lambda x: triton_quantize.quantize(x, spec)
      self.assert_same_bytes(jax.jit(jax.vmap(one))(x), want)

  def test_every_e2m1_boundary(self):
    # The neighbours of every boundary, and many values, as v / 6 of the amax.
    near = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    near = np.concatenate([np.nextafter(near, 0), near, np.nextafter(near, 9)])
    v = np.concatenate([near, np.linspace(0, 6, 4096 * 15 - near.size)])
    v = np.concatenate([v.astype(np.float32).reshape(-1, 15)], axis=1)
    x = np.concatenate([np.full((len(v), 1), 6, np.float32), v], axis=1)
    x = np.concatenate([x, -x])
    spec = _Spec('nvfp4', 'token')
    self.assert_same_bytes(_quantize(x, spec), numpy_oracle.quantize(x, spec))


if __name__ == '__main__':
  absltest.main()
