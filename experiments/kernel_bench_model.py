"""Times rollouts, GRPO steps and weight syncs of whole models on one device.

    python -m experiments.kernel_bench_model smoke       # seconds, on a CPU
    python -m experiments.kernel_bench_model cpu         # minutes; two cores
    python -m experiments.kernel_bench_model h200        # minutes; one H200

Weights are random, prompts too, and nothing ends a completion early. A row is
one workload under one recipe: `ms` is the median of the repeats, each awaited,
after a first call (`first_call_s`) that also compiles. `device_us` is how long
the device's kernels ran, as `kernel_bench` finds it: for a weight sync in all,
for a rollout by the number of new tokens of a row, its prefill included.
Tokens are those that were generated.

* `rollout`: `sampler.generate`. `cache of N`: in a longer cache than is needed,
  in turn with one that just suffices; `cache_ratio` is its time by the other's.
* `weight sync`: `policy.quantize_params` of float32 masters as one program;
  `gb_s` counts the bytes of both.
* `GRPO step`: `rollouts.collect` and `loop.train_on`, of which one step of
  `loop.train_rollout` consists: rollout and rewards, then the log-probs of the
  reference policy, the update, the sync of the weights and all metrics.
  In a model of float32, its sampler too has bfloat16 weights (`loop.sync`).

`recorded_peer` was NOT measured in this run: see `_RECORDED`. `peer_ratio` is
our tokens a second by its, `peer_first_ratio` its first call by ours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import os
import pathlib
import statistics
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import grpo
from experiments import kernel_bench
from experiments import run
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import loop
from nvfp4_jax.rl import rollouts

type Row = dict[str, Any]

_QWEN3_600M = model_config.ModelConfig(
    vocab_size=151936,
    num_layers=28,
    embed_dim=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=3072,
    rope_theta=1e6,
    tie_embeddings=True,
)
_QWEN3_4M = dataclasses.replace(
    _QWEN3_600M,
    vocab_size=2048,
    num_layers=4,
    embed_dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=768,
    dtype='float32',
)
# Tokens a second and seconds of the first call of google-tunix 0.1.7, which has
# no recipe, by device and workload: recorded on 2026-11-29 with JAX 0.11.2 in
# other runs on machines of the same kinds. Its GRPO step computes no log-probs
# of a reference policy and has no weights to sync. Of two runs, the faster one.
_RECORDED: Mapping[str, Mapping[str, tuple[float, float]]] = {
    'NVIDIA H200': {
        'rollout 596 M bfloat16, 128 + 128, B = 1': (332.68, 17.634),
        'rollout 596 M bfloat16, 128 + 128, B = 64': (15081, 24.751),
        'rollout 596 M bfloat16, 128 + 128, B = 256': (36823, 24.597),
        'GRPO step 596 M bfloat16, 128 + 128, 4 x 8': (8544.8, 65.373),
    },
    'cpu': {
        'rollout 3.67 M float32, 32 + 64, B = 8': (1525.5, 4.837),
        'rollout 3.67 M float32, 32 + 64, B = 8, cache of 2048': (306.8, 5.586),
        'GRPO step 3.67 M float32, 32 + 64, 2 x 4': (745.75, 10.716),
    },
}
_COLUMNS = (
    *('first_call_s', 'ms', 'min_ms', 'max_ms', 'device_us', 'tokens_per_s'),
    *('cache_ratio', 'rollout_ms', 'learner_ms', 'gb_s', 'device_gb_s'),
    *('recorded_peer', 'peer_ratio'),
    *('recorded_peer_first_s', 'peer_first_ratio'),
)


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/kernel_bench_model')
  model: model_config.ModelConfig = _QWEN3_600M
  recipes: tuple[str, ...] = ('bf16', 'nvfp4_w4a16', 'nvfp4_final')
  grpo_recipes: tuple[str, ...] = ('bf16', 'nvfp4_final')  # that have the step
  only: str = ''  # workloads with this in their name
  prompt_tokens: int = 128
  new_tokens: int = 128
  batches: tuple[int, ...] = (1, 64, 256)  # of rollouts
  long_cache: int = 2048  # positions; with the first recipe
  long_cache_batch: int = 64
  prompts: int = 4  # of a GRPO step
  group_size: int = 8
  repeats: int = 5


PRESETS = {
    'smoke': (
        'Seconds on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/kernel_bench_model_smoke'),
            model=dataclasses.replace(
                model_config.tiny(64), num_layers=1, num_experts=0, mlp_dim=64
            ),
            recipes=('bf16', 'nvfp4_w4a16'),
            grpo_recipes=('bf16',),
            prompt_tokens=8,
            new_tokens=4,
            batches=(2,),
            long_cache=32,
            long_cache_batch=2,
            prompts=1,
            group_size=2,
            repeats=2,
        ),
    ),
    'cpu': (
        'A Qwen3 of 3.67 M parameters in float32 on a CPU.',
        Config(
            workdir=pathlib.Path('runs/kernel_bench_model_cpu'),
            model=_QWEN3_4M,
            recipes=('bf16', 'nvfp4_final'),
            prompt_tokens=32,
            new_tokens=64,
            batches=(8,),
            long_cache_batch=8,
            prompts=2,
            group_size=4,
            repeats=9,
        ),
    ),
    'h200': ('Qwen3-0.6B on one H200.', Config()),
}


def main(cfg: Config, log: run.Log) -> None:
  """Logs one row for each workload and recipe, and prints a table."""
  rows = kernel_bench.record(
      log, _rows(cfg), lambda: {'load': os.getloadavg()[0]}
  )
  print(kernel_bench.table(rows, _COLUMNS))


def _rows(cfg) -> Iterator[Row]:
  machine = kernel_bench.machine()
  yield machine
  recorded = _RECORDED.get(machine['device'], {})
  for workload, recipe, measure in workloads(cfg):
    if cfg.only not in workload:
      continue
    row = {'workload': workload, 'candidate': recipe}
    try:
      row |= measure()
      row |= _beside_peer(row, recorded.get(workload))
    except Exception as error:
      row['error'] = f'{type(error).__name__}: {error}'[:300]
    yield row


def workloads(cfg: Config) -> Iterator[tuple[str, str, Callable[[], Row]]]:
  """Yields the name of each workload, its recipe, and what measures it."""
  masters = functools.cache(
      lambda: transformer.init_params(jax.random.key(0), cfg.model)
  )
  for name in dict.fromkeys((*cfg.recipes, *cfg.grpo_recipes)):
    for workload, measure in _of_recipe(cfg, name, masters):
      yield workload, name, measure


def _of_recipe(cfg, name, masters) -> Iterator[tuple[str, Callable[[], Row]]]:
  recipe = recipes.get(name)
  specs = transformer.param_specs_by_path(cfg.model)
  millions = 1e-6 * sum(math.prod(spec.shape) for spec in specs.values())
  model = f'{millions:.3g} M {cfg.model.dtype}'
  sizes = f'{model}, {cfg.prompt_tokens} + {cfg.new_tokens}'
  segments = policy.segments((recipe.learner, recipe.sampler), list(specs))
  params = functools.cache(lambda: transformer.stack(masters(), segments))
  rollout = functools.cache(lambda: _rollout_maker(cfg, recipe, params()))
  if name in cfg.recipes:
    yield f'weight sync {model}', lambda: _sync(cfg, recipe, params())
    for batch in cfg.batches:
      measure = lambda batch=batch: _rollout(cfg, rollout()(batch))
      yield f'rollout {sizes}, B = {batch}', measure
  if name in cfg.recipes[:1]:
    batch, length = cfg.long_cache_batch, cfg.long_cache
    yield (
        f'rollout {sizes}, B = {batch}, cache of {length}',
        lambda: _rollout(cfg, rollout()(batch, length), rollout()(batch)),
    )
  if name in cfg.grpo_recipes:
    yield (
        f'GRPO step {sizes}, {cfg.prompts} x {cfg.group_size}',
        lambda: _grpo_step(cfg, recipe, params()),
    )


def _beside_peer(row, recorded) -> Row:
  """Returns the columns of a peer that was recorded in another run."""
  if recorded is None:
    return {}
  rate, first = recorded
  return {
      'recorded_peer': rate,
      'peer_ratio': row['tokens_per_s'] / rate,
      'recorded_peer_first_s': first,
      'peer_first_ratio': first / row['first_call_s'],
  }


def _sync(cfg, recipe, params) -> Row:
  quantizer = policy.Quantizer(recipe.sampler)
  sync = functools.partial(policy.quantize_params, quantizer)
  sync = jax.jit(functools.partial(sync, dtype=cfg.model.dtype))
  candidate = _candidate(functools.partial(sync, params))
  (row,) = _time_in_turn(cfg, candidate)
  gigabytes = 1e-9 * qtensor.nbytes((params, jax.eval_shape(sync, params)))
  row['gb_s'] = gigabytes / (1e-3 * row['ms'])
  if busy := kernel_bench.device_seconds(candidate):
    row |= {'device_us': 1e6 * busy, 'device_gb_s': gigabytes / busy}
  return row


def _rollout_maker(cfg, recipe, params):
  """Returns the function from batch and length of the cache to a rollout."""
  quantizer = policy.Quantizer(recipe.sampler)
  tree = policy.quantize_params(quantizer, params, dtype=cfg.model.dtype)

  def make(batch, cache_length=None):
    problems = [_Task(cfg).problem('train', i) for i in range(batch)]
    prompts = jnp.asarray([problem.prompt for problem in problems])
    return _candidate(
        functools.partial(
            sampler.generate,
            cfg.model,
            tree,
            quantizer,
            prompts,
            jnp.full(batch, cfg.prompt_tokens),
            jax.random.key(batch),
            sampler.SampleConfig(cfg.new_tokens, cache_length=cache_length),
        )
    )

  return make


def _rollout(cfg, *candidates) -> Row:
  """Returns the row of the first of one or two; the other's cache is short."""
  row, *others = _time_in_turn(cfg, *candidates)
  tokens = int(jnp.sum(candidates[0].start().mask))
  row['tokens_per_s'] = tokens / (1e-3 * row['ms'])
  if others:
    row['cache_ratio'] = row['ms'] / others[0]['ms']
  if busy := kernel_bench.device_seconds(candidates[0]):
    row['device_us'] = 1e6 * busy / cfg.new_tokens
  return row


