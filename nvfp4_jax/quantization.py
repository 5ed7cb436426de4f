"""Quantization: the definition of this project's bytes.

Element codes, block scales and amax as TransformerEngine computes them, byte
for byte, for every format that it has. Every step is a float32 operation
rounded once (`exact`), and every rounding to a narrow format is integer code
(`formats`).
"""

import dataclasses
import functools
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import exact
from nvfp4_jax import formats
from nvfp4_jax import hadamard
from nvfp4_jax import qtensor

type Outer = Literal['tensor', 'token', 'none']
type FourOverSix = Literal['mae', 'mse']
type Error = Literal['strict', 'fast']
type ScaleRounding = Literal['float32', 'power_of_two']
type Rounding = Literal['nearest', 'stochastic']

_FLOAT32_MAX = 3.4028234663852886e38
_ONE_SIXTH = 0.16666667163372040  # f32(1/6), 0x3e2aaaab
_ONE_448TH = 0.0022321429569274187  # f32(1/448), 0x3b124925
_INPUT_DTYPES = ('bfloat16', 'float16', 'float32')

_CHOICES = {
    'format': tuple(formats.FORMATS),
    'outer': ('tensor', 'token', 'none', None),
    'block_2d': (False, True),
    'four_over_six': ('mae', 'mse', None),
    'scale_max': (256, 448, None),
    'error': ('strict', 'fast'),
    'scale_rounding': ('float32', 'power_of_two'),
    'rounding': ('nearest', 'stochastic'),
    'hadamard': (False, True),
}
_NVFP4_ONLY = ('four_over_six', 'scale_max', 'error', 'rounding', 'hadamard')
# Pairs of options that exclude each other, with the values that do.
_EXCLUSIVE = (
    ({'block_2d': True}, {'outer': 'token'}),
    ({'block_2d': True}, {'hadamard': True}),
    ({'block_2d': True}, {'format': 'mxfp4'}),
    ({'hadamard': True}, {'outer': 'token'}),
    ({'hadamard': True}, {'four_over_six': 'mae'}),
    ({'hadamard': True}, {'four_over_six': 'mse'}),
    ({'rounding': 'stochastic'}, {'four_over_six': 'mae'}),
    ({'rounding': 'stochastic'}, {'four_over_six': 'mse'}),
    ({'scale_max': 256}, {'four_over_six': None}),
    ({'error': 'fast'}, {'four_over_six': None}),
)


