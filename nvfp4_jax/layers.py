"""The layers of a decoder, as functions whose bits do not depend on shapes.

Learner (teacher-forced, all positions at once) and sampler (prompt, then token
by token against a cache) call these same functions, and on CPU a token's
log-prob comes out bit for bit the same in both. That holds because

* every dot has `exact.padded_rows`, and its contraction axis last;
* sums over lengths that differ (keys, vocabulary, features) are trees of
  power-of-two halves, unchanged by padding with zeros;
* every inexact product that feeds a sum is rounded first (`exact.fence`, or to
  bfloat16), so that no compiler can contract it away;
* no arithmetic is done in bfloat16: it is done in float32 and rounded once.

Activations are bfloat16, or float32 throughout, in which case nothing of this
is rounded: functions follow the dtype of their input.

A layer's parameters come as `LayerWeights`; names are Hugging Face's.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any, NamedTuple
import zlib

import jax
from jax import lax
from jax.experimental import layout
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import exact
from nvfp4_jax import kernels
from nvfp4_jax import matmul
from nvfp4_jax import qtensor
from nvfp4_jax import routing


class LayerWeights(NamedTuple):
  """What one layer needs to compute its linears.

  Attributes:
    params: arrays by name; float32 masters in the learner, bfloat16 arrays and
      QTensors in the sampler, or qtensor.Layers where kernels read them.
    quantized: QTensors by name for the masters that run quantized.
    precisions: MatmulPrecision by name, or None for bfloat16.
    key: of gradients that are rounded stochastically; None where none are.
    taps: where `note` puts what is computed on the way; None for nowhere.
  """

  params: Mapping[str, Any]
  quantized: Mapping[str, qtensor.QTensor]
  precisions: Mapping[str, matmul.MatmulPrecision | None]
  key: jax.Array | None = None
  taps: dict[str, jax.Array] | None = None

  def note(self, stage: str, x: jax.Array) -> jax.Array:
    """Returns `x`, which becomes the tap of a stage; rows in token order."""
    if self.taps is not None:
      self.taps[stage] = x
    return x


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
    x: `[..., K]`; `[M, K]` rows sorted by expert with `group_sizes`.
    weights: the layer.
    name: which weight, `[N, K]` or `[E, N, K]`.
    group_sizes: `[E]` int32 for a grouped matmul.
    xq: `quantize_input` of `x`, where several linears share it.

  Returns:
    `[..., N]` in the dtype of `x`, the bias added if the layer has one. It is
    noted under `name`, but for rows that are sorted by expert.
  """
  y = _product(x, weights, name, group_sizes, xq)
  return y if group_sizes is not None else _add_bias(y, weights, name)


def linears(
    x: jax.Array,
    weights: LayerWeights,
    names: tuple[str, ...],
    *,
    xq: qtensor.QTensor | None = None,
) -> tuple[jax.Array, ...]:
  """Returns `linear` of several weights; in one launch where kernels can.

  Args:
    x: `[..., K]`.
    weights: the layer.
    names: which weights, `[N, K]`.
    xq: `quantize_input` of `x` for these names.
  """
  ws = [weights.params[name] for name in names]
  precisions = [weights.precisions[name] for name in names]
  is_plain = all(
      p is None or not p.residual and (xq is not None or p.lhs is None)
      for p in precisions
  )
  if not is_plain or not all(isinstance(w, qtensor.Layer) for w in ws):
    return tuple(linear(x, weights, name, xq=xq) for name in names)
  rows = x.reshape(-1, x.shape[-1])
  ys = kernels.matmuls(rows if xq is None else xq, ws, dtype=x.dtype)
  ys = (y.reshape(*x.shape[:-1], -1) for y in ys)
  return tuple(
      _add_bias(y, weights, name) for y, name in zip(ys, names, strict=True)
  )


def _add_bias(y, weights, name):
  bias = weights.params.get(f'{name}.bias')
  y = y if bias is None else add(y, _as(bias, y.dtype))
  return weights.note(name, y)


def _product(x, weights, name, group_sizes, xq):
  w, precision = weights.params[name], weights.precisions[name]
  if precision is None and isinstance(w, qtensor.Layer):
    y = kernels.matmul(x.reshape(-1, x.shape[-1]), w, dtype=x.dtype)
    return y.reshape(*x.shape[:-1], -1)
  if precision is None:
    return matmul.unquantized_matmul(x, w, group_sizes, dtype=x.dtype)
  if isinstance(w, (qtensor.QTensor, qtensor.Layer)):
    w, wq, key = None, w, None
  else:
    wq = weights.quantized[name]
    key = _gradient_key(weights, name, precision)
  if group_sizes is None:
    return matmul.quantized_matmul(x, w, precision, xq=xq, wq=wq, key=key)
  return matmul.quantized_grouped_matmul(
      x, w, group_sizes, precision, xq=xq, wq=wq, key=key
  )


