"""What is simulated: a system, its precision, the constants of its drift.

`knobs` turns names and units into the numbers that a simulation reads.
"""

import dataclasses
import math
from typing import get_args, Literal, NamedTuple

import numpy as np

from nvfp4_jax.rl.simulator import constants
from nvfp4_jax.rl.simulator import drift_model
from nvfp4_jax.rl.simulator import event_engine

Precision = Literal['bf16', 'mxfp8', 'nvfp4_w4a16', 'nvfp4_w4a8', 'nvfp4_w4a4']
# Bounds of fields.
POSITIVE = ('samplers', 'batch', 'sync_interval', 'steps', 'group_size')
POSITIVE += ('sampler_speed', 'trainer_speed', 'mean_length', 'horizon')
POSITIVE += ('learning_rate', 'capacity', 'drift_threshold', 'reward_max')
NOT_NEGATIVE = ('max_staleness', 'sync_latency', 'turns')
NOT_NEGATIVE += ('environment_latency', 'step_overhead', 'length_cv')
NOT_NEGATIVE += ('staleness', 'staleness_power', 'drift_gain', 'damage')
NOT_NEGATIVE += ('amplification', 'learning', 'reward_start')


@dataclasses.dataclass(frozen=True)
class SimulatorConfig:
  """A system, its precision, and the constants of its drift.

  The defaults are a long horizon: a group takes about eight updates.

  Attributes:
    samplers: slots, each generates one group at a time.
    sampler_speed: tokens per second of one response, in bf16.
    trainer_speed: tokens per second, in bf16.
    step_overhead: seconds of a training step beside its tokens.
    batch: B, groups of a step.
    group_size: G, responses of a group.
    mean_length: of a response before it is cut, tokens; lognormal.
    length_cv: standard deviation over mean.
    horizon: longest response, tokens.
    turns: calls of the environment in a response.
    environment_latency: seconds of a call.
    max_staleness: K; a group of version v is trained at v .. v + K. 0 is
      synchronous: samplers wait while the trainer works.
    buffer_batches: finished groups that wait for the trainer, at most, over B.
    sync_interval: updates between syncs, at most K + 1.
    sync_latency: seconds of a sync.
    in_flight_update: weights arrive in the middle of groups; nobody stops.
    correction: of the mismatch; `none`: old groups are dropped, that is all.
    tis_cap: C of truncated importance sampling; read where correction is `tis`.
    routing_replay: R3, the learner takes the sampler's routes.
    learning_rate: of the optimizer; the constants are for 1e-6.
    rollout, train: precision of samplers and of the learner.
    hardware: whose PFLOPS.
    nvfp4_train_overhead: what a W4A4 learner loses of the ratio of PFLOPS.
    mismatch: table in `constants.MISMATCH`.
    shared_quantizer: one policy on both sides: equal precisions, no mismatch.
    backward: gradients of a quantized learner.
    last_layers_bf16: share of the layers.
    shared_experts_bf16: whether these stay in bf16.
    shared_experts_factor: of the mismatch, if they do; inferred.
    four_over_six: whether blocks choose between 4 and 6.
    kv_fp8: whether samplers keep keys and values in FP8.
    staleness: s of lag 1, nats. Inferred, with its power chosen so that bf16
      survives a lag of 4 and not one of 16 (our prototypes, without TIS).
    staleness_power: 1/2 for a random walk of the weights to 1 for a straight
      path; inferred, between them.
    capacity: c. Inferred, chosen so that the default story holds.
    drift_decay: rho; inferred, drift is forgotten in 20 updates.
    drift_gain: gamma; inferred, sets the unit of drift.
    amplification: eta; inferred, a collapse takes some 50 updates.
    drift_threshold: D*; inferred, a little above where drift turns explosive.
    learning: a; from prototypes of ours: reward .22 to .98 in 300 updates.
    damage: b; inferred, a reward is lost in tens of updates.
    reward_start, reward_max: of the same prototypes.
    steps: updates.
  """

  samplers: int = 192
  sampler_speed: float = 50.0
  trainer_speed: float = 45_000.0
  step_overhead: float = 4.0
  batch: int = 32
  group_size: int = 8
  mean_length: float = 2048.0
  length_cv: float = 0.8
  horizon: int = 8192
  turns: int = 4
  environment_latency: float = 5.0
  max_staleness: int = 16
  buffer_batches: float = 2.0
  sync_interval: int = 1
  sync_latency: float = 1.0
  in_flight_update: bool = False
  correction: Literal['none', 'clip', 'tis'] = 'none'
  tis_cap: float = 2.0
  routing_replay: bool = False
  learning_rate: float = 1e-6
  rollout: Precision = 'nvfp4_w4a4'
  train: Precision = 'nvfp4_w4a4'
  hardware: Literal['b200', 'b300', 'rubin'] = 'b200'
  nvfp4_train_overhead: float = constants.TRAIN_OVERHEAD['nvfp4_w4a4']
  mismatch: Literal['minite_moe', 'minite_dense', 'smollm2'] = 'minite_moe'
  shared_quantizer: bool = False
  backward: Literal['dequantized', 'high_precision', 'quantized'] = (
      'high_precision'
  )
  last_layers_bf16: float = 0.0
  shared_experts_bf16: bool = False
  shared_experts_factor: float = constants.SHARED_EXPERTS
  four_over_six: bool = False
  kv_fp8: bool = False
  staleness: float = 0.0125
  staleness_power: float = 0.75
  capacity: float = 0.145
  drift_decay: float = 0.95
  drift_gain: float = 1.0
  amplification: float = 2.0
  drift_threshold: float = 2.0
  learning: float = 0.01
  damage: float = 0.05
  reward_start: float = 0.22
  reward_max: float = 0.98
  steps: int = 300

  def __post_init__(self):
    for name in ('correction', 'rollout', 'train', 'hardware', 'mismatch'):
      self._refuse_other(name)
    self._refuse_other('backward')
    for name in POSITIVE:
      self._check(name, getattr(self, name) > 0, 'above 0')
    for name in NOT_NEGATIVE:
      self._check(name, getattr(self, name) >= 0, 'at least 0')
    self._check('buffer_batches', self.buffer_batches >= 1, 'at least 1')
    in_range = 0 < self.shared_experts_factor <= 1
    self._check('shared_experts_factor', in_range, 'in (0, 1]')
    self._check('tis_cap', self.tis_cap >= 1, 'at least 1')
    self._check('last_layers_bf16', 0 <= self.last_layers_bf16 <= 1, '0 to 1')
    self._check('drift_decay', 0 <= self.drift_decay < 1, '0 to 1')
    self._check('horizon', self.horizon <= 2**17, f'at most {2**17}')
    self._check(
        'nvfp4_train_overhead', self.nvfp4_train_overhead < 1, 'below 1'
    )
    if self.sync_interval > self.max_staleness + 1:
      raise ValueError(
          f'sync_interval {self.sync_interval} is above max_staleness + 1 ='
          f' {self.max_staleness + 1}: every group would be too old.'
      )

  def _check(self, name, fine, bounds):
    if not fine:
      raise ValueError(f'{name} {getattr(self, name)} is not {bounds}.')

  def _refuse_other(self, name):
    values = get_args(type(self).__annotations__[name])
    if getattr(self, name) not in values:
      raise ValueError(f'{name} {getattr(self, name)!r} is not in {values}.')


