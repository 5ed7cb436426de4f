"""Advantages from the rewards of a group, and which groups teach anything.

Rows belong together by group id, never by prompt: two groups that answer the
same problem stay apart. `valid` takes rejected samples (the reward failed, a
filter dropped them) out of every statistic; their rewards may be NaN.
"""

import dataclasses
import functools
from typing import get_args, Literal

import chex
import jax
import jax.numpy as jnp

type Estimator = Literal[
    'grpo', 'dr_grpo', 'leave_one_out', 'reinforce_pp', 'reinforce_pp_baseline'
]
_ESTIMATORS = get_args(Estimator.__value__)
# Those that divide by a standard deviation.
_SCALED = ('grpo', 'reinforce_pp', 'reinforce_pp_baseline')


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
  """How rewards become advantages; static.

  With mean, std and n of a group's valid rewards R:

  Attributes:
    estimator: 'grpo', (R - mean) / (std + eps); 'dr_grpo', R - mean;
      'leave_one_out', (R - mean) n / (n - 1), which is R minus the mean of the
      others; 'reinforce_pp', rewards whitened over the batch, each counted
      once for each of its trained tokens; 'reinforce_pp_baseline', R - mean
      whitened so.
    ddof: the variance divides by n - ddof; 1 in verl, Tunix and TRL. Unused by
      'dr_grpo' and 'leave_one_out'.
    eps: added to the standard deviation. Unused by the same.

  Raises:
    ValueError: an unknown estimator or ddof, a negative eps, or a field that
      the estimator does not use and that is not at its default.

  Reference: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1 (grpo);
    https://arxiv.org/abs/2503.20783 (dr_grpo); https://arxiv.org/abs/2402.14740
    (leave_one_out); REINFORCE++, https://arxiv.org/abs/2501.03262, and the two
    estimators of verl's core_algos.py named after it: 'reinforce_pp' is its
    reinforce_plus_plus with gamma 1 and no KL in the reward, and
    'reinforce_pp_baseline' its reinforce_plus_plus_baseline. verl divides by
    sqrt(variance + 1e-8); here eps is added to the root, as for GRPO.
  """

  estimator: Estimator = 'grpo'
  ddof: Literal[0, 1] = 1
  eps: float = 1e-6

  def __post_init__(self):
    if self.estimator not in _ESTIMATORS:
      raise ValueError(
          f'estimator {self.estimator!r} is not one of {_ESTIMATORS}.'
      )
    if self.ddof not in (0, 1):
      raise ValueError(f'ddof {self.ddof!r} is not one of (0, 1).')
    if not self.eps >= 0:
      raise ValueError(f'eps {self.eps} is negative.')
    if self.estimator in _SCALED:
      return
    for field in dataclasses.fields(self)[1:]:
      if (value := getattr(self, field.name)) != field.default:
        raise ValueError(f'{self.estimator} does not use {field.name} {value}.')


def group_relative(
    rewards: jax.Array, group: jax.Array, *, eps: float = 1e-6
) -> jax.Array:
  """Returns GRPO advantages, (R - mean) / (std + eps) within each group.

  The standard deviation divides by n - 1. A group whose rewards are all equal
  (largest == smallest, not a threshold on the standard deviation, which is
  3e-8 for eight rewards of 0.35 in float32) gets exactly 0, and so does a
  group of one.

  Args:
    rewards: `[B]` float32.
    group: `[B]` int32 group ids in [0, B); order and sizes are free.
    eps: added to the standard deviation.

  Returns:
    `[B]` float32.

  Raises:
    ValueError: no rewards.

  Reference: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.
  """
  return compute(AdvantageConfig(eps=eps), rewards, group)


