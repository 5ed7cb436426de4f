"""Tests of run."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import tempfile
from typing import Literal
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from experiments import grpo
from experiments import run
from nvfp4_jax import config
from nvfp4_jax import files
from nvfp4_jax.rl import corrections
from nvfp4_jax.rl import losses


@dataclasses.dataclass(frozen=True)
class _Inner:
  learning_rate: float = 0.5
  cap: float | None = 2.0


@dataclasses.dataclass(frozen=True)
class _Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/test')
  steps: int = 1
  mode: Literal['a', 'b'] = 'a'
  names: tuple[str, ...] = ()
  optimizer: _Inner = _Inner()


_PRESETS = {
    'smoke': ('Short.', _Config(steps=2)),
    'full': ('Long.', _Config(steps=100, mode='b')),
}


class WorkdirTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.root = pathlib.Path(root)
    self.workdir = self.root / 'runs' / 'a'


class LogTest(WorkdirTest):

  def setUp(self):
    super().setUp()
    self.log = run.Log(self.workdir)
    self.rows = [{'step': i, 'loss': 0.1 * i} for i in range(4)]

  def test_appends_one_json_object_a_line(self):
    for i, row in enumerate(self.rows):
      self.log(row)
      self.assertEqual(run.read_rows(self.log.path), self.rows[: i + 1])
    self.assertEqual(self.log.path, self.workdir / 'metrics.jsonl')
    lines = self.log.path.read_text().splitlines()
    self.assertEqual([json.loads(line) for line in lines], self.rows)

  def test_goes_on_after_the_rows_that_are_there(self):
    self.log(self.rows[0])
    run.Log(self.workdir)(self.rows[1])
    self.assertEqual(run.read_rows(self.log.path), self.rows[:2])

  @parameterized.parameters(0, 1, 3, 4, 9)
  def test_rewind_drops_the_rows_from_a_step_on(self, step):
    for row in self.rows:
      self.log(row)
    self.log.rewind(step)
    self.assertEqual(run.read_rows(self.log.path), self.rows[:step])
    self.log({'step': step})
    rows = [*self.rows[:step], {'step': step}]
    self.assertEqual(run.read_rows(self.log.path), rows)

  def test_rewind_of_a_run_without_rows_gives_none(self):
    self.log.rewind(0)
    self.assertEqual(run.read_rows(self.log.path), [])

  @parameterized.parameters('{', '{"step": 1, "loss": 0.', '{"step": 1}')
  def test_a_line_that_was_cut_short_is_dropped(self, partial):
    self.log(self.rows[0])
    with self.log.path.open('a') as file:
      file.write(partial)
    self.assertEqual(run.read_rows(self.log.path), self.rows[:1])
    log = run.Log(self.workdir)
    log.rewind(1)
    log(self.rows[1])
    self.assertEqual(run.read_rows(self.log.path), self.rows[:2])

  def test_opening_drops_a_line_that_was_cut_short(self):
    self.log(self.rows[0])
    with self.log.path.open('a') as file:
      file.write('{"step": 1, "lo')
    run.Log(self.workdir)(self.rows[1])
    self.assertEqual(run.read_rows(self.log.path), self.rows[:2])

  def test_a_missing_file_has_no_rows(self):
    self.assertEqual(run.read_rows(self.root / 'none.jsonl'), [])


class WriteAtomicallyTest(WorkdirTest):

  def setUp(self):
    super().setUp()
    self.path = self.root / 'file.txt'

  def test_replaces_the_content_and_leaves_nothing_else(self):
    files.write_atomically(self.path, 'a longer text')
    files.write_atomically(self.path, 'new')
    self.assertEqual(self.path.read_text(), 'new')
    self.assertEqual(os.listdir(self.root), ['file.txt'])

  def test_a_kill_before_the_rename_leaves_the_old_content(self):
    files.write_atomically(self.path, 'old')
    with (
        mock.patch.object(os, 'replace', side_effect=KeyboardInterrupt),
        self.assertRaises(KeyboardInterrupt),
    ):
      files.write_atomically(self.path, 'new')
    self.assertEqual(self.path.read_text(), 'old')
    files.write_atomically(self.path, 'new')
    self.assertEqual(self.path.read_text(), 'new')


class CommandLineTest(WorkdirTest):

  presets = _PRESETS

  def launch(self, *args):
    calls = []
    main = lambda cfg, log: calls.append((cfg, log))
    run.launch(main, self.presets, args)
    ((cfg, log),) = calls
    self.assertEqual(log.path, cfg.workdir / 'metrics.jsonl')
    saved = json.loads((cfg.workdir / 'config.json').read_text())
    self.assertEqual(saved, config.to_json(cfg))
    return cfg

  def stopped(self, *args):
    """Returns what is printed or raised when the command line is refused."""
    printed = io.StringIO()
    main = lambda cfg, log: self.fail(f'It ran with {cfg}.')
    with (
        contextlib.redirect_stderr(printed),
        self.assertRaises(SystemExit) as context,
    ):
      run.launch(main, self.presets, args)
    self.assertNotIn(context.exception.code, (0, None))
    return f'{printed.getvalue()}\n{context.exception.code}'


class LaunchTest(CommandLineTest):

  def test_a_preset_runs_with_its_own_values(self):
    cfg = self.launch('full', f'--workdir={self.workdir}')
    self.assertEqual(cfg, _Config(self.workdir, steps=100, mode='b'))

  def test_flags_go_on_top_of_the_preset(self):
    cfg = self.launch(
        'full',
        f'--workdir={self.workdir}',
        '--mode=a',
        '--names=x',
        'y',
        '--optimizer.learning_rate=0.25',
        '--optimizer.cap=None',
    )
    want = _Config(self.workdir, 100, 'a', ('x', 'y'), _Inner(0.25, None))
    self.assertEqual(cfg, want)

  def test_hyphens_do_too(self):
    cfg = self.launch(
        'smoke', f'--workdir={self.workdir}', '--optimizer.learning-rate', '1'
    )
    self.assertEqual(cfg.optimizer, _Inner(1.0))

  def test_the_configuration_is_written_before_the_run_starts(self):
    def main(cfg, log):
      saved = json.loads((cfg.workdir / 'config.json').read_text())
      self.assertEqual(config.from_json(_Config, saved), cfg)
      log({'step': 0})

    run.launch(main, _PRESETS, ['smoke', f'--workdir={self.workdir}'])
    rows = run.read_rows(self.workdir / 'metrics.jsonl')
    self.assertEqual(rows, [{'step': 0}])

  @parameterized.parameters(
      (('--bogus=1',), '--bogus'),
      (('--optimizer.learning_rat=1',), 'optimizer.learning_rat'),
      (('--mode=c',), 'mode'),
      (('--steps=1.5',), 'steps'),
      (('--steps=many',), 'steps'),
  )
  def test_a_wrong_flag_stops_and_is_named(self, flags, name):
    message = self.stopped('smoke', f'--workdir={self.workdir}', *flags)
    self.assertIn(name, message)
    self.assertFalse(self.workdir.exists())

  def test_an_unknown_preset_stops_and_all_are_listed(self):
    message = self.stopped('smok')
    for name in _PRESETS:
      self.assertIn(name, message)

  def test_no_preset_stops_and_all_are_listed(self):
    message = self.stopped()
    for name in _PRESETS:
      self.assertIn(name, message)

  def test_the_same_command_goes_on(self):
    args = ('smoke', f'--workdir={self.workdir}', '--mode=b')
    self.assertEqual(self.launch(*args), self.launch(*args))

  def test_a_run_with_another_configuration_is_not_overwritten(self):
    first = self.launch('smoke', f'--workdir={self.workdir}')
    flags = (f'--workdir={self.workdir}', '--optimizer.learning_rate=0.25')
    message = self.stopped('smoke', *flags)
    self.assertIn(f'{self.workdir} holds a run with another', message)
    self.assertIn(f'resume {self.workdir}', message)
    self.assertEqual(self.launch('resume', str(self.workdir)), first)


class ResumeTest(CommandLineTest):

  def setUp(self):
    super().setUp()
    self.first = self.launch('full', f'--workdir={self.workdir}', '--names=x')

  def test_takes_the_configuration_of_the_run(self):
    # Not that of the first preset.
    self.assertEqual(self.launch('resume', str(self.workdir)), self.first)

  def test_flags_go_on_top_and_are_kept(self):
    want = dataclasses.replace(self.first, steps=7, optimizer=_Inner(0.25))
    flags = ('--steps=7', '--optimizer.learning_rate=0.25')
    self.assertEqual(self.launch('resume', str(self.workdir), *flags), want)
    self.assertEqual(self.launch('resume', str(self.workdir)), want)

  def test_keeps_the_rows(self):
    log = run.Log(self.workdir)
    log({'step': 0})
    self.launch('resume', str(self.workdir))
    self.assertEqual(run.read_rows(log.path), [{'step': 0}])

  def test_works_where_the_run_was_moved_to(self):
    moved = self.root / 'moved'
    self.workdir.rename(moved)
    want = dataclasses.replace(self.first, workdir=moved)
    self.assertEqual(self.launch('resume', str(moved)), want)
    self.assertFalse(self.workdir.exists())

  def test_a_folder_without_a_run_stops_and_is_named(self):
    missing = self.root / 'missing'
    message = self.stopped('resume', str(missing))
    self.assertIn(f'{missing / "config.json"} does not exist', message)
    self.assertFalse(missing.exists())

  @parameterized.parameters(((),), (('--steps=3',),))
  def test_no_folder_stops_and_tells_the_usage(self, args):
    self.assertIn('resume WORKDIR', self.stopped('resume', *args))

  def test_an_unknown_flag_stops_and_is_named(self):
    message = self.stopped('resume', str(self.workdir), '--bogus=1')
    self.assertIn('--bogus', message)

  @parameterized.parameters(
      ('{"steps": 3, "gone": 1}', 'gone'),
      ('{"steps": "3"}', '_Config.steps'),
      ('{"steps": ', 'line 1'),
  )
  def test_a_configuration_that_cannot_be_read_stops(self, text, reason):
    path = self.workdir / 'config.json'
    path.write_text(text)
    message = self.stopped('resume', str(self.workdir))
    self.assertIn(str(path), message)
    self.assertIn(reason, message)
    self.assertEqual(path.read_text(), text)


class GrpoFlagsTest(CommandLineTest):
  """The nested flags of a real experiment; nothing is trained."""

  presets = grpo.PRESETS

  def test_nested_flags_reach_their_fields(self):
    cfg = self.launch(
        'smoke',
        f'--workdir={self.workdir}',
        '--recipe=bf16',
        '--compare',
        'nvfp4_naive',
        'nvfp4_final',
        '--optimizer.learning_rate=0.25',
        '--supervised.optimizer.learning_rate=0.75',
        '--grpo.correction.weights=none',
        '--grpo.loss.kind=gspo',
        '--task.name=addition',
        f'--warm_start={self.root}',
    )
    smoke = grpo.PRESETS['smoke'][1]
    replace = dataclasses.replace
    supervised = smoke.supervised
    want = replace(
        smoke,
        workdir=self.workdir,
        recipe='bf16',
        compare=('nvfp4_naive', 'nvfp4_final'),
        optimizer=replace(smoke.optimizer, learning_rate=0.25),
        supervised=replace(
            supervised,
            optimizer=replace(supervised.optimizer, learning_rate=0.75),
        ),
        grpo=replace(
            smoke.grpo,
            correction=corrections.CorrectionConfig(weights='none'),
            loss=losses.LossConfig('gspo'),
        ),
        task=replace(smoke.task, name='addition'),
        warm_start=self.root,
    )
    self.assertEqual(cfg, want)
    self.assertEqual(self.launch('resume', str(self.workdir)), want)

  def test_an_unknown_recipe_stops_and_all_are_listed(self):
    message = self.stopped(
        'smoke', f'--workdir={self.workdir}', '--recipe=nvfp5'
    )
    for name in ('nvfp5', 'bf16', 'nvfp4_final'):
      self.assertIn(name, message)
    self.assertFalse(self.workdir.exists())

  def test_every_recipe_is_a_preset(self):
    for name in ('bf16', 'nvfp4_final', 'nvfp4_naive'):
      cfg = self.launch(name, f'--workdir={self.root / name}')
      self.assertEqual(cfg.recipe, name)


if __name__ == '__main__':
  absltest.main()
