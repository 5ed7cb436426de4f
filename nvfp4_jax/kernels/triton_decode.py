"""Decoders of NVFP4 in Triton: codes and scales in, bfloat16 values out.

Compute capability 9.0 and up. A thread takes words of eight codes, which have
one block scale. `decode_64` is for kernels that decode in registers; it gives
columns in the order of `permute`.
"""

import jax
from jax import lax
import jax.numpy as jnp
import triton
import triton.language as tl

from nvfp4_jax import qtensor
from nvfp4_jax.kernels import triton_call

STEP = 128  # columns that `permute` keeps together
UNIT = 128  # what `decode_permuted` and `decode_64` divide by
_WORDS = 512  # of a program
_STEPS = 32


def unsupported(q: qtensor.QTensor) -> str | None:
  """Returns why this kernel cannot decode `q`, or None if it can."""
  if q.format.name != 'nvfp4':
    return f'{q.format.name} has no Triton decoder'
  if not q.data.size:
    return f'q of shape {q.data.shape} is empty'
  return None


def decode(q: qtensor.QTensor) -> jax.Array:
  """Returns what `qtensor.decode` does, bfloat16 `[..., M, K]`."""
  return _decode(q.data, q.block_scale, None)


def dequantize(q: qtensor.QTensor) -> jax.Array:
  """Returns what `qtensor.dequantize` does, bfloat16 `[..., M, K]`."""
  return _decode(q.data, q.block_scale, q.global_scale)


def decode_permuted(q: qtensor.QTensor) -> jax.Array:
  """Returns `permute(decode(q) / UNIT)`, exactly; K is a multiple of STEP."""
  arrays = lax.stop_gradient((q.data, q.block_scale))
  return triton_call.with_vmap(call_permuted)(*arrays)


def unsupported_operands(
    x: jax.Array | qtensor.QTensor, wq: qtensor.QTensor
) -> str | None:
  """Returns why matmuls cannot decode their operands, or None if they can."""
  if wq.format.name != 'nvfp4':
    return f'the Triton matmul has no {wq.format.name} weights'
  columns = qtensor.num_columns(wq)
  if columns % STEP:
    return f'K = {columns} is not a multiple of {STEP}'
  is_quantized = isinstance(x, qtensor.QTensor)
  if is_quantized and x.format.name == 'fp8_block':
    return 'the Triton matmul has no fp8_block operands'
  if not is_quantized and x.dtype != jnp.bfloat16:
    return f'x is {x.dtype}, not bfloat16'
  rows = x.data.shape[0] if is_quantized else x.shape[0]
  return None if rows else 'x has no rows'


def left_operand(x: jax.Array | qtensor.QTensor) -> tuple[jax.Array, int]:
  """Returns bfloat16 `[M, K]` with permuted columns, and the unit of sums.

  Sums of its products with what `decode_64` gives mean so many times as much.

  Args:
    x: bfloat16, or quantized, and not to fp8_block.
  """
  x = lax.stop_gradient(x)
  if isinstance(x, jax.Array):
    return permute(x), UNIT
  if x.format.name == 'nvfp4':
    return decode_permuted(x), UNIT**2
  return permute(qtensor.decode(x)), UNIT


