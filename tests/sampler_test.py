"""Sampling: masks, EOS, distributions, independence of rows, compilations."""

import dataclasses
import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import kernels
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax import variants
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer

# bit_exact_test.py has the bits of optimized programs; LLVM changes no size.
pytestmark = pytest.mark.quick_compile

# Small programs; tests/bit_exact_test.py samples under quantized recipes.
CONFIG = dataclasses.replace(
    model_config.tiny(16),
    num_layers=1,
    num_experts=0,
    experts_per_token=0,
    moe_dim=0,
    mlp_dim=64,
)
QUANTIZER = policy.Quantizer(policy.BF16)
SAMPLE = sampler.SampleConfig(max_new_tokens=8, eos_ids=(3, 5))
PROMPTS = ((7,), (1, 2, 4, 6, 8), (9, 9, 9), (2, 4, 6, 8, 10, 12, 14))


@functools.cache
def _tree():
  params = transformer.init_params(jax.random.key(0), CONFIG)
  return policy.quantize_params(QUANTIZER, transformer.stack(params, (1,)))


def _generate(prompts=PROMPTS, sample=SAMPLE, seed=0):
  completions = sampler.generate(
      CONFIG,
      _tree(),
      QUANTIZER,
      *sampler.pad_prompts(prompts),
      jax.random.key(seed),
      sample,
  )
  return jax.tree.map(np.asarray, completions)


@jax.jit
def _logits(tokens):
  hidden = transformer.forward(CONFIG, _tree(), tokens, QUANTIZER)
  return transformer.logits(_tree(), hidden)


class GenerateTest(chex.TestCase):

  def test_rows_hold_prompt_completion_padding_without_gaps(self):
    for seed in range(3):
      result = _generate(seed=seed)
      for row, mask, prompt, truncated in zip(
          result.tokens, result.mask, PROMPTS, result.truncated, strict=True
      ):
        start, count = len(prompt), int(mask.sum())
        np.testing.assert_array_equal(row[:start], prompt)
        np.testing.assert_array_equal(
            np.flatnonzero(mask), start + np.arange(count)
        )
        completion = row[start : start + count]
        self.assertFalse(np.isin(completion[:-1], SAMPLE.eos_ids).any())
        ended = completion[-1] in SAMPLE.eos_ids
        self.assertEqual(truncated, not ended)
        self.assertEqual(count == SAMPLE.max_new_tokens or ended, True)
        np.testing.assert_array_equal(row[start + count :], sampler.PAD)

  def test_layers_may_be_read_in_their_stack(self):
    config = dataclasses.replace(CONFIG, num_layers=3)
    params = transformer.init_params(jax.random.key(0), config)
    quantizer = policy.Quantizer(
        variants.vary_policy(
            recipes.get('nvfp4_final').sampler, variants.Variant(keep_last=0.34)
        )
    )
    paths = transformer.param_paths(config)
    segments = policy.segments([quantizer.policy], paths)
    self.assertEqual(segments, (2, 1))
    tree = policy.quantize_params(
        quantizer, transformer.stack(params, segments)
    )
    args = (config, tree, quantizer, *sampler.pad_prompts(PROMPTS))
    taken = []

    def reads_layers(stack):
      taken.append(stack)
      return jax.tree.leaves(stack)[0].ndim == 3

    want = sampler.generate(*args, jax.random.key(0), SAMPLE)
    jax.clear_caches()
    with mock.patch.object(kernels, 'reads_layers', reads_layers):
      got = sampler.generate(*args, jax.random.key(0), SAMPLE)
    jax.clear_caches()
    self.assertNotEmpty(taken)
    chex.assert_trees_all_equal(got, want)

  def test_logprobs_are_those_of_the_sampling_distribution(self):
    for temperature in (1.0, 0.7):
      sample = dataclasses.replace(SAMPLE, temperature=temperature)
      result = _generate(sample=sample)
      logits = _logits(result.tokens)[:, :-1] / temperature
      logprobs = jnp.take_along_axis(
          jax.nn.log_softmax(logits), result.tokens[:, 1:, None], axis=-1
      )
      want = np.where(result.mask[:, 1:], logprobs[..., 0], 0.0)
      np.testing.assert_allclose(result.logprobs[:, 1:], want, atol=1e-5)

  def test_samples_follow_the_distribution(self):
    prompts = ((4, 6),) * 4
    sample = dataclasses.replace(SAMPLE, max_new_tokens=1)
    counts = np.zeros(CONFIG.vocab_size)
    for seed in range(200):
      tokens = _generate(prompts, sample, seed).tokens[:, 2]
      counts += np.bincount(tokens, minlength=CONFIG.vocab_size)
    want = np.asarray(jax.nn.softmax(_logits(jnp.array(prompts[:1]))[0, -1]))
    sigma = np.sqrt(want * (1 - want) / counts.sum())
    self.assertLess(np.abs((counts / counts.sum() - want) / sigma).max(), 4.0)

  def test_greedy_takes_the_largest_logit(self):
    result = _generate(sample=dataclasses.replace(SAMPLE, temperature=0.0))
    best = np.argmax(_logits(result.tokens), -1)
    mask = result.mask[:, 1:]
    np.testing.assert_array_equal(
        result.tokens[:, 1:][mask], best[:, :-1][mask]
    )
    np.testing.assert_array_equal(result.logprobs, 0.0)

  def test_row_does_not_depend_on_other_rows_or_cache_length(self):
    whole = _generate(sample=dataclasses.replace(SAMPLE, temperature=0.0))
    sample = dataclasses.replace(SAMPLE, temperature=0.0, cache_length=64)
    for i, prompt in enumerate(PROMPTS):
      alone = _generate((prompt,), sample)
      np.testing.assert_array_equal(alone.tokens[0], whole.tokens[i])

  def test_same_key_same_completions(self):
    chex.assert_trees_all_equal(_generate(seed=4), _generate(seed=4))
    self.assertTrue(
        (_generate(seed=4).tokens != _generate(seed=5).tokens).any()
    )

  def test_prompt_lengths_and_temperatures_do_not_recompile(self):
    _generate()
    before = sampler.generate_at._cache_size()
    for length in range(1, 9):
      prompts = ((2,) * length,) * len(PROMPTS)
      for temperature in (0.0, 0.5, 1.0):
        _generate(prompts, dataclasses.replace(SAMPLE, temperature=temperature))
    self.assertEqual(sampler.generate_at._cache_size(), before)

  def test_prompt_that_does_not_fit_the_cache_is_refused(self):
    sample = dataclasses.replace(SAMPLE, cache_length=12)
    with self.assertRaisesRegex(ValueError, 'do not fit a cache of 12'):
      _generate(sample=sample)

  def test_bad_input_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'No prompts'):
      sampler.pad_prompts([])
    with self.assertRaisesRegex(ValueError, 'Prompt 1 is empty'):
      sampler.pad_prompts([[1], []])
    with self.assertRaisesRegex(ValueError, 'max_new_tokens 0'):
      sampler.SampleConfig(max_new_tokens=0)
    with self.assertRaisesRegex(ValueError, 'temperature -1'):
      sampler.SampleConfig(max_new_tokens=1, temperature=-1)
    with self.assertRaisesRegex(ValueError, 'not .B, P., B > 0'):
      sampler.generate(
          CONFIG,
          _tree(),
          QUANTIZER,
          jnp.zeros((0, 8), jnp.int32),
          jnp.zeros((0,), jnp.int32),
          jax.random.key(0),
          SAMPLE,
      )


