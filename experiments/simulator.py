"""What asynchrony and low precision buy, and when they end in a collapse.

    python -m experiments.simulator smoke
    python -m experiments.simulator run        # nine systems, by update
    python -m experiments.simulator sweep      # one knob after the other
    python -m experiments.simulator frontier   # 2000 random systems
    python -m experiments.simulator range      # which constants force the story
    python -m experiments.simulator benchmark  # against a plain Python loop
    python -m experiments.simulator figures
    python -m experiments.simulator page       # one HTML file, all of it live

`nvfp4_jax.rl.simulator` simulates; results/simulator holds the rows of each
preset and the figures, which `figures` draws from them. Flags change the
system, as in `run --system.max_staleness=4`.
"""

from collections.abc import Iterator
import dataclasses
import itertools
import pathlib
import time
from typing import Any, Literal

import jax
import numpy as np

from experiments import run
from experiments import simulator_peer
from experiments import simulator_plots
from experiments.simulator_page import document
from nvfp4_jax.rl import simulator

_System = simulator.SimulatorConfig

STABILIZERS = {
    'backward': 'dequantized',
    'last_layers_bf16': 0.15,
    'shared_experts_bf16': True,
}
_BF16 = {'rollout': 'bf16', 'train': 'bf16'}
_MXFP8 = {'rollout': 'mxfp8', 'train': 'mxfp8'}
SHORT = {'mean_length': 512.0, 'horizon': 2048, 'turns': 1}

SYSTEMS: dict[str, dict[str, Any]] = {
    'bf16, synchronous': _BF16 | {'max_staleness': 0},
    'bf16': _BF16,
    'mxfp8': _MXFP8,
    'nvfp4, short horizon': SHORT,
    'nvfp4': {},
    'nvfp4, dequantized': {'backward': 'dequantized'},
    'nvfp4, last layers bf16': {'last_layers_bf16': 0.15},
    'nvfp4, shared experts bf16': {'shared_experts_bf16': True},
    'nvfp4, all three': STABILIZERS,
}
PRECISIONS = {
    'bf16': _BF16,
    'mxfp8': _MXFP8,
    'nvfp4': {},
    'nvfp4, all three': STABILIZERS,
}
KNOBS: dict[str, tuple[float, ...]] = {
    'max_staleness': (0, 1, 2, 3, 4, 6, 8, 10, 12, 16),
    'horizon': (1024, 2048, 4096, 8192, 16_384),
    'sync_interval': (1, 2, 4, 8),
    'batch': (16, 24, 32, 48, 64),
    'samplers': (32, 64, 96, 128, 192, 256),
}
# What the story stands on and nobody measured.
FORCING = (
    'staleness',
    'staleness_power',
    'capacity',
    'drift_gain',
    'drift_decay',
    'amplification',
    'drift_threshold',
    'damage',
    'learning',
    'shared_experts_factor',
)
_FACTORS = tuple(float(x) for x in np.round(2.0 ** np.arange(-3, 3.01, 0.1), 4))


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/simulator')
  mode: Literal[
      'run', 'sweep', 'frontier', 'range', 'benchmark', 'figures', 'page'
  ] = 'run'
  system: _System = _System()  # what the others are variants of
  seeds: int = 3
  configurations: int = 10_000  # random ones, of frontier and benchmark
  rows: pathlib.Path = pathlib.Path('results/simulator')  # figures: from where

  def __post_init__(self):
    for name in ('seeds', 'configurations'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} {getattr(self, name)} is below 1.')


def _preset(mode: Any, **fields: Any) -> Config:
  workdir = pathlib.Path(f'runs/simulator_{mode}')
  return Config(workdir=workdir, mode=mode, **fields)


PRESETS = {
    'smoke': (
        'Seconds on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/simulator_smoke'),
            system=_System(
                samplers=24, batch=4, trainer_speed=6000.0, steps=40
            ),
            seeds=1,
        ),
    ),
    'run': ('Nine systems, step by step.', _preset('run')),
    'sweep': (
        'One knob after the other, at four precisions.',
        _preset('sweep'),
    ),
    'frontier': (
        'Random systems: throughput against margin.',
        _preset(
            'frontier',
            system=_System(steps=100),
            seeds=1,
            configurations=2000,
        ),
    ),
    'range': ('How far the default story holds.', _preset('range')),
    'benchmark': (
        'Ours against a plain Python loop.',
        _preset('benchmark', system=_System(steps=100), seeds=1),
    ),
    'figures': ('Draws the figures of committed rows.', _preset('figures')),
    'page': ('Writes simulator.html, which computes live.', _preset('page')),
}


