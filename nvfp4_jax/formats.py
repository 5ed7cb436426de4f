"""Low-precision number formats: their constants and their element codes.

A format stores a tensor as element codes, one *block scale* for every `block`
consecutive elements of the last axis (or, with 2D scaling, for every square of
that size), and NVFP4 an outer float32 *global scale*. All scales are decode
scales: multiply to get values.

Codes are made and read with integer arithmetic only. A pair of casts such as
`x.astype(float8_e4m3fn).astype(float32)` is removed by XLA on GPUs, where it
returns `x` unrounded; integer code is rounded everywhere.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
  """Constants of a format.

  Attributes:
    name: lower-case name, as users write it.
    elem_dtype: dtype of an element.
    elem_max: largest finite element.
    block: number of elements that share a block scale.
    scale_dtype: dtype of a block scale.
    scale_max: largest finite block scale; larger ones saturate.
    has_global_scale: whether there is an outer float32 scale.
  """

  name: str
  elem_dtype: Any
  elem_max: float
  block: int
  scale_dtype: Any
  scale_max: float
  has_global_scale: bool = False


_E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)

NVFP4 = Format(
    name='nvfp4',
    elem_dtype=_E2M1,
    elem_max=6.0,
    block=16,
    scale_dtype=_E4M3,
    scale_max=448.0,
    has_global_scale=True,
)
MXFP8 = Format(
    name='mxfp8',
    elem_dtype=_E4M3,
    elem_max=448.0,
    block=32,
    scale_dtype=_E8M0,
    scale_max=2.0**127,
)
MXFP4 = Format(
    name='mxfp4',
    elem_dtype=_E2M1,
    elem_max=6.0,
    block=32,
    scale_dtype=_E8M0,
    scale_max=2.0**127,
)
FP8_BLOCK = Format(
    name='fp8_block',
    elem_dtype=_E4M3,
    elem_max=448.0,
    block=128,
    scale_dtype=np.dtype(np.float32),
    scale_max=float(np.finfo(np.float32).max),
)

FORMATS = {fmt.name: fmt for fmt in (NVFP4, MXFP8, MXFP4, FP8_BLOCK)}

# E2M1 code c has magnitude c / 2 below 2; from 2 on, exponent and mantissa lie
# in float32's places after a shift by 22 and this offset (1.0 is code 2).
_E2M1_OFFSET = (127 << 1) - 2
# E4M3 normal codes (exponent bias 7) in float32's places (bias 127).
_E4M3_OFFSET = (127 - 7) << 3
_E4M3_NAN = 0x7F
_E4M3_MAX_CODE = 0x7E
_E8M0_NAN = 0xFF


def encode_e2m1(v: jax.Array) -> jax.Array:
  """Returns the 4-bit E2M1 code of `v`, rounded to nearest even.

  Magnitudes above 5 give 6 (saturation). The sign bit is set where `v < 0`,
  also if `v` rounds to zero; it is clear for an exact -0.0.

  Args:
    v: float32, any shape, no NaN.

  Returns:
    uint8 codes 0-15 of the shape of `v`: sign << 3 | magnitude code.

  Reference: thresholds and signs of TransformerEngine's reference_nvfp4.py.
  """
  magnitude = jnp.abs(v)
  bits = lax.bitcast_convert_type(magnitude, jnp.uint32)
  half_ulp_even = jnp.uint32(0x1FFFFF) + ((bits >> 22) & 1)
  large = ((bits + half_ulp_even) >> 22) - jnp.uint32(_E2M1_OFFSET)
  small = (magnitude > 0.25).astype(jnp.uint32) + (magnitude >= 0.75)
  code = jnp.minimum(jnp.where(magnitude < 1.0, small, large), 7)
  return (code | ((v < 0).astype(jnp.uint32) << 3)).astype(jnp.uint8)


def decode_e2m1(code: jax.Array) -> jax.Array:
  """Returns the float32 value of each 4-bit E2M1 code (uint8, 0-15)."""
  code = code.astype(jnp.uint32)
  magnitude = code & 7
  shifted = (magnitude + jnp.uint32(_E2M1_OFFSET)) << 22
  bits = jnp.where(magnitude == 1, jnp.uint32(0x3F000000), shifted)
  bits = jnp.where(magnitude == 0, jnp.uint32(0), bits)
  sign = (code >> 3) << 31
  return lax.bitcast_convert_type(bits | sign, jnp.float32)


def encode_e2m1_stochastic(v: jax.Array, uniform: jax.Array) -> jax.Array:
  """Returns the E2M1 code of `v`, up or down in proportion to the distance.

  With the grid's step at |v| (1/2 below 2, 1 below 4, 2 above) the magnitude is
  `floor((|v| + uniform * step) / step) * step`, at most 6, so that the expected
  value is `v` for |v| <= 6. The sign is set where `v < 0`.

  Args:
    v: float32, any shape, no NaN.
    uniform: float32 in [0, 1), of that shape.

  Returns:
    uint8 codes 0-15.

  Reference: TransformerEngine's software stochastic_round_fp4_e2m1 (ptx.cuh),
    whose `uniform` is a random byte / 256.
  """
  magnitude = jnp.abs(v)
  step = jnp.where(magnitude < 4.0, 1.0, 2.0)
  step = jnp.where(magnitude < 2.0, 0.5, step)
  # Exact, so that it does not matter whether it is contracted: a power of two.
  raised = magnitude + uniform * step
  step = jnp.where(raised < 4.0, 1.0, 2.0)
  step = jnp.where(raised < 2.0, 0.5, step)
  on_grid = jnp.minimum(jnp.floor(raised / step) * step, 6.0)
  sign = (v < 0).astype(jnp.uint8) << 3
  return encode_e2m1(on_grid) | sign


def encode_e4m3(v: jax.Array) -> jax.Array:
  """Returns the E4M3 number nearest to `v`, ties to even, saturating.

  Args:
    v: float32, any shape; magnitudes above 448 give 448, NaN gives NaN (byte
      0x7F). The sign is that of `v`, also of a zero.

  Returns:
    float8_e4m3fn of the shape of `v`.
  """
  bits = lax.bitcast_convert_type(v, jnp.uint32)
  sign, bits = (bits >> 31) << 7, bits & 0x7FFFFFFF
  magnitude = jnp.abs(v)
  half_ulp_even = jnp.uint32(0x7FFFF) + ((bits >> 20) & 1)
  normal = ((bits + half_ulp_even) >> 20) - jnp.uint32(_E4M3_OFFSET)
  # Below 2^-6 the grid is uniform with step 2^-9; the product is exact.
  tiny = lax.round(magnitude * 512.0, lax.RoundingMethod.TO_NEAREST_EVEN)
  is_tiny = magnitude < 2.0**-6
  tiny = jnp.where(is_tiny, tiny, 0.0).astype(jnp.uint32)
  code = jnp.minimum(jnp.where(is_tiny, tiny, normal), _E4M3_MAX_CODE) | sign
  code = jnp.where(jnp.isnan(v), jnp.uint32(_E4M3_NAN), code)
  return lax.bitcast_convert_type(code.astype(jnp.uint8), _E4M3)


def decode_e4m3(scale: jax.Array) -> jax.Array:
  """Returns the float32 value of each float8_e4m3fn number."""
  bits = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
  code, sign = bits & 0x7F, (bits >> 7) << 31
  tiny = lax.bitcast_convert_type(
      code.astype(jnp.float32) * 2.0**-9, jnp.uint32
  )
  normal = (code + jnp.uint32(_E4M3_OFFSET)) << 20
  magnitude = jnp.where(code < 8, tiny, normal)
  value = lax.bitcast_convert_type(magnitude | sign, jnp.float32)
  return jnp.where(code == _E4M3_NAN, jnp.float32(jnp.nan), value)


def encode_e8m0(s: jax.Array) -> jax.Array:
  """Returns the smallest power of two that is not below `s`, as E8M0.

  A byte b stands for 2^(b - 127). Rounding up keeps `x / scale` in range where
  `s` is amax / elem_max.

  Args:
    s: float32, any shape, non-negative; 0 gives byte 0 (2^-127), infinity 254
      and NaN 255 (NaN).

  Returns:
    float8_e8m0fnu of the shape of `s`.

  Reference: TransformerEngine's float_to_e8m0 (util/ptx_arch_spec.cuh).
  """
  bits = lax.bitcast_convert_type(s, jnp.uint32)
  exponent, mantissa = bits >> 23, bits & 0x7FFFFF
  is_small = (exponent == 0) & (mantissa <= 0x400000)  # 2^-127 is not normal
  up = (mantissa != 0) & (exponent != 254) & ~is_small
  special = jnp.where(mantissa == 0, jnp.uint32(254), jnp.uint32(_E8M0_NAN))
  code = jnp.where(exponent == 255, special, exponent + up.astype(jnp.uint32))
  return lax.bitcast_convert_type(code.astype(jnp.uint8), _E8M0)


def decode_e8m0(scale: jax.Array) -> jax.Array:
  """Returns the float32 value of each float8_e8m0fnu number, 2^(byte - 127)."""
  return _power_of_two(lax.bitcast_convert_type(scale, jnp.uint8))


def reciprocal_e8m0(scale: jax.Array) -> jax.Array:
  """Returns 2^(127 - byte), float32, exactly; NaN for NaN."""
  code = lax.bitcast_convert_type(scale, jnp.uint8)
  # Byte 255 wraps to 255 again, which is NaN too.
  return _power_of_two(jnp.uint8(254) - code)


def decode_scale(scale: jax.Array) -> jax.Array:
  """Returns the float32 value of block scales of any format."""
  if scale.dtype == _E4M3:
    return decode_e4m3(scale)
  if scale.dtype == _E8M0:
    return decode_e8m0(scale)
  return scale


def pack_nibbles(codes: jax.Array) -> jax.Array:
  """Packs 4-bit codes `[..., K]` to uint8 `[..., K/2]`, even index low."""
  pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
  return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
  """Unpacks uint8 `[..., K/2]` to 4-bit codes `[..., K]`, low nibble first."""
  shifts = jnp.array([0, 4], jnp.uint8)
  pairs = (packed[..., None] >> shifts) & 0xF
  return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _power_of_two(code):
  code = code.astype(jnp.uint32)
  bits = jnp.where(code == 0, jnp.uint32(0x400000), code << 23)
  value = lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where(code == _E8M0_NAN, jnp.float32(jnp.nan), value)
