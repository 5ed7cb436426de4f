"""One step of attention, for the tests of kernels that do it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import kv_cache
from nvfp4_jax import layers

EPS = 1e-6


class Case(NamedTuple):
  """Shapes, and the rows' lengths."""

  heads: int
  kv_heads: int
  dim: int
  positions: int
  lengths: tuple[int, ...]
  block: int = 64
  normed: bool = True


def operands(case: Case, seed: int = 0, num_layers: int = 2) -> dict[str, Any]:
  """Returns the arrays that `kernels.attend_token` takes, by name."""
  batch = len(case.lengths)
  keys = iter(jax.random.split(jax.random.key(seed), 7))
  normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
  stack = (num_layers, batch, case.kv_heads, case.positions, case.dim)
  cos, sin = layers.rope_table(
      max(case.positions, *case.lengths) + 1,
      1e4 ** -np.linspace(0, 1, case.dim // 2),
  )
  lengths = np.array(case.lengths)
  gains = tuple(1 + 0.2 * normal(case.dim) for _ in range(2))
  return dict(
      q=3 * normal(batch, case.heads * case.dim),
      k=2 * normal(batch, case.kv_heads * case.dim),
      v=normal(batch, case.kv_heads * case.dim),
      gains=gains if case.normed else None,
      rope=(jnp.asarray(cos[lengths]), jnp.asarray(sin[lengths])),
      cache=(normal(*stack), normal(*stack)),
      layer=jnp.int32(num_layers - 1),
      lengths=jnp.asarray(lengths, jnp.int32),
  )


def reference(q, k, v, gains, rope, cache, layer, lengths, *, live, block):
  """Returns what the model computes where no kernel does."""
  k_cache, v_cache = cache
  batch, dim = q.shape[0], k_cache.shape[-1]
  q, k, v = (t.reshape(batch, 1, -1, dim) for t in (q, k, v))
  if gains is not None:
    q, k = (
        layers.rms_norm(t, gain, EPS)
        for t, gain in zip((q, k), gains, strict=True)
    )
  rope = tuple(t[:, None] for t in rope)
  q, k = layers.rope(q, *rope, scale=dim**-0.5), layers.rope(k, *rope)
  cache = kv_cache.KVCache(k_cache, v_cache, lengths)
  k, v = (t.transpose(0, 2, 1, 3) for t in (k, v))
  cache = kv_cache.write_token(cache, layer, k, v)
  k, v = kv_cache.read(cache, layer, live)
  y = layers.attention(q, k, v, lengths[:, None], block)
  return y[:, 0], (cache.k, cache.v)
