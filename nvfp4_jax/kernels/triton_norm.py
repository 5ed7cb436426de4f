"""RMSNorm of rows in Triton, with the bits of `layers.rms_norm`.

XLA fuses the tree of sums into whatever reads it, and of a single row then adds
all channels in every thread. A program here has one row.
"""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from nvfp4_jax import qtensor
from nvfp4_jax.kernels import triton_call
from nvfp4_jax.kernels import triton_exact

_MOST_CHANNELS = 1 << 14


def unsupported(x: jax.Array) -> str | None:
  """Returns why this kernel cannot normalize `[M, D]`, or None if it can."""
  if x.dtype != jnp.bfloat16:
    return f'the Triton norm is for bfloat16, not {x.dtype}'
  if x.shape[-1] > _MOST_CHANNELS:
    return f'{x.shape[-1]} channels are more than {_MOST_CHANNELS}'
  return None


@functools.partial(jax.jit, static_argnames=('eps',))
def rms_norm(
    x: jax.Array,
    gain: jax.Array | qtensor.Layer,
    eps: float,
    y: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns `x + y` and its norm: see `decoding.rms_norm`."""
  gain = qtensor.as_layer(gain)
  normalize = triton_call.with_vmap(functools.partial(_call, eps=eps))
  if y is None:
    return x, normalize(gain.index, gain.stack, x)
  return normalize(gain.index, gain.stack, x, y)


def _call(index, gains, x, y=None, *, eps):
  rows, channels = x.shape[-2:]
  block = triton.next_power_of_2(channels)
  total, normed = triton_call.call(
      norm_rows,
      index,
      gains,
      x,
      x if y is None else y,
      out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
      grid=(rows, index.size),
      num_warps=min(max(block // 1024, 1), 16),
      D=channels,
      L=gains.shape[-2],
      BLOCK=block,
      EPS=eps,
      ADD=y is not None,
  )
  return normed if y is None else (total, normed)


@triton.jit
def norm_rows(
    index_ptr, gain_ptr, x_ptr, y_ptr, total_ptr, normed_ptr,
    D: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
    EPS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
  """Writes the sum and the norm of one row; each lane has L gains."""
  lane = tl.program_id(1)
  gain_ptr += (lane * L + tl.load(index_ptr + lane)) * D
  row = (lane * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * D
  channel = tl.arange(0, BLOCK)[None, :]
  inside = channel < D
  x = tl.load(x_ptr + row + channel, mask=inside, other=0.0).to(tl.float32)
  if ADD:
    y = tl.load(y_ptr + row + channel, mask=inside, other=0.0).to(tl.float32)
    x = triton_exact.round_to_bfloat16(x + y)
    tl.store(total_ptr + row + channel, x.to(tl.bfloat16), mask=inside)
  gain = tl.load(gain_ptr + channel, mask=inside, other=0.0)
  mean_square = triton_exact.tree_sum(x * x, BLOCK) * (1 / D)
  inverse = triton_exact.rsqrt(triton_exact.fence(mean_square) + EPS)[:, None]
  normal = triton_exact.round_to_bfloat16(x * inverse)
  normal *= triton_exact.round_to_bfloat16(gain.to(tl.float32))
  tl.store(normed_ptr + row + channel, normal.to(tl.bfloat16), mask=inside)
