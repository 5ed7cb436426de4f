"""Corrections for the gap between sampler and learner at equal weights."""

import chex
import jax
import jax.numpy as jnp

_MAX_LOG_RATIO = 20.0


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
  chex.assert_equal_shape([learner_logprobs, sampler_logprobs, mask])
  if not cap >= 1:
    raise ValueError(f'TIS cap {cap} is below 1.')
  log_ratio = jax.lax.stop_gradient(learner_logprobs - sampler_logprobs)
  usable = mask & jnp.isfinite(log_ratio)
  log_ratio = jnp.where(usable, log_ratio, 0.0)
  log_ratio = jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  return jnp.minimum(jnp.exp(log_ratio), cap)
