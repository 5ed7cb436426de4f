"""What staleness does to real training, beside what the simulator predicts.

    python -m experiments.async_drift smoke
    python -m experiments.async_drift tiny      # the demo's MoE

Schedules of `rl.simulator`, each with another bound on staleness, are replayed:
with the weights of version v the real sampler completes the problems of all
groups that the schedule starts there and trains later; update k is a real GRPO
step on the groups of the schedule's batch k, however old they are.

The simulator then says what it thinks of the same lags. Five of its constants
are fitted: q, the mismatch without staleness, and start, speed and end of the
reward to the first run, which must be synchronous; s, the mismatch by a
staleness of 1, to the second. The further runs are predictions. All else, what
an update can correct above all, is as in `SimulatorConfig`.

WORKDIR gets metrics.jsonl (a row for each update of each run, as measured),
comparison.json (fitted constants, errors of each run) and figures/. A run that
was killed is made again from its start.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import json
import math
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import grpo
from experiments import run
from experiments import sft
from experiments import simulator_plots
from experiments import sweep_summary
from nvfp4_jax import config
from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax import tasks
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import loop
from nvfp4_jax.rl import rollouts
from nvfp4_jax.rl import simulator
from nvfp4_jax.rl.simulator import drift_model
from nvfp4_jax.rl.simulator import schedules

_WINDOW = sweep_summary.WINDOW  # updates, of the reward at the end
# Constants that are fitted to the first and to the second run.
_FITTED = (
    ('quantization', 'learning', 'reward_start', 'reward_max'),
    ('staleness',),
)
# What is kept of `loop.train_on`.
_METRICS = ('staleness', 'mismatch_abs_logprob', 'ref_kl_median', 'grad_norm')


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/async_drift')
  recipe: str = 'nvfp4_final'
  staleness: tuple[int, ...] = (0, 4, 16)  # bounds; the first must be 0
  system: simulator.SimulatorConfig = simulator.SimulatorConfig(
      samplers=192, batch=16, group_size=8, steps=100
  )  # its max_staleness and correction are those of each run
  supervised: sft.Config = sft.Config(steps=200, save_interval=100)
  model: model_config.ModelConfig = model_config.tiny(16)
  task: tasks.TaskConfig = tasks.TaskConfig()
  optimizer: learner.OptimizerConfig = learner.OptimizerConfig(
      learning_rate=1e-3
  )
  grpo: learner.GRPOConfig = learner.GRPOConfig()
  temperature: float = 1.0
  chunk: int = 16  # groups that are sampled at a time
  seed: int = 0  # of warm start, sampling and schedules

  def __post_init__(self):
    recipes.get(self.recipe)
    sft.check_part(self.supervised)
    if len(self.staleness) < 2 or self.staleness[0]:
      raise ValueError(
          f'staleness {self.staleness} is not 0 and at least one other bound.'
      )
    if self.system.in_flight_update:
      raise ValueError(
          'in_flight_update True cannot be replayed: a rollout here has one'
          ' version of the weights.'
      )
    if self.chunk < 1:
      raise ValueError(f'chunk {self.chunk} is below 1.')


PRESETS = {
    'smoke': (
        'Seconds on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/async_drift_smoke'),
            staleness=(0, 2),
            system=simulator.SimulatorConfig(
                samplers=8, batch=2, group_size=4, steps=4
            ),
            supervised=sft.SHORT,
            model=dataclasses.replace(
                model_config.tiny(16), num_layers=2, attention_block=32
            ),
            task=tasks.TaskConfig(digits=1),
            chunk=2,
        ),
    ),
    'tiny': ("The demo's model; a quarter of an hour on two cores.", Config()),
}


def main(cfg: Config, log: run.Log) -> None:
  """Replays the schedules that have no rows yet, and compares."""
  steps = cfg.system.steps
  done = len(run.read_rows(log.path)) // steps
  log.rewind(done * steps)
  if done < len(cfg.staleness):
    start = _load_start(cfg)
    for i, bound in list(enumerate(cfg.staleness))[done:]:
      progress = run.Progress(f'staleness {bound}', steps)
      plan = schedules.schedule(_system(cfg, bound), jax.random.key(cfg.seed))
      for k, row in enumerate(replay(cfg, start, plan)):
        log({'step': i * steps + k, 'bound': bound, 'update': k, **row})
        progress(k + 1, f'reward {row["reward"]:.2f}')
  rows = run.read_rows(log.path)
  comparison = compare(cfg, rows)
  text = json.dumps(comparison, indent=2) + '\n'
  files.write_atomically(cfg.workdir / 'comparison.json', text)
  print(text)
  figure = draw(cfg.workdir, cfg.workdir / 'figures')
  print(f'Figure: {figure}', file=sys.stderr)


def draw(workdir: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Draws the rows of a finished run; returns the picture's path."""
  saved = json.loads((workdir / 'config.json').read_text())
  rows = run.read_rows(workdir / 'metrics.jsonl')
  model, runs = fit(config.from_json(Config, saved), rows)
  predictions = {k: predict(model, one['lag']) for k, one in runs.items()}
  return simulator_plots.replays(rows, predictions, folder)


