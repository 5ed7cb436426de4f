"""Formats beside NVFP4, and conversions, against TransformerEngine's bytes.

Where another tool follows the same rule, against its bytes as well.
"""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nvfp4_jax import formats
from nvfp4_jax import hadamard
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from tests import golden_cases

_FP8_BLOCK = {
    f'{size}_{name}': quantization.QuantSpec(
        'fp8_block', block_2d=size == '128x128', scale_rounding=rounding
    )
    for size in ('1x128', '128x128')
    for name, rounding in (('pow2', 'power_of_two'), ('f32', 'float32'))
}


class MxTest(chex.TestCase):

  @parameterized.parameters(
      ('mxfp8_e4m3_te', 'mxfp8', False, ('data', 'scales'), 129_888),
      ('mxfp8_e4m3_te', 'mxfp8', True, ('2d_data', '2d_scales_row'), 111_936),
      ('mxfp8_e4m3_torchao_rceil', 'mxfp8', False, ('data', 'scales'), 129_888),
      ('mxfp4_fouroversix', 'mxfp4', False, ('codes', 'scales'), 66_912),
  )
  def test_gives_the_bytes_of_the_reference(
      self, file, name, block_2d, keys, num_bytes
  ):
    spec = quantization.QuantSpec(name, block_2d=block_2d)
    cases = [c for c in golden_cases.load(file) if keys[0] in c.want]
    compared = 0
    for case, q in zip(
        cases, golden_cases.quantize_all(cases, spec), strict=True
    ):
      for got, key in zip((q.data, q.block_scale), keys, strict=True):
        np.testing.assert_array_equal(
            got.view(np.uint8), case.want[key], err_msg=f'{case.name} {key}'
        )
        compared += got.size
    self.assertEqual(compared, num_bytes)

  def test_column_copy_is_the_quantized_transpose(self):
    spec = quantization.QuantSpec('mxfp8')
    cases = [
        case
        for case in golden_cases.load('mxfp8_e4m3_torchao_rceil')
        if 'data_t' in case.want
    ]
    transposed = [golden_cases.Case(c.name, c.x.T, c.want) for c in cases]
    for case, q in zip(
        cases, golden_cases.quantize_all(transposed, spec), strict=True
    ):
      np.testing.assert_array_equal(q.data, case.want['data_t'])
      np.testing.assert_array_equal(
          q.block_scale.view(np.uint8), case.want['scales_t']
      )
    self.assertGreater(len(cases), 10)

  def test_2d_blocks_serve_rows_and_columns(self):
    spec = quantization.QuantSpec('mxfp8', block_2d=True)
    cases = [
        case
        for case in golden_cases.load('mxfp8_e4m3_te')
        if '2d_data' in case.want
    ]
    for case, q in zip(
        cases, golden_cases.quantize_all(cases, spec), strict=True
    ):
      # The reference holds a scale for each column of each block of rows.
      columns = np.repeat(q.block_scale[::32].view(np.uint8), 32, axis=1)
      np.testing.assert_array_equal(columns, case.want['2d_scales_col'])


class Fp8BlockTest(chex.TestCase):

  @parameterized.parameters(*_FP8_BLOCK)
  def test_gives_the_bytes_of_the_reference(self, name):
    spec = _FP8_BLOCK[name]
    cases = golden_cases.load('fp8_block_te')
    compared = 0
    for case, q in zip(
        cases, golden_cases.quantize_all(cases, spec), strict=True
    ):
      scale = q.block_scale[::128] if spec.block_2d else q.block_scale
      for got, key in ((q.data, 'data'), (scale, 'scale_inv')):
        np.testing.assert_array_equal(
            got, case.want[f'{name}_{key}'], err_msg=f'{case.name} {key}'
        )
        compared += got.size
    self.assertEqual(compared, 148_086 if spec.block_2d else 149_496)


