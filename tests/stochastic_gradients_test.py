"""Gradients that are rounded stochastically, through a whole model."""

import dataclasses
import functools

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import pytest

from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer

# Bits of optimized programs are left to bit_exact_test.py.
pytestmark = pytest.mark.quick_compile

CONFIG = dataclasses.replace(
    model_config.tiny(16),
    num_layers=1,
    num_experts=0,
    experts_per_token=0,
    moe_dim=0,
    mlp_dim=64,
)
RECIPE = recipes.get('nvfp4_pretraining')


@functools.cache
def _masters():
  params = transformer.init_params(jax.random.key(0), CONFIG)
  return transformer.stack(params, (1,))


@jax.jit
def _gradients(quantizer, params):
  """Returns hidden states, and the gradient of their sum of squares."""
  tokens = jnp.arange(32).reshape(2, 16) % 16

  def fn(params):
    hidden = transformer.forward(CONFIG, params, tokens, quantizer)
    return jnp.sum(jnp.square(hidden.astype(jnp.float32))), hidden

  gradients, hidden = jax.grad(fn, has_aux=True)(params)
  return hidden, gradients


def _run(quantizer):
  return _gradients(quantizer, _masters())


def _with_key(seed):
  return policy.Quantizer(RECIPE.learner, jax.random.key(seed))


class StochasticGradientsTest(absltest.TestCase):

  def test_gradients_follow_the_key_and_the_forward_pass_does_not(self):
    (hidden, first), (again, same), (other, different) = (
        _run(_with_key(seed)) for seed in (0, 0, 1)
    )
    chex.assert_trees_all_equal(hidden, again, other)
    chex.assert_trees_all_equal(first, same)
    name = 'self_attn.o_proj'
    a, b = (g['layers'][0][name] for g in (first, different))
    self.assertGreater(float(jnp.mean(a != b)), 0.5)
    # The two keys' noise is around the same gradient.
    norm = jnp.linalg.norm
    self.assertLess(float(norm(a - b) / norm(a)), 0.5)

  def test_a_missing_key_is_named(self):
    with self.assertRaisesRegex(ValueError, 'q_proj: .*the quantizer has no'):
      _run(policy.Quantizer(RECIPE.learner))
    self.assertTrue(policy.is_stochastic(RECIPE.learner))
    self.assertFalse(policy.is_stochastic(recipes.get('resq').learner))

  def test_samplers_need_no_key(self):
    quantizer = policy.Quantizer(RECIPE.sampler)
    tree = policy.quantize_params(quantizer, _masters())
    hidden = transformer.forward(
        CONFIG, tree, jnp.arange(32).reshape(2, 16) % 16, quantizer
    )
    chex.assert_trees_all_equal(hidden, _run(_with_key(0))[0])


if __name__ == '__main__':
  absltest.main()
