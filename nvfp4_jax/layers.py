"""The layers of a decoder, as functions whose bits do not depend on shapes.

Learner (teacher-forced, all positions at once) and sampler (prompt, then token
by token against a cache) call these same functions, and on CPU a token's
log-prob comes out bit for bit the same in both. That holds because

* every dot has at least two rows, and its contraction axis last;
* sums over lengths that differ (keys, vocabulary, features) are trees of
  power-of-two halves, unchanged by padding with zeros;
* every inexact product that feeds a sum is rounded first (`exact.fence`, or to
  bfloat16), so that no compiler can contract it away;
* no arithmetic is done in bfloat16: it is done in float32 and rounded once.

A layer's parameters come as `LayerWeights`; names are Hugging Face's.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import layout
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import exact
from nvfp4_jax import matmul
from nvfp4_jax import qtensor
from nvfp4_jax import quantization


class LayerWeights(NamedTuple):
  """What one layer needs to compute its linears.

  Attributes:
    params: arrays by name; float32 masters in the learner, bfloat16 arrays and
      QTensors in the sampler.
    quantized: QTensors by name for the masters that run quantized.
    precisions: MatmulPrecision by name, or None for bfloat16.
  """

  params: Mapping[str, Any]
  quantized: Mapping[str, qtensor.QTensor]
  precisions: Mapping[str, matmul.MatmulPrecision | None]


def linear(
    x: jax.Array,
    weights: LayerWeights,
    name: str,
    *,
    group_sizes: jax.Array | None = None,
    xq: qtensor.QTensor | None = None,
) -> jax.Array:
  """Returns `x @ w.T` with the precision that the policy gives to `name`.

  Args:
    x: `[..., K]` bfloat16; `[M, K]` rows sorted by expert with `group_sizes`.
    weights: the layer.
    name: which weight, `[N, K]` or `[E, N, K]`.
    group_sizes: `[E]` int32 for a grouped matmul.
    xq: `quantize_input` of `x`, where several linears share it.

  Returns:
    `[..., N]` bfloat16.
  """
  w, precision = weights.params[name], weights.precisions[name]
  if precision is None:
    return matmul.bfloat16_matmul(x, w, group_sizes)
  if isinstance(w, qtensor.QTensor):
    w, wq = None, w
  else:
    wq = weights.quantized[name]
  if group_sizes is None:
    return matmul.quantized_matmul(x, w, precision, xq=xq, wq=wq)
  return matmul.quantized_grouped_matmul(
      x, w, group_sizes, precision, xq=xq, wq=wq
  )


def quantize_input(
    x: jax.Array, weights: LayerWeights, names: tuple[str, ...]
) -> qtensor.QTensor | None:
  """Returns Q(x) if all these linears quantize `x` `[M, K]` alike, or None."""
  precisions = [weights.precisions[name] for name in names]
  specs = {None if p is None else p.fprop_lhs for p in precisions}
  spec = specs.pop()
  if specs or spec is None:
    return None
  return quantization.quantize(lax.stop_gradient(x), spec)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
  """Returns `x / sqrt(mean(x**2) + eps) * gain`, rounded after each product.

  Args:
    x: `[..., D]` bfloat16.
    gain: `[D]`.
    eps: added to the mean square.

  Returns:
    `[..., D]` bfloat16.
  """
  x = x.astype(jnp.float32)
  mean_square = exact.fence(exact.tree_sum(x * x) * (1 / x.shape[-1]))
  inverse = exact.rsqrt(mean_square + eps)
  normal = exact.round_to_bfloat16(x * inverse[..., None])
  return exact.to_bfloat16(normal * _bfloat16_values(gain))


def rope_table(
    length: int, head_dim: int, theta: float
) -> tuple[np.ndarray, np.ndarray]:
  """Returns float32 cosines and sines `[length, head_dim / 2]`."""
  frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  angles = np.arange(length)[:, None] * frequencies
  return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope(
    x: jax.Array, cos: jax.Array, sin: jax.Array, scale: float = 1.0
) -> jax.Array:
  """Rotates the two halves of each head by its position, then scales.

  Cosines and sines are rounded to bfloat16, which makes the products exact.

  Args:
    x: `[B, T, H, D]` bfloat16.
    cos: `[B, T, D/2]` float32.
    sin: `[B, T, D/2]` float32.
    scale: applied in float32, before the one rounding.

  Returns:
    `[B, T, H, D]` bfloat16.
  """
  cos, sin = (exact.round_to_bfloat16(t)[:, :, None] for t in (cos, sin))
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return exact.to_bfloat16(rotated * scale)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    block: int,
) -> jax.Array:
  """Returns causal grouped-query attention.

  Softmax weights are rounded to bfloat16 before they are summed and used. The
  sum over keys is a dot for each block of keys, and a tree over blocks.

  Args:
    q: `[B, T, H, D]` bfloat16, already scaled by 1 / sqrt(D).
    k: `[B, H_kv, S, D]` bfloat16.
    v: `[B, H_kv, S, D]` bfloat16.
    positions: `[B, T]` int32; a query sees the keys up to its position.
    block: number of keys in a block.

  Returns:
    `[B, T, H * D]` bfloat16.
  """
  batch, length, heads, dim = q.shape
  kv_heads = k.shape[1]
  pad = -k.shape[2] % block
  if pad:
    k, v = (jnp.pad(t, ((0, 0), (0, 0), (0, pad), (0, 0))) for t in (k, v))
  keys = k.shape[2]
  q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
  q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)

  scores = _batched_dot(q, k).reshape(batch, kv_heads, -1, length, keys)
  live = jnp.arange(keys) <= positions[:, None, None, :, None]
  scores = jnp.where(live, scores, -jnp.inf)
  largest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = exact.to_bfloat16(exact.exp(scores - largest))
  total = exact.tree_sum(weights.astype(jnp.float32))

  rows = weights.shape[2] * length
  weights = weights.reshape(batch, kv_heads, rows, -1, block)
  values = v.reshape(batch, kv_heads, -1, block, dim)
  parts = _batched_dot(
      weights.transpose(0, 1, 3, 2, 4), values.transpose(0, 1, 2, 4, 3)
  )
  summed = exact.tree_sum(jnp.moveaxis(parts, 2, -1))
  inverse = exact.fence(1.0 / total).reshape(batch, kv_heads, rows, 1)
  out = exact.to_bfloat16(summed * inverse)
  out = out.reshape(batch, kv_heads, -1, length, dim)
  return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * dim)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """Returns `silu(gate) * up` in bfloat16, silu rounded first."""
  gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  silu = gate / (1.0 + exact.exp(jnp.minimum(-gate, 80.0)))
  return exact.to_bfloat16(exact.round_to_bfloat16(silu) * up)


def mlp(
    x: jax.Array,
    weights: LayerWeights,
    prefix: str,
    *,
    group_sizes: jax.Array | None = None,
    xq: qtensor.QTensor | None = None,
) -> jax.Array:
  """Returns `down(swiglu(gate(x), up(x)))`, `[M, D]` bfloat16.

  Args:
    x: `[M, D]` bfloat16.
    weights: the layer.
    prefix: of the names of gate_proj, up_proj and down_proj.
    group_sizes: `[E]` int32 where the weights are experts.
    xq: Q(x); by default it is computed here, once for gate and up.
  """
  gate, up, down = (f'{prefix}.{n}_proj' for n in ('gate', 'up', 'down'))
  if xq is None:
    xq = quantize_input(x, weights, (gate, up))
  project = functools.partial(linear, weights=weights, group_sizes=group_sizes)
  hidden = swiglu(project(x, name=gate, xq=xq), project(x, name=up, xq=xq))
  return project(hidden, name=down)


def moe(
    x: jax.Array, weights: LayerWeights, experts_per_token: int
) -> jax.Array:
  """Returns the mixture of the experts that each token is routed to.

  The router runs in bfloat16 with float32 logits; the weights of a token's
  experts are a softmax over those alone. Rows are sorted by expert, so that
  the work grows with tokens times experts per token. Tokens are quantized
  before they are sorted.

  Args:
    x: `[M, D]` bfloat16.
    weights: the layer.
    experts_per_token: k.

  Returns:
    `[M, D]` float32, a sum of exact products of bfloat16 numbers, unrounded.
  """
  tokens, k = x.shape[0], experts_per_token
  router = weights.params['mlp.gate']
  logits = matmul.bfloat16_matmul(x.astype(jnp.float32), router)
  _, experts = lax.top_k(lax.stop_gradient(logits), k)
  one_hot = jax.nn.one_hot(experts, logits.shape[-1], dtype=jnp.float32)
  chosen = jnp.sum(one_hot * logits[:, None, :], axis=-1)
  gates = _softmax_weights(chosen)

  order = jnp.argsort(experts.reshape(-1), stable=True)
  inverse = jnp.argsort(order)
  group_sizes = jnp.sum(one_hot, axis=(0, 1)).astype(jnp.int32)
  copies = jnp.broadcast_to(x[:, None], (tokens, k, x.shape[-1]))
  rows = _permute(copies.reshape(tokens * k, -1), order, inverse)
  names = ('mlp.experts.gate_proj', 'mlp.experts.up_proj')
  xq = quantize_input(x, weights, names)
  if xq is not None:
    xq = _take_rows(xq, order // k)
  y = mlp(rows, weights, 'mlp.experts', group_sizes=group_sizes, xq=xq)
  y = _permute(y, inverse, order).reshape(tokens, k, -1).astype(jnp.float32)
  total = y[:, 0] * gates[:, :1]
  for i in range(1, k):
    total = total + y[:, i] * gates[:, i : i + 1]
  return total


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, temperature: jax.typing.ArrayLike
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-prob of `tokens` and the entropy of their distribution.

  The distribution is softmax(logits / temperature), over the whole vocabulary.

  Args:
    logits: `[..., V]` float32.
    tokens: `[...]` int32.
    temperature: positive scalar.

  Returns:
    Log-probs and entropies, `[...]` float32, in nats.
  """
  inverse = exact.divide(1.0, temperature)
  logits = jnp.where(inverse == 1, logits, exact.fence(logits * inverse))
  largest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  shifted = logits - largest
  weights = exact.exp(shifted)
  total = exact.tree_sum(weights)
  log_total = exact.log(total)
  one_hot = tokens[..., None] == jnp.arange(logits.shape[-1])
  chosen = jnp.sum(jnp.where(one_hot, shifted, 0.0), axis=-1)
  mean_shifted = jnp.sum(weights * shifted, axis=-1) / total
  return chosen - log_total, log_total - mean_shifted