class Nvfp4Test(chex.TestCase):

  def test_hadamard_transform_and_its_quantization(self):
    spec = quantization.QuantSpec('nvfp4', hadamard=True)
    cases = golden_cases.load('nvfp4_te_rht')
    transposed = golden_cases.transposed(cases)
    results = golden_cases.quantize_all(transposed, spec)
    stacked = golden_cases.stack([case.x for case in transposed])
    rotated = np.asarray(hadamard.transform(stacked)).view(np.uint16)
    amax = quantization.compute_amax(stacked, spec)
    for i, (case, column, q) in enumerate(
        zip(cases, transposed, results, strict=True)
    ):
      k, m = column.x.shape
      np.testing.assert_array_equal(
          rotated[i, :k, :m], case.want['xt_rht_bf16']
      )
      np.testing.assert_array_equal(q.data, column.want['codes'])
      np.testing.assert_array_equal(
          q.block_scale.view(np.uint8), column.want['scales']
      )
      np.testing.assert_array_equal(amax[i].ravel(), column.want['amax'])
    self.assertLen(results, 6)

  @parameterized.parameters('tensor', 'token')
  def test_equals_flashinfer(self, outer):
    self._assert_equal(
        f'nvfp4_flashinfer_{outer}', quantization.QuantSpec('nvfp4', outer)
    )

  @parameterized.product(error=('mae', 'mse'), scale_max=(256, 448))
  def test_equals_flashinfer_per_token_with_four_over_six(
      self, error, scale_max
  ):
    file = f'nvfp4_flashinfer_46_token_{error}_{scale_max}_strict'
    spec = quantization.QuantSpec(
        'nvfp4', 'token', four_over_six=error, scale_max=scale_max
    )
    for case, q in self._assert_equal(file, spec):
      # FlashInfer returns 0, not 1, for a row of zeros.
      scale = case.want['pts']
      np.testing.assert_array_equal(
          np.where(scale == 0, 1, scale), q.global_scale[:, 0]
      )

  def test_k_that_does_not_fill_a_block_is_refused(self):
    # TransformerEngine's Python reference pads with zeros, its kernels refuse.
    spec = quantization.QuantSpec('nvfp4')
    for case in golden_cases.load('nvfp4_te_1d_lastdim'):
      with self.assertRaisesRegex(ValueError, 'not a multiple of 16'):
        quantization.quantize(case.x, spec)
      k = case.x.shape[1]
      q = quantization.quantize(jnp.pad(case.x, ((0, 0), (0, -k % 16))), spec)
      np.testing.assert_array_equal(q.data[:, : k // 2], case.want['codes'])
      np.testing.assert_array_equal(
          np.asarray(q.block_scale).view(np.uint8), case.want['scales']
      )

  def test_checkpoint_pair_shares_the_amax_of_both(self):
    golden = golden_cases.read('checkpoint_pair')
    gate, up = (
        golden_cases.bfloat16(golden[f'{n}_bf16']) for n in ('gate', 'up')
    )
    spec = quantization.QuantSpec('nvfp4')
    amax = quantization.compute_amax(jnp.concatenate([gate, up]), spec)
    for name, x in (('gate', gate), ('up', up)):
      q = quantization.quantize(x, spec, amax=amax)
      np.testing.assert_array_equal(q.data, golden[f'{name}_weight'])
      np.testing.assert_array_equal(
          np.asarray(q.block_scale).view(np.uint8),
          golden[f'{name}_weight_scale'],
      )
      np.testing.assert_array_equal(
          q.global_scale.ravel(), golden['weight_scale_2']
      )

  def test_swizzle_gives_the_layout_of_tensor_cores(self):
    spec = quantization.QuantSpec('nvfp4')
    golden = golden_cases.read('scale_swizzle_fouroversix')
    cases = golden_cases.load('nvfp4_te_1d')
    compared = 0
    for case in cases:
      want = golden.get(f'{case.name}__scales_blocked')
      if want is not None:
        scale = quantization.quantize(case.x, spec).block_scale
        swizzled = qtensor.swizzle(scale)
        np.testing.assert_array_equal(np.asarray(swizzled).view(np.uint8), want)
        chex.assert_trees_all_equal(
            qtensor.unswizzle(swizzled, *scale.shape), scale
        )
        compared += want.size
    self.assertEqual(compared, 1024 + 512)

  def _assert_equal(self, file, spec):
    cases = golden_cases.load(file)
    results = list(
        zip(cases, golden_cases.quantize_all(cases, spec), strict=True)
    )
    for case, q in results:
      np.testing.assert_array_equal(q.data, case.want['codes'], case.name)
      np.testing.assert_array_equal(
          q.block_scale.view(np.uint8), case.want['scales'], case.name
      )
    return results


class ConversionTest(chex.TestCase):

  @parameterized.parameters('cvt_all_bf16_nvidia', 'cvt_f32_edges_nvidia')
  def test_scalar_conversions_equal_cuda(self, file):
    golden = golden_cases.read(file)
    x = golden.get('x')
    if x is None:
      bits = np.arange(65536, dtype=np.uint32) << 16
      x = bits.view(np.float32)
    normal = np.isfinite(x) & ((np.abs(x) >= 2.0**-126) | (x == 0))
    e4m3 = np.asarray(jax.jit(formats.encode_e4m3)(x)).view(np.uint8)
    np.testing.assert_array_equal(
        e4m3[normal], golden['e4m3_satfinite'][normal]
    )
    e2m1 = np.asarray(jax.jit(formats.encode_e2m1)(x))
    e2m1 = np.where((x == 0) & np.signbit(x), 8, e2m1)  # cvt keeps -0.0
    np.testing.assert_array_equal(e2m1[normal], golden['e2m1'][normal])
    # E8M0 is integer code throughout: subnormals, infinity and NaN included.
    e8m0 = np.asarray(jax.jit(formats.encode_e8m0)(np.abs(x)))
    np.testing.assert_array_equal(
        e8m0.view(np.uint8), golden['e8m0_roundup_satfinite']
    )

  def test_e8m0_of_a_block_amax_equals_transformer_engine(self):
    golden = golden_cases.read('e8m0_te_f32')
    amax = golden['amax']
    scaled = amax * np.float32(1 / 448)
    code = np.asarray(formats.encode_e8m0(scaled)).view(np.uint8)
    np.testing.assert_array_equal(code, golden['e8m0_cuda_mulrcp'])
    np.testing.assert_array_equal(code, golden['e8m0_pytest_div'])
    factor = np.asarray(
        formats.reciprocal_e8m0(code.view(ml_dtypes.float8_e8m0fnu))
    )
    np.testing.assert_array_equal(
        factor.view(np.uint32), golden['scale_rcp'].view(np.uint32)
    )

  def test_e8m0_decodes_to_its_table(self):
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    np.testing.assert_array_equal(
        np.asarray(formats.decode_e8m0(codes)).view(np.uint32)[:255],
        golden_cases.read('decode_tables')['e8m0'].view(np.uint32)[:255],
    )
    self.assertTrue(np.isnan(formats.decode_e8m0(codes)[255]))

  def test_stochastic_rounding_equals_the_software_form(self):
    golden = golden_cases.read('sr_e2m1_te')
    x, value = golden['x'][:, None], golden['value']
    uniform = golden['rbits8'].astype(np.float32) / 256
    finite = np.isfinite(x)[:, 0]
    codes = jax.jit(formats.encode_e2m1_stochastic)(
        *np.broadcast_arrays(x[finite], uniform)
    )
    np.testing.assert_array_equal(
        np.asarray(formats.decode_e2m1(codes)), value[finite]
    )
