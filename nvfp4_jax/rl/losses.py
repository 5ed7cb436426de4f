"""Policy losses and penalties, token by token, and their aggregation.

The ratio of this module is r = exp(new - old), of the policy that is trained to
the learner's own recomputation at the sampling weights. The mismatch ratio of
learner to sampler is the business of `corrections`, and comes in as `weights`.

As in `ratios`, masked positions may hold anything, and change neither a value
nor a gradient; what is not finite where the mask is True is seen.
"""

import dataclasses
from typing import get_args, Literal, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax.rl import ratios

_MAX_SEQUENCE_LOG_RATIO = 10.0  # of GSPO, as in verl

type Kind = Literal['ppo', 'gspo', 'cispo', 'tbpo']
type Aggregation = Literal[
    'token_mean',
    'seq_mean_token_mean',
    'seq_mean_token_sum',
    'seq_mean_token_sum_norm',
]
_CHOICES = {
    'kind': get_args(Kind.__value__),
    'aggregation': get_args(Aggregation.__value__),
    'kl': ratios.KLS,
    'kl_gradient': ratios.KL_GRADIENTS,
}
# Default clip_eps and clip_eps_high: DAPO's; GSPO's; TRL's epsilon_max of 5.
_CLIP = {
    'ppo': {'clip_eps': 0.2, 'clip_eps_high': 0.28},
    'gspo': {'clip_eps': 3e-4, 'clip_eps_high': 4e-4},
    'cispo': {'clip_eps_high': 4.0},
    'tbpo': {'clip_eps': 3e-4, 'clip_eps_high': 4e-4},
}
_LEAST = {'dual_clip': 1, 'norm_length': 1, 'kl_coef': 0, 'entropy_coef': 0}
_LEAST |= {'clip_eps': 0, 'clip_eps_high': 0}


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Which loss, summed how, with which penalties; static.

  Attributes:
    kind: 'ppo', 'gspo', 'cispo' or 'tbpo'; see `surrogate`.
    clip_eps: how far the ratio may fall below 1; None: .2 for ppo, 3e-4 for
      gspo and tbpo, and cispo has none.
    clip_eps_high: how far the ratio may rise above 1; None: .28 for ppo, 4e-4
      for gspo and tbpo, 4 for cispo.
    dual_clip: largest ratio that a negative advantage is multiplied by, above
      1. None: off for ppo, 1 + clip_eps_high for tbpo; the others have none.
    aggregation: see `aggregate`.
    norm_length: tokens, for 'seq_mean_token_sum_norm' only, which needs it.
    kl_coef: weight of the KL penalty to the reference.
    kl: its estimator, see `ratios.kl_penalty`; unused if kl_coef is 0.
    kl_gradient: its gradient, likewise.
    entropy_coef: weight of the entropy bonus.

  Raises:
    ValueError: an unknown choice, a value out of range, or one not used.
  """

  kind: Kind = 'ppo'
  clip_eps: float | None = None
  clip_eps_high: float | None = None
  dual_clip: float | None = None
  aggregation: Aggregation = 'token_mean'
  norm_length: int | None = None
  kl_coef: float = 0.0
  kl: ratios.Kl = 'k3'
  kl_gradient: ratios.KlGradient = 'value'
  entropy_coef: float = 0.0

  def __post_init__(self):
    for name, choices in _CHOICES.items():
      if (value := getattr(self, name)) not in choices:
        raise ValueError(f'{name} {value!r} is not one of {choices}.')
    used_by = f'kind {self.kind} with kl_coef {self.kl_coef}'
    for name in self._unused():
      if (value := getattr(self, name)) != _DEFAULTS[name]:
        raise ValueError(f'{name} {value!r} is not used by {used_by}.')
    for name, least in _LEAST.items():
      value = getattr(self, name)
      if value is not None and not value >= least:
        raise ValueError(f'{name} {value} is below {least}.')
    _check_norm_length(self.aggregation, self.norm_length)

  @property
  def bounds(self) -> tuple[float | None, float, float | None]:
    """clip_eps, clip_eps_high and dual_clip, with the defaults of the kind."""
    default = _CLIP[self.kind]
    low, high = self.clip_eps, self.clip_eps_high
    low = default.get('clip_eps') if low is None else low
    high = default['clip_eps_high'] if high is None else high
    dual = self.dual_clip
    if dual is None and self.kind == 'tbpo':
      dual = 1.0 + high
    return low, high, dual

  def _unused(self):
    names = {'gspo': ['dual_clip'], 'cispo': ['clip_eps', 'dual_clip']}
    kl = [] if self.kl_coef else ['kl', 'kl_gradient']
    return names.get(self.kind, []) + kl


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(LossConfig)}


class Surrogate(NamedTuple):
  """Per-token loss, and where the ratio was clipped.

  Attributes:
    loss: `[B, T]` float32, to be minimized.
    clipped: `[B, T]` bool, tokens whose gradient a clip removed; for cispo,
      whose weight it lowered. Any of the next three.
    clipped_low: `[B, T]` bool, by the lower bound: A < 0.
    clipped_high: `[B, T]` bool, by the upper bound: A > 0, either for cispo.
    clipped_dual: `[B, T]` bool, by the dual clip: A < 0.
    ratio_clamped: int32, trained tokens whose exponent was held.
  """

  loss: jax.Array
  clipped: jax.Array
  clipped_low: jax.Array
  clipped_high: jax.Array
  clipped_dual: jax.Array
  ratio_clamped: jax.Array


def clipped_surrogate(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_eps: float,
    clip_eps_high: float,
) -> Surrogate:
  """Returns PPO's clipped loss with a separate upper bound (clip-higher).

  loss = -min(r A, clip(r, 1 - clip_eps, 1 + clip_eps_high) A) with
  r = exp(logprobs - old_logprobs), the exponent held within +-20; `surrogate`
  with advantages `[B, T]`. Masked tokens give loss 0 and gradient exactly 0.

  Reference: DAPO, https://arxiv.org/abs/2503.14476, equation 10.
  """
  chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask])
  config = LossConfig(clip_eps=clip_eps, clip_eps_high=clip_eps_high)
  return surrogate(config, logprobs, old_logprobs, advantages, mask)


def surrogate(
    config: LossConfig,
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
) -> Surrogate:
  """Returns the loss of each token.

  With r = exp(new - old), the exponent held within +-20:
    ppo: -min(r A, clip(r, 1 - clip_eps, 1 + clip_eps_high) A); with a
      dual_clip c, min(that, -c A) where A < 0.
    gspo: the same with the sequence's s = exp(mean over its trained tokens of
      new - old), the exponent held within +-10, for each of them. Token t
      carries the gradient of its own log-prob times s (the mean is constant),
      so that the mean over a sequence has the gradient of s A:
      'seq_mean_token_mean' is the published aggregation.
    cispo: -stop_gradient(min(r, 1 + clip_eps_high)) A new. It has no lower
      bound, and no token loses its gradient.
    tbpo: gspo with the dual clip, so that a negative advantage meets a ratio
      within the band [1 - clip_eps, dual_clip] and has no gradient outside.

  Args:
    config: the loss.
    logprobs: `[B, T]` float32, differentiated.
    old_logprobs: `[B, T]` float32, the learner's own at the sampling weights.
    advantages: `[B]` or `[B, T]` float32.
    mask: `[B, T]` bool, the trained tokens.

  Returns:
    The losses; 0 with gradient exactly 0 where masked.

  Reference: PPO with DAPO's two bounds, https://arxiv.org/abs/2503.14476,
    equation 10; dual clip, https://arxiv.org/abs/1912.09729; GSPO,
    https://arxiv.org/abs/2507.18071, with the token form and the hold of verl's
    core_algos.py (which holds from above only); CISPO,
    https://arxiv.org/abs/2506.13585, and TRL's epsilon_max; TBPO, of QaRL,
    https://arxiv.org/abs/2604.07853, of which only the abstract was at hand: "a
    sequence-level objective with dual clipping for negative samples". The
    formula and the default bounds of tbpo are inferred.
  """
  chex.assert_equal_shape([logprobs, old_logprobs, mask])
  if advantages.ndim == 1:
    advantages = jnp.broadcast_to(advantages[:, None], mask.shape)
  chex.assert_equal_shape([advantages, mask])
  advantages = jnp.where(mask, advantages, 0.0)
  logprobs = jnp.where(mask, logprobs, 0.0)
  log_ratio = logprobs - jnp.where(mask, old_logprobs, 0.0)
  if config.kind == 'cispo':
    return _cispo(config, log_ratio, logprobs, advantages, mask)
  if config.kind == 'ppo':
    log_ratio, held = ratios.hold_exponent(log_ratio, mask)
  else:
    log_ratio, held = _sequence_log_ratio(log_ratio, logprobs, mask)
  return _clip(log_ratio, advantages, mask, *config.bounds, held)


def token_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean over all masked-in tokens of the batch; 0 if none."""
  return aggregate(values, mask, 'token_mean')


