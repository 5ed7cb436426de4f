"""Where other tools' bytes differ from ours by design, and by how many.

Profile: TransformerEngine's bytes are ours (golden_test, golden_formats_test).
Each number counts what differs over all cases of a golden file without
subnormal inputs; a change here means that our bytes have moved, or theirs.
"""

from absl.testing import parameterized
import chex
import numpy as np

from nvfp4_jax import quantization
from tests import golden_cases

_NVFP4 = quantization.QuantSpec('nvfp4')


def _spec(**options):
  return quantization.QuantSpec('nvfp4', **options)


class OtherToolsTest(chex.TestCase):

  @parameterized.parameters(
      # FlashInfer scores 4/6 per tensor with D where TransformerEngine takes
      # amax / 6 E: near ties go the other way in a few blocks.
      *(
          (
              f'nvfp4_flashinfer_46_tensor_{error}_{scale_max}_strict',
              _spec(four_over_six=error, scale_max=scale_max),
              counts,
          )
          for error, scale_max, counts in (
              ('mae', 256, (351, 45)),
              ('mae', 448, (384, 50)),
              ('mse', 256, (0, 0)),
              ('mse', 448, (0, 0)),
          )
      ),
      # fouroversix: a block whose scale underflows gets codes 0, ours +-6.
      ('nvfp4_fouroversix_static_6_1d', _NVFP4, (3786, 7)),
      ('nvfp4_fouroversix_static_6_2d', _spec(block_2d=True), (0, 0)),
      # ... and the order of its error sums is not fixed.
      ('nvfp4_fouroversix_mse_1d', _spec(four_over_six='mse'), (3875, 12)),
      ('nvfp4_fouroversix_mae_1d', _spec(four_over_six='mae'), (3861, 10)),
      (
          'nvfp4_fouroversix_mse_2d',
          _spec(four_over_six='mse', block_2d=True),
          (43, 16),
      ),
      (
          'nvfp4_fouroversix_mae_2d',
          _spec(four_over_six='mae', block_2d=True),
          (43, 16),
      ),
      # Rules that only fouroversix has: always map to 4; the largest error.
      ('nvfp4_fouroversix_static_4_1d', _NVFP4, (57264, 7)),
      ('nvfp4_fouroversix_static_4_2d', _spec(block_2d=True), (41163, 0)),
      (
          'nvfp4_fouroversix_abs_max_1d',
          _spec(four_over_six='mae'),
          (21126, 2303),
      ),
      (
          'nvfp4_fouroversix_abs_max_2d',
          _spec(four_over_six='mae', block_2d=True),
          (30934, 5136),
      ),
      # ModelOpt: D = amax / 2688, scales at least 2^-9, zero blocks 1.0, an
      # all-zero tensor NaN.
      ('nvfp4_modelopt', _NVFP4, (4421, 591)),
      # torchao: scales at least 2^-6; -0.0 keeps its sign.
      ('nvfp4_torchao', _NVFP4, (6204, 702)),
  )
  def test_nvfp4_differs_in(self, file, spec, counts):
    self._assert_counts(file, spec, ('codes', 'scales'), counts)

  @parameterized.parameters(
      # Zero scales become 0.125; amax / 6 is rounded to the weight's dtype.
      ('f32', (4164, 590)),
      ('bf16', (5172, 890)),
  )
  def test_compressed_tensors_differs_in(self, dtype, counts):
    keys = f'{dtype}_codes', f'{dtype}_scales'
    self._assert_counts('nvfp4_compressed_tensors', _NVFP4, keys, counts)

  @parameterized.parameters(
      # OCP's floor and round-half scales; ours, like TransformerEngine's, are
      # rounded up. torchao keeps the sign of -0.0.
      ('mxfp8_e4m3_torchao_floor', 'mxfp8', 'data', (18265, 586)),
      ('mxfp8_e4m3_torchao_even', 'mxfp8', 'data', (13370, 431)),
      ('mxfp4_torchao_rceil', 'mxfp4', 'codes', (816, 0)),
      ('mxfp4_torchao_floor', 'mxfp4', 'codes', (18157, 1196)),
      ('mxfp4_torchao_even', 'mxfp4', 'codes', (8820, 554)),
  )
  def test_mx_differs_in(self, file, name, key, counts):
    spec = quantization.QuantSpec(name)
    self._assert_counts(file, spec, (key, 'scales'), counts)

  @parameterized.parameters(('mxfp8', (3573, 156)), ('mxfp4', (2060, 87)))
  def test_qwix_mx_differs_in(self, name, counts):
    # Its power of two is the truncated bf16(amax / elem_max * 60 / 31).
    cases = golden_cases.load('mx_qwix')
    codes = scales = 0
    for case, q in zip(cases, self._quantize(cases, name), strict=True):
      scale = q.block_scale.astype(np.float32)
      scales += np.sum(scale != case.want[f'{name}_scale_f32'])
      codes += np.sum(_unpacked(q) != case.want[f'{name}_q'])
    self.assertEqual((codes, scales), counts)

  def test_qwix_nvfp4_loses_blocks_without_a_global_scale(self):
    cases = golden_cases.load('nvfp4_qwix')
    lost = blocks = codes = 0
    for case, q in zip(cases, self._quantize(cases, 'nvfp4'), strict=True):
      ours = q.block_scale.astype(np.float32)
      lost += np.sum((case.want['scale_f32'] == 0) & (ours > 0))
      blocks += ours.size
      codes += np.sum(_unpacked(q) != case.want['codes_unpacked'])
    self.assertEqual((lost, blocks, codes), (175, 7888, 17425))

  def test_miles_fp8_block_scales_differ_in(self):
    # It divides max(amax, 1e-10) by 448; ours is 1 / (448 / amax).
    golden = golden_cases.read('fp8_block_miles_scales')
    spec = quantization.QuantSpec('fp8_block', block_2d=True)
    differ = {}
    for key, want in golden.items():
      name, array = key.split('__')
      if array == 'scale_inv' and not name.startswith('tiny'):
        x = golden_cases.bfloat16(golden[f'{name}__x_bf16'])
        scale = quantization.quantize(x, spec).block_scale[::128]
        differ[name] = int(np.sum(np.asarray(scale) != want))
    self.assertEqual(
        differ,
        {'normal_256x384': 1, 'ragged_200x300': 2, 'zero_128x128': 1},
    )

  def _assert_counts(self, file, spec, keys, counts):
    cases = golden_cases.load(file)
    results = golden_cases.quantize_all(cases, spec)
    different = [0, 0]
    for case, q in zip(cases, results, strict=True):
      arrays = q.data, q.block_scale.view(np.uint8)
      for i, (key, got) in enumerate(zip(keys, arrays, strict=True)):
        different[i] += int(np.sum(got != case.want[key]))
    self.assertEqual(tuple(different), counts)

  def _quantize(self, cases, name):
    return golden_cases.quantize_all(cases, quantization.QuantSpec(name))


def _unpacked(q):
  """Returns one code a byte."""
  if q.format.elem_max == 448:
    return q.data
  nibbles = np.stack([q.data & 0xF, q.data >> 4], axis=-1)
  return nibbles.reshape(q.data.shape[0], -1)
