"""Quantization: the definition of this project's bytes.

NVFP4 as TransformerEngine computes it, byte for byte: element codes, block
scales and amax. Every step is a float32 operation rounded once (`exact`), and
every rounding to a narrow format is integer code (`formats`).
"""

import dataclasses
import functools
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import formats
from nvfp4_jax import qtensor

type Outer = Literal['tensor', 'token']
type FourOverSix = Literal['mae', 'mse']

_FLOAT32_MAX = 3.4028234663852886e38
_ONE_SIXTH = 0.16666667163372040  # f32(1/6), 0x3e2aaaab
_INPUT_DTYPES = ('bfloat16', 'float16', 'float32')


@dataclasses.dataclass(frozen=True)
class QuantSpec:
  """How one tensor is quantized; static.

  Attributes:
    format: a name in `formats.FORMATS`.
    outer: what shares a global scale: 'tensor' (each trailing matrix) or
      'token' (each row, so that a row's bytes do not depend on its
      neighbours). None means 'tensor'.
    four_over_six: None, or the error ('mae' or 'mse') by which each block
      chooses between a scale that maps its amax to 6 and one that maps it to
      4, where the grid is finer. A tie maps to 6.
    scale_max: E in the global encode scale 6 E / amax. None means 448, or 256
      with `four_over_six`, which leaves room for 1.5 times larger scales.
  """

  format: str = 'nvfp4'
  outer: Outer | None = None
  four_over_six: FourOverSix | None = None
  scale_max: int | None = None

  def __post_init__(self):
    _check_choice('format', self.format, tuple(formats.FORMATS))
    _check_choice('outer', self.outer, ('tensor', 'token', None))
    _check_choice('four_over_six', self.four_over_six, ('mae', 'mse', None))
    _check_choice('scale_max', self.scale_max, (256, 448, None))
    if self.outer is None:
      object.__setattr__(self, 'outer', 'tensor')
    if self.scale_max is None:
      object.__setattr__(self, 'scale_max', 256 if self.four_over_six else 448)
    if self.scale_max == 256 and not self.four_over_six:
      raise ValueError('scale_max 256 needs four_over_six; 448 is possible.')


def quantize(
    x: jax.Array,
    spec: QuantSpec,
    *,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
) -> qtensor.QTensor:
  """Quantizes `x` along its last axis, rounding to nearest even.

  With S = min(6 E / amax, FLT_MAX) and D = 1 / S, a block of amax b gets the
  block scale e4m3(b * (S / 6)) (with four over six: e4m3(b / 6 * S), or 1.5
  times that) and each element the code e2m1(x / (block_scale * D)).

  Nothing is raised on values, so that jit changes nothing: where amax is zero,
  D is 1 and all codes are 0; where it is not finite, D is 1, codes are 0 and
  the block scales of that matrix (or row) are NaN, byte 0x7F. A block whose
  scale underflows to 0 keeps its saturated codes and dequantizes to 0.

  Args:
    x: `[..., M, K]` bfloat16, float16 or float32, K a multiple of 16. Leading
      axes are batch axes: each matrix has its own global scale(s).
    spec: how.
    key: reserved for stochastic rounding; None with rounding to nearest.
    amax: largest magnitude, float32 `[..., 1, 1]`, or `[..., M, 1]` with
      `outer='token'`. Give it to share a global scale with another tensor or
      shard; it must not be below that of `x`. Default: taken from `x`.

  Returns:
    The QTensor.

  Raises:
    TypeError: the dtype of `x` is not one of the three.
    ValueError: `x` has less than two axes, K is not a multiple of the block,
      amax has the wrong shape, or a key is given.

  Reference: TransformerEngine 2.20, reference_nvfp4.py; four over six:
    https://arxiv.org/abs/2512.02010.
  """
  check_operand(x, spec)
  if key is not None:
    raise ValueError('Rounding to nearest takes no key.')
  return _quantize(x, amax, spec)


