"""Corrections for the gap between sampler and learner at equal weights.

The ratio of this module is the mismatch ratio w = exp(learner - sampler), both
log-probs of the sampling weights. It is never the ratio of new to old policy,
which the loss clips. No gradient flows through anything here.

A token outside the mask has weight 1. So has one with a log-prob that is not
finite (missing, or NaN), unless its whole sequence is dropped; it has no part
in any statistic, and is counted.
"""

import dataclasses
import math
from typing import get_args, Literal, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax.rl import ratios

type Weights = Literal['none', 'token', 'sequence']
type Level = Literal['geometric', 'product']
_CHOICES = {
    'weights': get_args(Weights.__value__),
    'sequence_level': get_args(Level.__value__),
}


@dataclasses.dataclass(frozen=True)
class CorrectionConfig:
  """One kind of weights, and any masks on top; static.

  The names that are known by, as settings of these fields:
    TIS: the default. Sequence TIS: weights='sequence'.
    IcePop, MIS: cap=None, token_bounds=(0.5, 5.0); a mask alone with
      weights='none', cap=2.0.
    Geo-RS: sequence_bounds=(0.999, 1.002).
    seq-mask-tis, TRL's sequence_mask: sequence_level='product' with
      sequence_bounds=(0.0, 3.0).

  Attributes:
    weights: 'token', w of each token; 'sequence', for all tokens of a sequence
      the product of their w, summed as logarithms; 'none', 1.
    cap: largest weight, at least 1; None leaves the weights to bounds of their
      level, token_bounds or those of the product.
    token_bounds: tokens with w outside [low, high] get weight 0.
    sequence_bounds: sequences whose w is outside [low, high] get weight 0.
    sequence_level: which w of a sequence that is: the geometric mean over its
      tokens, or their product.
    veto: a sequence with any w below this gets weight 0.
    opsm_delta: off-policy sequence masking: where the advantage is negative and
      the sequence's mean of sampler - learner exceeds this, weight 0.
    normalize: divide weights, before masks, by their mean over the trained
      tokens of the batch that `correct` is given: the whole one.

  Raises:
    ValueError: an unknown choice, a value out of range, or one not used.
  """

  weights: Weights = 'token'
  cap: float | None = 2.0
  token_bounds: tuple[float, float] | None = None
  sequence_bounds: tuple[float, float] | None = None
  sequence_level: Level = 'geometric'
  veto: float | None = None
  opsm_delta: float | None = None
  normalize: bool = False

  def __post_init__(self):
    for name, choices in _CHOICES.items():
      if (value := getattr(self, name)) not in choices:
        raise ValueError(f'{name} {value!r} is not one of {choices}.')
    if self.weights == 'none' and (self.cap != 2.0 or self.normalize):
      raise ValueError(
          f'cap {self.cap} (default 2.0) and normalize {self.normalize} are '
          "not used by weights 'none'."
      )
    if self.sequence_bounds is None and self.sequence_level != 'geometric':
      raise ValueError(
          f'sequence_level {self.sequence_level!r} needs sequence_bounds.'
      )
    if self.cap is not None and not self.cap >= 1:
      raise ValueError(f'TIS cap {self.cap} is below 1.')
    if self.cap is None and not self._is_bounded():
      raise ValueError(f'weights {self.weights!r} need a cap or bounds.')
    for name in ('token_bounds', 'sequence_bounds'):
      bounds = getattr(self, name)
      if bounds is not None and not 0 <= bounds[0] <= 1 <= bounds[1]:
        raise ValueError(f'{name} {bounds} do not enclose 1.')
    if self.veto is not None and not 0 < self.veto < 1:
      raise ValueError(f'veto {self.veto} is not between 0 and 1.')
    if self.opsm_delta is not None and not self.opsm_delta >= 0:
      raise ValueError(f'opsm_delta {self.opsm_delta} is negative.')

  def _is_bounded(self):
    if self.weights == 'token':
      return self.token_bounds is not None
    return bool(self.sequence_bounds) and self.sequence_level == 'product'


class Correction(NamedTuple):
  """What multiplies the loss of each token.

  Attributes:
    weights: `[B, T]` float32; already 0 where `mask` dropped a trained token.
      Aggregate with the mask of trained tokens, not with this one: what is
      dropped leaves the numerator only.
    mask: `[B, T]` bool, trained tokens that were kept; None without any masks.
    metrics: scalars over the trained tokens with finite log-probs, kept or not.
  """

  weights: jax.Array
  mask: jax.Array | None
  metrics: dict[str, jax.Array]


