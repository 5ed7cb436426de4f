"""Replayed schedules: what they train is what the schedule says."""

import dataclasses
import json
import pathlib
import tempfile

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from experiments import async_drift
from experiments import grpo
from experiments import run
from nvfp4_jax.rl import rollouts
from nvfp4_jax.rl.simulator import schedules

SMOKE = async_drift.PRESETS['smoke'][1]
SAME = ('reward', 'mismatch_abs_logprob', 'grad_norm', 'ref_kl_median')


@pytest.mark.slow
class AsyncDriftTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = pathlib.Path(folder.name)
    cls.workdir = cls.folder / 'smoke'
    args = ['smoke', f'--workdir={cls.workdir}']
    run.launch(async_drift.main, async_drift.PRESETS, args)
    cls.rows = run.read_rows(cls.workdir / 'metrics.jsonl')

  def test_without_staleness_it_is_the_run_of_grpo(self):
    cfg = grpo.Config(
        workdir=self.folder / 'grpo',
        recipe=SMOKE.recipe,
        warm_start=self.workdir / 'warm_start',
        supervised=SMOKE.supervised,
        model=SMOKE.model,
        task=SMOKE.task,
        optimizer=SMOKE.optimizer,
        rollout=rollouts.RolloutConfig(
            SMOKE.system.batch, SMOKE.system.group_size
        ),
        steps=SMOKE.system.steps,
        save_interval=0,
        diagnostics_interval=0,
    )
    grpo.train(cfg, grpo.load_start(cfg), run.Log(cfg.workdir))
    want = run.read_rows(cfg.workdir / 'metrics.jsonl')
    got = [row for row in self.rows if row['bound'] == 0]
    self.assertLen(got, SMOKE.system.steps)
    self.assertGreater(max(row['grad_norm'] for row in got), 0)
    for row, other in zip(got, want, strict=True):
      for name in SAME:
        self.assertEqual(row[name], other[name], name)
      self.assertEqual((row['staleness'], row['lag']), (0, 0))

  def test_stale_groups_make_a_mismatch(self):
    stale = [row for row in self.rows if row['bound'] == 2]
    self.assertLen(stale, SMOKE.system.steps)
    self.assertGreater(max(row['staleness'] for row in stale), 0)
    for row in stale:
      self.assertLessEqual(row['staleness'], 2)
      self.assertEqual(row['mismatch_abs_logprob'] > 0, row['staleness'] > 0)

  def test_comparison_has_fits_and_errors(self):
    comparison = json.loads((self.workdir / 'comparison.json').read_text())
    self.assertEqual([r['bound'] for r in comparison['runs']], [0, 2])
    self.assertGreater(comparison['fitted']['staleness'], 0)
    for i, row in enumerate(comparison['runs']):
      least = comparison['hindsight']['reward_error'][i]
      self.assertTrue(np.isfinite([least, row['reward_error']]).all())
    figure = self.workdir / 'figures' / 'async_drift.png'
    self.assertEqual(figure.read_bytes()[:4], b'\x89PNG')

  def test_a_run_that_was_cut_is_made_again(self):
    rows = (self.workdir / 'metrics.jsonl').read_text().splitlines(True)
    (self.workdir / 'metrics.jsonl').write_text(''.join(rows[:-2]))
    run.launch(
        async_drift.main, async_drift.PRESETS, ['resume', str(self.workdir)]
    )
    again = run.read_rows(self.workdir / 'metrics.jsonl')
    self.assertEqual(again, self.rows)


class ConfigTest(parameterized.TestCase):

  def test_every_trained_group_is_sampled_once(self):
    system = dataclasses.replace(SMOKE.system, max_staleness=2)
    plan = schedules.schedule(system, jax.random.key(0))
    sampled = []
    for k, batch in enumerate(plan.batches):
      sampled += async_drift.started_at(plan, k)
      self.assertContainsSubset(batch.tolist(), sampled)
    self.assertCountEqual(sampled, plan.batches.ravel().tolist())

  @parameterized.parameters(
      (dict(staleness=(1, 2)), 'staleness'),
      (dict(staleness=(0,)), 'staleness'),
      (dict(chunk=0), 'chunk 0'),
      (dict(recipe='nvfp5'), 'nvfp5'),
  )
  def test_bad_configs_raise(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(SMOKE, **changes)

  def test_weights_in_flight_are_refused(self):
    system = dataclasses.replace(SMOKE.system, in_flight_update=True)
    with self.assertRaisesRegex(ValueError, 'in_flight_update True'):
      dataclasses.replace(SMOKE, system=system)
