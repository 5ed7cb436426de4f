"""Who samples what with which weights, and what is trained when: the events.

All times are integer ticks of 10 ms and all lengths integer tokens, so that a
port in another language makes the same decisions. The rules:

1. A slot starts a group of G responses. It is finished after the longest of
   them (and the waits for the environment), and the slot starts the next one at
   the same tick. Slots never wait for the trainer.
2. A finished group enters a queue, in the order of finishing; equal ticks: the
   smaller slot first. When the trainer looks, only the youngest `buffer` groups
   are there, the others were evicted.
3. The trainer, at version k, looks once and then waits for what is missing: it
   goes through the queue and through what finishes, drops a group whose version
   v has k - v > max_staleness, and takes the first B others.
4. Training ends at version k + 1. Every `sync_interval` versions the weights go
   to the samplers. Either all stand still for `sync_ticks`, samplers and
   trainer (a group keeps its version), or, in flight, nobody does and the
   weights arrive `sync_ticks` later, in the middle of groups.
5. max_staleness = 0 is synchronous: B groups per version, group i of a round on
   slot i mod `samplers`, and the samplers wait while the trainer works.

A sampler clock makes this quick. It stands still when all samplers do, so that
on it groups start and finish at times that do not depend on the trainer: they
are drawn and sorted once. wall = clock + pauses so far. What is left is one
pass over the steps, with a window of the sorted list.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.random import threefry2x32_p
import jax.numpy as jnp
import numpy as np

TICKS_PER_SECOND = 100
NEVER = np.int32(2**31 - 1)  # finish of a group that does not exist


class Sizes(NamedTuple):
  """Shapes of a simulation; static. Results do not depend on them.

  Attributes:
    slots: at least `samplers`.
    groups: drawn for each slot.
    window: at least buffer + samplers + batch.
    history: at least max_staleness // sync_interval + 1.
    synchronous: whether max_staleness may be 0.
    in_flight: whether weights may arrive in the middle of groups.
  """

  slots: int
  groups: int
  window: int
  history: int
  synchronous: bool
  in_flight: bool = True


class Engine(NamedTuple):
  """What events depend on: integers, leaves, so that vmap sweeps them.

  Attributes:
    samplers: slots.
    batch: B, groups of one training step.
    buffer: groups that the queue holds.
    max_staleness: largest k - v of a group that is trained.
    sync_interval: versions between syncs.
    sync_ticks: duration of a sync.
    in_flight: 1 if weights arrive in the middle of groups.
    log2_median: 256 log2 of the median length, in tokens.
    log2_sigma: 256 sigma / log(2) of the lognormal.
    horizon: longest response, in tokens.
    token_ticks: 256 ticks per token of a response.
    environment_ticks: a group's waits for its environment.
    train_ticks: 2^20 ticks per trained token.
    overhead_ticks: of a training step.
  """

  samplers: Any
  batch: Any
  buffer: Any
  max_staleness: Any
  sync_interval: Any
  sync_ticks: Any
  in_flight: Any
  log2_median: Any
  log2_sigma: Any
  horizon: Any
  token_ticks: Any
  environment_ticks: Any
  train_ticks: Any
  overhead_ticks: Any


class Groups(NamedTuple):
  """Groups in the order of finishing, on the sampler clock.

  Attributes:
    finish: `[L]` int32, NEVER where there is none.
    start: `[L]` int32.
    tokens: `[L]` int32, of all G responses.
    slot: `[L]` int32.
    index: `[L]` int32, how many groups the slot had before.
    known_until: int32; later than this the list is not whole.
  """

  finish: jax.Array
  start: jax.Array
  tokens: jax.Array
  slot: jax.Array
  index: jax.Array
  known_until: jax.Array


class Steps(NamedTuple):
  """What a step did; `[steps]` each, int32 if nothing else is said.

  Attributes:
    look: index in Groups where the queue began when the trainer looked.
    end: index behind the last group that it took or dropped.
    finished: groups finished until the batch was whole.
    threshold: clock; groups that started earlier were too old.
    ready, take, done, resume: wall ticks at which the trainer looked, had its
      batch, had trained, and could look again.
    pause: ticks that the samplers had stood still by `take`.
    idle: ticks that they stand still after it.
    arrives: clock at which the new weights reach them, NEVER without a sync.
    tokens: trained.
    evicted, stale: groups dropped in this step by rules 2 and 3.
    lag_mean: float32, of k - v over groups, v the version they started with.
    token_lag: float32, the same over tokens, v the version that made a token.
    lag_p95: smallest lag that at least 95 % of the groups do not exceed.
    lag_max: largest lag.
    sampler_utilization, trainer_utilization: float32, busy share of the time
      from `ready` to `resume`.
  """

  look: jax.Array
  end: jax.Array
  finished: jax.Array
  threshold: jax.Array
  ready: jax.Array
  take: jax.Array
  done: jax.Array
  resume: jax.Array
  pause: jax.Array
  idle: jax.Array
  arrives: jax.Array
  tokens: jax.Array
  evicted: jax.Array
  stale: jax.Array
  lag_mean: jax.Array
  token_lag: jax.Array
  lag_p95: jax.Array
  lag_max: jax.Array
  sampler_utilization: jax.Array
  trainer_utilization: jax.Array


@functools.cache
def quantiles() -> np.ndarray:
  """Returns `[1024]` int32, 1024 times normal quantiles at (i + 1/2) / 1024.

  Reference: Acklam's rational approximation, relative error 1.15e-9, in
  float64; the upper half is minus the lower half.
  """
  a = (-3.969683028665376e1, 2.209460984245205e2, -2.759285104469687e2)
  a += (1.383577518672690e2, -3.066479806614716e1, 2.506628277459239)
  b = (-5.447609879822406e1, 1.615858368580409e2, -1.556989798598866e2)
  b += (6.680131188771972e1, -1.328068155288572e1, 1.0)
  c = (-7.784894002430293e-3, -3.223964580411365e-1, -2.400758277161838)
  c += (-2.549732539343734, 4.374664141464968, 2.938163982698783)
  d = (7.784695709041462e-3, 3.224671290700398e-1, 2.445134137142996)
  d += (3.754408661907416, 1.0)
  p = (np.arange(512) + 0.5) / 1024
  q = np.sqrt(-2 * np.log(p))
  tail = np.polyval(c, q) / np.polyval(d, q)
  q = p - 0.5
  center = q * np.polyval(a, q * q) / np.polyval(b, q * q)
  z = np.where(p < 0.02425, tail, center)
  lower = np.floor(1024 * z + 0.5).astype(np.int32)
  return np.concatenate([lower, -lower[::-1]])


# 2^14 * 2^(i / 256)
_EXP2 = np.floor(2 ** (14 + np.arange(256) / 256) + 0.5).astype(np.int32)


def length_table(engine: Engine) -> jax.Array:
  """Returns `[1024]` int32 lengths, equally likely, in increasing order.

  e = log2_median + floor((log2_sigma z + 512) / 1024), z of `quantiles`; the
  length is 2^(e / 256), from a table of the fraction, cut to [1, horizon].
  """
  e = engine.log2_median + ((engine.log2_sigma * quantiles() + 512) >> 10)
  e = jnp.clip(e, 0, 17 * 256)  # 2^17 tokens at most
  whole = e >> 8
  mantissa = jnp.asarray(_EXP2)[e & 255]
  down = mantissa >> jnp.maximum(14 - whole, 0)
  length = down << jnp.maximum(whole - 14, 0)
  return jnp.clip(length, 1, engine.horizon)


def draw_lengths(
    engine: Engine, key: jax.Array, sizes: Sizes, group_size: int
) -> jax.Array:
  """Returns `[slots, groups, G]` int32 response lengths.

  Response r of a slot's j-th group takes entry (x >> 10 (r mod 3)) mod 1024 of
  the table, x the first word of Threefry-2x32 (20 rounds) under the key's two
  words at the counter (slot, j ceil(G / 3) + floor(r / 3)).
  """
  data = jax.random.key_data(key).astype(jnp.uint32)
  per_group = -(-group_size // 3)
  shape = (sizes.slots, sizes.groups, per_group)
  slot = lax.broadcasted_iota(jnp.uint32, shape, 0)
  count = lax.broadcasted_iota(jnp.uint32, shape, 1) * np.uint32(per_group)
  count += lax.broadcasted_iota(jnp.uint32, shape, 2)
  broadcast = lambda x: jnp.broadcast_to(x, shape)
  words = threefry2x32_p.bind(
      broadcast(data[0]), broadcast(data[1]), slot, count
  )[0]
  shifts = np.arange(group_size, dtype=np.uint32)
  words = words[..., shifts // 3] >> (10 * (shifts % 3))
  return length_table(engine)[words & np.uint32(1023)]


def draw_groups(
    engine: Engine,
    key: jax.Array,
    sizes: Sizes,
    *,
    steps: int,
    group_size: int,
) -> Groups:
  """Returns all groups that the slots may generate, sorted."""
  lengths = draw_lengths(engine, key, sizes, group_size)
  longest, tokens = lax.reduce(  # one pass for both
      (lengths, lengths),
      (np.int32(0), np.int32(0)),
      lambda x, y: (jnp.maximum(x[0], y[0]), x[1] + y[1]),
      (2,),
  )
  generation = (longest * engine.token_ticks) >> 8
  duration = jnp.maximum(generation + engine.environment_ticks, 1)
  active = (jnp.arange(sizes.slots) < engine.samplers)[:, None]
  finish = jnp.cumsum(duration, 1)
  known_until = jnp.min(jnp.where(active[:, 0], finish[:, -1], NEVER))
  finish = jnp.where(active, finish, NEVER)
  if sizes.synchronous:
    synchronous = engine.max_staleness == 0
    rounds, known = _in_rounds(engine, duration, steps)
    finish = jnp.where(synchronous, rounds, finish)
    known_until = jnp.where(synchronous, known, known_until)
  name = jnp.arange(finish.size, dtype=jnp.int32)
  finish, name = lax.sort((finish.ravel(), name), num_keys=1, is_stable=True)
  start = finish - duration.ravel()[name]
  slot, index = name // sizes.groups, name % sizes.groups
  return Groups(finish, start, tokens.ravel()[name], slot, index, known_until)


def _in_rounds(engine, duration, steps):
  """Returns finish `[slots, groups]` and known_until of rule 5.

  A slot with q groups in each round does them one by one; the next round opens
  when the last slot is done.
  """
  slots, groups = duration.shape
  slot = jnp.arange(slots)[:, None]
  q = (engine.batch - slot + engine.samplers - 1) // engine.samplers
  q = jnp.where(slot < engine.samplers, jnp.maximum(q, 0), 0)
  until = jnp.cumsum(duration, 1)
  before = jnp.pad(until, ((0, 0), (1, 0)))
  edges = jnp.minimum(jnp.arange(steps + 1)[None] * q, groups)
  edges = jnp.take_along_axis(before, edges, 1)
  opens = jnp.cumsum(jnp.max(edges[:, 1:] - edges[:, :-1], 0))
  opens = jnp.pad(opens, (1, 0))
  rounds = jnp.arange(groups)[None] // jnp.maximum(q, 1)
  first = jnp.minimum(rounds * q, groups)
  shift = opens[jnp.minimum(rounds, steps)] - jnp.take_along_axis(
      before, first, 1
  )
  exists = (q > 0) & (rounds < steps) & (first + q <= groups)
  known_until = jnp.where(jnp.max(q) * steps <= groups, NEVER, 0)
  return jnp.where(exists, until + shift, NEVER), known_until


class _Carry(NamedTuple):
  end: jax.Array
  ready: jax.Array
  pause: jax.Array
  since: jax.Array  # versions since the last sync
  syncs: jax.Array  # `[history]` clocks of the last ones, newest first


def run_steps(
    engine: Engine, groups: Groups, sizes: Sizes, *, steps: int
) -> Steps:
  """Returns what every step did."""
  zero = jnp.int32(0)
  # Padded, so that a window never starts earlier than asked for.
  pad = lambda x, value: jnp.pad(x, (0, sizes.window), constant_values=value)
  lists = pad(groups.finish, NEVER), pad(groups.start, -1)
  lists += (pad(groups.tokens, 0),)
  carry = _Carry(zero, zero, zero, zero, jnp.full(sizes.history, -1, jnp.int32))
  step = lambda carry, _: _step(engine, groups, lists, sizes, carry)
  return lax.scan(step, carry, None, length=steps)[1]


def _step(engine, groups, lists, sizes, carry):
  synchronous = engine.max_staleness == 0
  allowed = (engine.max_staleness - carry.since) // engine.sync_interval
  threshold = carry.syncs[jnp.clip(allowed, 0, sizes.history - 1)]
  clock = carry.ready - carry.pause
  # What was finished by the threshold is too old: while weights are on their
  # way to the samplers, that can be more than a window.
  arrived, hopeless = jnp.searchsorted(
      groups.finish,
      jnp.stack([clock, threshold]),
      side='right',
      method='scan_unrolled',
  ).astype(jnp.int32)
  look = jnp.maximum(carry.end, arrived - engine.buffer)
  first = jnp.maximum(look, hopeless)
  finish, start, tokens = (
      lax.dynamic_slice_in_dim(x, first, sizes.window) for x in lists
  )
  valid = (start >= threshold) & (finish < NEVER)
  last = _position(valid, engine.batch)
  taken = valid & (jnp.arange(sizes.window) <= last)
  end = first + last + 1
  take = jnp.maximum(clock, finish[jnp.minimum(last, sizes.window - 1)])
  trained = jnp.sum(jnp.where(taken, tokens, 0))
  work = engine.overhead_ticks + (((trained >> 8) * engine.train_ticks) >> 12)
  done = take + carry.pause + work
  is_sync = carry.since + 1 == engine.sync_interval
  stands = is_sync & (synchronous | (engine.in_flight == 0))
  resume = done + jnp.where(stands, engine.sync_ticks, 0)
  arrives = done - carry.pause + jnp.where(stands, 0, engine.sync_ticks)
  arrives = jnp.where(synchronous, take, arrives)
  pushed = jnp.concatenate([arrives[None], carry.syncs[:-1]])
  idle = jnp.where(stands, engine.sync_ticks, 0)
  idle = jnp.where(synchronous, resume - take - carry.pause, idle)
  lag = _lags(engine, sizes, carry, taken, start, finish, tokens, trained)
  wall = jnp.maximum(resume - carry.ready, 1).astype(jnp.float32)
  busy_slots = jnp.sum(jnp.where(taken, finish - start, 0).astype(jnp.float32))
  utilization = jnp.where(
      synchronous,
      busy_slots / (engine.samplers * wall),
      1 - idle.astype(jnp.float32) / wall,
  )
  out = Steps(
      look=look,
      end=end,
      finished=jnp.maximum(arrived, end),
      threshold=threshold,
      ready=carry.ready,
      take=take + carry.pause,
      done=done,
      resume=resume,
      pause=carry.pause,
      idle=idle,
      arrives=jnp.where(is_sync, arrives, NEVER),
      tokens=trained,
      evicted=look - carry.end,
      stale=end - look - engine.batch,
      sampler_utilization=utilization,
      trainer_utilization=work.astype(jnp.float32) / wall,
      **lag,
  )
  carry = _Carry(
      end,
      resume,
      carry.pause + idle,
      jnp.where(is_sync, 0, carry.since + 1),
      jnp.where(is_sync, pushed, carry.syncs),
  )
  return carry, out


def _position(mask, count):
  """Returns the index of the count-th True of `[W]`, W if there is none.

  Bisection; a cumulative sum would take longer.
  """
  places = jnp.arange(len(mask))
  index = jnp.int32(0)
  for bit in reversed(range(len(mask).bit_length())):
    higher = index + 2**bit
    before = jnp.sum(mask & (places < higher), dtype=jnp.int32)
    index = jnp.where(before < count, higher, index)
  return jnp.minimum(index, len(mask))


def _lags(engine, sizes, carry, taken, start, finish, tokens, trained):
  """Returns statistics of the lag of the groups that were taken."""
  interval, base = engine.sync_interval, carry.since
  syncs = carry.syncs[:, None]
  passed = start < syncs  # [history, window]
  count = jnp.where(taken, jnp.sum(passed, 0, dtype=jnp.int32), 0)
  share = count.astype(jnp.float32)
  if sizes.in_flight:
    # Only the tokens before a sync are of the version before it.
    per_tick = 1 / (finish - start).astype(jnp.float32)
    before = jnp.minimum((syncs - start).astype(jnp.float32) * per_tick, 1.0)
    before = jnp.sum(jnp.where(passed, before, 0.0), 0)
    share = jnp.where(engine.in_flight == 1, before, share)
  old = jnp.sum(jnp.where(taken, share * tokens.astype(jnp.float32), 0.0))
  # All but a twentieth of the groups, rounded down, are not above the 95 %.
  above = lambda lag: 20 * jnp.sum(count > lag) > engine.batch
  p95 = jnp.int32(0)
  for bit in reversed(range(len(carry.syncs).bit_length())):
    higher = p95 + 2**bit
    p95 = jnp.where(above(higher - 1), higher, p95)
  batch = jnp.asarray(engine.batch, jnp.float32)
  mean = base + interval * jnp.sum(count).astype(jnp.float32) / batch
  return {
      'lag_mean': mean,
      'token_lag': base + interval * old / trained.astype(jnp.float32),
      'lag_p95': base + interval * p95,
      'lag_max': base + interval * jnp.max(count),
  }
