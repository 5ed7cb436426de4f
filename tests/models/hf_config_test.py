"""Tests of config.json: both generations of keys, and what is refused."""

import copy
import dataclasses
import json
import math
import pathlib
from typing import Any

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from nvfp4_jax import files
from nvfp4_jax import routing
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import hf_config

_GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
_FOLDERS = tuple(sorted(path.name for path in (_GOLDEN / 'hf').iterdir()))
_FAMILIES = ('llama', 'qwen3', 'qwen3_moe', 'glm4_moe')


def _folder(name):
  return json.loads((_GOLDEN / 'hf' / name / 'config.json').read_text())


def _published(name):
  return json.loads((_GOLDEN / 'configs' / f'{name}.json').read_text())


def _first_generation(raw, type_key='rope_type'):
  """Returns a config.json as transformers 4 wrote it."""
  raw = copy.deepcopy(raw)
  raw['torch_dtype'] = raw.pop('dtype')
  rope = raw.pop('rope_parameters')
  raw['rope_theta'] = rope.pop('rope_theta')
  if 'partial_rotary_factor' in rope:
    raw['partial_rotary_factor'] = rope.pop('partial_rotary_factor')
  kind = rope.pop('rope_type')
  raw['rope_scaling'] = None if kind == 'default' else {type_key: kind, **rope}
  if 'num_local_experts' in raw:
    raw['num_experts'] = raw.pop('num_local_experts')
  return raw


class GenerationsTest(parameterized.TestCase):

  @parameterized.product(name=_FOLDERS, type_key=('rope_type', 'type'))
  def test_both_generations_are_read_alike(self, name, type_key):
    new = _folder(name)
    old = _first_generation(new, type_key)
    for key in ('dtype', 'rope_parameters', 'num_local_experts'):
      self.assertNotIn(key, old)
    self.assertEqual(hf_config.from_hf(old), hf_config.from_hf(new))

  def test_fields_are_those_of_the_file(self):
    self.assertEqual(
        hf_config.from_hf(_folder('llama')),
        model_config.ModelConfig(
            vocab_size=128,
            num_layers=2,
            embed_dim=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            mlp_dim=96,
            qk_norm=False,
            rope_theta=500.0,
            rope_scaling=model_config.RopeScaling(4.0, 1.0, 4.0, 32),
            norm_eps=1e-5,
            tie_embeddings=True,
        ),
    )
    self.assertEqual(
        hf_config.from_hf(_folder('glm4_moe_groups')),
        model_config.ModelConfig(
            vocab_size=128,
            num_layers=3,
            embed_dim=32,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            mlp_dim=64,
            num_experts=8,
            experts_per_token=2,
            moe_dim=32,
            shared_expert_dim=64,
            first_dense_layers=1,
            router=routing.Router(
                'sigmoid',
                scale=_folder('glm4_moe_groups')['routed_scaling_factor'],
                groups=4,
                topk_groups=2,
            ),
            qk_norm=False,
            attention_bias='qkv',
            rotary_fraction=0.5,
            norm_eps=1e-5,
        ),
    )

  @parameterized.parameters(
      ('qwen3_moe', 'num_local_experts', 'num_experts'),
      ('glm4_moe', 'n_routed_experts', 'num_experts'),
  )
  def test_a_missing_number_of_experts_is_no_dense_model(
      self, name, key, other
  ):
    raw = _folder(name)
    del raw[key]
    for change in ({}, {key: None}, {other: None}, {key: 0}, {other: 0}):
      with self.assertRaises(files.CheckpointError) as context:
        hf_config.from_hf(raw | change)
      message = str(context.exception)
      if 0 in change.values():
        self.assertIn(f'{next(iter(change))} is 0', message)
      else:
        self.assertIn(key, message)
        self.assertIn(other, message)

  @parameterized.parameters(
      ('llama', 'rope_theta'),
      ('qwen3', 'head_dim'),
      ('qwen3', 'rms_norm_eps'),
      ('qwen3', 'intermediate_size'),
      ('qwen3_moe', 'norm_topk_prob'),
      ('qwen3_moe', 'num_experts_per_tok'),
      ('qwen3_moe', 'moe_intermediate_size'),
      ('qwen3_moe', 'vocab_size'),
      ('glm4_moe', 'partial_rotary_factor'),
      ('glm4_moe', 'use_qk_norm'),
      ('glm4_moe', 'attention_bias'),
      ('glm4_moe', 'n_shared_experts'),
      ('glm4_moe', 'first_k_dense_replace'),
      ('glm4_moe', 'model_type'),
      ('glm4_moe', 'num_hidden_layers'),
      ('glm4_moe', 'hidden_size'),
      ('glm4_moe', 'num_attention_heads'),
  )
  def test_a_missing_key_is_named(self, name, key):
    raw = _first_generation(_folder(name))
    for change in ({}, {key: None}):
      changed = {k: v for k, v in raw.items() if k != key} | change
      with self.assertRaisesRegex(
          files.CheckpointError, f'^here: .*{key}.* is missing'
      ):
        hf_config.from_hf(changed, where='here')

  def test_a_llama_without_head_dim_divides_its_width(self):
    raw = _folder('llama_sharded')
    del raw['head_dim']
    self.assertEqual(hf_config.from_hf(raw).head_dim, 16)
    with self.assertRaisesRegex(
        files.CheckpointError, 'num_attention_heads 4.*hidden_size 66.*head_dim'
    ):
      hf_config.from_hf(raw | {'hidden_size': 66})

  @parameterized.named_parameters(
      ('experts', 'qwen3_moe', {'num_experts': 4}, ('num_experts', '8', '4')),
      ('theta', 'qwen3', {'rope_theta': 1e4}, ('rope_theta', '10000')),
      (
          'scaling',
          'qwen3',
          {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}},
          ('rope_type', 'llama3', 'default'),
      ),
      (
          'fraction',
          'glm4_moe',
          {'partial_rotary_factor': 1.0},
          ('partial_rotary_factor', '1.0', '0.5'),
      ),
      (
          'type',
          'llama',
          {'rope_scaling': {'rope_type': 'llama3', 'type': 'yarn'}},
          ('rope_type', 'llama3', 'yarn'),
      ),
  )
  def test_keys_that_contradict_each_other_are_refused(
      self, name, change, words
  ):
    with self.assertRaises(files.CheckpointError) as context:
      hf_config.from_hf(_folder(name) | change)
    for word in words:
      self.assertIn(word, str(context.exception))


