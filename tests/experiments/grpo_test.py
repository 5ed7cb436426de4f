"""The GRPO experiment: smoke preset, presets, kill and resume."""

import dataclasses
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from experiments import grpo
from experiments import run
from nvfp4_jax import checkpoint
from nvfp4_jax import recipes
from nvfp4_jax import tasks
from nvfp4_jax.rl import loop

KEYS = {
    'step',
    'reward',
    'grad_norm',
    'entropy',
    'mismatch_abs_logprob',
    'mismatch_kl',
    'ref_kl',
    'clip_fraction',
    'tis_weight_mean',
    'staleness',
    'ess_ratio',
    'frac_reward_zero_std',
    'groups_replaced',
    'missing_logprobs',
    'problems',
    'ref_kl_quantized',
    'response_length',
    'reward_failures',
    'skipped',
    'token_mult_prob_error',
    'tries',
    'truncated_fraction',
    'tokens_per_second',
    'seconds',
}
TIMES = {'seconds', 'tokens_per_second'}
FLAGS = (
    '--steps=6',
    '--updates_per_rollout=2',
    '--save_interval=2',
    '--diagnostics_interval=4',
    '--rollout.max_tries=2',
    '--rollout.replay_experts',
)


def _timeless(rows):
  return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


class GrpoTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = pathlib.Path(folder.name)
    cls.workdir = cls.folder / 'whole'
    args = ['smoke', f'--workdir={cls.workdir}', *FLAGS]
    run.launch(grpo.main, grpo.PRESETS, args)
    cls.rows = run.read_rows(cls.workdir / 'metrics.jsonl')

  def test_rows_have_the_agreed_keys_and_finite_values(self):
    self.assertEqual([row['step'] for row in self.rows], list(range(6)))
    for row in self.rows:
      self.assertContainsSubset(KEYS, row)
      self.assertTrue(all(np.isfinite(value) for value in row.values()), row)
    self.assertEqual(
        [row['step'] for row in self.rows if 'pass_at_1' in row], [0, 2, 4, 5]
    )

  def test_learner_and_sampler_agree_bit_for_bit_in_every_row(self):
    for row in self.rows:
      self.assertEqual(row['mismatch_abs_logprob'], 0.0)
      self.assertEqual(row['mismatch_kl'], 0.0)
      self.assertEqual(row['tis_weight_mean'], 1.0)

  def test_staleness_counts_the_updates_on_a_rollout(self):
    self.assertEqual({row['staleness'] for row in self.rows}, {0.5})

  def test_every_quantized_weight_has_diagnostics_at_the_interval(self):
    rows = run.read_rows(self.workdir / 'diagnostics.jsonl')
    names = {
        f'layers.{i}.mlp.experts.{name}_proj'
        for i in range(2)
        for name in ('gate', 'up', 'down')
    }
    for step in (0, 4):
      found = [row for row in rows if row['step'] == step]
      self.assertEqual({row['name'] for row in found}, names)
    self.assertLen(rows, 12)
    for row in rows:
      self.assertBetween(row['sqnr_db'], 15, 30)
      self.assertEqual(row['underflow_blocks'], 0)

  def test_run_leaves_config_checkpoint_and_figure(self):
    self.assertEqual(
        checkpoint.latest_step((self.workdir / 'checkpoints').absolute()), 6
    )
    figure = self.workdir / 'figures' / 'grpo.png'
    self.assertEqual(figure.read_bytes()[:4], b'\x89PNG')
    self.assertTrue((self.workdir / 'config.json').exists())

  def test_resuming_a_finished_run_changes_nothing(self):
    before = (self.workdir / 'metrics.jsonl').read_bytes()
    run.launch(grpo.main, grpo.PRESETS, ['resume', str(self.workdir)])
    self.assertEqual((self.workdir / 'metrics.jsonl').read_bytes(), before)

  def test_checkpoint_of_another_recipe_is_refused(self):
    cfg = dataclasses.replace(
        grpo.PRESETS['smoke'][1], workdir=self.workdir, recipe='bf16'
    )
    warm = grpo.load_start(cfg)
    with self.assertRaisesRegex(
        checkpoint.PolicyMismatchError, 'another|not under'
    ):
      grpo.train(cfg, warm, run.Log(self.folder / 'other'))

  def test_interrupted_run_goes_on_as_if_it_had_not_been(self):
    # Without a new process, whose tracing takes most of the time; the slow
    # tests below kill processes.
    workdir = self.folder / 'interrupted'
    train_rollout = loop.train_rollout

    def interrupted(*args, **options):
      if args[-1] == 3:  # two steps after the last checkpoint
        raise KeyboardInterrupt
      return train_rollout(*args, **options)

    with (
        mock.patch.object(loop, 'train_rollout', interrupted),
        self.assertRaises(KeyboardInterrupt),
    ):
      run.launch(
          grpo.main, grpo.PRESETS, ['smoke', f'--workdir={workdir}', *FLAGS]
      )
    run.launch(grpo.main, grpo.PRESETS, ['resume', str(workdir)])
    rows = run.read_rows(workdir / 'metrics.jsonl')
    self.assertEqual(_timeless(rows), _timeless(self.rows))
    kept, whole = (
        run.read_rows(path / 'diagnostics.jsonl')
        for path in (workdir, self.workdir)
    )
    self.assertEqual(kept, whole)

  def test_sigterm_ends_a_run_that_goes_on_as_if_it_had_not(self):
    workdir = self.folder / 'terminated'
    train_rollout = loop.train_rollout

    def terminated(*args, **options):
      if args[-1] == 2:
        signal.raise_signal(signal.SIGTERM)
      return train_rollout(*args, **options)

    with (
        mock.patch.object(loop, 'train_rollout', terminated),
        self.assertRaises(SystemExit) as caught,
    ):
      run.launch(
          grpo.main, grpo.PRESETS, ['smoke', f'--workdir={workdir}', *FLAGS]
      )
    self.assertEqual(caught.exception.code, 0)
    folder = (workdir / 'checkpoints').absolute()
    self.assertEqual(checkpoint.latest_step(folder), 3)
    run.launch(grpo.main, grpo.PRESETS, ['resume', str(workdir)])
    rows = run.read_rows(workdir / 'metrics.jsonl')
    self.assertEqual(_timeless(rows), _timeless(self.rows))

  def test_steps_that_are_not_finite_end_a_run_with_a_checkpoint(self):
    workdir = self.folder / 'broken'
    train_rollout = loop.train_rollout

    def broken(*args, **options):
      *rest, row = train_rollout(*args, **options)
      return *rest, row | {'skipped': float(args[-1] != 1)}

    args = ['smoke', f'--workdir={workdir}', *FLAGS, '--max_skipped=2']
    with (
        mock.patch.object(loop, 'train_rollout', broken),
        self.assertRaises(SystemExit) as caught,
    ):
      run.launch(grpo.main, grpo.PRESETS, args)
    self.assertEqual(caught.exception.code, 3)
    folder = (workdir / 'checkpoints').absolute()
    self.assertEqual(checkpoint.latest_step(folder), 4)  # 0, then 2 and 3
    self.assertLen(run.read_rows(workdir / 'metrics.jsonl'), 4)

  def test_changed_data_is_refused(self):
    cfg = dataclasses.replace(grpo.PRESETS['smoke'][1], workdir=self.workdir)
    start = dataclasses.replace(grpo.load_start(cfg), fingerprint='another')
    with self.assertRaisesRegex(checkpoint.DataMismatchError, 'another'):
      grpo.train(cfg, start, run.Log(self.folder / 'changed'))

  def test_tensorboard_gets_the_rows(self):
    workdir = self.folder / 'board'
    cfg = dataclasses.replace(
        grpo.PRESETS['smoke'][1], workdir=workdir, tensorboard=True
    )
    with run.trackers(cfg, 0) as track:
      track({'step': 0, 'reward': 0.5})
    self.assertNotEmpty(list((workdir / 'tensorboard').iterdir()))

  @parameterized.parameters(
      (dict(checkpoint=pathlib.Path('x')), 'running_sum'),
      (dict(task=tasks.TaskConfig('chat_addition')), 'chat_addition'),
      (dict(max_skipped=0), 'max_skipped 0'),
  )
  def test_flags_that_do_not_fit_are_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(grpo.PRESETS['smoke'][1], **changes)

  def test_every_recipe_has_a_preset(self):
    self.assertContainsSubset({'smoke', 'demo', *recipes.RECIPES}, grpo.PRESETS)
    for name in recipes.RECIPES:
      self.assertEqual(grpo.PRESETS[name][1].recipe, name)
    with self.assertRaisesRegex(ValueError, "'nvfp4_finale' is not one of"):
      dataclasses.replace(grpo.PRESETS['smoke'][1], recipe='nvfp4_finale')

  def test_missing_warm_start_is_an_error(self):
    args = [
        'smoke',
        f'--workdir={self.folder / "none"}',
        f'--warm_start={self.folder / "nowhere"}',
    ]
    with self.assertRaisesRegex(FileNotFoundError, 'No finished warm start'):
      run.launch(grpo.main, grpo.PRESETS, args)

  def test_warm_start_lowers_the_loss(self):
    rows = run.read_rows(self.workdir / 'warm_start' / 'metrics.jsonl')
    self.assertLess(rows[-1]['loss'], rows[0]['loss'])