def _grpo_step(cfg, recipe, params) -> Row:
  settings = loop.LoopConfig(
      cfg.model,
      rollouts.RolloutConfig(cfg.prompts, cfg.group_size),
      learner.OptimizerConfig(learning_rate=1e-5),
      recipes.objective(recipe, learner.GRPOConfig()),
  )
  quantizers = grpo.make_quantizers(recipe, settings.seed)
  # A step donates its state, and others need the masters.
  state = learner.init_state(jax.tree.map(jnp.copy, params), settings.optimizer)
  references = grpo.make_references(quantizers, state.params)
  synced = loop.sync(quantizers, state.params)
  cursor, tokens, seconds = 0, 0, []
  for step in range(1 + cfg.repeats):
    jax.block_until_ready((state, synced, references))
    start = time.perf_counter()
    collected = rollouts.collect(
        cfg.model,
        settings.rollout,
        _Task(cfg),
        quantizers.sampler,
        synced.sampler,
        cursor=cursor,
        version=int(state.step),
        step=step,
        seed=settings.seed,
    )
    sampled = time.perf_counter()
    state, synced, _ = loop.train_on(
        settings, quantizers, references, state, synced, collected.rollout
    )
    jax.block_until_ready((state, synced))
    seconds.append((sampled - start, time.perf_counter() - sampled))
    cursor = collected.cursor
    tokens = int(np.sum(collected.rollout.completion_mask))
  row = _times([sum(parts) for parts in seconds])
  rollout, learned = map(statistics.median, zip(*seconds[1:], strict=True))
  return row | {
      'rollout_ms': 1e3 * rollout,
      'learner_ms': 1e3 * learned,
      'tokens_per_s': tokens / (1e-3 * row['ms']),
  }


