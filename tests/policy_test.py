"""Rules, segments, and quantizing a parameter tree once."""

import dataclasses

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import exact
from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer

# ArrowsTest of bit_exact_test.py has the bytes of optimized programs.
pytestmark = pytest.mark.quick_compile

NVFP4 = matmul.MatmulPrecision(
    quantization.QuantSpec('nvfp4', 'token'), quantization.QuantSpec('nvfp4')
)
EXPERTS = r'layers\.\d+\.mlp\.experts\.(gate|up|down)_proj'
MLP = r'layers\.\d+\.mlp\.(gate|up|down)_proj'
MOE = model_config.tiny(16)
DENSE = dataclasses.replace(
    MOE, num_experts=0, experts_per_token=0, moe_dim=0, mlp_dim=64
)


def _paths(num_layers, names=('mlp.experts.gate_proj', 'self_attn.q_proj')):
  return ['embed_tokens'] + [
      f'layers.{i}.{name}' for i in range(num_layers) for name in names
  ]


def _quantized_layers(precision_policy, num_layers):
  resolved = policy.resolve(precision_policy, _paths(num_layers))
  return [
      i
      for i in range(num_layers)
      if resolved[f'layers.{i}.mlp.experts.gate_proj'] is not None
  ]


class RulesTest(parameterized.TestCase):

  @parameterized.parameters((48, 7), (30, 5), (4, 1), (1, 0), (3, 0))
  def test_keep_last_rounds_half_up(self, layers, kept):
    p = policy.PrecisionPolicy((policy.Rule(EXPERTS, NVFP4),), keep_last=0.15)
    self.assertEqual(_quantized_layers(p, layers), list(range(layers - kept)))

  def test_keep_first_keeps_the_first_layers(self):
    p = policy.PrecisionPolicy(
        (policy.Rule(EXPERTS, NVFP4),), keep_last=0.25, keep_first=0.5
    )
    self.assertEqual(_quantized_layers(p, 8), [4, 5])

  def test_first_match_wins_and_no_match_is_bfloat16(self):
    p = policy.PrecisionPolicy(
        (policy.Rule(r'layers\.1\..*', None), policy.Rule(EXPERTS, NVFP4)),
        keep_last=0.0,
    )
    self.assertEqual(_quantized_layers(p, 3), [0, 2])
    resolved = policy.resolve(p, _paths(3))
    self.assertIsNone(resolved['layers.0.self_attn.q_proj'])
    self.assertIsNone(resolved['embed_tokens'])

  def test_pattern_matches_the_whole_path(self):
    p = policy.PrecisionPolicy((policy.Rule('layers', NVFP4),), keep_last=0.0)
    self.assertEqual(_quantized_layers(p, 2), [])

  def test_required_rule_that_matches_nothing_is_an_error(self):
    rule = policy.Rule(r'layers\.\d+\.mlp\.shared\..*', NVFP4, required=True)
    p = policy.PrecisionPolicy((rule,))
    with self.assertRaisesRegex(ValueError, r'shared.*matches none of the 5'):
      policy.resolve(p, _paths(2))

  def test_bad_rules_and_policies_are_refused(self):
    with self.assertRaisesRegex(ValueError, r'\(unclosed'):
      policy.Rule('(unclosed', None)
    with self.assertRaisesRegex(ValueError, "'nvfp4' is neither"):
      policy.Rule('.*', 'nvfp4')
    with self.assertRaisesRegex(ValueError, 'keep_last 7'):
      policy.PrecisionPolicy(keep_last=7)

  def test_fallback_rule_counts_only_where_nothing_else_matches(self):
    rules = (
        policy.Rule(EXPERTS, NVFP4),
        policy.Rule(MLP, NVFP4, fallback=True),
    )
    p = policy.PrecisionPolicy(rules, keep_last=0.0)
    dense_layer = 'layers.0.mlp.gate_proj'
    self.assertIsNotNone(policy.resolve(p, [dense_layer])[dense_layer])
    # The first, dense layer of a mixture of experts stays bfloat16.
    mixed = [dense_layer, 'layers.1.mlp.experts.gate_proj']
    resolved = policy.resolve(p, mixed)
    self.assertIsNone(resolved[dense_layer])
    self.assertIsNotNone(resolved[mixed[1]])

  def test_segments_are_maximal_runs_alike_in_every_policy(self):
    p = policy.PrecisionPolicy((policy.Rule(EXPERTS, NVFP4),), keep_last=0.15)
    self.assertEqual(policy.segments([p], _paths(48)), (41, 7))
    first = dataclasses.replace(p, keep_last=0.0, keep_first=0.25)
    self.assertEqual(policy.segments([p, first], _paths(48)), (12, 29, 7))
    self.assertEqual(policy.segments([policy.BF16], _paths(48)), (48,))


