"""Rollouts: completions of a task's problems, with their rewards.

Everything random follows from (seed, step, try), and problems from a cursor,
so that a run that was killed goes on exactly as if it had not been.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import policy
from nvfp4_jax import sampler
from nvfp4_jax import tasks
from nvfp4_jax.models import config as model_config
from nvfp4_jax.rl import advantages
from nvfp4_jax.rl import types
from nvfp4_jax.tasks import rewards

# Takes (problem, completion) pairs; `tasks.rewards.Pool.score` is one.
type Score = Callable[[Sequence[tuple[Any, Any]]], list[rewards.Result]]
# Completions of one problem: arrays by name, a row for each completion.
type Group = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """How rollouts are made; static.

  Attributes:
    prompts_per_step: problems of a rollout.
    group_size: completions of each problem.
    temperature: of sampling, and of the learner's log-probs.
    max_tries: dynamic sampling (DAPO): groups whose rewards are all equal are
      replaced by those of further problems, in so many rounds at most; 1 keeps
      them.
    overlong_tokens: soft overlong punishment (DAPO): over the last so many
      tokens before the limit, a length costs linearly more, up to 1; 0 for
      none.
    mask_truncated: completions without EOS are not trained on.
    replay_experts: the learner takes the experts that the sampler chose (R3).
  """

  prompts_per_step: int
  group_size: int
  temperature: float = 1.0
  max_tries: int = 1
  overlong_tokens: int = 0
  mask_truncated: bool = False
  replay_experts: bool = False

  def __post_init__(self):
    for name in ('prompts_per_step', 'group_size', 'max_tries'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} {getattr(self, name)} is below 1.')
    if self.overlong_tokens < 0:
      raise ValueError(f'overlong_tokens {self.overlong_tokens} is negative.')
    if not self.temperature > 0:
      raise ValueError(f'temperature {self.temperature} is not positive.')


class Collected(NamedTuple):
  """A rollout, and how it came about.

  Attributes:
    rollout: the rollout.
    cursor: index of the next problem.
    counts: means and counts for the row of metrics. `reward` and
      `reward_failures` are of all completions that were sampled, the rest of
      those that are trained on.
  """

  rollout: types.Rollout
  cursor: int
  counts: dict[str, float]


def collect(
    model: model_config.ModelConfig,
    cfg: RolloutConfig,
    task: tasks.Task,
    quantizer: policy.Quantizer,
    params: policy.ParamTree,
    *,
    cursor: int,
    version: int,
    step: int,
    seed: int,
    score: Score | None = None,
) -> Collected:
  """Samples groups of completions for the next problems and rewards them.

  Args:
    model: the model.
    cfg: sizes and sampling.
    task: makes problems and rewards.
    quantizer: the sampler's.
    params: the tree that the sampler runs.
    cursor: index of the first training problem.
    version: learner step of the weights.
    step: index of the rollout, for randomness.
    seed: of sampling.
    score: rewards completions; by default `task.reward`, here and now.
  """
  kept, equal, tries = [], [], 0
  while len(kept) < cfg.prompts_per_step and tries < cfg.max_tries:
    groups = sample_groups(
        model,
        cfg,
        task,
        quantizer,
        params,
        cursor,
        _try_key(seed, step, tries),
        score,
    )
    cursor += cfg.prompts_per_step
    tries += 1
    for group in groups:
      keep = cfg.max_tries == 1 or _informative(group)
      (kept if keep else equal).append(group)
  counts = _reward_counts(kept + equal)
  if cfg.max_tries > 1:
    surplus = len(kept) - cfg.prompts_per_step
    counts |= {
        'tries': tries,
        'groups_replaced': len(equal) + min(surplus, 0),
        'groups_surplus': max(surplus, 0),
    }
  # After the last try, groups without information fill up.
  kept = (kept + equal)[: cfg.prompts_per_step]
  rollout, lengths = stack_groups(cfg, task, kept, [version] * len(kept))
  return Collected(rollout, cursor, counts | lengths)


def complete(
    model: model_config.ModelConfig,
    cfg: RolloutConfig,
    task: tasks.Task,
    quantizer: policy.Quantizer,
    params: policy.ParamTree,
    problems: Sequence[Any],
    key: jax.Array,
    temperature: float,
) -> sampler.Completions:
  """Samples one completion for each problem."""
  prompts, lengths = sampler.pad_prompts([p.prompt for p in problems])
  return sampler.generate(
      model,
      params,
      quantizer,
      prompts,
      lengths,
      key,
      sampler.SampleConfig(
          task.max_answer_tokens,
          task.eos_ids,
          temperature,
          record_experts=cfg.replay_experts,
      ),
  )


def score_completions(
    task: tasks.Task,
    problems: Sequence[Any],
    completions: sampler.Completions,
    score: Score | None = None,
) -> list[rewards.Result]:
  """Returns the result of rewarding each completion's token ids."""
  tokens, mask = np.asarray(completions.tokens), np.asarray(completions.mask)
  items = [
      (problem, row[live].tolist())
      for problem, row, live in zip(problems, tokens, mask, strict=True)
  ]
  return rewards.score(task.reward, items) if score is None else score(items)