class MemoryTest(chex.TestCase):

  def test_quantized_weights_have_no_copy_in_high_precision(self):
    recipe = recipes.get('nvfp4_high_precision')
    quantizer = policy.Quantizer(recipe.sampler)
    scratch, held, high_precision = [], [], []
    for layers in (2, 6):
      config = dataclasses.replace(
          CONFIG, num_layers=layers, embed_dim=128, mlp_dim=1024
      )
      masters = jax.tree.map(
          lambda spec: jnp.full(spec.shape, 0.1),
          transformer.param_specs(config),
          is_leaf=lambda leaf: isinstance(leaf, transformer.ParamSpec),
      )
      masters = transformer.stack(masters, (layers,))
      tree = policy.quantize_params(quantizer, masters)
      compiled = sampler.generate_at.lower(
          config,
          tree,
          quantizer,
          *map(jnp.asarray, sampler.pad_prompts(PROMPTS)),
          jax.random.key(0),
          jnp.float32(1.0),
          SAMPLE,
      ).compile()
      scratch.append(compiled.memory_analysis().temp_size_in_bytes)
      quantized = {
          name: leaf
          for name, leaf in tree['layers'][0].items()
          if isinstance(leaf, qtensor.QTensor)
      }
      held.append(qtensor.nbytes(quantized))
      masters = {name: masters['layers'][0][name] for name in quantized}
      high_precision.append(qtensor.nbytes(masters) // 2)
    added = high_precision[1] - high_precision[0]
    self.assertLess(held[1] - held[0], 0.29 * added)  # 4.5 bits of 16
    self.assertLess(scratch[1] - scratch[0], 0.15 * added)
