"""Matmuls in plain XLA: any platform, any shape; the oracle of the others.

Quantized operands are decoded to bfloat16, which is exact, so that a bfloat16
dot with float32 accumulation has exact products. fp8_block, with its float32
block scales, is decoded to float32 instead and uses float32 dots.

Grouped matmuls walk over blocks of rows, each with its own expert, in a loop
whose trip count is the number of blocks really needed: the work grows with
rows, not with rows times experts, as it does in `lax.ragged_dot` on CPU.

Under vmap such loops would go on in lockstep, a few rows at a time. There all
blocks that may be needed are one batched dot, with the same bits.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import qtensor

_LAST, _FIRST = (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))
_INNER = (((1,), (0,)), ((), ()))
_FEWEST_FEATURES = 8


@functools.partial(jax.jit, static_argnames='decode')
def scaled_matmul(
    x: jax.Array | qtensor.QTensor,
    wq: qtensor.QTensor,
    group_sizes: jax.Array | None = None,
    decode: Callable[[qtensor.QTensor], jax.Array] = qtensor.decode,
) -> jax.Array:
  """See `kernels.scaled_matmul`; `decode` is any that gives exact values."""
  x_values = decode(x) if isinstance(x, qtensor.QTensor) else x
  y = matmul(x_values, decode(wq), group_sizes)
  w_scale = wq.global_scale
  if w_scale is not None:
    if group_sizes is not None:
      w_scale = w_scale[_group_of_row(group_sizes, y.shape[0])][..., 0]
    else:
      w_scale = w_scale.T
  return _apply_scales(y, _global_scale(x), w_scale)


@jax.jit
def scaled_wgrad(
    dyq: qtensor.QTensor,
    xq: qtensor.QTensor,
    group_sizes: jax.Array | None = None,
) -> jax.Array:
  """See `kernels.scaled_wgrad`."""
  dy, x = qtensor.decode(dyq), qtensor.decode(xq)
  if group_sizes is None:
    y = _dot(dy, x, _LAST)
    x_scale = None if xq.global_scale is None else xq.global_scale.T
    return _apply_scales(y, dyq.global_scale, x_scale)
  y = wgrad(dy.T, x.T, group_sizes)
  dy_scale, x_scale = (
      _scale_of_groups(q, dy.shape[1], group_sizes) for q in (dyq, xq)
  )
  if dy_scale is not None:
    dy_scale = dy_scale[:, :, None]
  if x_scale is not None:
    x_scale = x_scale[:, None, :]
  return _apply_scales(y, dy_scale, x_scale)


@jax.jit
def matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array | None = None
) -> jax.Array:
  """See `kernels.matmul`."""
  if group_sizes is None:
    return _dot(x, w, _LAST)
  return _grouped_last(x, w, group_sizes)


@jax.jit
def dgrad(
    dy: jax.Array, w: jax.Array, group_sizes: jax.Array | None = None
) -> jax.Array:
  """See `kernels.dgrad`."""
  if group_sizes is None:
    return _dot(dy, w, _INNER)
  return _grouped_inner(dy, w, group_sizes)


@jax.jit
def wgrad(
    dy: jax.Array, x: jax.Array, group_sizes: jax.Array | None = None
) -> jax.Array:
  """See `kernels.wgrad`."""
  if group_sizes is None:
    return _dot(dy, x, _FIRST)
  return _grouped_wgrad(dy, x, group_sizes)


def _global_scale(operand):
  return getattr(operand, 'global_scale', None)


def _scale_of_groups(q, rows, group_sizes):
  """Returns each group's global scale of a column copy, `[E, 1 or N]`."""
  if q.global_scale is None:
    return None
  blocks = q.global_scale.shape[1]
  ends = jnp.cumsum(group_sizes)
  first = (ends - group_sizes) * blocks // rows
  scale = q.global_scale[:, jnp.minimum(first, blocks - 1)].T
  return jnp.where(group_sizes[:, None] > 0, scale, 1.0)


def _apply_scales(y, x_scale, w_scale):
  """Returns `y * f32(D_x * D_w)`; None stands for 1."""
  if x_scale is None or w_scale is None:
    scale = w_scale if x_scale is None else x_scale
    return y if scale is None else y * scale
  # `exact` keeps XLA from applying one scale after the other.
  return y * exact.multiply(x_scale, w_scale)