class WritingTest(parameterized.TestCase):

  @parameterized.parameters(*_FOLDERS)
  def test_written_and_read_is_the_identity(self, name):
    config = hf_config.from_hf(_folder(name), dtype='float32')
    raw = json.loads(json.dumps(hf_config.to_hf(config)))
    self.assertEqual(hf_config.from_hf(raw, dtype='float32'), config)
    self.assertEqual(raw['model_type'], _folder(name)['model_type'])
    self.assertEqual(raw['architectures'], _folder(name)['architectures'])

  def test_written_and_read_is_the_identity_for_the_tiny_model(self):
    config = model_config.tiny(16)
    got = hf_config.from_hf(hf_config.to_hf(config))
    # Blocks of attention are not of the file.
    block = config.attention_block
    self.assertEqual(dataclasses.replace(got, attention_block=block), config)

  @parameterized.named_parameters(
      ('llama_with_a_part_rotated', 'llama', dict(rotary_fraction=0.5)),
      ('qwen3_with_a_bias_of_qkv', 'qwen3', dict(attention_bias='qkv')),
      ('moe_without_qk_norm', 'qwen3_moe', dict(qk_norm=False)),
      ('moe_with_a_shared_expert', 'qwen3_moe', dict(shared_expert_dim=32)),
      ('moe_with_a_dense_layer', 'qwen3_moe', dict(mlp_dim=32)),
      (
          'scaled_softmax_router',
          'qwen3_moe',
          dict(router=routing.Router(scale=2.0)),
      ),
      ('part_of_a_shared_expert', 'glm4_moe', dict(shared_expert_dim=48)),
  )
  def test_what_no_family_computes_is_refused(self, name, change):
    config = dataclasses.replace(hf_config.from_hf(_folder(name)), **change)
    with self.assertRaises(ValueError):
      hf_config.to_hf(config)

  @parameterized.product(name=_FOLDERS, first=(True, False))
  def test_both_generations_of_keys_are_written(self, name, first):
    new = _folder(name)
    old = _first_generation(new, 'type')
    raw = old if first else new
    before = copy.deepcopy(raw)
    both = hf_config.both_generations(raw)
    self.assertEqual(raw, before)
    self.assertEqual(hf_config.from_hf(both), hf_config.from_hf(raw))
    self.assertEqual(hf_config.both_generations(both), both)
    rope = new['rope_parameters']
    self.assertEqual(both['dtype'], new['dtype'])
    self.assertEqual(both['rope_parameters'], rope)
    self.assertEqual(both['torch_dtype'], new['dtype'])
    self.assertEqual(both['rope_theta'], rope['rope_theta'])
    is_default = rope['rope_type'] == 'default'
    self.assertEqual(both['rope_scaling'], None if is_default else rope)
    if 'num_local_experts' in new:
      self.assertEqual(both['num_experts'], new['num_local_experts'])
      self.assertEqual(both['num_local_experts'], new['num_local_experts'])
    if 'partial_rotary_factor' in rope:
      fraction = rope['partial_rotary_factor']
      self.assertEqual(both['partial_rotary_factor'], fraction)
    # Readers of one generation see the same model.
    for names in (('num_experts',), ('num_local_experts',)):
      less = {k: v for k, v in both.items() if k not in names}
      self.assertEqual(hf_config.from_hf(less), hf_config.from_hf(raw))


