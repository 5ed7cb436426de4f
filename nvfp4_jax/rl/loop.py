"""The synchronous loop: sample, reward, advantage, update, sync.

Everything random is derived from (seed, step), and problems from a cursor, so
that a run that was killed goes on exactly as if it had not been.
"""

from collections.abc import Sequence
import dataclasses
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import diagnostics
from nvfp4_jax import exact
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import sampler
from nvfp4_jax import tasks
from nvfp4_jax.models import config as model_config
from nvfp4_jax.rl import advantages
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import types

type Row = dict[str, float | int]


@dataclasses.dataclass(frozen=True)
class LoopConfig:
  """One training run; static.

  Attributes:
    model: the model.
    optimizer: the optimizer.
    grpo: the loss.
    prompts_per_step: problems of a rollout.
    group_size: completions of each problem.
    updates_per_rollout: optimizer updates on each rollout, each on all of it.
    temperature: of sampling, and of the learner's log-probs.
    seed: of sampling.
  """

  model: model_config.ModelConfig
  optimizer: learner.OptimizerConfig
  grpo: learner.GRPOConfig
  prompts_per_step: int
  group_size: int
  updates_per_rollout: int = 1
  temperature: float = 1.0
  seed: int = 0

  def __post_init__(self):
    for name in ('prompts_per_step', 'group_size', 'updates_per_rollout'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} {getattr(self, name)} is below 1.')
    if not self.temperature > 0:
      raise ValueError(f'temperature {self.temperature} is not positive.')


class Quantizers(NamedTuple):
  """The quantizers of both sides; one object where they are one policy."""

  learner: policy.Quantizer
  sampler: policy.Quantizer


class Synced(NamedTuple):
  """The masters, quantized once for both sides.

  Attributes:
    learner: what the learner takes as `quantized`.
    sampler: the tree that the sampler runs.
  """

  learner: policy.ParamTree
  sampler: policy.ParamTree


def sync(quantizers: Quantizers, params: policy.ParamTree) -> Synced:
  """Quantizes the masters; both sides share the result where policies agree."""
  learned = policy.quantize_params(quantizers.learner, params)
  if quantizers.learner == quantizers.sampler:
    return Synced(learned, learned)
  return Synced(learned, policy.quantize_params(quantizers.sampler, params))


def weight_stats(
    params: policy.ParamTree, tree: policy.ParamTree
) -> dict[str, Row]:
  """Returns `diagnostics.QuantizationStats` of every quantized weight by path.

  Args:
    params: the masters, in segments.
    tree: `quantize_params` of them.
  """
  rows = {}
  start = 0
  for segment, quantized in zip(params['layers'], tree['layers'], strict=True):
    for name, q in quantized.items():
      if isinstance(q, qtensor.QTensor):
        stats = dataclasses.asdict(_layer_stats(segment[name], q))
        for i, values in enumerate(zip(*stats.values(), strict=True)):
          values = dict(zip(stats, map(float, values), strict=True))
          rows[f'layers.{start + i}.{name}'] = values
    start += next(iter(segment.values())).shape[0]
  return rows


@jax.jit
def _layer_stats(masters, q):
  """Returns the statistics of each of the stacked layers."""
  return jax.vmap(diagnostics.quantization_stats)(exact.to_bfloat16(masters), q)


def rollout(
    cfg: LoopConfig,
    task: tasks.Task,
    quantizer: policy.Quantizer,
    params: policy.ParamTree,
    cursor: int,
    version: int,
    step: int,
) -> tuple[types.Rollout, sampler.Completions]:
  """Samples a group of completions for the next problems and rewards them.

  Args:
    cfg: the run.
    task: makes problems and rewards.
    quantizer: the sampler's.
    params: `Synced.sampler`.
    cursor: index of the first training problem.
    version: learner step of the weights.
    step: index of the rollout, for randomness.
  """
  problems = [
      task.problem('train', cursor + i) for i in range(cfg.prompts_per_step)
  ]
  rows = [problem for problem in problems for _ in range(cfg.group_size)]
  completions = _complete(cfg, task, quantizer, params, rows, step, None)
  shape = completions.tokens.shape
  return (
      types.Rollout(
          tokens=completions.tokens,
          completion_mask=completions.mask,
          sampler_logprobs=completions.logprobs,
          temperature=jnp.float32(cfg.temperature),
          rewards=jnp.asarray(_rewards(task, rows, completions), jnp.float32),
          group=jnp.repeat(
              jnp.arange(cfg.prompts_per_step, dtype=jnp.int32), cfg.group_size
          ),
          version=jnp.full(shape, version, jnp.int32),
      ),
      completions,
  )


