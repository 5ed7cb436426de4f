"""Recipes: pairs, variants, objectives, and one decision per tensor."""

import dataclasses
import functools
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import pytest

from nvfp4_jax import config as config_json
from nvfp4_jax import export
from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax import residual
from nvfp4_jax import variants
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import hf
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import corrections
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import losses

# Decisions, not bits.
pytestmark = pytest.mark.quick_compile

MOE = dataclasses.replace(model_config.tiny(16), shared_expert_dim=32)
DENSE = dataclasses.replace(
    model_config.tiny(16),
    num_experts=0,
    experts_per_token=0,
    moe_dim=0,
    mlp_dim=64,
)
# The linears of one layer of a model with multi-head latent attention.
LATENT = tuple(
    f'layers.{i}.{name}'
    for i in range(4)
    for name in (
        'self_attn.q_a_proj',
        'self_attn.kv_a_proj_with_mqa',
        'self_attn.kv_b_proj',
        'self_attn.o_proj',
        'mlp.gate',
        'mlp.experts.down_proj',
        'mlp.shared_experts.down_proj',
    )
)


@functools.cache
def _paths(model):
  return tuple(transformer.param_paths(model))


def _quantized(precision_policy, paths):
  """The names of layer 1 that are quantized."""
  return {
      path.removeprefix('layers.1.')
      for path, precision in policy.resolve(precision_policy, paths).items()
      if precision is not None and path.startswith('layers.1.')
  }


class RecipesTest(parameterized.TestCase):

  @parameterized.parameters(*recipes.RECIPES)
  def test_recipe_survives_json_has_a_source_and_fits_every_model(self, name):
    recipe = recipes.get(name)
    self.assertEqual(recipe.name, name)
    self.assertTrue(recipe.source)
    hash(recipe)
    data = config_json.to_json(recipe)
    self.assertEqual(config_json.from_json(recipes.Recipe, data), recipe)
    for paths in (_paths(MOE), _paths(DENSE), LATENT):
      recipes.check(recipe, paths)
      self.assertEqual(
          bool(recipes.differences(recipe, paths)), not recipe.consistent
      )

  def test_sides_differ_where_that_is_the_point(self):
    unequal = [r.name for r in recipes.RECIPES.values() if not r.consistent]
    self.assertEqual(unequal, ['nvfp4_naive', 'quads', 'resq'])
    naive = recipes.get('nvfp4_naive')
    self.assertEqual(naive.learner, policy.BF16)
    self.assertEqual(naive.sampler.rules[0].precision.lhs.outer, 'tensor')

  def test_unknown_recipe_lists_the_known_ones(self):
    with self.assertRaisesRegex(ValueError, "'nvfp4_finale'.*nvfp4_final"):
      recipes.get('nvfp4_finale')

  def test_weights_are_quantized_alike_where_both_sides_quantize(self):
    for recipe in recipes.RECIPES.values():
      one, other = (
          policy.resolve(side, _paths(MOE))
          for side in (recipe.learner, recipe.sampler)
      )
      for path, precision in one.items():
        if precision is not None:
          self.assertEqual(precision.rhs, other[path].rhs)

  def test_what_is_absorbed_is_kept_but_in_square_blocks(self):
    kv_b = 'self_attn.kv_b_proj'
    for name, quantized in (('mxfp8', False), ('fp8_block', True)):
      names = _quantized(recipes.get(name).learner, LATENT)
      self.assertEqual(kv_b in names, quantized)
      self.assertIn('self_attn.q_a_proj', names)
      self.assertNotIn('mlp.gate', names)

  def test_shares_are_parameters(self):
    sampler = recipes.quads(0.25).sampler
    extra = sampler.rules[0].precision.residual
    self.assertEqual(extra, residual.Residual('channels', 0.25))
    extra = recipes.resq(0.25).sampler.rules[0].precision.residual
    self.assertEqual(extra, residual.Residual('elements', 0.25))