_WRONG_TYPES = ('8', [8], {'8': 8}, True, 8.5)
_SIZES = {
    'llama': (
        'vocab_size',
        'hidden_size',
        'num_hidden_layers',
        'num_attention_heads',
        'num_key_value_heads',
        'head_dim',
        'intermediate_size',
    ),
    'qwen3_moe': (
        'num_local_experts',
        'num_experts_per_tok',
        'moe_intermediate_size',
    ),
    'glm4_moe': (
        'intermediate_size',
        'n_routed_experts',
        'num_experts_per_tok',
        'moe_intermediate_size',
        'n_group',
        'topk_group',
    ),
}
_COUNTS = (
    'n_shared_experts',
    'first_k_dense_replace',
    'num_nextn_predict_layers',
)
_FLOATS = ('rms_norm_eps', 'rope_theta', 'routed_scaling_factor')
_BOOLS = (
    ('llama', 'attention_bias'),
    ('llama', 'tie_word_embeddings'),
    ('qwen3_moe', 'norm_topk_prob'),
    ('glm4_moe', 'use_qk_norm'),
)


class UnsupportedTest(parameterized.TestCase):

  def assert_refused(self, raw, *words):
    with self.assertRaises(files.CheckpointError) as context:
      hf_config.from_hf(raw, where='here')
    message = str(context.exception)
    self.assertStartsWith(message, 'here: ')
    self.assertLess(len(message), 400)
    for word in words:
      self.assertIn(str(word), message)

  @parameterized.parameters(
      ('llama', 'hidden_act', 'gelu'),
      ('llama', 'hidden_act', ['silu']),
      ('llama', 'mlp_bias', True),
      ('llama', 'mlp_bias', 1),
      ('llama', 'partial_rotary_factor', 0.5),
      ('llama', 'layer_types', ['full_attention', 'sliding_attention']),
      ('llama', 'layer_types', 'full_attention'),
      ('llama', 'model_type', 'gpt2'),
      ('llama', 'model_type', 'deepseek_v3'),
      ('llama', 'model_type', ['llama']),
      ('llama', 'model_type', {}),
      ('llama', 'model_type', ''),
      ('qwen3', 'use_sliding_window', True),
      ('qwen3', 'use_sliding_window', 'no'),
      ('qwen3_moe', 'decoder_sparse_step', 2),
      ('qwen3_moe', 'decoder_sparse_step', 0),
      ('qwen3_moe', 'mlp_only_layers', [0]),
      ('qwen3_moe', 'mlp_only_layers', 0),
      ('qwen3_moe', 'routed_scaling_factor', 2.0),
      ('qwen3_moe', 'n_group', 2),
      ('glm4_moe', 'hidden_act', 'swish'),
  )
  def test_an_unsupported_feature_names_key_and_value(self, name, key, value):
    short = {'n_group': 'groups'}.get(key, key)
    self.assert_refused(_folder(name) | {key: value}, short, value)

  @parameterized.parameters(
      ('llama', {'hidden_act': None, 'mlp_bias': None}),
      ('llama', {'mlp_bias': False, 'partial_rotary_factor': 1}),
      ('llama', {'layer_types': ['full_attention', 'full_attention']}),
      ('qwen3', {'sliding_window': 4096, 'use_sliding_window': False}),
      ('qwen3_moe', {'routed_scaling_factor': 1, 'n_group': 1}),
      ('qwen3_moe', {'unknown': {'key': 0}}),
  )
  def test_what_changes_nothing_is_accepted(self, name, change):
    raw = _folder(name)
    self.assertEqual(hf_config.from_hf(raw | change), hf_config.from_hf(raw))

  @parameterized.product(
      kind=('yarn', 'linear', 'dynamic', 'longrope', '', 'LLAMA3'),
      key=('type', 'rope_type'),
      place=('rope_scaling', 'rope_parameters'),
  )
  def test_another_scaling_of_rope_is_named(self, kind, key, place):
    raw = _first_generation(_folder('qwen3'))
    raw[place] = {key: kind, 'factor': 4.0}
    self.assert_refused(raw, 'rope_type', repr(kind))

  @parameterized.parameters(
      ('factor', 0),
      ('factor', -4.0),
      ('factor', '4'),
      ('factor', None),
      ('factor', 10**400),
      ('low_freq_factor', 0.0),
      ('low_freq_factor', 4.0),
      ('low_freq_factor', 5),
      ('high_freq_factor', 1.0),
      ('high_freq_factor', True),
      ('original_max_position_embeddings', 0),
      ('original_max_position_embeddings', 32.0),
      ('original_max_position_embeddings', -32),
      ('rope_theta', 0),
      ('rope_theta', 'e'),
      ('rope_type', 3),
  )
  def test_a_wrong_number_of_a_scaling_is_named(self, key, value):
    raw = _folder('llama')
    raw['rope_parameters'][key] = value
    self.assert_refused(
        raw, key, 'missing' if value is None else str(value)[:40]
    )

  @parameterized.parameters('rope_parameters', 'rope_scaling')
  def test_a_scaling_that_is_no_object_is_named(self, key):
    for value in ('llama3', [], 1, True):
      self.assert_refused(_folder('qwen3') | {key: value}, key, repr(value))

  @parameterized.parameters(
      *((name, key) for name, keys in _SIZES.items() for key in keys),
      *(('glm4_moe', key) for key in _COUNTS),
  )
  def test_a_wrong_size_names_key_and_value(self, name, key):
    raw = _folder(name)
    self.assertIn(key, raw)
    zero = () if key in _COUNTS else (0,)
    values = (*_WRONG_TYPES, *zero, -1, -(2**70), 2**40, 2**64, 10**400, -0.0)
    for value in values:
      self.assert_refused(raw | {key: value}, key, f'{value!r:.80}')

  @parameterized.parameters(*_FLOATS)
  def test_a_wrong_number_names_key_and_value(self, key):
    raw = _first_generation(_folder('glm4_moe'))
    self.assertIn(key, raw)
    for value in (
        *('1e-6', [1.0], {}, False),
        *(0, 0.0, -0.0, -1e-6, 1e300, 2**40, -(10**400), 10**400),
    ):
      self.assert_refused(raw | {key: value}, key, f'{value!r:.80}')

  @parameterized.parameters(*_BOOLS)
  def test_a_wrong_boolean_names_key_and_value(self, name, key):
    for value in (0, 1, 1.0, 'true', [], {}):
      self.assert_refused(_folder(name) | {key: value}, key, repr(value))

  @parameterized.named_parameters(
      ('kv_heads', 'llama', {'num_key_value_heads': 3}, ('3', '4')),
      ('more_kv_heads', 'llama', {'num_key_value_heads': 8}, ('8', '4')),
      ('odd_head_dim', 'qwen3', {'head_dim': 15}, ('head_dim 15',)),
      (
          'too_many_of_the_experts',
          'qwen3_moe',
          {'num_experts_per_tok': 9},
          ('experts_per_token 9', 'num_experts 8'),
      ),
      ('part_of_a_group', 'glm4_moe', {'n_group': 3}, ('3 groups', '8')),
      ('groups_of_one', 'glm4_moe', {'n_group': 8}, ('8 groups', 'two best')),
      ('more_groups_than_there_are', 'glm4_moe', {'topk_group': 2}, ('2', '1')),
      (
          'too_few_experts_in_the_best_groups',
          'glm4_moe_groups',
          {'topk_group': 1, 'num_experts_per_tok': 3},
          ('experts_per_token 3', '1', '2'),
      ),
  )
  def test_numbers_that_do_not_fit_are_refused(self, name, change, words):
    self.assert_refused(_folder(name) | change, *words)

  @parameterized.parameters(0.0, -0.5, 1.5, 0.3, '0.5', True, ({},))
  def test_a_wrong_part_of_a_head_is_refused(self, value):
    raw = _first_generation(_folder('glm4_moe'))
    # What is no pair of channels is said in channels of the head.
    words = ('head_dim',) if value in (1.5, 0.3) else (repr(value),)
    self.assert_refused(raw | {'partial_rotary_factor': value}, *words)

  def test_a_wrong_dtype_of_activations_is_refused(self):
    options: dict[str, Any] = {'dtype': 'float16'}
    with self.assertRaisesRegex(ValueError, "'float16'"):
      hf_config.from_hf(_folder('llama'), **options)

  def test_nothing_else_makes_a_model(self):
    self.assert_refused({}, 'model_type')
    for family in _FAMILIES:
      self.assert_refused({'model_type': family}, 'is missing')