def replay(
    cfg: Config, start: grpo.Start, plan: schedules.Schedule
) -> Iterator[dict[str, float | int]]:
  """Yields a row for each update of a schedule, made for real.

  Without staleness, and with `chunk` the groups of a batch, this is the run of
  `experiments.grpo`.

  Args:
    cfg: the run.
    start: what it starts from.
    plan: the schedule.
  """
  recipe = recipes.get(cfg.recipe)
  quantizers = grpo.make_quantizers(recipe, cfg.seed)
  paths = transformer.param_paths(start.model)
  segments = policy.segments((recipe.learner, recipe.sampler), paths)
  settings = loop.LoopConfig(
      model=start.model,
      rollout=rollouts.RolloutConfig(
          cfg.system.batch, cfg.system.group_size, cfg.temperature
      ),
      optimizer=cfg.optimizer,
      grpo=recipes.objective(recipe, cfg.grpo),
      seed=cfg.seed,
  )
  state = learner.init_state(
      transformer.stack(start.params, segments), cfg.optimizer
  )
  bf16 = policy.Quantizer(policy.BF16)
  references = {'bf16': policy.quantize_params(bf16, state.params)}
  synced = loop.sync(quantizers, state.params)
  sampled: dict[int, rollouts.Group] = {}
  cursor = calls = 0
  for k, batch in enumerate(plan.batches):
    starting = started_at(plan, k)
    for i in range(0, len(starting), cfg.chunk):
      groups = rollouts.sample_groups(
          start.model,
          dataclasses.replace(settings.rollout, prompts_per_step=cfg.chunk),
          start.task,
          quantizers.sampler,
          synced.sampler,
          cursor,
          rollouts.step_key(cfg.seed, calls),
      )
      chosen = starting[i : i + cfg.chunk]
      sampled |= dict(zip(chosen, groups, strict=False))
      cursor, calls = cursor + len(chosen), calls + 1
    rolled, _ = rollouts.stack_groups(
        settings.rollout,
        start.task,
        [sampled.pop(group) for group in batch],
        plan.version[batch],
    )
    state, synced, metrics = loop.train_on(
        settings, quantizers, references, state, synced, rolled
    )
    yield {
        'reward': float(np.mean(rolled.rewards)),
        'lag': float(plan.drift_lag[k]),
        **{name: metrics[name] for name in _METRICS},
    }


def started_at(plan: schedules.Schedule, version: int) -> list[int]:
  """Returns the groups that start with this version and are trained later."""
  trained = plan.fate == schedules.FATES.index('trained')
  return np.flatnonzero(trained & (plan.version == version)).tolist()


def predict(model: drift_model.Drift, lag: np.ndarray) -> drift_model.Curves:
  """Returns what the model says of the rows of a run, numpy arrays `[steps]`.

  The reward of row k is that of the weights which sampled its groups: of
  version k - lag, between versions linearly.

  Args:
    model: the drift's constants.
    lag: `[steps]`, of each update.
  """
  curves = drift_model.follow(model, lag)
  reward = _of_sampled_weights(model, curves.reward, lag)
  return jax.tree.map(np.asarray, curves._replace(reward=reward))


def _of_sampled_weights(model, reward, lag):
  """Returns the reward of version k - lag; version 0 has the first one."""
  start = jnp.asarray(model.reward_start, jnp.float32)
  versions = jnp.concatenate([start[None], reward])
  steps = jnp.arange(len(lag))
  return jnp.interp(steps - lag, jnp.arange(len(versions)), versions)


