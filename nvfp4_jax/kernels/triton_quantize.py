"""Quantizers in Triton: the bytes of `quantization.quantize`, one read of `x`.

Compute capability 9.0 and up, where E4M3 is rounded by hardware. `x` is
bfloat16, float16 or float32 `[..., M, K]`, K a multiple of the block:

* nvfp4 per token, K up to 32768: a program holds whole rows in registers.
* other nvfp4, or with a given amax: XLA finds the amax first, and `x` is read
  twice.
* mxfp8 and mxfp4, which have no global scale: tiles, one read.

Every float32 operation rounds once, and subnormal numbers are kept.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import triton
import triton.language as tl

from nvfp4_jax import formats
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax.kernels import triton_blocks
from nvfp4_jax.kernels import triton_call

_MAX_COLUMNS = 32768  # of a row in the registers of one program


class Tile(NamedTuple):
  """What one program computes: powers of two.

  Attributes:
    rows: rows of `x`.
    columns: columns of `x`; at least K where a program holds whole rows.
    warps: of 32 threads, at most 32.
  """

  rows: int
  columns: int
  warps: int


def unsupported(
    x: jax.Array | jax.ShapeDtypeStruct, spec: quantization.QuantSpec
) -> str | None:
  """Returns why these kernels cannot quantize `x`, or None if they can."""
  if spec.format == 'fp8_block':
    return 'fp8_block has no Triton kernel'
  if spec.rounding == 'stochastic':
    return 'the Triton kernels round to nearest only'
  if spec.hadamard:
    return 'the Triton kernels do not rotate'
  if x.size == 0:
    return f'x of shape {x.shape} is empty'
  return None


def quantize(
    x: jax.Array,
    spec: quantization.QuantSpec,
    *,
    amax: jax.Array | None = None,
    tile: Tile | None = None,
) -> qtensor.QTensor:
  """Returns what `quantization.quantize` does, byte for byte.

  Works under jit and vmap; has no derivative.

  Args:
    x: `[..., M, K]`, for which `unsupported` gives None.
    spec: how.
    amax: see `quantization.quantize`.
    tile: what a program computes; None for what suits the shape.

  Raises:
    ValueError: amax has the wrong shape, or `tile` cuts rows or squares that a
      program must hold.
  """
  x, fmt = lax.stop_gradient(x), formats.FORMATS[spec.format]
  if tile is not None:
    tile = Tile(*tile)
    if spec.block_2d and tile.rows % fmt.block:
      raise ValueError(f'tile {tile} cuts squares of {fmt.block} rows.')
  run = lambda fn: triton_call.with_vmap(
      functools.partial(fn, spec=spec, tile=tile)
  )
  if spec.outer == 'none':
    data, scale = run(_mx)(x)
    return qtensor.QTensor(data, scale, None, fmt)
  if amax is None and spec.outer == 'token' and x.shape[-1] <= _MAX_COLUMNS:
    data, scale, decode = run(_rows)(x)
    return qtensor.QTensor(data, scale, decode, fmt)
  own = quantization.compute_amax(x, spec)
  amax = own if amax is None else lax.stop_gradient(amax).astype(jnp.float32)
  if amax.shape != own.shape:
    raise ValueError(f'amax has shape {amax.shape}, not {own.shape}.')
  data, scale, decode = run(_tiles)(x, amax, own)
  return qtensor.QTensor(data, scale, decode, fmt)


def _rows(x, *, spec, tile):
  if tile is None:
    columns = triton.next_power_of_2(x.shape[-1])
    rows = max(2048 // columns, 1)
    # Two blocks a thread: four loads are in flight, and what a thread computes
    # for its row is shared.
    warps = min(max(rows * columns // 1024, 1), 32)
    tile = Tile(rows, columns, warps)
  if tile.columns < x.shape[-1]:
    raise ValueError(
        f'tile {tile} does not hold whole rows of {x.shape[-1]} columns.'
    )
  return _call(nvfp4_rows, x, spec, tile)


def _tiles(x, amax, own, *, spec, tile):
  per_scale = 1 if spec.outer == 'token' else x.shape[-2]
  arrays = (amax.reshape(-1), own.reshape(-1))
  tile = tile or _default_tile(x, spec)
  return _call(nvfp4_tiles, x, spec, tile, arrays, PER_SCALE=per_scale)


def _mx(x, *, spec, tile):
  return _call(mx_tiles, x, spec, tile or _default_tile(x, spec))


def _default_tile(x, spec):
  """Returns tiles of 4096 elements, of whole squares with `block_2d`."""
  columns = min(triton.next_power_of_2(x.shape[-1]), 1024)
  rows = 4096 // columns
  if spec.block_2d:
    rows = max(rows, formats.FORMATS[spec.format].block)
    columns = min(columns, 256)
  return Tile(rows, columns, 4)


def _call(kernel, x, spec, tile, arrays=(), **static):
  """Returns codes, block scales and, with nvfp4, global scales."""
  fmt = formats.FORMATS[spec.format]
  *lead, m, k = x.shape
  rows = x.size // k
  is_byte = fmt.elem_dtype == formats.MXFP8.elem_dtype
  out_shape = [
      jax.ShapeDtypeStruct((rows, k if is_byte else k // 2), jnp.uint8),
      jax.ShapeDtypeStruct((rows, k // fmt.block), fmt.scale_dtype),
  ]
  static |= {'M': rows, 'K': k}
  static |= {'ROWS': tile.rows, 'BLOCKS': tile.columns // 16}
  if spec.outer == 'none':
    # Triton has no name for E8M0.
    out_shape[1] = jax.ShapeDtypeStruct(out_shape[1].shape, jnp.uint8)
    static |= {'FP8': is_byte, 'SQUARES': spec.block_2d}
  else:
    scales = rows if spec.outer == 'token' else rows // m
    out_shape.append(jax.ShapeDtypeStruct((scales, 1), jnp.float32))
    static |= {
        'E': spec.scale_max,
        'FOUR': spec.four_over_six is not None,
        'MSE': spec.four_over_six == 'mse',
        'FAST': spec.error == 'fast',
    }
  if kernel is nvfp4_tiles:
    static['SQUARES'] = spec.block_2d
  grid = (
      triton.cdiv(rows, tile.rows),
      1 if kernel is nvfp4_rows else triton.cdiv(k, tile.columns),
  )
  outputs = triton_call.call(
      kernel,
      x.reshape(rows, k),
      *arrays,
      out_shape=out_shape,
      grid=grid,
      num_warps=tile.warps,
      **static,
  )
  data, scale, *decode = outputs
  scale = lax.bitcast_convert_type(scale, fmt.scale_dtype)
  shaped = [y.reshape(*lead, m, y.shape[-1]) for y in (data, scale)]
  if decode:
    shaped.append(decode[0].reshape(*lead, -1, 1))
  return tuple(shaped)


@triton.jit
def nvfp4_rows(
    x_ptr, data_ptr, scale_ptr, decode_ptr,
    M: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    FOUR: tl.constexpr, MSE: tl.constexpr, FAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
  """Quantizes whole rows of `x` `[M, K]`, each with its own global scale."""
  row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  block = tl.arange(0, BLOCKS)
  live = (row < M)[:, None] & (block * 16 < K)[None, :]
  low, high = triton_blocks.load(x_ptr, row, block, live, K)
  largest = triton_blocks.amax(low, high)
  amax = tl.max(triton_blocks.float_bits(largest), axis=1)
  finite = amax < 0x7F800000
  amax = amax.to(tl.float32, bitcast=True)
  first, second, scale, decode = triton_blocks.nvfp4(
      low, high, largest, amax, finite, E, FOUR, MSE, FAST, False
  )
  triton_blocks.store_words(data_ptr, row, block, live, K, first, second)
  triton_blocks.store_scale(scale_ptr, row, block, live, K // 16, scale)
  tl.store(decode_ptr + row, decode, mask=row < M)


@triton.jit
def nvfp4_tiles(
    x_ptr, amax_ptr, own_ptr, data_ptr, scale_ptr, decode_ptr,
    M: tl.constexpr, K: tl.constexpr, PER_SCALE: tl.constexpr,
    E: tl.constexpr, SQUARES: tl.constexpr,
    FOUR: tl.constexpr, MSE: tl.constexpr, FAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
  """Quantizes tiles of `x` `[M, K]`; PER_SCALE rows share an amax.

  amax is the one that scales; own, that of `x`, says whether it is finite.
  """
  row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
  live = (row < M)[:, None] & (block * 16 < K)[None, :]
  low, high = triton_blocks.load(x_ptr, row, block, live, K)
  largest = triton_blocks.amax(low, high)
  if SQUARES:
    bits = triton_blocks.over_rows(triton_blocks.float_bits(largest), 16)
    largest = bits.to(tl.float32, bitcast=True)
  outer = row // PER_SCALE
  amax = tl.load(amax_ptr + outer, mask=row < M, other=0.0)
  own = tl.load(own_ptr + outer, mask=row < M, other=0.0)
  finite = (tl.abs(amax) < float('inf')) & (own < float('inf'))
  first, second, scale, decode = triton_blocks.nvfp4(
      low, high, largest, amax, finite, E, FOUR, MSE, FAST, SQUARES
  )
  triton_blocks.store_words(data_ptr, row, block, live, K, first, second)
  triton_blocks.store_scale(scale_ptr, row, block, live, K // 16, scale)
  is_first = (row < M) & (row % PER_SCALE == 0) & (tl.program_id(1) == 0)
  tl.store(decode_ptr + outer, decode, mask=is_first)


@triton.jit
def mx_tiles(
    x_ptr, data_ptr, scale_ptr,
    M: tl.constexpr, K: tl.constexpr, FP8: tl.constexpr, SQUARES: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
  """Quantizes tiles of `x` `[M, K]` to mxfp8 (FP8) or mxfp4; 16-blocks pair."""
  row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
  live = (row < M)[:, None] & (block * 16 < K)[None, :]
  low, high = triton_blocks.load(x_ptr, row, block, live, K)
  bits = triton_blocks.float_bits(triton_blocks.amax(low, high))
  if SQUARES:
    bits = triton_blocks.over_rows(bits, 32)
  pairs = tl.reshape(bits, (ROWS, BLOCKS // 2, 2))
  bits = tl.max(pairs, axis=2)
  finite = bits < 0x7F800000
  amax = bits.to(tl.float32, bitcast=True)
  if FP8:
    scale = amax * triton_blocks.ONE_448TH
  else:
    scale = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
  byte = tl.where(finite, triton_blocks.to_e8m0(scale), 255)
  shifted = (254 - byte) << 23
  factor = tl.where(byte == 254, 0x400000, shifted)
  factor = tl.where(finite, factor, 0).to(tl.float32, bitcast=True)
  wide = tl.broadcast_to(factor[:, :, None], pairs.shape)
  factor = tl.reshape(wide, (ROWS, BLOCKS))
  wide = tl.broadcast_to(finite[:, :, None], pairs.shape)
  is_finite = tl.reshape(wide, (ROWS, BLOCKS))
  if FP8:
    triton_blocks.store_e4m3(
        data_ptr, row, block, live, K, low, factor, is_finite, 0
    )
    triton_blocks.store_e4m3(
        data_ptr, row, block, live, K, high, factor, is_finite, 8
    )
  else:
    first = tl.where(is_finite, triton_blocks.pack8(low, factor, True), 0)
    second = tl.where(is_finite, triton_blocks.pack8(high, factor, True), 0)
    triton_blocks.store_words(data_ptr, row, block, live, K, first, second)
  pair = tl.program_id(1) * (BLOCKS // 2) + tl.arange(0, BLOCKS // 2)
  live = (row < M)[:, None] & (pair * 32 < K)[None, :]
  triton_blocks.store_scale(
      scale_ptr, row, pair, live, K // 32, byte.to(tl.uint8)
  )
