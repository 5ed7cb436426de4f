"""QTensor: a quantized array, and the way back to values."""

import functools
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import formats

# The tile in which tensor cores read block scales: 128 rows of 4 scales.
_TILE_ROWS, _TILE_COLUMNS = 128, 4


@struct.dataclass
class QTensor:
  """A quantized `[..., M, K]` array; K is the contraction axis.

  The value of an element is `code * (block_scale * global_scale)`. No shape is
  stored: indexing, stacking, `vmap` and `scan` over leading axes just work.

  Attributes:
    data: uint8. E2M1: `[..., M, K/2]`, two codes a byte, low nibble first.
      E4M3: `[..., M, K]`.
    block_scale: `[..., M, K/block]` in the format's scale dtype (K/block
      rounded up for fp8_block); a 2D block's scale is repeated on its rows.
    global_scale: float32 decode scale, `[..., 1, 1]` (one for each trailing
      matrix) or `[..., M, 1]` (one for each row, "per token"); None where the
      format has none.
    format: its number format; static.
  """

  data: jax.Array
  block_scale: jax.Array
  global_scale: jax.Array | None
  format: formats.Format = struct.field(pytree_node=False)

  def packed(self) -> jax.Array:
    """Returns the element codes as stored, uint8: see `data`."""
    return self.data


@struct.dataclass
class Layer[T: (QTensor, jax.Array)]:
  """One matrix or vector of a stack, for kernels that read it where it is.

  In a loop over layers, an index costs nothing, a slice a copy.

  Attributes:
    stack: `[L, ...]`.
    index: int32, which of the L.
  """

  stack: T
  index: jax.Array

  def take(self) -> T:
    """Returns the matrix or vector."""
    take = lambda leaf: lax.dynamic_index_in_dim(
        leaf, self.index, keepdims=False
    )
    return jax.tree.map(take, self.stack)


def as_layer[T: (QTensor, jax.Array)](x: T | Layer[T]) -> Layer[T]:
  """Returns `x` as a layer: if it is none, of a stack of its own."""
  if isinstance(x, Layer):
    return x
  return Layer(jax.tree.map(lambda leaf: leaf[None], x), jnp.int32(0))


@jax.jit
def decode(q: QTensor) -> jax.Array:
  """Returns `code * block_scale`, `[..., M, K]`.

  The result is bfloat16 where block scales are E4M3 or E8M0: all products have
  at most six significant bits, so nothing is rounded (values below 2^-126 are
  flushed to zero on CPU). fp8_block has float32 scales and gives float32, each
  product rounded once. The global scale is left to the epilogue of the matmul:
  folded in here it would be rounded away.
  """
  values = _times_scale(q, formats.decode_scale(q.block_scale))
  if q.format.scale_dtype == jnp.float32:
    return values
  return values.astype(jnp.bfloat16)


def dequantize(q: QTensor, dtype: jax.typing.DTypeLike) -> jax.Array:
  """Returns `code * f32(block_scale * global_scale)`, rounded once to `dtype`.

  Args:
    q: the quantized tensor.
    dtype: jnp.float32 or jnp.bfloat16.

  Returns:
    `[..., M, K]` of `dtype`. A NaN block scale makes its block NaN.

  Raises:
    ValueError: another dtype.
  """
  dtype = jnp.dtype(dtype)
  if dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f'dtype {dtype} is not float32 or bfloat16.')
  return _dequantize(q, dtype)


@functools.partial(jax.jit, static_argnames='dtype')
def _dequantize(q, dtype):
  scale = formats.decode_scale(q.block_scale)
  if q.global_scale is not None:
    scale = exact.multiply(scale, q.global_scale)
  values = _times_scale(q, scale)
  return exact.to_bfloat16(values) if dtype == jnp.bfloat16 else values


def num_columns(q: QTensor) -> int:
  """Returns K, the size of the contraction axis."""
  return q.data.shape[-1] * (1 if _is_byte(q) else 2)


