"""Learner and sampler compute the same bits, whatever the shapes.

The sampler decodes token by token against a cache; the learner runs all
positions at once. On CPU their log-probs must be equal bit for bit. What
guards it is listed in `layers`; it is empirical for a version of jaxlib, and
width 1024 with a cache of another length than the sequence is where it breaks
first.
"""

import dataclasses
import functools
import pathlib
import tempfile

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import checkpoint
from nvfp4_jax import export
from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import hf
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import types

# nvfp4_final keeps the last of FOUR layers in bfloat16, and none of two.
FOUR = dataclasses.replace(model_config.tiny(16), shared_expert_dim=32)
TINY = dataclasses.replace(FOUR, num_layers=2)
DENSE = dict(num_experts=0, experts_per_token=0, moe_dim=0)
TINY_DENSE = dataclasses.replace(TINY, mlp_dim=96, **DENSE)
WIDE = model_config.ModelConfig(
    vocab_size=300,
    num_layers=1,
    embed_dim=1024,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    num_experts=4,
    experts_per_token=2,
    moe_dim=256,
)
WIDE_DENSE = dataclasses.replace(WIDE, mlp_dim=512, **DENSE)
NEW_TOKENS = 12
# One recipe for every precision policy that a sampler has.
_SAMPLERS = tuple(
    {recipe.sampler: name for name, recipe in recipes.RECIPES.items()}.values()
)
# modelopt wants activations with one scale calibrated, and has no W4A8.
_LAYOUTS = {
    'fp8_block': 'deepseek',
    'nvfp4_naive': 'compressed_tensors',
    'nvfp4_pretraining': 'compressed_tensors',
    'nvfp4_w4a8': 'compressed_tensors',
}


def _quantizers(name):
  recipe = recipes.get(name)
  return policy.Quantizer(recipe.learner), policy.Quantizer(recipe.sampler)


@functools.cache
def _masters(config, name):
  policies = [quantizer.policy for quantizer in _quantizers(name)]
  segments = policy.segments(policies, transformer.param_paths(config))
  params = transformer.init_params(jax.random.key(0), config)
  # Larger weights than at initialization, so that log-probs are far from flat.
  return transformer.stack(jax.tree.map(lambda p: 1.5 * p, params), segments)


def _prompts(config, batch, longest=20):
  rng = np.random.default_rng(batch)
  return sampler.pad_prompts(
      [
          rng.integers(1, config.vocab_size, rng.integers(1, longest + 1))
          for _ in range(batch)
      ]
  )


@functools.cache
def _sample(config, name, batch, cache_length=None):
  _, quantizer = _quantizers(name)
  tree = policy.quantize_params(quantizer, _masters(config, name))
  settings = sampler.SampleConfig(NEW_TOKENS, (0,), cache_length=cache_length)
  prompts, lengths = _prompts(config, batch)
  return sampler.generate(
      config, tree, quantizer, prompts, lengths, jax.random.key(1), settings
  )


def _learn(config, name, tokens):
  quantizer, _ = _quantizers(name)
  params = _masters(config, name)
  tree = policy.quantize_params(quantizer, params)
  return learner.logprobs(config, params, quantizer, tree, tokens, 1.0)


def _differing(completions, logprobs):
  mask = np.asarray(completions.mask)
  a = np.asarray(completions.logprobs)[mask]
  b = np.asarray(logprobs)[:, : mask.shape[1]][mask]
  return int(np.sum(a != b)), a.size


class BitExactTest(chex.TestCase):

  def test_learner_equals_sampler(self):
    completions = _sample(TINY_DENSE, 'nvfp4_final', 7)
    logprobs = _learn(TINY_DENSE, 'nvfp4_final', completions.tokens)
    differing, count = _differing(completions, logprobs)
    self.assertGreater(count, 40)
    self.assertEqual(differing, 0)

  @parameterized.parameters((WIDE, 'nvfp4_final'), (WIDE_DENSE, 'bf16'))
  def test_learner_equals_sampler_at_width_1024(self, config, name):
    # A cache of 128 positions for sequences of 44, right padding of 13.
    completions = _sample(config, name, 5, cache_length=128)
    tokens = jnp.pad(completions.tokens, ((0, 0), (0, 13)))
    differing, count = _differing(completions, _learn(config, name, tokens))
    self.assertGreater(count, 40)
    self.assertEqual(differing, 0)

  def test_logprobs_do_not_depend_on_batch_size_or_padding(self):
    completions = _sample(TINY, 'nvfp4_final', 33)
    whole = _learn(TINY, 'nvfp4_final', completions.tokens)
    self.assertEqual(_differing(completions, whole)[0], 0)
    tokens = jnp.pad(completions.tokens[:1], ((0, 0), (0, 5)))
    alone = _learn(TINY, 'nvfp4_final', tokens)
    chex.assert_trees_all_equal(
        alone[:, : whole.shape[1]] * completions.mask[:1],
        whole[:1] * completions.mask[:1],
    )

  def test_learner_under_another_policy_differs(self):
    # As in nvfp4_naive: the sampler is quantized, the learner is not.
    completions = _sample(TINY_DENSE, 'nvfp4_final', 7)
    logprobs = _learn(TINY_DENSE, 'bf16', completions.tokens)
    differing, count = _differing(completions, logprobs)
    self.assertGreater(differing, 0.9 * count)

  def test_on_the_fly_weights_equal_quantize_params(self):
    tokens = _sample(TINY_DENSE, 'nvfp4_final', 7).tokens
    quantizer, _ = _quantizers('nvfp4_final')
    params = _masters(TINY_DENSE, 'nvfp4_final')
    got = learner.logprobs(TINY_DENSE, params, quantizer, None, tokens, 1.0)
    chex.assert_trees_all_equal(got, _learn(TINY_DENSE, 'nvfp4_final', tokens))


