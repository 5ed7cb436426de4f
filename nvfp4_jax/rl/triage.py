"""TRIAGE: which mismatched segments of a response feed the mismatch.

With the gap delta = learner - sampler log-prob of a token, and its advantage A,
an update moves the learner's log-prob by the sign of A: where A delta > 0 it
widens the gap (amplifying), where A delta < 0 it narrows it (contracting).

TRIAGE is arXiv 2610.07043, known here by public summaries only. They say: two
of the four regions by the signs of A and delta amplify; the tail of the gap
sits in few segments of a response; segments are diagnosed and the weights of
their tokens rebalanced; what severe mismatch remains gets a bounded repair; the
forward pass stays W4A4. Inferred, that is ours: which two regions amplify
(`negative advantage, negative gap` is named), how tails are told and gathered,
the measure of a segment, both formulas, and all constants.
"""

import dataclasses
import math
from typing import NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp

_QUADRANTS = {'positive': 1, 'negative': -1}


@dataclasses.dataclass(frozen=True)
class TriageConfig:
  """Where segments are and how they are treated; static.

  Attributes:
    threshold: a tail token has |delta| above this, in nats; None if quantile.
    quantile: or above this quantile of |delta| in the batch; None if threshold.
    window: a segment is a run of tokens within this distance of a tail token;
      tails up to 2 window + 1 apart share one.
    strength: how much a segment is rebalanced, from 0 (not) to 1.
    severe: tokens with |delta| above this, in nats, are repaired.
    repair_bounds: of the factor of a repaired token, exp(delta) held in them.

  Raises:
    ValueError: a value out of range, or not exactly one of threshold, quantile.
  """

  threshold: float | None = 0.5
  quantile: float | None = None
  window: int = 2
  strength: float = 0.5
  severe: float = 2.0
  repair_bounds: tuple[float, float] = (0.5, 1.0)

  def __post_init__(self):
    if (self.threshold is None) == (self.quantile is None):
      raise ValueError(
          f'Exactly one of threshold {self.threshold} and quantile '
          f'{self.quantile} is needed, the other None.'
      )
    low, high = self.repair_bounds
    in_range = {
        'threshold': self.threshold is None or self.threshold >= 0,
        'quantile': self.quantile is None or 0 < self.quantile < 1,
        'window': self.window >= 0,
        'strength': 0 <= self.strength <= 1,
        'severe': self.severe > 0,
        'repair_bounds': 0 <= low <= 1 <= high < math.inf,
    }
    for name, fine in in_range.items():
      if not fine:
        raise ValueError(f'{name} {getattr(self, name)} is out of range.')


class Triage(NamedTuple):
  """What multiplies the loss of each token.

  Attributes:
    weights: `[B, T]` float32, within [(1 - strength) repair_bounds[0],
      (1 + strength) repair_bounds[1]]; 1 outside segments and where masked.
      Multiply them with other corrections.
    segments: `[B, T]` int32, 1, 2, .. in the order of the flattened batch; 0
      outside any segment.
    metrics: scalars; see `triage`.
  """

  weights: jax.Array
  segments: jax.Array
  metrics: dict[str, jax.Array]


