"""The KV cache of a decoder: keys and values of every layer.

In FP8, each key and each value has a float32 scale for its own channels (one
for every 128 of them): amax / 448, so that nothing is calibrated, nothing is
stale after an update, and no token depends on another.
"""

import dataclasses
import functools

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax import kernels
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

FP8 = quantization.QuantSpec('fp8_block')
# By the names that precision policies use.
SPECS = {'bf16': None, 'fp8': FP8}

type Stored = jax.Array | qtensor.QTensor


@struct.dataclass
class KVCache:
  """Keys and values, written in place while it is carried through a scan.

  Attributes:
    k: `[L, B, H_kv, S, D]` keys, after RoPE. With the sequence axis
      next to last, XLA need not transpose the cache, and the order of
      attention's sums does not change with its length. A QTensor in FP8.
    v: `[L, B, H_kv, S, D]` values, likewise.
    lengths: `[B]` int32, how many positions of each row are filled.
  """

  k: Stored
  v: Stored
  lengths: jax.Array


def init(
    num_layers: int,
    batch: int,
    num_kv_heads: int,
    length: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    spec: quantization.QuantSpec | None = None,
) -> KVCache:
  """Returns an empty cache for `length` positions.

  Args:
    num_layers: L.
    batch: B.
    num_kv_heads: H_kv.
    length: S.
    head_dim: D.
    dtype: of keys and values, the model's.
    spec: how they are stored, `FP8`; None for as they are.
  """
  empty = jnp.zeros((num_layers, batch, num_kv_heads, length, head_dim), dtype)
  if spec is not None:
    empty = kernels.quantize(empty, spec)
  return KVCache(k=empty, v=empty, lengths=jnp.zeros((batch,), jnp.int32))


def capacity(cache: KVCache) -> int:
  """Returns S, the number of positions."""
  return jax.tree.leaves(cache.k)[0].shape[3]


def store(x: jax.Array, spec: quantization.QuantSpec | None) -> Stored:
  """Returns keys or values `[..., T, D]` as a cache holds them."""
  return x if spec is None else kernels.quantize(x, spec)


def load(stored: Stored, dtype: jax.typing.DTypeLike) -> jax.Array:
  """Returns keys or values `[..., T, D]` as attention takes them."""
  if isinstance(stored, qtensor.QTensor):
    return qtensor.dequantize(stored, dtype)
  return stored


def round_trip(x: jax.Array, spec: quantization.QuantSpec | None) -> jax.Array:
  """Returns `load(store(x))` in the dtype of `x`.

  Its gradient is that of the identity: attention's, at the operands that it
  really had.
  """
  if spec is None:
    return x
  return _round_trip(x, spec)


def write_prompt(
    cache: KVCache, layer: jax.Array, k: Stored, v: Stored
) -> KVCache:
  """Returns the cache with `k`, `v` `[B, H_kv, T, D]` at positions 0 to T-1."""

  def write(old, new):
    return lax.dynamic_update_slice(old, new[None], (layer, 0, 0, 0, 0))

  return dataclasses.replace(
      cache,
      k=jax.tree.map(write, cache.k, k),
      v=jax.tree.map(write, cache.v, v),
  )


def write_token(
    cache: KVCache, layer: jax.Array, k: Stored, v: Stored
) -> KVCache:
  """Returns the cache with `k`, `v` `[B, H_kv, 1, D]` at each row's length."""
  rows = jnp.arange(cache.lengths.size)

  def write(old, new):
    at = (layer, rows, slice(None), cache.lengths)
    return old.at[at].set(new[:, :, 0])

  return dataclasses.replace(
      cache,
      k=jax.tree.map(write, cache.k, k),
      v=jax.tree.map(write, cache.v, v),
  )


def read(cache: KVCache, layer: jax.Array, live: int) -> tuple[Stored, Stored]:
  """Returns keys and values `[B, H_kv, live, D]` of one layer, as stored."""
  take = lambda x: x[layer, :, :, :live]
  return jax.tree.map(take, cache.k), jax.tree.map(take, cache.v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _round_trip(x, spec):
  return load(store(x, spec), x.dtype)


def _round_trip_fwd(x, spec):
  return _round_trip(x, spec), None


def _round_trip_bwd(spec, residuals, dy):
  del spec, residuals
  return (dy,)


_round_trip.defvjp(_round_trip_fwd, _round_trip_bwd)
