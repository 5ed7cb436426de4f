"""The KV cache of a decoder: keys and values of every layer."""

import dataclasses

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp


@struct.dataclass
class KVCache:
  """Keys and values, written in place while it is carried through a scan.

  Attributes:
    k: `[L, B, H_kv, S, D]` keys, after RoPE. With the sequence axis
      next to last, XLA need not transpose the cache, and the order of
      attention's sums does not change with its length.
    v: `[L, B, H_kv, S, D]` values.
    lengths: `[B]` int32, how many positions of each row are filled.
  """

  k: jax.Array
  v: jax.Array
  lengths: jax.Array


def init(
    num_layers: int,
    batch: int,
    num_kv_heads: int,
    length: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> KVCache:
  """Returns an empty cache for `length` positions, of the model's dtype."""
  shape = (num_layers, batch, num_kv_heads, length, head_dim)
  return KVCache(
      k=jnp.zeros(shape, dtype),
      v=jnp.zeros(shape, dtype),
      lengths=jnp.zeros((batch,), jnp.int32),
  )


def write_prompt(
    cache: KVCache, layer: jax.Array, k: jax.Array, v: jax.Array
) -> KVCache:
  """Returns the cache with `k`, `v` `[B, H_kv, T, D]` at positions 0 to T-1."""
  start = (layer, 0, 0, 0, 0)
  return dataclasses.replace(
      cache,
      k=lax.dynamic_update_slice(cache.k, k[None], start),
      v=lax.dynamic_update_slice(cache.v, v[None], start),
  )


def write_token(
    cache: KVCache, layer: jax.Array, k: jax.Array, v: jax.Array
) -> KVCache:
  """Returns the cache with `k`, `v` `[B, H_kv, 1, D]` at each row's length."""
  rows = jnp.arange(cache.lengths.size)
  at = (layer, rows, slice(None), cache.lengths)
  return dataclasses.replace(
      cache, k=cache.k.at[at].set(k[:, :, 0]), v=cache.v.at[at].set(v[:, :, 0])
  )


def read(
    cache: KVCache, layer: jax.Array, live: int
) -> tuple[jax.Array, jax.Array]:
  """Returns keys and values `[B, H_kv, live, D]` of one layer."""
  return cache.k[layer, :, :, :live], cache.v[layer, :, :, :live]