def triage(
    config: TriageConfig,
    learner_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    mask: jax.Array,
    advantages: jax.Array,
) -> Triage:
  """Returns token weights that calm the segments which amplify mismatch.

  For each segment, with the sum over its tokens of A delta and of |A delta|,
    balance = sum(A delta) / sum(|A delta|), from -1 (all contracting) to 1,
    weight = 1 - strength balance,
  so that an amplifying segment counts less and a contracting one more. A
  segment without advantage keeps weight 1. Then a token with |delta| > severe
  is multiplied by clip(exp(delta), *repair_bounds), its importance weight: a
  token weight of `corrections` on top would correct it twice.

  Masked tokens, and those whose gap is not finite (a log-prob is missing or
  NaN), belong to no segment, end one, have weight 1 and no part in a metric. No
  gradient flows through anything here.

  Args:
    config: the constants.
    learner_logprobs: `[B, T]` float32, at the sampling weights.
    sampler_logprobs: `[B, T]` float32.
    mask: `[B, T]` bool, the trained tokens.
    advantages: `[B]` or `[B, T]` float32.

  Returns:
    The weights and segments. Metrics: the shares of sum |A delta| by the signs
    of A and delta, `triage_mass_positive_positive` and `_negative_negative`
    (amplifying), `_positive_negative` and `_negative_positive` (contracting);
    the int32 counts `triage_segments`, `triage_repaired` tokens and
    `missing_logprobs`; `triage_segment_length`, mean in tokens;
    `triage_segment_length_max`, int32; `triage_touched`, the share of tokens in
    a segment or repaired; `triage_weight_mean` over all tokens. 0 where there
    is nothing to divide by.

  Reference: TRIAGE, arXiv 2610.07043, by its summaries; the module's docstring
    says what is inferred.
  """
  chex.assert_equal_shape([learner_logprobs, sampler_logprobs, mask])
  gap = lax.stop_gradient(learner_logprobs - sampler_logprobs)
  live = mask & jnp.isfinite(gap)
  gap = jnp.where(live, gap, 0.0)
  if advantages.ndim == 1:
    advantages = jnp.broadcast_to(advantages[:, None], mask.shape)
  chex.assert_equal_shape([advantages, mask])
  advantages = jnp.where(live, lax.stop_gradient(advantages), 0.0)

  tail = live & (jnp.abs(gap) > _tail_threshold(config, gap, live))
  segments = _segments(live & _dilate(tail, config.window))
  mass = advantages * gap
  total = lambda x: jax.ops.segment_sum(
      x.ravel(), segments.ravel(), mask.size + 1
  )
  magnitude = total(jnp.abs(mass))
  balance = total(mass) / jnp.where(magnitude > 0, magnitude, 1.0)
  weights = (1.0 - config.strength * balance)[segments]
  weights = jnp.where(segments > 0, weights, 1.0)

  severe = live & (jnp.abs(gap) > config.severe)
  low, high = config.repair_bounds
  # Held before exp: beyond 20 the bounds decide, since high is finite.
  repair = jnp.clip(jnp.exp(jnp.clip(gap, -20.0, 20.0)), low, high)
  weights = jnp.where(severe, weights * repair, weights)

  metrics = _metrics(mass, advantages, live, segments, severe, weights)
  metrics['missing_logprobs'] = jnp.sum(mask & ~live, dtype=jnp.int32)
  return Triage(weights, segments, metrics)


def _tail_threshold(config, gap, live):
  """Returns the |gap| above which a token is in the tail.

  As a quantile it is the least |gap| that at least that share of tokens do not
  exceed, so that a batch of equal gaps has no tail.
  """
  if config.threshold is not None:
    return config.threshold
  ranked = jnp.sort(jnp.where(live, jnp.abs(gap), jnp.inf), axis=None)
  count = jnp.sum(live)
  rank = jnp.ceil(jnp.float32(config.quantile) * count).astype(jnp.int32) - 1
  return ranked[jnp.clip(rank, 0, jnp.maximum(count - 1, 0))]


def _dilate(flags, window):
  """Returns where a flag is within `window` positions of the same row."""
  width = 2 * window + 1
  counts = lax.reduce_window(
      flags.astype(jnp.int32), 0, lax.add, (1, width), (1, 1), 'SAME'
  )
  return counts > 0


def _segments(inside):
  """Numbers the runs within rows from 1; 0 outside."""
  before = jnp.pad(inside, ((0, 0), (1, 0)))[:, :-1]
  starts = (inside & ~before).astype(jnp.int32)
  numbers = jnp.cumsum(starts.ravel()).reshape(inside.shape)
  return jnp.where(inside, numbers, 0)


def _metrics(mass, advantages, live, segments, severe, weights):
  magnitude = jnp.abs(mass)
  tokens = jnp.maximum(jnp.sum(live), 1)
  whole = jnp.sum(magnitude)
  metrics = {}
  for name, sign in _QUADRANTS.items():
    for gap_name, gap_sign in _QUADRANTS.items():
      # The sign of the gap is that of A delta times that of A.
      here = (advantages * sign > 0) & (mass * sign * gap_sign > 0)
      share = jnp.sum(jnp.where(here, magnitude, 0.0))
      metrics[f'triage_mass_{name}_{gap_name}'] = share / jnp.where(
          whole > 0, whole, 1.0
      )
  inside = segments > 0
  lengths = jax.ops.segment_sum(
      inside.ravel().astype(jnp.int32), segments.ravel(), segments.size + 1
  )
  count = jnp.max(segments, initial=0)
  return metrics | {
      'triage_segments': count,
      'triage_segment_length': jnp.sum(inside) / jnp.maximum(count, 1),
      'triage_segment_length_max': jnp.max(lengths),
      'triage_repaired': jnp.sum(severe, dtype=jnp.int32),
      'triage_touched': jnp.sum(inside | severe) / tokens,
      'triage_weight_mean': jnp.sum(jnp.where(live, weights, 0.0)) / tokens,
  }
