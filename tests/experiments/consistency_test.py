"""The consistency experiment: agreement, and planted differences."""

import contextlib
import dataclasses
import functools
import io
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import numpy as np
import pytest

from experiments import consistency
from experiments import run
from experiments import sft
from nvfp4_jax import qtensor
from nvfp4_jax.models import hf
from nvfp4_jax.models import transformer

SMOKE = consistency.PRESETS['smoke'][1]
WEIGHT = 'mlp.up_proj'


@functools.cache
def _sides():
  return consistency.make_sides(SMOKE)


@functools.cache
def _sampled():
  return consistency.sample(SMOKE, _sides())


def _of_part(rows, part):
  return [row for row in rows if row['part'] == part]


@pytest.mark.slow  # tests/rl/trace_test.py holds the same by default
class CommandTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def launch(self, *flags):
    """Returns exit code, rows and what was printed."""
    workdir = self.folder / 'run'
    code, printed = 0, io.StringIO()
    with contextlib.redirect_stdout(printed):
      try:
        args = ['smoke', f'--workdir={workdir}', *flags]
        run.launch(consistency.main, consistency.PRESETS, args)
      except SystemExit as stopped:
        code = stopped.code
    rows = run.read_rows(workdir / 'metrics.jsonl')
    self.assertEqual([row['step'] for row in rows], list(range(len(rows))))
    return code, rows, printed.getvalue()

  def test_one_policy_agrees(self):
    code, rows, printed = self.launch()
    self.assertEqual(code, 0, printed)
    (found,) = _of_part(rows, 'policies')
    self.assertTrue(found['equal'])
    weights = {row['of']: row for row in _of_part(rows, 'weights')}
    self.assertIn("no 'nvfp4'", weights.pop('deepseek')['reason'])
    self.assertEqual(
        set(weights), {'learner', 'modelopt', 'compressed_tensors'}
    )
    for row in weights.values():
      self.assertEqual(row['quantized'], 2 * 3)
      self.assertGreater(row['bytes'], 50_000)
      self.assertEqual((row['bytes_differ'], row['on_one_side']), (0, 0))
    stages = _of_part(rows, 'stages')
    self.assertEqual(stages[0]['name'], 'embed_tokens')
    self.assertEqual(stages[-1]['name'], 'logprobs')
    self.assertEqual({row['layer'] for row in stages}, {None, 0, 1})
    for row in stages:
      self.assertGreater(row['positions'], 0)
      self.assertEqual(row['differ'], 0)
    for row in _of_part(rows, 'logprobs'):
      self.assertGreater(row['tokens'], 3)
      self.assertEqual(row['equal'], row['tokens'])
      self.assertEqual((row['max_gap'], row['k3']), (0, 0))
    self.assertIsNone(rows[-1]['first_difference'])
    self.assertIn('First difference: none', printed)
    self.assertLessEqual(max(map(len, printed.splitlines()[:6])), 80)

  def test_two_policies_differ_where_the_recipe_says(self):
    code, rows, printed = self.launch('--recipe=nvfp4_naive')
    self.assertEqual(code, 1)
    (found,) = _of_part(rows, 'policies')
    self.assertFalse(found['equal'])
    paths = [
        f'layers.{i}.mlp.{name}_proj'
        for i in range(2)
        for name in ('gate', 'up', 'down')
    ]
    self.assertEqual(found['in_sampler_only'], paths)
    self.assertEqual(found['in_learner_only'], [])
    learner = _of_part(rows, 'weights')[0]
    self.assertEqual((learner['on_one_side'], learner['bytes_differ']), (6, 0))
    self.assertGreater(learner['weights'], 0)
    self.assertEqual(
        rows[-1]['first_difference'],
        f'weights of learner and sampler, {paths[0]}: quantized on one side'
        ' only',
    )
    self.assertEqual(
        rows[-1]['stages'], 'layer 0, mlp.gate_proj, token position 0, row 0'
    )
    where = '  layers.0-1.mlp.gate_proj\n'
    for text in (rows[-1]['stages'], 'two policies, by design', where):
      self.assertIn(text, printed)

  def test_a_byte_that_is_lost_on_disk_ends_with_1(self):
    with _flipped('data'):
      code, rows, printed = self.launch()
    self.assertEqual(code, 1)
    want = f'weights of modelopt and sampler, layers.1.{WEIGHT}: codes'
    self.assertEqual(rows[-1]['first_difference'], want)
    self.assertIsNone(rows[-1]['stages'])
    self.assertIn(f'First difference: {want}', printed)

  def test_a_warm_start_is_taken(self):
    warm = dataclasses.replace(
        sft.PRESETS['smoke'][1],
        workdir=self.folder / 'saved',
        model=SMOKE.model,
        seed=3,
    )
    run.save_config(warm.workdir, warm)
    moved = warm.workdir.rename(self.folder / 'moved')
    params = transformer.init_params(jax.random.key(7), warm.model)
    with mock.patch.object(sft, 'load', return_value=params) as load:
      sides = consistency.make_sides(
          dataclasses.replace(SMOKE, warm_start=moved)
      )
    load.assert_called_once_with(dataclasses.replace(warm, workdir=moved))
    self.assertEqual(sides.model, warm.model)
    chex.assert_trees_all_equal(transformer.unstack(sides.masters), params)


class FlagsTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(recipe='nvfp5'), 'nvfp5'),
      (dict(prompts=0), 'prompts 0'),
      (dict(checkpoint=pathlib.Path('x')), 'running_sum'),
      (
          dict(checkpoint=pathlib.Path('x'), warm_start=pathlib.Path('y')),
          'not both',
      ),
  )
  def test_flags_that_do_not_fit_are_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(SMOKE, **changes)


@pytest.mark.slow
class PlantedTest(parameterized.TestCase):
  """A difference in one place is found, and named rightly."""

  @parameterized.parameters(
      ('data', 'codes', 1),
      ('block_scale', 'block scales', 1),
      ('global_scale', 'global scale', 1),
  )
  def test_a_flipped_bit_of_a_reloaded_weight(self, field, name, count):
    with _flipped(field):
      rows = list(consistency.weight_rows(_sides()))
    self.assertIsNone(rows[0]['first'])  # the learner's
    for row in rows[1:3]:
      self.assertEqual(row['first'], f'layers.1.{WEIGHT}: {name}')
      self.assertEqual(row['bytes_differ'], count)
      self.assertEqual(row['weights_differ'], 1)

  @parameterized.parameters(0, 1)
  def test_a_nudged_gain(self, layer):
    # By one bit of one number, in the sampler only.
    (segment,) = _sides().sampler['layers']
    gain = np.array(segment['input_layernorm'])
    gain.view(np.uint16)[layer, 5] ^= 1
    segment = segment | {'input_layernorm': jax.numpy.asarray(gain)}
    sides = dataclasses.replace(
        _sides(), sampler=_sides().sampler | {'layers': (segment,)}
    )
    row, *_ = consistency.weight_rows(sides)
    self.assertEqual(row['first'], f'layers.{layer}.input_layernorm: values')
    self.assertEqual(row['bytes_differ'], 1)
    traces = consistency.trace_sides(sides, _sampled())
    rows = list(consistency.stage_rows(*traces, _sampled()))
    verdict = consistency.verdict(rows)
    self.assertEqual(
        verdict['first_difference'],
        f'layer {layer}, input_layernorm, token position 0, row 0',
    )
    first = next(row for row in rows if row['differ'])
    self.assertGreater(first['differ'], 0.9 * first['positions'])
    self.assertGreater(first['max_abs'], 0)

  def test_a_model_that_reloads_as_another(self):
    load = hf.load

    def other(*args, **options):
      config, params = load(*args, **options)
      return dataclasses.replace(config, rope_theta=1e3), params

    with mock.patch.object(hf, 'load', other):
      rows = list(consistency.weight_rows(_sides()))
    self.assertIn('config.json', rows[1]['first'])
    self.assertEqual(rows[1]['bytes_differ'], 0)


def _flipped(field):
  """Returns a context in which a bit of every reloaded tree is flipped."""
  load = hf.load

  def flipped(*args, **options):
    config, params = load(*args, **options)
    q = params['layers'][1][WEIGHT]
    assert isinstance(q, qtensor.QTensor)
    x = np.array(getattr(q, field))
    x.reshape(-1).view(np.uint8)[1] ^= 1
    params['layers'][1][WEIGHT] = dataclasses.replace(q, **{field: x})
    return config, params

  return mock.patch.object(hf, 'load', flipped)


if __name__ == '__main__':
  absltest.main()
