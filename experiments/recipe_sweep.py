"""Hundreds of GRPO runs: recipes x scopes x settings x warm starts x seeds.

    python -m experiments.recipe_sweep smoke
    python -m experiments.recipe_sweep small             # minutes on two cores
    python -m experiments.recipe_sweep h200
    python -m experiments.recipe_sweep resume runs/recipe_sweep

Each run is the one that `experiments.grpo` makes with the same start and seed,
but runs of one recipe and scope are lanes of one program (sweep_lanes.py). The
programs are compiled in threads while warm starts are trained and others run.

Settings differ in data only: `base`; `high_lr`; `no_clip`, which is `high_lr`
without clipping; and `outliers`, where some channels of the residual stream
reach attention, router and experts `outlier_factor` times as large, and their
weights are that much smaller, so that the function is the same. Scopes:
`experts` quantizes what each recipe says, `all` the attention's linears too.

Lanes of a program run in groups of at most `lanes`. A finished group is written
to WORKDIR/groups and never run again; the state of a running one is, every
`save_interval` chunks. WORKDIR gets metrics.jsonl (a row for each run),
table.json (over warm starts, sweep_summary.py), curves.npz and figures/.
"""

from collections.abc import Callable, Iterator
from concurrent import futures
import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import plots
from experiments import run
from experiments import sft
from experiments import sweep_lanes
from experiments import sweep_start
from experiments import sweep_summary
from nvfp4_jax import config
from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax import tasks
from nvfp4_jax import variants
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import rollouts
from nvfp4_jax.tasks import arithmetic

type Scope = Literal['experts', 'all']
type Setting = Literal['base', 'high_lr', 'no_clip', 'outliers']

_RECIPES = (
    'bf16',
    'nvfp4_naive',
    'nvfp4_high_precision',
    'nvfp4_dequantized',
    'nvfp4_final',
    'quads',
    'resq',
    'triage',
    'mxfp8',
)
_MODEL = model_config.ModelConfig(  # 1.5 M parameters
    vocab_size=16,
    num_layers=6,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=8,
    experts_per_token=2,
    moe_dim=64,
    attention_block=32,
)


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/recipe_sweep')
  recipes: tuple[str, ...] = _RECIPES  # paired with bf16, where it is one
  scopes: tuple[Scope, ...] = ('experts', 'all')
  settings: tuple[Setting, ...] = ('base', 'high_lr', 'no_clip', 'outliers')
  warm_starts: int = 5
  warm_start_folder: pathlib.Path | None = None  # default: WORKDIR/warm_starts
  seeds: int = 4  # of sampling, for each warm start
  model: model_config.ModelConfig = _MODEL
  task: tasks.TaskConfig = tasks.TaskConfig('running_product', digits=12)
  supervised: sft.Config = sft.Config(  # its task, model, seed: the sweep's
      optimizer=learner.OptimizerConfig(learning_rate=1e-3),
      steps=3000,
      wrong_probability=0.6,
  )
  optimizer: learner.OptimizerConfig = learner.OptimizerConfig(
      learning_rate=2.5e-4
  )
  high_learning_rate: float = 7.5e-4  # of high_lr and no_clip
  outlier_factor: float = 10.0
  grpo: learner.GRPOConfig = learner.GRPOConfig()
  rollout: rollouts.RolloutConfig = rollouts.RolloutConfig(
      prompts_per_step=16, group_size=8
  )
  steps: int = 300  # rollouts of a run
  held_out: int = 256  # problems; rounded up to whole batches
  eval_interval: int = 50  # steps; whole chunks
  lanes: int = 96  # the most that run at once
  chunk: int = 25  # steps of a program's call
  save_interval: int = 0  # chunks; 0: only finished groups are saved
  compile_threads: int = 8

  def __post_init__(self):
    sft.check_part(self.supervised, 'save_interval')
    for name in self.recipes:
      recipes.get(name)
    if not isinstance(self.task.make(), arithmetic.Arithmetic):
      raise ValueError(f'Task {self.task.name!r} has no reward in a program.')
    for name, unit in (('steps', self.chunk), ('eval_interval', self.chunk)):
      if getattr(self, name) % unit:
        raise ValueError(
            f'{name} {getattr(self, name)} is no multiple of chunk {unit}.'
        )
    if not self.model.num_experts or self.model.first_dense_layers:
      raise ValueError('The model must have experts in every layer.')

  @property
  def warm_start(self) -> sft.Config:
    """The warm starts' configuration, but for their seeds."""
    return dataclasses.replace(
        self.supervised, task=self.task, model=self.model
    )