@pytest.mark.slow
class KillTest(absltest.TestCase):

  def test_run_killed_while_it_saves_is_as_if_it_had_not_been(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.assertEqual(
        _start(['smoke', f'--workdir={folder / "whole"}', *FLAGS]).wait(), 0
    )
    workdir = folder / 'killed'
    process = _start(['smoke', f'--workdir={workdir}', *FLAGS])
    while not list((workdir / 'checkpoints').glob('*4*')):
      self.assertIsNone(process.poll())
      time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    self.assertEqual(process.wait(), -signal.SIGKILL)
    self.assertEqual(_start(['resume', str(workdir)]).wait(), 0)
    whole, rows = (
        run.read_rows(folder / name / 'metrics.jsonl')
        for name in ('whole', 'killed')
    )
    self.assertLen(rows, 6)
    self.assertEqual(_timeless(rows), _timeless(whole))

  def test_run_killed_at_random_moments_is_as_if_it_had_not_been(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    flags = ('--steps=12', '--updates_per_rollout=2', '--save_interval=1')
    for name in ('compiled', 'whole'):  # the first fills the compilation cache
      start = time.monotonic()
      args = ['smoke', f'--workdir={folder / name}', *flags]
      self.assertEqual(_start(args).wait(), 0)
    seconds = time.monotonic() - start
    whole = _timeless(run.read_rows(folder / 'whole' / 'metrics.jsonl'))
    self.assertLen(whole, 12)
    delays, kills, runs = np.random.default_rng(0), 0, 0
    workdir = folder / 'killed0'
    while kills < 20 or workdir.exists():
      resume = (workdir / 'config.json').exists()
      command = (
          ['resume', str(workdir)]
          if resume
          else [
              'smoke',
              f'--workdir={workdir}',
              *flags,
          ]
      )
      process = _start(command)
      # After the twentieth kill, the run may end.
      delay = delays.uniform(0.1, 1) * seconds if kills < 20 else None
      try:
        self.assertEqual(process.wait(timeout=delay), 0)
      except subprocess.TimeoutExpired:
        process.kill()
        self.assertEqual(process.wait(), -signal.SIGKILL)
        kills += 1
        continue
      rows = run.read_rows(workdir / 'metrics.jsonl')
      self.assertEqual(_timeless(rows), whole)
      runs += 1
      workdir = folder / f'killed{runs}'
    self.assertGreater(runs, 0)


def _start(args):
  return subprocess.Popen(
      [sys.executable, '-m', 'experiments.grpo', *args],
      stderr=subprocess.DEVNULL,
  )
