"""Block-scaled matmuls in Triton, for Blackwell (compute capability 10, 12).

Compiled for sm_100a and sm_120a and checked in Triton's interpreter, never run
on a GPU: no claim is made for the order of sums, nor for speed.

Both operands nvfp4, K a multiple of 256, or both mxfp8, K a multiple of 128:
tensor cores take codes and block scales as they are. Global scales are applied
to the float32 sum.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import triton
import triton.language as tl

from nvfp4_jax import exact
from nvfp4_jax import qtensor
from nvfp4_jax.kernels import triton_call

CAPABILITIES = (10.0, 10.3, 12.0)
WHY_NOT_CHOSEN = 'the block-scaled matmul has not been run on a GPU'
_STEP = {'nvfp4': 256, 'mxfp8': 128}  # columns
_E2M1 = tl.constexpr('e2m1')
_E4M3 = tl.constexpr('e4m3')


class Tile(NamedTuple):
  """What one program computes: powers of two.

  Attributes:
    rows: rows of `x`, 128.
    features: rows of `w`, 64 to 256.
    warps: of 32 threads.
    stages: steps that are loaded ahead.
  """

  rows: int = 128
  features: int = 128
  warps: int = 4
  stages: int = 3


def unsupported(
    x: jax.Array | qtensor.QTensor,
    wq: qtensor.QTensor,
    group_sizes: jax.Array | None,
    capability: float,
) -> str | None:
  """Returns why these kernels cannot multiply, or None if they can."""
  if capability not in CAPABILITIES:
    return (
        f'the block-scaled matmul is for compute capability {CAPABILITIES},'
        f' not {capability}'
    )
  if group_sizes is not None or wq.data.ndim != 2:
    return 'the block-scaled matmul has no groups'
  if not isinstance(x, qtensor.QTensor):
    return 'the block-scaled matmul needs a quantized x'
  formats = (x.format.name, wq.format.name)
  if formats not in (('nvfp4', 'nvfp4'), ('mxfp8', 'mxfp8')):
    return f'the block-scaled matmul has no {formats[0]} x {formats[1]}'
  k, step = qtensor.num_columns(wq), _STEP[wq.format.name]
  if k % step:
    return f'K = {k} is not a multiple of {step}'
  if not x.data.size:
    return f'x of shape {x.data.shape} is empty'
  return None


def scaled_matmul(
    xq: qtensor.QTensor,
    wq: qtensor.QTensor | qtensor.Layer,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    tile: Tile | None = None,
) -> jax.Array:
  """Returns `x @ w.T` `[M, N]`: see `kernels.scaled_matmul`.

  Has no derivative and no vmap rule.

  Args:
    xq: quantized `[M, K]`; `unsupported` gives None.
    wq: quantized `[N, K]`, of the same format.
    dtype: float32, or bfloat16 to round to at last.
    tile: what a program computes; None for Tile().
  """
  wq = wq.take() if isinstance(wq, qtensor.Layer) else wq
  xq, wq = lax.stop_gradient((xq, wq))
  tile = Tile() if tile is None else Tile(*tile)
  m, n = xq.data.shape[0], wq.data.shape[0]
  is_nvfp4 = wq.format.name == 'nvfp4'
  outer = jnp.ones((1, 1))
  if xq.global_scale is not None and wq.global_scale is not None:
    outer = exact.multiply(xq.global_scale, wq.global_scale)
  (y,) = triton_call.call(
      block_scaled_matmul,
      xq.data,
      _bytes(xq.block_scale),
      wq.data,
      _bytes(wq.block_scale),
      jnp.broadcast_to(outer, (m, 1)).reshape(-1),
      out_shape=[jax.ShapeDtypeStruct((m, n), dtype)],
      grid=(triton.cdiv(m, tile.rows), triton.cdiv(n, tile.features)),
      num_warps=tile.warps,
      num_stages=tile.stages,
      M=m,
      N=n,
      K=qtensor.num_columns(wq),
      NVFP4=is_nvfp4,
      ROWS=tile.rows,
      FEATURES=tile.features,
      STEP=_STEP[wq.format.name],
  )
  return y


def _bytes(scale):
  return lax.bitcast_convert_type(scale, jnp.uint8)


@triton.jit
def block_scaled_matmul(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, outer_ptr, y_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NVFP4: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
  """Writes y `[M, N]`: block-scaled products times `outer` `[M]`."""
  row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
  # Rows beyond the last repeat it, and are not stored.
  x_row = tl.minimum(row, M - 1).to(tl.int64)[:, None]
  w_row = tl.minimum(feature, N - 1).to(tl.int64)[:, None]
  packed: tl.constexpr = 2 if NVFP4 else 1
  block: tl.constexpr = 16 if NVFP4 else 32
  index = tl.arange(0, STEP // packed)[None, :]
  scales = tl.arange(0, STEP // block)[None, :]
  y = tl.zeros((ROWS, FEATURES), tl.float32)
  for step in range(K // STEP):
    at = step * (STEP // packed) + index
    x = tl.load(x_ptr + x_row * (K // packed) + at)
    w = tl.load(w_ptr + w_row * (K // packed) + at)
    at = step * (STEP // block) + scales
    x_scale = tl.load(x_scale_ptr + x_row * (K // block) + at)
    w_scale = tl.load(w_scale_ptr + w_row * (K // block) + at)
    if NVFP4:
      x_scale = x_scale.to(tl.float8e4nv, bitcast=True)
      w_scale = w_scale.to(tl.float8e4nv, bitcast=True)
      y = tl.dot_scaled(x, x_scale, _E2M1, w.T, w_scale, _E2M1, y)
    else:
      x = x.to(tl.float8e4nv, bitcast=True)
      w = w.to(tl.float8e4nv, bitcast=True)
      y = tl.dot_scaled(x, x_scale, _E4M3, w.T, w_scale, _E4M3, y)
  outer = tl.load(outer_ptr + row, mask=row < M, other=0.0)
  at = row[:, None].to(tl.int64) * N + feature[None, :]
  live = (row < M)[:, None] & (feature < N)[None, :]
  tl.store(y_ptr + at, y * outer[:, None], mask=live)
