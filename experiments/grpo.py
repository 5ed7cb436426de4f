"""GRPO under one recipe, and beside it under others from the same warm start.

    python -m experiments.grpo smoke
    python -m experiments.grpo demo                # make demo; minutes on CPU
    python -m experiments.grpo nvfp4_final --seed=1
    python -m experiments.grpo resume runs/demo

The warm start (experiments.sft) has learned wrong facts; reinforcement corrects
them. A run writes metrics.jsonl, checkpoints and figures/ to its workdir;
recipes in `compare` do so in a subfolder each. diagnostics.jsonl holds a row
for every quantized weight every `diagnostics_interval` steps.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
import sys

import jax
import numpy as np

from experiments import plots
from experiments import run
from experiments import sft
from nvfp4_jax import checkpoint
from nvfp4_jax import config
from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax import tasks
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import loop


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/grpo')
  recipe: str = 'nvfp4_final'
  compare: tuple[str, ...] = ()  # recipes to run too, for the same steps
  warm_start: pathlib.Path | None = None  # default: WORKDIR/warm_start
  supervised: sft.Config = sft.Config(steps=200, save_interval=100)
  model: model_config.ModelConfig = model_config.tiny(16)
  task: tasks.TaskConfig = tasks.TaskConfig()
  optimizer: learner.OptimizerConfig = learner.OptimizerConfig(
      learning_rate=1e-3
  )
  grpo: learner.GRPOConfig = learner.GRPOConfig()
  steps: int = 40  # rollouts
  prompts_per_step: int = 16
  group_size: int = 8
  updates_per_rollout: int = 1
  temperature: float = 1.0
  eval_interval: int = 10  # held-out accuracy every so many steps
  eval_problems: int = 256
  save_interval: int = 20
  diagnostics_interval: int = 10  # of diagnostics.jsonl, in steps; 0 for none
  seed: int = 0  # of warm start and sampling

  def __post_init__(self):
    for name in (self.recipe, *self.compare):
      recipes.get(name)


def _preset(name, text, **changes):
  workdir = pathlib.Path('runs') / name
  return {
      name: (text, dataclasses.replace(Config(), workdir=workdir, **changes))
  }


PRESETS = {
    **_preset(
        'smoke',
        'Seconds on a CPU; run by the tests.',
        supervised=sft.PRESETS['smoke'][1],
        model=dataclasses.replace(
            model_config.tiny(16), num_layers=2, attention_block=32
        ),
        task=tasks.TaskConfig(digits=3),
        steps=4,
        prompts_per_step=4,
        group_size=4,
        eval_interval=2,
        eval_problems=16,
        save_interval=2,
    ),
    **_preset(
        'demo',
        'What `make demo` runs: nvfp4_final, then bf16 and nvfp4_naive.',
        compare=('bf16', 'nvfp4_naive'),
    ),
}
for _name, _recipe in recipes.RECIPES.items():
  PRESETS |= _preset(_name, f'The demo under {_name} alone.', recipe=_name)


def main(cfg: Config, log: run.Log) -> None:
  """Warm start, then GRPO under each recipe; finished parts are skipped."""
  warm = _warm_start(cfg)
  train(cfg, warm, log)
  for name in cfg.compare:
    other = dataclasses.replace(
        cfg, workdir=cfg.workdir / name, recipe=name, compare=()
    )
    run.save_config(other.workdir, other)
    train(other, warm, run.Log(other.workdir))
  runs = {name: [cfg.workdir / name] for name in cfg.compare}
  path = plots.grpo(
      {cfg.recipe: [cfg.workdir], **runs}, cfg.workdir / 'figures'
  )
  print(f'Figure: {path}', file=sys.stderr)


def train(cfg: Config, warm: policy.ParamTree, log: run.Log) -> None:
  """Runs GRPO under one recipe, from the last checkpoint if there is one."""
  recipe = recipes.get(cfg.recipe)
  quantizers = loop.Quantizers(
      policy.Quantizer(recipe.learner), policy.Quantizer(recipe.sampler)
  )
  segments = policy.segments(
      (recipe.learner, recipe.sampler), transformer.param_paths(cfg.model)
  )
  stack = lambda tree: transformer.stack(tree, segments)
  task, settings = cfg.task.make(), _loop_config(cfg)
  state = learner.init_state(stack(warm), cfg.optimizer)
  bf16 = policy.Quantizer(policy.BF16)
  reference = policy.quantize_params(bf16, state.params)
  saved_policy = config.to_json(recipe)

  folder, start = cfg.workdir / 'checkpoints', 0
  if checkpoint.latest_step(folder) is not None:
    like = transformer.map_params(transformer.unstack, state)
    arrays, record = checkpoint.restore(folder, like, policy=saved_policy)
    state = transformer.map_params(stack, arrays)
    start = record['step']
  log.rewind(start)
  weight_log = _WeightLog(cfg)
  weight_log.rows.rewind(start)

  synced = loop.sync(quantizers, state.params)
  progress = run.Progress(cfg.recipe, cfg.steps, start)
  for step in range(start, cfg.steps):
    scores = {}
    if step % cfg.eval_interval == 0:
      scores = _evaluate(cfg, settings, task, quantizers, synced)
    state, synced, row = loop.train_rollout(
        settings, task, quantizers, reference, state, synced, step
    )
    done = step + 1
    if done == cfg.steps:  # the last row is scored after its update
      scores = _evaluate(cfg, settings, task, quantizers, synced)
    log(row | scores)
    if cfg.diagnostics_interval and step % cfg.diagnostics_interval == 0:
      weight_log(step, loop.weight_stats(state.params, synced.sampler))
    progress(
        done,
        f'reward {row["reward"]:.2f}'
        f'  mismatch {row["mismatch_abs_logprob"]:.4f}',
    )
    if done % cfg.save_interval == 0 or done == cfg.steps:
      arrays = transformer.map_params(transformer.unstack, state)
      record = {'step': done, 'policy': saved_policy}
      checkpoint.save(folder, done, arrays, record)


class _WeightLog:
  """Rows of quantization statistics; warns once of each underflowing weight."""

  def __init__(self, cfg: Config):
    self.rows = run.Log(cfg.workdir, 'diagnostics.jsonl')
    self._warned: set[str] = set()

  def __call__(self, step: int, stats: Mapping[str, loop.Row]) -> None:
    for name, values in stats.items():
      self.rows({'step': step, 'name': name, **values})
      if values['underflow_blocks'] and name not in self._warned:
        self._warned.add(name)
        count, elements = (
            int(values[f'underflow_{what}']) for what in ('blocks', 'elements')
        )
        print(
            f'Warning: {name}: the scales of {count} blocks underflow, so that'
            f' {elements} elements are zero (step {step}).',
            file=sys.stderr,
        )


def _evaluate(cfg, settings, task, quantizers, synced):
  return loop.evaluate(
      settings, task, quantizers.sampler, synced.sampler, cfg.eval_problems
  )


def _loop_config(cfg):
  return loop.LoopConfig(
      model=cfg.model,
      optimizer=cfg.optimizer,
      grpo=cfg.grpo,
      prompts_per_step=cfg.prompts_per_step,
      group_size=cfg.group_size,
      updates_per_rollout=cfg.updates_per_rollout,
      temperature=cfg.temperature,
      seed=cfg.seed,
  )


def _warm_start(cfg):
  """Returns the masters of the warm start, which is made if it is missing."""
  warm = dataclasses.replace(
      cfg.supervised,
      workdir=cfg.warm_start or cfg.workdir / 'warm_start',
      task=cfg.task,
      model=cfg.model,
      seed=cfg.seed,
  )
  if cfg.warm_start is None:
    run.save_config(warm.workdir, warm)
    sft.main(warm, run.Log(warm.workdir))
  return jax.tree.map(np.asarray, sft.load(warm))


if __name__ == '__main__':
  run.launch(main, PRESETS)