def _gradient_key(weights, name, precision):
  if precision.grad is None or precision.grad.rounding == 'nearest':
    return None
  if weights.key is None:
    raise ValueError(
        f'{name}: its gradients are rounded stochastically, but the quantizer'
        ' has no key.'
    )
  return jax.random.fold_in(weights.key, zlib.crc32(name.encode()))


def quantize_input(
    x: jax.Array, weights: LayerWeights, names: tuple[str, ...]
) -> qtensor.QTensor | None:
  """Returns Q(x) if all these linears quantize `x` `[M, K]` alike, or None."""
  precisions = [weights.precisions[name] for name in names]
  specs = {None if p is None else p.fprop_lhs for p in precisions}
  spec = specs.pop()
  if specs or spec is None:
    return None
  return kernels.quantize(lax.stop_gradient(x), spec)


@functools.partial(jax.checkpoint, static_argnums=2)
def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
  """Returns `x / sqrt(mean(x**2) + eps) * gain`, rounded after each product.

  Its gradient keeps the arguments alone, and computes the rest again.

  Args:
    x: `[..., D]`.
    gain: `[D]`.
    eps: added to the mean square.

  Returns:
    `[..., D]` in the dtype of `x`.
  """
  dtype, x = x.dtype, x.astype(jnp.float32)
  mean_square = exact.fence(exact.tree_sum(x * x) * (1 / x.shape[-1]))
  inverse = exact.rsqrt(mean_square + eps)
  normal = _round(x * inverse[..., None], dtype)
  return _as(normal * _round(gain.astype(jnp.float32), dtype), dtype)


def add_rms_norm(
    x: jax.Array,
    gain: jax.Array | qtensor.Layer,
    eps: float,
    y: jax.Array | None = None,
    *,
    has_gradient: bool = True,
) -> tuple[jax.Array, jax.Array]:
  """Returns `add(x, y)` and its `rms_norm`.

  Args:
    x: `[..., D]`.
    gain: `[D]`, or that of a stack.
    eps: added to the mean square.
    y: `[..., D]`, or None for nothing.
    has_gradient: if not, one kernel does both, where there is one.
  """
  rows = x.reshape(-1, x.shape[-1])
  if not has_gradient and kernels.decoding.normalizes_rows(rows):
    y = None if y is None else y.reshape(rows.shape)
    total, normed = kernels.decoding.rms_norm(rows, gain, eps, y)
    return total.reshape(x.shape), normed.reshape(x.shape)
  gain = gain.take() if isinstance(gain, qtensor.Layer) else gain
  total = x if y is None else add(x, y)
  return total, rms_norm(total, gain, eps)


def rope_table(
    length: int, frequencies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns float32 cosines and sines `[length, R/2]` for `[R/2]` angles."""
  angles = np.arange(length)[:, None] * frequencies
  return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope(
    x: jax.Array, cos: jax.Array, sin: jax.Array, scale: float = 1.0
) -> jax.Array:
  """Rotates the first R channels of each head by its position, then scales.

  Channel i is paired with channel i + R/2; those from R on stay as they are.
  Cosines and sines are rounded to the dtype of `x`: in bfloat16, products are
  exact.

  Args:
    x: `[B, T, H, D]`.
    cos: `[B, T, R/2]` float32.
    sin: `[B, T, R/2]` float32.
    scale: applied in float32, before the one rounding.

  Returns:
    `[B, T, H, D]` in the dtype of `x`.
  """
  dtype, half = x.dtype, cos.shape[-1]
  cos, sin = (_round(t, dtype)[:, :, None] for t in (cos, sin))
  first, second, rest = jnp.split(
      x.astype(jnp.float32), (half, 2 * half), axis=-1
  )
  rotated = jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
  )
  return _as(rotated * scale, dtype)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    block: int,
) -> jax.Array:
  """Returns causal grouped-query attention.

  Softmax weights are rounded to the dtype before they are summed and used. The
  sum over keys is a dot for each block of keys, and a tree over blocks.

  Args:
    q: `[B, T, H, D]`, already scaled by 1 / sqrt(D).
    k: `[B, H_kv, S, D]`.
    v: `[B, H_kv, S, D]`.
    positions: `[B, T]` int32; a query sees the keys up to its position.
    block: number of keys in a block.

  Returns:
    `[B, T, H * D]` in the dtype of `q`.
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
  # Without the barrier, XLA for GPUs weighs for minutes what of the scores it
  # could compute again in each branch of the tree.
  shifted = lax.optimization_barrier(scores - largest)
  weights = _as(exact.exp(shifted), q.dtype)
  total = exact.tree_sum(weights.astype(jnp.float32))

  rows = weights.shape[2] * length
  weights = weights.reshape(batch, kv_heads, rows, -1, block)
  values = v.reshape(batch, kv_heads, -1, block, dim)
  parts = _batched_dot(
      weights.transpose(0, 1, 3, 2, 4), values.transpose(0, 1, 2, 4, 3)
  )
  summed = exact.tree_sum(jnp.moveaxis(parts, 2, -1))
  inverse = exact.fence(1.0 / total).reshape(batch, kv_heads, rows, 1)
  out = _as(summed * inverse, q.dtype)
  out = out.reshape(batch, kv_heads, -1, length, dim)
  return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * dim)


