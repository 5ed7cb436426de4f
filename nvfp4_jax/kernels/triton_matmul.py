"""Matmuls with NVFP4 weights in Triton, for Hopper (compute capability 9.0).

`y[M, N] = x[M, K] @ w[N, K].T`, K a multiple of 128. Codes times block scales
are bfloat16 numbers, exactly; tensor cores multiply them exactly and add in
float32. Global scales are applied to the sum. `x` is bfloat16, or quantized and
then decoded by a kernel of its own. With few rows of `x`, `w` is decoded in
registers, and read as it is stored; with many, `w` is decoded first too, which
then costs little.

**A row's bits do not depend on M**, if tensor cores add as they do for tiles of
any width, which the tests ask a GPU. Features are the rows of the tile and
tokens its columns, so that any number of tokens takes the same steps of 16
along K. K is divided into parts whose number follows from N and K alone. In a
part, columns are added in the order of `triton_decode.permute`, from left to
right; then the sums of parts, first to last. With few rows, parts are programs
of their own and XLA adds their sums; with many, one program does it all.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import triton
import triton.language as tl

from nvfp4_jax import exact
from nvfp4_jax import qtensor
from nvfp4_jax.kernels import triton_call
from nvfp4_jax.kernels import triton_decode

WHY_NOT_CHOSEN = None
_FEW_ROWS = 128  # up to here, w is decoded in registers
_PROGRAMS = 256  # of 64 features that fill the 132 processors of an H200
_FEWEST_STEPS = 4  # of a part


class Tile(NamedTuple):
  """What one program computes: powers of two.

  Attributes:
    rows: rows of `x`, at least 16.
    features: rows of `w`, at least 64.
    warps: of 32 threads; 4 for each 64 features, or fewer.
    stages: steps that are loaded ahead.
  """

  rows: int
  features: int
  warps: int
  stages: int


def unsupported(
    x: jax.Array | qtensor.QTensor,
    wq: qtensor.QTensor,
    group_sizes: jax.Array | None,
    capability: float,
) -> str | None:
  """Returns why these kernels cannot multiply, or None if they can."""
  if capability != 9.0:
    return f'the Triton matmul is for compute capability 9.0, not {capability}'
  if group_sizes is not None or wq.data.ndim != 2:
    return 'the Triton matmul has no groups'
  if wq.global_scale is not None and wq.global_scale.shape[-2] != 1:
    return 'the Triton matmul has one global scale for all features'
  return triton_decode.unsupported_operands(x, wq)


@functools.partial(jax.jit, static_argnames=('dtype', 'tile'))
def scaled_matmul(
    x: jax.Array | qtensor.QTensor,
    wq: qtensor.QTensor | qtensor.Layer,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    tile: Tile | None = None,
) -> jax.Array:
  """Returns `x @ w.T` `[M, N]`: see `kernels.scaled_matmul`.

  Works under jit and vmap, also where only `x` has the axis; has no derivative.

  Args:
    x: quantized `[M, K]`, or bfloat16; `unsupported` gives None.
    wq: quantized `[N, K]`, nvfp4; of a layer, few rows read it where it is.
    dtype: float32, or bfloat16 to round to at last.
    tile: what a program computes; None for what suits the shape.
  """
  rows = x.shape[0] if isinstance(x, jax.Array) else x.data.shape[0]
  if isinstance(wq, qtensor.Layer) and rows <= _FEW_ROWS:
    stack, index = wq.stack, wq.index
    w_scale = stack.global_scale
    w_scale = None if w_scale is None else w_scale[index]
  else:
    wq = wq.take() if isinstance(wq, qtensor.Layer) else wq
    stack, index = jax.tree.map(lambda leaf: leaf[None], wq), jnp.int32(0)
    w_scale = wq.global_scale
  scale = jnp.ones((1, 1)) if w_scale is None else w_scale
  x_scale = getattr(x, 'global_scale', None)
  if x_scale is not None:
    scale = exact.multiply(x_scale, scale)
  stack, scale = lax.stop_gradient((stack, scale))
  x, unit = triton_decode.left_operand(x)
  scale = jnp.broadcast_to(scale, (rows, 1))
  multiply = functools.partial(
      _few if rows <= _FEW_ROWS else _many, unit=unit, dtype=dtype, tile=tile
  )
  arrays = (x, scale, index, stack.data, stack.block_scale)
  return _with_vmap(multiply)(*arrays)


def _with_vmap(multiply):
  """Returns `multiply`; under vmap, axes of stacks of weights become one.

  It takes x `[..., M, K]`, scale `[..., M, 1]`, index `[...]` and stacks `[S,
  N, ...]` of codes and block scales, and gives `[..., M, N]`.
  """
  run = jax.custom_batching.custom_vmap(multiply)

  @run.def_vmap
  def _(lanes, batched, *arrays):
    wide = lambda a, flag: a if flag else jnp.broadcast_to(a, (lanes, *a.shape))
    x, scale, index = map(wide, arrays[:3], batched[:3])
    data, block_scale = arrays[3:]
    if any(batched[3:]):
      data, block_scale = map(wide, arrays[3:], batched[3:])
      first = jnp.arange(lanes, dtype=jnp.int32) * data.shape[1]
      index += first.reshape(-1, *[1] * (index.ndim - 1))
      data, block_scale = (
          a.reshape(-1, *a.shape[2:]) for a in (data, block_scale)
      )
    return run(x, scale, index, data, block_scale), True

  return run


def num_parts(n: int, k: int) -> int:
  """Returns into how many parts K is divided, for weights `[n, k]`."""
  parts, steps = 1, k // triton_decode.STEP
  while (
      -(-n // 64) * parts < _PROGRAMS
      and steps % (2 * parts) == 0
      and steps // (2 * parts) >= _FEWEST_STEPS
  ):
    parts *= 2
  return parts


def _few(x, scale, index, data, block_scale, *, unit, dtype, tile):
  """See `_with_vmap`; columns of `x` are permuted."""
  (*lead, m, k), n = x.shape, data.shape[1]
  parts = num_parts(n, k)
  if tile is None:
    rows = max(triton.next_power_of_2(m), 16)
    tile = Tile(rows, 64, 4, 4)
  tile = Tile(*tile)
  y = _call(
      nvfp4_matmul,
      (x, data, block_scale, scale, index),
      jax.ShapeDtypeStruct(
          (*lead, parts, m, n), dtype if parts == 1 else jnp.float32
      ),
      index.size * parts,
      tile,
      K=k,
      PARTS=parts,
      UNIT=unit,
      INDEXED=data.shape[0] > 1,
  )
  total = y[..., 0, :, :]
  if parts == 1:
    return total
  for part in range(1, parts):
    total += y[..., part, :, :]
  y = (total * unit) * scale
  return exact.to_bfloat16(y) if dtype == jnp.bfloat16 else y


def _many(x, scale, index, data, block_scale, *, unit, dtype, tile):
  """See `_with_vmap`; columns of `x` are permuted."""
  (*lead, m, k), n = x.shape, data.shape[1]
  w = triton_decode.call_permuted(data, block_scale)
  return _call(
      bfloat16_matmul,
      (x, w, scale, index),
      jax.ShapeDtypeStruct((*lead, m, n), dtype),
      index.size,
      Tile(128, 128, 8, 4) if tile is None else Tile(*tile),
      K=k,
      PARTS=num_parts(n, k),
      UNIT=unit,
      INDEXED=data.shape[0] > 1,
  )


def _call(kernel, arrays, out_shape, depth, tile, **static):
  m, n = out_shape.shape[-2:]
  (y,) = triton_call.call(
      kernel,
      *arrays,
      out_shape=[out_shape],
      grid=(triton.cdiv(m, tile.rows), triton.cdiv(n, tile.features), depth),
      num_warps=tile.warps,
      num_stages=tile.stages,
      M=m,
      N=n,
      ROWS=tile.rows,
      FEATURES=tile.features,
      **static,
  )
  return y


@triton.jit
def _store(y_ptr, y, token, feature, M, N):
  """Stores y `[features, tokens]` to `[M, N]`."""
  at = token[None, :].to(tl.int64) * N + feature[:, None]
  y = y.to(y_ptr.dtype.element_ty)
  tl.store(y_ptr + at, y, mask=(token < M)[None, :] & (feature < N)[:, None])


@triton.jit
def nvfp4_matmul(
    x_ptr, codes_ptr, scale_ptr, outer_ptr, index_ptr, y_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    UNIT: tl.constexpr, INDEXED: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
  """Writes the sums of parts `[B, PARTS, M, N]`, or y if there is but one.

  Of x `[B, M, K]`, whose columns are in the order of `permute`; the b-th meets
  the matrix `index[b]` of a stack. Sums mean UNIT times as much.
  """
  token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
  lane, part = tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
  matrix = tl.load(index_ptr + lane).to(tl.int64) if INDEXED else 0
  # Features beyond the last repeat it, and are not stored.
  w_row = (matrix * N + tl.minimum(feature, N - 1).to(tl.int64))[:, None]
  words_ptr = codes_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
  words_ptr += w_row * (K // 8) + tl.arange(0, 16)[None, :]
  scale_ptr = scale_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
  scale_ptr += w_row * (K // 16) + tl.arange(0, 8)[None, :]
  x_row = lane.to(tl.int64) * M + token
  x_ptr += x_row[None, :] * K + tl.arange(0, 64)[:, None]
  live = (token < M)[None, :]
  steps: tl.constexpr = K // 128 // PARTS
  y = tl.zeros((FEATURES, ROWS), tl.float32)
  for step in range(steps):
    column = (part * steps + step) * 128
    word = tl.load(words_ptr + column // 8)
    scale = triton_decode.word_scale(tl.load(scale_ptr + column // 16))
    for half in tl.static_range(2):  # for the reason that `decode_64` gives
      x = tl.load(x_ptr + (column + 64 * half), mask=live, other=0.0)
      y = tl.dot(triton_decode.decode_64(word, scale, half), x, y)
  if PARTS == 1:
    outer = tl.load(outer_ptr + x_row, mask=token < M, other=0.0)
    y = (y * UNIT) * outer[None, :]
  at = tl.program_id(2).to(tl.int64) * M * N
  _store(y_ptr + at, y, token, feature, M, N)


@triton.jit
def _bfloat16_part(x_row, w_row, first, steps: tl.constexpr):
  """Returns the sum over `steps` * 64 columns, `[features, tokens]`."""
  index = tl.arange(0, 64)
  y = tl.zeros((w_row.shape[0], x_row.shape[1]), tl.float32)
  for step in range(first, first + steps):
    column = step * 64 + index
    w = tl.load(w_row + column[None, :])
    x = tl.load(x_row + column[:, None])
    y = tl.dot(w, x, y)
  return y


@triton.jit
def bfloat16_matmul(
    x_ptr, w_ptr, outer_ptr, index_ptr, y_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    UNIT: tl.constexpr, INDEXED: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
  """Writes y `[B, M, N]`; columns of x and w are in the order of `permute`."""
  # Programs that run together share rows of both operands: groups of eight.
  rows, columns = tl.cdiv(M, ROWS), tl.cdiv(N, FEATURES)
  program = tl.program_id(1) * rows + tl.program_id(0)
  row_tile, column_tile = tl.swizzle2d(
      program % rows, program // rows, rows, columns, 8
  )
  token = row_tile * ROWS + tl.arange(0, ROWS)
  feature = column_tile * FEATURES + tl.arange(0, FEATURES)
  lane = tl.program_id(2)
  matrix = tl.load(index_ptr + lane).to(tl.int64) if INDEXED else 0
  row = lane.to(tl.int64) * M  # the lane's first
  x_row = (row + tl.minimum(token, M - 1))[None, :]
  w_row = (matrix * N + tl.minimum(feature, N - 1).to(tl.int64))[:, None]
  steps: tl.constexpr = K // 64 // PARTS
  total = _bfloat16_part(x_ptr + x_row * K, w_ptr + w_row * K, 0, steps)
  for part in range(1, PARTS):
    first = part * steps
    total += _bfloat16_part(x_ptr + x_row * K, w_ptr + w_row * K, first, steps)
  outer = tl.load(outer_ptr + row + token, mask=token < M, other=0.0)
  y_ptr += row * N
  _store(y_ptr, (total * UNIT) * outer[None, :], token, feature, M, N)
