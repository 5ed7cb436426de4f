"""Matmuls with NVFP4 weights in Triton, for Hopper (compute capability 9.0).

`y[M, N] = x[M, K] @ w[N, K].T`, K a multiple of 128. Codes times block scales
are bfloat16 numbers, exactly; tensor cores multiply them exactly and add in
float32. Global scales are applied to the sum. `x` is bfloat16, or quantized and
then decoded by XLA. With few rows of `x`, `w` is decoded in registers, and read
as it is stored; with many, XLA decodes `w` too, which then costs little.

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
  if wq.format.name != 'nvfp4':
    return f'the Triton matmul has no {wq.format.name} weights'
  columns, step = qtensor.num_columns(wq), triton_decode.STEP
  if columns % step:
    return f'K = {columns} is not a multiple of {step}'
  is_quantized = isinstance(x, qtensor.QTensor)
  if is_quantized and x.format.name == 'fp8_block':
    return 'the Triton matmul has no fp8_block operands'
  if not is_quantized and x.dtype != jnp.bfloat16:
    return f'x is {x.dtype}, not bfloat16'
  rows = x.data.shape[0] if is_quantized else x.shape[0]
  return None if rows else 'x has no rows'


@functools.partial(jax.jit, static_argnames='tile')
def scaled_matmul(
    x: jax.Array | qtensor.QTensor,
    wq: qtensor.QTensor,
    *,
    tile: Tile | None = None,
) -> jax.Array:
  """Returns `x @ w.T`, float32 `[M, N]`: see `kernels.scaled_matmul`.

  Works under jit and vmap; has no derivative.

  Args:
    x: quantized `[M, K]`, or bfloat16; `unsupported` gives None.
    wq: quantized `[N, K]`, nvfp4.
    tile: what a program computes; None for what suits the shape.
  """
  scale = jnp.ones((1, 1)) if wq.global_scale is None else wq.global_scale
  if getattr(x, 'global_scale', None) is not None:
    scale = exact.multiply(x.global_scale, scale)
  x, wq, scale = lax.stop_gradient((x, wq, scale))
  unit = triton_decode.UNIT  # of the sums
  if isinstance(x, jax.Array):
    x = triton_decode.permute(x)
  elif x.format.name == 'nvfp4':
    x, unit = triton_decode.decode_permuted(x), triton_decode.UNIT**2
  else:
    x = triton_decode.permute(qtensor.decode(x))
  scale = jnp.broadcast_to(scale, (x.shape[0], 1))
  if x.shape[0] <= _FEW_ROWS:
    few = functools.partial(_few, unit=unit, tile=tile)
    arrays = (x, wq.data, wq.block_scale, scale)
    return triton_call.with_vmap_loop(few)(*arrays)
  many = functools.partial(_many, unit=unit, tile=tile)
  w = triton_decode.decode_permuted(wq)
  return triton_call.with_vmap_loop(many)(x, w, scale)


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


def _few(x, data, block_scale, scale, *, unit, tile):
  """Returns `[M, N]`; columns of `x` are permuted, `scale` is `[M, 1]`."""
  (m, k), n = x.shape, data.shape[0]
  parts = num_parts(n, k)
  if tile is None:
    rows = max(triton.next_power_of_2(m), 16)
    tile = Tile(rows, 64, 4, 4)
  tile = Tile(*tile)
  y = _call(
      nvfp4_matmul,
      (x, data, block_scale, scale.reshape(-1)),
      (parts, m, n),
      (triton.cdiv(m, tile.rows), triton.cdiv(n, tile.features), parts),
      tile,
      K=k,
      PARTS=parts,
      UNIT=unit,
  )
  if parts == 1:
    return y[0]
  total = y[0]
  for part in range(1, parts):
    total += y[part]
  return (total * unit) * scale


def _many(x, w, scale, *, unit, tile):
  """Returns `[M, N]`; columns of `x` and of bfloat16 `w` are permuted."""
  (m, k), n = x.shape, w.shape[0]
  tile = Tile(128, 128, 8, 4) if tile is None else Tile(*tile)
  grid = (triton.cdiv(m, tile.rows), triton.cdiv(n, tile.features))
  arrays = (x, w, scale.reshape(-1))
  parts = num_parts(n, k)
  return _call(
      bfloat16_matmul, arrays, (m, n), grid, tile, K=k, PARTS=parts, UNIT=unit
  )


def _call(kernel, arrays, shape, grid, tile, **static):
  (y,) = triton_call.call(
      kernel,
      *arrays,
      out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32)],
      grid=grid,
      num_warps=tile.warps,
      num_stages=tile.stages,
      M=shape[-2],
      N=shape[-1],
      ROWS=tile.rows,
      FEATURES=tile.features,
      **static,
  )
  return y


@triton.jit
def _store(y_ptr, y, token, feature, M, N):
  """Stores y `[features, tokens]` to `[M, N]`."""
  at = token[None, :].to(tl.int64) * N + feature[:, None]
  tl.store(y_ptr + at, y, mask=(token < M)[None, :] & (feature < N)[:, None])


@triton.jit
def nvfp4_matmul(
    x_ptr, codes_ptr, scale_ptr, outer_ptr, y_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
  """Writes the sums of parts `[PARTS, M, N]`, or y if there is but one.

  x has its columns in the order of `permute`. Sums mean UNIT times as much.
  """
  token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
  part = tl.program_id(2)
  # Features beyond the last repeat it, and are not stored.
  w_row = tl.minimum(feature, N - 1).to(tl.int64)[:, None]
  words_ptr = codes_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
  words_ptr += w_row * (K // 8) + tl.arange(0, 16)[None, :]
  scale_ptr = scale_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
  scale_ptr += w_row * (K // 16) + tl.arange(0, 8)[None, :]
  x_ptr += token[None, :].to(tl.int64) * K + tl.arange(0, 128)[:, None]
  live = (token < M)[None, :]
  steps: tl.constexpr = K // 128 // PARTS
  y = tl.zeros((FEATURES, ROWS), tl.float32)
  for step in range(steps):
    column = (part * steps + step) * 128
    word = tl.load(words_ptr + column // 8)
    scale = tl.load(scale_ptr + column // 16)
    w = triton_decode.decode_words(word, scale)
    y = tl.dot(w, tl.load(x_ptr + column, mask=live, other=0.0), y)
  if PARTS == 1:
    outer = tl.load(outer_ptr + token, mask=token < M, other=0.0)
    y = (y * UNIT) * outer[None, :]
  _store(y_ptr + part.to(tl.int64) * M * N, y, token, feature, M, N)


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
    x_ptr, w_ptr, outer_ptr, y_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
  """Writes y `[M, N]`; columns of x and w are in the order of `permute`."""
  # Programs that run together share rows of both operands: groups of eight.
  rows, columns = tl.cdiv(M, ROWS), tl.cdiv(N, FEATURES)
  program = tl.program_id(1) * rows + tl.program_id(0)
  row_tile, column_tile = tl.swizzle2d(
      program % rows, program // rows, rows, columns, 8
  )
  token = row_tile * ROWS + tl.arange(0, ROWS)
  feature = column_tile * FEATURES + tl.arange(0, FEATURES)
  x_row = tl.minimum(token, M - 1).to(tl.int64)[None, :]
  w_row = tl.minimum(feature, N - 1).to(tl.int64)[:, None]
  steps: tl.constexpr = K // 64 // PARTS
  total = _bfloat16_part(x_ptr + x_row * K, w_ptr + w_row * K, 0, steps)
  for part in range(1, PARTS):
    first = part * steps
    total += _bfloat16_part(x_ptr + x_row * K, w_ptr + w_row * K, first, steps)
  outer = tl.load(outer_ptr + token, mask=token < M, other=0.0)
  _store(y_ptr, (total * UNIT) * outer[None, :], token, feature, M, N)
