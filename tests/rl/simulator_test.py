"""Tests of the simulator: engine, drift, sweeps, schedule, constants."""

import dataclasses
import functools
import json
import pathlib

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
from jax.scipy import special
import numpy as np
import pytest

from experiments import simulator_peer
from nvfp4_jax.rl import simulator
from nvfp4_jax.rl.simulator import constants
from nvfp4_jax.rl.simulator import drift_model
from nvfp4_jax.rl.simulator import event_engine
from nvfp4_jax.rl.simulator import schedules
from nvfp4_jax.rl.simulator import settings

# Events are integers.
pytestmark = pytest.mark.quick_compile

_RESULTS = pathlib.Path(__file__).parents[2] / 'results'
_STABILIZERS = {
    'backward': 'dequantized',
    'last_layers_bf16': 0.15,
    'shared_experts_bf16': True,
}
_STEPS, _GROUP_SIZE = 60, 4
_SMALL = simulator.SimulatorConfig(
    samplers=24,
    batch=4,
    group_size=_GROUP_SIZE,
    trainer_speed=6000.0,
    steps=_STEPS,
)
# One compilation for all small configurations.
_SIZES = event_engine.Sizes(24, 400, 64, 17, True)
_INTEGERS = ('ready', 'take', 'done', 'resume', 'tokens', 'evicted', 'stale')
_INTEGERS += ('finished', 'lag_p95', 'lag_max')
_FLOATS = ('lag_mean', 'token_lag', 'sampler_utilization')
_FLOATS += ('trainer_utilization',)


@st.composite
def _configs(draw, sync=True):
  """Small systems of all kinds."""
  pick = lambda *values: draw(st.sampled_from(values))
  staleness = pick(*([0] if sync else []), 1, 2, 4, 8)
  return dataclasses.replace(
      _SMALL,
      samplers=pick(3, 8, 24),
      batch=pick(1, 4, 6),
      max_staleness=staleness,
      sync_interval=draw(st.integers(1, min(staleness, 3) + 1)),
      in_flight_update=draw(st.booleans()),
      mean_length=pick(100.0, 700.0),
      horizon=pick(400, 2000),
      length_cv=pick(0.0, 0.5, 2.0),
      turns=pick(0, 3),
      buffer_batches=pick(1.0, 2.5),
      sync_latency=pick(0.0, 1.0, 20.0),
      trainer_speed=pick(6000.0, 20_000.0, 1e6),
      step_overhead=pick(0.0, 3.0),
      rollout=pick('bf16', 'nvfp4_w4a4'),
      correction=pick('none', 'clip', 'tis'),
  )


