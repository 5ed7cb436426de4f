"""What staleness and quantization do to a policy: mismatch, drift, reward.

The equations of a step, in the order of a port; float32 here, doubles agree to
about 1e-6 away from a collapse, where differences grow:

  s  = staleness lr lag^power          mismatch by staleness, nats
  q                                    mismatch by quantization, nats
  m  = sqrt(s^2 + q^2)
  c  = capacity (1 + bonus (1 - exp(-bound / m)))
  D <- rho D + gamma n m + eta max(0, m D - c), at most `drift_limit`
  r <- max(0, r + a lr (r_max - r) exp(-m^2 / (2 c^2)) - b max(0, D - D*) r)

lag is the step's `token_lag`, lr the learning rate over 1e-6, n the gradient
noise of the backward mode, c what an update can correct: a clip or truncated
weights add a bonus for the tokens inside their bound. Where m D stays below
c, drift settles at gamma n m / (1 - rho); where m D exceeds c, the update adds
to what it should correct, and drift explodes if eta m > 1 - rho. So the story
turns on whether m passes sqrt(c (1 - rho) / (gamma n)).

All of this is inferred: the public summaries of the humans& simulator name the
two sources, the drift, the optimizer's ability to correct and the collapse, and
no equation.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

CLIP_EPS = 0.2  # lower clip of the ratio in the humans& recipe
DRIFT_LIMIT = 100.0  # keeps a collapsed run finite


class Drift(NamedTuple):
  """The numbers of the model, float32 leaves, so that vmap sweeps them.

  Attributes:
    quantization: q, nats.
    staleness: s of lag 1 at the reference learning rate, nats.
    power: of the lag; 1/2 a random walk of the weights, 1 a straight one.
    learning_rate: over 1e-6.
    noise: n, gradient noise over that of bf16.
    capacity: c without a correction.
    bonus: of the correction; 0 without one.
    bound: log of the ratio that it clips or truncates at.
    decay: rho.
    gain: gamma.
    amplification: eta.
    threshold: D*, drift from which reward suffers.
    learning: a.
    damage: b.
    reward_start, reward_max: r before the first step and its limit.
  """

  quantization: Any
  staleness: Any
  power: Any
  learning_rate: Any
  noise: Any
  capacity: Any
  bonus: Any
  bound: Any
  decay: Any
  gain: Any
  amplification: Any
  threshold: Any
  learning: Any
  damage: Any
  reward_start: Any
  reward_max: Any


class Curves(NamedTuple):
  """`[steps]` float32 each.

  Attributes:
    stale: s, nats.
    mismatch: m, nats.
    drift: D after the step.
    reward: r after the step.
    clip_fraction: of tokens, exp(-0.2 / m): log-ratios taken as a Laplace
      distribution with mean magnitude m.
    grad_norm: n sqrt(1 + (m D / c)^2), D before the step, over that of bf16
      without mismatch.
  """

  stale: jax.Array
  mismatch: jax.Array
  drift: jax.Array
  reward: jax.Array
  clip_fraction: jax.Array
  grad_norm: jax.Array


def follow(model: Drift, lag: jax.typing.ArrayLike) -> Curves:
  """Returns what lags of `[steps]` do to the policy."""
  stale = model.staleness * model.learning_rate * lag**model.power
  return _accumulate(model, stale, jnp.sqrt(stale**2 + model.quantization**2))


def accumulate(model: Drift, mismatch: jax.typing.ArrayLike) -> Curves:
  """Returns what mismatches of `[steps]`, measured ones perhaps, come to.

  What is above the model's quantization, in quadrature, counts as stale.
  """
  mismatch = jnp.asarray(mismatch, jnp.float32)
  stale = jnp.sqrt(jnp.maximum(mismatch**2 - model.quantization**2, 0))
  return _accumulate(model, stale, mismatch)


def _accumulate(model, stale, mismatch):
  clipped = jnp.exp(-CLIP_EPS / jnp.maximum(mismatch, 1e-6))

  def step(carry, m):
    drift, reward = carry
    load = m * drift
    inside = 1 - jnp.exp(-model.bound / jnp.maximum(m, 1e-6))
    c = model.capacity * (1 + model.bonus * inside)
    grad_norm = model.noise * jnp.sqrt(1 + (load / c) ** 2)
    drift = (
        model.decay * drift
        + model.gain * model.noise * m
        + model.amplification * jnp.maximum(load - c, 0)
    )
    drift = jnp.minimum(drift, DRIFT_LIMIT)
    rate = model.learning * model.learning_rate
    gain = rate * (model.reward_max - reward) * jnp.exp(-(m**2) / (2 * c**2))
    loss = model.damage * jnp.maximum(drift - model.threshold, 0) * reward
    reward = jnp.maximum(reward + gain - loss, 0)
    return (drift, reward), (drift, reward, grad_norm)

  start = jnp.zeros(()), jnp.asarray(model.reward_start, jnp.float32)
  drift, reward, grad_norm = lax.scan(step, start, mismatch)[1]
  return Curves(stale, mismatch, drift, reward, clipped, grad_norm)


def collapse_step(reward: jax.Array) -> jax.Array:
  """Returns the first step below half of the best reward so far, or -1.

  Args:
    reward: `[steps]`.
  """
  fallen = reward < 0.5 * lax.cummax(reward)
  return jnp.where(jnp.any(fallen), jnp.argmax(fallen), -1)
