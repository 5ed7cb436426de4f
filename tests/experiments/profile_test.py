"""The profile of a step: its parts, and the model's FLOPs."""

import dataclasses
import pathlib
import tempfile

from absl.testing import absltest
import jax
import jax.numpy as jnp
import pytest

from experiments import profile
from experiments import run
from nvfp4_jax import profiling
from nvfp4_jax.models import config as model_config


class ProfileTest(absltest.TestCase):

  def test_flops_by_hand(self):
    model = dataclasses.replace(model_config.tiny(16), num_layers=1)
    attention = 64 * (64 + 32 + 32 + 64)
    experts = 2 * 3 * 64 * 32  # two of eight
    active = attention + 64 * 8 + experts + 16 * 64
    want = 5 * (2 * active + 4 * 4 * 16 * 10)
    self.assertEqual(profile.model_flops(model, 5, context=10), want)
    tied = dataclasses.replace(model, tie_embeddings=True)
    self.assertEqual(profile.model_flops(tied, 5, context=10), want)

  def test_a_function_is_measured(self):
    x = jnp.ones((64, 64))
    result, cost = profiling.measure(lambda x: x @ x + 1, x, donate=(0,))
    self.assertEqual(float(result[0, 0]), 65.0)
    self.assertEqual((cost.argument_bytes, cost.output_bytes), (16384, 16384))
    self.assertLessEqual(cost.fastest, cost.seconds)
    self.assertFalse(x.is_deleted())
    with self.assertRaisesRegex(ValueError, 'repeats 0 is below 1'):
      profiling.measure(jax.numpy.sin, x, repeats=0)


@pytest.mark.slow
class SmokeTest(absltest.TestCase):

  def test_parts_add_up_to_a_step(self):
    workdir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    args = ['smoke', f'--workdir={workdir / "run"}']
    run.launch(profile.main, profile.PRESETS, args)
    rows = run.read_rows(workdir / 'run' / 'metrics.jsonl')
    seconds = {row['part']: row['seconds'] for row in rows}
    self.assertEqual(
        list(seconds),
        ['sync', 'rollout', 'reward', 'reference', 'update']
        + ['prepare', 'gemm', 'step'],
    )
    total = sum(list(seconds.values())[:5])
    self.assertAlmostEqual(seconds['step'], total)


if __name__ == '__main__':
  absltest.main()
