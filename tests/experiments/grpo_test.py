"""The GRPO experiment: smoke preset, presets, kill and resume."""

import ast
import contextlib
import dataclasses
import io
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import typing
from unittest import mock
import zlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from experiments import grpo
from experiments import run
from experiments import sft
from nvfp4_jax import checkpoint
from nvfp4_jax import recipes
from nvfp4_jax import tasks
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import loop
from nvfp4_jax.rl import rollouts
from nvfp4_jax.rl import triage
from nvfp4_jax.tasks import arithmetic
from nvfp4_jax.tasks import gsm8k
from nvfp4_jax.tasks import records
from tests import compilation

_ROOT = pathlib.Path(__file__).resolve().parents[2]
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
_NUMBERS = 29  # by their hashes, 20 of these problems are for training
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


class _FileTask:
  """A file of three-digit numbers, in the tokens of the smoke preset.

  Its answers are as long as those of the preset, so that nothing is compiled.
  """

  vocab_size, eos_ids = arithmetic.VOCAB_SIZE, (arithmetic.EOS,)
  max_answer_tokens = 4

  def __init__(self, path):
    self.file = gsm8k.make(path, seed=0)

  def problem(self, split, index):
    digits = tuple(map(int, self.file.problem(split, index).answer))
    prompt = (*(2 + digit for digit in digits), arithmetic.EQUALS)
    return arithmetic.Problem(prompt, (), digits)

  def reward(self, problem, completion):
    # Without a rule to learn, so that the last update too has a gradient.
    return float(zlib.crc32(bytes((*problem.prompt, *completion))) % 2)


class _Recorder(contextlib.ExitStack):
  """Notes the prompts, keys and losses of all rollouts of the runs within.

  Attributes:
    rollouts: step, prompts and key of each.
    updates: the metrics of each update.
  """

  def __init__(self, stops=()):
    """SIGTERM comes in the rollouts of the indices `stops`."""
    super().__init__()
    self.rollouts, self.updates = [], []
    self._stops, self._step = stops, None
    self._train_rollout = self._patch(loop, 'train_rollout', self._rollout)
    self._complete = self._patch(rollouts, 'complete', self._completions)
    self._train_step = self._patch(learner, 'train_step', self._update)

  def _patch(self, module, name, function):
    original = getattr(module, name)
    self.enter_context(mock.patch.object(module, name, function))
    return original

  def _rollout(self, *args, **options):
    self._step = args[-1]
    if self._step in self._stops:
      signal.raise_signal(signal.SIGTERM)
    result = self._train_rollout(*args, **options)
    self._step = None
    return result

  def _completions(self, *args):
    *_, problems, key, _ = args
    if self._step is not None:  # else it is an evaluation
      prompts = tuple(problem.prompt for problem in problems)
      key = tuple(jax.random.key_data(key).tolist())
      self.rollouts.append((self._step, prompts, key))
    return self._complete(*args)

  def _update(self, *args, **options):
    state, metrics = self._train_step(*args, **options)
    self.updates.append({name: float(x) for name, x in metrics.items()})
    return state, metrics


class GrpoTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = pathlib.Path(folder.name)
    cls.workdir = cls.folder / 'whole'
    # The warm start is any start; what follows is compiled as for users.
    with compilation.quick():
      grpo.load_start(
          dataclasses.replace(grpo.PRESETS['smoke'][1], workdir=cls.workdir)
      )
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

  def test_report_a13_resuming_changes_no_prompt_key_or_loss(self):
    # 20 problems, two a rollout: ten rollouts are an epoch.
    path = self.folder / 'numbers.jsonl'
    rows = [
        {'question': f'Repeat {n}.', 'answer': f'#### {n}'}
        for n in range(100, 100 + _NUMBERS)
    ]
    path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    smoke = dataclasses.replace(grpo.PRESETS['smoke'][1], workdir=self.workdir)
    warm = grpo.load_start(smoke)

    def start(cfg):  # as a new process does: nothing of the last one is left
      del cfg
      records._order.cache_clear()
      task = _FileTask(path)
      return dataclasses.replace(
          warm, task=task, fingerprint=task.file.fingerprint
      )

    self.enterContext(mock.patch.object(grpo, 'load_start', start))
    launch = lambda *args: run.launch(grpo.main, grpo.PRESETS, args)
    flags = (
        '--steps=20',
        '--updates_per_rollout=2',
        '--rollout.prompts_per_step=2',
        '--rollout.group_size=8',
        '--rollout.replay_experts',
        '--eval_interval=20',
        '--diagnostics_interval=0',
    )
    whole, resumed = self.folder / 'epochs', self.folder / 'resumed'
    with _Recorder() as want:
      launch('smoke', f'--workdir={whole}', '--save_interval=0', *flags)
    with _Recorder(stops=(2, 6, 9)) as got:
      for args in (
          ('smoke', f'--workdir={resumed}', '--save_interval=20', *flags),
          ('resume', str(resumed)),
          ('resume', str(resumed)),
      ):
        with self.assertRaises(SystemExit):
          launch(*args)
      self.assertEqual([step for step, _, _ in got.rollouts], list(range(10)))
      launch('resume', str(resumed))

    self.assertEqual(got.rollouts, want.rollouts)
    self.assertEqual(got.updates, want.updates)
    self.assertLen(want.updates, 40)
    self.assertGreater(min(row['grad_norm'] for row in want.updates), 0)
    metrics = [run.read_rows(w / 'metrics.jsonl') for w in (whole, resumed)]
    self.assertEqual(*map(_timeless, metrics))

    # Every problem once in every epoch, in an order of its own.
    task = _FileTask(path)
    self.assertEqual(task.file.size('train'), 20)
    problems = {task.problem('train', i).prompt for i in range(20)}
    seen = [p for _, prompts, _ in want.rollouts for p in prompts[::8]]
    self.assertLen(seen, 40)
    for epoch in (seen[:20], seen[20:]):
      self.assertEqual(set(epoch), problems)
    self.assertNotEqual(seen[:20], seen[20:])
    self.assertLen({key for *_, key in want.rollouts}, 20)

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

  def test_changed_order_of_problems_is_refused(self):
    cfg = dataclasses.replace(grpo.PRESETS['smoke'][1], workdir=self.workdir)
    start = grpo.load_start(cfg)
    cfg = dataclasses.replace(cfg, task=dataclasses.replace(cfg.task, seed=1))
    with self.assertRaisesRegex(checkpoint.DataMismatchError, "'seed': 1"):
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
      (dict(eval_interval=0), 'eval_interval 0'),
      (dict(max_answer_tokens=8), "max_answer_tokens 8 .* 'running_sum'"),
      (dict(reward_timeout=1.0), 'reward_timeout 1.0 .* reward_workers 0'),
      (dict(supervised=sft.Config(seed=1)), 'supervised.seed 1 is not used'),
      (
          dict(
              checkpoint=pathlib.Path('x'),
              task=tasks.TaskConfig('chat_addition'),
          ),
          r'model ModelConfig\(.*\) is not used by a run from a checkpoint',
      ),
  )
  def test_flags_that_do_not_fit_are_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(grpo.PRESETS['smoke'][1], **changes)

  def test_report_33_every_setting_is_read(self):
    # By name, anywhere but where settings are checked.
    read = set()
    for path in (
        *_ROOT.glob('nvfp4_jax/**/*.py'),
        *_ROOT.glob('experiments/*'),
    ):
      if path.suffix == '.py':
        read |= _names_that_are_read(ast.parse(path.read_text()))
    settings = [type(grpo.PRESETS['smoke'][1])]
    for config in settings:
      hints = typing.get_type_hints(config)
      self.assertContainsSubset(set(hints), read, config)
      for hint in hints.values():
        settings += [
            kind
            for kind in (hint, *typing.get_args(hint))
            if dataclasses.is_dataclass(kind) and kind not in settings
        ]
    self.assertIn(triage.TriageConfig, settings)

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


class WarningsTest(parameterized.TestCase):

  def test_report_34_mismatch_that_grows_is_said_once(self):
    warn = grpo._MismatchWarning()
    said = []
    for step, value in enumerate((1.0, 1.05, 1.0501, 1.2, 1.0, 1.3)):
      with contextlib.redirect_stderr(io.StringIO()) as stderr:
        warn({'step': step, 'token_mult_prob_error': value})
      said.append(stderr.getvalue())
    self.assertEqual(
        [bool(text) for text in said], [False] * 2 + [True] + [False] * 3
    )
    self.assertRegex(said[2], r'1\.050 in step 2, above 1\.05')

  def test_report_a2_underflow_is_said_once_for_every_weight(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    cfg = dataclasses.replace(grpo.PRESETS['smoke'][1], workdir=folder)
    log = grpo._WeightLog(cfg)
    fine = {'underflow_blocks': 0.0, 'underflow_elements': 0.0}
    bad = {'underflow_blocks': 1.0, 'underflow_elements': 16.0}
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
      for step, stats in enumerate(
          ({'a': fine, 'b': bad}, {'a': bad, 'b': bad}, {'a': bad, 'b': bad})
      ):
        log(step, stats)
    lines = stderr.getvalue().splitlines()
    self.assertLen(lines, 2)
    self.assertRegex(lines[0], r' b: .* 1 blocks .* 16 elements .*step 0')
    self.assertRegex(lines[1], r' a: .* 1 blocks .* 16 elements .*step 1')
    self.assertLen(run.read_rows(folder / 'diagnostics.jsonl'), 6)


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


def _names_that_are_read(tree):
  """Returns the attributes that are read in a file, `__post_init__` apart."""
  names, nodes = set(), [tree]
  for node in nodes:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
      names.add(node.attr)
    if getattr(node, 'name', '') != '__post_init__':
      nodes += ast.iter_child_nodes(node)
  return names


def _start(args):
  return subprocess.Popen(
      [sys.executable, '-m', 'experiments.grpo', *args],
      stderr=subprocess.DEVNULL,
  )