class Knobs(NamedTuple):
  """What a simulation reads of a SimulatorConfig; all leaves are numbers."""

  engine: event_engine.Engine
  drift: drift_model.Drift


def quantization_mismatch(cfg: SimulatorConfig) -> float:
  """Returns q, in nats.

  The table's entry times the factors of the stabilizers, and what an FP8 cache
  adds in quadrature. The factors touch only what is above the table's
  bf16 / bf16, which two engines have anyhow.
  """
  table = constants.MISMATCH[cfg.mismatch]
  i, j = (constants.PRECISIONS.index(p) for p in (cfg.train, cfg.rollout))
  q, floor = table[i][j], table[0][0]
  if cfg.shared_quantizer and i == j:
    q = floor = 0.0
  shares, factors = zip(*constants.LAST_LAYERS, strict=True)
  factor = float(np.interp(cfg.last_layers_bf16, shares, factors))
  if cfg.shared_experts_bf16:
    factor *= cfg.shared_experts_factor
  if cfg.four_over_six and any('nvfp4' in p for p in (cfg.train, cfg.rollout)):
    factor *= constants.FOUR_OVER_SIX
  above = math.sqrt(max(q * q - floor * floor, 0.0))
  kv = constants.KV_FP8 if cfg.kv_fp8 else 0.0
  return math.sqrt(min(q, floor) ** 2 + (above * factor) ** 2 + kv**2)