def main(cfg: Config, log: run.Log) -> None:
  """Logs the rows of a mode; `run` and `figures` draw, `page` writes HTML."""
  if cfg.mode == 'figures':
    for path in draw(cfg.rows, cfg.workdir / 'figures'):
      print(path)
    return
  if cfg.mode == 'page':
    html = document.render(cfg.system, SYSTEMS, PRECISIONS)
    print(document.write(cfg.workdir / 'simulator.html', html))
    return
  modes = {
      'run': _run,
      'sweep': _sweep,
      'frontier': _frontier,
      'range': _range,
      'benchmark': _benchmark,
  }
  log.rewind(0)
  for step, row in enumerate(modes[cfg.mode](cfg)):
    log({'step': step, **row})
  if cfg.mode == 'run':
    rows = run.read_rows(log.path)
    print(simulator_plots.runs(rows, cfg.workdir / 'figures'))


def draw(folder: pathlib.Path, figures: pathlib.Path) -> list[pathlib.Path]:
  """Draws the figures of the rows in a folder; returns their paths."""
  rows = lambda name: run.read_rows(folder / f'{name}.jsonl')
  return [
      simulator_plots.runs(rows('run'), figures),
      simulator_plots.trade(rows('sweep'), rows('frontier'), figures),
      simulator_plots.story_range(rows('range'), figures),
  ]


def _keys(cfg):
  return jax.random.split(jax.random.key(0), cfg.seeds)


def _variants(cfg, changes):
  return [dataclasses.replace(cfg.system, **change) for change in changes]