def train_rollout(
    cfg: LoopConfig,
    task: tasks.Task,
    quantizers: Quantizers,
    reference: policy.ParamTree,
    state: types.TrainState,
    synced: Synced,
    step: int,
) -> tuple[types.TrainState, Synced, Row]:
  """Samples one rollout and makes the updates on it.

  Args:
    cfg: the run.
    task: makes problems and rewards.
    quantizers: of both sides.
    reference: bfloat16 tree of the reference policy, for `ref_kl`.
    state: donated.
    synced: `sync(quantizers, state.params)`.
    step: index of the rollout; the data cursor follows from it.

  Returns:
    State and synced weights after the updates, and the row of metrics. Means
    are over updates, but for the mismatch, which is that of the first.
  """
  start = time.perf_counter()
  version = int(state.step)
  cursor = step * cfg.prompts_per_step
  rolled, completions = rollout(
      cfg, task, quantizers.sampler, synced.sampler, cursor, version, step
  )
  old_logprobs = None
  if cfg.updates_per_rollout > 1:
    old_logprobs = learner.logprobs(
        cfg.model,
        state.params,
        quantizers.learner,
        synced.learner,
        rolled.tokens,
        cfg.temperature,
    )
  batch = types.Batch(
      rollout=rolled,
      advantages=advantages.group_relative(rolled.rewards, rolled.group),
      old_logprobs=old_logprobs,
      ref_logprobs=learner.logprobs(
          cfg.model,
          reference,
          policy.Quantizer(policy.BF16),
          reference,
          rolled.tokens,
          cfg.temperature,
      ),
  )
  history = []
  for _ in range(cfg.updates_per_rollout):
    staleness = int(state.step) - version
    state, metrics = learner.train_step(
        cfg.model,
        cfg.optimizer,
        cfg.grpo,
        state,
        quantizers.learner,
        synced.learner,
        batch,
    )
    synced = sync(quantizers, state.params)
    row = {name: float(value) for name, value in metrics.items()}
    history.append({**row, 'staleness': staleness})
  seconds = time.perf_counter() - start
  return state, synced, _row(history, rolled, completions, step, seconds)


def evaluate(
    cfg: LoopConfig,
    task: tasks.Task,
    quantizer: policy.Quantizer,
    params: policy.ParamTree,
    problems: int,
) -> Row:
  """Returns exact-match accuracy on the first held-out problems.

  Batches have the shape of a rollout, so that nothing new is compiled; the
  number of problems is rounded up to full batches.

  Args:
    cfg: the run.
    task: makes problems and rewards.
    quantizer: the sampler's.
    params: `Synced.sampler`.
    problems: how many.

  Returns:
    `pass_at_1`, one sample each at the run's temperature, and
    `greedy_accuracy`.
  """
  batch = cfg.prompts_per_step * cfg.group_size
  sampled, greedy = [], []
  for start in range(0, problems, batch):
    rows = [task.problem('held_out', start + i) for i in range(batch)]
    for rewards, temperature in ((sampled, None), (greedy, 0.0)):
      completions = _complete(
          cfg, task, quantizer, params, rows, -1 - start, temperature
      )
      rewards.extend(_rewards(task, rows, completions))
  return {
      'pass_at_1': float(np.mean(sampled)),
      'greedy_accuracy': float(np.mean(greedy)),
  }


def _complete(cfg, task, quantizer, params, problems, step, temperature):
  prompts, lengths = sampler.pad_prompts([p.prompt for p in problems])
  if temperature is None:
    temperature = cfg.temperature
  # Steps are rollouts where they count up from 0, evaluations where negative.
  key = jax.random.fold_in(jax.random.key(cfg.seed), np.uint32(step % 2**32))
  return sampler.generate(
      cfg.model,
      params,
      quantizer,
      prompts,
      lengths,
      key,
      sampler.SampleConfig(task.max_answer_tokens, (task.eos,), temperature),
  )


def _rewards(
    task: tasks.Task,
    problems: Sequence[tasks.arithmetic.Problem],
    completions: sampler.Completions,
) -> list[float]:
  tokens, mask = np.asarray(completions.tokens), np.asarray(completions.mask)
  return [
      task.reward(problem, row[live].tolist())
      for problem, row, live in zip(problems, tokens, mask, strict=True)
  ]


def _row(history, rolled, completions, step, seconds):
  mean = lambda name: float(np.mean([row[name] for row in history]))
  trained = int(np.sum(np.asarray(rolled.completion_mask)))
  first = history[0]
  return {
      'step': step,
      'reward': float(np.mean(np.asarray(rolled.rewards))),
      'grad_norm': mean('grad_norm'),
      'entropy': mean('entropy'),
      'mismatch_abs_logprob': first['mismatch_abs_logprob'],
      'mismatch_kl': first['mismatch_kl'],
      'ref_kl': mean('ref_kl'),
      'clip_fraction': mean('clip_fraction'),
      'tis_weight_mean': mean('tis_weight_mean'),
      'staleness': mean('staleness'),
      'response_length': trained / rolled.rewards.size,
      'truncated_fraction': float(np.mean(np.asarray(completions.truncated))),
      'tokens_per_second': trained / seconds,
      'seconds': seconds,
  }
