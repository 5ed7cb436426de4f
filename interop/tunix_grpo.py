"""Times a whole GRPO step of ours beside one of google-tunix.

  python interop/tunix_grpo.py [--out results/tunix/grpo_step.jsonl]

A step is rollout, rewards, update and sync of the weights, with the metrics
that either side computes by default. Both sides run in this process, on the
same cores, in turn: a block of steps of one, a block of the next. `make tunix`
makes an environment that has both.

The workload is one and the same: a dense Qwen3 of 3.67 M parameters, the same
initial weights and prompts, 2 prompts x 4 completions, 32 tokens in and 64 out
(nothing ends a completion early), temperature 1, no KL penalty, one update by
AdamW behind a global norm clip, as `nvfp4_jax.rl.learner` makes it. Rewards are
random, so that gradients are not zero. Where both compute in float32, their
log-probs are compared before anything is reported.

By default, ours computes more: log-probs of the samples, those of the reference
policy, and all metrics of a row. tunix has its sampler and its trainer share
the weights, so that its sync is free.

OUT receives a row for each side, added to what is there. `ratio` is our tokens
a second by tunix's: of the medians of all steps, and of each block.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import queue
import statistics
import threading
import time
from typing import Any, Protocol

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.models.qwen3 import model as tunix_qwen3
from tunix.rl import common as tunix_common
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import loop
from nvfp4_jax.rl import rollouts

_PACKAGES = ('nvfp4-jax', 'google-tunix', 'jax', 'jaxlib', 'flax', 'optax')
_MODEL = model_config.ModelConfig(
    vocab_size=2048,
    num_layers=4,
    embed_dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=768,
    rope_theta=1e6,
    tie_embeddings=True,
    dtype='float32',
)
_PROMPTS, _GROUP = 2, 4
_PROMPT_TOKENS, _NEW_TOKENS = 32, 64
_TOKENS = _PROMPTS * _GROUP * _NEW_TOKENS  # generated in a step
_OPTIMIZER = learner.OptimizerConfig(learning_rate=1e-5)
# Ids beyond the vocabulary are never sampled.
_PAD, _EOS = _MODEL.vocab_size, _MODEL.vocab_size + 1
_STD = 0.02  # of the weights; logits are small, and completions vary
_TOLERANCE = 1e-4  # of log-probs, in nats

# Dtype of activations, recipe.
_OURS = (
    ('float32', 'bf16'),  # no quantizer: float32 throughout, as tunix
    ('bfloat16', 'bf16'),
    ('bfloat16', 'nvfp4_final'),
)


class Side(Protocol):
  """What is timed.

  Attributes:
    name: of the side.
    labels: what its rows say of it.
  """

  name: str
  labels: Mapping[str, Any]

  def step(self) -> None:
    """Makes one GRPO step, and waits for all of it."""

  def grad_norm(self) -> float:
    """Returns the norm of the last gradient."""


@dataclasses.dataclass(frozen=True)
class Problem:
  """A prompt without an answer."""

  prompt: list[int]


class RandomTask:
  """Random prompts and random rewards; a `tasks.Task`."""

  vocab_size = _MODEL.vocab_size
  eos_ids = ()
  max_answer_tokens = _NEW_TOKENS

  def __init__(self):
    self._rewards = np.random.default_rng(0)

  def problem(self, split: str, index: int) -> Problem:
    """Returns the index-th prompt."""
    del split
    rng = np.random.default_rng(index)
    return Problem(rng.integers(self.vocab_size, size=_PROMPT_TOKENS).tolist())

  def reward(self, problem: Any, completion: Sequence[Any]) -> float:
    """Returns a random number for a completion of the right length."""
    del problem
    if len(completion) != _NEW_TOKENS:
      raise ValueError(f'A completion has {len(completion)} tokens.')
    return float(self._rewards.normal())


def initial_params() -> policy.ParamTree:
  """Returns the per-layer masters that all sides start from."""
  params = transformer.init_params(jax.random.key(0), _MODEL)
  rng = np.random.default_rng(0)
  normal = lambda shape: _STD * rng.standard_normal(shape, np.float32)
  return jax.tree.map(
      lambda x: normal(x.shape) if x.ndim > 1 else np.asarray(x), params
  )


class Ours:
  """Steps of `experiments.grpo`."""

  def __init__(self, params: policy.ParamTree, dtype: str, recipe_name: str):
    recipe = recipes.get(recipe_name)
    self.name = f'nvfp4_jax {dtype} {recipe_name}'
    self.labels = {'dtype': dtype, 'recipe': recipe_name}
    self._config = loop.LoopConfig(
        model=dataclasses.replace(_MODEL, dtype=dtype),
        rollout=rollouts.RolloutConfig(_PROMPTS, _GROUP),
        optimizer=_OPTIMIZER,
    )
    self._quantizers = loop.Quantizers(
        policy.Quantizer(recipe.learner), policy.Quantizer(recipe.sampler)
    )
    segments = policy.segments(
        (recipe.learner, recipe.sampler), transformer.param_paths(_MODEL)
    )
    params = transformer.stack(params, segments)
    bf16 = policy.Quantizer(policy.BF16)
    run = lambda q: policy.quantize_params(q, params, dtype=dtype)
    self._references = {'bf16': run(bf16)}
    if self._quantizers.learner.policy != bf16.policy:
      self._references['quantized'] = run(self._quantizers.learner)
    self._synced = loop.Synced(*map(run, self._quantizers))
    self._state = learner.init_state(params, _OPTIMIZER)
    self._task = RandomTask()
    self._steps = self._cursor = 0
    self.row: loop.Row = {}

  def step(self) -> None:
    """See `Side`."""
    self._state, self._synced, self._cursor, self.row = loop.train_rollout(
        self._config,
        self._task,
        self._quantizers,
        self._references,
        self._state,
        self._synced,
        self._cursor,
        self._steps,
    )
    jax.block_until_ready((self._state, self._synced))
    self._steps += 1

  def grad_norm(self) -> float:
    """See `Side`."""
    return self.row['grad_norm']


class Tunix:
  """Steps of tunix's GRPOLearner.

  It has a loop of its own, which asks an iterator for prompts. Here it runs in
  a thread, and the iterator lets it go on one step at a time.
  """

  def __init__(self, params: policy.ParamTree):
    self.name = 'tunix float32'
    self.labels = {'dtype': 'float32', 'recipe': ''}
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    mesh = jax.sharding.Mesh(devices, ('fsdp', 'tp'))
    roles = (
        rl_cluster.Role.ACTOR,
        rl_cluster.Role.REFERENCE,
        rl_cluster.Role.ROLLOUT,
    )
    cluster = rl_cluster.RLCluster(
        actor=tunix_model(params),
        tokenizer=NumberTokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=learner.make_optimizer(_OPTIMIZER),
                eval_every_n_steps=10**9,
                max_steps=10**9,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=_NEW_TOKENS,
                max_prompt_length=_PROMPT_TOKENS,
                kv_cache_size=_PROMPT_TOKENS + _NEW_TOKENS,
                temperature=1.0,
            ),
        ),
    )
    self._task = RandomTask()
    self._trainer = cluster.actor_trainer
    self._learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(num_generations=_GROUP, beta=0.0),
        reward_fns=self._reward,
    )
    self._todo: queue.Queue[bool] = queue.Queue()
    self._done: queue.Queue[BaseException | None] = queue.Queue()
    self._thread = threading.Thread(target=self._train)
    self._thread.start()
    self._wait()

  def step(self) -> None:
    """See `Side`."""
    self._todo.put(True)
    self._wait()

  def grad_norm(self) -> float:
    """See `Side`."""
    history = self._trainer.metrics_logger.get_metric_history(
        'actor', 'grad_norm', 'train'
    )
    return float(history[-1])

  def close(self) -> None:
    """Ends tunix's loop."""
    self._todo.put(False)
    self._thread.join()

  def _wait(self):
    if (error := self._done.get()) is not None:
      raise error

  def _train(self):
    try:
      self._learner.train(self._batches())
    except BaseException as error:
      self._done.put(error)

  def _batches(self) -> Iterator[dict[str, np.ndarray]]:
    """Yields prompts; tunix asks for them at the start of a step."""
    for first in range(0, 10**9, _PROMPTS):
      jax.block_until_ready(nnx.state(self._trainer.model))
      self._done.put(None)
      if not self._todo.get():
        return
      problems = [
          self._task.problem('train', first + i) for i in range(_PROMPTS)
      ]
      decode = NumberTokenizer().decode
      yield {'prompts': np.array([decode(p.prompt) for p in problems])}

  def _reward(self, prompts, completions, **kwargs):
    del kwargs
    return [
        self._task.reward(prompt, completion.split())
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


class NumberTokenizer:
  """Text is token ids in decimal, with spaces."""

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text."""
    return [int(word) for word in text.split()]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of some ids."""
    return ' '.join(map(str, ids))

  def bos_id(self) -> None:
    """Returns that there is no such token."""

  def eos_id(self) -> int:
    """Returns an id that is never sampled."""
    return _EOS

  def pad_id(self) -> int:
    """Returns an id that is never sampled."""
    return _PAD


def tunix_model(params: policy.ParamTree) -> tunix_qwen3.Qwen3:
  """Returns tunix's model with our per-layer masters.

  Raises:
    ValueError: it has a parameter that ours has not, or of another shape.
  """
  c = _MODEL
  config = tunix_qwen3.ModelConfig(
      num_layers=c.num_layers,
      vocab_size=c.vocab_size,
      embed_dim=c.embed_dim,
      hidden_dim=c.mlp_dim,
      num_heads=c.num_heads,
      head_dim=c.head_dim,
      num_kv_heads=c.num_kv_heads,
      rope_theta=int(c.rope_theta),
      norm_eps=c.norm_eps,
      use_tied_embedding=c.tie_embeddings,
      dtype=jnp.float32,
      param_dtype=jnp.float32,
  )
  model = tunix_qwen3.Qwen3(config, rngs=nnx.Rngs(0))
  ours = {
      ('embedder', 'input_embedding'): params['embed_tokens'],
      ('final_norm', 'w'): params['norm'],
  }
  for i, layer in enumerate(params['layers']):
    for name, value in layer.items():
      ours['layers', i, *_tunix_path(name)] = _tunix_layout(name, value)
  flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
  shapes = lambda tree: {path: x.shape for path, x in tree.items()}
  if shapes(flat) != shapes(ours):
    raise ValueError(f'tunix has {shapes(flat)}, we have {shapes(ours)}.')
  state = nnx.from_flat_state(
      {path: x.replace(jnp.asarray(ours[path])) for path, x in flat.items()}
  )
  nnx.update(model, state)
  return model


def _tunix_path(name):
  part, _, leaf = name.rpartition('.')
  if part == 'self_attn':
    return 'attn', leaf, 'w'
  return (part, leaf, 'kernel') if part else (leaf, 'w')


def _tunix_layout(name, value):
  """Returns a weight with its contracted axis first, heads on their own."""
  if value.ndim == 1:
    return value
  value = value.T
  if name == 'self_attn.o_proj':
    return value.reshape(-1, _MODEL.head_dim, value.shape[-1])
  if name.startswith('self_attn.'):
    return value.reshape(value.shape[0], -1, _MODEL.head_dim)
  return value


def logprob_difference(params: policy.ParamTree) -> float:
  """Returns how far both sides' float32 log-probs are apart at most."""
  shape = (_PROMPTS * _GROUP, _PROMPT_TOKENS + _NEW_TOKENS)
  tokens = jax.random.randint(jax.random.key(1), shape, 0, _MODEL.vocab_size)
  segments = policy.segments([policy.BF16], transformer.param_paths(_MODEL))
  masters = transformer.stack(params, segments)
  bf16 = policy.Quantizer(policy.BF16)  # the model's dtype, float32
  ours = learner.logprobs(_MODEL, masters, bf16, masters, tokens, 1.0)
  theirs = tunix_common.compute_per_token_logps(
      *nnx.split(tunix_model(params)),
      prompt_tokens=tokens[:, :_PROMPT_TOKENS],
      completion_tokens=tokens[:, _PROMPT_TOKENS:],
      pad_id=_PAD,
      eos_id=_EOS,
  )
  return float(np.abs(ours[:, _PROMPT_TOKENS:] - np.asarray(theirs)).max())


@dataclasses.dataclass
class Times:
  """Seconds of the steps of one side.

  Attributes:
    first: of the first step, which compiles.
    blocks: of the steps of each block.
    cpu: CPU seconds of the same steps, of all threads.
  """

  first: float = 0.0
  blocks: list[list[float]] = dataclasses.field(default_factory=list)
  cpu: list[list[float]] = dataclasses.field(default_factory=list)

  def run_block(self, side: Side, steps: int) -> None:
    """Times a block."""
    pairs = [_timed(side) for _ in range(steps)]
    self.blocks.append([wall for wall, _ in pairs])
    self.cpu.append([cpu for _, cpu in pairs])


def time_in_turn(
    sides: Sequence[Side], blocks: int, steps: int, warm_up: int
) -> list[Times]:
  """Returns the times of each side, which run block by block in turn."""
  times = [Times() for _ in sides]
  for side, of_side in zip(sides, times, strict=True):
    of_side.first, _ = _timed(side)
    for _ in range(warm_up):
      side.step()
    print(f'{side.name}: first step {of_side.first:.1f} s', flush=True)
  for i in range(blocks):
    for side, of_side in zip(sides, times, strict=True):
      of_side.run_block(side, steps)
      middle = statistics.median(of_side.blocks[-1])
      print(f'block {i + 1}/{blocks}  {side.name}: {middle:.3f} s', flush=True)
  return times


def _timed(side):
  wall, cpu = time.perf_counter(), time.process_time()
  side.step()
  return time.perf_counter() - wall, time.process_time() - cpu


def summarize(
    side: Side, times: Times, reference: Times, common: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the row of a side; `reference` holds tunix's times."""
  seconds, cpu = _middle(times.blocks), _middle(times.cpu)
  ratios = [
      statistics.median(theirs) / statistics.median(own)
      for theirs, own in zip(reference.blocks, times.blocks, strict=True)
  ]
  return {
      'side': side.name,
      **side.labels,
      'seconds': seconds,
      'tokens_per_second': _TOKENS / seconds,
      'ratio': _middle(reference.blocks) / seconds,
      'ratio_lowest_block': min(ratios),
      'ratio_highest_block': max(ratios),
      'cpu_seconds': cpu,
      'cpu_ratio': _middle(reference.cpu) / cpu,
      'first_step_seconds': times.first,
      'blocks': times.blocks,
      'grad_norm': side.grad_norm(),
      **common,
  }


def _middle(blocks):
  """Returns the median of all steps."""
  return statistics.median(x for block in blocks for x in block)


def main(arguments: Sequence[str] | None = None) -> None:
  """Times all sides, prints and writes their rows."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
      '--out',
      type=pathlib.Path,
      default=pathlib.Path('results/tunix/grpo_step.jsonl'),
  )
  parser.add_argument('--blocks', type=int, default=5)
  parser.add_argument('--steps', type=int, default=4, help='of a block')
  parser.add_argument('--warm-up', type=int, default=3, help='steps')
  flags = parser.parse_args(arguments)

  load = os.getloadavg()
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  cores = len(os.sched_getaffinity(0))
  print(f'{cores} cores, load {load}, {versions}', flush=True)
  params = initial_params()
  with contextlib.closing(Tunix(params)) as tunix:
    sides = [tunix, *(Ours(params, *labels) for labels in _OURS)]
    times = time_in_turn(sides, flags.blocks, flags.steps, flags.warm_up)
  difference = logprob_difference(params)
  common = {
      'workload': {
          'parameters': sum(x.size for x in jax.tree.leaves(params)),
          'prompts': _PROMPTS,
          'group': _GROUP,
          'prompt_tokens': _PROMPT_TOKENS,
          'new_tokens': _NEW_TOKENS,
      },
      'steps_per_block': flags.steps,
      'logprob_difference': difference,
      'cores': cores,
      'load_before': load,
      'load_after': os.getloadavg(),
      'versions': versions,
      'time': datetime.datetime.now(datetime.UTC).isoformat('T', 'seconds'),
  }
  rows = [
      summarize(side, of_side, times[0], common)
      for side, of_side in zip(sides, times, strict=True)
  ]
  for row in rows:
    print(_line(row))
  print(f'Log-probs in float32 differ by {difference:.1e} nats at most.')
  failures = [r['side'] for r in rows if not r['grad_norm'] > 0]
  if difference > _TOLERANCE or failures:
    raise SystemExit(f'The sides do not do the same work. {failures}')
  flags.out.parent.mkdir(parents=True, exist_ok=True)
  with flags.out.open('a') as file:
    file.writelines(json.dumps(row) + '\n' for row in rows)


def _line(row):
  return (
      f'{row["side"]:32} {row["seconds"]:6.3f} s a step'
      f' {row["tokens_per_second"]:7.0f} tokens/s  ratio {row["ratio"]:.2f}'
      f' ({row["ratio_lowest_block"]:.2f} to {row["ratio_highest_block"]:.2f})'
      f'  CPU {row["cpu_seconds"]:.3f} s'
      f'  first {row["first_step_seconds"]:.1f} s'
  )


if __name__ == '__main__':
  main()