def permute(x: jax.Array) -> jax.Array:
  """Returns `[M, K]` with each 128 columns in the order of their decoding.

  They are 0, 8, ..., 120, then 4, 12, ..., then 1, 9, ... and 5, 13, ...: a
  word holds eight codes, and decoding yields those at i and i + 4 together.
  """
  m, k = x.shape
  x = x.reshape(m, k // STEP, 16, 2, 4)
  return x.transpose(0, 1, 4, 3, 2).reshape(m, k)


def _decode(data, block_scale, global_scale):
  arrays = (data, block_scale)
  if global_scale is not None:
    arrays += (global_scale,)
  arrays = lax.stop_gradient(arrays)
  return triton_call.with_vmap(_call)(*arrays)


def _call(data, block_scale, global_scale=None):
  *lead, m, half = data.shape
  words, per_scale = data.size // 4, 0
  if global_scale is None:
    global_scale = block_scale  # not read
  else:
    per_scale = data.size // global_scale.size // 4
  (y,) = triton_call.call(
      nvfp4_decode,
      data,
      block_scale,
      global_scale,
      out_shape=[jax.ShapeDtypeStruct((*lead, m, 2 * half), jnp.bfloat16)],
      grid=(triton.cdiv(words, _WORDS),),
      num_warps=4,
      WORDS=words,
      PER_SCALE=per_scale,
      BLOCK=_WORDS,
  )
  return y


def call_permuted(data: jax.Array, block_scale: jax.Array) -> jax.Array:
  """Returns `decode_permuted` of codes and scales; without vmap rule."""
  *lead, half = data.shape
  steps = 2 * data.size // STEP
  (y,) = triton_call.call(
      nvfp4_decode_permuted,
      data,
      block_scale,
      out_shape=[jax.ShapeDtypeStruct((*lead, 2 * half), jnp.bfloat16)],
      grid=(triton.cdiv(steps, _STEPS),),
      num_warps=4,
      STEPS=steps,
      BLOCK=_STEPS,
  )
  return y


@triton.jit
def word_scale(scale):
  """Returns what `decode_64` takes of bytes of E4M3 `[F, 8]`: of each word."""
  scale = scale.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 2.0**119
  scale = tl.broadcast_to(scale[:, :, None], (scale.shape[0], 8, 2))
  return tl.reshape(scale, (scale.shape[0], 16)).to(tl.bfloat16)


@triton.jit
def _decode_place(word, scale, PLACE: tl.constexpr):
  """Returns bfloat16 code * scale / 2^7 at PLACE and PLACE + 4, exactly.

  A code times 2^12 + 2^6 has its sign in bfloat16's place, and its magnitude
  where it means code * 2^-126, the subnormal 0.5 included; two codes fit in a
  word. `scale` is the block scale times 2^119.
  """
  bits = ((word >> 4 * PLACE) & 0x000F000F) * 0x1040 & 0x81C081C0
  low = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
  high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
  return low * scale, high * scale


@triton.jit
def decode_64(word, scale, HALF: tl.constexpr):
  """Returns half of code * scale / 2^7, bfloat16 `[F, 64]`.

  Columns are in the order of `permute`; a register of each thread stays there.

  For a dot whose left operand stays in registers, take both halves, one dot
  after the other: the second runs on while the next step decodes for the first,
  and is waited for there. One dot of 128 columns would run on while the
  registers of its own operand are written anew (Triton 3.6, its issue 9433).

  Args:
    word: uint32 `[F, 16]`, eight codes each.
    scale: `word_scale` of their block scales.
    HALF: 0 for the first half of 128 columns, 1 for the second.
  """
  low, high = _decode_place(word, scale, 2 * HALF)
  next_low, next_high = _decode_place(word, scale, 2 * HALF + 1)
  w = tl.join(tl.join(low, next_low), tl.join(high, next_high))
  return tl.reshape(tl.permute(w, (0, 2, 3, 1)), (w.shape[0], 64))


@triton.jit
def nvfp4_decode_permuted(
    codes_ptr, scale_ptr, y_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
  """Writes code * block scale / 2^7, 128 columns a step, in another order."""
  step = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
  live = step < STEPS
  codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
  scale_ptr = scale_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
  at = step * 16 + tl.arange(0, 16)[None, :]
  word = tl.load(codes_ptr + at, mask=live, other=0)
  at = step * 8 + tl.arange(0, 8)[None, :]
  scale = word_scale(tl.load(scale_ptr + at, mask=live, other=0))
  at = step * 128 + tl.arange(0, 64)[None, :]
  tl.store(y_ptr + at, decode_64(word, scale, 0), mask=live)
  tl.store(y_ptr + (at + 64), decode_64(word, scale, 1), mask=live)


@triton.jit
def _pair(word, scale, PLACE: tl.constexpr):
  """Returns the values of byte PLACE times the scale, as two bfloat16."""
  byte = word >> 8 * PLACE
  # The bits of E2M1 in float32's places mean code * 2^-126.
  low = ((byte & 0x8) << 28) | ((byte & 0x7) << 22)
  high = ((byte & 0x80) << 24) | ((byte & 0x70) << 18)
  low = low.to(tl.float32, bitcast=True) * 2.0**126 * scale
  high = high.to(tl.float32, bitcast=True) * 2.0**126 * scale
  low = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
  high = high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
  return low | (high << 16)


@triton.jit
def nvfp4_decode(
    codes_ptr, scale_ptr, global_ptr, y_ptr,
    WORDS: tl.constexpr, PER_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
  """Writes code * block scale; times a global scale for PER_SCALE > 0 words."""
  word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
  live = word < WORDS
  codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
  codes = tl.load(codes_ptr + word, mask=live, other=0)
  scale = tl.load(scale_ptr + word // 2, mask=live, other=0.0).to(tl.float32)
  if PER_SCALE > 0:
    outer = tl.load(global_ptr + word // PER_SCALE, mask=live, other=0.0)
    scale = scale * outer
  even = tl.join(_pair(codes, scale, 0), _pair(codes, scale, 2))
  odd = tl.join(_pair(codes, scale, 1), _pair(codes, scale, 3))
  y = tl.reshape(tl.join(even, odd), (BLOCK, 4))
  y_ptr = y_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
  at = word[:, None] * 4 + tl.arange(0, 4)[None, :]
  tl.store(y_ptr + at, y, mask=live[:, None])
