"""How far apart two policies, or a tensor and its quantized form, are."""

import jax
import jax.numpy as jnp

_MAX_LOG_RATIO = 20.0


def logprob_gap(a: jax.Array, b: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns mean |a - b| over the mask, in nats; 0 over an empty mask."""
  return _masked_mean(jnp.abs(a - b), mask)


def kl_k3(a: jax.Array, b: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the k3 estimate of KL(b || a) from samples of b.

  Mean of exp(x) - 1 - x with x = a - b held within +-20; never negative.

  Args:
    a: `[B, T]` log-probs.
    b: `[B, T]` log-probs of the distribution that was sampled.
    mask: `[B, T]` bool.

  Reference: Schulman, "Approximating KL Divergence" (2020).
  """
  x = jnp.where(mask, a - b, 0.0)  # before exp: no NaN in the gradient
  x = jnp.clip(x, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  return _masked_mean(jnp.expm1(x) - x, mask)


def _masked_mean(values, mask):
  total = jnp.sum(jnp.where(mask, values, 0.0))
  return total / jnp.maximum(jnp.sum(mask), 1)