def compare(cfg: Config, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns fitted constants, and how far each run is from its prediction.

  Args:
    cfg: the runs.
    rows: of all updates.

  Returns:
    `fitted` by name, and for each of `runs` (bounds on staleness): means of lag
    and mismatch, the largest drift, the root mean square error of the reward
    curve and the mean reward of the last 20 updates, measured and predicted. A
    measured drift is what the model's recursion makes of the measured mismatch.
    `hindsight` has the constants of least reward error, and that error by run.
  """
  model, runs = fit(cfg, rows)
  table = []
  for i, (bound, measured) in enumerate(runs.items()):
    curves = predict(model, measured['lag'])
    mismatch, reward = measured['mismatch_abs_logprob'], measured['reward']
    drift = np.asarray(drift_model.accumulate(model, mismatch).drift)
    end = slice(-_WINDOW, None)
    values = {
        'lag': measured['lag'].mean(),
        'mismatch': mismatch.mean(),
        'mismatch_predicted': curves.mismatch.mean(),
        'drift': drift.max(),
        'drift_predicted': curves.drift.max(),
        'reward_error': np.sqrt(np.mean((curves.reward - reward) ** 2)),
        'end_reward': reward[end].mean(),
        'end_reward_predicted': curves.reward[end].mean(),
    }
    fitted = _FITTED[i] if i < 2 else ()
    numbers = {name: float(value) for name, value in values.items()}
    table.append({'bound': bound, 'fitted': fitted, **numbers})
  return {
      'fitted': {
          name: float(getattr(model, name))
          for names in _FITTED
          for name in names
      },
      'runs': table,
      'hindsight': _hindsight(model, runs),
  }


def _hindsight(model, runs):
  """Returns the constants of least reward error, were all runs known.

  Of a grid of staleness s, its power, capacity c and damage b; `at_an_edge`
  names those for which a larger grid could do better.
  """
  grid = {
      'staleness': model.staleness * np.geomspace(0.25, 4, 9),
      'power': np.linspace(0.5, 2, 7),
      'capacity': np.geomspace(0.1, 10, 21),
      'damage': np.geomspace(0.0005, 0.05, 9),
  }
  points = np.array(list(itertools.product(*grid.values())))
  lags = np.stack([one['lag'] for one in runs.values()])
  rewards = np.stack([one['reward'] for one in runs.values()])

  @jax.jit
  def errors(points):
    def one(point):
      changed = model._replace(**dict(zip(grid, point, strict=True)))

      def error(lag, reward):
        curves = drift_model.follow(changed, lag)
        predicted = _of_sampled_weights(changed, curves.reward, lag)
        return jnp.sqrt(jnp.mean((predicted - reward) ** 2))

      return jax.vmap(error)(lags, rewards)

    return jax.vmap(one)(points)

  error = np.asarray(errors(points))
  best = np.argmin((error**2).sum(axis=1))
  chosen = dict(zip(grid, map(float, points[best]), strict=True))
  edges = [k for k, v in chosen.items() if v in (grid[k][0], grid[k][-1])]
  return chosen | {'at_an_edge': edges, 'reward_error': error[best].tolist()}


def _system(cfg, bound):
  """Returns what the simulator is told of a run."""
  correction = cfg.grpo.correction
  changes: dict[str, Any] = {'correction': 'none'}
  if correction.weights != 'none':
    cap = math.inf if correction.cap is None else correction.cap
    changes = {'correction': 'tis', 'tis_cap': cap}
  precisions = [r.precision for r in recipes.get(cfg.recipe).learner.rules]
  quantized = [p for p in precisions if p is not None]
  if quantized:
    changes['backward'] = quantized[0].backward
  else:
    changes['train'] = 'bf16'
  return dataclasses.replace(cfg.system, max_staleness=bound, **changes)


def fit(
    cfg: Config, rows: Sequence[Mapping[str, Any]]
) -> tuple[drift_model.Drift, dict[int, dict[str, np.ndarray]]]:
  """Returns the drift model with its fitted constants, and each run's columns.

  Args:
    cfg: the runs.
    rows: of all updates.
  """
  runs = {
      bound: {
          name: np.array([row[name] for row in rows if row['bound'] == bound])
          for name in ('lag', 'mismatch_abs_logprob', 'reward')
      }
      for bound in cfg.staleness
  }
  first, second = list(runs.values())[:2]
  reward = first['reward']
  model = simulator.knobs(_system(cfg, 0)).drift
  quantization = first['mismatch_abs_logprob'].mean()
  # In quadrature, as in the model; least squares through zero.
  mismatch = second['mismatch_abs_logprob']
  stale = np.sqrt(np.maximum(mismatch**2 - quantization**2, 0))
  powers = second['lag'] ** model.power
  model = model._replace(
      learning_rate=1.0,  # of these runs: s and the speed are for it
      quantization=quantization,
      staleness=np.sum(stale * powers) / max(np.sum(powers**2), 1e-9),
      reward_start=reward[:3].mean(),
      reward_max=reward[-_WINDOW:].mean(),
  )

  def error(speed):
    curves = predict(model._replace(learning=speed), first['lag'])
    return np.mean((curves.reward - reward) ** 2)

  speeds = np.geomspace(1e-3, 1.0, 121)
  return model._replace(learning=min(speeds, key=error)), runs


def _load_start(cfg):
  return grpo.load_start(
      grpo.Config(
          workdir=cfg.workdir,
          task=cfg.task,
          model=cfg.model,
          supervised=cfg.supervised,
          seed=cfg.seed,
      )
  )


if __name__ == '__main__':
  run.launch(main, PRESETS)
