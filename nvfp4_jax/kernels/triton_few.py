"""Matmuls of a few rows in Triton, for Hopper: those of decoding.

`y[M, N] = x[M, K] @ w[N, K].T` for up to three weights that share x, in one
launch, or `layers.swiglu` of two bfloat16 ones. A weight is a layer of a stack,
and is read where it is: bfloat16, or NVFP4, whose codes are decoded in
registers. Time goes into reading weights, and where they are small, into
starting: hence one launch.

NVFP4: features are the rows of a tile and tokens its columns; see
`triton_matmul` for the order of sums. bfloat16: tokens are the rows, so that a
tile can have few features and its weights are read by many processors; sums are
from left to right, as those of XLA's matmuls of many rows are (of few, it
divides K for some shapes). The tests ask a GPU whether the bits are the same.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import triton
import triton.language as tl

from nvfp4_jax import exact
from nvfp4_jax import qtensor
from nvfp4_jax.kernels import triton_call
from nvfp4_jax.kernels import triton_decode
from nvfp4_jax.kernels import triton_exact

MOST_NVFP4_ROWS = 128
_MOST_BFLOAT16_ROWS = 256
_MOST_FEATURES = 8192  # with more than 128 rows; XLA divides no K of more
_MOST_WEIGHTS = 3
_PROGRAMS = 200  # of 64 features that fill the processors
_FEWEST_STEPS = 4  # of a part
_BYTES_AHEAD = 120 << 10  # of a program's operands, in shared memory


class Tile(NamedTuple):
  """What one program computes: powers of two.

  Attributes:
    rows: rows of `x`, at least 16.
    features: rows of a weight, at least 64; for bfloat16, 8.
    warps: of 32 threads; for each 64 features (bfloat16: rows) at most 4.
    stages: steps that are loaded ahead.
    step: columns of a step, which divides K; for NVFP4, 128. 0 for 128,
      or 64 where K is no multiple of that.
  """

  rows: int
  features: int
  warps: int
  stages: int
  step: int = 0


def unsupported_bfloat16(
    x: jax.Array, w: jax.Array, capability: float
) -> str | None:
  """Returns why `[M, K]` and `[N, K]` cannot be multiplied here, or None."""
  if capability != 9.0:
    return f'the Triton matmul is for compute capability 9.0, not {capability}'
  for operand in (x, w):
    if operand.dtype != jnp.bfloat16:
      return f'an operand is {operand.dtype}, not bfloat16'
  if w.ndim != 2 or w.shape[1] % 64:
    return f'w of shape {w.shape} is not [N, K] with K a multiple of 64'
  if x.shape[1] != w.shape[1]:
    return f'x has {x.shape[1]} columns, not {w.shape[1]}'
  most = _MOST_BFLOAT16_ROWS if w.shape[0] <= _MOST_FEATURES else 128
  if not x.shape[0]:
    return 'there are no rows'
  if x.shape[0] > most:
    return f'there are more than {most} rows'
  return None


def quantized_tile(tile: Tile | None, default: Tile) -> Tile:
  """Returns the tile for NVFP4 weights.

  Raises:
    ValueError: another step than codes are kept in.
  """
  tile = default if tile is None else Tile(*tile)
  if tile.step not in (0, triton_decode.STEP):
    raise ValueError(
        f'{tile}: NVFP4 weights have steps of {triton_decode.STEP}.'
    )
  return tile


def num_parts(n: int, k: int) -> int:
  """Returns into how many parts K is divided, for NVFP4 weights `[n, k]`."""
  parts, steps = 1, k // triton_decode.STEP
  while (
      -(-n // 64) * parts < _PROGRAMS
      and steps % (2 * parts) == 0
      and steps // (2 * parts) >= _FEWEST_STEPS
  ):
    parts *= 2
  return parts


def matmuls(
    x: jax.Array | qtensor.QTensor,
    ws: tuple[qtensor.Layer, ...],
    *,
    dtype: jax.typing.DTypeLike,
    tile: Tile | None = None,
) -> tuple[jax.Array, ...]:
  """Returns `x @ w.T` `[M, N]` for each of up to three weights.

  Works under jit and vmap, also where only `x` has the axis; has no derivative.

  Args:
    x: bfloat16 `[M, K]`; or quantized, for NVFP4 weights.
    ws: all NVFP4, or all bfloat16.
    dtype: float32, or bfloat16 to round to at last.
    tile: what a program computes; None for what suits the shape.
  """
  if isinstance(ws[0].stack, qtensor.QTensor):
    x_scale = getattr(x, 'global_scale', None)
    x, unit = triton_decode.left_operand(x)
    if x_scale is not None:
      x_scale = jnp.broadcast_to(x_scale, (x.shape[0], 1))
    stacks = tuple(_nvfp4_stack(w.stack) for w in ws)
    multiply = functools.partial(_nvfp4, unit=unit, dtype=dtype, tile=tile)
  else:
    x_scale, stacks = None, tuple((w.stack,) for w in ws)
    multiply = functools.partial(_bfloat16, dtype=dtype, tile=tile)
  arrays = (x, x_scale, tuple(w.index for w in ws), stacks)
  return _with_vmap(multiply)(*lax.stop_gradient(arrays))


def _nvfp4_stack(stack):
  scale = stack.global_scale
  if scale is None:
    scale = jnp.ones((stack.data.shape[0],))
  return stack.data, stack.block_scale, scale.reshape(-1)


def _with_vmap(multiply):
  """Returns `multiply`; under vmap, the axes of stacks become one.

  It takes x `[..., M, K]`, scales `[..., M, 1]` or None, for each weight an
  index `[...]` and a stack `[S, ...]` of arrays, and gives each `[..., M, N]`.
  """
  run = jax.custom_batching.custom_vmap(multiply)

  @run.def_vmap
  def _(lanes, batched, x, x_scale, indices, stacks):
    def wide(array, flag):
      return array if flag else jnp.broadcast_to(array, (lanes, *array.shape))

    x, x_scale, indices = jax.tree.map(
        wide, (x, x_scale, indices), tuple(batched[:3])
    )
    weights = []
    for index, stack, flags in zip(indices, stacks, batched[3], strict=True):
      if any(jax.tree.leaves(flags)):
        stack = jax.tree.map(wide, stack, flags)
        first = jnp.arange(lanes, dtype=jnp.int32) * stack[0].shape[1]
        index += first.reshape(-1, *[1] * (index.ndim - 1))
        stack = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stack)
      weights.append((index, stack))
    indices, stacks = zip(*weights, strict=True)
    ys = run(x, x_scale, indices, stacks)
    return ys, jax.tree.map(lambda _: True, ys)

  return run


def _nvfp4(x, x_scale, indices, stacks, *, unit, dtype, tile):
  """See `_with_vmap`; columns of `x` are permuted."""
  m, k = x.shape[-2:]
  rows = min(max(triton.next_power_of_2(m), 16), 128)
  tile = quantized_tile(tile, Tile(rows, 64, 4, 4))
  parts = [num_parts(stack[0].shape[1], k) for stack in stacks]
  scaled = x_scale is not None
  ys = _call(
      nvfp4_few,
      (x, x_scale if scaled else x),
      indices,
      stacks,
      [(p, dtype if p == 1 else jnp.float32) for p in parts],
      tile,
      UNIT=unit,
      SCALED=scaled,
      **{f'P{i}': (parts + [1, 1])[i] for i in range(_MOST_WEIGHTS)},
  )
  results = []
  for y, index, stack in zip(ys, indices, stacks, strict=True):
    total = y[..., 0, :, :]
    if y.shape[-3] > 1:
      for part in range(1, y.shape[-3]):
        total += y[..., part, :, :]
      scale = stack[2][index][..., None, None]
      scale = exact.multiply(x_scale, scale) if scaled else scale
      total = (total * unit) * scale
      if dtype == jnp.bfloat16:
        total = exact.to_bfloat16(total)
    results.append(total)
  return tuple(results)


def swiglu(
    x: jax.Array,
    gate: qtensor.Layer,
    up: qtensor.Layer,
    *,
    tile: Tile | None = None,
) -> jax.Array:
  """Returns the bfloat16 `swiglu(x @ gate.T, x @ up.T)`: see `decoding.swiglu`.

  Works under jit and vmap, as `matmuls`; has no derivative.

  Args:
    x: bfloat16 `[M, K]`.
    gate: bfloat16 `[N, K]`.
    up: bfloat16 `[N, K]`.
    tile: what a program computes, features of either; None for what suits the
      shape.
  """
  ws = gate, up
  arrays = (x, None, tuple(w.index for w in ws), tuple((w.stack,) for w in ws))
  multiply = functools.partial(_swiglu, tile=tile)
  (y,) = _with_vmap(multiply)(*lax.stop_gradient(arrays))
  return y


def _bfloat16(x, x_scale, indices, stacks, *, dtype, tile):
  """See `_with_vmap`."""
  del x_scale
  features = sum(stack[0].shape[1] for stack in stacks)
  tile = _bfloat16_tile_of(x, tile, features)
  outputs = [(1, dtype)] * len(stacks)
  ys = _call(bfloat16_few, (x,), indices, stacks, outputs, tile, STEP=tile.step)
  return tuple(y[..., 0, :, :] for y in ys)


def _swiglu(x, x_scale, indices, stacks, *, tile):
  """See `_with_vmap`."""
  del x_scale
  *lead, m, k = x.shape
  features = stacks[0][0].shape[1]
  tile = _bfloat16_tile_of(x, tile, 2 * features, weights=2)
  weights = [
      array
      for index, stack in zip(indices, stacks, strict=True)
      for array in (index, *stack)
  ]
  return triton_call.call(
      bfloat16_swiglu,
      x,
      *weights,
      out_shape=[jax.ShapeDtypeStruct((*lead, m, features), x.dtype)],
      grid=(
          triton.cdiv(m, tile.rows),
          triton.cdiv(features, tile.features),
          indices[0].size,
      ),
      num_warps=tile.warps,
      num_stages=tile.stages,
      M=m,
      N=features,
      K=k,
      INDEXED=any(stack[0].shape[0] > 1 for stack in stacks),
      ROWS=tile.rows,
      FEATURES=tile.features,
      STEP=tile.step,
  )


def _bfloat16_tile_of(x, tile, features, weights=1):
  """Returns the tile for so many features in all, of each weight its part."""
  m, k = x.shape[-2:]
  if tile is not None:
    tile = Tile(*tile)
    if not tile.step:
      return tile._replace(step=math.gcd(k, 128))
    if k % tile.step:
      raise ValueError(f'{tile}: K = {k} is no multiple of the step.')
    return tile
  rows = min(max(triton.next_power_of_2(m), 16), 128)
  is_small = rows <= 32  # too few rows for `wgmma`
  width = 16 if is_small else 16 * weights
  most = 32 if is_small and weights > 1 else 64
  share = features * triton.cdiv(m, rows) / triton_call.PROCESSORS
  while width < min(most, share):
    width *= 2
  if is_small:
    step = math.gcd(k, 512 if width == 16 else 128)
    return Tile(rows, width // weights, 2 if width <= 32 else 4, 3, step)
  step = math.gcd(k, 128)
  stages = _BYTES_AHEAD // (2 * step * (rows + width))
  stages = min(max(stages, 2), 5)
  return Tile(rows, width // weights, rows // 16, stages, step)


def _call(kernel, operands, indices, stacks, outputs, tile, **static: Any):
  """Returns y `[..., parts, M, N]` of each weight, parts and dtype given."""
  *lead, m, k = operands[0].shape
  weights = list(zip(indices, stacks, outputs, strict=True))
  features = [stack[0].shape[1] for stack in stacks]
  tiles = sum(
      triton.cdiv(n, tile.features) * parts
      for n, (parts, _) in zip(features, outputs, strict=True)
  )
  shapes = [
      jax.ShapeDtypeStruct((*lead, parts, m, n), dtype)
      for n, (parts, dtype) in zip(features, outputs, strict=True)
  ]
  spare = _MOST_WEIGHTS - len(weights)
  weights += weights[:1] * spare
  return triton_call.call(
      kernel,
      *operands,
      *[array for index, stack, _ in weights for array in (index, *stack)],
      out_shape=shapes + [jax.ShapeDtypeStruct((1,), outputs[0][1])] * spare,
      grid=(triton.cdiv(m, tile.rows), tiles, indices[0].size),
      num_warps=tile.warps,
      num_stages=tile.stages,
      M=m,
      K=k,
      **{f'N{i}': (features + [0, 0])[i] for i in range(_MOST_WEIGHTS)},
      INDEXED=any(stack[0].shape[0] > 1 for stack in stacks),
      ROWS=tile.rows,
      FEATURES=tile.features,
      **static,
  )[: len(stacks)]


@triton.jit
def store(y_ptr, y, token, feature, M, N):
  """Stores y `[features, tokens]` to `[M, N]`."""
  at = token[None, :].to(tl.int64) * N + feature[:, None]
  y = y.to(y_ptr.dtype.element_ty)
  tl.store(y_ptr + at, y, mask=(token < M)[None, :] & (feature < N)[:, None])


@triton.jit
def _matrix(index_ptr, INDEXED: tl.constexpr):
  if INDEXED:
    return tl.load(index_ptr + tl.program_id(2)).to(tl.int64)
  return tl.full((), 0, tl.int64)


@triton.jit
def _nvfp4_tile(
    x_ptr, outer_ptr, index_ptr, codes_ptr, scale_ptr, global_ptr, y_ptr, tile,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    UNIT: tl.constexpr, SCALED: tl.constexpr, INDEXED: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
  """Writes the sums of a part of K; of the only one, y."""
  token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  tiles: tl.constexpr = (N + FEATURES - 1) // FEATURES
  feature = tile % tiles * FEATURES + tl.arange(0, FEATURES)
  part = tile // tiles
  lane = tl.program_id(2).to(tl.int64)
  matrix = _matrix(index_ptr, INDEXED)
  # Features beyond the last repeat it, and are not stored.
  w_row = (matrix * N + tl.minimum(feature, N - 1).to(tl.int64))[:, None]
  words_ptr = codes_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
  words_ptr += w_row * (K // 8) + tl.arange(0, 16)[None, :]
  scale_ptr = scale_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
  scale_ptr += w_row * (K // 16) + tl.arange(0, 8)[None, :]
  x_row = lane * M + token
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
    outer = tl.load(global_ptr + matrix)
    if SCALED:
      x_outer = tl.load(outer_ptr + x_row, mask=token < M, other=0.0)
      y = (y * UNIT) * (x_outer * outer)[None, :]
    else:
      y = (y * UNIT) * outer
  at = (lane * PARTS + part) * M * N
  store(y_ptr + at, y, token, feature, M, N)


@triton.jit
def nvfp4_few(
    x_ptr, outer_ptr,
    index0_ptr, codes0_ptr, scale0_ptr, global0_ptr,
    index1_ptr, codes1_ptr, scale1_ptr, global1_ptr,
    index2_ptr, codes2_ptr, scale2_ptr, global2_ptr,
    y0_ptr, y1_ptr, y2_ptr,
    M: tl.constexpr, K: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    INDEXED: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
    UNIT: tl.constexpr, SCALED: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
  """Writes the sums of parts `[B, parts, M, N]`, or y where there is but one.

  Of x `[B, M, K]`, whose columns are in the order of `permute`; the b-th meets
  the matrix `index[b]` of each stack. Sums mean UNIT times as much. A program
  has a tile of one of the weights.
  """
  tile = tl.program_id(1)
  end0: tl.constexpr = tl.cdiv(N0, FEATURES) * P0
  end1: tl.constexpr = end0 + tl.cdiv(N1, FEATURES) * P1
  if tile < end0:
    _nvfp4_tile(
        x_ptr, outer_ptr, index0_ptr, codes0_ptr, scale0_ptr, global0_ptr,
        y0_ptr, tile,
        M, N0, K, P0, UNIT, SCALED, INDEXED, ROWS, FEATURES,
    )  # fmt: skip
  if N1 > 0:  # noqa: SIM102, known when compiled
    if (tile >= end0) & (tile < end1):
      _nvfp4_tile(
          x_ptr, outer_ptr, index1_ptr, codes1_ptr, scale1_ptr, global1_ptr,
          y1_ptr, tile - end0,
          M, N1, K, P1, UNIT, SCALED, INDEXED, ROWS, FEATURES,
      )  # fmt: skip
  if N2 > 0:  # noqa: SIM102, known when compiled
    if tile >= end1:
      _nvfp4_tile(
          x_ptr, outer_ptr, index2_ptr, codes2_ptr, scale2_ptr, global2_ptr,
          y2_ptr, tile - end1,
          M, N2, K, P2, UNIT, SCALED, INDEXED, ROWS, FEATURES,
      )  # fmt: skip


@triton.jit
def _row_pointers(
    index_ptr, w_ptr, feature, N: tl.constexpr, K: tl.constexpr,
    INDEXED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
  """Returns pointers to the first STEP columns of features, `[STEP, features]`.

  Features beyond the last repeat it, and are not stored.
  """
  w_row = _matrix(index_ptr, INDEXED) * N + tl.minimum(feature, N - 1)
  return w_ptr + w_row[None, :] * K + tl.arange(0, STEP)[:, None]


@triton.jit
def _bfloat16_tile(
    x_ptr, index_ptr, w_ptr, y_ptr, tile,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr,
    INDEXED: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
  token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  feature = tile * FEATURES + tl.arange(0, FEATURES)
  lane = tl.program_id(2).to(tl.int64)
  is_token = (token < M)[:, None]
  x_ptr += (lane * M + token)[:, None] * K + tl.arange(0, STEP)[None, :]
  w_ptr = _row_pointers(index_ptr, w_ptr, feature, N, K, INDEXED, STEP)
  y = tl.zeros((ROWS, FEATURES), tl.float32)
  for step in range(K // STEP):
    x = tl.load(x_ptr + step * STEP, mask=is_token, other=0.0)
    y = tl.dot(x, tl.load(w_ptr + step * STEP), y)
  at = (lane * M + token)[:, None] * N + feature[None, :]
  mask = is_token & (feature < N)[None, :]
  tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bfloat16_few(
    x_ptr, index0_ptr, w0_ptr, index1_ptr, w1_ptr, index2_ptr, w2_ptr,
    y0_ptr, y1_ptr, y2_ptr,
    M: tl.constexpr, K: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    INDEXED: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
  """Writes y `[B, M, N]` of each weight: see `nvfp4_few`."""
  tile = tl.program_id(1)
  end0: tl.constexpr = tl.cdiv(N0, FEATURES)
  end1: tl.constexpr = end0 + tl.cdiv(N1, FEATURES)
  if tile < end0:
    _bfloat16_tile(
        x_ptr, index0_ptr, w0_ptr, y0_ptr, tile,
        M, N0, K, STEP, INDEXED, ROWS, FEATURES,
    )  # fmt: skip
  if N1 > 0:  # noqa: SIM102, known when compiled
    if (tile >= end0) & (tile < end1):
      _bfloat16_tile(
          x_ptr, index1_ptr, w1_ptr, y1_ptr, tile - end0,
          M, N1, K, STEP, INDEXED, ROWS, FEATURES,
      )  # fmt: skip
  if N2 > 0:  # noqa: SIM102, known when compiled
    if tile >= end1:
      _bfloat16_tile(
          x_ptr, index2_ptr, w2_ptr, y2_ptr, tile - end1,
          M, N2, K, STEP, INDEXED, ROWS, FEATURES,
      )  # fmt: skip


@triton.jit
def bfloat16_swiglu(
    x_ptr, index0_ptr, w0_ptr, index1_ptr, w1_ptr, y_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    INDEXED: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
  """Writes `layers.swiglu` `[B, M, N]` of x's products with gate and up."""
  token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
  lane = tl.program_id(2).to(tl.int64)
  is_token = (token < M)[:, None]
  x_ptr += (lane * M + token)[:, None] * K + tl.arange(0, STEP)[None, :]
  gates = _row_pointers(index0_ptr, w0_ptr, feature, N, K, INDEXED, STEP)
  ups = _row_pointers(index1_ptr, w1_ptr, feature, N, K, INDEXED, STEP)
  gate = tl.zeros((ROWS, FEATURES), tl.float32)
  up = tl.zeros((ROWS, FEATURES), tl.float32)
  for step in range(K // STEP):
    x = tl.load(x_ptr + step * STEP, mask=is_token, other=0.0)
    gate = tl.dot(x, tl.load(gates + step * STEP), gate)
    up = tl.dot(x, tl.load(ups + step * STEP), up)
  gate = triton_exact.round_to_bfloat16(gate)
  up = triton_exact.round_to_bfloat16(up)
  silu = gate / (1.0 + triton_exact.exp(tl.minimum(-gate, 80.0)))
  y = triton_exact.round_to_bfloat16(silu) * up
  at = (lane * M + token)[:, None] * N + feature[None, :]
  mask = is_token & (feature < N)[None, :]
  tl.store(y_ptr + at, y.to(tl.bfloat16), mask=mask)