class PairTest(parameterized.TestCase):

  @parameterized.parameters(
      ('nvfp4_final', 'bf16', 'an error that nobody samples'),
      ('nvfp4_final', 'mxfp8', 'quantized in two ways'),
      ('nvfp4_final', 'nvfp4_dequantized', 'quantized in two ways'),
      ('nvfp4_dequantized', 'nvfp4_w4a16', 'the sampler does not'),
      ('nvfp4_w4a8', 'nvfp4_dequantized', 'mxfp8 for the learner and nvfp4'),
  )
  def test_pair_that_makes_no_sense_is_refused(self, one, other, reason):
    pair = recipes.pair(one, other)
    with self.assertRaisesRegex(
        recipes.UnsupportedPairError, rf'{one}/{other}: layers\.0\..*{reason}'
    ):
      recipes.check(pair, _paths(MOE))

  @parameterized.parameters(
      ('bf16', 'nvfp4_final'),
      ('nvfp4_w4a16', 'nvfp4_w4a8'),
      ('nvfp4_dequantized', 'quads'),
  )
  def test_pair_of_which_the_sampler_quantizes_more_is_said_unequal(
      self, one, other
  ):
    pair = recipes.pair(one, other)
    recipes.check(pair, _paths(MOE))
    unequal = recipes.differences(pair, _paths(MOE))
    self.assertIn('layers.0.mlp.experts.gate_proj', unequal)
    self.assertNotIn('layers.0.mlp.gate', unequal)

  def test_residual_and_fp8_cache_are_not_for_learners_alone(self):
    quads = recipes.get('quads')
    swapped = dataclasses.replace(quads, learner=quads.sampler)
    with self.assertRaisesRegex(ValueError, 'a residual is for samplers'):
      recipes.check(swapped, _paths(MOE))
    bf16 = recipes.get('bf16')
    fp8 = dataclasses.replace(policy.BF16, kv_cache='fp8')
    with self.assertRaisesRegex(ValueError, 'keys and values in fp8'):
      recipes.check(dataclasses.replace(bf16, learner=fp8), _paths(MOE))
    sampler_only = dataclasses.replace(bf16, sampler=fp8)
    recipes.check(sampler_only, _paths(MOE))
    self.assertEqual(
        recipes.differences(sampler_only, _paths(MOE)),
        {'kv_cache': 'bf16 / fp8'},
    )


class VariantTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(scope='experts'), {'experts'}),
      (dict(scope='experts', shared_experts=True), {'experts', 'shared'}),
      (dict(scope='mlp'), {'experts', 'shared'}),
      (dict(scope='mlp', shared_experts=False), {'experts'}),
      (dict(scope='all'), {'experts', 'shared', 'attention'}),
  )
  def test_scope_says_what_is_quantized(self, changes, kinds):
    varied = recipes.vary(
        recipes.get('nvfp4_final'), variants.Variant(**changes)
    )
    names = _quantized(varied.learner, _paths(MOE))
    found = {
        kind
        for kind, part in (
            ('experts', '.experts.'),
            ('shared', '.shared_experts.'),
            ('attention', 'self_attn.'),
        )
        if any(part in name for name in names)
    }
    self.assertEqual(found, kinds)
    self.assertNotIn('mlp.gate', names)
    # Without experts, all of these quantize the MLP.
    dense = _quantized(varied.learner, _paths(DENSE))
    self.assertIn('mlp.up_proj', dense)
    self.assertEqual('self_attn.q_proj' in dense, 'attention' in kinds)

  def test_parts_are_exchanged_on_both_sides(self):
    variant = variants.Variant(
        keep_last=0.5,
        keep_first=0.25,
        kv_cache='fp8',
        four_over_six='weights',
        activation_scale='tensor',
    )
    varied = recipes.vary(recipes.get('nvfp4_dequantized'), variant)
    self.assertTrue(varied.consistent)
    self.assertEqual(
        (varied.learner.keep_last, varied.learner.keep_first), (0.5, 0.25)
    )
    self.assertEqual(varied.learner.kv_cache, 'fp8')
    precision = varied.learner.rules[0].precision
    self.assertEqual(
        precision.rhs, quantization.QuantSpec('nvfp4', four_over_six='mse')
    )
    self.assertEqual(precision.lhs, quantization.QuantSpec('nvfp4', 'tensor'))
    self.assertIn('keep_last 0.5', varied.name)
    self.assertIn('four_over_six weights', varied.inferred)

  def test_backward_is_the_learners(self):
    variant = variants.Variant(backward='dequantized')
    varied = recipes.vary(recipes.get('quads'), variant)
    self.assertEqual(varied.sampler, recipes.get('quads').sampler)
    varied = recipes.vary(recipes.get('mxfp8'), variant)
    self.assertEqual(varied.learner, recipes.get('mxfp8_dequantized').learner)

  def test_a_variant_of_nothing_is_the_recipe(self):
    for recipe in recipes.RECIPES.values():
      self.assertEqual(recipes.vary(recipe, variants.Variant()), recipe)

  @parameterized.parameters(
      (dict(scope='attention'), "scope 'attention' is not one of"),
      (dict(four_over_six='mse'), "four_over_six 'mse' is not one of"),
      (dict(backward='quantized'), "backward 'quantized' is not one of"),
      (dict(shared_experts=True), 'needs a scope'),
  )
  def test_bad_variants_raise(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      variants.Variant(**changes)

  @parameterized.parameters(
      ('mxfp8', dict(activation_scale='tensor')),
      ('fp8_block', dict(four_over_six='all')),
      ('nvfp4_final', dict(residual_share=0.5)),
      ('nvfp4_w4a16', dict(activation_scale='token')),
  )
  def test_a_part_that_the_recipe_lacks_raises(self, name, changes):
    with self.assertRaisesRegex(ValueError, f'{name}.*{next(iter(changes))}'):
      recipes.vary(recipes.get(name), variants.Variant(**changes))

  def test_the_baseline_stays_as_it_is(self):
    bf16 = recipes.get('bf16')
    varied = recipes.vary(bf16, variants.Variant(scope='all', keep_last=0.0))
    self.assertEqual((varied.learner, varied.sampler), (policy.BF16,) * 2)

  def test_bad_values_raise_when_they_are_used(self):
    for changes in (dict(kv_cache='int8'), dict(keep_last=7.0)):
      with self.assertRaisesRegex(ValueError, next(iter(changes))):
        recipes.vary(recipes.get('bf16'), variants.Variant(**changes))


class ObjectiveTest(absltest.TestCase):

  def test_recipe_sets_what_the_run_leaves_at_its_default(self):
    triage = recipes.get('triage')
    run = learner.GRPOConfig(
        correction=corrections.CorrectionConfig(normalize=True)
    )
    merged = recipes.objective(triage, run)
    self.assertEqual(merged.segment_triage, triage.grpo.segment_triage)
    self.assertTrue(merged.correction.normalize)
    loss = losses.LossConfig(kind='gspo')
    run = learner.GRPOConfig(loss=loss)
    self.assertEqual(recipes.objective(recipes.get('qarl'), run).loss, loss)
    self.assertEqual(recipes.objective(recipes.get('bf16'), run), run)


_NAMES = ('q_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj', '.*_proj')
_PREFIXES = (r'layers\.\d+\..*', r'layers\.0\..*', r'.*\.experts\.', r'.*')
_PRECISION = matmul.MatmulPrecision(
    quantization.QuantSpec('nvfp4', 'token'), quantization.QuantSpec('nvfp4')
)
# Fused linears that are not quantized alike are refused by servers, not by us.
_RULES = strategies.lists(
    strategies.builds(
        lambda prefix, name, quantized: policy.Rule(
            prefix + name, _PRECISION if quantized else None
        ),
        strategies.sampled_from(_PREFIXES),
        strategies.sampled_from(_NAMES),
        strategies.booleans(),
    ),
    max_size=4,
)


class OneDecisionTest(absltest.TestCase):
  """A tensor is quantized everywhere or nowhere, whatever the rules."""

  @hypothesis.settings(max_examples=8, deadline=None, database=None)
  @hypothesis.given(
      _RULES,
      strategies.sampled_from((0, 0.5)),
      strategies.sampled_from((0, 0.5)),
  )
  def test_learner_sampler_conversion_export_and_reload_agree(
      self, rules, keep_last, keep_first
  ):
    model = dataclasses.replace(
        MOE, num_layers=2, num_experts=2, shared_expert_dim=0
    )
    precision_policy = policy.PrecisionPolicy(
        tuple(rules), keep_last, keep_first
    )
    quantizer = policy.Quantizer(precision_policy)
    paths = transformer.param_paths(model)
    wanted = {
        path
        for path, precision in policy.resolve(precision_policy, paths).items()
        if precision is not None
    }
    masters = transformer.stack(
        jax.tree.map(
            lambda spec: jnp.full(spec.shape, 0.5, jnp.bfloat16),
            transformer.param_specs(model),
            is_leaf=lambda leaf: isinstance(leaf, transformer.ParamSpec),
        ),
        policy.segments([precision_policy], paths),
    )
    tree = policy.quantize_params(quantizer, masters)
    self.assertEqual(_quantized_paths(transformer.unstack(tree)), wanted)
    learned = jax.eval_shape(policy.quantize_params, quantizer, masters)
    self.assertEqual(jax.tree.structure(learned), jax.tree.structure(tree))
    target = export.Target(precision_policy)
    with tempfile.TemporaryDirectory() as scratch:
      scratch = pathlib.Path(scratch)
      bf16 = policy.quantize_params(policy.Quantizer(policy.BF16), masters)
      export.export(model, bf16, scratch / 'bf16', export.Target(policy.BF16))
      export.convert(scratch / 'bf16', scratch / 'converted', target)
      export.export(model, tree, scratch / 'live', target)
      for name in ('converted', 'live'):
        _, reloaded = hf.load(scratch / name)
        self.assertEqual(_quantized_paths(reloaded), wanted)


def _quantized_paths(params):
  """The paths of QTensors in a per-layer tree."""
  return {
      f'layers.{i}.{name}'
      for i, layer in enumerate(params['layers'])
      for name, leaf in layer.items()
      if isinstance(leaf, qtensor.QTensor)
  }


if __name__ == '__main__':
  absltest.main()
