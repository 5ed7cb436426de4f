"""Compares quantize and dequantize with TransformerEngine's reference bytes."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nvfp4_jax import formats
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from tests import golden_cases

_SPECS = {
    'nvfp4_te_1d': quantization.QuantSpec('nvfp4', outer='tensor'),
    'nvfp4_te_2d': quantization.QuantSpec('nvfp4', block_2d=True),
    'nvfp4_te_rowscaled': quantization.QuantSpec('nvfp4', outer='token'),
} | {
    f'nvfp4_te_46_{name}_{choice}_{scale_max}_{error}': quantization.QuantSpec(
        'nvfp4',
        outer='token' if name == 'row' else 'tensor',
        block_2d=name == '2d',
        four_over_six=choice,
        scale_max=scale_max,
        error=error,
    )
    for name in ('1d', '2d', 'row')
    for choice in ('mae', 'mse')
    for scale_max in (256, 448)
    for error in ('strict', 'fast')
}


class QuantizeTest(chex.TestCase):

  @parameterized.parameters(
      ('nvfp4_te_1d', 135_096),
      ('nvfp4_te_2d', 134_944),
      ('nvfp4_te_rowscaled', 147_752),
      *((f, 67_044) for f in _SPECS if '_46_1d' in f),
      *((f, 66_892) for f in _SPECS if '_46_2d' in f),
      *((f, 71_016) for f in _SPECS if '_46_row' in f),
  )
  def test_gives_the_bytes_of_the_reference(self, file, num_bytes):
    # One compilation for many cases: padded with zeros, which must not show.
    cases = [c for c in golden_cases.load(file) if c.x.shape[1] <= 256]
    cases += golden_cases.transposed(cases)
    results = _quantize(golden_cases.stack([c.x for c in cases]), _SPECS[file])
    compared = _assert_golden(results, cases, _SPECS[file])
    self.assertEqual(compared, num_bytes)

  @parameterized.parameters(
      'nvfp4_te_1d', 'nvfp4_te_rowscaled', 'nvfp4_te_46_row_mse_256_strict'
  )
  def test_gives_the_bytes_of_the_reference_for_wide_rows(self, file):
    (case,) = [c for c in golden_cases.load(file) if c.x.shape[1] > 256]
    results = _quantize(case.x[None], _SPECS[file])
    compared = _assert_golden(results, [case], _SPECS[file])
    num_scales = 1 if _SPECS[file].outer == 'tensor' else 3
    self.assertEqual(compared, 3 * (1024 + 128) + 4 * num_scales)

  @parameterized.parameters(
      ('nvfp4_te_1d', 'eager'),
      ('nvfp4_te_rowscaled', 'eager'),
      ('nvfp4_te_46_row_mse_256_strict', 'eager'),
      ('nvfp4_te_46_row_mse_256_strict', 'op by op'),
      ('nvfp4_te_1d', 'vmap'),
      ('nvfp4_te_rowscaled', 'vmap'),
      ('nvfp4_te_46_1d_mse_256_strict', 'vmap'),
      ('nvfp4_te_rowscaled', 'scan'),
      ('nvfp4_te_46_row_mse_256_strict', 'scan'),
  )
  def test_gives_the_same_bytes_however_it_is_called(self, file, way):
    quantize = functools.partial(_quantize.__wrapped__, spec=_SPECS[file])
    one_by_one = lambda xs: _stack([quantize(x) for x in xs])
    run = {
        'eager': one_by_one,
        'op by op': jax.disable_jit()(one_by_one),
        'vmap': jax.jit(jax.vmap(quantize)),
        'scan': lambda xs: jax.lax.scan(
            lambda _, x: (None, quantize(x)), None, xs
        )[1],
    }[way]
    names = {
        'eager': ('normal_32x64', 'huge_32x64', 'scaleties_32x64'),
        'op by op': ('normal_32x64', 'huge_32x64', 'scaleties_32x64'),
        'vmap': ('heavy_64x128', 'mixedtok_64x128', 'mixedblk_64x128'),
        'scan': ('heavy_64x128', 'mixedtok_64x128', 'mixedblk_64x128'),
    }[way]
    cases = [c for c in golden_cases.load(file) if c.name in names]
    compared = _assert_golden(
        run(jnp.stack([case.x for case in cases])), cases, _SPECS[file]
    )
    m, k = cases[0].x.shape
    num_scales = 1 if _SPECS[file].outer == 'tensor' else m
    self.assertEqual(compared, 3 * (m * (k // 2 + k // 16) + 4 * num_scales))

  @parameterized.parameters('rowonly_1x16', 'rowonly_5x48')
  def test_a_matrix_alone_gives_its_bytes(self, name):
    for file in ('nvfp4_te_1d', 'nvfp4_te_rowscaled'):
      (case,) = [c for c in golden_cases.load(file) if c.name == name]
      results = jax.tree.map(lambda a: a[None], _quantize(case.x, _SPECS[file]))
      self.assertGreater(_assert_golden(results, [case], _SPECS[file]), 0)


class NonFiniteTest(chex.TestCase):
  """Where amax is not finite, ours is NaN, TransformerEngine's is for NaN."""

  @parameterized.parameters(
      # Bytes that differ: the codes and all block scales of what holds an inf.
      ('nvfp4_te_nonfinite', 'inf_16x64', 511, 64),
      ('nvfp4_te_nonfinite', 'neginf_16x64', 478, 64),
      ('nvfp4_te_rowscaled_nonfinite', 'inf_16x64', 31, 4),
      ('nvfp4_te_rowscaled_nonfinite', 'neginf_16x64', 30, 4),
  )
  def test_inf_differs_from_the_reference_in(self, file, name, codes, scales):
    case, q, amax = self._quantize(file, name)
    self.assertEqual(np.sum(q.packed() != case.want['codes']), codes)
    self.assertEqual(np.sum(_bytes(q) != case.want['scales']), scales)
    np.testing.assert_array_equal(amax.ravel(), case.want['amax'])

  @parameterized.parameters(
      ('nvfp4_te_nonfinite', 64), ('nvfp4_te_rowscaled_nonfinite', 4)
  )
  def test_nan_agrees_with_the_reference(self, file, num_nan):
    # The sign of the reference's NaN scales depends on who casts.
    case, q, amax = self._quantize(file, 'nan_16x64')
    np.testing.assert_array_equal(q.packed(), case.want['codes'])
    is_nan = (case.want['scales'] & 0x7F) == 0x7F
    self.assertEqual(np.sum(is_nan), num_nan)
    got = _bytes(q)
    np.testing.assert_array_equal(got[is_nan] & 0x7F, 0x7F)
    np.testing.assert_array_equal(got[~is_nan], case.want['scales'][~is_nan])
    np.testing.assert_array_equal(amax.ravel(), case.want['amax'])

  @parameterized.product(
      file=('nvfp4_te_nonfinite', 'nvfp4_te_rowscaled_nonfinite'),
      name=('inf_16x64', 'neginf_16x64', 'nan_16x64'),
  )
  def test_marks_exactly_the_matrix_or_row_that_is_not_finite(self, file, name):
    case, q, amax = self._quantize(file, name)
    marked = np.broadcast_to(~np.isfinite(amax), (16, 1))[:, 0]
    self.assertEqual(np.sum(marked), 1 if 'row' in file else 16)
    np.testing.assert_array_equal(_bytes(q)[marked], 0x7F)
    np.testing.assert_array_equal(q.packed()[marked], 0)
    np.testing.assert_array_equal(q.global_scale[~np.isfinite(amax)], 1.0)
    for got, key in ((q.packed(), 'codes'), (_bytes(q), 'scales')):
      np.testing.assert_array_equal(got[~marked], case.want[key][~marked])
    values = np.asarray(qtensor.dequantize(q, jnp.float32))
    np.testing.assert_array_equal(np.isnan(values).all(axis=1), marked)
    np.testing.assert_array_equal(np.isnan(values).any(axis=1), marked)

  def _quantize(self, file, name):
    outer = 'token' if 'row' in file else 'tensor'
    spec = quantization.QuantSpec('nvfp4', outer=outer)
    (case,) = [c for c in golden_cases.load(file) if c.name == name]
    q, amax = _quantize(case.x, spec)
    return case, jax.tree.map(np.asarray, q), np.asarray(amax)


