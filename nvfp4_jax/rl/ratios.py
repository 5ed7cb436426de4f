"""Log-ratios of two policies under a mask: held exponents, and KL estimates.

Masked positions may hold anything, NaN and infinities included: they change
neither a value nor a gradient, whose own entries there are exactly 0. What is
not finite where the mask is True is an error of the caller, and is seen.
"""

from typing import get_args, Literal, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp

_MAX_LOG_RATIO = 20.0
_MAX_KL = 10.0  # of low_var_kl, as in verl, Miles and NeMo-RL

type Kl = Literal['k1', 'k2', 'k3', 'low_var_kl']
type KlGradient = Literal['value', 'k2', 'score', 'importance']
KLS = get_args(Kl.__value__)
KL_GRADIENTS = get_args(KlGradient.__value__)


class Penalty(NamedTuple):
  """Per-token KL.

  Attributes:
    values: `[B, T]` float32, 0 where masked.
    ratio_clamped: int32, trained tokens whose exponent was held.
  """

  values: jax.Array
  ratio_clamped: jax.Array


def hold_exponent(
    log_ratio: jax.Array, live: jax.Array, limit: float = _MAX_LOG_RATIO
) -> tuple[jax.Array, jax.Array]:
  """Returns log-ratios within +-limit, and how many live ones were beyond.

  Args:
    log_ratio: `[B, T]` float32; anything where not live.
    live: `[B, T]` bool.
    limit: of the magnitude. Beyond it the gradient is 0.

  Returns:
    `[B, T]` float32, 0 where not live (gradient too), and an int32 count.
  """
  log_ratio = jnp.where(live, log_ratio, 0.0)
  count = jnp.sum(jnp.abs(log_ratio) > limit, dtype=jnp.int32)
  return jnp.clip(log_ratio, -limit, limit), count


def kl_penalty(
    logprobs: jax.Array,
    ref_logprobs: jax.Array,
    mask: jax.Array,
    *,
    kl: Kl = 'k3',
    gradient: KlGradient = 'value',
    old_logprobs: jax.Array | None = None,
) -> Penalty:
  """Returns an estimate of KL(new || reference) at each token.

  With x = new - reference, held within +-20 in an exponent, `kl` is
    k1: x. Unbiased; its own gradient is not: its mean is 0.
    k2: x^2 / 2. Biased; its gradient is that of the KL (on policy).
    k3: exp(-x) - 1 + x. Unbiased, never negative.
    low_var_kl: k3 held below 10, without gradient there.
  and its `gradient`,
    value: its own.
    k2: that of k2, with the value of `kl`: 'k3+' of verl.
    score: its own, plus the value times that of new, by a factor
      exp(new - stop_gradient(new)) of 1: unbiased on policy, as in NeMo-RL. For
      k3 the two add up to x, that of k2, less what cancels in rounding.
    importance: the estimate times r = exp(new - old), differentiated too, the
      exponent held within +-20: unbiased off policy as well, as in
      DeepSeek-V3.2. Equal to 'score' at r = 1. Of low_var_kl the product is
      held below 10, as in Miles, where for 'score' the value is, as in NeMo-RL.

  Args:
    logprobs: `[B, T]` float32, differentiated.
    ref_logprobs: `[B, T]` float32 of the reference; no gradient.
    mask: `[B, T]` bool.
    kl: the estimator.
    gradient: which gradient it has.
    old_logprobs: `[B, T]` float32, the learner's own at the sampling weights;
      for 'importance' only. No gradient.

  Raises:
    ValueError: an unknown choice; 'importance' without old_logprobs.

  Reference: Schulman, "Approximating KL Divergence" (2020); kl_penalty of
    verl's core_algos.py; https://arxiv.org/abs/2506.09477; DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, section 3.1; compute_approx_kl of Miles.
  """
  if kl not in KLS:
    raise ValueError(f'kl {kl!r} is not one of {KLS}.')
  if gradient not in KL_GRADIENTS:
    raise ValueError(f'gradient {gradient!r} is not one of {KL_GRADIENTS}.')
  chex.assert_equal_shape([logprobs, ref_logprobs, mask])
  new = jnp.where(mask, logprobs, 0.0)
  x = new - lax.stop_gradient(jnp.where(mask, ref_logprobs, 0.0))
  factor, held = _factor(gradient, new, old_logprobs, mask)
  match kl:
    case 'k1':
      values = x
    case 'k2':
      values = jnp.square(x) / 2
    case _:
      held |= jnp.abs(x) > _MAX_LOG_RATIO
      exponent = hold_exponent(-x, mask)[0]
      values = jnp.expm1(exponent) - exponent
  limit = _MAX_KL if kl == 'low_var_kl' else jnp.inf
  if gradient == 'importance':
    values = jnp.minimum(values * factor, limit)
  else:
    values = jnp.minimum(values, limit) * factor
  if gradient == 'k2':
    k2 = jnp.square(x) / 2
    values = lax.stop_gradient(values) + (k2 - lax.stop_gradient(k2))
  return Penalty(values, jnp.sum(held, dtype=jnp.int32))


def _factor(gradient, new, old_logprobs, mask):
  """Returns what multiplies the estimate, and where its exponent was held."""
  none = jnp.zeros_like(mask)
  if gradient == 'score':
    return jnp.exp(new - lax.stop_gradient(new)), none
  if gradient != 'importance':
    return jnp.ones_like(new), none
  if old_logprobs is None:
    raise ValueError("gradient 'importance' needs old_logprobs.")
  log_ratio = new - lax.stop_gradient(jnp.where(mask, old_logprobs, 0.0))
  held = jnp.abs(log_ratio) > _MAX_LOG_RATIO
  return jnp.exp(hold_exponent(log_ratio, mask)[0]), held