@functools.partial(jax.jit, static_argnames='spec')
def _quantize(x, amax, spec):
  fmt = formats.FORMATS[spec.format]
  x = x.astype(jnp.float32)
  blocks = x.reshape(*x.shape[:-1], x.shape[-1] // fmt.block, fmt.block)
  block_amax = _max_magnitude(blocks, -1)
  outer_amax = _reduce_amax(block_amax, spec)
  if amax is None:
    amax = outer_amax
  elif amax.shape != outer_amax.shape:
    raise ValueError(f'amax has shape {amax.shape}, not {outer_amax.shape}.')
  amax = lax.optimization_barrier(amax.astype(jnp.float32))
  finite = jnp.isfinite(amax)
  encode = _encode_scale(amax, fmt, spec)
  global_scale = exact.divide(1.0, encode)

  if spec.four_over_six:
    codes, scale = _four_over_six(
        blocks, block_amax, amax, encode, global_scale, spec
    )
  else:
    sixth = exact.multiply(encode, _ONE_SIXTH)
    scale = formats.encode_e4m3(exact.multiply(block_amax, sixth))
    codes = _codes(blocks, scale, global_scale)
  codes = jnp.where(finite[..., None], codes, 0)
  nan = jnp.array(jnp.nan, fmt.scale_dtype)
  # The barrier makes XLA store the codes, instead of computing them again in
  # every consumer (three times slower on CPU when one decodes them at once).
  data, block_scale, global_scale = lax.optimization_barrier(
      (
          formats.pack_nibbles(codes.reshape(x.shape)),
          jnp.where(finite, scale, nan),
          global_scale,
      )
  )
  return qtensor.QTensor(data, block_scale, global_scale, fmt)


def compute_amax(x: jax.Array, spec: QuantSpec) -> jax.Array:
  """Returns the largest magnitude that each global scale of `x` covers.

  Args:
    x: `[..., M, K]`.
    spec: says what shares a global scale.

  Returns:
    float32 `[..., 1, 1]`, or `[..., M, 1]` with `outer='token'`; 0 if empty.
  """
  return _reduce_amax(x.astype(jnp.float32), spec)


def check_operand(x: jax.Array, spec: QuantSpec) -> None:
  """Raises TypeError or ValueError where `spec` cannot quantize `x`."""
  block = formats.FORMATS[spec.format].block
  if jnp.dtype(x.dtype).name not in _INPUT_DTYPES:
    raise TypeError(
        f'Cannot quantize {x.dtype}; give one of {", ".join(_INPUT_DTYPES)}.'
    )
  if x.ndim < 2:
    raise ValueError(f'Shape {x.shape} is not [..., M, K].')
  if x.shape[-1] % block:
    raise ValueError(
        f'The last axis of shape {x.shape} has size {x.shape[-1]}, which is'
        f' not a multiple of {block}, the block of {spec.format}.'
    )


def _check_choice(name, value, choices):
  if value not in choices:
    raise ValueError(f'{name} {value!r} is not one of {choices}.')


def _reduce_amax(x, spec):
  axis = (-1,) if spec.outer == 'token' else (-2, -1)
  return _max_magnitude(x, axis, keepdims=True)


def _max_magnitude(x, axis, keepdims=False):
  """Returns max |x|, 0 if empty, as the maximum of the bits taken as integers.

  Magnitudes are ordered like their bits, NaN above infinity. A float maximum
  may lose a NaN on CPU, depending on the shape.
  """
  bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
  largest = jnp.max(bits, axis=axis, keepdims=keepdims, initial=0)
  return lax.bitcast_convert_type(largest, jnp.float32)


def _encode_scale(amax, fmt, spec):
  """Returns S = 6 E / amax, at most FLT_MAX, and 1 for amax 0, inf or NaN."""
  ordinary = jnp.isfinite(amax) & (amax > 0)
  numerator = fmt.elem_max * spec.scale_max
  encode = exact.divide(numerator, jnp.where(ordinary, amax, numerator))
  return jnp.minimum(encode, _FLOAT32_MAX)


def _codes(blocks, scale, global_scale):
  """Returns the E2M1 codes of `[..., M, K/16, 16]` under given scales."""
  step = exact.multiply(formats.decode_e4m3(scale), global_scale)
  encode = jnp.minimum(exact.divide(1.0, step), _FLOAT32_MAX)
  # A zero step gives inf, then FLT_MAX: non-zero elements saturate to 6.
  encode = lax.optimization_barrier(encode)[..., None]
  return formats.encode_e2m1(blocks * encode)


def _four_over_six(blocks, block_amax, amax, encode, global_scale, spec):
  """Returns codes and block scales of the better of the two candidates."""
  base = exact.multiply(exact.divide(block_amax, 6.0), encode)
  candidates = jnp.stack([base, exact.multiply(base, 1.5)])
  scales = formats.encode_e4m3(candidates)
  codes = _codes(blocks, scales, global_scale)
  to_six, to_four = _block_error(blocks, codes, scales, amax, spec)
  four = to_four < to_six
  return (
      jnp.where(four[..., None], codes[1], codes[0]),
      jnp.where(four, scales[1], scales[0]),
  )


def _block_error(blocks, codes, scale, amax, spec):
  """Returns the error of each block, added first to last.

  The decoded value is `code * scale * amax / (6 E)` with a rounding after each
  step. Algebraically equal forms choose differently near ties.
  """
  # The fence does not round (six bits at most): it keeps two factors apart.
  product = formats.decode_e2m1(codes) * formats.decode_e4m3(scale)[..., None]
  scaled = exact.fence(product) * amax[..., None]
  value = exact.divide(scaled, 6.0 * spec.scale_max)
  difference = value - blocks
  if spec.four_over_six == 'mae':
    return exact.sum_in_order(jnp.abs(difference))
  squares = exact.multiply(difference, difference)
  return exact.sum_in_order(squares)
