"""Attention of one new token of every row, in Triton, for Hopper.

One kernel does what XLA needs a dozen for: it normalizes and rotates a group of
query heads and its key head, writes the key and the value where the cache has
room for them, and attends to the positions of the row. The cache is read where
it is, and only as far as the row has come.

**The bits are those of `layers.attention`**, which the learner and the prompt
use: rounding points and trees of sums are the same (`triton_exact`), and both
dots take steps of 16 along the contraction axis, from left to right, if the
tensor cores add alike for tiles of any width and for both of Hopper's
instructions (`wgmma` from 16 columns on, `mma`); the tests ask a GPU. Keys and
values are the rows of a tile, and query heads its columns.

The largest score is needed before any weight, since softmax weights are rounded
to bfloat16 before they are used: scores of few blocks are kept, those of many
computed twice. Blocks of values come in the order of the leaves of their tree,
so that one unfinished sum of each height is all that is kept.
"""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from nvfp4_jax import qtensor
from nvfp4_jax.kernels import triton_call
from nvfp4_jax.kernels import triton_exact

type _Vector = jax.Array | qtensor.Layer[jax.Array]

BLOCKS = (64, 128)
HEAD_DIMS = (64, 128)
_MOST_GROUP = 15  # query heads of one key head, which is one more column
MOST_POSITIONS = 1 << 15
_MOST_KEPT = tl.constexpr(3)  # height of the tree whose scores are kept


def unsupported(
    q: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array | qtensor.QTensor, jax.Array | qtensor.QTensor],
    live: int,
    block: int,
    capability: float,
) -> str | None:
  """Returns why this kernel cannot attend, or None if it can.

  Args:
    q: see `decoding.attend_token`.
    rope: see there.
    cache: see there.
    live: see there.
    block: see there.
    capability: of the GPU.
  """
  k, _ = cache
  if capability != 9.0:
    return f'the kernel is for compute capability 9.0, not {capability}'
  if isinstance(k, qtensor.QTensor) or k.dtype != jnp.bfloat16:
    return 'the cache is not bfloat16'
  heads, _, dim = k.shape[-3:]
  if dim not in HEAD_DIMS or 2 * rope[0].shape[-1] != dim:
    return f'head_dim {dim}, all of it rotated, is not one of {HEAD_DIMS}'
  if q.shape[-1] > _MOST_GROUP * heads * dim:
    return f'more than {_MOST_GROUP} query heads share a key head'
  if block not in BLOCKS:
    return f'the block of {block} keys is not one of {BLOCKS}'
  if live % block:
    return f'{live} positions are no multiple of the block of {block}'
  if live > MOST_POSITIONS:
    return f'{live} positions are more than {MOST_POSITIONS}'
  return None


@functools.partial(jax.jit, static_argnames=('live', 'block', 'eps'))
def attend_token(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gains: tuple[_Vector, _Vector] | None,
    rope: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array, jax.Array],
    layer: jax.Array,
    lengths: jax.Array,
    *,
    live: int,
    block: int,
    eps: float,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Returns attention's output and the cache: see `decoding.attend_token`."""
  is_normed = gains is not None
  q_gain, k_gain = map(
      qtensor.as_layer, (q[0, :1], k[0, :1]) if gains is None else gains
  )  # where there is none, nothing looks at them
  attend = functools.partial(
      _call, live=live, block=block, eps=eps, is_normed=is_normed
  )
  arrays = (q, k, v, q_gain.index, q_gain.stack, k_gain.index, k_gain.stack)
  arrays += (*rope, layer, lengths, *cache)
  y, k_cache, v_cache = triton_call.with_vmap(attend)(*arrays)
  return y, (k_cache, v_cache)