def correct(
    config: CorrectionConfig,
    learner_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    mask: jax.Array,
    advantages: jax.Array | None = None,
) -> Correction:
  """Returns weights and masks for the mismatch w = exp(learner - sampler).

  Exponents are held within +-20; bounds are compared as logarithms that are
  not held.

  Args:
    config: which weights and masks.
    learner_logprobs: `[B, T]` float32, at the sampling weights.
    sampler_logprobs: `[B, T]` float32.
    mask: `[B, T]` bool, the trained tokens.
    advantages: `[B]` or `[B, T]` float32, for OPSM only.

  Returns:
    The correction. Its metrics: `tis_weight_mean`, dropped tokens included as
    0; the shares of tokens `tis_clipfrac`, above the cap, and
    `rejected_tokens`, dropped by any mask; for each mask that is on, the share
    of tokens `rejected_token_bounds` or of sequences
    `rejected_sequence_bounds`, `rejected_veto`, `rejected_opsm`; and the int32
    counts of tokens `missing_logprobs` and `ratio_clamped`.

  Raises:
    ValueError: OPSM without advantages.

  Reference: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (2025): TIS. IcePop, with bounds .5 and 5 as in
    NeMo-RL; MIS, Geo-RS and veto of verl's rollout_corr_helper.py and Miles,
    which also keep the denominator; sequence_mask of TRL. OPSM: DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, section 3.1, where the mean is of old -
    new with old the sampler's; here new is the learner at the sampling weights.
  """
  chex.assert_equal_shape([learner_logprobs, sampler_logprobs, mask])
  log_ratio = lax.stop_gradient(learner_logprobs - sampler_logprobs)
  live = mask & jnp.isfinite(log_ratio)
  log_ratio = jnp.where(live, log_ratio, 0.0)
  weights, held = _weights(config, log_ratio, live)
  clipped = jnp.zeros_like(mask)
  if config.cap is not None:
    clipped = live & (weights > config.cap)
    weights = jnp.minimum(weights, config.cap)
  if config.normalize:
    mean = jnp.where(jnp.any(live), _mean(weights, live), 1.0)
    weights = jnp.where(live, weights / mean, 1.0)
  drops = _drops(config, log_ratio, live, advantages)
  dropped = jnp.zeros_like(mask)
  metrics = {}
  for name, drop in drops.items():
    dropped |= drop & mask
    level = live if name == 'token_bounds' else jnp.any(live, axis=1)
    share = drop if name == 'token_bounds' else jnp.any(drop & mask, axis=1)
    metrics[f'rejected_{name}'] = _mean(share, level)
  weights = jnp.where(dropped, 0.0, weights)
  metrics |= {
      'tis_weight_mean': _mean(weights, live),
      'tis_clipfrac': _mean(clipped, live),
      'rejected_tokens': _mean(dropped, live),
      'missing_logprobs': jnp.sum(mask & ~live, dtype=jnp.int32),
      'ratio_clamped': held,
  }
  return Correction(weights, mask & ~dropped if drops else None, metrics)


def token_tis(
    learner_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    mask: jax.Array,
    *,
    cap: float,
) -> jax.Array:
  """Returns truncated importance weights min(exp(learner - sampler), cap).

  This is the mismatch ratio: both log-probs belong to the sampling weights. It
  is never the ratio of new to old policy, which the loss clips. Where a
  log-prob is not finite the weight is 1, and so it is outside the mask. No
  gradient flows through it.

  Args:
    learner_logprobs: `[B, T]` float32.
    sampler_logprobs: `[B, T]` float32.
    mask: `[B, T]` bool.
    cap: largest weight, at least 1.

  Returns:
    `[B, T]` float32.

  Raises:
    ValueError: cap is below 1.

  Reference: "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (Yao et al., 2025), token-level TIS.
  """
  config = CorrectionConfig(cap=cap)
  return correct(config, learner_logprobs, sampler_logprobs, mask).weights


def _weights(config, log_ratio, live):
  """Returns weights without cap, and how many exponents were held."""
  if config.weights == 'none':
    return jnp.ones_like(log_ratio), jnp.int32(0)
  if config.weights == 'sequence':
    total = jnp.sum(log_ratio, axis=1, keepdims=True)
    log_ratio = jnp.broadcast_to(total, live.shape)
  log_ratio, held = ratios.hold_exponent(log_ratio, live)
  return jnp.exp(log_ratio), held


def _drops(config, log_ratio, live, advantages):
  """Returns by name what each mask that is on drops, `[B, T]` bool."""
  log = lambda bound: math.log(bound) if bound else -math.inf
  outside = lambda x, bounds: (x < log(bounds[0])) | (x > log(bounds[1]))
  total = jnp.sum(log_ratio, axis=1, keepdims=True)
  mean = total / jnp.maximum(jnp.sum(live, axis=1, keepdims=True), 1)
  whole = lambda row: jnp.broadcast_to(row, live.shape)
  drops = {}
  if config.token_bounds is not None:
    drops['token_bounds'] = outside(log_ratio, config.token_bounds)
  if config.sequence_bounds is not None:
    level = mean if config.sequence_level == 'geometric' else total
    drops['sequence_bounds'] = whole(outside(level, config.sequence_bounds))
  if config.veto is not None:
    low = jnp.any(log_ratio < log(config.veto), axis=1, keepdims=True)
    drops['veto'] = whole(low)
  if config.opsm_delta is not None:
    if advantages is None:
      raise ValueError(f'opsm_delta {config.opsm_delta} needs advantages.')
    if advantages.ndim == 1:
      advantages = advantages[:, None]
    drops['opsm'] = (advantages < 0) & (-mean > config.opsm_delta)
    drops['opsm'] = whole(drops['opsm'])
  return drops


def _mean(values, live):
  """Returns the mean over what is live; 0 if nothing is."""
  total = jnp.sum(jnp.where(live, values, 0).astype(jnp.float32))
  return total / jnp.maximum(jnp.sum(live), 1)