@dataclasses.dataclass(frozen=True)
class QuantSpec:
  """How one tensor is quantized; static.

  Attributes:
    format: a name in `formats.FORMATS`.
    outer: what shares a global scale: 'tensor' (each trailing matrix) or
      'token' (each row, so that a row's bytes do not depend on its
      neighbours) with nvfp4, 'none' with formats that have none. None means
      'tensor' or 'none', as the format has it.
    block_2d: one block scale for a square of rows and columns (nvfp4 16x16,
      mxfp8 32x32, fp8_block 128x128), so that the codes of a matrix and of its
      transpose are the same. Not with 'token', which has a scale per row.
    four_over_six: None, or the error ('mae' or 'mse') by which each block
      chooses between a scale that maps its amax to 6 and one that maps it to
      4, where the grid is finer. A tie maps to 6. nvfp4 only.
    scale_max: E in the global encode scale 6 E / amax. None means 448, or 256
      with `four_over_six`, which leaves room for 1.5 times larger scales.
    error: 'strict' compares decoded values with `x`; 'fast' compares code times
      block scale with `x` times the global encode scale, which saves a division
      and decides differently in rare blocks. Only with `four_over_six`.
    scale_rounding: fp8_block's encode scale 448 / amax as 'float32', or rounded
      down to a 'power_of_two'.
    rounding: of elements: 'nearest' even, or 'stochastic', for which `quantize`
      takes a key. nvfp4 only, not with `four_over_six`.
    hadamard: rotate each 16 consecutive elements first (`hadamard.transform`).
      nvfp4 per tensor only, not with `four_over_six`.

  Raises:
    ValueError: a value that an option does not have, or options that exclude
      each other.
  """

  format: str = 'nvfp4'
  outer: Outer | None = None
  block_2d: bool = False
  four_over_six: FourOverSix | None = None
  scale_max: int | None = None
  error: Error = 'strict'
  scale_rounding: ScaleRounding = 'float32'
  rounding: Rounding = 'nearest'
  hadamard: bool = False

  def __post_init__(self):
    for name, choices in _CHOICES.items():
      if getattr(self, name) not in choices:
        raise ValueError(
            f'{name} {getattr(self, name)!r} is not one of {choices}.'
        )
    self._check_format()
    for one, other in _EXCLUSIVE:
      if self._has(one) and self._has(other):
        raise ValueError(f'{_text(one)} excludes {_text(other)}.')
    if self.outer is None:
      object.__setattr__(self, 'outer', self._outers()[0])
    if self.scale_max is None and self.format == 'nvfp4':
      object.__setattr__(self, 'scale_max', 256 if self.four_over_six else 448)

  def _check_format(self):
    if self.outer not in (None, *self._outers()):
      raise ValueError(
          f'outer {self.outer!r}: {self.format} has {self._outers()}.'
      )
    unused = () if self.format == 'nvfp4' else _NVFP4_ONLY
    unused += () if self.format == 'fp8_block' else ('scale_rounding',)
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name in unused and value != field.default:
        raise ValueError(
            f'{self.format} has no {field.name} {value!r}; only'
            f' {field.default!r} is possible.'
        )

  def _outers(self):
    has_global_scale = formats.FORMATS[self.format].has_global_scale
    return ('tensor', 'token') if has_global_scale else ('none',)

  def _has(self, options):
    return all(getattr(self, k) == value for k, value in options.items())


def quantize(
    x: jax.Array,
    spec: QuantSpec,
    *,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
) -> qtensor.QTensor:
  """Quantizes `x` along its last axis.

  With b the amax of a block, every operation rounded once to float32:

  * nvfp4: S = min(6 E / amax, FLT_MAX), D = 1 / S, the global scale. The block
    scale is e4m3(b * (S / 6)) (four over six: e4m3(b / 6 * S), or 1.5 times
    that), an element's code e2m1(x / (block_scale * D)).
  * mxfp8, mxfp4: the block scale is the smallest power of two not below
    b / 448 or b / 6, the code e4m3 or e2m1 of `x / block_scale`.
  * fp8_block: S = 448 / b (1 for b = 0, the largest finite number of x's dtype
    where it overflows), optionally rounded down to a power of two; the block
    scale is 1 / S and the code e4m3(x * S).

  Elements are rounded to nearest even and saturate, or rounded stochastically.

  Nothing is raised on values, so that jit changes nothing: where amax (nvfp4)
  or b (the others) is not finite, the codes are 0 and the block scales of that
  matrix, row or block are NaN (E4M3 0x7F, E8M0 0xFF); D is 1 there, and where
  amax is 0. An nvfp4 block whose scale underflows to 0 keeps its saturated
  codes and dequantizes to 0.

  Args:
    x: `[..., M, K]` bfloat16, float16 or float32. K must be a multiple of the
      block, with `block_2d` M too; fp8_block takes any M and K, as if padded
      with zeros. Leading axes are batch axes: each matrix has its own global
      scale(s).
    spec: how.
    key: randomness, for `rounding='stochastic'` and only then. The same key
      and shape give the same bytes; under `vmap` or `shard_map` give each part
      a key of its own, or its noise repeats.
    amax: largest magnitude, float32 `[..., 1, 1]`, or `[..., M, 1]` with
      `outer='token'`. Give it to share a global scale with another tensor or
      shard; it must not be below that of `x`. Default: taken from `x`.

  Returns:
    The QTensor; block scales of 2D blocks are repeated on each of their rows.

  Raises:
    TypeError: the dtype of `x` is not one of the three.
    ValueError: `x` has less than two axes, K or M is not a multiple of the
      block, amax has the wrong shape or the format no global scale, a key is
      missing or not needed.

  Reference: TransformerEngine 2.20: reference_nvfp4.py, mxfp8 and
    blockwise_quantizer_reference.py; four over six:
    https://arxiv.org/abs/2512.02010; MX formats: OCP Microscaling 1.0, with
    scales rounded up.
  """
  check_quantize(x, spec, key, amax)
  return _quantize(x, key, amax, spec)


