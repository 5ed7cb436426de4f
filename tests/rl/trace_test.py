"""Traces of learner and sampler, and the taps that they are made of."""

import collections
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import policy
from nvfp4_jax import sampler
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import trace

# Bits of optimized programs are left to bit_exact_test.py.
pytestmark = pytest.mark.quick_compile

# Every stage there is: a dense layer, experts, shared experts, biases, norms.
CONFIG = dataclasses.replace(
    model_config.tiny(16),
    num_layers=3,
    first_dense_layers=1,
    mlp_dim=64,
    shared_expert_dim=32,
    attention_bias='qkv',
)
QUANTIZER = policy.Quantizer(policy.BF16)
SMALL = dataclasses.replace(
    CONFIG, num_layers=1, num_experts=0, experts_per_token=0, moe_dim=0
)
PROMPTS = ((7,), tuple(range(1, 12)), (9, 9, 9))
SELF_ATTENTION = [
    'input_layernorm',
    'self_attn.q_proj',
    'self_attn.k_proj',
    'self_attn.v_proj',
    'self_attn.q_norm',
    'self_attn.k_norm',
    'self_attn.q_rope',
    'self_attn.k_rope',
    'self_attn.attention',
    'self_attn.o_proj',
    'attention_residual',
    'post_attention_layernorm',
]
PROJECTIONS = ['gate_proj', 'up_proj', 'swiglu', 'down_proj']
DENSE = [
    *SELF_ATTENTION,
    *(f'mlp.{name}' for name in PROJECTIONS),
    'mlp_residual',
]
EXPERTS = [
    *SELF_ATTENTION,
    'mlp.gate',
    'mlp.gate.experts',
    'mlp.gate.weights',
    *(f'mlp.shared_experts.{name}' for name in PROJECTIONS),
    'mlp',
    'mlp_residual',
]


@functools.cache
def _masters(config=CONFIG):
  params = transformer.init_params(jax.random.key(0), config)
  paths = transformer.param_paths(config)
  segments = policy.segments([QUANTIZER.policy], paths)
  return transformer.stack(jax.tree.map(lambda p: 1.5 * p, params), segments)


@functools.cache
def _tree():
  return policy.quantize_params(QUANTIZER, _masters())


@functools.cache
def _sampled():
  return trace.sample(
      CONFIG,
      _tree(),
      QUANTIZER,
      PROMPTS,
      jax.random.key(1),
      sampler.SampleConfig(14, (3,)),
  )


@functools.cache
def _traces():
  # Past position 16, a second decode loop attends to 32 positions.
  sampled = _sampled()
  learned = trace.trace_learner(CONFIG, _masters(), QUANTIZER, _tree(), sampled)
  return learned, trace.trace_sampler(CONFIG, _tree(), QUANTIZER, sampled)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _forward(config, params, tokens, tapped):
  taps = {} if tapped else None
  hidden = transformer.forward(config, params, tokens, QUANTIZER, taps=taps)
  return hidden, taps


class TapsTest(chex.TestCase):

  def test_taps_are_named_and_shaped_in_the_order_of_computation(self):
    tokens = jnp.zeros((2, 5), jnp.int32)
    _, taps = jax.eval_shape(
        lambda params: _forward(CONFIG, params, tokens, True), _masters()
    )
    self.assertEqual(set(taps), {'embed_tokens', 'layers', 'norm'})
    for name in ('embed_tokens', 'norm'):
      self.assertEqual(taps[name].shape, (2, 5, CONFIG.embed_dim))
    first, rest = taps['layers']
    self.assertIsInstance(first, collections.OrderedDict)
    self.assertEqual(list(first), DENSE)
    self.assertEqual(list(rest), EXPERTS)
    for segment, layers in ((first, 1), (rest, 2)):
      for x in segment.values():
        self.assertEqual(x.shape[:3], (layers, 2, 5))
    sizes = {
        'self_attn.q_rope': 64,
        'self_attn.k_rope': 32,
        'mlp.gate': 8,
        'mlp.gate.experts': 2,
        'mlp.shared_experts.swiglu': 32,
        'mlp': 64,
    }
    for name, size in sizes.items():
      self.assertEqual(rest[name].shape[3], size, name)

  def test_hidden_states_are_those_without_taps(self):
    tokens = jnp.arange(16).reshape(2, 8)
    plain, none = _forward(SMALL, _masters(SMALL), tokens, False)
    tapped, taps = _forward(SMALL, _masters(SMALL), tokens, True)
    self.assertIsNone(none)
    chex.assert_trees_all_equal(plain, tapped)
    chex.assert_trees_all_equal(plain, taps['norm'])

  def test_a_layer_adds_up(self):
    # Residuals are sums of what was noted before them.
    stages = _traces()[0].stages
    float32 = lambda name: stages[name].astype(np.float32)
    for residual, x, y in (
        ('layers.0.attention_residual', 'embed_tokens', 'self_attn.o_proj'),
        (
            'layers.0.mlp_residual',
            'layers.0.attention_residual',
            'mlp.down_proj',
        ),
    ):
      want = float32(x) + float32(f'layers.0.{y}')
      np.testing.assert_array_equal(
          stages[residual], want.astype(stages[residual].dtype)
      )


