"""A simulator of asynchronous reinforcement learning: speed against drift.

Samplers generate all the time while a learner updates. The policy that made a
token and the policy that is trained on it differ for two reasons, staleness and
quantization; their accumulated effect is drift; past what an update can
correct, the reward collapses. More asynchrony and fewer bits are faster and
drift more; stabilizers give the margin back.

`settings` has the knobs, `event_engine` the events (integer ticks, exact),
`drift_model` the equations, `constants` the numbers and their sources. Nothing
the drift does changes an event: a real loop can replay the schedule
(`schedules`).
"""

from collections.abc import Sequence
from concurrent import futures
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax.rl.simulator import drift_model
from nvfp4_jax.rl.simulator import event_engine
from nvfp4_jax.rl.simulator import settings

# The names that a user of this module needs have one home.
SimulatorConfig = settings.SimulatorConfig
Knobs = settings.Knobs
knobs = settings.knobs

_CHUNK = 128  # configurations that are vmapped at a time, at most
_FEWEST = 4  # and at least; copies fill up
_THREADS = 2  # chunks at a time: a scan of small operations fills one core


class Events(NamedTuple):
  """What the engine made of a configuration; vmapped ones have leading axes.

  Attributes:
    steps: `event_engine.Steps`, or None if not asked for.
    token_lag: `[steps]` float32, what the drift depends on.
    steps_per_hour, tokens_per_second: float32, trained, over the whole run.
    sampler_utilization, trainer_utilization: float32, over the whole run.
    lag_mean: float32, over all groups that were trained.
    dropped_fraction: float32, evicted and stale, of all finished groups.
    truncated: bool, more groups were needed than `Sizes.groups`: rerun.
  """

  steps: Any
  token_lag: jax.Array
  steps_per_hour: jax.Array
  tokens_per_second: jax.Array
  sampler_utilization: jax.Array
  trainer_utilization: jax.Array
  lag_mean: jax.Array
  dropped_fraction: jax.Array
  truncated: jax.Array


class Outcome(NamedTuple):
  """What the drift made of it; vmapped ones have leading axes.

  Attributes:
    curves: `drift_model.Curves`, or None if not asked for.
    quantization: float32, q, the part of the mismatch without staleness, nats.
    stale: float32, s, mean over steps, nats.
    max_drift, margin: float32, margin = drift_threshold - max_drift.
    final_reward: float32.
    collapse: int32, `drift_model.collapse_step`.
  """

  curves: Any
  quantization: jax.Array
  stale: jax.Array
  max_drift: jax.Array
  margin: jax.Array
  final_reward: jax.Array
  collapse: jax.Array


class Result(NamedTuple):
  """Both halves of a simulation."""

  events: Events
  outcome: Outcome


