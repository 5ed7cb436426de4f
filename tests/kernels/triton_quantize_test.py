"""Triton's quantizers in its interpreter: `make aot`.

Run with TRITON_INTERPRET=1; compilation_test.py covers what is compiled.
"""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_dtypes
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


def _error_in_float64(blocks, scale, power):
  """Returns sums of powers over blocks, in powers of amax / (6 * 256)."""
  v = np.abs(blocks) / scale[:, None]
  rounded = v.astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
  return np.sum(np.abs(scale[:, None] * (rounded - v)) ** power, axis=-1)


def _prefer_four(blocks, power):
  largest = np.max(np.abs(blocks), axis=-1)
  six, four = (
      (largest / d).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
      for d in (6, 4)
  )
  four = _error_in_float64(blocks, four, power)
  return four < _error_in_float64(blocks, six, power)


def _nearly_tied(count, power, seed=0):
  """Returns float32 blocks `[count, 16]` of rows whose amax is 6 * 256.

  Near the value of their last element another candidate becomes the better.
  """
  rng = np.random.default_rng(seed)
  blocks = rng.normal(size=(20 * count, 16)).astype(np.float32)
  blocks *= np.exp2(rng.uniform(0, 7, (len(blocks), 1))).astype(np.float32)
  low, high = (rng.uniform(-1, 1, len(blocks)) for _ in range(2))
  largest = np.max(np.abs(blocks[:, :15]), axis=-1)

  def with_last(value):
    last = (value * largest).astype(np.float32)[:, None]
    return np.concatenate([blocks[:, :15], last], axis=-1)

  want = _prefer_four(with_last(high), power)
  crosses = _prefer_four(with_last(low), power) != want
  for _ in range(50):
    middle = (low + high) / 2
    beyond = _prefer_four(with_last(middle), power) == want
    low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)
  return with_last(low)[crosses][:count]


def _with_amax(blocks):
  """Returns rows `[N, 512]`, each of a block of amax 6 * 256 and 31 blocks."""
  blocks = np.asarray(blocks, np.float32).reshape(-1, 31, 16)
  first = np.full((len(blocks), 1, 16), 6 * 256, np.float32)
  return np.concatenate([first, blocks], axis=1).reshape(-1, 512)


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

  @parameterized.product(metric=('mse', 'mae'), error=('strict', 'fast'))
  def test_near_ties_of_four_over_six(self, metric, error):
    spec = _Spec('nvfp4', 'token', four_over_six=metric, error=error)
    # Last elements 0 to 2^19 units in the last place away from the tie. A row
    # is a program: one block in doubt takes others with it.
    steps = np.concatenate([np.arange(-2, 3), 2 ** np.arange(3, 20, 2)])
    power = 2 if metric == 'mse' else 1
    blocks = np.stack([_nearly_tied(31, power)] * len(steps))
    last = blocks.view(np.int32)[..., 15]
    last += steps[:, None].astype(np.int32)
    x = _with_amax(blocks)
    x = np.concatenate([x, np.float32(0.7) * x])
    q = _quantize(x, spec, tile=(1, 512, 1))
    self.assert_same_bytes(q, numpy_oracle.quantize(x, spec))

  @parameterized.parameters(
      *[s for s in cases.SPECS if s.four_over_six and s.outer == 'token']
  )
  def test_structured_blocks_of_four_over_six(self, spec):
    rng = np.random.default_rng(0)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = np.concatenate(
        [
            rng.choice(grid, (16, 16)) * rng.choice([16, 18, 3, 0.01], (16, 1)),
            rng.integers(-8, 9, (7, 16)) * rng.choice([1, 16, 0.125], (7, 1)),
            np.full((8, 16), -3.0) * np.exp2(np.arange(0, -16, -2.0))[:, None],
            rng.normal(size=(31, 16)) * np.exp2(9 - np.arange(31.0))[:, None],
        ]
    )
    exponents = np.array([-140, -128, -60, -47, -45, 0, 35, 37, 100, 116])
    x = np.ldexp(_with_amax(blocks), exponents[:, None, None])
    x = x.reshape(-1, 512).astype(ml_dtypes.bfloat16)
    with np.errstate(all='ignore'):
      want = numpy_oracle.quantize(x, spec)
    self.assert_same_bytes(_quantize(x, spec, tile=(1, 512, 1)), want)

  @parameterized.parameters(False, True)
  def test_four_over_six_with_an_outlier_in_the_tensor(self, squares):
    spec = _Spec('nvfp4', block_2d=squares, four_over_six='mse')
    x = cases.matrix(64, 64).astype(np.float32)
    x *= np.exp2(-np.arange(64.0))[:, None]
    x[0, 0], x[20:36] = 1e4, 0
    x[40, 3] = -0.0
    self.assert_same_bytes(_quantize(x, spec), numpy_oracle.quantize(x, spec))

  @parameterized.parameters(np.nan, np.inf)
  def test_four_over_six_of_rows_that_are_not_finite(self, value):
    spec = _Spec('nvfp4', 'token', four_over_six='mae')
    x = np.repeat(_with_amax(_nearly_tied(31, 1)), 4, axis=0)
    x[1, 40], x[2] = value, 0
    q = quantization.quantize(jnp.asarray(x), spec)
    want = (q.data, q.block_scale, q.global_scale)
    self.assert_same_bytes(_quantize(x, spec), want)

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