class ArrowsTest(chex.TestCase):
  """The bytes of every weight, wherever it goes."""

  @parameterized.parameters(*_SAMPLERS)
  def test_weights_have_the_same_bytes_everywhere(self, name):
    config = dataclasses.replace(TINY, shared_expert_dim=0, embed_dim=128)
    _, quantizer = _quantizers(name)
    paths = transformer.param_paths(config)
    segments = policy.segments([quantizer.policy], paths)
    rng = np.random.default_rng(0)
    masters = jax.tree.map(
        lambda spec: rng.normal(size=spec.shape).astype(np.float32),
        transformer.param_specs(config),
        is_leaf=lambda leaf: isinstance(leaf, transformer.ParamSpec),
    )
    masters = transformer.stack(masters, segments)

    sampler_tree = policy.quantize_params(quantizer, masters)
    learner_tree = jax.jit(policy.quantize_params)(quantizer, masters)
    chex.assert_trees_all_equal(learner_tree, sampler_tree)

    layout = _LAYOUTS.get(name, 'modelopt')
    target = export.Target(quantizer.policy, layout, name)
    with tempfile.TemporaryDirectory() as scratch:
      scratch = pathlib.Path(scratch)
      export.export(config, sampler_tree, scratch / 'live', target)
      _, live = hf.load(scratch / 'live')
      chex.assert_trees_all_equal(live, transformer.unstack(sampler_tree))

      bf16 = policy.Quantizer(policy.BF16)
      export.export(
          config,
          policy.quantize_params(bf16, masters),
          scratch / 'bf16',
          export.Target(policy.BF16),
      )
      export.convert(scratch / 'bf16', scratch / 'converted', target)
      _, converted = hf.load(scratch / 'converted')
      chex.assert_trees_all_equal(converted, live)

      checkpoint.save(scratch / 'steps', 1, masters, {})
      restored, _ = checkpoint.restore(scratch / 'steps', masters)
      chex.assert_trees_all_equal(
          policy.quantize_params(quantizer, restored), sampler_tree
      )
      checkpoint.save(scratch / 'running', 1, sampler_tree, {})
      restored, _ = checkpoint.restore(scratch / 'running', sampler_tree)
      chex.assert_trees_all_equal(restored, sampler_tree)

    reloaded = transformer.stack(live, segments)
    chex.assert_trees_all_equal(
        policy.quantize_params(quantizer, reloaded), sampler_tree
    )


@pytest.mark.slow
class GradientStepTest(chex.TestCase):
  """The default tests see this in the rows of the smoke preset."""

  def test_gradient_step_computes_the_same_logprobs(self):
    name = 'nvfp4_final'
    completions = _sample(TINY_DENSE, name, 7)
    quantizer, _ = _quantizers(name)
    params = jax.tree.map(jnp.copy, _masters(TINY_DENSE, name))  # is donated
    optimizer = learner.OptimizerConfig()
    batch = completions.tokens.shape[0]
    rollout = types.Rollout(
        tokens=completions.tokens,
        completion_mask=completions.mask,
        sampler_logprobs=completions.logprobs,
        temperature=jnp.float32(1.0),
        rewards=jnp.ones(batch),
        group=jnp.zeros(batch, jnp.int32),
        version=jnp.zeros(completions.tokens.shape, jnp.int32),
    )
    _, metrics = learner.train_step(
        TINY_DENSE,
        optimizer,
        learner.GRPOConfig(),
        learner.init_state(params, optimizer),
        quantizer,
        policy.quantize_params(quantizer, params),
        types.Batch(rollout, jnp.linspace(-1, 1, batch), None, None),
    )
    # A mean over all tokens: one bit in one of them would show.
    self.assertEqual(float(metrics['mismatch_abs_logprob']), 0.0)
    self.assertEqual(float(metrics['tis_weight_mean']), 1.0)


@pytest.mark.slow  # on the class: a parameterized method would lose the mark
class ManyBatchSizesTest(chex.TestCase):

  @parameterized.product(
      config=(TINY, FOUR, TINY_DENSE, WIDE, WIDE_DENSE),
      name=('bf16', 'nvfp4_final'),
      batch=(1, 2, 3, 6, 16, 33),
  )
  def test_learner_equals_sampler_at_many_batch_sizes(
      self, config, name, batch
  ):
    completions = _sample(config, name, batch, cache_length=128)
    tokens = jnp.pad(completions.tokens, ((0, 0), (0, batch % 7)))
    differing, _ = _differing(completions, _learn(config, name, tokens))
    self.assertEqual(differing, 0)