def _run(cfg) -> Iterator[dict[str, Any]]:
  """Yields 50 points of each system, means over seeds, and its summary."""
  result = simulator.sweep(_variants(cfg, SYSTEMS.values()), _keys(cfg))
  every = max(cfg.system.steps // 50, 1)
  steps, curves = result.events.steps, result.outcome.curves
  for i, name in enumerate(SYSTEMS):
    for at in range(every - 1, cfg.system.steps, every):
      value = lambda x, i=i, at=at: float(np.mean(x[:, i, at], dtype=float))
      yield {
          'kind': 'update',
          'system': name,
          'update': at,
          'lag_mean': value(steps.lag_mean),
          'lag_p95': value(steps.lag_p95),
          'lag_max': value(steps.lag_max),
          'sampler_utilization': value(steps.sampler_utilization),
          'trainer_utilization': value(steps.trainer_utilization),
          'mismatch': value(curves.mismatch),
          'stale': value(curves.stale),
          'drift': value(curves.drift),
          'reward': value(curves.reward),
          'clip_fraction': value(curves.clip_fraction),
          'grad_norm': value(curves.grad_norm),
      }
    yield {'kind': 'summary', 'system': name} | _summary(result, i)


def _summary(result, i):
  """Returns means over seeds of one configuration."""
  events, outcome = result.events, result.outcome
  mean = lambda x: float(np.mean(x[:, i], dtype=float))
  return {
      'steps_per_hour': mean(events.steps_per_hour),
      'tokens_per_second': mean(events.tokens_per_second),
      'sampler_utilization': mean(events.sampler_utilization),
      'trainer_utilization': mean(events.trainer_utilization),
      'lag_mean': mean(events.lag_mean),
      'dropped_fraction': mean(events.dropped_fraction),
      'quantization': mean(outcome.quantization),
      'stale': mean(outcome.stale),
      'max_drift': mean(outcome.max_drift),
      'margin': mean(outcome.margin),
      'final_reward': mean(outcome.final_reward),
      'collapsed': int(np.sum(outcome.collapse[:, i] >= 0)),
      'collapse': [int(x) for x in outcome.collapse[:, i]],
      'seeds': len(outcome.margin),
  }


def _sweep(cfg) -> Iterator[dict[str, Any]]:
  """Yields a row for each knob, value and precision that go together."""
  named = []
  for (knob, values), name in itertools.product(KNOBS.items(), PRECISIONS):
    for value in values:
      change = PRECISIONS[name] | {knob: value}
      if knob == 'sync_interval' and value > cfg.system.max_staleness + 1:
        continue
      named.append(({'knob': knob, 'value': value, 'system': name}, change))
  configs = _variants(cfg, [change for _, change in named])
  result = simulator.sweep(configs, _keys(cfg), per_step=False)
  for i, (row, _) in enumerate(named):
    yield row | _summary(result, i)


def _random_systems(cfg):
  """Returns systems with random knobs, the same in every run."""
  rng = np.random.default_rng(0)
  pick = lambda values: values[rng.integers(len(values))]
  systems = []
  for _ in range(cfg.configurations):
    name = pick(list(PRECISIONS))
    interval = int(pick((1, 1, 1, 2, 4)))
    change = PRECISIONS[name] | {
        'max_staleness': int(rng.integers(max(interval - 1, 1), 17)),
        'sync_interval': interval,
        'samplers': int(rng.integers(12, 33)) * 8,
        'batch': int(rng.integers(2, 7)) * 8,
        'mean_length': float(np.exp(rng.uniform(np.log(1024), np.log(4096)))),
        'turns': int(rng.integers(0, 7)),
        'in_flight_update': bool(rng.integers(2)),
        'correction': pick(('none', 'clip', 'tis')),
    }
    systems.append((name, dataclasses.replace(cfg.system, **change)))
  return systems


def _frontier(cfg) -> Iterator[dict[str, Any]]:
  """Yields a tenth of the random systems, the front and the best stable one."""
  names, systems = zip(*_random_systems(cfg), strict=True)
  start = time.monotonic()
  result = simulator.sweep(systems, _keys(cfg), per_step=False)
  seconds = time.monotonic() - start
  rate = np.mean(result.events.tokens_per_second, 0)
  margin = np.mean(result.outcome.margin, 0)
  for name in (*PRECISIONS, 'all'):
    rows = np.array([i for i, n in enumerate(names) if name in ('all', n)])
    front = rows[simulator.pareto_front(rate[rows], margin[rows])]
    best = rows[simulator.best_stable(rate[rows], margin[rows])]
    chosen = [('front', i) for i in front if margin[i] > -1]
    chosen += [('best_stable', best)]
    if name != 'all':
      chosen += [('sample', i) for i in rows[: len(rows) // 10]]
    for kind, i in chosen:
      system = systems[i]
      yield {
          'kind': kind,
          'of': name,
          'system': names[i],
          'tokens_per_second': float(rate[i]),
          'margin': float(margin[i]),
          'max_staleness': system.max_staleness,
          'sync_interval': system.sync_interval,
          'samplers': system.samplers,
          'batch': system.batch,
          'mean_length': system.mean_length,
          'turns': system.turns,
          'in_flight_update': system.in_flight_update,
          'correction': system.correction,
      }
  yield {'kind': 'time', 'configurations': len(systems), 'seconds': seconds}


def _range(cfg) -> Iterator[dict[str, Any]]:
  """Yields, for each constant, over which factors on it the story holds.

  The story: nvfp4 collapses in every seed, nvfp4 with all three stabilizers in
  none. A factor that the constant does not allow is left out. `held` is the
  interval around the default in which it holds; `first_to_fail` says below and
  above it which half fails: `naive survives` or `stabilized collapses`.
  """
  for name in FORCING:
    default = getattr(cfg.system, name)
    value = lambda f, name=name, default=default: (
        1 - f * (1 - default) if name == 'drift_decay' else f * default
    )
    factors = [f for f in _FACTORS if _allowed(cfg, name, value(f))]
    yield {'kind': 'constant', 'constant': name, 'default': default} | _held(
        cfg, factors, [{name: value(f)} for f in factors]
    )
  for table in ('minite_moe', 'minite_dense', 'smollm2'):
    yield {'kind': 'table', 'table': table} | _held(
        cfg, [1.0], [{'mismatch': table}]
    )
  grid = [f for f in _FACTORS if 0.4 <= f <= 2.5]
  pairs = list(itertools.product(grid, grid))
  staleness, capacity = cfg.system.staleness, cfg.system.capacity
  changes = [
      {'staleness': a * staleness, 'capacity': b * capacity} for a, b in pairs
  ]
  naive, stable = _stories(cfg, changes)
  for (a, b), fell, fine in zip(pairs, naive, stable, strict=True):
    row = {'kind': 'map', 'staleness': a, 'capacity': b}
    yield row | {'naive_collapses': bool(fell), 'stabilized_holds': bool(fine)}


def _allowed(cfg, name, value):
  try:
    dataclasses.replace(cfg.system, **{name: value})
  except ValueError:
    return False
  return True


def _stories(cfg, changes):
  """Returns if nvfp4 collapses in all seeds; and, with all three, in none."""
  configs = _variants(cfg, changes)
  configs += _variants(cfg, [change | STABILIZERS for change in changes])
  outcome = simulator.sweep(configs, _keys(cfg), per_step=False).outcome
  fell = outcome.collapse >= 0
  naive, stable = fell[:, : len(changes)], fell[:, len(changes) :]
  return naive.all(0), ~stable.any(0)


def _held(cfg, factors, changes):
  naive, stable = _stories(cfg, changes)
  holds = naive & stable
  at = factors.index(1.0)
  if not holds[at]:
    why = 'naive survives' if not naive[at] else 'stabilized collapses'
    return {'held': None, 'first_to_fail': [why, why]}
  low = high = at
  while low > 0 and holds[low - 1]:
    low -= 1
  while high < len(factors) - 1 and holds[high + 1]:
    high += 1

  def why(i):
    if not 0 <= i < len(factors):
      return None  # holds as far as we looked
    return 'naive survives' if not naive[i] else 'stabilized collapses'

  return {
      'held': [factors[low], factors[high]],
      'first_to_fail': [why(low - 1), why(high + 1)],
      'looked': [factors[0], factors[-1]],
  }


def _benchmark(cfg) -> Iterator[dict[str, Any]]:
  """Yields times of one process: ours, a plain loop, long runs, many systems.

  All times are after compilation, `first_seconds` with it. The systems of the
  ratio differ in what events depend on, so that none are shared.
  """
  count = min(cfg.configurations, 512)
  systems = [
      dataclasses.replace(cfg.system, environment_latency=5 + i / 100)
      for i in range(count)
  ]
  steps, key = cfg.system.steps, jax.random.key(0)
  ours_first = _seconds(lambda: simulator.sweep(systems, key, per_step=False))
  loop = systems[:: max(count // 16, 1)]
  key_data = tuple(int(word) for word in jax.random.key_data(key))

  def plain():
    for system in loop:
      simulator_peer.simulate(
          simulator.knobs(system),
          key_data,
          steps=steps,
          group_size=system.group_size,
      )

  ratios = []
  for _ in range(5):  # in turns, so that other load meets both
    ours = _seconds(lambda: simulator.sweep(systems, key, per_step=False))
    theirs = _seconds(plain)
    rates = count * steps / ours, len(loop) * steps / theirs
    ratios.append(rates[0] / rates[1])
    yield {
        'kind': 'ratio',
        'ours_config_steps_per_second': rates[0],
        'loop_config_steps_per_second': rates[1],
        'ratio': ratios[-1],
    }
  yield {
      'kind': 'ratio_median',
      'ratio': float(np.median(ratios)),
      'configurations': count,
      'updates': steps,
      'first_seconds': ours_first,
  }
  long = dataclasses.replace(cfg.system, steps=1000)
  first = _seconds(lambda: simulator.simulate(long, key))
  second = _seconds(lambda: simulator.simulate(long, key))
  yield {'kind': 'long', 'updates': 1000, 'first_seconds': first} | {
      'seconds': second
  }
  systems = [system for _, system in _random_systems(cfg)]
  first = _seconds(lambda: simulator.sweep(systems, key, per_step=False))
  yield {
      'kind': 'many',
      'configurations': len(systems),
      'updates': steps,
      'first_seconds': first,
  }


def _seconds(function):
  start = time.monotonic()
  function()
  return time.monotonic() - start


if __name__ == '__main__':
  run.launch(main, PRESETS)
