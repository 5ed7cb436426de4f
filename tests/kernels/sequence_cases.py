"""Attention of whole sequences, for the tests of kernels that do it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import exact
from nvfp4_jax import layers

type _Operands = tuple[jax.Array, jax.Array, jax.Array]


class Case(NamedTuple):
  """Shapes."""

  batch: int
  length: int
  heads: int
  kv_heads: int
  dim: int
  block: int = 64


def operands(case: Case, seed: int = 0) -> _Operands:
  """Returns queries, keys and values that `sequences.attention` takes."""
  q, k, v = jax.random.split(jax.random.key(seed), 3)
  q_shape, kv_shape = _shapes(case)
  normal = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16)
  q = (3 * case.dim**-0.5 * normal(q, q_shape)).astype(jnp.bfloat16)
  return q, normal(k, kv_shape), normal(v, kv_shape)


def exact_operands(case: Case, seed: int = 0) -> _Operands:
  """Returns operands whose dots are exact, also where they add in any order.

  Scores are multiples of 1/8. Each channel has one value in a block, so that a
  block's dot is a product. Large values cancel, and so the order of blocks can
  be told from the result; all weights of every other query are 1.
  """
  random = np.random.default_rng(seed)
  q_shape, kv_shape = _shapes(case)
  q = random.integers(-2, 3, q_shape) / 8
  q[:, ::2] = 0
  k = random.integers(-2, 3, kv_shape)
  *lead, length, dim = kv_shape
  blocks = -(-length // case.block)
  value = random.standard_normal((*lead, blocks, 1, dim))
  large = random.choice([0, 0, 2.0**20, -(2.0**20)], value.shape)
  where = random.integers(0, case.block, value.shape)
  v = np.where(np.arange(case.block)[:, None] == where, value + large, 0)
  v = np.where(large, np.sign(v) * (v != 0) * 2.0**20, v)
  v = v.reshape(*lead, -1, dim)[..., :length, :]
  q, k, v = (jnp.asarray(t, jnp.bfloat16) for t in (q, k, v))
  return q, k, v


def reference(
    q: jax.Array, k: jax.Array, v: jax.Array, *, block: int
) -> jax.Array:
  """Returns what the model computes where no kernel does."""
  positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
  return layers.attention(q, k, v, positions, block)


def softmax_sums(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the largest score and the sum of weights `[B, H, T]`."""
  length, group = q.shape[1], q.shape[2] // k.shape[1]
  q, k = (t.astype(jnp.float32) for t in (q, k))
  scores = jnp.einsum('bthd,bhsd->bhts', q, jnp.repeat(k, group, axis=1))
  is_live = jnp.arange(length)[:, None] >= jnp.arange(length)
  scores = jnp.where(is_live, scores, -jnp.inf)
  largest = jnp.max(scores, axis=-1, keepdims=True)
  weights = exact.to_bfloat16(exact.exp(scores - largest))
  return largest[..., 0], exact.tree_sum(weights.astype(jnp.float32))


def gradients(attend, operands: _Operands, seed: int = 0) -> _Operands:
  """Returns the gradients of a random linear function of attention."""
  q = operands[0]
  shape = (*q.shape[:2], q.shape[2] * q.shape[3])
  weights = jax.random.normal(jax.random.key(seed), shape)
  loss = lambda *t: jnp.sum(attend(*t).astype(jnp.float32) * weights)
  return jax.grad(loss, (0, 1, 2))(*operands)


def relative_error(x: jax.Array, want: jax.Array) -> float:
  """Returns the norm of the difference, relative to that of `want`.

  Gradients of a softmax over one key are 0, hence a least norm.
  """
  x, want = (np.asarray(t, np.float64) for t in (x, want))
  return float(np.linalg.norm(x - want) / max(np.linalg.norm(want), 0.01))


def _shapes(case):
  return (case.batch, case.length, case.heads, case.dim), (
      case.batch,
      case.kv_heads,
      case.length,
      case.dim,
  )
