"""Routing replay: the learner takes the experts that the sampler chose."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import layers
from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer

# GrpoTest replays experts in optimized programs, to equal bits.
pytestmark = pytest.mark.quick_compile

CONFIG = dataclasses.replace(
    model_config.tiny(16), num_layers=3, first_dense_layers=1, mlp_dim=64
)
PROMPTS = ((7,), (1, 2, 4, 6, 8), (9, 9, 9), (2, 4, 6, 8, 10, 12, 14))
QUANTIZER = policy.Quantizer(recipes.get('nvfp4_high_precision').sampler)


@functools.cache
def _masters():
  params = transformer.init_params(jax.random.key(0), CONFIG)
  segments = policy.segments(
      [QUANTIZER.policy], transformer.param_paths(CONFIG)
  )
  return transformer.stack(jax.tree.map(lambda p: 1.5 * p, params), segments)


@functools.cache
def _sample():
  return sampler.generate(
      CONFIG,
      policy.quantize_params(QUANTIZER, _masters()),
      QUANTIZER,
      *sampler.pad_prompts(PROMPTS),
      jax.random.key(1),
      sampler.SampleConfig(8, (3, 5), record_experts=True),
  )


@jax.jit
def _logprobs(params, tokens, expert_ids):
  hidden = transformer.forward(
      CONFIG, params, tokens, QUANTIZER, expert_ids=expert_ids
  )
  logits = transformer.logits(params, hidden[:, :-1])
  new, _ = layers.token_logprobs(logits, tokens[:, 1:], 1.0)
  return jnp.pad(new, ((0, 0), (1, 0)))


class ReplayTest(chex.TestCase):

  def test_every_token_that_was_run_has_its_experts(self):
    ids, mask = np.asarray(_sample().expert_ids), np.asarray(_sample().mask)
    k = CONFIG.experts_per_token
    self.assertEqual(ids.shape, (*mask.shape, 2, k))
    for row, prompt, done in zip(ids, PROMPTS, mask, strict=True):
      run = len(prompt) + done.sum() - 1  # all but the last token
      self.assertTrue(np.all(row[:run, :, 0] != row[:run, :, 1]))
      self.assertFalse(np.any(row[run:]))

  def test_replayed_logprobs_are_the_samplers(self):
    sampled = _sample()
    got = _logprobs(_masters(), sampled.tokens, sampled.expert_ids)
    own = _logprobs(_masters(), sampled.tokens, None)
    mask = np.asarray(sampled.mask)
    for logprobs in (got, own):
      np.testing.assert_array_equal(
          np.asarray(logprobs)[mask], np.asarray(sampled.logprobs)[mask]
      )

  def test_other_experts_give_other_logprobs(self):
    sampled = _sample()
    other = (sampled.expert_ids + 1) % CONFIG.num_experts
    got = _logprobs(_masters(), sampled.tokens, other)
    mask = np.asarray(sampled.mask)
    differs = np.asarray(got)[mask] != np.asarray(sampled.logprobs)[mask]
    self.assertGreater(differs.mean(), 0.9)

  def test_gradients_reach_the_router_through_replayed_experts(self):
    names = ('gate', 'up', 'down')
    layer = {
        name: leaf[0]
        for name, leaf in _masters()['layers'][1].items()
        if name.startswith('mlp')
    }
    precisions = dict.fromkeys(f'mlp.experts.{n}_proj' for n in names)
    x = jax.random.normal(jax.random.key(2), (6, 64), jnp.bfloat16)

    @jax.jit
    def grad(gate, experts):
      def loss(gate):
        weights = layers.LayerWeights(
            layer | {'mlp.gate': gate}, {}, precisions
        )
        return jnp.sum(layers.moe(x, weights, 2, experts=experts)[0] ** 2)

      return jax.grad(loss)(gate)

    _, chosen = layers.moe(x, layers.LayerWeights(layer, {}, precisions), 2)
    replayed, own = (grad(layer['mlp.gate'], e) for e in (chosen, None))
    self.assertGreater(float(jnp.max(jnp.abs(replayed))), 0.0)
    chex.assert_trees_all_equal(replayed, own)

  def test_a_model_without_experts_has_none_to_record(self):
    dense = dataclasses.replace(
        CONFIG, num_experts=0, experts_per_token=0, moe_dim=0
    )
    with self.assertRaisesRegex(ValueError, 'record_experts'):
      sampler.generate(
          dense,
          {},
          QUANTIZER,
          *sampler.pad_prompts(PROMPTS),
          jax.random.key(0),
          sampler.SampleConfig(2, record_experts=True),
      )