def swizzle(block_scale: jax.Array) -> jax.Array:
  """Returns block scales in the order in which tensor cores read them.

  Rows are padded to a multiple of 128 and columns to one of 4, with zero
  bytes. Tiles of 128 x 4 follow one another along the columns, then the rows;
  in a tile, the scale of row r and column c lies at
  `(r % 32) * 16 + r // 32 * 4 + c`.

  Args:
    block_scale: `[..., M, C]` of a dtype of one byte.

  Returns:
    `[..., ceil(M / 128) * ceil(C / 4) * 512]` of the same dtype.

  Raises:
    TypeError: the dtype has more than one byte.

  Reference: cuBLAS, "1D block scaling factors layout".
  """
  dtype = block_scale.dtype
  if dtype.itemsize != 1:
    raise TypeError(f'Only one-byte scales are swizzled, not {dtype}.')
  scale = lax.bitcast_convert_type(block_scale, jnp.uint8)
  *lead, rows, columns = scale.shape
  pad = ((0, -rows % _TILE_ROWS), (0, -columns % _TILE_COLUMNS))
  scale = jnp.pad(scale, [(0, 0)] * len(lead) + list(pad))
  tiles = (scale.shape[-2] // _TILE_ROWS, scale.shape[-1] // _TILE_COLUMNS)
  scale = scale.reshape(*lead, tiles[0], 4, 32, tiles[1], _TILE_COLUMNS)
  n = len(lead)
  scale = scale.transpose(*range(n), n, n + 3, n + 2, n + 1, n + 4)
  return lax.bitcast_convert_type(scale.reshape(*lead, -1), dtype)


def unswizzle(swizzled: jax.Array, rows: int, columns: int) -> jax.Array:
  """Returns the `[..., rows, columns]` block scales that were swizzled.

  Raises:
    ValueError: the length does not fit `rows` and `columns`.
  """
  tiles = (-(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS))
  *lead, length = swizzled.shape
  if length != tiles[0] * tiles[1] * _TILE_ROWS * _TILE_COLUMNS:
    raise ValueError(f'{length} scales are not those of {rows} x {columns}.')
  scale = swizzled.reshape(*lead, *tiles, 32, 4, _TILE_COLUMNS)
  n = len(lead)
  scale = scale.transpose(*range(n), n, n + 3, n + 2, n + 1, n + 4)
  scale = scale.reshape(*lead, tiles[0] * _TILE_ROWS, tiles[1] * _TILE_COLUMNS)
  return scale[..., :rows, :columns]


def split_blocks(x: jax.Array, block: int) -> jax.Array:
  """Returns `[..., K]` as `[..., K/block, block]`, padded with zeros."""
  pad = -x.shape[-1] % block
  if pad:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
  return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def merge_blocks(blocks: jax.Array, size: int) -> jax.Array:
  """Returns `[..., K/block, block]` as `[..., size]`, without padding."""
  *lead, count, block = blocks.shape
  return blocks.reshape(*lead, count * block)[..., :size]


def nbytes(tree: Any) -> int:
  """Returns the bytes that all arrays of a pytree hold."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _times_scale(q, scale):
  """Returns codes times `[..., M, K/block]` scales, float32 `[..., M, K]`."""
  if _is_byte(q):
    codes = lax.bitcast_convert_type(q.data, q.format.elem_dtype)
    values = formats.decode_e4m3(codes)
    blocks = split_blocks(values, q.format.block) * scale[..., None]
    return merge_blocks(blocks, values.shape[-1])
  # Low and high halves of bytes apart: in a scan over layers, XLA on CPU takes
  # ten times as long for codes that are unpacked first.
  packed = split_blocks(q.data, q.format.block // 2)
  halves = [
      formats.decode_e2m1(codes) * scale[..., None]
      for codes in (packed & 0xF, packed >> 4)
  ]
  return jnp.stack(halves, axis=-1).reshape(*q.data.shape[:-1], num_columns(q))


def _is_byte(q):
  """Whether an element is a byte (E4M3), not a nibble (E2M1)."""
  return q.format.elem_dtype == formats.MXFP8.elem_dtype