@jax.checkpoint
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """Returns `silu(gate) * up` in their dtype, silu rounded first.

  Its gradient keeps the arguments alone, and computes the rest again.
  """
  dtype = gate.dtype
  gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  silu = gate / (1.0 + exact.exp(jnp.minimum(-gate, 80.0)))
  return _as(_round(silu, dtype) * up, dtype)


def mlp(
    x: jax.Array,
    weights: LayerWeights,
    prefix: str,
    *,
    group_sizes: jax.Array | None = None,
    xq: qtensor.QTensor | None = None,
) -> jax.Array:
  """Returns `down(swiglu(gate(x), up(x)))`, `[M, D]` in the dtype of `x`.

  Args:
    x: `[M, D]`.
    weights: the layer.
    prefix: of the names of gate_proj, up_proj and down_proj.
    group_sizes: `[E]` int32 where the weights are experts.
    xq: Q(x); by default it is computed here, once for gate and up.
  """
  gate, up, down = (f'{prefix}.{n}_proj' for n in ('gate', 'up', 'down'))
  if xq is None:
    xq = quantize_input(x, weights, (gate, up))
  project = functools.partial(linear, weights=weights, group_sizes=group_sizes)
  if group_sizes is None:
    hidden = _projected_swiglu(x, weights, gate, up, xq)
    hidden = weights.note(f'{prefix}.swiglu', hidden)
  else:
    hidden = swiglu(project(x, name=gate, xq=xq), project(x, name=up, xq=xq))
  return project(hidden, name=down)


def _projected_swiglu(x, weights, gate, up, xq):
  """Returns `swiglu` of two linears; one kernel does it where there is one."""
  ws = [weights.params[name] for name in (gate, up)]
  is_plain = weights.taps is None and not any(
      f'{name}.bias' in weights.params
      or weights.precisions[name] is not None
      or not isinstance(w, qtensor.Layer)
      for name, w in zip((gate, up), ws, strict=True)
  )
  if is_plain and kernels.decoding.projects_swiglu(x, *ws):
    return kernels.decoding.swiglu(x, *ws)
  return swiglu(*linears(x, weights, (gate, up), xq=xq))


def moe(
    x: jax.Array,
    weights: LayerWeights,
    experts_per_token: int,
    router: routing.Router = routing.SOFTMAX,
    experts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the mixture of the experts that each token is routed to.

  The router has float32 logits; the weights of a token's experts are rounded to
  the dtype of `x`. Rows are sorted by expert, so that the work grows with
  tokens times experts per token. Tokens are quantized before they are sorted.

  Args:
    x: `[M, D]`.
    weights: the layer.
    experts_per_token: k.
    router: how experts are chosen and weighted.
    experts: `[M, k]` int32, a choice that is replayed; None to choose.

  Returns:
    `[M, D]` float32, unrounded; for bfloat16 `x` a sum of exact products. And
    the experts `[M, k]` int32 of each token.
  """
  tokens, k = x.shape[0], experts_per_token
  w = weights.params['mlp.gate']
  logits = matmul.unquantized_matmul(x.astype(jnp.float32), w, dtype=x.dtype)
  logits = weights.note('mlp.gate', logits)
  bias = weights.params.get('mlp.gate.e_score_correction_bias')
  experts, gates = routing.route(logits, bias, router, k, experts)
  experts = weights.note('mlp.gate.experts', experts)
  gates = weights.note('mlp.gate.weights', _round(gates, x.dtype))

  order = jnp.argsort(experts.reshape(-1), stable=True)
  inverse = jnp.argsort(order)
  one_hot = experts.reshape(-1, 1) == jnp.arange(w.shape[0])
  group_sizes = jnp.sum(one_hot, axis=0, dtype=jnp.int32)
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
  return total, experts


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
  """Returns the sum of two arrays, added in float32, in the dtype of `x`."""
  return _as(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


def embed(
    tokens: jax.Array, table: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Returns the rows `[..., D]` of a `[V, D]` table, rounded to `dtype`."""
  return _as(table[tokens], jnp.dtype(dtype))


def _round(x, dtype):
  """Returns float32 `x` rounded to values of `dtype`."""
  return exact.round_to_bfloat16(x) if dtype == jnp.bfloat16 else x


def _as(x, dtype):
  """Returns `x`, in `dtype`; a rounding that XLA cannot drop."""
  x = x.astype(jnp.float32)
  return exact.to_bfloat16(x) if dtype == jnp.bfloat16 else x


def _batched_dot(x, w):
  """Returns `x @ w.T`, float32 `[..., M, N]`; operands laid out as written.

  Without the layout constraint XLA may store an operand transposed, depending
  on its length, and so change the order of the sums.
  """
  rows = x.shape[-2]
  spare = exact.padded_rows(rows, x.dtype) - rows
  if spare:
    zeros = jnp.zeros((*x.shape[:-2], spare, x.shape[-1]), x.dtype)
    x = jnp.concatenate([x, zeros], axis=-2)
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