def add(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns the residual sum of two arrays, added in float32, in bfloat16."""
  return exact.to_bfloat16(x.astype(jnp.float32) + y.astype(jnp.float32))


def embed(tokens: jax.Array, table: jax.Array) -> jax.Array:
  """Returns the bfloat16 rows `[..., D]` of a `[V, D]` table."""
  return _bfloat16_values(table[tokens]).astype(jnp.bfloat16)


def _softmax_weights(logits):
  """Returns softmax over the last, short axis, rounded to bfloat16 values."""
  largest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  weights = exact.exp(logits - largest)
  inverse = exact.fence(1.0 / exact.tree_sum(weights))[..., None]
  return exact.round_to_bfloat16(weights * inverse)


def _bfloat16_values(param):
  param = param.astype(jnp.float32)
  return exact.round_to_bfloat16(param)


def _batched_dot(x, w):
  """Returns `x @ w.T`, float32 `[..., M, N]`; operands laid out as written.

  Without the layout constraint XLA may store an operand transposed, depending
  on its length, and so change the order of the sums.
  """
  rows = x.shape[-2]
  if rows == 1:  # see kernels.reference on one row
    x = jnp.concatenate([x, jnp.zeros_like(x)], axis=-2)
  batch = tuple(range(x.ndim - 2))
  last = (x.ndim - 1,)
  y = lax.dot_general(
      _row_major(x),
      _row_major(w),
      ((last, last), (batch, batch)),
      preferred_element_type=jnp.float32,
  )
  return y[..., :rows, :]


def _row_major(x):
  order = layout.Layout(major_to_minor=tuple(range(x.ndim)))
  return layout.with_layout_constraint(x, order)


def _take_rows(xq, rows):
  global_scale = xq.global_scale
  if global_scale is not None and global_scale.shape[0] > 1:
    global_scale = _rows(global_scale, rows)
  return dataclasses.replace(
      xq,
      data=_rows(xq.data, rows),
      block_scale=_rows(xq.block_scale, rows),
      global_scale=global_scale,
  )


@jax.custom_vjp
def _permute(x, order, inverse):
  """Returns `x[order]`; its transpose is a gather too, not a scatter."""
  del inverse
  return _rows(x, order)


def _permute_fwd(x, order, inverse):
  return _rows(x, order), inverse


def _permute_bwd(inverse, dy):
  return _rows(dy, inverse), None, None


_permute.defvjp(_permute_fwd, _permute_bwd)


def _rows(x, indices):
  """Returns `x[indices]`, without code for indices out of bounds."""
  return x.at[indices].get(mode='promise_in_bounds')
