"""Policy losses, token by token, and their aggregation."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

_MAX_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
  """Per-token loss, and where the ratio was clipped.

  Attributes:
    loss: `[B, T]` float32, to be minimized.
    clipped: `[B, T]` bool, tokens whose gradient the clip removed.
  """

  loss: jax.Array
  clipped: jax.Array


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
  r = exp(logprobs - old_logprobs), the exponent held within +-20. Masked
  tokens give loss 0 and gradient exactly 0, whatever their log-probs.

  Args:
    logprobs: `[B, T]` float32, differentiated.
    old_logprobs: `[B, T]` float32, the learner's own at the sampling weights.
    advantages: `[B, T]` float32.
    mask: `[B, T]` bool.
    clip_eps: how far r may fall below 1.
    clip_eps_high: how far r may rise above 1.

  Reference: DAPO, https://arxiv.org/abs/2503.14476, equation 10.
  """
  chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask])
  log_ratio = jnp.where(mask, logprobs - old_logprobs, 0.0)
  log_ratio = jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  advantages = jnp.where(mask, advantages, 0.0)
  ratio = jnp.exp(log_ratio)
  bounded = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps_high)
  free, bound = ratio * advantages, bounded * advantages
  return Surrogate(-jnp.minimum(free, bound), mask & (bound < free))


def token_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean over all masked-in tokens of the batch; 0 if none."""
  chex.assert_equal_shape([values, mask])
  count = jnp.maximum(jnp.sum(mask), 1)
  return jnp.sum(jnp.where(mask, values, 0.0)) / count
