"""The synchronous loop: sample, reward, advantage, update, sync."""

from collections.abc import Mapping
import dataclasses
import time
from typing import NamedTuple

import jax
import numpy as np

from nvfp4_jax import diagnostics
from nvfp4_jax import exact
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import tasks
from nvfp4_jax.models import config as model_config
from nvfp4_jax.rl import advantages
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import rollouts
from nvfp4_jax.rl import types

type Row = dict[str, float | int]


@dataclasses.dataclass(frozen=True)
class LoopConfig:
  """One training run; static.

  Attributes:
    model: the model.
    rollout: how rollouts are made.
    optimizer: the optimizer.
    grpo: what is learned from them.
    memory: how updates are computed.
    updates_per_rollout: optimizer updates on each rollout, each on all of it.
    seed: of sampling.
  """

  model: model_config.ModelConfig
  rollout: rollouts.RolloutConfig
  optimizer: learner.OptimizerConfig
  grpo: learner.GRPOConfig = learner.GRPOConfig()
  memory: learner.MemoryConfig = learner.MemoryConfig()
  updates_per_rollout: int = 1
  seed: int = 0

  def __post_init__(self):
    if self.updates_per_rollout < 1:
      raise ValueError(
          f'updates_per_rollout {self.updates_per_rollout} is below 1.'
      )
    if self.rollout.replay_experts and not self.model.num_experts:
      raise ValueError('replay_experts: the model has no experts.')


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
  if quantizers.learner.policy == quantizers.sampler.policy:
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


def train_rollout(
    cfg: LoopConfig,
    task: tasks.Task,
    quantizers: Quantizers,
    references: Mapping[str, policy.ParamTree],
    state: types.TrainState,
    synced: Synced,
    cursor: int,
    step: int,
    *,
    score: rollouts.Score | None = None,
) -> tuple[types.TrainState, Synced, int, Row]:
  """Samples one rollout and makes the updates on it.

  Args:
    cfg: the run.
    task: makes problems and rewards.
    quantizers: of both sides.
    references: trees of the reference policy: `bf16` in bfloat16, whose KL is
      `ref_kl` and may be a term of the loss, and `quantized` as the learner
      first ran it, whose KL is `ref_kl_quantized`; the latter may be absent.
    state: donated.
    synced: `sync(quantizers, state.params)`.
    cursor: index of the next problem.
    step: index of the rollout, for randomness.
    score: see `rollouts.collect`.

  Returns:
    State and synced weights after the updates, the cursor, and the row of
    metrics. Means are over updates, but for the mismatch, which is that of the
    first.
  """
  start = time.perf_counter()
  collected = rollouts.collect(
      cfg.model,
      cfg.rollout,
      task,
      quantizers.sampler,
      synced.sampler,
      cursor=cursor,
      version=int(state.step),
      step=step,
      seed=cfg.seed,
      score=score,
  )
  rolled = collected.rollout
  state, synced, metrics = train_on(
      cfg, quantizers, references, state, synced, rolled
  )
  trained = int(np.sum(np.asarray(rolled.completion_mask)))
  seconds = time.perf_counter() - start
  row = {
      'step': step,
      **collected.counts,
      **metrics,
      'problems': collected.cursor,
      'tokens_per_second': trained / seconds,
      'seconds': seconds,
  }
  return state, synced, collected.cursor, row


def train_on(
    cfg: LoopConfig,
    quantizers: Quantizers,
    references: Mapping[str, policy.ParamTree],
    state: types.TrainState,
    synced: Synced,
    rolled: types.Rollout,
) -> tuple[types.TrainState, Synced, Row]:
  """Makes the updates on a rollout, of these or of earlier weights.

  Args:
    cfg: the run.
    quantizers: of both sides.
    references: see `train_rollout`.
    state: donated.
    synced: `sync(quantizers, state.params)`.
    rolled: the rollout.

  Returns:
    State and synced weights after the updates, and metrics: means over updates,
    but for the mismatch, which is that of the first. `staleness` is the mean
    over trained tokens of how many updates older their weights were.
  """
  batch = types.Batch(
      rollout=rolled,
      advantages=advantages.compute(
          cfg.grpo.advantage,
          rolled.rewards,
          rolled.group,
          valid=rolled.valid,
          mask=rolled.completion_mask,
      ),
      old_logprobs=None,
      ref_logprobs=_logprobs(
          cfg, references['bf16'], policy.Quantizer(policy.BF16), None, rolled
      ),
  )
  if cfg.updates_per_rollout > 1 or cfg.memory.micro_batches > 1:
    old = _logprobs(
        cfg, state.params, quantizers.learner, synced.learner, rolled
    )
    batch = dataclasses.replace(batch, old_logprobs=old)
  history, extra = [], _rollout_metrics(cfg, quantizers, references, batch)
  for _ in range(cfg.updates_per_rollout):
    staleness = _staleness(int(state.step), rolled)
    state, metrics = learner.train_step(
        cfg.model,
        cfg.optimizer,
        cfg.grpo,
        state,
        quantizers.learner,
        synced.learner,
        batch,
        memory=cfg.memory,
    )
    synced = sync(quantizers, state.params)
    row = _as_row(metrics)
    history.append({**row, 'staleness': staleness})
  return state, synced, _merge(history) | extra


def _as_row(metrics):
  """Returns floats of arrays, which come from the device all at once."""
  return {k: float(value) for k, value in jax.device_get(metrics).items()}


def _staleness(step, rolled):
  """Returns by how many updates trained tokens are older on average, or 0."""
  mask = np.asarray(rolled.completion_mask)
  lags = step - np.asarray(rolled.version)[mask]
  return float(np.mean(lags)) if lags.size else 0.0


def _logprobs(cfg, params, quantizer, quantized, rolled):
  return learner.logprobs(
      cfg.model,
      params,
      quantizer,
      params if quantized is None else quantized,
      rolled.tokens,
      cfg.rollout.temperature,
      expert_ids=rolled.expert_ids,
      micro_batches=cfg.memory.micro_batches,
  )


def _rollout_metrics(cfg, quantizers, references, batch):
  """Returns what is said of a rollout before it is learned from."""
  rolled = batch.rollout
  groups = advantages.group_metrics(rolled.rewards, rolled.group, rolled.valid)
  row = _as_row(groups)
  if 'quantized' in references:
    tree = references['quantized']
    row['ref_kl_quantized'] = float(
        diagnostics.kl_k3(
            _logprobs(cfg, tree, quantizers.learner, None, rolled),
            rolled.sampler_logprobs,
            rolled.completion_mask,
        )
    )
  return row


def _merge(history):
  """Returns the mean of each metric over the updates on a rollout."""
  first = history[0]
  return {
      name: first[name]
      if name.startswith('mismatch')
      else float(np.mean([row[name] for row in history]))
      for name in first
  }