class EngineTest(chex.TestCase):

  @hypothesis.settings(
      max_examples=40, deadline=None, database=None, derandomize=True
  )
  @hypothesis.given(cfg=_configs(), seed=st.integers(0, 2**32 - 1))
  def test_equals_a_plain_loop_and_conserves_groups(self, cfg, seed):
    key = jax.random.key(seed)
    events, outcome = _simulate(cfg, key)
    hypothesis.assume(not events.truncated)
    rows = simulator_peer.simulate(
        simulator.knobs(cfg),
        tuple(int(word) for word in jax.random.key_data(key)),
        steps=_STEPS,
        group_size=_GROUP_SIZE,
    )
    column = lambda name: np.array([row[name] for row in rows])
    for name in _INTEGERS:
      got = getattr(events.steps, name)
      np.testing.assert_array_equal(got, column(name), err_msg=name)
    for name in _FLOATS:
      got = getattr(events.steps, name)
      np.testing.assert_allclose(got, column(name), atol=1e-4, err_msg=name)
    for name in drift_model.Curves._fields:
      got, want = getattr(outcome.curves, name), column(f'curve_{name}')
      np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5, err_msg=name)

    plan = schedules.schedule(cfg, key, sizes=_SIZES)
    made = list(zip(plan.slot, plan.index, plan.version, strict=True))
    batches = [[made[group] for group in batch] for batch in plan.batches]
    self.assertEqual(batches, [row['batch'] for row in rows])
    counts = np.bincount(plan.fate, minlength=len(schedules.FATES))
    fates = dict(zip(schedules.FATES, counts, strict=True))
    self.assertEqual(fates['trained'], _STEPS * cfg.batch)
    self.assertEqual(fates['stale'], column('stale').sum())
    self.assertEqual(fates['evicted'], column('evicted').sum())
    finished = fates['trained'] + fates['stale'] + fates['evicted']
    self.assertEqual(finished + fates['buffered'], column('finished')[-1])
    in_flight = cfg.samplers if cfg.max_staleness else 0
    self.assertEqual(fates['in_flight'], in_flight)
    self.assertEqual(len(made), len(set(made)))
    # Nothing is trained twice, before it is finished, or too old.
    trained = plan.batches.ravel()
    self.assertEqual(len(trained), len(set(trained)))
    step = plan.step[trained]
    self.assertTrue(np.all(plan.finish[trained] <= plan.take[step] + 1e-6))
    lag = step - plan.version[trained]
    self.assertTrue(np.all((lag >= 0) & (lag <= cfg.max_staleness)))
    stale = plan.fate == schedules.FATES.index('stale')
    lag = plan.step[stale] - plan.version[stale]
    self.assertTrue(np.all(lag > cfg.max_staleness))

  @hypothesis.settings(
      max_examples=25, deadline=None, database=None, derandomize=True
  )
  @hypothesis.given(cfg=_configs(sync=False), seed=st.integers(0, 99))
  def test_littles_law(self, cfg, seed):
    """Groups in the system = groups per update x updates that a group stays."""
    cfg = dataclasses.replace(cfg, sync_interval=1, in_flight_update=False)
    plan = schedules.schedule(cfg, jax.random.key(seed), sizes=_SIZES)
    # In the system: counted on the clock, at the end of every update.
    finished = np.sort(plan.finish_ticks)
    arrived = np.searchsorted(finished, plan.syncs, 'left')
    gone = np.sort(plan.step[plan.step >= 0])
    removed = np.searchsorted(gone, np.arange(_STEPS), 'right')
    inside = cfg.samplers + np.mean((arrived - removed)[:-1])
    # The stay: by versions, of groups that left.
    left = plan.step >= 0
    stay = np.mean((plan.step - plan.version)[left])
    rate = left.sum() / _STEPS
    # The run begins empty and ends full: at most that many groups are counted
    # on one side only.
    slack = inside * (stay + 1) / _STEPS
    self.assertLess(abs(inside - rate * stay), slack + 0.02 * inside)

  def test_one_shared_quantizer_and_no_staleness_is_on_policy(self):
    cfg = dataclasses.replace(_SMALL, max_staleness=0, shared_quantizer=True)
    events, outcome = _simulate(cfg, jax.random.key(0))
    np.testing.assert_array_equal(events.steps.lag_max, 0)
    self.assertEqual(outcome.quantization, 0)
    np.testing.assert_array_equal(outcome.curves.mismatch, 0)
    np.testing.assert_array_equal(outcome.curves.drift, 0)
    np.testing.assert_array_equal(outcome.curves.clip_fraction, 0)
    apart = dataclasses.replace(cfg, train='bf16')
    self.assertGreater(settings.quantization_mismatch(apart), 0.07)

  def test_max_staleness_is_that_of_nemo(self):
    """With 1, version v is trained at v and v + 1 and dropped at v + 2."""
    cfg = dataclasses.replace(_SMALL, max_staleness=1)
    plan = schedules.schedule(cfg, jax.random.key(0), sizes=_SIZES)
    fate = np.array(schedules.FATES)[plan.fate]
    lag = plan.step - plan.version
    self.assertEqual(set(lag[fate == 'trained']), {0, 1})
    self.assertEqual(lag[fate == 'stale'].min(), 2)

  def test_throughput_rises_with_staleness_until_the_trainer_is_busy(self):
    values = (0, 1, 2, 3, 4, 6, 8, 11)
    events = _sweep('max_staleness', values, trainer_speed=1000.0)
    rates = events.tokens_per_second.mean(0)
    self.assertTrue(np.all(np.diff(rates) >= -0.01 * rates[1:]), rates)
    self.assertGreater(rates[-1], 3 * rates[0])
    busy = events.trainer_utilization.mean(0)
    bound = busy > 0.97 * busy[-1]
    self.assertBetween(bound.sum(), 2, len(values) - 2, busy)
    np.testing.assert_allclose(rates[bound], rates[-1], rtol=0.03)

  @parameterized.parameters(
      ('horizon', (512, 2048, 8192), 1),
      ('sync_interval', (1, 2, 4), 1),
      ('batch', (2, 4, 8), -1),
  )
  def test_lag_rises_with_horizon_and_sync_interval(self, name, values, sign):
    """While the trainer is what limits; else Little's law fixes the lag."""
    events = _sweep(name, values, trainer_speed=3000.0, max_staleness=11)
    lag = sign * events.lag_mean.mean(0)
    self.assertTrue(np.all(np.diff(lag) > 0), lag)

  def test_in_flight_weights_make_tokens_younger_than_their_group(self):
    cfg = dataclasses.replace(_SMALL, in_flight_update=True, max_staleness=11)
    events, _ = _simulate(cfg, jax.random.key(0))
    late = slice(20, None)
    self.assertTrue(
        np.all(events.steps.token_lag[late] < events.steps.lag_mean[late])
    )
    plan = schedules.schedule(cfg, jax.random.key(0), sizes=_SIZES)
    group = plan.batches[-1, 0]
    versions = schedules.token_versions(
        plan, group, int(plan.lengths[group].argmax())
    )
    self.assertEqual(versions[0], plan.version[group])
    self.assertEqual(versions[-1], plan.newest_version[group])
    self.assertTrue(np.all(np.diff(versions) >= 0))

  def test_key_alone_decides(self):
    first = _simulate(_SMALL, jax.random.key(1))
    chex.assert_trees_all_equal(first, _simulate(_SMALL, jax.random.key(1)))
    other = _simulate(_SMALL, jax.random.key(2))
    self.assertTrue(np.any(first.events.steps.take != other.events.steps.take))
    # Neither shapes nor company matter: sweep guesses other sizes.
    company = [_SMALL, dataclasses.replace(_SMALL, batch=6, staleness=0.02)]
    swept = simulator.sweep(company, jax.random.key(1))
    alone = jax.tree.map(lambda x: x[0], swept)
    chex.assert_trees_all_equal(alone.events.steps, first.events.steps)
    chex.assert_trees_all_close(alone, first, rtol=1e-5)


