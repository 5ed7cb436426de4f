"""Checkpoints of every family, against transformers' logits in float32.

The folders in golden/hf were made by interop/torch_models.py: random weights,
tokens, and the logits of transformers 5.24 in float32.
"""

import pathlib

from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import policy
from nvfp4_jax.models import hf
from nvfp4_jax.models import transformer

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'hf'
CASES = tuple(sorted(path.name for path in GOLDEN.iterdir()))
BF16 = policy.Quantizer(policy.BF16)


def load_stacked(folder, **options):
  """Returns the configuration and stacked float32 masters of a folder."""
  config, params = hf.load(folder, **options)
  segments = policy.segments([policy.BF16], transformer.param_paths(config))
  return config, transformer.stack(policy.dequantize_params(params), segments)


def logits(config, params, tokens):
  hidden = transformer.forward(config, params, jnp.asarray(tokens), BF16)
  return np.asarray(transformer.logits(params, hidden))


class TransformersTest(chex.TestCase):

  @parameterized.parameters(*CASES)
  def test_float32_logits_are_those_of_transformers(self, case):
    reference = np.load(GOLDEN / case / 'reference.npz')
    config, params = load_stacked(GOLDEN / case, dtype='float32')
    got = logits(config, params, reference['tokens'])
    want = reference['logits']
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))