class QuantizeParamsTest(parameterized.TestCase):

  def _stacked(self, config, recipe='nvfp4_final', segments=None):
    p = recipes.get(recipe).learner
    segments = segments or policy.segments([p], transformer.param_paths(config))
    params = transformer.init_params(jax.random.key(0), config)
    return policy.Quantizer(p), transformer.stack(params, segments)

  @parameterized.parameters((MOE, 'mlp.experts'), (DENSE, 'mlp'))
  def test_final_quantizes_experts_or_mlp_of_all_but_the_last_layer(
      self, config, prefix
  ):
    quantizer, params = self._stacked(config)
    tree = policy.quantize_params(quantizer, params)
    names = {f'{prefix}.{n}_proj' for n in ('gate', 'up', 'down')}
    for i, segment in enumerate(tree['layers']):
      found = {k for k, v in segment.items() if isinstance(v, qtensor.QTensor)}
      self.assertEqual(found, names if i == 0 else set())
    rest = [tree['embed_tokens'], tree['lm_head'], *tree['layers'][1].values()]
    self.assertEqual({leaf.dtype for leaf in rest}, {jnp.dtype('bfloat16')})

  def test_what_is_quantized_is_the_bfloat16_value_of_the_master(self):
    quantizer, params = self._stacked(MOE)
    rounded = jax.tree.map(exact.round_to_bfloat16, params)
    chex.assert_trees_all_equal(
        policy.quantize_params(quantizer, params),
        policy.quantize_params(quantizer, rounded),
    )

  @parameterized.parameters('bfloat16', 'float32')
  def test_what_is_not_quantized_has_the_models_dtype(self, dtype):
    # By name too, as configurations give it.
    quantizer, params = self._stacked(DENSE)
    for kind in (dtype, jnp.dtype(dtype)):
      tree = policy.quantize_params(quantizer, params, dtype=kind)
      last = [*tree['layers'][-1].values(), tree['embed_tokens']]
      self.assertEqual({leaf.dtype for leaf in last}, {jnp.dtype(dtype)})

  def test_gate_and_up_share_the_global_scale_expert_by_expert(self):
    quantizer, params = self._stacked(MOE)
    segment = params['layers'][0]
    up, gate = (segment[f'mlp.experts.{n}_proj'] for n in ('up', 'gate'))
    segment['mlp.experts.up_proj'] = up.at[:, 3].mul(4.0)
    tree = policy.quantize_params(quantizer, params)['layers'][0]
    gate_q, up_q, down_q = (
        tree[f'mlp.experts.{n}_proj'].global_scale
        for n in ('gate', 'up', 'down')
    )
    self.assertEqual(gate_q.shape, (3, MOE.num_experts, 1, 1))
    chex.assert_trees_all_equal(gate_q, up_q)
    self.assertGreater(len(np.unique(gate_q)), 1)
    self.assertFalse(bool(jnp.any(down_q == gate_q)))
    joint = jnp.concatenate([gate, segment['mlp.experts.up_proj']], axis=2)
    want = quantization.quantize(
        exact.to_bfloat16(joint),
        quantizer.policy.rules[0].precision.rhs,
    )
    chex.assert_trees_all_equal(gate_q, want.global_scale)
    chex.assert_trees_all_equal(
        jnp.concatenate(
            [tree[f'mlp.experts.{n}_proj'].data for n in ('gate', 'up')], axis=2
        ),
        want.data,
    )

  def test_report_a3_shared_scale_has_the_known_value(self):
    # vllm#54974: gate amax 2, up amax 8, both get 8 / 2688.
    p = policy.PrecisionPolicy((policy.Rule(MLP, NVFP4),), keep_last=0.0)
    gate = jnp.full((1, 48, 64), 2.0)
    segment = {'mlp.gate_proj': gate, 'mlp.up_proj': 4 * gate}
    tree = policy.quantize_params(policy.Quantizer(p), {'layers': (segment,)})
    for leaf in tree['layers'][0].values():
      self.assertEqual(float(leaf.global_scale[0, 0, 0]), np.float32(8 / 2688))

  def test_bytes_do_not_depend_on_the_segments(self):
    recipe = 'nvfp4_dequantized'
    quantizer, params = self._stacked(DENSE, recipe)
    tree = policy.quantize_params(quantizer, params)
    _, split = self._stacked(DENSE, recipe, segments=(1, 2, 1))
    again = policy.quantize_params(quantizer, split)
    chex.assert_trees_all_equal(
        transformer.unstack(tree), transformer.unstack(again)
    )

  def test_stacking_layers_that_differ_is_an_error(self):
    quantizer, params = self._stacked(MOE, segments=(4,))
    with self.assertRaisesRegex(ValueError, 'Layers 0 to 3 are stacked'):
      policy.quantize_params(quantizer, params)

  @parameterized.parameters(jnp.nan, jnp.inf, -jnp.inf)
  def test_non_finite_weight_is_named(self, value):
    quantizer, params = self._stacked(MOE)
    weight = params['layers'][0]['mlp.experts.down_proj']
    params['layers'][0]['mlp.experts.down_proj'] = weight.at[1, 2, 3, 4].set(
        value
    )
    with self.assertRaisesRegex(
        policy.NonFiniteError, r'layers\.0-2\.mlp\.experts\.down_proj'
    ):
      policy.quantize_params(quantizer, params)

  def test_weight_that_does_not_fit_the_block_is_named(self):
    config = dataclasses.replace(MOE, moe_dim=24)
    quantizer, params = self._stacked(config)
    with self.assertRaisesRegex(
        ValueError, r'down_proj: .*24, which is not a multiple of 16'
    ):
      policy.quantize_params(quantizer, params)

  def test_quantizer_is_a_pytree_whose_policy_is_static(self):
    quantizer = policy.Quantizer(recipes.get('nvfp4_final').learner)
    self.assertEqual(jax.tree.leaves(quantizer), [])
    traced = []

    @jax.jit
    def fn(quantizer):
      traced.append(quantizer.policy)
      return jnp.zeros(())

    for name in ('nvfp4_final', 'nvfp4_final', 'nvfp4_dequantized'):
      fn(policy.Quantizer(recipes.get(name).learner))
    self.assertLen(traced, 2)
