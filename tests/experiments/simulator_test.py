"""The simulator's experiment: smoke preset, committed rows and figures."""

import pathlib
import tempfile

from absl.testing import absltest
import pytest

from experiments import run
from experiments import simulator

# Rows and figures.
pytestmark = pytest.mark.quick_compile

_RESULTS = pathlib.Path(__file__).parents[2] / 'results' / 'simulator'


class SmokeTest(absltest.TestCase):

  def test_writes_rows_and_a_figure(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    args = ['smoke', f'--workdir={folder}']
    run.launch(simulator.main, simulator.PRESETS, args)
    rows = run.read_rows(folder / 'metrics.jsonl')
    summaries = [row for row in rows if row['kind'] == 'summary']
    self.assertEqual([r['system'] for r in summaries], list(simulator.SYSTEMS))
    self.assertTrue((folder / 'figures' / 'run.png').exists())


class CommittedTest(absltest.TestCase):

  def test_rows_tell_the_story_and_give_the_figures(self):
    rows = run.read_rows(_RESULTS / 'run.jsonl')
    collapsed = {
        row['system']: row['collapsed']
        for row in rows
        if row['kind'] == 'summary'
    }
    self.assertEqual(collapsed['nvfp4'], 3)
    for name in ('bf16', 'nvfp4, all three', 'nvfp4, short horizon'):
      self.assertEqual(collapsed[name], 0)
    held = {
        row['constant']: row['held']
        for row in run.read_rows(_RESULTS / 'range.jsonl')
        if row['kind'] == 'constant'
    }
    self.assertCountEqual(held, simulator.FORCING)
    for low, high in held.values():
      self.assertLessEqual(low, 1)
      self.assertGreaterEqual(high, 1)
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    for path in simulator.draw(_RESULTS, folder):
      self.assertTrue(path.exists())


if __name__ == '__main__':
  absltest.main()
