"""Whole GRPO runs as one program: scanned over steps, vmapped over lanes.

A lane is the run that `nvfp4_jax.rl.loop` makes step by step: the same
quantizer, sampler, losses, optimizer and randomness, with problems made ahead
and rewards computed from token ids. What differs between lanes is data; what
is static is one program. Precision policies are static.

On CPU a rollout, its log-probs and its gradient have the bits of the same
rollout alone. The optimizer's update differs in last bits: XLA divides by one
scalar (clipping, the bias correction of Adam) in another way than by a scalar
for each lane. After some updates a sampled token differs, and from there the
two are different runs of one kind.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import policy
from nvfp4_jax import sampler
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import advantages
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import loop
from nvfp4_jax.rl import rollouts
from nvfp4_jax.rl import types
from nvfp4_jax.tasks import arithmetic

METRICS = (
    'reward',
    'grad_norm',
    'mismatch_abs_logprob',
    'mismatch_kl',
    'ref_kl',
    'ref_kl_median',
    'entropy',
    'clip_fraction',
    'skipped',
)
ACCURACIES = ('pass_at_1', 'greedy_accuracy')

_BF16 = policy.Quantizer(policy.BF16)


@dataclasses.dataclass(frozen=True)
class Program:
  """What all lanes of a program share; static.

  Attributes:
    model: the model.
    rollout: sizes and temperature; nothing that needs the host.
    max_answer_tokens: of the task.
    eos_ids: of the task.
    grpo: what is learned from a rollout.
    learner: precision policy of the learner.
    sampler: precision policy of the sampler.

  Raises:
    ValueError: an option of the rollout that is not computed in the program.
  """

  model: model_config.ModelConfig
  rollout: rollouts.RolloutConfig
  max_answer_tokens: int
  eos_ids: tuple[int, ...]
  grpo: learner.GRPOConfig
  learner: policy.PrecisionPolicy
  sampler: policy.PrecisionPolicy

  def __post_init__(self):
    plain = rollouts.RolloutConfig(
        self.rollout.prompts_per_step,
        self.rollout.group_size,
        self.rollout.temperature,
    )
    if self.rollout != plain:
      raise ValueError(
          f'{self.rollout}: lanes have sizes and a temperature only.'
      )

  @property
  def quantizers(self) -> loop.Quantizers:
    """The quantizers of both sides."""
    return loop.Quantizers(
        policy.Quantizer(self.learner), policy.Quantizer(self.sampler)
    )

  @property
  def segments(self) -> tuple[int, ...]:
    """How its layers are stacked."""
    paths = transformer.param_paths(self.model)
    return policy.segments((self.learner, self.sampler), paths)

  @property
  def sample(self) -> sampler.SampleConfig:
    """How completions are sampled."""
    return sampler.SampleConfig(self.max_answer_tokens, self.eos_ids)


class Lane(NamedTuple):
  """What a run has of its own, besides its state.

  Attributes:
    seed: `[2]` uint32, `key_data` of the key of the sampling seed.
    optimizer: learning rate and clipping.
    reference: the start in bfloat16, whose KL is `ref_kl`.
  """

  seed: jax.Array
  optimizer: learner.OptimizerConfig
  reference: policy.ParamTree


class Problems(NamedTuple):
  """Problems as arrays; leading axes are free.

  Attributes:
    prompts: `[B, P]` int32, padded on the right.
    lengths: `[B]` int32.
    tokens: `[B, T]` int32, the prompt with its right completion, padded.
    mask: `[B, T]` bool, the right completion.
  """

  prompts: np.ndarray | jax.Array
  lengths: np.ndarray | jax.Array
  tokens: np.ndarray | jax.Array
  mask: np.ndarray | jax.Array


def problems(
    task: arithmetic.Arithmetic, split: str, shape: Sequence[int]
) -> Problems:
  """Returns the first problems of a split, in the order of the cursor.

  Args:
    task: has one right answer to each problem.
    split: 'train' or 'held_out'.
    shape: leading axes; the last one counts the problems of a batch.
  """
  items = [task.problem(split, i) for i in range(int(np.prod(shape)))]
  prompts, lengths = sampler.pad_prompts([item.prompt for item in items])
  size = prompts.shape[1] + task.max_answer_tokens
  tokens = np.full((len(items), size), sampler.PAD, np.int32)
  for row, item in zip(tokens, items, strict=True):
    right = (*item.prompt, *item.answer)
    row[: len(right)] = right
  ends = lengths + np.array([len(item.answer) for item in items])
  at = np.arange(size)
  mask = (at >= lengths[:, None]) & (at < ends[:, None])
  arrays = Problems(prompts, lengths, tokens, mask)
  return Problems(*(x.reshape(*shape, *x.shape[1:]) for x in arrays))


def rewards(completions: sampler.Completions, rows: Problems) -> jax.Array:
  """Returns 1.0 for exactly the right completion, else 0.0; float32 `[B]`.

  Equal to `task.reward` of the completion's token ids: `Completions` have no
  gaps, so that tokens and mask are right where the completion is.
  """
  right = (completions.tokens == rows.tokens) & (completions.mask == rows.mask)
  return jnp.all(right, axis=1).astype(jnp.float32)


def start(
    program: Program,
    seeds: jax.Array,
    optimizers: learner.OptimizerConfig,
    masters: policy.ParamTree,
    index: jax.Array,
) -> tuple[Lane, types.TrainState]:
  """Returns lanes and their states at step 0.

  Args:
    program: what they share.
    seeds: `[R, 2]` uint32, `key_data` of each lane's sampling seed.
    optimizers: with leaves `[R]`.
    masters: stacked into the segments of the program, `[S, ...]` of S starts.
    index: `[R]` int32, the start of each lane.
  """
  del program
  masters = jax.tree.map(lambda leaf: leaf[index], masters)
  reference = jax.vmap(functools.partial(policy.quantize_params, _BF16))
  states = jax.vmap(learner.init_state)(masters, optimizers)
  return Lane(seeds, optimizers, reference(masters)), states


def advance(
    program: Program,
    lanes: Lane,
    states: types.TrainState,
    batches: Problems,
    steps: jax.Array,
) -> tuple[types.TrainState, dict[str, jax.Array]]:
  """Returns the states after some rollouts, and the metrics of each of them.

  Args:
    program: what the lanes share.
    lanes: `[R]` in front of every leaf.
    states: likewise.
    batches: the problems of each step, `[steps, prompts]`.
    steps: `[steps]` int32, the index of each rollout.

  Returns:
    The states, and `METRICS`, each `[R, steps]` float32. As in
    `experiments.grpo`, an update that is not finite is skipped; it is counted,
    and the lane goes on however many there are.
  """

  def run(lane, state):
    body = lambda state, batch: _step(program, lane, state, *batch)
    return lax.scan(body, state, (batches, steps))

  states, metrics = jax.vmap(run)(lanes, states)
  return states, metrics


def evaluate(
    program: Program,
    lanes: Lane,
    states: types.TrainState,
    batches: Problems,
) -> dict[str, jax.Array]:
  """Returns `ACCURACIES` on held-out problems, each `[R]` float32.

  They are those of `evaluation.evaluate` with one sample.

  Args:
    program: what the lanes share.
    lanes: `[R]` in front of every leaf.
    states: likewise.
    batches: held-out problems, `[batches, prompts * group size]`.
  """
  count, size = batches.lengths.shape
  folds = np.uint32(-1 - size * np.arange(count) & 0xFFFFFFFF)

  def run(lane, state):
    quantizer = program.quantizers.sampler
    tree = policy.quantize_params(quantizer, state.params)

    def accuracy(batch):
      rows, fold, temperature = batch
      completions = sampler.generate_at(
          program.model,
          tree,
          quantizer,
          rows.prompts,
          rows.lengths,
          _fold(lane, fold),
          temperature,
          program.sample,
      )
      return jnp.mean(rewards(completions, rows))

    twice = lambda x: jnp.concatenate([jnp.asarray(x)] * 2)
    temperatures = np.array([program.rollout.temperature, 0.0], np.float32)
    means = lax.map(
        accuracy,
        (
            Problems(*map(twice, batches)),
            twice(folds),
            np.repeat(temperatures, count),
        ),
    )
    means = jnp.mean(means.reshape(2, count), axis=1)
    return dict(zip(ACCURACIES, means, strict=True))

  return jax.vmap(run)(lanes, states)


def _fold(lane, number):
  """Returns what `rollouts.step_key` does, for a step that may be traced."""
  return jax.random.fold_in(jax.random.wrap_key_data(lane.seed), number)


def _step(
    program, lane, state, batch, step
) -> tuple[types.TrainState, dict[str, jax.Array]]:
  """Returns the state after one rollout and the update on it, and metrics."""
  cfg, quantizers = program.rollout, program.quantizers
  synced = loop.sync(quantizers, state.params)
  rows = Problems(*(jnp.repeat(x, cfg.group_size, axis=0) for x in batch))
  completions = sampler.generate_at(
      program.model,
      synced.sampler,
      quantizers.sampler,
      rows.prompts,
      rows.lengths,
      _fold(lane, step),
      jnp.float32(cfg.temperature),
      program.sample,
  )
  group = np.repeat(np.arange(cfg.prompts_per_step), cfg.group_size)
  rollout = types.Rollout(
      tokens=completions.tokens,
      completion_mask=completions.mask,
      sampler_logprobs=completions.logprobs,
      temperature=jnp.float32(cfg.temperature),
      rewards=rewards(completions, rows),
      group=jnp.asarray(group, jnp.int32),
      version=jnp.broadcast_to(state.step, completions.mask.shape),
      valid=jnp.ones(group.shape, bool),
  )
  reference = learner.logprobs(
      program.model,
      lane.reference,
      _BF16,
      lane.reference,
      rollout.tokens,
      cfg.temperature,
  )
  batch = types.Batch(
      rollout=rollout,
      advantages=advantages.compute(
          program.grpo.advantage,
          rollout.rewards,
          rollout.group,
          valid=rollout.valid,
          mask=rollout.completion_mask,
      ),
      old_logprobs=None,
      ref_logprobs=reference,
  )
  # Each part is compiled as if it stood alone.
  synced, batch = lax.optimization_barrier((synced, batch))
  state, metrics = learner.train_step(
      program.model,
      lane.optimizer,
      program.grpo,
      state,
      quantizers.learner,
      synced.learner,
      batch,
  )
  metrics['reward'] = jnp.mean(rollout.rewards)
  state = lax.optimization_barrier(state)
  return state, {name: metrics[name] for name in METRICS}
