"""Matmuls with NVFP4 weights in Triton, for Hopper (compute capability 9.0).

`y[M, N] = x[M, K] @ w[N, K].T`, K a multiple of 128. Codes times block scales
are bfloat16 numbers, exactly; tensor cores multiply them exactly and add in
float32. Global scales are applied to the sum. `x` is bfloat16, or quantized and
then decoded by a kernel of its own. With few rows of `x`, `w` is decoded in
registers (`triton_few`); with many, `w` is decoded first too, which then costs
little.

**A row's bits do not depend on M**, if tensor cores add as they do for tiles of
any width, which the tests ask a GPU. Features are the rows of the tile and
tokens its columns, so that any number of tokens takes the same steps of 16
along K. K is divided into parts whose number follows from N and K alone. In a
part, columns are added in the order of `triton_decode.permute`, from left to
right; then the sums of parts, first to last. With few rows, parts are programs
of their own and XLA adds their sums; with many, one program does it all.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import triton
import triton.language as tl

from nvfp4_jax import exact
from nvfp4_jax import qtensor
from nvfp4_jax.kernels import triton_call
from nvfp4_jax.kernels import triton_decode
from nvfp4_jax.kernels import triton_few

WHY_NOT_CHOSEN = None


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
    tile: triton_few.Tile | None = None,
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
  if rows <= triton_few.MOST_NVFP4_ROWS:
    w = qtensor.as_layer(wq)
    (y,) = triton_few.matmuls(x, (w,), dtype=dtype, tile=tile)
    return y
  wq = wq.take() if isinstance(wq, qtensor.Layer) else wq
  scale = jnp.ones((1, 1)) if wq.global_scale is None else wq.global_scale
  x_scale = getattr(x, 'global_scale', None)
  if x_scale is not None:
    scale = exact.multiply(x_scale, scale)
  scale = jnp.broadcast_to(lax.stop_gradient(scale), (rows, 1))
  w = triton_decode.decode_permuted(wq)
  x, unit = triton_decode.left_operand(x)
  multiply = functools.partial(_many, unit=unit, dtype=dtype, tile=tile)
  return _with_vmap(multiply)(x, scale, w)


def _with_vmap(multiply):
  """Returns `multiply`, of which `w` alone may be shared by lanes of a vmap.

  It takes x `[..., M, K]`, scale `[..., M, 1]` and w `[..., N, K]`, or `[N, K]`
  for all, and gives `[..., M, N]`.
  """
  run = jax.custom_batching.custom_vmap(multiply)

  @run.def_vmap
  def _(lanes, batched, *arrays):
    wide = lambda a, flag: a if flag else jnp.broadcast_to(a, (lanes, *a.shape))
    x, scale = map(wide, arrays[:2], batched[:2])
    w = arrays[2]
    if batched[2]:  # inner axes may have shared it
      w = w.reshape(lanes, *[1] * (x.ndim - w.ndim), *w.shape[1:])
    if w.ndim > 2:
      w = jnp.broadcast_to(w, (*x.shape[:-2], *w.shape[-2:]))
    return run(x, scale, w), True

  return run


def _many(x, scale, w, *, unit, dtype, tile):
  """See `_with_vmap`; columns of both operands are permuted."""
  (*lead, m, k), n = x.shape, w.shape[-2]
  tile = triton_few.quantized_tile(tile, triton_few.Tile(128, 128, 8, 4))
  parts = triton_few.num_parts(n, k)
  (y,) = triton_call.call(
      bfloat16_matmul,
      x,
      w,
      scale,
      jnp.array([k // 64 // parts], jnp.int32),
      out_shape=[jax.ShapeDtypeStruct((*lead, m, n), dtype)],
      grid=(
          triton.cdiv(m, tile.rows),
          triton.cdiv(n, tile.features),
          x.size // (m * k),
      ),
      num_warps=tile.warps,
      num_stages=tile.stages,
      M=m,
      N=n,
      K=k,
      PARTS=parts,
      UNIT=unit,
      SHARED=w.ndim == 2,
      ROWS=tile.rows,
      FEATURES=tile.features,
  )
  return y


@triton.jit
def _bfloat16_part(x_row, w_row, first, steps):
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
    x_ptr, w_ptr, outer_ptr, steps_ptr, y_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    UNIT: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
  """Writes y `[B, M, N]`; columns of x and w are in the order of `permute`.

  The number of steps of a part is loaded: were it a constant, ptxas would take
  ten seconds for two loops in a row.
  """
  # Programs that run together share rows of both operands: groups of eight.
  rows, columns = tl.cdiv(M, ROWS), tl.cdiv(N, FEATURES)
  program = tl.program_id(1) * rows + tl.program_id(0)
  row_tile, column_tile = tl.swizzle2d(
      program % rows, program // rows, rows, columns, 8
  )
  token = row_tile * ROWS + tl.arange(0, ROWS)
  feature = column_tile * FEATURES + tl.arange(0, FEATURES)
  lane = tl.program_id(2).to(tl.int64)
  row = lane * M  # the lane's first
  x_row = (row + tl.minimum(token, M - 1))[None, :]
  w_row = tl.minimum(feature, N - 1).to(tl.int64)[:, None]
  if not SHARED:
    w_row += lane * N
  steps = tl.load(steps_ptr)
  total = _bfloat16_part(x_ptr + x_row * K, w_ptr + w_row * K, 0, steps)
  for part in range(1, PARTS):
    first = part * steps
    total += _bfloat16_part(x_ptr + x_row * K, w_ptr + w_row * K, first, steps)
  outer = tl.load(outer_ptr + row + token, mask=token < M, other=0.0)
  y_ptr += row * N
  y = (total * UNIT) * outer[None, :]
  triton_few.store(y_ptr, y, token, feature, M, N)
