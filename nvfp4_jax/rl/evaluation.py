"""Evaluation on held-out problems."""

import dataclasses

import jax
import numpy as np

from nvfp4_jax import policy
from nvfp4_jax import tasks
from nvfp4_jax.models import config as model_config
from nvfp4_jax.rl import metrics
from nvfp4_jax.rl import rollouts


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """How a policy is evaluated; static.

  Attributes:
    problems: held-out problems; rounded up to whole batches.
    samples: completions of each at the run's temperature.
  """

  problems: int = 256
  samples: int = 1

  def __post_init__(self):
    for name in ('problems', 'samples'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} {getattr(self, name)} is below 1.')


def evaluate(
    model: model_config.ModelConfig,
    rollout: rollouts.RolloutConfig,
    cfg: EvalConfig,
    task: tasks.Task,
    quantizer: policy.Quantizer,
    params: policy.ParamTree,
    *,
    seed: int,
    score: rollouts.Score | None = None,
) -> dict[str, float]:
  """Returns accuracy on the first held-out problems.

  Batches have the shape of a rollout, so that nothing new is compiled.

  Args:
    model: the model.
    rollout: batch size and temperature.
    cfg: how many problems and samples.
    task: makes problems and rewards.
    quantizer: the sampler's.
    params: the tree that the sampler runs.
    seed: of sampling.
    score: see `rollouts.collect`.

  Returns:
    `pass_at_1` and, with more samples, `pass_at_K` (unbiased) and `avg_at_K`
    for K = samples, where a reward of 1 is a pass; `greedy_accuracy`; and
    `eval_failures`, rewards that could not be had and count as 0.
  """
  rollout = dataclasses.replace(rollout, replay_experts=False)
  batch = rollout.prompts_per_step * rollout.group_size
  sampled, greedy, failures = [], [], 0
  for start in range(0, cfg.problems, batch):
    rows = [task.problem('held_out', start + i) for i in range(batch)]
    key = rollouts.step_key(seed, -1 - start)
    draws = []
    for sample in range(cfg.samples + 1):
      is_greedy = sample == cfg.samples
      completions = rollouts.complete(
          model,
          rollout,
          task,
          quantizer,
          params,
          rows,
          jax.random.fold_in(key, sample) if sample > 0 else key,
          0.0 if is_greedy else rollout.temperature,
      )
      results = rollouts.score_completions(task, rows, completions, score)
      failures += sum(result.status != 'ok' for result in results)
      reward = [result.reward or 0.0 for result in results]
      (greedy.extend if is_greedy else draws.append)(reward)
    sampled.extend(zip(*draws, strict=True))
  table = np.array(sampled)
  row = {
      'pass_at_1': float(table.mean()),
      'greedy_accuracy': float(np.mean(greedy)),
      'eval_failures': failures,
  }
  if cfg.samples > 1:
    k = cfg.samples
    passed = (table == 1.0).sum(axis=1)
    row[f'pass_at_{k}'] = float(metrics.pass_at_k(k, passed, k).mean())
    row[f'avg_at_{k}'] = float(metrics.avg_at_k(table, k))
  return row
