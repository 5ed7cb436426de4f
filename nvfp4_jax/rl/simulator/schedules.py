"""What a simulation decided, group by group, for a real loop to replay.

A real loop goes through the updates k = 0, 1, ..: it has to have sampled, with
the weights of the version that the schedule names, the groups of `batches[k]`,
and trains on them; that makes version k + 1. Groups that were dropped need not
be sampled at all, but for the cost.
"""

import dataclasses
import functools

import jax
import numpy as np

from nvfp4_jax.rl import simulator
from nvfp4_jax.rl.simulator import event_engine
from nvfp4_jax.rl.simulator import settings

FATES = ('trained', 'stale', 'evicted', 'buffered', 'in_flight')


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Groups in the order in which they finished, numpy arrays.

  Seconds are of the wall clock. Where weights arrive in flight, a group has all
  versions from `version` to `newest_version`: see `token_versions`.

  Attributes:
    slot: `[N]` int32, which slot made the group.
    index: `[N]` int32, how many groups the slot had made before.
    version: `[N]` int32, weights with which the group started.
    newest_version: `[N]` int32, weights with which it ended.
    lengths: `[N, G]` int32, tokens of each response.
    start, finish: `[N]` float64 seconds.
    step: `[N]` int32, update that trained or dropped it, -1 if none did.
    fate: `[N]` int32, index in FATES.
    batches: `[steps, B]` int32, the groups of each update, in its order.
    take, done: `[steps]` float64 seconds, when the batch was whole and when the
      update had been made.
    drift_lag: `[steps]` float32, the lag that the drift model saw.
    syncs: `[syncs]` int32 sampler-clock ticks at which weights arrived.
    sync_interval: versions between syncs.
    in_flight: whether weights arrive in the middle of groups.
    start_ticks, finish_ticks: `[N]` int32 on the sampler clock.
  """

  slot: np.ndarray
  index: np.ndarray
  version: np.ndarray
  newest_version: np.ndarray
  lengths: np.ndarray
  start: np.ndarray
  finish: np.ndarray
  step: np.ndarray
  fate: np.ndarray
  batches: np.ndarray
  take: np.ndarray
  done: np.ndarray
  drift_lag: np.ndarray
  syncs: np.ndarray
  sync_interval: int
  in_flight: bool
  start_ticks: np.ndarray
  finish_ticks: np.ndarray


def schedule(
    cfg: settings.SimulatorConfig,
    key: jax.Array,
    *,
    sizes: event_engine.Sizes | None = None,
) -> Schedule:
  """Returns the schedule of `simulator.simulate(cfg, key)`.

  Args:
    cfg: the system.
    key: typed key.
    sizes: shapes, so that many configurations share a compilation; by default
      guessed. Larger ones are taken where they are too small.
  """
  engine = settings.knobs(cfg).engine
  factor = 1.0
  while True:
    if sizes is None or factor > 1:
      sizes = simulator.sizes(
          [engine], steps=cfg.steps, group_size=cfg.group_size, factor=factor
      )
    groups, lengths, steps = _run(engine, key, sizes, cfg.steps, cfg.group_size)
    if steps.take[-1] - steps.pause[-1] <= groups.known_until:
      break
    factor *= 1.5
  return _assemble(cfg, engine, groups, lengths, steps)


def token_versions(plan: Schedule, group: int, response: int) -> np.ndarray:
  """Returns `[length]` int32, the version that made each token of a response.

  A response of the group's longest length takes the group's whole time, a
  shorter one the beginning of it; a token is made at the middle of its share.
  """
  length = plan.lengths[group, response]
  if not plan.in_flight:
    return np.full(length, plan.version[group], np.int32)
  first, last = plan.start_ticks[group], plan.finish_ticks[group]
  share = (np.arange(length) + 0.5) / plan.lengths[group].max()
  count = np.searchsorted(plan.syncs, first + share * (last - first), 'right')
  return (count * plan.sync_interval).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _run(engine, key, sizes, steps, group_size):
  groups = event_engine.draw_groups(
      engine, key, sizes, steps=steps, group_size=group_size
  )
  lengths = event_engine.draw_lengths(engine, key, sizes, group_size)
  events = event_engine.run_steps(engine, groups, sizes, steps=steps)
  return groups, lengths, events


def _assemble(cfg, engine, groups, lengths, steps):
  groups, lengths, steps = jax.tree.map(np.asarray, (groups, lengths, steps))
  count = int(steps.finished[-1])
  rows = np.concatenate([np.arange(count), _in_flight(cfg, groups, count)])
  slot, index = groups.slot[rows], groups.index[rows]
  start, finish = groups.start[rows], groups.finish[rows]
  step = np.full(len(rows), -1, np.int32)
  fate = np.full(len(rows), FATES.index('buffered'), np.int32)
  fate[count:] = FATES.index('in_flight')
  begin = np.concatenate([[0], steps.end[:-1]])
  batches = np.zeros((cfg.steps, cfg.batch), np.int32)
  for k in range(cfg.steps):
    step[begin[k] : steps.end[k]] = k
    fate[begin[k] : steps.look[k]] = FATES.index('evicted')
    seen = np.arange(steps.look[k], steps.end[k])
    valid = start[seen] >= steps.threshold[k]
    fate[seen] = np.where(valid, FATES.index('trained'), FATES.index('stale'))
    batches[k] = seen[valid]
  syncs = steps.arrives[steps.arrives < event_engine.NEVER]
  stands = steps.idle > 0
  stops, after = steps.arrives[stands], (steps.pause + steps.idle)[stands]
  after = np.concatenate([[0], after])
  wall = lambda t, side: t + after[np.searchsorted(stops, t, side)]
  versions = lambda t: np.searchsorted(syncs, t, 'right') * cfg.sync_interval
  in_flight = cfg.in_flight_update and cfg.max_staleness > 0
  version = versions(start)
  newest = versions(finish - 1) if in_flight else version
  per_second = event_engine.TICKS_PER_SECOND
  return Schedule(
      slot=slot,
      index=index,
      version=version.astype(np.int32),
      newest_version=newest.astype(np.int32),
      lengths=lengths[slot, index],
      start=wall(start, 'right') / per_second,
      finish=wall(finish, 'left') / per_second,
      step=step,
      fate=fate,
      batches=batches,
      take=steps.take / per_second,
      done=steps.done / per_second,
      drift_lag=steps.token_lag,
      syncs=syncs,
      sync_interval=cfg.sync_interval,
      in_flight=in_flight,
      start_ticks=start,
      finish_ticks=finish,
  )


def _in_flight(cfg, groups, count):
  """Returns rows of what slots were at when `count` groups had finished."""
  if cfg.max_staleness == 0:
    return np.zeros(0, int)
  done = np.bincount(groups.slot[:count], minlength=groups.slot.max() + 1)
  rest = np.arange(count, len(groups.slot))
  exists = groups.finish[rest] < event_engine.NEVER
  return rest[exists & (groups.index[rest] == done[groups.slot[rest]])]
