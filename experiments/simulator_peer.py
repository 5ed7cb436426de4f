"""The simulator as a plain Python loop: an oracle, and a peer for its speed.

One configuration, one event after the other, with a heap, a queue and Python
numbers. Only the random lengths are drawn by numpy, a block of groups at a
time. It reads the same `Knobs`; the rules are those of
`nvfp4_jax.rl.simulator.event_engine`, the equations those of `drift_model`.
"""

import bisect
import collections
from collections.abc import Sequence
import heapq
import math
from typing import Any

import numpy as np

from nvfp4_jax.rl.simulator import drift_model
from nvfp4_jax.rl.simulator import event_engine
from nvfp4_jax.rl.simulator import settings

_BLOCK = 16  # groups of a slot that are drawn at a time
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: Sequence[int], x0: Any, x1: Any) -> Any:
  """Returns the first word of Threefry-2x32, 20 rounds; uint32 arrays."""
  k0, k1 = np.uint32(key[0]), np.uint32(key[1])
  keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
  x0, x1 = x0 + keys[0], x1 + keys[1]
  for i in range(5):
    for rotation in _ROTATIONS[i % 2]:
      x0 = x0 + x1
      x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
      x1 = x1 ^ x0
    x0 = x0 + keys[(i + 1) % 3]
    x1 = x1 + keys[(i + 2) % 3] + np.uint32(i + 1)
  return x0