PRESETS = {
    'smoke': (
        'Seconds to run and a minute to compile on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/recipe_sweep_smoke'),
            recipes=('bf16', 'nvfp4_naive'),
            scopes=('experts',),
            settings=('base',),
            warm_starts=2,
            seeds=1,
            model=dataclasses.replace(
                model_config.tiny(16), num_layers=2, attention_block=32
            ),
            task=tasks.TaskConfig(digits=2),
            supervised=sft.Config(
                optimizer=learner.OptimizerConfig(learning_rate=5e-3),
                steps=40,
                batch=32,
            ),
            rollout=rollouts.RolloutConfig(prompts_per_step=4, group_size=4),
            steps=4,
            held_out=32,
            eval_interval=2,
            lanes=2,
            chunk=2,
            save_interval=1,
            compile_threads=2,
        ),
    ),
    'small': (
        'A small sweep for two cores.',
        Config(
            workdir=pathlib.Path('runs/recipe_sweep_small'),
            recipes=('bf16', 'nvfp4_naive', 'nvfp4_final'),
            scopes=('experts',),
            settings=('base', 'high_lr'),
            warm_starts=3,
            seeds=1,
            model=model_config.tiny(16),
            task=tasks.TaskConfig(),
            supervised=sft.Config(steps=200),
            optimizer=learner.OptimizerConfig(learning_rate=1e-3),
            high_learning_rate=3e-3,
            steps=40,
            held_out=128,
            eval_interval=20,
            lanes=6,
            chunk=5,
            save_interval=1,
            compile_threads=2,
        ),
    ),
    'h200': ('The full sweep; one GPU with 141 GB.', Config()),
}


class Run(NamedTuple):
  """One run of a program."""

  setting: Setting
  warm_start: int
  seed: int


@dataclasses.dataclass(frozen=True)
class Group:
  """Lanes that run together.

  Attributes:
    name: of its files.
    program: what they share.
    size: number of lanes, of every group of the program; the last ones may be
      copies, which nobody reads.
    runs: the runs of the first lanes.
    labels: recipes and scopes of which these are the runs: both scopes, where
      a recipe is the same in both.
  """

  name: str
  program: sweep_lanes.Program
  size: int
  runs: tuple[Run, ...]
  labels: tuple[tuple[str, Scope], ...]


class Compiled(NamedTuple):
  """The compiled functions of `sweep_lanes`, for one program."""

  advance: Callable[..., Any]
  evaluate: Callable[..., Any]


def main(cfg: Config, log: run.Log) -> None:
  """Trains warm starts, runs all groups, and says what came out."""
  log.rewind(0)
  task = cfg.task.make()
  groups = list(_groups(cfg))
  folder = cfg.workdir / 'groups'
  folder.mkdir(parents=True, exist_ok=True)
  missing = [g for g in groups if not (folder / _file(g)).exists()]
  data = _data(cfg, task)
  rows, results = [], []
  pool = futures.ThreadPoolExecutor(cfg.compile_threads)
  try:
    programs = {
        program: pool.submit(_compile, cfg, program, size, data)
        for program, size in {g.program: g.size for g in missing}.items()
    }
    starts = sweep_start.warm_starts(
        cfg.warm_start,
        cfg.warm_starts,
        cfg.warm_start_folder or cfg.workdir / 'warm_starts',
    )
    for group in groups:
      if group in missing:
        compiled = programs[group.program].result()
        _run_group(cfg, group, compiled, starts, data)
      results.append(_load(folder / _file(group), cfg, group))
      for row in _rows(group, results[-1]):
        rows.append({'step': len(rows), **row})
        log(rows[-1])
  finally:
    pool.shutdown(wait=False, cancel_futures=True)
  lines = sweep_summary.table(rows)
  _save_curves(cfg, groups, results)
  text = json.dumps(lines, indent=2) + '\n'
  files.write_atomically(cfg.workdir / 'table.json', text)
  print(sweep_summary.text(lines))
  figure = plots.recipe_sweep(cfg.workdir, cfg.workdir / 'figures')
  print(f'Figure: {figure}', file=sys.stderr)


def policies(
    recipe: recipes.Recipe, scope: Scope
) -> tuple[policy.PrecisionPolicy, policy.PrecisionPolicy]:
  """Returns the precision policies of learner and sampler in a scope."""
  if scope == 'all':
    recipe = recipes.vary(recipe, variants.Variant(scope='all'))
  return recipe.learner, recipe.sampler


def optimizer(cfg: Config, setting: Setting) -> learner.OptimizerConfig:
  """Returns learning rate and clipping of a setting."""
  if setting not in ('high_lr', 'no_clip'):
    return cfg.optimizer
  return dataclasses.replace(
      cfg.optimizer,
      learning_rate=cfg.high_learning_rate,
      grad_clip=math.inf if setting == 'no_clip' else cfg.optimizer.grad_clip,
  )