class RopeTest(parameterized.TestCase):

  def test_frequencies_of_llama3_are_those_of_its_formula(self):
    """The formula branches on the wavelength, as Llama's own code does."""
    config = model_config.ModelConfig(
        vocab_size=16,
        num_layers=1,
        embed_dim=128,
        num_heads=1,
        num_kv_heads=1,
        head_dim=128,
        mlp_dim=16,
        rope_theta=5e5,
        rope_scaling=model_config.RopeScaling(8.0, 1.0, 4.0, 8192),
    )
    want = []
    for i in range(64):
      frequency = 5e5 ** (-2 * i / 128)
      wavelength = 2 * math.pi / frequency
      if wavelength > 8192 / 1.0:
        frequency /= 8.0
      elif wavelength >= 8192 / 4.0:
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        frequency = (1 - smooth) * frequency / 8.0 + smooth * frequency
      want.append(frequency)
    got = model_config.rope_frequencies(config)
    self.assertEqual(got.dtype, np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=0)
    plain = dataclasses.replace(config, rope_scaling=None)
    ratio = model_config.rope_frequencies(plain) / got
    # All three branches occur.
    self.assertEqual((ratio[0], round(ratio[-1], 9)), (1.0, 8.0))
    self.assertTrue(np.any((ratio > 1.01) & (ratio < 7.9)))

  def test_a_part_of_the_channels_is_rotated(self):
    config = hf_config.from_hf(_folder('glm4_moe'))
    got = model_config.rope_frequencies(config)
    want = 1e4 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=0)

  @parameterized.parameters(
      dict(factor=0.0),
      dict(factor=-1.0),
      dict(factor=math.nan),
      dict(factor=math.inf),
      dict(original_length=0),
      dict(low_freq_factor=0.0),
      dict(low_freq_factor=4.0),
      dict(high_freq_factor=math.nan),
  )
  def test_a_wrong_scaling_is_refused(self, **change):
    right: dict[str, Any] = dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_length=8192,
    )
    model_config.RopeScaling(**right)
    (name,) = change
    with self.assertRaisesRegex(ValueError, name):
      model_config.RopeScaling(**(right | change))