class DequantizeTest(chex.TestCase):
  """Ours is code * f32(scale * D), a rounding away from TransformerEngine's."""

  def test_equals_its_formula(self):
    cases = golden_cases.load('nvfp4_te_1d')
    q = _golden_qtensors(cases)
    got = _dequantize(q)
    compared = 0
    for i, case in enumerate(cases):
      m, k = case.x.shape
      for dtype, want in _our_form(case).items():
        np.testing.assert_array_equal(
            _bits(got[dtype][i][:m, :k]), _bits(want), err_msg=case.name
        )
        compared += want.size
    self.assertEqual(compared, 2 * 126_208)

  def test_difference_from_the_reference_is_counted(self):
    cases = golden_cases.load('nvfp4_te_1d')
    got = _dequantize(_golden_qtensors(cases))
    compared = dict.fromkeys(got, 0)
    different = dict.fromkeys(got, 0)
    for i, case in enumerate(cases):
      m, k = case.x.shape
      for dtype, values in got.items():
        if f'dq_{dtype}' in case.want:
          want = case.want[f'dq_{dtype}']
          compared[dtype] += want.size
          different[dtype] += np.sum(_bits(values[i][:m, :k]) != _bits(want))
    self.assertEqual(compared, {'f32': 67_584, 'bf16': 126_208})
    self.assertEqual(different, {'f32': 23_482, 'bf16': 2_415})

  def test_difference_of_the_forms_is_counted(self):
    # In numpy, which keeps subnormals; not all cases store float32 values.
    different = {'f32': 0, 'bf16': 0}
    stored = dict(different)
    compared = dict(different)
    for case in golden_cases.load('nvfp4_te_1d', exclude=()):
      ours, theirs = _our_form(case), _reference_form(case)
      for dtype in different:
        if f'dq_{dtype}' in case.want:
          want = _bits(case.want[f'dq_{dtype}'])
          is_nan = np.isnan(theirs[dtype].astype(np.float32))
          np.testing.assert_array_equal(
              _bits(theirs[dtype])[~is_nan], want[~is_nan], err_msg=case.name
          )
          stored[dtype] += want.size
        compared[dtype] += ours[dtype].size
        different[dtype] += np.sum(_bits(ours[dtype]) != _bits(theirs[dtype]))
    self.assertEqual(stored, {'f32': 70_656, 'bf16': 129_280})
    self.assertEqual(compared, {'f32': 129_280, 'bf16': 129_280})
    self.assertEqual(different, {'f32': 39_702, 'bf16': 5_169})


