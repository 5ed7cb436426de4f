"""The command line of conversions, and kills."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from experiments import convert
from nvfp4_jax.models import hf

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / 'tests' / 'golden' / 'hf'


def contents(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


class CommandTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.folder = pathlib.Path(scratch.name)

  def _hf(self, case, *flags):
    source, destination = GOLDEN / case, self.folder / 'out'
    convert.main(['hf', f'--src={source}', f'--dst={destination}', *flags])
    return destination

  def test_hf(self):
    out = self._hf(
        'qwen3_moe', '--recipe=nvfp4_final', '--layout=compressed_tensors'
    )
    self.assertEqual(hf.open_folder(out).quantization.format, 'nvfp4')

  @parameterized.parameters(
      (('--recipe=nvfp5',), "'nvfp5' is not one of"),
      (('--recipe=nvfp4_final', '--layout=deepseek'), 'deepseek'),
      (('--recipe=nvfp4_final', '--shard_gib=0'), 'shard_bytes'),
  )
  def test_impossible_wish_is_one_line(self, flags, message):
    with self.assertRaisesRegex(SystemExit, message):
      self._hf('llama', *flags)
    self.assertEmpty(list(self.folder.iterdir()))

  @parameterized.parameters('hf', 'gguf')
  def test_missing_source_is_named(self, command):
    args = [command, '--src=/nowhere', f'--dst={self.folder / "out"}']
    if command == 'hf':
      args.append('--recipe=mxfp8')
    with self.assertRaisesRegex(SystemExit, 'nowhere'):
      convert.main(args)

  def test_destination_is_never_overwritten(self):
    with self.assertRaisesRegex(SystemExit, 'exists'):
      convert.main(['smollm2', f'--dst={self.folder}'])


@pytest.mark.slow
class KillTest(absltest.TestCase):

  def test_killed_conversions_go_on_and_end_alike(self):
    with tempfile.TemporaryDirectory() as scratch:
      scratch = pathlib.Path(scratch)
      command = lambda name: [
          *(sys.executable, '-m', 'experiments.convert', 'hf'),
          f'--src={GOLDEN / "qwen3_moe"}',
          f'--dst={scratch / name}',
          *('--recipe=nvfp4_final', '--shard_gib=1e-9'),
      ]
      environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
      begin = time.monotonic()
      subprocess.run(command('whole'), check=True, env=environment)
      duration = time.monotonic() - begin
      delays, kills = random.Random(0), 0
      destination = scratch / 'out'
      for _ in range(20):
        run = subprocess.Popen(command('out'), env=environment)
        try:
          run.wait(timeout=delays.uniform(0.4, 1.0) * duration)
        except subprocess.TimeoutExpired:
          run.send_signal(signal.SIGKILL)
          run.wait()
          kills += 1
        if destination.exists():
          self.assertEqual(contents(destination), contents(scratch / 'whole'))
          for path in destination.iterdir():
            path.unlink()
          destination.rmdir()
      self.assertGreater(kills, 5)
      subprocess.run(command('out'), check=True, env=environment)
      self.assertEqual(contents(destination), contents(scratch / 'whole'))