class TraceTest(chex.TestCase):

  def test_learner_and_sampler_agree_in_every_stage(self):
    sampled = _sampled()
    found = list(trace.differences(*_traces(), sampled))
    names = [f'layers.0.{name}' for name in DENSE]
    names += [f'layers.{i}.{name}' for i in (1, 2) for name in EXPERTS]
    self.assertEqual(
        [difference.stage for difference in found],
        ['embed_tokens', *names, 'norm', 'logits', 'logprobs'],
    )
    run = sum(map(len, PROMPTS)) + int(sampled.counts.sum()) - len(PROMPTS)
    for difference in found:
      self.assertEqual(difference.differ, 0, difference.stage)
      self.assertIsNone(difference.first)
    self.assertEqual(found[0].positions, run)
    self.assertEqual(found[-1].positions, sampled.counts.sum())
    self.assertGreater(int((sampled.lengths + sampled.counts).max()), 17)
    self.assertGreater(np.ptp(sampled.counts), 0)

  def test_logprobs_are_those_that_were_sampled(self):
    # experiments.consistency has replays without a trace.
    sampled = _sampled()
    for side in _traces():
      np.testing.assert_array_equal(
          side.logprobs[sampled.mask], sampled.logprobs[sampled.mask]
      )

  def test_completions_of_one_token_need_no_decode_step(self):
    prompts, lengths = sampler.pad_prompts(PROMPTS)
    sampled = trace.Sampled(
        prompts=prompts,
        lengths=lengths,
        tokens=np.pad(prompts, ((0, 0), (0, 5))),
        counts=np.ones(3, np.int32),
        logprobs=np.zeros((3, 1), np.float32),
        temperature=1.0,
    )
    tree = policy.quantize_params(QUANTIZER, _masters(SMALL))
    traced = trace.trace_sampler(SMALL, tree, QUANTIZER, sampled)
    self.assertEqual(traced.logits.shape, (3, 1, SMALL.vocab_size))
    self.assertTrue(np.all(traced.logprobs < 0))
    self.assertEqual(traced.stages['norm'].shape, (3, 21, SMALL.embed_dim))

  def test_a_flipped_bit_is_named(self):
    sampled = _sampled()
    learned, replayed = _traces()
    name = 'layers.1.self_attn.o_proj'
    for position, in_prompts in ((10, 1), (11, 0)):
      x = np.array(replayed.stages[name])
      x.view(np.uint16)[1, position, 7] ^= 1
      other = replayed._replace(stages={**replayed.stages, name: x})
      found = list(trace.differences(learned, other, sampled))
      (difference,) = (d for d in found if d.differ)
      self.assertEqual(difference.stage, name)
      self.assertEqual(difference.first, (position, 1))
      self.assertEqual(difference.differ, 1)
      self.assertEqual(difference.differ_in_prompts, in_prompts)
      self.assertGreater(difference.max_abs, 0)

  def test_padding_is_not_compared(self):
    sampled = _sampled()
    learned, replayed = _traces()
    x = np.array(replayed.stages['norm'])
    end = sampled.lengths + sampled.counts - 1
    for row in range(len(PROMPTS)):
      x[row, end[row] :] += 1
    other = replayed._replace(stages={**replayed.stages, 'norm': x})
    found = trace.differences(learned, other, sampled)
    self.assertFalse(any(difference.differ for difference in found))

  def test_the_first_difference_is_at_the_first_token(self):
    sampled = _sampled()
    learned, replayed = _traces()
    logits = np.array(replayed.logits)
    logits[:, :] += 1
    other = replayed._replace(logits=logits)
    (difference,) = (
        d for d in trace.differences(learned, other, sampled) if d.differ
    )
    # Row 0 has a prompt of one token: its first logits are at position 0.
    self.assertEqual((difference.stage, difference.first), ('logits', (0, 0)))
    self.assertEqual(difference.differ, sampled.counts.sum())
    self.assertEqual(difference.differ_in_prompts, len(PROMPTS))
