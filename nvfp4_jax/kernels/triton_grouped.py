"""Grouped matmuls in Triton, for Hopper (compute capability 9.0).

Rows are sorted by group, and each group has a matrix of its own: see
`kernels`. XLA divides the rows into blocks that lie in one group each (the
plan); a program computes one block and some features. Programs are in the order
of blocks, so that those of one group run together and its weights are read
from the L2 cache. A block that is not more than half full takes half a tile.
NVFP4 weights are decoded in registers, and never written.

Rows after the last group are blocks of their own, whose result is zero. What
other rows hold, NaN included, does not enter a result.

**A row's bits depend on nothing but the row and its group's weights** in
`matmul`, `dgrad` and `scaled_matmul`, if tensor cores add as they do for tiles
of any width, which the tests ask a GPU. Features are the rows of the tile and
tokens its columns, so that tiles for any number of tokens take the same steps
of 16 along the contraction axis, from left to right (in `scaled_matmul`, in the
order of `triton_decode.permute`).
"""

import functools
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import triton
import triton.language as tl

from nvfp4_jax import qtensor
from nvfp4_jax.kernels import triton_call
from nvfp4_jax.kernels import triton_decode

WHY_NOT_CHOSEN = None
_MULTIPLE = 64  # what N and K are multiples of
_MOST_ROWS = 128


