"""QTensor: a quantized array, and the way back to values."""

import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import formats


@struct.dataclass
class QTensor:
  """A quantized `[..., M, K]` array; K is the contraction axis.

  The value of an element is `code * (block_scale * global_scale)`. No shape is
  stored: indexing, stacking, `vmap` and `scan` over leading axes just work.

  Attributes:
    data: uint8 `[..., M, K/2]`, two E2M1 codes a byte, low nibble first.
    block_scale: float8_e4m3fn `[..., M, K/16]`.
    global_scale: float32 decode scale, `[..., 1, 1]` (one for each trailing
      matrix) or `[..., M, 1]` (one for each row, "per token").
    format: its number format; static.
  """

  data: jax.Array
  block_scale: jax.Array
  global_scale: jax.Array
  format: formats.Format = struct.field(pytree_node=False)

  def packed(self) -> jax.Array:
    """Returns the element codes as stored, uint8 `[..., M, K/2]`."""
    return self.data


@jax.jit
def decode(q: QTensor) -> jax.Array:
  """Returns `code * block_scale`, bfloat16 `[..., M, K]`.

  All 4,064 finite products of an E2M1 and an E4M3 number have at most six
  significant bits, so nothing is rounded. The global scale is left to the
  epilogue of the matmul: folded in here it would be rounded away.
  """
  blocks = _code_values(q) * formats.decode_e4m3(q.block_scale)[..., None]
  return _merge_blocks(blocks).astype(jnp.bfloat16)


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
  scale = exact.multiply(formats.decode_e4m3(q.block_scale), q.global_scale)
  values = _merge_blocks(_code_values(q) * scale[..., None])
  return exact.to_bfloat16(values) if dtype == jnp.bfloat16 else values


def nbytes(tree: Any) -> int:
  """Returns the bytes that all arrays of a pytree hold."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _code_values(q: QTensor) -> jax.Array:
  """Returns element codes as float32 values, `[..., M, K/16, 16]`."""
  values = formats.decode_e2m1(formats.unpack_nibbles(q.data))
  return values.reshape(*q.block_scale.shape, q.format.block)


def _merge_blocks(blocks: jax.Array) -> jax.Array:
  *lead, blocks_per_row, block = blocks.shape
  return blocks.reshape(*lead, blocks_per_row * block)
