"""Low-precision number formats: their constants and their element codes.

A format stores a tensor as element codes, one *block scale* for every `block`
consecutive elements of the last axis, and (NVFP4) an outer float32 *global
scale*. All scales are decode scales: multiply to get values.

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
  """

  name: str
  elem_dtype: Any
  elem_max: float
  block: int
  scale_dtype: Any
  scale_max: float


NVFP4 = Format(
    name='nvfp4',
    elem_dtype=np.dtype(ml_dtypes.float4_e2m1fn),
    elem_max=6.0,
    block=16,
    scale_dtype=np.dtype(ml_dtypes.float8_e4m3fn),
    scale_max=448.0,
)

FORMATS = {NVFP4.name: NVFP4}

# E2M1 code c has magnitude c / 2 below 2; from 2 on, exponent and mantissa lie
# in float32's places after a shift by 22 and this offset (1.0 is code 2).
_E2M1_OFFSET = (127 << 1) - 2
# E4M3 normal codes (exponent bias 7) in float32's places (bias 127).
_E4M3_OFFSET = (127 - 7) << 3
_E4M3_NAN = 0x7F
_E4M3_MAX_CODE = 0x7E


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


def encode_e4m3(s: jax.Array) -> jax.Array:
  """Returns the E4M3 number nearest to `s >= 0`, ties to even, saturating.

  Args:
    s: float32, any shape, non-negative; values above 448 give 448, NaN gives
      NaN (byte 0x7F).

  Returns:
    float8_e4m3fn of the shape of `s`.
  """
  bits = lax.bitcast_convert_type(s, jnp.uint32)
  half_ulp_even = jnp.uint32(0x7FFFF) + ((bits >> 20) & 1)
  normal = ((bits + half_ulp_even) >> 20) - jnp.uint32(_E4M3_OFFSET)
  # Below 2^-6 the grid is uniform with step 2^-9; the product is exact.
  tiny = lax.round(s * 512.0, lax.RoundingMethod.TO_NEAREST_EVEN)
  is_tiny = s < 2.0**-6
  tiny = jnp.where(is_tiny, tiny, 0.0).astype(jnp.uint32)
  code = jnp.minimum(jnp.where(is_tiny, tiny, normal), _E4M3_MAX_CODE)
  code = jnp.where(jnp.isnan(s), jnp.uint32(_E4M3_NAN), code)
  return lax.bitcast_convert_type(code.astype(jnp.uint8), NVFP4.scale_dtype)


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


def pack_nibbles(codes: jax.Array) -> jax.Array:
  """Packs 4-bit codes `[..., K]` to uint8 `[..., K/2]`, even index low."""
  pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
  return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
  """Unpacks uint8 `[..., K/2]` to 4-bit codes `[..., K]`, low nibble first."""
  shifts = jnp.array([0, 4], jnp.uint8)
  pairs = (packed[..., None] >> shifts) & 0xF
  return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