class LengthTest(chex.TestCase):

  def test_quantiles_are_normal(self):
    want = special.ndtri((np.arange(1024) + 0.5) / 1024)
    got = event_engine.quantiles() / 1024
    np.testing.assert_allclose(got, want, atol=6e-4)

  def test_lengths_are_lognormal_and_cut(self):
    cfg = dataclasses.replace(
        _SMALL, mean_length=1000.0, length_cv=0.5, horizon=2000
    )
    engine = simulator.knobs(cfg).engine
    table = np.asarray(event_engine.length_table(engine))
    self.assertTrue(np.all(np.diff(table) >= 0))
    self.assertEqual(table[-1], 2000)
    whole = engine._replace(horizon=10**5)
    table = np.asarray(event_engine.length_table(whole))
    np.testing.assert_allclose(table.mean(), 1000, rtol=0.01)
    np.testing.assert_allclose(table.std() / table.mean(), 0.5, rtol=0.02)
    peer = simulator_peer.length_table(engine)
    np.testing.assert_array_equal(np.minimum(table, 2000), peer)

  def test_draws_do_not_depend_on_shapes(self):
    engine = simulator.knobs(_SMALL).engine
    draw = functools.partial(
        event_engine.draw_lengths, engine, jax.random.key(3)
    )
    large = draw(_SIZES, 5)
    small = draw(_SIZES._replace(slots=3, groups=7), 5)
    np.testing.assert_array_equal(large[:3, :7], small)
    independent = np.corrcoef(np.asarray(large).reshape(-1, 5).T)
    np.testing.assert_allclose(independent, np.eye(5), atol=0.05)