@functools.partial(jax.jit, static_argnames='spec')
def _quantize(x, spec):
  return quantization.quantize(x, spec), quantization.compute_amax(x, spec)


def _dequantize(q):
  names = {'f32': jnp.float32, 'bf16': jnp.bfloat16}
  dequantize = jax.jit(qtensor.dequantize, static_argnames='dtype')
  return {k: np.asarray(dequantize(q, dtype)) for k, dtype in names.items()}


def _assert_golden(results, cases, spec):
  """Asserts that stacked results have the cases' bytes; returns how many."""
  q, amax = jax.tree.map(np.asarray, results)
  compared = 0
  for i, case in enumerate(cases):
    m, k = case.x.shape
    got = {
        'codes': q.packed()[i, :m, : k // 2],
        'scales': _bytes(q)[i, :m, : k // 16],
        'amax': amax[i, :m, 0].view(np.uint8),
    }
    for key, value in got.items():
      want = case.want[key].view(np.uint8)
      np.testing.assert_array_equal(value, want, err_msg=f'{case.name} {key}')
      compared += want.size
    np.testing.assert_array_equal(
        q.global_scale[i, :m, 0], _decode_scale(case.want['amax'], spec)
    )
  return compared


def _stack(trees):
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _golden_qtensors(cases):
  """Returns the stacked QTensor of the reference's own codes and scales."""
  spec = _SPECS['nvfp4_te_1d']
  scales = golden_cases.stack([case.want['scales'] for case in cases])
  decode = [_decode_scale(case.want['amax'], spec) for case in cases]
  return qtensor.QTensor(
      data=golden_cases.stack([case.want['codes'] for case in cases]),
      block_scale=scales.view(ml_dtypes.float8_e4m3fn),
      global_scale=np.stack(decode)[..., None],
      format=formats.NVFP4,
  )


def _decode_scale(amax, spec):
  """Returns D = 1 / min(6 E / amax, FLT_MAX) in numpy, 1 where amax is 0."""
  numerator = np.float32(6 * spec.scale_max)
  amax = np.where(amax == 0, numerator, amax)
  with np.errstate(over='ignore'):
    encode = np.minimum(numerator / amax, np.finfo(np.float32).max)
  return np.float32(1) / encode


def _our_form(case):
  spec = _SPECS['nvfp4_te_1d']
  codes, scales = _values(case)
  return _round(codes * (scales * _decode_scale(case.want['amax'], spec)))


def _reference_form(case):
  """TransformerEngine's dequantize kernel: f32(scale * amax) * f32(1/2688)."""
  codes, scales = _values(case)
  with np.errstate(over='ignore', invalid='ignore'):
    scaled = scales * case.want['amax'] * np.float32(1 / 2688)
    return _round(codes * scaled)


def _values(case):
  """Returns the float32 values of codes and of repeated scales, `[M, K]`."""
  tables = golden_cases.read('decode_tables')
  codes = case.want['codes']
  nibbles = np.stack([codes & 0xF, codes >> 4], axis=-1)
  values = tables['e2m1'][nibbles.reshape(codes.shape[0], -1)]
  return values, np.repeat(tables['e4m3'][case.want['scales']], 16, axis=1)


def _round(values):
  return {'f32': values, 'bf16': values.astype(ml_dtypes.bfloat16)}


def _bytes(q):
  return np.asarray(q.block_scale).view(np.uint8)


def _bits(array):
  return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)