def _groups(cfg: Config) -> Iterator[Group]:
  """Yields all groups, those of a program one after the other."""
  task = cfg.task.make()
  labels: dict[sweep_lanes.Program, list[tuple[str, Scope]]] = {}
  for name in cfg.recipes:
    for scope in cfg.scopes:
      recipe = recipes.get(name)
      program = sweep_lanes.Program(
          cfg.model,
          cfg.rollout,
          task.max_answer_tokens,
          task.eos_ids,
          recipes.objective(recipe, cfg.grpo),
          *policies(recipe, scope),
      )
      labels.setdefault(program, []).append((name, scope))
  runs = [
      Run(setting, start, start * cfg.seeds + seed)
      for setting in cfg.settings
      for start in range(cfg.warm_starts)
      for seed in range(cfg.seeds)
  ]
  count = -(-len(runs) // cfg.lanes)
  size = -(-len(runs) // count)
  for program, of_program in labels.items():
    for i in range(count):
      name = '-'.join((*of_program[0], str(i)))
      part = tuple(runs[i * size : (i + 1) * size])
      yield Group(name, program, size, part, tuple(of_program))


def _file(group):
  return f'{group.name}.npz'


class Data(NamedTuple):
  """Problems of all steps, and the held-out ones."""

  train: sweep_lanes.Problems
  held_out: sweep_lanes.Problems


def _data(cfg, task):
  prompts = cfg.rollout.prompts_per_step
  batch = prompts * cfg.rollout.group_size
  return Data(
      sweep_lanes.problems(task, 'train', (cfg.steps, prompts)),
      sweep_lanes.problems(
          task, 'held_out', (-(-cfg.held_out // batch), batch)
      ),
  )


def _compile(cfg, program, size, data):
  """Returns the compiled program; XLA releases the interpreter meanwhile."""
  begin = time.monotonic()
  masters = jax.eval_shape(
      lambda: jax.tree.map(
          lambda leaf: leaf[None],
          transformer.stack(
              transformer.init_params(jax.random.key(0), cfg.model),
              program.segments,
          ),
      )
  )
  leaf = jax.ShapeDtypeStruct((size,), jnp.float32)
  lanes, states = jax.eval_shape(
      functools.partial(sweep_lanes.start, program),
      jax.ShapeDtypeStruct((size, 2), jnp.uint32),
      dataclasses.replace(cfg.optimizer, learning_rate=leaf, grad_clip=leaf),
      masters,
      jax.ShapeDtypeStruct((size,), jnp.int32),
  )
  batches = jax.tree.map(lambda x: x[: cfg.chunk], data.train)
  steps = jax.ShapeDtypeStruct((cfg.chunk,), jnp.int32)
  advance = _ADVANCE.lower(program, lanes, states, batches, steps).compile()
  evaluate = _EVALUATE.lower(program, lanes, states, data.held_out).compile()
  memory = advance.memory_analysis()
  if memory is not None:
    gib = (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / 2**30
    print(
        f'Compiled {size} lanes in {time.monotonic() - begin:.0f} s;'
        f' {gib:.2f} GiB.',
        file=sys.stderr,
        flush=True,
    )
  return Compiled(advance, evaluate)


_START = jax.jit(sweep_lanes.start, static_argnames='program')
_ADVANCE = jax.jit(
    sweep_lanes.advance, static_argnames='program', donate_argnames='states'
)
_EVALUATE = jax.jit(sweep_lanes.evaluate, static_argnames='program')


def _run_group(cfg, group, compiled, starts, data):
  """Runs a group, from its saved state if there is one; writes its result."""
  lanes, states = _start_lanes(cfg, group, starts)
  folder = cfg.workdir / 'groups'
  partial = folder / f'{group.name}.partial.npz'
  parts, scores, first = [], [], 0
  if partial.exists():
    saved = _load(partial, cfg, group)
    first, states = int(saved['next']), sweep_start.unflatten(states, saved)
    parts = [{name: saved[name] for name in sweep_lanes.METRICS}]
    scores = [
        {name: saved[name][:, i] for name in sweep_lanes.ACCURACIES}
        for i in range(saved[sweep_lanes.ACCURACIES[0]].shape[1])
    ]
  progress = run.Progress(group.name, cfg.steps, first)
  for step in range(first, cfg.steps, cfg.chunk):
    if step % cfg.eval_interval == 0:
      scores.append(compiled.evaluate(lanes, states, data.held_out))
    done = step + cfg.chunk
    steps = np.arange(step, done, dtype=np.int32)
    batches = sweep_lanes.Problems(*(x[step:done] for x in data.train))
    states, metrics = compiled.advance(lanes, states, batches, steps)
    parts.append(jax.tree.map(np.asarray, metrics))
    progress(done, f'reward {parts[-1]["reward"][:, -1].mean():.2f}')
    chunks = done // cfg.chunk
    if cfg.save_interval and chunks % cfg.save_interval == 0:
      arrays = sweep_start.flatten(states) | _join(parts, scores)
      made_of = _made_of(cfg, group)
      sweep_start.save(partial, {'next': done, 'made_of': made_of, **arrays})
  scores.append(compiled.evaluate(lanes, states, data.held_out))
  count = len(group.runs)
  arrays = {name: x[:count] for name, x in _join(parts, scores).items()}
  arrays['made_of'] = np.array(_made_of(cfg, group))
  sweep_start.save(folder / _file(group), arrays)
  partial.unlink(missing_ok=True)


def _made_of(cfg, group):
  """Returns all that a group's curves follow from, as text."""
  names = ('task', 'supervised', 'optimizer', 'high_learning_rate', 'steps')
  names += ('outlier_factor', 'held_out', 'eval_interval')
  flags = {name: getattr(cfg, name) for name in names}
  flags['warm_start_folder'] = cfg.warm_start_folder
  made_of = {'program': group.program, 'runs': group.runs, **flags}
  return json.dumps({k: config.to_json(v) for k, v in made_of.items()})


def _load(path, cfg, group):
  """Returns the arrays of a group's file, if it was made with these flags."""
  arrays = dict(np.load(path))
  if str(arrays.pop('made_of')) != _made_of(cfg, group):
    raise ValueError(
        f'{path} was made with other flags. Choose another workdir.'
    )
  return arrays


def _join(parts, scores):
  """Returns curves `[R, steps]` and accuracies `[R, evaluations]` by name."""
  curves = {
      name: np.concatenate([part[name] for part in parts], axis=1)
      for name in sweep_lanes.METRICS
  }
  accuracies = {
      name: np.stack([np.asarray(score[name]) for score in scores], axis=1)
      for name in sweep_lanes.ACCURACIES
  }
  return curves | accuracies


def _start_lanes(cfg, group, starts):
  runs = [group.runs[min(i, len(group.runs) - 1)] for i in range(group.size)]
  keys = [(one.warm_start, one.setting == 'outliers') for one in runs]
  unique = sorted(set(keys))
  masters = []
  for start, outliers in unique:
    params = starts[start]
    if outliers:
      params = sweep_start.with_outliers(params, cfg.outlier_factor)
    masters.append(transformer.stack(params, group.program.segments))
  settings = [optimizer(cfg, one.setting) for one in runs]
  values = lambda name: np.array(
      [getattr(one, name) for one in settings], np.float32
  )
  seeds = [jax.random.key_data(jax.random.key(one.seed)) for one in runs]
  return _START(
      group.program,
      np.stack(seeds),
      dataclasses.replace(
          cfg.optimizer,
          learning_rate=values('learning_rate'),
          grad_clip=values('grad_clip'),
      ),
      jax.tree.map(lambda *leaves: np.stack(leaves), *masters),
      np.array([unique.index(key) for key in keys], np.int32),
  )


def _rows(group, arrays):
  """Yields the row of every run, under each of the group's labels."""
  for recipe, scope in group.labels:
    for i, one in enumerate(group.runs):
      curves, accuracies = (
          {name: arrays[name][i] for name in names}
          for names in (sweep_lanes.METRICS, sweep_lanes.ACCURACIES)
      )
      yield {
          'recipe': recipe,
          'scope': scope,
          **one._asdict(),
          **sweep_summary.summarize(curves, accuracies),
      }


def _save_curves(cfg, groups, results):
  """Writes curves.npz: reward and accuracies by run, and the runs' labels.

  The other metrics are in the files of the groups.
  """
  labels: list[tuple[str | int, ...]] = []
  arrays: dict[str, Any] = {}
  for group, result in zip(groups, results, strict=True):
    for label in group.labels:
      labels += [(*label, *one) for one in group.runs]
      for name in ('reward', *sweep_lanes.ACCURACIES):
        arrays.setdefault(name, []).append(result[name])
  arrays = {name: np.concatenate(values) for name, values in arrays.items()}
  names = ('recipe', 'scope', *Run._fields)
  arrays |= {
      name: np.array(values)
      for name, values in zip(names, zip(*labels, strict=True), strict=True)
  }
  evaluated = [*range(0, cfg.steps, cfg.eval_interval), cfg.steps]
  arrays['evaluated_at'] = np.array(evaluated)
  with files.open_atomically(cfg.workdir / 'curves.npz') as file:
    np.savez_compressed(file, **arrays)


if __name__ == '__main__':
  run.launch(main, PRESETS)