class StoryTest(chex.TestCase):

  def test_stabilizers_save_the_default(self):
    naive = simulator.SimulatorConfig()
    short = {'mean_length': 512.0, 'horizon': 2048, 'turns': 1}
    stable = dataclasses.replace(naive, **_STABILIZERS)
    configs = [naive, stable, dataclasses.replace(naive, **short)]
    configs.append(dataclasses.replace(naive, rollout='bf16', train='bf16'))
    keys = jax.random.split(jax.random.key(0), 3)
    outcome = simulator.sweep(configs, keys, per_step=False).outcome
    self.assertTrue(np.all(outcome.collapse[:, 0] >= 0))
    np.testing.assert_array_equal(outcome.collapse[:, 1:], -1)
    self.assertTrue(np.all(outcome.margin[:, 0] < 0))
    self.assertTrue(np.all(outcome.margin[:, 1:] > 0))
    self.assertTrue(np.all(outcome.final_reward[:, 0] < 0.2))
    self.assertTrue(np.all(outcome.final_reward[:, 1:] > 0.9))

  @hypothesis.settings(
      max_examples=20, deadline=None, database=None, derandomize=True
  )
  @hypothesis.given(
      lag=st.floats(0, 20),
      table=st.sampled_from(sorted(constants.MISMATCH)),
      sides=st.tuples(*[st.sampled_from(constants.PRECISIONS)] * 2),
      kv_fp8=st.booleans(),
      capacity=st.floats(0.05, 1.0),
  )
  def test_no_stabilizer_lowers_the_margin(
      self, lag, table, sides, kv_fp8, capacity
  ):
    base = dataclasses.replace(
        _SMALL,
        mismatch=table,
        train=sides[0],
        rollout=sides[1],
        kv_fp8=kv_fp8,
        capacity=capacity,
        backward='quantized',
    )
    changes = [{}, {'four_over_six': True}, {'backward': 'high_precision'}]
    changes += [{name: value} for name, value in _STABILIZERS.items()]
    changes += [_STABILIZERS, {'routing_replay': True}]
    changes += [{'correction': 'tis'}, {'correction': 'clip'}]
    models = [
        simulator.knobs(dataclasses.replace(base, **change)).drift
        for change in changes
    ]
    models = jax.tree.map(lambda *x: np.array(x, np.float32), *models)
    lags = np.full((1, len(changes), _STEPS), lag, np.float32)
    margin = np.asarray(_drifts(models, lags).margin[0])
    self.assertTrue(np.all(margin[1:] >= margin[0] - 1e-5), margin)
    self.assertTrue(np.all(margin[6] >= margin[1:6] - 1e-5) or margin[6] > 0)

  def test_drift_settles_where_the_docstring_says(self):
    model = simulator.knobs(_SMALL).drift._replace(staleness=0.0)
    curves = drift_model.follow(model, np.zeros(400, np.float32))
    want = model.gain * model.noise * model.quantization / (1 - model.decay)
    np.testing.assert_allclose(curves.drift[-1], want, rtol=1e-4)
    limit = np.sqrt(
        model.capacity * (1 - model.decay) / (model.gain * model.noise)
    )
    for factor, collapses in ((0.97, False), (1.05, True)):
      near = model._replace(quantization=factor * limit)
      curves = drift_model.follow(near, np.zeros(400, np.float32))
      step = int(drift_model.collapse_step(curves.reward))
      self.assertEqual(step >= 0, collapses)


class SweepTest(chex.TestCase):

  @hypothesis.settings(
      max_examples=50, deadline=None, database=None, derandomize=True
  )
  @hypothesis.given(
      st.lists(
          st.tuples(st.integers(0, 5), st.integers(-3, 3)),
          min_size=1,
          max_size=12,
      )
  )
  def test_pareto_front_and_best_stable(self, points):
    speed, margin = np.array(points, float).T
    front = simulator.pareto_front(speed, margin)
    beaten = lambda i: any(
        (speed[j] >= speed[i] and margin[j] >= margin[i])
        and (speed[j], margin[j]) != (speed[i], margin[i])
        for j in range(len(points))
    )
    want = {points[i] for i in range(len(points)) if not beaten(i)}
    self.assertEqual({points[i] for i in front}, want)
    self.assertLen(front, len(want))
    self.assertTrue(np.all(np.diff(speed[front]) > 0))
    if (margin > 0).any():
      best = simulator.best_stable(speed, margin)
      self.assertGreater(margin[best], 0)
      self.assertEqual(speed[best], speed[margin > 0].max())
    else:
      with self.assertRaisesRegex(ValueError, 'No margin is above'):
        simulator.best_stable(speed, margin)

  def test_refuses_different_shapes(self):
    for configs in ([], [_SMALL, dataclasses.replace(_SMALL, steps=5)]):
      with self.assertRaisesRegex(ValueError, 'group_size, steps'):
        simulator.sweep(configs, jax.random.key(0))