@functools.partial(jax.jit, static_argnames='config')
def compute(
    config: AdvantageConfig,
    rewards: jax.Array,
    group: jax.Array,
    *,
    valid: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
  """Returns one advantage for each sample; that of all of its tokens.

  A group counts as equal when the largest of its valid rewards is the
  smallest, not by a threshold on the standard deviation, which is 3e-8 for
  eight rewards of 0.35 in float32. Its advantages are exactly 0, their
  gradients too, and so for a group of one and for a sample that is not valid.
  The whole batch is the group of 'reinforce_pp'. 'reinforce_pp_baseline' keeps
  equal groups in the statistics, as published; that their advantages are then
  0, and not minus the mean of the batch, is ours.

  Args:
    config: the estimator.
    rewards: `[B]` float32; anything where not valid. A NaN in a valid sample
      makes its group NaN.
    group: `[B]` int32 group ids in [0, B); order and sizes are free.
    valid: `[B]` bool, samples that count; all, if None.
    mask: `[B, T]` bool, trained tokens: the weights of the 'reinforce_pp'
      estimators. The others do not look at it.

  Returns:
    `[B]` float32.

  Raises:
    ValueError: no rewards, or no mask where the estimator weighs by it.
  """
  live = _live(rewards, group, valid)
  rewards = jnp.where(live, rewards, 0.0)
  if config.estimator == 'reinforce_pp':
    return _whitened(config, rewards, live, mask)
  total = lambda x: jax.ops.segment_sum(x, group, rewards.size)[group]
  count = jnp.maximum(total(live.astype(jnp.float32)), 1)
  centered = jnp.where(live, rewards - total(rewards) / count, 0.0)
  usable = live & _differs(rewards, group, live)
  match config.estimator:
    case 'dr_grpo':
      scaled = centered
    case 'leave_one_out':
      scaled = centered * (count / jnp.maximum(count - 1, 1))
    case 'reinforce_pp_baseline':
      scaled = _whitened(config, centered, live, mask)
    case 'grpo':
      variance = total(centered**2) / jnp.maximum(count - config.ddof, 1)
      std = jnp.sqrt(jnp.where(usable, variance, 1.0))
      scaled = centered / (std + config.eps)
  return jnp.where(usable, scaled, 0.0)


def informative_groups(
    rewards: jax.Array, group: jax.Array, valid: jax.Array | None = None
) -> jax.Array:
  """Returns `[B]` bool: valid samples of groups whose rewards differ.

  DAPO's dynamic sampling keeps these and samples others anew: a group is kept
  when the largest of its valid rewards is not the smallest.

  Args:
    rewards: `[B]` float32; anything where not valid.
    group: `[B]` int32 group ids in [0, B).
    valid: `[B]` bool; all, if None.

  Raises:
    ValueError: no rewards.

  Reference: DAPO, https://arxiv.org/abs/2503.14476, section 3.2.
  """
  live = _live(rewards, group, valid)
  return live & _differs(rewards, group, live)


@jax.jit
def group_metrics(
    rewards: jax.Array, group: jax.Array, valid: jax.Array | None = None
) -> dict[str, jax.Array]:
  """Returns how many groups there are and how many teach nothing.

  Args:
    rewards: `[B]` float32; anything where not valid.
    group: `[B]` int32 group ids in [0, B).
    valid: `[B]` bool; all, if None.

  Returns:
    Scalars. int32: `groups` that have a valid sample, `groups_skipped` of them
    that have one only or equal rewards, `samples_rejected`. float32:
    `frac_reward_zero_std` = groups_skipped / groups, `reward_mean` and
    `reward_std` of the valid samples (dividing by n - 1). 0 where there is
    nothing to divide by.

  Raises:
    ValueError: no rewards.
  """
  live = _live(rewards, group, valid)
  differs = live & _differs(rewards, group, live)
  count = lambda rows: jnp.sum(
      jax.ops.segment_max(rows.astype(jnp.int32), group, rewards.size) > 0,
      dtype=jnp.int32,
  )
  groups, samples = count(live), jnp.sum(live, dtype=jnp.int32)
  skipped = groups - count(differs)
  rewards = jnp.where(live, rewards, 0.0)
  mean = jnp.sum(rewards) / jnp.maximum(samples, 1)
  squares = jnp.sum(jnp.where(live, rewards - mean, 0.0) ** 2)
  return {
      'groups': groups,
      'groups_skipped': skipped,
      'samples_rejected': rewards.size - samples,
      'frac_reward_zero_std': skipped / jnp.maximum(groups, 1),
      'reward_mean': mean,
      'reward_std': jnp.sqrt(squares / jnp.maximum(samples - 1, 1)),
  }


def overlong_penalty(
    lengths: jax.Array, max_length: int, cache: int
) -> jax.Array:
  """Returns DAPO's soft punishment of long completions, to add to the reward.

  0 up to max_length - cache tokens, then (max_length - cache - length) / cache,
  and -1 from max_length on.

  Args:
    lengths: `[B]` int32, in tokens.
    max_length: in tokens.
    cache: width of the linear part, from 1 to max_length tokens.

  Returns:
    `[B]` float32.

  Raises:
    ValueError: cache is out of range.

  Reference: DAPO, https://arxiv.org/abs/2503.14476, section 3.4.
  """
  if not 1 <= cache <= max_length:
    raise ValueError(f'cache {cache} is not in [1, max_length {max_length}].')
  excess = (max_length - cache) - jnp.asarray(lengths)
  return jnp.clip(excess.astype(jnp.float32) / cache, -1.0, 0.0)


def _live(rewards, group, valid):
  chex.assert_rank([rewards, group], 1)
  chex.assert_equal_shape([rewards, group])
  if not rewards.size:
    raise ValueError('The batch is empty: no rewards were given.')
  if valid is None:
    return jnp.ones(rewards.shape, bool)
  chex.assert_equal_shape([rewards, valid])
  return jnp.asarray(valid)


def _differs(rewards, group, live):
  """Returns `[B]` bool: a group whose largest live reward is not the least.

  It is True in a group with a NaN, which is to be seen, and where none is live.
  """
  bound = lambda segment, fill: segment(
      jnp.where(live, rewards, fill), group, rewards.size
  )
  largest = bound(jax.ops.segment_max, -jnp.inf)
  return (largest != bound(jax.ops.segment_min, jnp.inf))[group]


def _whitened(config, values, live, mask):
  """Returns values less their mean over trained tokens, over the deviation."""
  if mask is None:
    raise ValueError(f'{config.estimator} needs the mask of trained tokens.')
  chex.assert_shape(mask, (values.size, None))
  tokens = jnp.where(live, jnp.sum(mask, axis=1), 0).astype(jnp.float32)
  count = jnp.sum(tokens)
  live = tokens > 0
  mean = jnp.sum(tokens * values) / jnp.maximum(count, 1)
  centered = jnp.where(live, values - mean, 0.0)
  squares = jnp.sum(tokens * centered**2)
  usable = live & _differs(values, jnp.zeros(values.shape, jnp.int32), live)
  variance = squares / jnp.maximum(count - config.ddof, 1)
  std = jnp.sqrt(jnp.where(usable, variance, 1.0))
  return jnp.where(usable, centered / (std + config.eps), 0.0)