def _dot(x, w, dimension_numbers):
  """Returns a dot with float32 accumulation, of bfloat16 or float32 operands.

  XLA on CPU adds in another order where there are few rows, or few features.
  Rows of zeros keep every dot on the common path, so that a row's bits do not
  depend on how many rows there are.
  """
  precision = None
  if jnp.float32 in (x.dtype, w.dtype):
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    precision = lax.Precision.HIGHEST  # or a GPU may round to TF32
  dot = functools.partial(
      lax.dot_general,
      dimension_numbers=dimension_numbers,
      precision=precision,
      preferred_element_type=jnp.float32,
  )
  if dimension_numbers is _FIRST:
    return dot(x, w)
  rows = x.shape[0]
  features = w.shape[0 if dimension_numbers is _LAST else 1]
  x = _pad_rows(x, exact.padded_rows(rows, x.dtype) - rows)
  if dimension_numbers is _LAST and features < _FEWEST_FEATURES:
    w = _pad_rows(w, _FEWEST_FEATURES - features)
  return dot(x, w)[:rows, :features]


@jax.custom_batching.custom_vmap
def _grouped_wgrad(dy, x, group_sizes):
  rows = x.shape[0]
  block = _block_rows(rows, group_sizes.shape[0])
  dy, x = _pad_rows(dy, block), _pad_rows(x, block)
  plan = _plan_blocks(group_sizes, rows, block)

  def add_block(i, dw):
    group, start = plan.group[i], plan.start[i]
    live = (jnp.arange(block) < plan.size[i])[:, None]
    dy_block = lax.dynamic_slice_in_dim(dy, start, block)
    x_block = lax.dynamic_slice_in_dim(x, start, block)
    # Both are cleared: the rows beyond may hold NaN or infinity.
    dy_block, x_block = (jnp.where(live, t, 0) for t in (dy_block, x_block))
    part = _dot(dy_block, x_block, _FIRST)
    return dw.at[group].add(part)

  dw = jnp.zeros((group_sizes.shape[0], dy.shape[1], x.shape[1]), jnp.float32)
  return lax.fori_loop(0, plan.count, add_block, dw)


@_grouped_wgrad.def_vmap
def _(lanes, batched, dy, x, group_sizes):
  groups = group_sizes.shape[-1]
  parts, first, blocks = jax.vmap(_wgrad_parts, _axes(batched))(
      dy, x, group_sizes
  )

  def add_blocks(i, dw):  # the i-th of every group, if it has so many
    part = jax.vmap(lambda parts, first: parts[first + i])(parts, first)
    return dw + jnp.where((i < blocks)[:, :, None, None], part, 0.0)

  dw = jnp.zeros((lanes, groups, *parts.shape[2:]), jnp.float32)
  return lax.fori_loop(0, jnp.max(blocks), add_blocks, dw), True


def _axes(batched):
  """Returns `in_axes` of the arguments of a vmap rule."""
  return tuple(0 if flag else None for flag in batched)


def _for_each_block(x, w, group_sizes, dimension_numbers):
  rows = x.shape[0]
  block = _block_rows(rows, group_sizes.shape[0])
  x = _pad_rows(x, block)
  plan = _plan_blocks(group_sizes, rows, block)

  def write_block(i, y):
    start = plan.start[i]
    x_block = lax.dynamic_slice_in_dim(x, start, block)
    y_block = _dot(x_block, w[plan.group[i]], dimension_numbers)
    # A block's surplus rows are overwritten by the next block.
    return lax.dynamic_update_slice_in_dim(y, y_block, start, 0)

  features = w.shape[1 if dimension_numbers is _LAST else 2]
  y = jnp.zeros((rows + block, features), jnp.float32)
  y = lax.fori_loop(0, plan.count, write_block, y)
  live = jnp.arange(rows) < jnp.sum(group_sizes)
  return jnp.where(live[:, None], y[:rows], 0.0)


