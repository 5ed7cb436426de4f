"""Routers: which experts a token goes to, and with which weights."""

import dataclasses
import math
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax import exact

_LARGEST_EXPONENT = 80.0  # e**80 is finite in float32.
_SMALLEST_SUM = 1e-20


@dataclasses.dataclass(frozen=True)
class Router:
  """How experts are chosen and weighted; static.

  Attributes:
    kind: 'softmax' (Qwen3-MoE) or 'sigmoid' (GLM-4.5, DeepSeek-V3): scores of
      the experts. A sigmoid router has a correction bias, which counts for the
      choice of experts, but not for their weights.
    normalize: the weights of a token's experts add up to `scale`.
    scale: factor of all weights.
    groups: experts are divided into so many groups of neighbours; 1 for none.
    topk_groups: only this many groups are chosen from: those whose two best
      experts have the largest sum of scores.
  """

  kind: Literal['softmax', 'sigmoid'] = 'softmax'
  normalize: bool = True
  scale: float = 1.0
  groups: int = 1
  topk_groups: int = 1

  def __post_init__(self):
    if self.kind not in ('softmax', 'sigmoid'):
      raise ValueError(f"Router {self.kind!r} is not 'softmax' or 'sigmoid'.")
    if not 0 < self.scale < math.inf:
      raise ValueError(f'Router scale {self.scale} is not above 0.')
    if not 1 <= self.topk_groups <= self.groups:
      raise ValueError(
          f'topk_groups {self.topk_groups} is not between 1 and groups'
          f' {self.groups}.'
      )
    if self.kind == 'softmax' and self.groups > 1:
      raise ValueError(
          f"groups {self.groups}: only a 'sigmoid' router has groups."
      )


SOFTMAX = Router()


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    router: Router,
    k: int,
    experts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the experts of each token, and their weights.

  Gradients reach the logits through the weights only. A tie goes to the expert
  of the lower index.

  Args:
    logits: `[M, E]` float32.
    bias: `[E]` float32 correction bias of a 'sigmoid' router, else None.
    router: how to choose.
    k: experts per token.
    experts: `[M, k]` int32, a choice that was made before and is replayed; only
      the weights are computed.

  Returns:
    Experts `[M, k]` int32, best first, and weights `[M, k]` float32, not yet
    rounded.
  """
  if router.kind == 'softmax':
    if experts is None:
      experts = _best(logits, k)
    chosen = _at(logits, experts)
    over = chosen if router.normalize else logits
    largest = lax.stop_gradient(jnp.max(over, axis=-1, keepdims=True))
    weights = exact.exp(chosen - largest)
    total = weights if router.normalize else exact.exp(over - largest)
    weights = weights * exact.fence(1.0 / exact.tree_sum(total))[..., None]
  else:
    scores = _sigmoid(logits)
    if experts is None:
      preference = scores if bias is None else scores + bias
      experts = _best(_within_groups(preference, router), k)
    weights = _at(scores, experts)
    if router.normalize:
      weights = _normalize(weights)
  if router.scale != 1.0:
    weights = exact.fence(weights) * router.scale
  return experts, weights


@jax.custom_jvp
def _sigmoid(x):
  negative = exact.exp(jnp.minimum(-x, _LARGEST_EXPONENT))
  return exact.fence(1.0 / (1.0 + negative))


@_sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
  y = _sigmoid(*primals)
  return y, y * (1.0 - y) * tangents[0]


@jax.custom_jvp
def _normalize(x):
  return x * _inverse_of_sum(x)


@_normalize.defjvp
def _normalize_jvp(primals, tangents):
  # That of a quotient has the square of a sum that may be as small as 1e-20.
  (x,), (t,) = primals, tangents
  y = _normalize(x)
  return y, (t - y * jnp.sum(t, axis=-1, keepdims=True)) * _inverse_of_sum(x)


def _inverse_of_sum(x):
  total = exact.tree_sum(x) + _SMALLEST_SUM
  return exact.fence(1.0 / total)[..., None]


def _within_groups(preference, router):
  """Returns the preference, -infinity outside of a token's best groups."""
  if router.groups == 1:
    return preference
  tokens, experts = preference.shape
  grouped = preference.reshape(tokens, router.groups, -1)
  best_two, _ = lax.top_k(lax.stop_gradient(grouped), 2)
  groups = _best(best_two[..., 0] + best_two[..., 1], router.topk_groups)
  is_best = jnp.any(groups[..., None] == jnp.arange(router.groups), axis=1)
  kept = jnp.where(is_best[..., None], grouped, -jnp.inf)
  return kept.reshape(tokens, experts)


def _best(values, k):
  values = lax.stop_gradient(values)
  values = jnp.where(values == 0.0, 0.0, values)  # top_k ranks -0 below 0.
  return lax.top_k(values, k)[1]


def _at(values, experts):
  """Returns `values` `[M, E]` at `experts` `[M, k]`, with a dense transpose."""
  one_hot = jax.nn.one_hot(experts, values.shape[-1], dtype=jnp.float32)
  return jnp.sum(one_hot * values[:, None, :], axis=-1)