def _call(*arrays, live, block, eps, is_normed):
  q, k, _, _, gains, *_, lengths, k_cache, v_cache = arrays
  written = len(arrays) - 2  # the first of both caches
  *lead, batch, width = q.shape
  layers, _, heads, positions, dim = k_cache.shape[len(lead) :]
  group = width // k.shape[-1]
  return triton_call.call(
      token_attention,
      *arrays,
      out_shape=[
          jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k_cache, v_cache)
      ],
      aliases={written: 1, written + 1: 2},
      grid=(heads, batch, lengths.size // batch),
      num_warps=4,
      num_stages=2,
      B=batch,
      L=layers,
      S=positions,
      HEADS=heads,
      GROUP=group,
      D=dim,
      GAINS=gains.shape[-2] if is_normed else 0,
      EPS=eps,
      SCALE=dim**-0.5,
      LIVE=live,
      BLOCK=block,
      HEIGHT=(live // block - 1).bit_length(),
      COLUMNS=8 if group < 8 else 16,
  )


@triton.jit
def _gain(ptr, index_ptr, lane, at, GAINS: tl.constexpr, D: tl.constexpr):
  """Returns part of a head's gain, `[1, channels]`."""
  matrix = lane * GAINS + tl.load(index_ptr + lane)
  return triton_exact.round_to_bfloat16(
      tl.load(ptr + matrix * D + at).to(tl.float32)
  )


@triton.jit
def _scores(keys, first, second, is_live, HALF: tl.constexpr):
  """Returns `[keys, queries]` scores, -inf of keys that are not live."""
  mask = is_live[:, None]
  scores = tl.dot(tl.load(keys, mask=mask, other=0.0), first)
  tile = tl.load(keys + HALF, mask=mask, other=0.0)
  scores = tl.dot(tile, second, scores)
  return tl.where(mask, scores, float('-inf'))


@triton.jit
def _heads(
    q_ptr, k_ptr, q_index_ptr, q_gain_ptr, k_index_ptr, k_gain_ptr,
    cos_ptr, sin_ptr, row, head, lane,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    GAINS: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
  """Returns the first and the second half of channels, `[COLUMNS, D / 2]`.

  Of the query heads of a key head, normalized and rotated, and in the last row
  of the key head itself. RoPE pairs the elements of the halves.
  """
  HALF: tl.constexpr = D // 2
  row_of_tile = tl.arange(0, COLUMNS)
  query = (row * HEADS + head) * GROUP + row_of_tile
  is_key = (row_of_tile == COLUMNS - 1)[:, None]
  channel = tl.arange(0, HALF)[None, :]
  at_query, mask = query[:, None] * D + channel, (row_of_tile < GROUP)[:, None]
  at_key = (row * HEADS + head) * D + channel
  first = tl.load(q_ptr + at_query, mask=mask, other=0.0)
  second = tl.load(q_ptr + at_query + HALF, mask=mask, other=0.0)
  first = tl.where(is_key, tl.load(k_ptr + at_key), first).to(tl.float32)
  second = tl.where(is_key, tl.load(k_ptr + at_key + HALF), second)
  second = second.to(tl.float32)
  cos = triton_exact.round_to_bfloat16(tl.load(cos_ptr + row * HALF + channel))
  sin = triton_exact.round_to_bfloat16(tl.load(sin_ptr + row * HALF + channel))
  if GAINS > 0:  # layers.rms_norm
    squares = first * first + second * second
    mean_square = triton_exact.tree_sum(squares, HALF) * (1 / D)
    inverse = triton_exact.rsqrt(triton_exact.fence(mean_square) + EPS)[:, None]
    q_gain = _gain(q_gain_ptr, q_index_ptr, lane, channel, GAINS, D)
    k_gain = _gain(k_gain_ptr, k_index_ptr, lane, channel, GAINS, D)
    first = triton_exact.round_to_bfloat16(first * inverse)
    first *= tl.where(is_key, k_gain, q_gain)
    q_gain = _gain(q_gain_ptr, q_index_ptr, lane, channel + HALF, GAINS, D)
    k_gain = _gain(k_gain_ptr, k_index_ptr, lane, channel + HALF, GAINS, D)
    second = triton_exact.round_to_bfloat16(second * inverse)
    second *= tl.where(is_key, k_gain, q_gain)
    first = triton_exact.round_to_bfloat16(first)
    second = triton_exact.round_to_bfloat16(second)
  # layers.rope
  scale = tl.where(is_key, 1.0, SCALE)
  rotated = ((first * cos - second * sin) * scale).to(tl.bfloat16)
  second = ((second * cos + first * sin) * scale).to(tl.bfloat16)
  return rotated, second


@triton.jit
def token_attention(
    q_ptr, k_ptr, v_ptr,
    q_index_ptr, q_gain_ptr, k_index_ptr, k_gain_ptr, cos_ptr, sin_ptr,
    layer_ptr, length_ptr, k_in_ptr, v_in_ptr, y_ptr, k_cache_ptr, v_cache_ptr,
    B: tl.constexpr, L: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr,
    GAINS: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
    LIVE: tl.constexpr, BLOCK: tl.constexpr, HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
  """Attends with the query heads of one key head of one row.

  `k_cache` and `k_in` are the same memory, and so are those of values. LIVE
  positions are at most 2**HEIGHT blocks. Without GAINS, heads have no norm;
  else each lane has so many.
  """
  head, lane = tl.program_id(0), tl.program_id(2)
  row = lane * B + tl.program_id(1)
  position = tl.load(length_ptr + row)
  layer = lane * L + tl.load(layer_ptr + lane)
  sequence = (layer * B + tl.program_id(1)).to(tl.int64) * HEADS + head
  k_cache_ptr += sequence * (S * D)
  v_cache_ptr += sequence * (S * D)

  HALF: tl.constexpr = D // 2
  index, half = tl.arange(0, BLOCK), tl.arange(0, HALF)
  channel = tl.arange(0, D)
  value = tl.load(v_ptr + (row * HEADS + head) * D + channel)
  first, second = _heads(
      q_ptr, k_ptr, q_index_ptr, q_gain_ptr, k_index_ptr, k_gain_ptr,
      cos_ptr, sin_ptr, row, head, lane,
      HEADS, GROUP, D, GAINS, EPS, SCALE, COLUMNS,
  )  # fmt: skip
  row_of_tile = tl.arange(0, COLUMNS)
  is_key = (row_of_tile == COLUMNS - 1)[:, None]
  has_room = position < S  # rows that are done may have none
  slot = k_cache_ptr + position * D + half[None, :] + row_of_tile[:, None] * 0
  tl.store(slot, first, mask=is_key & has_room)
  tl.store(slot + HALF, second, mask=is_key & has_room)
  tl.store(v_cache_ptr + position * D + channel, value, mask=has_room)
  tl.debug_barrier()  # the program's other threads read what one has written
  last = tl.minimum(position, LIVE - 1)
  keys = k_cache_ptr + index[:, None] * D + half[None, :]
  values = v_cache_ptr + index[:, None] * D + channel[None, :]
  first, second = tl.trans(first), tl.trans(second)
  y = _attend(first, second, keys, values, last, BLOCK, HEIGHT, D, COLUMNS)
  query = (row * HEADS + head) * GROUP + row_of_tile
  at = y_ptr + query[None, :] * D + channel[:, None]
  tl.store(at, y.to(tl.bfloat16), mask=(row_of_tile < GROUP)[None, :])


@triton.jit
def _attend(
    first, second, keys, values, last,
    BLOCK: tl.constexpr, HEIGHT: tl.constexpr,
    D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
  """Returns attention `[D, COLUMNS]` to the positions up to the last one."""
  HALF: tl.constexpr = D // 2
  KEPT: tl.constexpr = (1 << HEIGHT) if HEIGHT <= _MOST_KEPT else 0
  index = tl.arange(0, BLOCK)
  largest = tl.full((COLUMNS,), float('-inf'), tl.float32)
  kept = (tl.full((BLOCK, COLUMNS), float('-inf'), tl.float32),) * KEPT
  for block in range(last // BLOCK + 1):
    is_live = block * BLOCK + index <= last
    scores = _scores(keys + block * (BLOCK * D), first, second, is_live, HALF)
    largest = tl.maximum(largest, tl.max(scores, axis=0))
    all_kept = ()
    for i in tl.static_range(KEPT):
      all_kept += (tl.where(block == i, scores, kept[i]),)
    kept = all_kept

  y = tl.zeros((D, COLUMNS), tl.float32)
  total = tl.zeros((BLOCK, COLUMNS), tl.float32)
  sums, totals = (y,) * HEIGHT, (total,) * HEIGHT
  for leaf in range(1 << HEIGHT):
    block = 0
    for bit in tl.static_range(HEIGHT):
      block = block * 2 + (leaf >> bit) % 2
    is_live = block * BLOCK + index <= last
    offset = block * (BLOCK * D)
    if KEPT == 0:
      scores = _scores(keys + offset, first, second, is_live, HALF)
    else:
      scores = kept[0]
      for i in tl.static_range(1, KEPT):
        scores = tl.where(block == i, kept[i], scores)
    weights = triton_exact.exp(scores - largest[None, :]).to(tl.bfloat16)
    tile = tl.load(values + offset, mask=is_live[:, None], other=0.0)
    y = tl.dot(tl.trans(tile), weights)
    total = weights.to(tl.float32)
    # A right child is added to its sibling; a left one waits for it.
    is_whole = True
    waiting, waiting_totals = (), ()
    for bit in tl.static_range(HEIGHT):
      is_right = (leaf >> bit) % 2 == 1
      waits, meets = is_whole & (is_right == 0), is_whole & is_right
      waiting += (tl.where(waits, y, sums[bit]),)
      waiting_totals += (tl.where(waits, total, totals[bit]),)
      y = tl.where(meets, sums[bit] + y, y)
      total = tl.where(meets, totals[bit] + total, total)
      is_whole = meets
    sums, totals = waiting, waiting_totals
  total = triton_exact.tree_sum(tl.trans(total), BLOCK)
  return y * triton_exact.fence(1.0 / total)[None, :]