def check_quantize(
    x: jax.Array,
    spec: QuantSpec,
    key: jax.Array | None,
    amax: jax.Array | None,
) -> None:
  """Raises what `quantize` raises, but for amax of a wrong shape."""
  check_operand(x, spec)
  _check_key(spec, key)
  if spec.outer == 'none' and amax is not None:
    raise ValueError(f'{spec.format} has no global scale and takes no amax.')


def quantize_in_groups(
    x: jax.Array,
    spec: QuantSpec,
    group_of_block: jax.Array,
    num_groups: int,
    *,
    key: jax.Array | None = None,
) -> qtensor.QTensor:
  """Quantizes `x` with global scales of their own for groups of columns.

  Column copies of a grouped matmul need it: the tokens of all experts lie along
  the last axis, and one expert's must not change another's bytes.

  Args:
    x: `[M, K]`.
    spec: how; formats without global scale are as in `quantize`.
    group_of_block: int32 `[K/block]`, the group of each block of columns.
    num_groups: groups are numbered below this.
    key: see `quantize`.

  Returns:
    The QTensor; its global scale is `[1 or M, K/block]`, equal in a group.

  Raises:
    TypeError, ValueError: see `quantize`.
  """
  check_operand(x, spec)
  _check_key(spec, key)
  if spec.outer == 'none':
    return _quantize(x, key, None, spec)
  return _quantize(x, key, None, spec, group_of_block, num_groups)


def compute_amax(x: jax.Array, spec: QuantSpec) -> jax.Array:
  """Returns the largest magnitude that each global scale of `x` covers.

  Args:
    x: `[..., M, K]`.
    spec: says what shares a global scale, and whether `x` is rotated first.

  Returns:
    float32 `[..., 1, 1]`, or `[..., M, 1]` with `outer='token'`; 0 if empty.

  Raises:
    ValueError: the format has no global scale.
  """
  if spec.outer == 'none':
    raise ValueError(f'{spec.format} has no global scale.')
  if spec.hadamard:
    x = hadamard.transform(x)
  return _outer_amax(x.astype(jnp.float32), spec)


def check_operand(x: jax.Array | jax.ShapeDtypeStruct, spec: QuantSpec) -> None:
  """Raises TypeError or ValueError where `spec` cannot quantize `x`."""
  block = formats.FORMATS[spec.format].block
  check_dtype(x)
  if x.ndim < 2:
    raise ValueError(f'Shape {x.shape} is not [..., M, K].')
  if spec.format == 'fp8_block':
    return
  for name, axis in (('last', -1), ('row', -2))[: 1 + spec.block_2d]:
    if x.shape[axis] % block:
      raise ValueError(
          f'The {name} axis of shape {x.shape} has size {x.shape[axis]}, which'
          f' is not a multiple of {block}, the block of {spec.format}.'
      )


