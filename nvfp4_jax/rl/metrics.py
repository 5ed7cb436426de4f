"""How well sampler and learner agree, and how often answers are right.

Names are those that other frameworks log, so that a search finds them.
"""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import diagnostics
from nvfp4_jax.rl import ratios


def mismatch(
    learner_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    mask: jax.Array,
    *,
    cap: float | None = None,
) -> dict[str, jax.Array]:
  """Returns statistics of delta = learner - sampler and w = exp(delta).

  Over the trained tokens whose log-probs are finite; all are 0 if there are
  none. Exponents are held within +-20.

  Args:
    learner_logprobs: `[B, T]` float32, at the sampling weights.
    sampler_logprobs: `[B, T]` float32.
    mask: `[B, T]` bool, the trained tokens.
    cap: of truncated importance weights.

  Returns:
    Scalars, float32 but for the two counts:
      train_rollout_logprob_abs_diff: mean |delta|, in nats.
      train_rollout_logprob_abs_diff_max: largest |delta|.
      train_rollout_k1: mean -delta, an estimate of KL(sampler || learner).
      train_rollout_kl: mean w - 1 - delta (k3), another, never negative.
      token_mult_prob_error: mean exp |delta|: 1 when equal; NeMo-RL's guide
        takes more than 1.05 for an error.
      ess_ratio: (sum w)^2 / (n sum w^2), the share of effective samples.
      chi_square: mean w^2 - 1, an estimate of the divergence of that name.
      logprob_pearson: correlation of the log-probs; 0 where one is constant.
      tis_clipfrac: share of tokens with w > cap; only with a cap.
      ratio_clamped, missing_logprobs: tokens whose exponent was held, and
        trained tokens with a log-prob that is not finite.

  Reference: policy_loss_function of Miles (names of the first ones),
    rollout_corr_helper.py of verl (chi-square, ESS), the GRPO guide of NeMo-RL
    (token_mult_prob_error), Tunix (correlation).
  """
  chex.assert_equal_shape([learner_logprobs, sampler_logprobs, mask])
  delta = learner_logprobs - sampler_logprobs
  live = mask & jnp.isfinite(delta)
  count = jnp.maximum(jnp.sum(live), 1)
  mean = lambda x: jnp.sum(jnp.where(live, x, 0.0)) / count
  learner, sampler = (
      jnp.where(live, x, 0.0) for x in (learner_logprobs, sampler_logprobs)
  )
  delta = jnp.where(live, delta, 0.0)
  exponent, clamped = ratios.hold_exponent(delta, live)
  w = jnp.exp(exponent)
  square = mean(w**2)
  metrics = {
      'train_rollout_logprob_abs_diff': diagnostics.logprob_gap(
          learner, sampler, live
      ),
      'train_rollout_logprob_abs_diff_max': jnp.max(
          jnp.abs(delta), initial=0.0
      ),
      'train_rollout_k1': mean(-delta),
      'train_rollout_kl': diagnostics.kl_k3(learner, sampler, live),
      'token_mult_prob_error': mean(jnp.exp(jnp.abs(exponent))),
      'ess_ratio': mean(w) ** 2 / jnp.where(square > 0, square, 1.0),
      # Not mean(w^2) - 1, which cancels.
      'chi_square': mean(jnp.expm1(2 * exponent)),
      'logprob_pearson': _pearson(learner, sampler, live, mean),
      'ratio_clamped': clamped,
      'missing_logprobs': jnp.sum(mask & ~live, dtype=jnp.int32),
  }
  if cap is not None:
    metrics['tis_clipfrac'] = mean((w > cap).astype(jnp.float32))
  return jax.lax.stop_gradient(metrics)


def _pearson(a, b, live, mean):
  varies = lambda x: (
      jnp.max(jnp.where(live, x, -jnp.inf), initial=-jnp.inf)
      > jnp.min(jnp.where(live, x, jnp.inf), initial=jnp.inf)
  )
  usable = varies(a) & varies(b)
  a, b = a - mean(a), b - mean(b)
  product = jnp.sqrt(mean(a**2)) * jnp.sqrt(mean(b**2))
  return jnp.where(usable, mean(a * b) / jnp.where(usable, product, 1.0), 0.0)


def pass_at_k(
    num_samples: np.typing.ArrayLike, num_correct: np.typing.ArrayLike, k: int
) -> np.ndarray:
  """Returns the unbiased chance that one of k samples of a problem is right.

  1 - C(n - c, k) / C(n, k) with c of n samples right, in integers and rounded
  once; not 1 - (1 - c / n)^k, which is biased. Average it over problems.

  Args:
    num_samples: n of each problem, int, any shape.
    num_correct: c, int, of the same shape or one that broadcasts.
    k: from 1 to the least n.

  Returns:
    float64 of that shape. Runs on the host.

  Raises:
    ValueError: k or c is out of range, or numbers are not integers.

  Reference: Chen et al., https://arxiv.org/abs/2107.03374, equation 1.
  """
  n, c = np.broadcast_arrays(num_samples, num_correct)
  if not all(np.issubdtype(x.dtype, np.integer) for x in (n, c)):
    raise ValueError(f'Counts of types {n.dtype} and {c.dtype} are not ints.')
  if not 1 <= k <= np.min(n, initial=k):
    raise ValueError(f'k {k} is not in [1, {np.min(n, initial=k)} samples].')
  if np.any(c < 0) or np.any(c > n):
    raise ValueError(f'num_correct {c} is not in [0, num_samples].')

  def of_one(n, c):
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways

  values = [of_one(int(n), int(c)) for n, c in zip(n.flat, c.flat, strict=True)]
  return np.array(values, np.float64).reshape(n.shape)


def avg_at_k(rewards: np.typing.ArrayLike, k: int) -> float:
  """Returns the mean over problems of the mean reward of k samples.

  Args:
    rewards: `[problems, n]`; the first k of each are taken.
    k: from 1 to n.

  Returns:
    float, computed in float64. For rewards of 0 and 1 it estimates pass@1.

  Raises:
    ValueError: k is out of range.
  """
  rewards = np.asarray(rewards, np.float64)
  if rewards.ndim != 2 or not rewards.size:
    raise ValueError(f'rewards of shape {rewards.shape} are not [problems, n].')
  if not 1 <= k <= rewards.shape[1]:
    raise ValueError(f'k {k} is not in [1, {rewards.shape[1]} samples].')
  return float(np.mean(rewards[:, :k]))