def length_table(engine: event_engine.Engine) -> np.ndarray:
  """Returns the 1024 lengths, by the formula of `event_engine`."""
  table = []
  for z in event_engine.quantiles().tolist():
    e = engine.log2_median + math.floor((engine.log2_sigma * z + 512) / 1024)
    e = min(max(e, 0), 17 * 256)
    mantissa = math.floor(2 ** (14 + e % 256 / 256) + 0.5)
    length = math.floor(mantissa * 2.0 ** (e // 256 - 14))
    table.append(min(max(length, 1), engine.horizon))
  return np.array(table)


class _Lengths:
  """Longest response and tokens of a slot's groups."""

  def __init__(self, table, key, slots, group_size):
    self._table, self._key = table, key
    self._slots, self._size = slots, group_size
    self._blocks = {}  # by block, then by slot

  def __call__(self, slot, index):
    block = index // _BLOCK
    if block not in self._blocks:
      size = _BLOCK * -(-self._size // 3)
      count = np.arange(block * size, (block + 1) * size, dtype=np.uint32)
      slots = np.arange(self._slots, dtype=np.uint32)[:, None]
      words = threefry(self._key, slots, count[None])
      parts = [(words >> np.uint32(shift)) & 1023 for shift in (0, 10, 20)]
      lengths = self._table[np.stack(parts, -1)]
      lengths = lengths.reshape(self._slots, _BLOCK, -1)[..., : self._size]
      self._blocks[block] = lengths.max(2).tolist(), lengths.sum(2).tolist()
    longest, tokens = self._blocks[block]
    return longest[slot][index % _BLOCK], tokens[slot][index % _BLOCK]


def simulate(
    knobs: settings.Knobs,
    key: Sequence[int],
    *,
    steps: int,
    group_size: int,
) -> list[dict[str, Any]]:
  """Returns a row for each step.

  A row has the names of `event_engine.Steps`, those of
  `drift_model.Curves` after `curve_`, and `batch`, a list of (slot, groups
  that the slot had made before, version).
  """
  e = knobs.engine
  table = length_table(e)
  lengths = _Lengths(table, key, e.samplers, group_size)
  rows, syncs = [], []  # syncs: clocks at which weights arrived
  heap, queue, started = [], collections.deque(), [0] * e.samplers
  ready = pause = finished = 0

  def start(slot, clock):
    index = started[slot]
    started[slot] += 1
    longest, tokens = lengths(slot, index)
    ticks = (longest * e.token_ticks >> 8) + e.environment_ticks
    heapq.heappush(heap, (clock + max(ticks, 1), slot, index, clock, tokens))

  def version(clock):
    return bisect.bisect_right(syncs, clock) * e.sync_interval

  def next_group():
    group = heapq.heappop(heap)
    if e.max_staleness:
      start(group[1], group[0])
    elif round_left[group[1]]:
      round_left[group[1]] -= 1
      start(group[1], group[0])
    return group

  if e.max_staleness:
    for slot in range(e.samplers):
      start(slot, 0)
  for k in range(steps):
    clock = ready - pause
    if not e.max_staleness:
      round_left = [0] * e.samplers
      for group in range(e.batch):
        round_left[group % e.samplers] += 1
      for slot in range(min(e.samplers, e.batch)):
        round_left[slot] -= 1
        start(slot, clock)
    while heap and heap[0][0] <= clock:
      queue.append(next_group())
      finished += 1
    evicted = stale = 0
    while len(queue) > e.buffer:
      queue.popleft()
      evicted += 1
    batch, take = [], clock
    while len(batch) < e.batch:
      if queue:
        group = queue.popleft()
      else:
        group = next_group()
        finished += 1
        take = max(take, group[0])
      if k - version(group[3]) <= e.max_staleness:
        batch.append(group)
      else:
        stale += 1
    tokens = sum(group[4] for group in batch)
    work = e.overhead_ticks + ((tokens >> 8) * e.train_ticks >> 12)
    done = take + pause + work
    row = {'batch': [(g[1], g[2], version(g[3])) for g in batch]}
    row |= _lags(e, k, batch, syncs, version, tokens)
    row |= {'ready': ready, 'take': take + pause, 'done': done}
    row |= {'tokens': tokens, 'evicted': evicted, 'stale': stale}
    row |= {'finished': finished}
    ready, idle = done, 0
    if (k + 1) % e.sync_interval == 0:
      if not e.max_staleness:
        ready = done + e.sync_ticks
        idle = ready - take - pause
        syncs.append(take)
      elif e.in_flight:
        syncs.append(done - pause + e.sync_ticks)
      else:
        ready, idle = done + e.sync_ticks, e.sync_ticks
        syncs.append(done - pause)
    pause += idle
    wall = max(ready - row['ready'], 1)
    busy = wall - idle
    if not e.max_staleness:
      busy = sum(g[0] - g[3] for g in batch) / e.samplers
    row |= {'resume': ready, 'sampler_utilization': busy / wall}
    row['trainer_utilization'] = work / wall
    rows.append(row)
  _follow(knobs.drift, rows)
  return rows


def _lags(e, k, batch, syncs, version, tokens):
  """Returns the lags of a batch."""
  lags = sorted(k - version(group[3]) for group in batch)
  base, old = k - len(syncs) * e.sync_interval, 0.0
  for finish, _, _, start, count in batch:
    for sync in syncs[bisect.bisect_right(syncs, start) :]:
      share = (sync - start) / (finish - start) if e.in_flight else 1.0
      old += count * min(share, 1.0)
  return {
      'lag_mean': sum(lags) / len(lags),
      'token_lag': base + e.sync_interval * old / tokens,
      'lag_p95': lags[-(len(lags) // 20) - 1],
      'lag_max': lags[-1],
  }


def _follow(model, rows):
  """Adds mismatch, drift and reward to the rows."""
  drift, reward = 0.0, model.reward_start
  for row in rows:
    lag = row['token_lag'] ** model.power
    stale = model.staleness * model.learning_rate * lag
    m = math.sqrt(stale**2 + model.quantization**2)
    inside = 1 - math.exp(-model.bound / max(m, 1e-6))
    c = model.capacity * (1 + model.bonus * inside)
    load = m * drift
    row['curve_grad_norm'] = model.noise * math.sqrt(1 + (load / c) ** 2)
    drift = model.decay * drift + model.gain * model.noise * m
    drift += model.amplification * max(load - c, 0)
    drift = min(drift, drift_model.DRIFT_LIMIT)
    rate = model.learning * model.learning_rate
    gain = rate * (model.reward_max - reward) * math.exp(-(m**2) / (2 * c**2))
    loss = model.damage * max(drift - model.threshold, 0) * reward
    reward = max(reward + gain - loss, 0.0)
    row |= {'curve_stale': stale, 'curve_mismatch': m}
    row |= {'curve_drift': drift, 'curve_reward': reward}
    clipped = math.exp(-drift_model.CLIP_EPS / max(m, 1e-6))
    row['curve_clip_fraction'] = clipped