def denominators(mask: jax.Array, aggregation: Aggregation) -> jax.Array:
  """Returns what `aggregate` divides by: an int32 count of this mask.

  Trained tokens for 'token_mean', sequences with a trained token for the
  others. `mask` is `[B, T]` bool, before corrections drop some: count the whole
  batch and give that to each of its parts. A ValueError for an unknown name.
  """
  if aggregation not in (choices := _CHOICES['aggregation']):
    raise ValueError(f'aggregation {aggregation!r} is not one of {choices}.')
  counted = mask if aggregation == 'token_mean' else jnp.any(mask, axis=-1)
  return jnp.sum(counted, dtype=jnp.int32)


def aggregate(
    values: jax.Array,
    mask: jax.Array,
    aggregation: Aggregation,
    *,
    norm_length: int | None = None,
    denominator: jax.Array | None = None,
) -> jax.Array:
  """Returns one number for the values of all trained tokens; 0 if none.

  With N trained tokens, S sequences that have one, n of them in sequence i:
    token_mean: sum / N, as in DAPO. Long sequences weigh more.
    seq_mean_token_mean: sum over i of (sum / n) / S: GRPO, GSPO.
    seq_mean_token_sum: sum / S.
    seq_mean_token_sum_norm: sum / (S norm_length), as in Dr. GRPO.

  Rows of a batch may be split over calls that are given the batch's
  denominator; their results add up to that of one call. A correction that
  drops tokens belongs into the values, as zeros, not into the mask.

  Args:
    values: `[B, T]` float32; anything where masked.
    mask: `[B, T]` bool, the trained tokens.
    aggregation: one of the four.
    norm_length: a constant number of tokens, for the last of them only.
    denominator: `denominators` of the whole batch; of this mask, if None.

  Returns:
    float32 scalar.

  Raises:
    ValueError: unknown aggregation; norm_length missing or not used.

  Reference: agg_loss of verl's core_algos.py; DAPO, arXiv 2503.14476; Dr. GRPO,
    arXiv 2503.20783.
  """
  chex.assert_equal_shape([values, mask])
  counted = denominators(mask, aggregation)
  _check_norm_length(aggregation, norm_length)
  denominator = counted if denominator is None else denominator
  values = jnp.where(mask, values, 0.0)
  if aggregation == 'seq_mean_token_mean':
    values /= jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
  mean = jnp.sum(values) / jnp.maximum(denominator, 1)
  return mean if norm_length is None else mean / norm_length


