"""How cost grows: by counts of programs, floating-point operations and bytes.

XLA counts the body of a loop once, so that a loop over layers or tokens adds
nothing; what is in its body must not grow either. Of other rules: programs for
lengths of prompts in sampler_test, experts in matmul_test, the vocabulary in
rl/memory_test, the simulator in experiments/simulator_test.
"""

import dataclasses

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import pytest

from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner

pytestmark = pytest.mark.quick_compile

_QUANTIZER = policy.Quantizer(recipes.get('nvfp4_dequantized').sampler)


def _config(num_layers=2):
  return dataclasses.replace(
      model_config.tiny(16),
      num_layers=num_layers,
      num_experts=0,
      experts_per_token=0,
      moe_dim=0,
      mlp_dim=64,
  )


def _tree(config):
  """Returns the shapes of the sampler's tree."""
  paths = transformer.param_paths(config)
  segments = policy.segments([_QUANTIZER.policy], paths)

  def make(key):
    params = transformer.init_params(key, config)
    stacked = transformer.stack(params, segments)
    return policy.quantize_params(_QUANTIZER, stacked, dtype=config.dtype)

  return jax.eval_shape(make, jax.random.key(0))


def _cost(fn, *args):
  """Returns floating-point operations and bytes of a compiled program."""
  cost = jax.jit(fn).lower(*args).compile().cost_analysis()
  return cost['flops'], cost['bytes accessed']


def _decode_cost(live, length, batch=4):
  config = _config()
  cache = jax.eval_shape(
      lambda: sampler.init_cache(config, _QUANTIZER.policy, batch, length)
  )
  tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)

  def step(tree, tokens, cache):
    return transformer.decode_step(
        config, tree, tokens, _QUANTIZER, cache, live
    )

  return _cost(step, _tree(config), tokens, cache)


def _learner_cost(tokens):
  config = _config()
  tree = _tree(config)
  batch = jax.ShapeDtypeStruct((4, tokens), jnp.int32)
  fn = lambda tree, batch: learner.logprobs(
      config, tree, _QUANTIZER, tree, batch, 1.0
  )
  return _cost(fn, tree, batch)


class GrowthTest(parameterized.TestCase):

  def test_a_step_attends_to_the_live_part_of_the_cache(self):
    few, _ = _decode_cost(live=32, length=32)
    buffer, _ = _decode_cost(live=32, length=2048)
    more, _ = _decode_cost(live=2048, length=2048)
    self.assertLess(buffer, 1.05 * few)
    self.assertGreater(more, 3 * few)  # or this says nothing

  def test_layers_are_one_loop(self):
    size = lambda n: len(
        jax.jit(
            lambda tree, tokens: transformer.forward(
                _config(num_layers=n), tree, tokens, _QUANTIZER
            )
        )
        .lower(
            _tree(_config(num_layers=n)),
            jax.ShapeDtypeStruct((2, 8), jnp.int32),
        )
        .as_text()
    )
    self.assertLess(size(16), 1.02 * size(2))

  def test_learner_is_linear_in_tokens(self):
    one, two = (_learner_cost(n) for n in (16, 32))
    self.assertLess(two[0], 2.2 * one[0])
    self.assertLess(two[1], 2.3 * one[1])

  def test_a_step_costs_less_than_linearly_in_rows(self):
    (_, few), (_, many) = (_decode_cost(32, 32, batch) for batch in (16, 64))
    self.assertLess(many, 4 * few)

  @parameterized.parameters(
      quantization.QuantSpec('nvfp4', 'token'), quantization.QuantSpec('mxfp8')
  )
  def test_quantizing_reads_its_input_a_few_times(self, spec):
    # Separate passes for amax, scales, codes and packing would be twenty.
    x = jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)
    quantize = lambda x: quantization.quantize(x, spec)
    _, accessed = _cost(quantize, x)
    least = 2 * x.size + qtensor.nbytes(jax.eval_shape(quantize, x))
    self.assertLess(accessed, 8 * least)

  def test_new_weights_are_the_same_program(self):
    config = _config()
    paths = transformer.param_paths(config)
    segments = policy.segments([_QUANTIZER.policy], paths)
    args = (*sampler.pad_prompts([[1, 2, 3]]), jax.random.key(0))
    sample = sampler.SampleConfig(max_new_tokens=4, eos_ids=(3,))
    before = None
    for seed in range(3):
      params = transformer.init_params(jax.random.key(seed), config)
      tree = policy.quantize_params(
          _QUANTIZER, transformer.stack(params, segments), dtype=config.dtype
      )
      sampler.generate(config, tree, _QUANTIZER, *args, sample)
      size = sampler.generate_at._cache_size()
      self.assertIn(before, (None, size))
      before = size
