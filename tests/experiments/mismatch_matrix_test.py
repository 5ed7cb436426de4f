"""The mismatch matrix, and the layers one by one, on a tiny model."""

import dataclasses
import pathlib
import tempfile

from absl.testing import absltest
import numpy as np
import pytest

from experiments import layer_precision
from experiments import mismatch_matrix
from experiments import run
from experiments import statistics
from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax import variants
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer


@pytest.mark.slow
class SmokeTest(absltest.TestCase):
  """By default colab/03_mismatch.ipynb runs the preset of the matrix."""

  def test_presets_run_and_resume(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    args = [
        'smoke',
        f'--workdir={folder / "matrix"}',
        '--causes=activation_scale',
    ]
    run.launch(mismatch_matrix.main, mismatch_matrix.PRESETS, args)
    path = folder / 'matrix' / 'metrics.jsonl'
    rows = {(r['learner'], r['sampler']): r for r in run.read_rows(path)}
    self.assertLen(rows, 5)
    matched = rows['nvfp4', 'nvfp4']
    self.assertEqual((matched['mean'], matched['equal_tokens']), (0.0, 1.0))
    for pair in (('bf16', 'nvfp4'), ('per tensor', 'per tensor')):
      self.assertGreater(rows[pair]['mean'], 1e-3)
      self.assertGreater(rows[pair]['k3'], 0.0)
    self.assertTrue((path.parent / 'figures/mismatch_matrix.png').exists())
    self.assertIn('0.1690 / 0.0747', (path.parent / 'matrix.md').read_text())

    # A row that was lost is measured again, to the same numbers.
    text = path.read_text()
    path.write_text(text.split('\n', 1)[1])
    args = ['resume', str(path.parent)]
    run.launch(mismatch_matrix.main, mismatch_matrix.PRESETS, args)
    self.assertCountEqual(path.read_text().split('\n'), text.split('\n'))

    args = ['smoke', f'--workdir={folder / "layers"}']
    run.launch(layer_precision.main, layer_precision.PRESETS, args)
    whole, only, but = run.read_rows(folder / 'layers' / 'metrics.jsonl')
    kinds = [(row['kind'], row['layers']) for row in (whole, only, but)]
    self.assertEqual(kinds, [('all', 1), ('only', 0), ('but', 0)])
    # There is one layer.
    self.assertEqual((only['mean'], but['mean']), (whole['mean'], 0.0))
    self.assertEqual((only['saved'], but['saved']), (0.0, 1.0))
    rows = run.read_rows(folder / 'layers' / 'activations.jsonl')
    names = [row['input'] for row in rows]
    self.assertEqual(names, ['q, k, v', 'o', 'gate, up', 'down'])
    for row in rows:
      self.assertLess(row['error_resq'], row['error'])
      self.assertLess(row['error_quads'], row['error'])
      self.assertLessEqual(row['underflow_resq'], row['underflow'])


class CellsTest(absltest.TestCase):

  def test_every_cell_has_its_policies(self):
    cfg = mismatch_matrix.PRESETS['tiny'][1]
    dense = dataclasses.replace(
        cfg.model,
        num_experts=0,
        experts_per_token=0,
        moe_dim=0,
        shared_expert_dim=0,
        mlp_dim=64,
    )
    for model in (cfg.model, dense):
      policies = mismatch_matrix.sides(cfg, model)
      cells = list(mismatch_matrix.make_cells(cfg, model))
      self.assertLen(set(cells), len(cells))
      for cell in cells:
        self.assertIn(cell.learner, policies)
        self.assertIn(cell.sampler, policies)
      causes = {cell.cause for cell in cells}
      has_shared = 'shared_experts' in causes
      self.assertEqual(has_shared, bool(model.shared_expert_dim))
      self.assertEqual(causes | {'shared_experts'}, set(mismatch_matrix.CAUSES))

  def test_numbers_of_a_cell_by_hand(self):
    completed = mismatch_matrix.Completed(
        tokens=np.zeros((2, 3), np.int32),
        mask=np.array([[True, True, False], [True, False, False]]),
        logprobs=np.array([[-1.0, -2.0, np.nan], [-1.0, 0, 0]], np.float32),
    )
    logprobs = np.array([[-1.5, -2.0, 7.0], [-0.75, 0, 0]], np.float32)
    row = mismatch_matrix.measure(completed, logprobs)
    self.assertEqual(row['per_prompt'], [0.25, 0.25])
    self.assertEqual((row['mean'], row['half_width']), (0.25, 0.0))
    self.assertEqual((row['token_mean'], row['max']), (0.25, 0.5))
    self.assertAlmostEqual(row['k1'], 0.25 / 3)
    k3 = (np.exp(-0.5) - 1 + 0.5 + np.exp(0.25) - 1 - 0.25) / 3
    self.assertAlmostEqual(row['k3'], k3, places=6)
    self.assertAlmostEqual(row['equal_tokens'], 1 / 3)
    self.assertEqual(row['tokens'], 3)

  def test_layers_are_quantized_alone_or_left_out(self):
    cfg = layer_precision.PRESETS['tiny'][1]
    model = dataclasses.replace(model_config.tiny(16), shared_expert_dim=32)
    variant = variants.Variant(scope='experts', keep_last=0.0)
    whole = variants.vary_policy(recipes.get(cfg.recipe).sampler, variant)
    paths = transformer.param_paths(model)
    for case, p in layer_precision.make_cases(cfg, model, whole):
      layers = {
          int(path.split('.')[1])
          for path, precision in policy.resolve(p, paths).items()
          if precision is not None
      }
      everything = set(range(4))
      wanted = {
          'all': everything,
          'only': {case.layers},
          'but': everything - {case.layers},
          'last': set(range(4 - case.layers)),
          'first': set(range(case.layers, 4)),
          'shared_experts': everything,
      }
      self.assertEqual(layers, wanted[case.kind])

  def test_residuals_are_those_of_the_recipes(self):
    for name, extra in layer_precision._RESIDUALS.items():
      for rule in recipes.get(name).sampler.rules:
        self.assertEqual(rule.precision.residual, extra)

  def test_unknown_cause_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'gamma' is not one of"):
      mismatch_matrix.Config(causes=('gamma',))


class IntervalTest(absltest.TestCase):

  def test_interval_is_students(self):
    mean, half_width = statistics.interval([1.0, 2.0, 3.0, 4.0])
    # t(.975, 3) = 3.18245 and sd = 1.29099.
    self.assertAlmostEqual(mean, 2.5)
    self.assertAlmostEqual(half_width, 3.18245 * 1.29099 / 2, places=4)
    self.assertTrue(np.isnan(statistics.interval([1.0])[1]))
    with self.assertRaisesRegex(ValueError, 'No values'):
      statistics.interval([])


if __name__ == '__main__':
  absltest.main()