def policy_loss(
    config: LossConfig,
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    weights: jax.Array | None = None,
    ref_logprobs: jax.Array | None = None,
    entropies: jax.Array | None = None,
    denominator: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns weighted surrogate + kl_coef KL - entropy_coef entropy, and parts.

  Args:
    config: the loss.
    logprobs: `[B, T]` float32; this and the next two as for `surrogate`.
    old_logprobs: `[B, T]` float32.
    advantages: `[B]` or `[B, T]` float32.
    mask: `[B, T]` bool, before corrections drop some tokens.
    weights: `[B, T]` float32, of the mismatch ratio, from `corrections.correct`
      and the like; they multiply the surrogate only. 1, if None.
    ref_logprobs: `[B, T]` float32, for the KL.
    entropies: `[B, T]` float32 of the policy at each token, differentiated.
    denominator: `denominators` of the whole batch; of this mask, if None.

  Returns:
    The loss, and scalars without gradient: `pg_loss`, `kl_loss` and `entropy`,
    aggregated as the loss is; `ppo_kl`, mean of old - new, and `pg_clipfrac`
    with its parts `_low`, `_high`, `_dual`, means over the trained tokens of
    this call; the int32 counts `ratio_clamped` and `kl_ratio_clamped`.

  Raises:
    ValueError: a penalty lacks its input.
  """
  if config.kl_coef and ref_logprobs is None:
    raise ValueError(f'kl_coef {config.kl_coef} needs ref_logprobs.')
  if config.entropy_coef and entropies is None:
    raise ValueError(f'entropy_coef {config.entropy_coef} needs entropies.')
  total = lambda values: aggregate(
      values,
      mask,
      config.aggregation,
      norm_length=config.norm_length,
      denominator=denominator,
  )
  parts = surrogate(config, logprobs, old_logprobs, advantages, mask)
  scale = 1.0 if weights is None else jnp.where(mask, weights, 0.0)
  loss = total(scale * parts.loss)
  gap = ratios.hold_exponent(old_logprobs - logprobs, mask)[0]
  metrics = {
      'pg_loss': loss,
      'ppo_kl': token_mean(gap, mask),
      'ratio_clamped': parts.ratio_clamped,
  }
  for name in ('', '_low', '_high', '_dual'):
    flags = getattr(parts, f'clipped{name}').astype(jnp.float32)
    metrics[f'pg_clipfrac{name}'] = token_mean(flags, mask)
  if ref_logprobs is not None:
    penalty = ratios.kl_penalty(
        logprobs,
        ref_logprobs,
        mask,
        kl=config.kl,
        gradient=config.kl_gradient,
        old_logprobs=old_logprobs,
    )
    metrics['kl_loss'] = total(penalty.values)
    metrics['kl_ratio_clamped'] = penalty.ratio_clamped
    if config.kl_coef:
      loss += config.kl_coef * metrics['kl_loss']
  if entropies is not None:
    metrics['entropy'] = total(entropies)
    if config.entropy_coef:
      loss -= config.entropy_coef * metrics['entropy']
  return loss, lax.stop_gradient(metrics)


def _check_norm_length(aggregation, norm_length):
  if (norm_length is None) == (aggregation == 'seq_mean_token_sum_norm'):
    rule = 'needs a' if norm_length is None else 'does not use'
    raise ValueError(f'{aggregation} {rule} norm_length, {norm_length}.')


def _clip(log_ratio, advantages, mask, low, high, dual, held):
  ratio = jnp.exp(log_ratio)
  bounded = jnp.clip(ratio, 1.0 - low, 1.0 + high)
  free, bound = ratio * advantages, bounded * advantages
  loss = -jnp.minimum(free, bound)
  clipped = mask & (bound < free)
  clipped_dual = jnp.zeros_like(mask)
  if dual is not None:
    negative = advantages < 0
    clipped_dual = mask & negative & (ratio > dual)
    loss = jnp.where(negative, jnp.minimum(loss, -dual * advantages), loss)
  return Surrogate(
      loss=loss,
      clipped=clipped | clipped_dual,
      clipped_low=clipped & (advantages < 0),
      clipped_high=clipped & (advantages > 0),
      clipped_dual=clipped_dual,
      ratio_clamped=held,
  )


def _sequence_log_ratio(log_ratio, logprobs, mask):
  """Returns each row's mean of the log-ratio, differentiated token by token."""
  count = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
  mean = lax.stop_gradient(jnp.sum(log_ratio, axis=1, keepdims=True) / count)
  finite = jnp.where(jnp.isfinite(logprobs), logprobs, 0.0)
  own = finite - lax.stop_gradient(finite)
  return ratios.hold_exponent(mean + own, mask, _MAX_SEQUENCE_LOG_RATIO)


def _cispo(config, log_ratio, logprobs, advantages, mask):
  log_ratio, held = ratios.hold_exponent(lax.stop_gradient(log_ratio), mask)
  ratio, highest = jnp.exp(log_ratio), 1.0 + config.bounds[1]
  clipped, none = mask & (ratio > highest), jnp.zeros_like(mask)
  return Surrogate(
      loss=-jnp.minimum(ratio, highest) * advantages * logprobs,
      clipped=clipped,
      clipped_low=none,
      clipped_high=clipped,
      clipped_dual=none,
      ratio_clamped=held,
  )
