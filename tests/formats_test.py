"""Tests of formats."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nvfp4_jax import formats
from tests import golden_cases

_SMALLEST_NORMAL = np.finfo(np.float32).tiny


class ElementTest(chex.TestCase):
  """E2M1: magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6."""

  @chex.variants(with_jit=True, without_jit=True)
  def test_all_codes_decode_to_their_values(self):
    got = self.variant(formats.decode_e2m1)(jnp.arange(16, dtype=jnp.uint8))
    want = golden_cases.read('decode_tables')['e2m1']
    np.testing.assert_array_equal(_bits(got), _bits(want))

  @chex.variants(with_jit=True, without_jit=True)
  def test_encode_inverts_decode(self):
    codes = jnp.arange(16, dtype=jnp.uint8)
    values = formats.decode_e2m1(codes)
    got = self.variant(formats.encode_e2m1)(values)
    # -0.0 has the code of 0.0: the sign bit means v < 0.
    np.testing.assert_array_equal(got, np.where(codes == 8, 0, codes))

  @chex.variants(with_jit=True)
  def test_encode_equals_hardware_conversion_at_edges(self):
    golden = golden_cases.read('cvt_f32_edges_nvidia')
    x = golden['x']
    compared = ~np.isnan(x) & ~_is_subnormal(x)
    got = self.variant(formats.encode_e2m1)(jnp.asarray(x[compared]))
    want = np.where(x == 0, 0, golden['e2m1'])[compared]
    self.assertEqual(want.size, _NUM_EDGES_E2M1)
    np.testing.assert_array_equal(got, want)

  @chex.variants(with_jit=True)
  def test_encode_rounds_every_bfloat16_to_nearest_even(self):
    x = _all_bfloat16()
    x = x[~np.isnan(x) & ~_is_subnormal(x)]
    self.assertLen(x, 65_536 - 2 * (127 + 127))
    got = self.variant(formats.encode_e2m1)(jnp.asarray(x))
    want = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(got, np.where(x == 0, 0, want))

  @parameterized.parameters(
      # Midpoints go to the even code, their neighbours to the nearer one.
      (0.25, 0, 0, 1),
      (0.75, 1, 2, 2),
      (1.25, 2, 2, 3),
      (1.75, 3, 4, 4),
      (2.5, 4, 4, 5),
      (3.5, 5, 6, 6),
      (5.0, 6, 6, 7),
  )
  def test_ties_round_to_the_even_code(self, midpoint, below, at, above):
    midpoint = np.float32(midpoint)
    x = np.stack(
        [
            np.nextafter(midpoint, np.float32(0)),
            midpoint,
            np.nextafter(midpoint, np.float32(8)),
        ]
    )
    x, codes = jnp.asarray(x), np.array([below, at, above])
    np.testing.assert_array_equal(formats.encode_e2m1(x), codes)
    np.testing.assert_array_equal(formats.encode_e2m1(-x), codes + 8)

  def test_saturates_and_keeps_the_sign_of_what_rounds_to_zero(self):
    x = jnp.array([6.0, 1e30, jnp.inf, -jnp.inf, -1e-30, -0.25, -0.0, 0.0])
    np.testing.assert_array_equal(
        formats.encode_e2m1(x), [7, 7, 7, 15, 8, 8, 0, 0]
    )


class ScaleTest(chex.TestCase):
  """E4M3, non-negative: what a block scale can be."""

  @chex.variants(with_jit=True, without_jit=True)
  def test_all_finite_bytes_decode_to_their_values(self):
    codes = np.arange(127, dtype=np.uint8)
    got = self.variant(formats.decode_e4m3)(_as_e4m3(codes))
    want = golden_cases.read('decode_tables')['e4m3'][:127]
    np.testing.assert_array_equal(_bits(got), _bits(want))

  @chex.variants(with_jit=True, without_jit=True)
  def test_nan_is_kept_both_ways(self):
    nan = self.variant(formats.encode_e4m3)(jnp.array([jnp.nan], jnp.float32))
    np.testing.assert_array_equal(_bytes(nan), [0x7F])
    self.assertTrue(np.isnan(self.variant(formats.decode_e4m3)(nan)).all())

  @chex.variants(with_jit=True, without_jit=True)
  def test_encode_inverts_decode(self):
    codes = np.arange(128, dtype=np.uint8)
    values = formats.decode_e4m3(_as_e4m3(codes))
    got = self.variant(formats.encode_e4m3)(values)
    np.testing.assert_array_equal(_bytes(got), codes)

  @chex.variants(with_jit=True)
  def test_encode_equals_hardware_conversion_at_edges(self):
    golden = golden_cases.read('cvt_f32_edges_nvidia')
    x = golden['x']
    compared = ~np.signbit(x)
    got = self.variant(formats.encode_e4m3)(jnp.asarray(x[compared]))
    want = golden['e4m3_satfinite'][compared]
    self.assertEqual(want.size, _NUM_EDGES_E4M3)
    np.testing.assert_array_equal(_bytes(got), want)

  @chex.variants(with_jit=True)
  def test_encode_rounds_every_bfloat16_to_nearest_even(self):
    x = _all_bfloat16()
    x = x[~np.signbit(x) & ~np.isnan(x)]
    self.assertLen(x, 32_768 - 127)
    got = self.variant(formats.encode_e4m3)(jnp.asarray(x))
    want = np.minimum(x, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(_bytes(got), want.view(np.uint8))

  def test_encode_rounds_neighbours_of_every_midpoint(self):
    values = golden_cases.read('decode_tables')['e4m3'][:127]
    midpoints = (values[:-1] + values[1:]) / 2  # Exact in float32.
    low = np.arange(126)
    even = low + low % 2
    for x, want in (
        (np.nextafter(midpoints, np.float32(0)), low),
        (midpoints, even),
        (np.nextafter(midpoints, np.float32(448)), low + 1),
    ):
      np.testing.assert_array_equal(
          _bytes(formats.encode_e4m3(jnp.asarray(x))), want
      )


class RandomTest(chex.TestCase):

  def test_encoders_round_float32_to_nearest_even(self):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(2**18) * np.exp2(rng.uniform(-12, 10, 2**18))
    x = x.astype(np.float32)
    want = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(formats.encode_e2m1(jnp.asarray(x)), want)
    want = np.minimum(np.abs(x), 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(
        _bytes(formats.encode_e4m3(jnp.abs(x))), want.view(np.uint8)
    )


class NibblesTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_low_nibble_is_the_even_element(self):
    packed = jnp.array([[0x71]], jnp.uint8)
    codes = self.variant(formats.unpack_nibbles)(packed)
    np.testing.assert_array_equal(formats.decode_e2m1(codes), [[0.5, 6.0]])
    np.testing.assert_array_equal(
        self.variant(formats.pack_nibbles)(codes), packed
    )

  @chex.variants(with_jit=True, without_jit=True)
  def test_every_byte_survives_the_round_trip(self):
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, 8, 16)
    codes = self.variant(formats.unpack_nibbles)(packed)
    chex.assert_shape(codes, (2, 8, 32))
    chex.assert_type(codes, jnp.uint8)
    self.assertLess(np.max(codes), 16)
    again = self.variant(formats.pack_nibbles)(codes)
    chex.assert_type(again, jnp.uint8)
    np.testing.assert_array_equal(again, packed)


class FormatTest(chex.TestCase):

  def test_maxima_are_those_of_the_dtypes(self):
    for name, fmt in formats.FORMATS.items():
      self.assertEqual(fmt.name, name)
      self.assertEqual(fmt.elem_max, float(ml_dtypes.finfo(fmt.elem_dtype).max))
      self.assertEqual(
          fmt.scale_max, float(ml_dtypes.finfo(fmt.scale_dtype).max)
      )

  def test_is_static(self):
    traced = []

    def decode(fmt, codes):
      traced.append(fmt)
      return formats.decode_e2m1(codes) * fmt.elem_max

    decode = jax.jit(decode, static_argnums=0)
    for _ in range(2):
      decode(formats.NVFP4, jnp.zeros((2,), jnp.uint8))
    self.assertEqual(traced, [formats.NVFP4])


# Of 5,176 edge cases: 2 are NaN, 6 subnormal; 2,516 have a sign bit. XLA on
# CPU flushes subnormal numbers, so that their sign is lost.
_NUM_EDGES_E2M1 = 5_168
_NUM_EDGES_E4M3 = 2_660


def _all_bfloat16():
  bits = np.arange(2**16, dtype=np.uint32) << 16
  return bits.view(np.float32)


def _is_subnormal(x):
  return (x != 0) & (np.abs(x) < _SMALLEST_NORMAL)


def _as_e4m3(codes):
  return jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn))


def _bytes(scales):
  return np.asarray(scales).view(np.uint8)


def _bits(values):
  return np.asarray(values, np.float32).view(np.uint32)