def _blocks_at_once(x, w, group_sizes, dimension_numbers):
  """Returns what `_for_each_block` does, by one batched dot of all blocks."""
  rows, groups = x.shape[0], group_sizes.shape[0]
  block = _block_rows(rows, groups)
  plan = _plan_blocks(group_sizes, rows, block)
  index = plan.start[:, None] + jnp.arange(block)
  x_blocks = _take(_pad_rows(x, block), index)
  dot = functools.partial(_dot, dimension_numbers=dimension_numbers)
  y = jax.vmap(dot)(x_blocks, _take(w, plan.group))
  # Where each row is: the block of its group, and its place there.
  group = _group_of_row(group_sizes, rows)
  ends = jnp.cumsum(group_sizes)
  place = jnp.arange(rows) - (ends - group_sizes)[group]
  place += plan.first[group] * block
  place = jnp.clip(place, 0, y.shape[0] * block - 1)  # rows past all groups
  y = _take(y.reshape(-1, y.shape[-1]), place)
  return jnp.where((jnp.arange(rows) < ends[-1])[:, None], y, 0.0)


def _vmappable(dimension_numbers):
  """Returns `_for_each_block`, which vmap replaces by `_blocks_at_once`."""
  loop = jax.custom_batching.custom_vmap(
      lambda x, w, group_sizes: _for_each_block(
          x, w, group_sizes, dimension_numbers
      )
  )

  @loop.def_vmap
  def _(lanes, batched, x, w, group_sizes):
    del lanes
    at_once = functools.partial(
        _blocks_at_once, dimension_numbers=dimension_numbers
    )
    return jax.vmap(at_once, _axes(batched))(x, w, group_sizes), True

  return loop


_grouped_last, _grouped_inner = _vmappable(_LAST), _vmappable(_INNER)


def _wgrad_parts(dy, x, group_sizes):
  """Returns each block's wgrad, and each group's first block and their number.

  Returns:
    float32 `[blocks, N, K]`, int32 `[E]` and `[E]`.
  """
  rows, groups = x.shape[0], group_sizes.shape[0]
  block = _block_rows(rows, groups)
  plan = _plan_blocks(group_sizes, rows, block)
  index = plan.start[:, None] + jnp.arange(block)
  live = (jnp.arange(block) < plan.size[:, None])[:, :, None]
  dy, x = (
      jnp.where(live, _take(_pad_rows(t, block), index), 0) for t in (dy, x)
  )
  parts = jax.vmap(functools.partial(_dot, dimension_numbers=_FIRST))(dy, x)
  return parts, plan.first, plan.blocks


def _block_rows(rows, groups):
  """Returns a block size near the mean group size, a power of two in 8-128."""
  mean = max(rows // max(groups, 1), 1)
  return min(max(1 << (mean - 1).bit_length(), 8), 128)


class _Plan(NamedTuple):
  """Blocks of rows that lie in one group each.

  Attributes:
    count: number of blocks.
    group: each block's group; so are `start`, its first row, and `size`, the
      number of rows from there to the end of the group.
    start: see there.
    size: see there.
    first: each group's first block; so is `blocks`, how many it has.
    blocks: see there.
  """

  count: jax.Array
  group: jax.Array
  start: jax.Array
  size: jax.Array
  first: jax.Array
  blocks: jax.Array


def _plan_blocks(group_sizes, rows, block):
  """Returns the plan; arrays are as long as the most blocks there can be."""
  groups = group_sizes.shape[0]
  blocks = (group_sizes + (block - 1)) >> (block.bit_length() - 1)
  before = jnp.tri(groups, k=-1, dtype=jnp.int32)  # [i, j]: j comes before i
  first_block = jnp.sum(before * blocks, axis=1)
  first_row = jnp.sum(before * group_sizes, axis=1)
  index = jnp.arange(rows // block + groups)[:, None]
  mine = (first_block <= index) & (index < first_block + blocks)
  of_group = lambda values: jnp.sum(jnp.where(mine, values, 0), axis=1)
  offset = (index - first_block) * block
  return _Plan(
      count=jnp.sum(blocks),
      group=of_group(jnp.arange(groups)),
      start=of_group(first_row + offset),
      size=of_group(group_sizes - offset),
      first=first_block,
      blocks=blocks,
  )


def _group_of_row(group_sizes, rows):
  ends = jnp.cumsum(group_sizes)
  group = jnp.sum(ends[None, :] <= jnp.arange(rows)[:, None], axis=1)
  return jnp.minimum(group, group_sizes.shape[0] - 1)


def _take(x, indices):
  """Returns `x[indices]`, without code for indices out of bounds."""
  return x.at[indices].get(mode='promise_in_bounds')


def _pad_rows(x, rows):
  return x if rows == 0 else jnp.pad(x, ((0, rows), (0, 0)))