def _candidate(call) -> kernel_bench.Candidate:
  return kernel_bench.Candidate('ours', call, jax.block_until_ready)


def _time_in_turn(cfg, *candidates) -> list[Row]:
  """Returns the times of candidates that are called in turn."""
  seconds = []
  for _ in range(1 + cfg.repeats):
    seconds.append([])
    for candidate in candidates:
      start = time.perf_counter()
      candidate.wait(candidate.start())
      seconds[-1].append(time.perf_counter() - start)
  return [_times(column) for column in zip(*seconds, strict=True)]


def _times(seconds: Sequence[float]) -> Row:
  first, *others = seconds
  return {
      'first_call_s': first,
      'ms': 1e3 * statistics.median(others),
      'min_ms': 1e3 * min(others),
      'max_ms': 1e3 * max(others),
  }


class _Task:
  """Random prompts; what a completion earns hangs on its last token."""

  eos_ids = ()

  def __init__(self, cfg: Config):
    self.vocab_size = cfg.model.vocab_size
    self.max_answer_tokens = cfg.new_tokens
    self._prompt_tokens = cfg.prompt_tokens

  def problem(self, split: str, index: int) -> types.SimpleNamespace:
    """Returns the index-th prompt, of any split."""
    del split
    rng = np.random.default_rng(index)
    tokens = rng.integers(self.vocab_size, size=self._prompt_tokens)
    return types.SimpleNamespace(prompt=tokens.tolist())

  def reward(self, problem: Any, completion: list[int]) -> float:
    """Returns a number in [0, 1)."""
    del problem
    return completion[-1] / self.vocab_size


if __name__ == '__main__':
  run.launch(main, PRESETS)