@functools.partial(jax.jit, static_argnames=('spec', 'num_groups'))
def _quantize(x, key, amax, spec, group_of_block=None, num_groups=None):
  fmt = formats.FORMATS[spec.format]
  largest_input = float(jnp.finfo(x.dtype).max)
  if spec.hadamard:
    x = hadamard.transform(x)
  columns = x.shape[-1]
  blocks = qtensor.split_blocks(x.astype(jnp.float32), fmt.block)
  block_amax = _max_magnitude(blocks, -1)
  outer_amax = None
  if num_groups is not None:
    outer_amax = _amax_of_groups(block_amax, spec, group_of_block, num_groups)
  elif spec.outer != 'none':
    outer_amax = _outer_amax(block_amax, spec)
  if spec.block_2d:
    block_amax = _over_block_rows(block_amax, fmt.block, _max_magnitude)

  if outer_amax is not None:
    finite = jnp.isfinite(outer_amax)
    amax = outer_amax if amax is None else amax
    if amax.shape != outer_amax.shape:
      raise ValueError(f'amax has shape {amax.shape}, not {outer_amax.shape}.')
    amax = lax.optimization_barrier(amax.astype(jnp.float32))
    finite &= jnp.isfinite(amax)
    codes, scale, global_scale = _nvfp4(blocks, block_amax, amax, key, spec)
    finite = jnp.broadcast_to(finite, scale.shape)
  else:
    scale, factor = _single_level_scale(block_amax, largest_input, spec)
    factor = lax.optimization_barrier(factor)[..., None]
    codes, global_scale = _encode(blocks * factor, fmt), None
    finite = jnp.isfinite(block_amax)

  codes = jnp.where(finite[..., None], codes, 0)
  nan = np.array(np.nan, fmt.scale_dtype)
  scale = jnp.where(finite, scale, nan)
  data = qtensor.merge_blocks(codes, columns)
  if fmt.elem_dtype == formats.NVFP4.elem_dtype:
    data = formats.pack_nibbles(data)
  # The barrier makes XLA store the codes, instead of computing them again in
  # every consumer (three times slower on CPU when one decodes them at once).
  data, scale, global_scale = lax.optimization_barrier(
      (data, scale, global_scale)
  )
  return qtensor.QTensor(data, scale, global_scale, fmt)


def check_dtype(x: jax.Array | jax.ShapeDtypeStruct) -> None:
  """Raises TypeError where `x` is not bfloat16, float16 or float32."""
  if jnp.dtype(x.dtype).name not in _INPUT_DTYPES:
    raise TypeError(
        f'Cannot quantize {x.dtype}; give one of {", ".join(_INPUT_DTYPES)}.'
    )


def _check_key(spec, key):
  if spec.rounding == 'stochastic' and key is None:
    raise ValueError('Stochastic rounding needs a key.')
  if spec.rounding == 'nearest' and key is not None:
    raise ValueError('Rounding to nearest takes no key.')


def _text(options):
  return ' '.join(f'{name} {value!r}' for name, value in options.items())


def _encode(v, fmt):
  """Returns uint8 codes of scaled values, rounded to nearest even."""
  if fmt.elem_dtype == formats.NVFP4.elem_dtype:
    return formats.encode_e2m1(v)
  return lax.bitcast_convert_type(formats.encode_e4m3(v), jnp.uint8)


def _outer_amax(x, spec):
  axis = (-1,) if spec.outer == 'token' else (-2, -1)
  return _max_magnitude(x, axis, keepdims=True)


def _amax_of_groups(block_amax, spec, group_of_block, num_groups):
  """Returns for each block the amax of its group, `[1 or M, K/block]`."""
  if spec.outer == 'tensor':
    block_amax = _max_magnitude(block_amax, -2, keepdims=True)
  bits = lax.bitcast_convert_type(block_amax, jnp.int32)  # see _max_magnitude
  largest = jax.ops.segment_max(bits.T, group_of_block, num_groups)
  return lax.bitcast_convert_type(largest[group_of_block].T, jnp.float32)


def _max_magnitude(x, axis, keepdims=False):
  """Returns max |x|, 0 if empty, as the maximum of the bits taken as integers.

  Magnitudes are ordered like their bits, NaN above infinity. A float maximum
  may lose a NaN on CPU, depending on the shape.
  """
  bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
  largest = jnp.max(bits, axis=axis, keepdims=keepdims, initial=0)
  return lax.bitcast_convert_type(largest, jnp.float32)