def sizes(
    engines: Sequence[event_engine.Engine],
    *,
    steps: int,
    group_size: int,
    factor: float = 1.0,
) -> event_engine.Sizes:
  """Returns shapes that are probably large enough.

  Args:
    engines: of configurations, with Python numbers.
    steps: updates.
    group_size: G.
    factor: on a guess of how many groups are needed.
  """
  groups = max(_groups(e, steps, group_size) for e in engines)
  groups = factor * (groups + 1.25 * math.sqrt(groups) + 1)
  return event_engine.Sizes(
      slots=max(e.samplers for e in engines),
      groups=_round_up(groups),
      window=max(e.buffer + e.samplers + e.batch for e in engines),
      history=max(e.max_staleness // e.sync_interval for e in engines) + 1,
      synchronous=any(e.max_staleness == 0 for e in engines),
      in_flight=any(e.in_flight for e in engines),
  )


def _groups(engine, steps, group_size):
  """Returns about how many groups a slot does in the run."""
  if engine.max_staleness == 0:
    return -(-engine.batch // engine.samplers) * steps
  group, step = settings.typical(engine, group_size)
  return step * steps / group


def _round_up(x):
  """Returns a power of two, x or more, as every new shape compiles."""
  return 2 ** max(math.ceil(math.log2(x)), 0)


def run_engine(
    engine: event_engine.Engine,
    key: jax.Array,
    sizes: event_engine.Sizes,
    *,
    steps: int,
    group_size: int,
) -> Events:
  """Returns the events of one configuration; may be traced and vmapped.

  Args:
    engine: numbers.
    key: typed key; same key, same result, whatever the sizes.
    sizes: shapes; `Events.truncated` says if `groups` was too small.
    steps: updates.
    group_size: G.
  """
  groups = event_engine.draw_groups(
      engine, key, sizes, steps=steps, group_size=group_size
  )
  events = event_engine.run_steps(engine, groups, sizes, steps=steps)
  total = events.resume[-1].astype(jnp.float32)
  seconds = total / event_engine.TICKS_PER_SECOND
  wall = (events.resume - events.ready).astype(jnp.float32)
  dropped = jnp.sum(events.evicted) + jnp.sum(events.stale)
  return Events(
      steps=events,
      token_lag=events.token_lag,
      steps_per_hour=3600 * steps / seconds,
      tokens_per_second=jnp.sum(events.tokens.astype(jnp.float32)) / seconds,
      sampler_utilization=jnp.sum(events.sampler_utilization * wall) / total,
      trainer_utilization=jnp.sum(events.trainer_utilization * wall) / total,
      lag_mean=jnp.mean(events.lag_mean),
      dropped_fraction=dropped / events.finished[-1],
      truncated=events.take[-1] - events.pause[-1] > groups.known_until,
  )


def run_drift(model: drift_model.Drift, token_lag: jax.Array) -> Outcome:
  """Returns what `[steps]` lags do; may be traced and vmapped."""
  curves = drift_model.follow(model, token_lag)
  max_drift = jnp.max(curves.drift)
  return Outcome(
      curves=curves,
      quantization=jnp.asarray(model.quantization, jnp.float32),
      stale=jnp.mean(curves.stale),
      max_drift=max_drift,
      margin=model.threshold - max_drift,
      final_reward=curves.reward[-1],
      collapse=drift_model.collapse_step(curves.reward),
  )


def simulate(cfg: SimulatorConfig, key: jax.Array) -> Result:
  """Returns the simulation of one configuration, numpy arrays."""
  return jax.tree.map(lambda x: x[0], sweep([cfg], key))


def sweep(
    configs: Sequence[SimulatorConfig],
    key: jax.Array,
    *,
    per_step: bool = True,
) -> Result:
  """Returns the Result of every configuration, numpy arrays `[configs, ..]`.

  All see the same random numbers. Configurations that differ only in what the
  drift depends on share their events. What needed larger shapes than
  guessed runs again.

  Args:
    configs: of one group_size and number of steps.
    key: a typed key, or `[S]` keys; then arrays are `[S, configs, ..]`.
    per_step: False leaves `steps` and `curves` out, to save memory.

  Raises:
    ValueError: no configurations, or different group_size or steps.
  """
  shapes = {(cfg.group_size, cfg.steps) for cfg in configs}
  if len(shapes) != 1:
    raise ValueError(
        f'Configurations need one (group_size, steps), not {sorted(shapes)}.'
    )
  ((group_size, steps),) = shapes
  keys = key[None] if key.ndim == 0 else key
  everything = [knobs(cfg) for cfg in configs]
  run = functools.partial(
      _run_chunk, keys, steps=steps, group_size=group_size, per_step=per_step
  )
  events = _events([k.engine for k in everything], run, steps, group_size)
  models = _stack([k.drift for k in everything], np.float32)
  outcome = _drifts(models, events.token_lag, per_step=per_step)
  result = jax.tree.map(np.asarray, Result(events, outcome))
  return jax.tree.map(lambda x: x[0], result) if key.ndim == 0 else result


def _events(engines, run, steps, group_size):
  """Returns the Events of all engines, `[keys, configs, ..]`.

  Every shape takes seconds to compile, so chunks have few of them: slots for
  all, groups by powers of two, and whole chunks where there is more than one.
  """
  unique = list(dict.fromkeys(engines))
  largest = event_engine.Engine(*map(max, zip(*unique, strict=True)))
  needed = lambda e: sizes([e], steps=steps, group_size=group_size).groups
  shape = lambda e: (e.max_staleness == 0, needed(e))
  done, pending, factor = {}, sorted(unique, key=shape), 1
  while pending:
    chunks = []
    for (_, groups), alike in itertools.groupby(pending, shape):
      alike = list(alike)
      length = min(_round_up(max(len(alike), _FEWEST)), _CHUNK)
      for i in range(0, len(alike), _CHUNK):
        chunks.append((alike[i : i + _CHUNK], length, factor * groups))
    one = lambda chunk: run(*chunk, largest=largest)
    with futures.ThreadPoolExecutor(_THREADS) as pool:
      for (chunk, *_), events in zip(
          chunks, pool.map(one, chunks), strict=True
      ):
        done |= {e: (events, i) for i, e in enumerate(chunk)}
    pending = [e for e in pending if done[e][0].truncated[:, done[e][1]].any()]
    factor *= 2
  rows = []
  for engine in engines:
    events, i = done[engine]
    rows.append(jax.tree.map(lambda x, i=i: x[:, i], events))
  return jax.tree.map(lambda *x: np.stack(x, 1), *rows)


def _run_chunk(
    keys, engines, length, groups, *, steps, group_size, per_step, largest
):
  """Returns the Events of engines, of which copies fill up to a length."""
  shapes = event_engine.Sizes(
      slots=largest.samplers,
      groups=groups,
      window=largest.samplers + largest.buffer + largest.batch,
      history=largest.max_staleness + 1,
      synchronous=any(e.max_staleness == 0 for e in engines),
      in_flight=any(e.in_flight for e in engines),
  )
  engines = [*engines, *engines[:1] * (length - len(engines))]
  engines_of = _FEW if length <= _FEWEST else _MANY
  events = engines_of(
      _stack(engines, np.int32),
      keys,
      sizes=shapes,
      steps=steps,
      group_size=group_size,
      per_step=per_step,
  )
  return jax.tree.map(np.asarray, events)


def _engines(stacked, keys, *, sizes, steps, group_size, per_step):
  def one(engine, key):
    events = run_engine(engine, key, sizes, steps=steps, group_size=group_size)
    return events if per_step else events._replace(steps=None)

  return jax.vmap(jax.vmap(one, (0, None)), (None, 0))(stacked, keys)


_STATIC = ('sizes', 'steps', 'group_size', 'per_step')
_MANY = jax.jit(_engines, static_argnames=_STATIC)
# Compiles in half the time and runs four times as long, which is short.
_FEW = jax.jit(
    _engines,
    static_argnames=_STATIC,
    compiler_options={'xla_backend_optimization_level': 0},
)


@functools.partial(jax.jit, static_argnames='per_step')
def _drifts(models, token_lag, *, per_step):
  def one(model, lag):
    outcome = run_drift(model, lag)
    return outcome if per_step else outcome._replace(curves=None)

  return jax.vmap(jax.vmap(one), (None, 0))(models, token_lag)


def _stack[T](items: Sequence[T], dtype: type) -> T:
  return jax.tree.map(lambda *x: np.array(x, dtype), *items)


def pareto_front(throughput: np.ndarray, margin: np.ndarray) -> np.ndarray:
  """Returns indices of the configurations that no other beats in both.

  Args:
    throughput: `[N]`, more is better.
    margin: `[N]`, more is better.

  Returns:
    Indices by increasing throughput, so by decreasing margin; of equal ones the
    first.
  """
  order = np.lexsort((np.arange(len(margin)), -margin, -throughput))
  best = np.maximum.accumulate(margin[order])
  before = np.concatenate([[-np.inf], best[:-1]])
  return order[margin[order] > before][::-1]


def best_stable(
    throughput: np.ndarray, margin: np.ndarray, *, least: float = 0.0
) -> int:
  """Returns the index of the fastest configuration with a margin above `least`.

  Raises:
    ValueError: there is none.
  """
  stable = margin > least
  if not stable.any():
    raise ValueError(
        f'No margin is above {least}; the largest is {margin.max():.3g}.'
    )
  return int(np.argmax(np.where(stable, throughput, -np.inf)))
