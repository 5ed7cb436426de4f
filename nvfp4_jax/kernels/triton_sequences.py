"""Causal attention of whole sequences, in Triton, for Hopper.

**The bits are those of `layers.attention`**: rounding points and trees of sums
are the same (`triton_exact`), and so are the steps of the tensor cores along
the contraction axis, from left to right.

A tile has queries of one head. Two passes over the keys:
the first finds the largest score of each query, the second needs it, since
softmax weights are rounded to bfloat16 before they are used. The second takes
the leaves of the tree over blocks of keys in groups. It keeps the weights of a
group, which are small, and then sums the values some channels at a time, so
that few sums are unfinished at once. Where there are several groups, the sum of
one waits for its sibling's in memory.

Blocks that no query of the tile sees would add zeros. They are passed over, and
a tile's tree is no higher than its own blocks need.

The gradient recomputes the weights from the largest scores and the sums, or
from the logarithm of both. It need not have particular bits, but has the same
in every run.
"""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from nvfp4_jax.kernels import triton_attention
from nvfp4_jax.kernels import triton_call
from nvfp4_jax.kernels import triton_exact

_ROWS = 64  # queries of a tile
_CHANNELS = 32  # of values that are summed at a time
_KEYS = 64  # of a tile; a program keeps the weights of four
_LOG2_E = tl.constexpr(1.4426950408889634)
# That have scratch memory: as many as run at once.
_PROGRAMS = 2 * triton_call.PROCESSORS


def unsupported(
    q: jax.Array, k: jax.Array, v: jax.Array, block: int, capability: float
) -> str | None:
  """Returns why these kernels cannot attend, or None if they can.

  Args:
    q: see `sequences.attention`.
    k: see there.
    v: see there.
    block: see there.
    capability: of the GPU.
  """
  if capability != 9.0:
    return f'the kernel is for compute capability 9.0, not {capability}'
  if not all(t.dtype == jnp.bfloat16 for t in (q, k, v)):
    return 'queries, keys and values are not all bfloat16'
  *_, length, heads, dim = q.shape
  shape = (*q.shape[:-3], k.shape[-3], length, dim)
  if not q.size:
    return f'q of shape {q.shape} is empty'
  if k.shape != shape or v.shape != shape:
    return f'keys {k.shape} or values {v.shape} are not {shape}'
  if heads % k.shape[-3]:
    return f'{heads} query heads do not share {k.shape[-3]} key heads'
  if dim not in triton_attention.HEAD_DIMS:
    return f'head_dim {dim} is not one of {triton_attention.HEAD_DIMS}'
  if block not in triton_attention.BLOCKS:
    return f'the block of {block} keys is not one of {triton_attention.BLOCKS}'
  if length > triton_attention.MOST_POSITIONS:
    return f'{length} positions are more than {triton_attention.MOST_POSITIONS}'
  if length * heads * dim >= 1 << 31:
    return f'{heads} heads of {length} positions need wider indices'
  return None