class PublishedTest(parameterized.TestCase):

  @parameterized.parameters(
      ('qwen3_30b_a3b', 48, (128, 8, 768, 0), 151936, 1e6, ''),
      ('glm_4_5', 92, (160, 8, 1536, 1536), 151552, 1e6, 'qkv'),
  )
  def test_real_sizes_are_read(
      self, name, layers, experts, vocab_size, theta, bias
  ):
    config = hf_config.from_hf(_published(name))
    self.assertEqual(config.num_layers, layers)
    self.assertEqual(
        (
            config.num_experts,
            config.experts_per_token,
            config.moe_dim,
            config.shared_expert_dim,
        ),
        experts,
    )
    self.assertEqual(config.vocab_size, vocab_size)
    self.assertEqual(config.rope_theta, theta)
    self.assertEqual(config.attention_bias, bias)
    both = hf_config.both_generations(_published(name))
    self.assertEqual(hf_config.from_hf(both), config)
    self.assertEqual(hf_config.from_hf(hf_config.to_hf(config)), config)

  def test_a_family_whose_forward_pass_is_missing_is_refused(self):
    with self.assertRaisesRegex(files.CheckpointError, 'deepseek_v3'):
      hf_config.from_hf(_published('deepseek_v3'))


if __name__ == '__main__':
  absltest.main()