def _over_block_rows(values, block, reduce):
  """Reduces `[..., M, C]` over each `block` rows; repeats it on these rows."""
  rows = values.shape[-2]
  pad = -rows % block
  if pad:
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 2) + [(0, pad), (0, 0)])
  *lead, padded, columns = values.shape
  values = values.reshape(*lead, padded // block, block, columns)
  reduced = jnp.repeat(reduce(values, -2), block, axis=-2)
  return reduced[..., :rows, :]


def _single_level_scale(block_amax, largest_input, spec):
  """Returns block scales, and the factors that they mean for elements."""
  if spec.format == 'fp8_block':
    ordinary = jnp.isfinite(block_amax) & (block_amax > 0)
    encode = exact.divide(448.0, jnp.where(ordinary, block_amax, 448.0))
    encode = jnp.where(jnp.isinf(encode), largest_input, encode)
    if spec.scale_rounding == 'power_of_two':
      bits = lax.bitcast_convert_type(encode, jnp.uint32)
      encode = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    return exact.divide(1.0, encode), encode
  if spec.format == 'mxfp8':
    scale = exact.multiply(block_amax, _ONE_448TH)
  else:
    scale = exact.divide(block_amax, 6.0)
  scale = formats.encode_e8m0(scale)
  return scale, formats.reciprocal_e8m0(scale)


def _nvfp4(blocks, block_amax, amax, key, spec):
  """Returns codes, block scales and global scales."""
  encode = _encode_scale(amax, spec)
  global_scale = exact.divide(1.0, encode)
  if spec.four_over_six:
    codes, scale = _four_over_six(
        blocks, block_amax, amax, encode, global_scale, spec
    )
    return codes, scale, global_scale
  sixth = exact.multiply(encode, _ONE_SIXTH)
  scale = formats.encode_e4m3(exact.multiply(block_amax, sixth))
  scaled = _scaled_elements(blocks, scale, global_scale)
  if spec.rounding == 'stochastic':
    uniform = jax.random.uniform(key, scaled.shape)
    codes = formats.encode_e2m1_stochastic(scaled, uniform)
  else:
    codes = formats.encode_e2m1(scaled)
  return codes, scale, global_scale


def _encode_scale(amax, spec):
  """Returns S = 6 E / amax, at most FLT_MAX, and 1 for amax 0, inf or NaN."""
  ordinary = jnp.isfinite(amax) & (amax > 0)
  numerator = formats.NVFP4.elem_max * spec.scale_max
  encode = exact.divide(numerator, jnp.where(ordinary, amax, numerator))
  return jnp.minimum(encode, _FLOAT32_MAX)


def _scaled_elements(blocks, scale, global_scale):
  """Returns `x / (scale * D)`, of which the codes are roundings."""
  step = exact.multiply(formats.decode_e4m3(scale), global_scale)
  encode = jnp.minimum(exact.divide(1.0, step), _FLOAT32_MAX)
  # A zero step gives inf, then FLT_MAX: non-zero elements saturate to 6.
  return blocks * lax.optimization_barrier(encode)[..., None]


def _four_over_six(blocks, block_amax, amax, encode, global_scale, spec):
  """Returns codes and block scales of the better of the two candidates."""
  base = exact.multiply(exact.divide(block_amax, 6.0), encode)
  candidates = jnp.stack([base, exact.multiply(base, 1.5)])
  scales = formats.encode_e4m3(candidates)
  codes = formats.encode_e2m1(_scaled_elements(blocks, scales, global_scale))
  # The fence does not round (six bits at most): it keeps two factors apart.
  product = exact.fence(
      formats.decode_e2m1(codes) * formats.decode_e4m3(scales)[..., None]
  )
  if spec.error == 'fast':
    difference = product - exact.multiply(blocks, encode[..., None])
  else:
    # Algebraically equal forms choose differently near ties.
    value = exact.divide(product * amax[..., None], 6.0 * spec.scale_max)
    difference = value - blocks
  if spec.four_over_six == 'mae':
    terms = jnp.abs(difference)
  else:
    terms = exact.multiply(difference, difference)
  error = exact.sum_in_order(terms)
  if spec.block_2d:
    sum_rows = lambda e, axis: exact.tree_sum(jnp.moveaxis(e, axis, -1))
    error = _over_block_rows(error, formats.NVFP4.block, sum_rows)
  to_six, to_four = error
  four = to_four < to_six
  return (
      jnp.where(four[..., None], codes[1], codes[0]),
      jnp.where(four, scales[1], scales[0]),
  )