@functools.partial(jax.jit, static_argnames='block')
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, block: int
) -> jax.Array:
  """Returns causal attention: see `sequences.attention`."""
  return _attention(q, k, v, block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(q, k, v, block):
  return _forward(q, k, v, block, False)[0]


def _attention_fwd(q, k, v, block):
  y, largest, total = _forward(q, k, v, block, True)
  return y, (q, k, v, y, largest, total)


def _attention_bwd(block, residuals, dy):
  del block
  return triton_call.with_vmap(_call_backward)(*residuals, dy)


_attention.defvjp(_attention_fwd, _attention_bwd)


def _forward(q, k, v, block, saves):
  """Returns attention, and the largest scores and the sums `[B, H, T]`."""
  run = functools.partial(_call_forward, block=block, saves=saves)
  return triton_call.with_vmap(run)(q, k, v)


def _call_forward(q, k, v, *, block, saves):
  *lead, length, heads, dim = q.shape
  batch = q.size // (length * heads * dim)
  levels = (-(-length // (4 * _KEYS)) - 1).bit_length()
  tiles = batch * heads * -(-length // _ROWS)
  programs = min(tiles, _PROGRAMS) if levels else tiles
  float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  row = float32(*lead, heads, length) if saves else float32(*lead, 1)
  scratch = float32(programs, max(levels, 1), _ROWS, dim + block)
  y, largest, total, _ = triton_call.call(
      forward,
      q,
      k,
      v,
      out_shape=[
          jax.ShapeDtypeStruct((*lead, length, heads * dim), q.dtype),
          row,
          row,
          scratch if levels else float32(1),
      ],
      grid=(programs,),
      num_warps=4,
      num_stages=3,
      B=batch,
      T=length,
      HEADS=heads,
      GROUP=heads // k.shape[-3],
      D=dim,
      HALVES=block // _KEYS,
      LEVELS=levels,
      ROWS=_ROWS,
      KEYS=_KEYS,
      CHANNELS=_CHANNELS,
      SAVES=saves,
  )
  return y, largest, total


def _call_backward(q, k, v, y, largest, total, dy):
  *_, length, heads, dim = q.shape
  kv_heads = k.shape[-3]
  batch = q.size // (length * heads * dim)
  like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  run = functools.partial(
      triton_call.call,
      num_warps=4,
      B=batch,
      T=length,
      HEADS=heads,
      GROUP=heads // kv_heads,
      D=dim,
      KEYS=_KEYS,
  )
  dq, shift, delta = run(
      query_gradient,
      q,
      k,
      v,
      y,
      largest,
      total,
      dy,
      out_shape=[like(q), like(total), like(total)],
      grid=(batch * heads * -(-length // _ROWS),),
      num_stages=2,
      ROWS=_ROWS,
  )
  dk, dv = run(
      key_gradient,
      q,
      k,
      v,
      shift,
      delta,
      dy,
      out_shape=[like(k), like(v)],
      grid=(batch * kv_heads * -(-length // _KEYS),),
      num_stages=3,
      ROWS=64 if dim == 64 else 32,  # more do not fit into registers
  )
  return dq, dk, dv


@triton.jit
def _load_rows(
    ptr, first, end, channel, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
  """Returns rows from `first` on of `[positions, D]`; zeros from `end` on."""
  row = tl.arange(0, ROWS)
  at = ptr + first * D + (row[:, None] * D + channel[None, :])
  return tl.load(at, mask=(row < end - first)[:, None], other=0.0)


@triton.jit
def _scores(
    q, k_ptr, first, position, T: tl.constexpr, D: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
  """Returns `[queries, keys]` scores, -inf of keys that come later."""
  k = _load_rows(k_ptr, first, T, tl.arange(0, D), D, KEYS)
  scores = tl.dot(q, tl.trans(k))
  key = tl.arange(0, KEYS)[None, :]
  is_live = key <= position[:, None] - first
  return tl.where(is_live, scores, float('-inf'))


@triton.jit
def _add(x, y):
  """Returns x + y, of dots; a bare sum Triton makes one dot, on top of x."""
  return tl.fma(y, 1.0, x)


@triton.jit
def _join_total(x, at, level, is_last, SIZE: tl.constexpr):
  """Returns the sum of what waits at the levels before `level` and `x`.

  It is left to wait there, if it is not the last.
  """
  for waiting in tl.range(level, num_stages=1):
    x = tl.load(at + waiting * SIZE) + x
  if is_last == 0:
    tl.store(at + level * SIZE, x)
  return x


@triton.jit
def _join_part(x, at, level, is_last, LEVELS: tl.constexpr, SIZE: tl.constexpr):
  """Does what `_join_total` does, inside of a loop that is to be pipelined."""
  for waiting in tl.static_range(LEVELS):
    if waiting < level:
      x = tl.load(at + waiting * SIZE) + x
  if is_last == 0:
    tl.store(at + level * SIZE, x)
  return x


@triton.jit
def _forward_tile(
    number, q_ptr, k_ptr, v_ptr, out_ptr, largest_ptr, sums_ptr, scratch_ptr,
    B: tl.constexpr, T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, HALVES: tl.constexpr, LEVELS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
    SAVES: tl.constexpr,
):  # fmt: skip
  """Attends with a tile of queries; those that see most come first."""
  TILES: tl.constexpr = (T + ROWS - 1) // ROWS
  tile = TILES - 1 - number // (B * HEADS)
  sequence = number % (B * HEADS)
  batch, head = sequence // HEADS, sequence % HEADS
  row = tl.arange(0, ROWS)
  position = tile * ROWS + row
  is_query = position < T
  offset = (batch.to(tl.int64) * T * HEADS + head) * D
  q_ptr += offset
  out_ptr += offset
  at = q_ptr + position[:, None] * (HEADS * D) + tl.arange(0, D)[None, :]
  q = tl.load(at, mask=is_query[:, None], other=0.0)
  offset = (sequence // GROUP).to(tl.int64) * (T * D)
  k_ptr += offset
  v_ptr += offset
  offset = sequence.to(tl.int64) * T
  largest_ptr += offset
  sums_ptr += offset

  tiles = (tl.minimum((tile + 1) * ROWS, T) + KEYS - 1) // KEYS
  largest = tl.full((ROWS,), float('-inf'), tl.float32)
  for i in range(tiles):
    scores = _scores(q, k_ptr, i * KEYS, position, T, D, KEYS)
    largest = tl.maximum(largest, tl.max(scores, axis=1))
  if SAVES:
    tl.store(largest_ptr + position, largest, mask=is_query)

  # A group has four tiles of keys: blocks start, start + groups and so on, or
  # the halves of two blocks. The order of groups is that of the tree.
  groups = tl.full((), 1, tl.int32)
  for _ in tl.static_range(LEVELS):
    groups = tl.where(groups * 4 < tiles, 2 * groups, groups)
  step = KEYS if HALVES == 2 else groups * KEYS
  inverse = tl.zeros((ROWS,), tl.float32)
  at_total = scratch_ptr + LEVELS * ROWS * D
  at_total += row[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
  for group in range(groups):
    start, reach, level, is_whole = 0, groups, 0, True
    for bit in tl.static_range(LEVELS):
      is_right = (group >> bit) % 2
      reach = reach // 2
      start += is_right * reach
      is_whole = is_whole & (is_right == 1)
      level += is_whole.to(tl.int32)  # how many siblings wait for this group
    is_last = group == groups - 1
    start *= HALVES * KEYS
    middle = start + 2 * groups * KEYS
    end = tiles * KEYS
    count = (start + step < end).to(tl.int32) + 1
    count += (middle < end).to(tl.int32) + (middle + step < end).to(tl.int32)

    # Each has zeros of its own: Triton takes variables that are one object at
    # first, and pass each other on, for one that does not change.
    w0 = tl.zeros((ROWS, KEYS), tl.bfloat16)
    w1 = tl.zeros((ROWS, KEYS), tl.bfloat16)
    w2 = tl.zeros((ROWS, KEYS), tl.bfloat16)
    w3 = tl.zeros((ROWS, KEYS), tl.bfloat16)
    for i in range(count):  # from the last on
      leaf = count - 1 - i
      first = tl.where(leaf < 2, start, middle) + leaf % 2 * step
      scores = _scores(q, k_ptr, first, position, T, D, KEYS)
      weights = triton_exact.exp(scores - largest[:, None])
      # Always so, but without a select the loop would not be pipelined.
      is_next = i < count
      w3 = tl.where(is_next, w2, w3)
      w2 = tl.where(is_next, w1, w2)
      w1 = tl.where(is_next, w0, w1)
      w0 = weights.to(tl.bfloat16)

    if LEVELS > 0:
      tl.debug_barrier()  # other threads wrote what waits
    total = w0.to(tl.float32) + w2.to(tl.float32)
    if HALVES == 2:  # which meet after all blocks
      total = _join_total(total, at_total, level, is_last, 2 * ROWS * KEYS)
    other = w1.to(tl.float32) + w3.to(tl.float32)
    if HALVES == 2:
      at_other = at_total + ROWS * KEYS
      other = _join_total(other, at_other, level, is_last, 2 * ROWS * KEYS)
    total += other
    if HALVES == 1:
      total = _join_total(total, at_total, level, is_last, ROWS * KEYS)
    if is_last:
      sums = triton_exact.tree_sum(total, KEYS)
      inverse = triton_exact.fence(1.0 / sums)
      if SAVES:
        tl.store(sums_ptr + position, sums, mask=is_query)

    for part in range(D // CHANNELS):
      channel = part * CHANNELS + tl.arange(0, CHANNELS)
      # Nothing is loaded of values that have no weights.
      v0 = _load_rows(v_ptr, start, T, channel, D, KEYS)
      has = tl.where(count > 1, T, 0)
      v1 = _load_rows(v_ptr, start + step, has, channel, D, KEYS)
      has = tl.where(count > 2, T, 0)
      v2 = _load_rows(v_ptr, middle, has, channel, D, KEYS)
      has = tl.where(count > 3, T, 0)
      v3 = _load_rows(v_ptr, middle + step, has, channel, D, KEYS)
      if HALVES == 2:
        y = tl.dot(w1, v1, tl.dot(w0, v0))
        y = _add(y, tl.dot(w3, v3, tl.dot(w2, v2)))
      else:
        y = _add(tl.dot(w0, v0), tl.dot(w2, v2))
        y = _add(y, _add(tl.dot(w1, v1), tl.dot(w3, v3)))
      at_part = scratch_ptr + row[:, None] * D + channel[None, :]
      y = _join_part(y, at_part, level, is_last, LEVELS, ROWS * D)
      if is_last:
        y *= inverse[:, None]
        at_y = out_ptr + position[:, None] * (HEADS * D) + channel[None, :]
        tl.store(at_y, y.to(tl.bfloat16), mask=is_query[:, None])


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, largest_ptr, sums_ptr, scratch_ptr,
    B: tl.constexpr, T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, HALVES: tl.constexpr, LEVELS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
    SAVES: tl.constexpr,
):  # fmt: skip
  """Attends with the tiles that fall to a program.

  Blocks of keys are HALVES times KEYS. A tile of queries meets at most
  2**LEVELS groups of four tiles of keys; without levels it is the only one of
  its program.
  """
  program = tl.program_id(0)
  if LEVELS == 0:
    _forward_tile(
        program, q_ptr, k_ptr, v_ptr, out_ptr, largest_ptr, sums_ptr,
        scratch_ptr, B, T, HEADS, GROUP, D, HALVES, LEVELS, ROWS, KEYS,
        CHANNELS, SAVES,
    )  # fmt: skip
  else:
    scratch_ptr += program.to(tl.int64) * (LEVELS * ROWS * (D + HALVES * KEYS))
    TILES: tl.constexpr = B * HEADS * ((T + ROWS - 1) // ROWS)
    for number in range(program, TILES, tl.num_programs(0)):
      _forward_tile(
          number, q_ptr, k_ptr, v_ptr, out_ptr, largest_ptr, sums_ptr,
          scratch_ptr, B, T, HEADS, GROUP, D, HALVES, LEVELS, ROWS, KEYS,
          CHANNELS, SAVES,
      )  # fmt: skip


@triton.jit
def query_gradient(
    q_ptr, k_ptr, v_ptr, out_ptr, largest_ptr, sums_ptr, dout_ptr,
    dq_ptr, shift_ptr, delta_ptr,
    B: tl.constexpr, T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
  """Differentiates with respect to a tile of queries.

  Also writes, for each query, the logarithm to base 2 of its softmax's
  denominator, and `delta`, the dot of its output and the output's gradient.
  """
  TILES: tl.constexpr = (T + ROWS - 1) // ROWS
  tile = TILES - 1 - tl.program_id(0) // (B * HEADS)
  sequence = tl.program_id(0) % (B * HEADS)
  batch, head = sequence // HEADS, sequence % HEADS
  position = tile * ROWS + tl.arange(0, ROWS)
  is_query = position < T
  offset = (batch.to(tl.int64) * T * HEADS + head) * D
  at = position[:, None] * (HEADS * D) + tl.arange(0, D)[None, :]
  q = tl.load(q_ptr + offset + at, mask=is_query[:, None], other=0.0)
  y = tl.load(out_ptr + offset + at, mask=is_query[:, None], other=0.0)
  dy = tl.load(dout_ptr + offset + at, mask=is_query[:, None], other=0.0)
  row = sequence.to(tl.int64) * T + position
  largest = tl.load(largest_ptr + row, mask=is_query, other=0.0)
  total = tl.load(sums_ptr + row, mask=is_query, other=1.0)
  delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), axis=1)
  shift = largest * _LOG2_E + tl.log2(total)
  tl.store(shift_ptr + row, shift, mask=is_query)
  tl.store(delta_ptr + row, delta, mask=is_query)
  kv_offset = (sequence // GROUP).to(tl.int64) * (T * D)
  k_ptr += kv_offset
  v_ptr += kv_offset

  tiles = (tl.minimum((tile + 1) * ROWS, T) + KEYS - 1) // KEYS
  channel = tl.arange(0, D)
  key = tl.arange(0, KEYS)
  dq = tl.zeros((ROWS, D), tl.float32)
  for i in range(tiles):
    first = i * KEYS
    k = _load_rows(k_ptr, first, T, channel, D, KEYS)
    v = _load_rows(v_ptr, first, T, channel, D, KEYS)
    is_live = key[None, :] <= position[:, None] - first
    scores = tl.dot(q, tl.trans(k))
    weights = tl.math.exp2(tl.fma(scores, _LOG2_E, -shift[:, None]))
    weights = tl.where(is_live, weights, 0.0)
    ds = weights * (tl.dot(dy, tl.trans(v)) - delta[:, None])
    dq = tl.dot(ds.to(tl.bfloat16), k, dq)
  tl.store(dq_ptr + offset + at, dq.to(tl.bfloat16), mask=is_query[:, None])


@triton.jit
def key_gradient(
    q_ptr, k_ptr, v_ptr, shift_ptr, delta_ptr, dout_ptr,
    dk_ptr, dv_ptr,
    B: tl.constexpr, T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
  """Differentiates with respect to a tile of keys and values."""
  KV_HEADS: tl.constexpr = HEADS // GROUP
  tile = tl.program_id(0) // (B * KV_HEADS)
  sequence = tl.program_id(0) % (B * KV_HEADS)
  batch, kv_head = sequence // KV_HEADS, sequence % KV_HEADS
  key = tile * KEYS + tl.arange(0, KEYS)
  channel = tl.arange(0, D)
  is_key = (key < T)[:, None]
  kv_at = sequence.to(tl.int64) * (T * D) + key[:, None] * D + channel[None, :]
  k = tl.load(k_ptr + kv_at, mask=is_key, other=0.0)
  v = tl.load(v_ptr + kv_at, mask=is_key, other=0.0)
  head = kv_head * GROUP
  offset = (batch.to(tl.int64) * T * HEADS + head) * D
  q_ptr += offset
  dout_ptr += offset
  offset = (batch.to(tl.int64) * HEADS + head) * T
  shift_ptr += offset
  delta_ptr += offset

  first_tile = tile * KEYS // ROWS
  tiles = (T + ROWS - 1) // ROWS - first_tile
  query = tl.arange(0, ROWS)
  dk = tl.zeros((KEYS, D), tl.float32)
  dv = tl.zeros((KEYS, D), tl.float32)
  for i in range(GROUP * tiles):
    member, first = i // tiles, (first_tile + i % tiles) * ROWS
    is_query = query < T - first
    base = first * (HEADS * D) + member * D
    at = base + query[:, None] * (HEADS * D) + channel[None, :]
    q = tl.load(q_ptr + at, mask=is_query[:, None], other=0.0)
    dy = tl.load(dout_ptr + at, mask=is_query[:, None], other=0.0)
    row = member * T + first + query
    shift = tl.load(shift_ptr + row, mask=is_query, other=0.0)
    delta = tl.load(delta_ptr + row, mask=is_query, other=0.0)
    scores = tl.dot(k, tl.trans(q))
    weights = tl.math.exp2(tl.fma(scores, _LOG2_E, -shift[None, :]))
    is_live = (key - first)[:, None] <= query[None, :]
    weights = tl.where(is_live, weights, 0.0)
    dv = tl.dot(weights.to(tl.bfloat16), dy, dv)
    ds = weights * (tl.dot(v, tl.trans(dy)) - delta[None, :])
    dk = tl.dot(ds.to(tl.bfloat16), q, dk)
  tl.store(dk_ptr + kv_at, dk.to(tl.bfloat16), mask=is_key)
  tl.store(dv_ptr + kv_at, dv.to(tl.bfloat16), mask=is_key)