def speed(cfg: SimulatorConfig) -> tuple[float, float]:
  """Returns how much faster than bf16 samplers and trainer are."""
  pflops = constants.PFLOPS[cfg.hardware]
  overhead = dict(constants.TRAIN_OVERHEAD)
  overhead['nvfp4_w4a4'] = cfg.nvfp4_train_overhead
  ratio = lambda p: pflops[constants.MULTIPLIES[p]] / pflops[0]
  rollout = ratio(cfg.rollout) * (1 - constants.ROLLOUT_OVERHEAD[cfg.rollout])
  return rollout, ratio(cfg.train) * (1 - overhead[cfg.train])


def knobs(cfg: SimulatorConfig) -> Knobs:
  """Returns the numbers that a simulation reads, rounded half up to integers.

  Raises:
    ValueError: a time or a length is beyond int32.
  """
  rollout, train = speed(cfg)
  ticks = event_engine.TICKS_PER_SECOND
  sigma = math.sqrt(math.log1p(cfg.length_cv**2))
  median = math.log(cfg.mean_length) - sigma**2 / 2
  engine = event_engine.Engine(
      samplers=cfg.samplers,
      batch=cfg.batch,
      buffer=_round(cfg.buffer_batches * cfg.batch),
      max_staleness=cfg.max_staleness,
      sync_interval=cfg.sync_interval,
      sync_ticks=_round(cfg.sync_latency * ticks),
      in_flight=int(cfg.in_flight_update),
      log2_median=_round(256 * median / math.log(2)),
      log2_sigma=_round(256 * sigma / math.log(2)),
      horizon=cfg.horizon,
      token_ticks=_round(256 * ticks / (cfg.sampler_speed * rollout)),
      environment_ticks=_round(cfg.turns * cfg.environment_latency * ticks),
      train_ticks=_round(2**20 * ticks / (cfg.trainer_speed * train)),
      overhead_ticks=_round(cfg.step_overhead * ticks),
  )
  longest = {
      'A response': cfg.horizon * engine.token_ticks,
      "A batch's training": (
          (cfg.batch * cfg.group_size * cfg.horizon // 256) * engine.train_ticks
      ),
      'The run': typical(engine, cfg.group_size)[1] * cfg.steps * 2,
  }
  for name, value in longest.items():
    if value >= 2**31:
      raise ValueError(
          f'{name} is too long for int32 ticks (steps {cfg.steps}, horizon'
          f' {cfg.horizon}, sampler_speed {cfg.sampler_speed}, trainer_speed'
          f' {cfg.trainer_speed}): take fewer or shorter ones.'
      )
  capacity = cfg.capacity
  if cfg.routing_replay:
    capacity *= constants.ROUTING_REPLAY
  bound = math.log(cfg.tis_cap)
  if cfg.correction != 'tis':
    bound = drift_model.CLIP_EPS
  quantized = cfg.train != 'bf16'
  drift = drift_model.Drift(
      quantization=quantization_mismatch(cfg),
      staleness=cfg.staleness,
      power=cfg.staleness_power,
      learning_rate=cfg.learning_rate / 1e-6,
      noise=constants.BACKWARD_NOISE[cfg.backward] if quantized else 1.0,
      capacity=capacity,
      bonus=constants.CORRECTION[cfg.correction],
      bound=bound,
      decay=cfg.drift_decay,
      gain=cfg.drift_gain,
      amplification=cfg.amplification,
      threshold=cfg.drift_threshold,
      learning=cfg.learning,
      damage=cfg.damage,
      reward_start=cfg.reward_start,
      reward_max=cfg.reward_max,
  )
  return Knobs(engine, drift)


def typical(
    engine: event_engine.Engine, group_size: int
) -> tuple[float, float]:
  """Returns typical ticks of a group and of a step, to guess shapes."""
  z = event_engine.quantiles()[int(1024 * 0.5 ** (1 / group_size))] / 1024
  median, sigma = engine.log2_median / 256, engine.log2_sigma / 256
  longest = min(2 ** (median + sigma * z), engine.horizon)
  mean = min(2 ** (median + sigma**2 * math.log(2) / 2), engine.horizon)
  group = longest * engine.token_ticks / 256 + engine.environment_ticks
  tokens = mean * group_size * engine.batch
  work = engine.overhead_ticks + tokens * engine.train_ticks / 2**20
  # Where groups are dropped for their age, they take longer to make up for.
  share = max(engine.batch / engine.samplers, 1.4 / (engine.max_staleness + 1))
  step = max(work, group * share)
  return group, step + engine.sync_ticks / engine.sync_interval


def _round(x):
  return math.floor(x + 0.5)