class Tile(NamedTuple):
  """What one program computes: powers of two.

  Attributes:
    rows: rows of `x` or `dy`, at least 16; in `wgrad`, columns of `x`.
    features: columns of the result, or less if that does not divide them; in
      `wgrad`, columns of `dy`. At least 64.
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
    group_sizes: jax.Array,
    capability: float,
) -> str | None:
  """Returns why `scaled_matmul` cannot multiply, or None if it can."""
  if capability != 9.0:
    return _wrong_capability(capability)
  if wq.data.ndim != 3 or wq.data.shape[1] % _MULTIPLE:
    return f'w is not [E, N, K] with N a multiple of {_MULTIPLE}'
  if wq.global_scale is not None and wq.global_scale.shape[-2] != 1:
    return 'the grouped Triton matmul has one global scale for each group'
  if not group_sizes.shape[0]:
    return 'there are no groups'
  return triton_decode.unsupported_operands(x, wq)


def unsupported_bfloat16(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, capability: float
) -> str | None:
  """Returns why the others cannot multiply these operands, or None."""
  if capability != 9.0:
    return _wrong_capability(capability)
  for operand in (x, w):
    if operand.dtype != jnp.bfloat16:
      return f'an operand is {operand.dtype}, not bfloat16'
  for size in (*x.shape[1:], *w.shape[1:]):
    if size % _MULTIPLE:
      return f'a size of {size} is not a multiple of {_MULTIPLE}'
  has_any = x.shape[0] and group_sizes.shape[0]
  return None if has_any else 'x has no rows or no groups'


def _wrong_capability(capability):
  return (
      'the grouped Triton matmul is for compute capability 9.0, not'
      f' {capability}'
  )


@functools.partial(jax.jit, static_argnames=('dtype', 'tile'))
def scaled_matmul(
    x: jax.Array | qtensor.QTensor,
    wq: qtensor.QTensor | qtensor.Layer,
    group_sizes: jax.Array,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    tile: Tile | None = None,
) -> jax.Array:
  """Returns `x @ w[group].T` `[M, N]`: see `kernels.scaled_matmul`.

  Works under jit and vmap; has no derivative.

  Args:
    x: quantized `[M, K]`, or bfloat16; `unsupported` gives None. It is decoded
      to bfloat16 first.
    wq: quantized `[E, N, K]`, nvfp4; a layer is read where it is.
    group_sizes: `[E]` int32.
    dtype: float32, or bfloat16 to round to at last.
    tile: what a program computes; None for what suits the shape.
  """
  groups = group_sizes.shape[0]
  if isinstance(wq, qtensor.Layer):
    stack, first = wq.stack, wq.index * groups
  else:
    stack, first = wq, jnp.int32(0)
  flat = lambda leaf: leaf.reshape(-1, *leaf.shape[-2:])  # all experts
  data, block_scale = flat(stack.data), flat(stack.block_scale)
  x_scale, w_scale = getattr(x, 'global_scale', None), stack.global_scale
  x_scale = jnp.ones((1, 1)) if x_scale is None else x_scale
  w_scale = jnp.ones((1, 1, 1)) if w_scale is None else flat(w_scale)
  x, unit = triton_decode.left_operand(x)
  x_scale = jnp.broadcast_to(x_scale[:, 0], x.shape[:1])
  w_scale = jnp.broadcast_to(w_scale[:, 0, 0], data.shape[:1])
  arrays = (x, data, block_scale, x_scale, w_scale, group_sizes, first)
  run = triton_call.with_vmap(
      functools.partial(_scaled_matmul, unit=unit, dtype=dtype, tile=tile)
  )
  return run(*lax.stop_gradient(arrays))


@functools.partial(jax.jit, static_argnames='tile')
def matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    tile: Tile | None = None,
) -> jax.Array:
  """Returns `x @ w[group].T`, float32 `[M, N]`, without derivative.

  Args:
    x: `[M, K]` bfloat16; `unsupported_bfloat16` gives None.
    w: `[E, N, K]` bfloat16.
    group_sizes: `[E]` int32.
    tile: what a program computes; None for what suits the shape.
  """
  run = triton_call.with_vmap(functools.partial(_matmul, tile=tile))
  return run(*lax.stop_gradient((x, w, group_sizes)))


@functools.partial(jax.jit, static_argnames='tile')
def dgrad(
    dy: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    tile: Tile | None = None,
) -> jax.Array:
  """Returns `dy @ w[group]`, float32 `[M, K]`, without derivative.

  Args:
    dy: `[M, N]` bfloat16; `unsupported_bfloat16` gives None.
    w: `[E, N, K]` bfloat16.
    group_sizes: `[E]` int32.
    tile: what a program computes; None for what suits the shape.
  """
  run = triton_call.with_vmap(functools.partial(_dgrad, tile=tile))
  return run(*lax.stop_gradient((dy, w, group_sizes)))


@functools.partial(jax.jit, static_argnames='tile')
def wgrad(
    dy: jax.Array,
    x: jax.Array,
    group_sizes: jax.Array,
    *,
    tile: Tile | None = None,
) -> jax.Array:
  """Returns each group's `dy.T @ x`, float32 `[E, N, K]`, without derivative.

  A group's rows are added in steps of 16, first to last.

  Args:
    dy: `[M, N]` bfloat16; `unsupported_bfloat16` gives None.
    x: `[M, K]` bfloat16.
    group_sizes: `[E]` int32.
    tile: what a program computes; None for what suits the shape.
  """
  run = triton_call.with_vmap(functools.partial(_wgrad, tile=tile))
  return run(*lax.stop_gradient((dy, x, group_sizes)))


def block_rows(rows: int, groups: int) -> int:
  """Returns rows of a block, a power of two in 16-128.

  It is near the mean size of a group, which is all that is known when the
  program is compiled.
  """
  mean = max(rows // groups, 1)
  return min(max(triton.next_power_of_2(mean), 16), _MOST_ROWS)


def _scaled_matmul(
    x, data, block_scale, x_scale, w_scale, sizes, first, *, unit, dtype, tile
):
  """Returns `[..., M, N]`; columns of `x` are permuted.

  Weights are `[..., S, N, ...]`, of which E from `first` on are those of the
  groups; scales are `[..., M]` and `[..., S]`.
  """
  m, groups = x.shape[-2], sizes.shape[-1]
  if tile is None:
    rows = block_rows(m, groups)
    tile = Tile(rows, 128, 8, 3) if rows >= 64 else Tile(rows, 64, 4, 4)
  arrays = (x, data, block_scale, x_scale, w_scale)
  n = data.shape[-2]
  return _rows_call(
      nvfp4_rows, arrays, sizes, first, n, Tile(*tile), dtype, UNIT=unit
  )


def _matmul(x, w, sizes, *, tile):
  tile = _bfloat16_tile(tile, x.shape[-2], sizes.shape[-1])
  n = w.shape[-2]
  return _rows_call(
      bfloat16_rows,
      (x, w),
      sizes,
      _none(sizes),
      n,
      tile,
      jnp.float32,
      LAST=True,
  )


def _dgrad(dy, w, sizes, *, tile):
  tile = _bfloat16_tile(tile, dy.shape[-2], sizes.shape[-1])
  k = w.shape[-1]
  return _rows_call(
      bfloat16_rows,
      (dy, w),
      sizes,
      _none(sizes),
      k,
      tile,
      jnp.float32,
      LAST=False,
  )


def _bfloat16_tile(tile, rows, groups):
  if tile is not None:
    return Tile(*tile)
  rows = block_rows(rows, groups)
  return Tile(rows, 128, 8, 3) if rows >= 64 else Tile(rows, 128, 4, 4)


def _none(sizes):
  """Returns zeros `[...]` for sizes `[..., E]`."""
  return jnp.zeros(sizes.shape[:-1], jnp.int32)


def _rows_call(kernel, arrays, sizes, first, f, tile, dtype, **static):
  """Returns `[..., M, F]`.

  Args:
    kernel: `nvfp4_rows` or `bfloat16_rows`.
    arrays: its first ones: `[..., M, C]`, weights `[..., S, N, ...]`, others.
    sizes: `[..., E]`. Lanes of leading axes are groups of one call.
    first: `[...]` int32; groups have the weights from here on.
    f: F.
    tile: what a program computes.
    dtype: of the result.
    **static: constants of this kernel.
  """
  *lead, m, c = arrays[0].shape
  lanes = math.prod(lead)
  stack = arrays[1].shape[len(lead)]
  plan = _plan_lanes(
      sizes.reshape(lanes, -1), first.reshape(lanes), stack, m, tile.rows
  )
  features = _divisor(f, tile.features)
  (y,) = triton_call.call(
      kernel,
      *arrays,
      plan,
      out_shape=[jax.ShapeDtypeStruct((*lead, m, f), dtype)],
      grid=(plan.shape[1] * (f // features),),
      num_warps=tile.warps,
      num_stages=tile.stages,
      E=lanes * stack,
      F=f,
      C=c,
      BLOCKS=plan.shape[1],
      ROWS=tile.rows,
      FEATURES=features,
      **static,
  )
  return y


def _wgrad(dy, x, sizes, *, tile):
  (*lead, m, n), k = dy.shape, x.shape[-1]
  tile = Tile(128, 128, 8, 3) if tile is None else Tile(*tile)
  features, columns = _divisor(n, tile.features), _divisor(k, tile.rows)
  lane = m * jnp.arange(math.prod(lead), dtype=jnp.int32)[:, None]
  of_lanes = sizes.reshape(lane.shape[0], -1)
  bounds = [
      (bound + lane).reshape(-1)
      for bound in jax.vmap(functools.partial(_bounds, rows=m))(of_lanes)
  ]
  (dw,) = triton_call.call(
      bfloat16_groups,
      dy,
      x,
      jnp.stack(bounds),
      out_shape=[jax.ShapeDtypeStruct((*sizes.shape, n, k), jnp.float32)],
      grid=(sizes.size * (n // features) * (k // columns),),
      num_warps=tile.warps,
      num_stages=tile.stages,
      E=sizes.size,
      N=n,
      K=k,
      FEATURES=features,
      COLUMNS=columns,
  )
  return dw


def _divisor(size, most):
  """Returns the largest power of two up to `most` that divides `size`."""
  return min(size & -size, most)


def _bounds(sizes, rows):
  """Returns each group's first row, and the one after its last, `[E]` int32.

  Neither is beyond `rows`, whatever the sizes are.
  """
  up_to = jnp.tri(sizes.shape[0], dtype=jnp.int32)  # [i, j]: j is up to i
  end = jnp.clip(jnp.sum(up_to * sizes, axis=1), 0, rows)
  return jnp.append(0, end[:-1]).astype(jnp.int32), end


def _plan_lanes(sizes, first, stack, rows, block):
  """Returns the plan of lanes `[L, E]`; rows and weights are those of all.

  Each lane has `stack` weights, and uses those from its `first` on.
  """
  lanes, groups = sizes.shape
  plan = jax.vmap(functools.partial(_plan, rows=rows, block=block))(sizes)
  group, start, end = jnp.moveaxis(plan, 1, 0)
  lane = jnp.arange(lanes, dtype=jnp.int32)[:, None]
  weights = lane * stack + first[:, None] + group
  weights = jnp.where(group == groups, lanes * stack, weights)
  plan = jnp.stack([weights, start + lane * rows, end + lane * rows])
  return plan.reshape(3, -1)


def _plan(sizes, rows, block):
  """Returns each block's group, first row, and the one after its last.

  The rows after all groups are of group E. There are as many blocks as there
  can be, int32 `[3, blocks]`; those that are not needed are empty, and last.
  """
  first, end = _bounds(sizes, rows)
  first = jnp.append(first, end[-1])
  end = jnp.append(end, rows)
  blocks = (end - first + (block - 1)) // block
  groups = first.shape[0]
  before = jnp.tri(groups, k=-1, dtype=jnp.int32)  # [i, j]: j is before i
  first_block = jnp.sum(before * blocks, axis=1)
  index = jnp.arange(min(rows, rows // block + groups))[:, None]
  mine = (first_block <= index) & (index < first_block + blocks)
  start = first + (index - first_block) * block
  of_block = lambda values: jnp.sum(jnp.where(mine, values, 0), axis=1)
  end = jnp.minimum(end, start + block)
  plan = [of_block(v) for v in (jnp.arange(groups), start, end)]
  return jnp.stack(plan).astype(jnp.int32)


@triton.jit
def _store(y_ptr, y, start, end, feature, F: tl.constexpr):
  """Stores y `[features, tokens]` to rows `start` to `end` of `[M, F]`."""
  token = start + tl.arange(0, y.shape[1])
  at = token[None, :].to(tl.int64) * F + feature[:, None]
  y = y.to(y_ptr.dtype.element_ty)
  tl.store(y_ptr + at, y, mask=(token < end)[None, :])


@triton.jit
def _bfloat16_block(
    x_ptr, w_ptr, y_ptr, feature, start, end, F: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
  """Writes some features of rows `start` to `end`; w is that of their group."""
  index = tl.arange(0, 64)
  # Tokens beyond the last repeat it, and are not stored.
  token = tl.minimum(start + tl.arange(0, ROWS), end - 1).to(tl.int64)
  x_at = x_ptr + (token[None, :] * C + index[:, None])
  if LAST:
    w_at = w_ptr + (feature.to(tl.int64)[:, None] * C + index[None, :])
  else:
    w_at = w_ptr + (index[None, :] * F + feature[:, None])
  y = tl.zeros((FEATURES, ROWS), tl.float32)
  for _ in range(C // 64):
    w = tl.load(w_at)
    x = tl.load(x_at)
    y = tl.dot(w, x, y)
    x_at += 64
    w_at += 64 if LAST else 64 * F
  _store(y_ptr, y, start, end, feature, F)


@triton.jit
def bfloat16_rows(
    x_ptr, w_ptr, plan_ptr, y_ptr,
    E: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
  """Writes y `[M, F]`; x is `[M, C]`, and w is `[E, F, C]` or `[E, C, F]`."""
  tiles: tl.constexpr = F // FEATURES
  few: tl.constexpr = max(ROWS // 2, 16)
  block = tl.program_id(0) // tiles
  feature = tl.program_id(0) % tiles * FEATURES + tl.arange(0, FEATURES)
  group = tl.load(plan_ptr + block)
  start = tl.load(plan_ptr + (BLOCKS + block))
  end = tl.load(plan_ptr + (2 * BLOCKS + block))
  if start == end:
    return
  w_ptr += group.to(tl.int64) * (F * C)
  if group == E:
    y = tl.zeros((FEATURES, ROWS), tl.float32)
    _store(y_ptr, y, start, end, feature, F)
  elif end - start <= few:
    _bfloat16_block(
        x_ptr, w_ptr, y_ptr, feature, start, end, F, C, few, FEATURES, LAST
    )
  elif few < ROWS:
    _bfloat16_block(
        x_ptr, w_ptr, y_ptr, feature, start, end, F, C, ROWS, FEATURES, LAST
    )


@triton.jit
def _nvfp4_block(
    x_ptr, codes_ptr, scale_ptr, x_outer_ptr, w_outer, y_ptr, row, feature,
    start, end, F: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
  """Writes some features of rows `start` to `end`; `row` are theirs in w."""
  # Tokens beyond the last repeat it, and are not stored.
  token = tl.minimum(start + tl.arange(0, ROWS), end - 1)
  x_row = token.to(tl.int64)[None, :] * C
  words_ptr = codes_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
  bytes_ptr = scale_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
  w_row = row[:, None]
  index = tl.arange(0, 16)
  y = tl.zeros((FEATURES, ROWS), tl.float32)
  for step in range(C // 128):
    column = step * 128
    word = tl.load(
        words_ptr + w_row * (C // 8) + (column // 8 + index)[None, :]
    )
    at = column // 16 + tl.arange(0, 8)
    scale = tl.load(bytes_ptr + w_row * (C // 16) + at[None, :])
    scale = triton_decode.word_scale(scale)
    at = x_row + (column + tl.arange(0, 64))[:, None]
    for half in tl.static_range(2):  # for the reason that `decode_64` gives
      x = tl.load(x_ptr + at + 64 * half)
      y = tl.dot(triton_decode.decode_64(word, scale, half), x, y)
  outer = tl.load(x_outer_ptr + token) * w_outer
  y = (y * UNIT) * outer[None, :]
  _store(y_ptr, y, start, end, feature, F)


@triton.jit
def nvfp4_rows(
    x_ptr, codes_ptr, scale_ptr, x_outer_ptr, w_outer_ptr, plan_ptr, y_ptr,
    E: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
  """Writes y `[M, F]`; columns of x `[M, C]` are in the order of `permute`.

  Sums mean UNIT times as much.
  """
  tiles: tl.constexpr = F // FEATURES
  few: tl.constexpr = max(ROWS // 2, 16)
  block = tl.program_id(0) // tiles
  feature = tl.program_id(0) % tiles * FEATURES + tl.arange(0, FEATURES)
  group = tl.load(plan_ptr + block)
  start = tl.load(plan_ptr + (BLOCKS + block))
  end = tl.load(plan_ptr + (2 * BLOCKS + block))
  if start == end:
    return
  if group == E:
    y = tl.zeros((FEATURES, ROWS), tl.float32)
    _store(y_ptr, y, start, end, feature, F)
    return
  row = group.to(tl.int64) * F + feature
  w_outer = tl.load(w_outer_ptr + group)
  if end - start <= few:
    _nvfp4_block(
        x_ptr, codes_ptr, scale_ptr, x_outer_ptr, w_outer, y_ptr, row, feature,
        start, end, F, C, UNIT, few, FEATURES,
    )  # fmt: skip
  elif few < ROWS:
    _nvfp4_block(
        x_ptr, codes_ptr, scale_ptr, x_outer_ptr, w_outer, y_ptr, row, feature,
        start, end, F, C, UNIT, ROWS, FEATURES,
    )  # fmt: skip


@triton.jit
def bfloat16_groups(
    dy_ptr, x_ptr, bounds_ptr, dw_ptr,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    FEATURES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
  """Writes dw `[E, N, K]`; bounds `[2, E]` are groups' first rows and ends."""
  across: tl.constexpr = K // COLUMNS
  tiles: tl.constexpr = N // FEATURES * across
  group = tl.program_id(0) // tiles
  tile = tl.program_id(0) % tiles
  feature = tile // across * FEATURES + tl.arange(0, FEATURES)
  column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
  start = tl.load(bounds_ptr + group)
  end = tl.load(bounds_ptr + (E + group))
  dw = tl.zeros((FEATURES, COLUMNS), tl.float32)
  for first in range(start, end, 64):
    row = first + tl.arange(0, 64)
    # Both are cleared: the rows beyond may hold NaN or infinity.
    live = row < end
    row = row.to(tl.int64)
    dy = tl.load(
        dy_ptr + (row[None, :] * N + feature[:, None]),
        mask=live[None, :],
        other=0.0,
    )
    x = tl.load(
        x_ptr + (row[:, None] * K + column[None, :]),
        mask=live[:, None],
        other=0.0,
    )
    dw = tl.dot(dy, x, dw)
  at = (group.to(tl.int64) * N + feature)[:, None] * K + column[None, :]
  tl.store(dw_ptr + at, dw)