class ConfigTest(chex.TestCase):

  @parameterized.parameters(
      ({'rollout': 'fp4'}, "rollout 'fp4' is not in"),
      ({'hardware': 'h100'}, 'hardware'),
      ({'batch': 0}, 'batch 0 is not above 0'),
      ({'buffer_batches': 0.5}, 'buffer_batches 0.5 is not at least 1'),
      ({'drift_decay': 1.0}, 'drift_decay'),
      ({'max_staleness': 1, 'sync_interval': 3}, 'sync_interval 3 is above'),
      ({'last_layers_bf16': 1.5}, 'last_layers_bf16 1.5'),
      ({'tis_cap': 0.5}, 'tis_cap'),
  )
  def test_bad_configs_raise(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      simulator.SimulatorConfig(**fields)

  def test_times_beyond_int32_raise(self):
    cfg = dataclasses.replace(_SMALL, sampler_speed=0.01, horizon=2**17)
    with self.assertRaisesRegex(ValueError, 'too long for int32'):
      simulator.knobs(cfg)

  def test_speeds_are_the_published_ones(self):
    cfg = simulator.SimulatorConfig()
    np.testing.assert_allclose(settings.speed(cfg), (1.64, 1.35))
    slower = dataclasses.replace(cfg, nvfp4_train_overhead=0.8)
    np.testing.assert_allclose(settings.speed(slower), (1.64, 0.8))
    cfg = dataclasses.replace(cfg, rollout='bf16', train='bf16')
    np.testing.assert_allclose(settings.speed(cfg), (1, 1))

  def test_measured_constants_are_the_committed_rows(self):
    path = _RESULTS / 'mismatch_matrix' / 'smollm2_h200' / 'metrics.jsonl'
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    mean = {
        (row['cause'], row['learner'], row['sampler']): row['mean']
        for row in rows
        if 'cause' in row and 'mean' in row
    }
    short = {'nvfp4_w4a16': 'w4a16', 'nvfp4_w4a8': 'w4a8'}
    short['nvfp4_w4a4'] = 'nvfp4'
    found = 0
    for i, learner in enumerate(constants.PRECISIONS):
      for j, sampler in enumerate(constants.PRECISIONS):
        pair = [short.get(name, name) for name in (learner, sampler)]
        for cause in ('formats', 'activations'):
          if (cause, *pair) in mean:
            want = mean[cause, *pair]
            self.assertAlmostEqual(constants.SMOLLM2[i][j], want, 5)
            found += 1
    self.assertGreaterEqual(found, 15)
    base = mean['keep_last', 'bf16', 'nvfp4']
    for share, factor in constants.LAST_LAYERS[1:]:
      row = 'keep_last', 'bf16', f'last {round(30 * share)}'
      self.assertAlmostEqual(factor, mean[row] / base, 4)


def _simulate(cfg, key):
  engine, drift = simulator.knobs(cfg)
  events = _engine(engine, key)
  outcome = jax.jit(simulator.run_drift)(drift, events.token_lag)
  return jax.tree.map(np.asarray, simulator.Result(events, outcome))


@jax.jit
def _engine(engine, key):
  return simulator.run_engine(
      engine, key, _SIZES, steps=_STEPS, group_size=_GROUP_SIZE
  )


@jax.jit
def _drifts(models, lags):
  run = jax.vmap(simulator.run_drift)
  return jax.vmap(run, (None, 0))(models, lags)


@jax.jit
def _engines(engines, keys):
  return jax.vmap(jax.vmap(_engine, (0, None)), (None, 0))(engines, keys)


def _sweep(name, values, **changes):
  """Returns Events `[seeds, values]` of variants of _SMALL, up to 8."""
  base = dataclasses.replace(_SMALL, **changes)
  configs = [dataclasses.replace(base, **{name: value}) for value in values]
  engines = [simulator.knobs(cfg).engine for cfg in configs]
  engines += engines[:1] * (8 - len(values))  # one shape, one compilation
  stacked = jax.tree.map(lambda *x: np.array(x), *engines)
  events = _engines(stacked, jax.random.split(jax.random.key(0), 3))
  events = jax.tree.map(lambda x: np.asarray(x)[:, : len(values)], events)
  assert not events.truncated.any()
  return events