def step_key(seed: int, step: int) -> jax.Array:
  """Returns the key of a step: rollouts count up from 0, evaluations down."""
  return jax.random.fold_in(jax.random.key(seed), np.uint32(step % 2**32))


def _try_key(seed, step, tries):
  key = step_key(seed, step)
  return jax.random.fold_in(key, tries) if tries else key


def sample_groups(
    model: model_config.ModelConfig,
    cfg: RolloutConfig,
    task: tasks.Task,
    quantizer: policy.Quantizer,
    params: policy.ParamTree,
    cursor: int,
    key: jax.Array,
    score: Score | None = None,
) -> list[Group]:
  """Returns rewarded groups for the next `prompts_per_step` problems.

  Args:
    model: the model.
    cfg: sizes and sampling; `max_tries` is of no matter here.
    task: makes problems and rewards.
    quantizer: the sampler's.
    params: the tree that the sampler runs.
    cursor: index of the first training problem.
    key: randomness of sampling.
    score: see `collect`.
  """
  problems = [
      task.problem('train', cursor + i) for i in range(cfg.prompts_per_step)
  ]
  rows = [problem for problem in problems for _ in range(cfg.group_size)]
  completions = complete(
      model, cfg, task, quantizer, params, rows, key, cfg.temperature
  )
  results = score_completions(task, rows, completions, score)
  arrays = {
      'tokens': completions.tokens,
      'mask': completions.mask,
      'logprobs': completions.logprobs,
      'truncated': completions.truncated,
      'rewards': np.array([r.reward or 0.0 for r in results], np.float32),
      'valid': np.array([r.status == 'ok' for r in results]),
  }
  if completions.expert_ids is not None:
    arrays['expert_ids'] = completions.expert_ids
  arrays = {name: np.asarray(x) for name, x in arrays.items()}
  return [
      {name: x[i : i + cfg.group_size] for name, x in arrays.items()}
      for i in range(0, len(rows), cfg.group_size)
  ]


def _informative(group):
  live = group['rewards'][group['valid']]
  return live.size > 1 and live.max() != live.min()


def _reward_counts(groups):
  reward = np.concatenate([group['rewards'] for group in groups])
  valid = np.concatenate([group['valid'] for group in groups])
  return {
      'reward': float(reward[valid].mean()) if valid.any() else 0.0,
      'reward_failures': int((~valid).sum()),
  }


def stack_groups(
    cfg: RolloutConfig,
    task: tasks.Task,
    groups: Sequence[Group],
    versions: Sequence[int],
) -> tuple[types.Rollout, dict[str, float]]:
  """Returns the rollout of some groups, and means of their lengths.

  Args:
    cfg: sizes and sampling, and what of a completion is trained.
    task: knows the longest answer.
    groups: their rows may differ in length.
    versions: learner steps of the weights that sampled each group.
  """
  length = max(group['tokens'].shape[1] for group in groups)

  def join(name):
    parts = [group[name] for group in groups]
    if parts[0].ndim > 1:
      pad = lambda x: [(0, 0), (0, length - x.shape[1])]
      parts = [np.pad(x, pad(x) + [(0, 0)] * (x.ndim - 2)) for x in parts]
    return np.concatenate(parts)

  mask, reward, valid = join('mask'), join('rewards'), join('valid')
  truncated = join('truncated')
  counts = {
      'truncated_fraction': float(truncated.mean()),
      'response_length': float(mask.sum(axis=1).mean()),
  }
  if cfg.overlong_tokens:
    reward = reward + np.asarray(
        advantages.overlong_penalty(
            jnp.asarray(mask.sum(axis=1)),
            task.max_answer_tokens,
            cfg.overlong_tokens,
        )
    )
  trained = mask & valid[:, None]
  if cfg.mask_truncated:
    trained &= ~truncated[:, None]
  experts = join('expert_ids') if 'expert_ids' in groups[0] else None
  ids = np.arange(len(groups), dtype=np.int32)
  version = np.repeat(np.asarray(versions), cfg.group_size)[:, None]
  rollout = types.Rollout(
      tokens=jnp.asarray(join('tokens')),
      completion_mask=jnp.asarray(trained),
      sampler_logprobs=jnp.asarray(join('logprobs')),
      temperature=jnp.float32(cfg.temperature),
      rewards=jnp.asarray(reward, jnp.float32),
      group=jnp.asarray(np.repeat(ids, cfg.group_size)),
      version=jnp.asarray(np.broadcast_to(version, mask.shape), jnp.int32),
      valid=jnp.asarray(valid),
      expert_ids=None if experts is None else jnp.asarray(experts),
  )
  return rollout, counts
