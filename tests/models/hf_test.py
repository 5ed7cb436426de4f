"""Checkpoints of every family, against transformers' logits in float32.

The folders in golden/hf were made by interop/torch_models.py: random weights,
tokens, and the logits of transformers 5.24 in float32.
"""

import functools
import itertools
import json
import pathlib
import shutil
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import ml_dtypes
import numpy as np
import pytest

from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import safetensors
from nvfp4_jax.models import hf
from nvfp4_jax.models import transformer

# Logits within a tolerance.
pytestmark = pytest.mark.quick_compile

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'hf'
CASES = tuple(sorted(path.name for path in GOLDEN.iterdir()))
BF16 = policy.Quantizer(policy.BF16)


def load_stacked(folder, **options):
  """Returns the configuration and stacked float32 masters of a folder."""
  config, params = hf.load(folder, **options)
  segments = policy.segments([policy.BF16], transformer.param_paths(config))
  return config, transformer.stack(policy.dequantize_params(params), segments)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens):
  hidden = transformer.forward(config, params, tokens, BF16)
  return transformer.logits(params, hidden)


def read_tensors(case):
  """Returns the tensors of a golden folder by name, and its config.json."""
  infos = safetensors.read_index(GOLDEN / case)
  tensors = {name: safetensors.read_tensor(x) for name, x in infos.items()}
  return tensors, json.loads((GOLDEN / case / 'config.json').read_text())


class TransformersTest(chex.TestCase):

  @parameterized.parameters(*CASES)
  def test_float32_logits_are_those_of_transformers(self, case):
    reference = np.load(GOLDEN / case / 'reference.npz')
    config, params = load_stacked(GOLDEN / case, dtype='float32')
    got = np.asarray(logits(config, params, reference['tokens']))
    want = reference['logits']
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))


class FolderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(root) / 'model'
    self.folder.mkdir()

  def write(self, tensors, config, shards=1):
    """Writes a folder of its own, in place of the last."""
    shutil.rmtree(self.folder)
    self.folder.mkdir()
    (self.folder / 'config.json').write_text(json.dumps(config))
    if shards == 1:
      safetensors.write_file(self.folder / safetensors.SINGLE, tensors)
      return
    weight_map = {}
    names = sorted(tensors)
    for i in range(shards):
      shard = f'model-{i + 1:05}-of-{shards:05}.safetensors'
      part = {name: tensors[name] for name in names[i::shards]}
      safetensors.write_file(self.folder / shard, part)
      weight_map |= dict.fromkeys(part, shard)
    (self.folder / safetensors.INDEX).write_text(
        json.dumps({'metadata': {}, 'weight_map': weight_map})
    )

  def assert_refused(self, *words, **options):
    with self.assertRaises(files.CheckpointError) as context:
      hf.load(self.folder, **options)
    for word in (str(self.folder), *words):
      self.assertIn(str(word), str(context.exception))

  def assert_same(self, got, want):
    """Asserts equal trees, to the bit of each array."""
    self.assertEqual(
        jax.tree_util.tree_structure(got), jax.tree_util.tree_structure(want)
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      self.assertEqual((x.dtype, x.shape), (y.dtype, y.shape))
      self.assertEqual(x.tobytes(), y.tobytes())


class NamesTest(FolderTest):

  @parameterized.parameters('llama', 'qwen3', 'qwen3_moe', 'glm4_moe')
  def test_every_tensor_is_needed_and_named(self, case):
    """Opens the folder only: nothing is read before all is there."""
    tensors, config = read_tensors(case)
    for name in tensors:
      less = {n: x for n, x in tensors.items() if n != name}
      self.write(less, config)
      with self.assertRaisesRegex(
          files.CheckpointError, f"tensor '{name}' is missing"
      ):
        hf.open_folder(self.folder)

  def test_fused_experts_are_needed_and_named(self):
    tensors, config = read_tensors('qwen3_moe_fused')
    for name in tensors:
      if 'experts' not in name:
        continue
      less = {n: x for n, x in tensors.items() if n != name}
      self.write(less, config)
      # Whichever form is missing, an expert of the layer is named.
      self.assert_refused(name.rpartition('.')[0], 'is missing')

  @parameterized.parameters(
      'model.layers.0.mlp.experts.8.up_proj.weight',
      'model.layers.0.mlp.experts.00.up_proj.weight',
      'model.layers.0.mlp.experts.gate_proj.weight',
      'model.layers.0.mlp.experts.0.up_proj.bias',
      'model.layers.0.mlp.shared_experts.up_proj.weight',
      'model.layers.0.mlp.up_proj.weight',
      'model.layers.0.self_attn.q_proj.bias',
      'model.layers.0.self_attn.q_proj.weight_scale',
      'model.layers.3.input_layernorm.weight',
      'model.layers.00.input_layernorm.weight',
      'model.layers.-1.input_layernorm.weight',
      'model.layers.' + '9' * 5000 + '.input_layernorm.weight',
      'model.layers.3.self_attn.rotary_emb.inv_freq.weight',
      'model.embed_tokens',
      'lm_head.bias',
      'score.weight',
      '',
  )
  def test_an_extra_tensor_is_named(self, name):
    tensors, config = read_tensors('qwen3_moe')
    self.write(tensors | {name: np.zeros(4, np.float32)}, config)
    self.assert_refused(repr(name), 'no place', 'qwen3_moe')

  @parameterized.parameters('qwen3_moe', 'qwen3_moe_fused', 'glm4_moe')
  def test_a_wrong_shape_is_named(self, case):
    tensors, config = read_tensors(case)
    for name in tensors:
      if '.layers.' in name and '.layers.1.' not in name:
        continue
      x = tensors[name]
      others = [x[None], x[:-1], np.concatenate([x, x[:1]]), x.reshape(-1)[0]]
      if x.ndim > 1:
        others += [x.reshape(-1), x[..., :-1], np.zeros((*x.shape, 0), x.dtype)]
      for other in others:
        self.write(tensors | {name: other}, config)
        with self.assertRaises(files.CheckpointError) as context:
          hf.open_folder(self.folder)
        for word in (repr(name), other.shape, x.shape):
          self.assertIn(str(word), str(context.exception))

  @parameterized.parameters(
      *itertools.product(
          ('qwen3_moe', 'qwen3_moe_fused'),
          (
              np.uint8,
              np.int32,
              np.float64,
              np.bool_,
              ml_dtypes.float8_e4m3fn,
              ml_dtypes.float4_e2m1fn,
          ),
      )
  )
  def test_a_wrong_dtype_is_named(self, case, dtype):
    tensors, config = read_tensors(case)
    experts = 'model.layers.1.mlp.experts'
    names = {
        'qwen3_moe': (f'{experts}.5.down_proj.weight', 'model.norm.weight'),
        'qwen3_moe_fused': (f'{experts}.down_proj', f'{experts}.gate_up_proj'),
    }[case]
    for name in names:
      other = np.zeros(tensors[name].shape, dtype)
      self.write(tensors | {name: other}, config)
      self.assert_refused(repr(name), np.dtype(dtype), 'bfloat16')

  def test_fused_and_single_experts_cannot_both_be_there(self):
    single, config = read_tensors('qwen3_moe')
    fused, _ = read_tensors('qwen3_moe_fused')
    self.write(single | fused, config)
    self.assert_refused('mlp.experts.0.down_proj.weight', 'no place')

  def test_a_number_of_layers_that_no_file_holds_is_refused_at_once(self):
    tensors, config = read_tensors('llama')
    for layers in (3, len(tensors), len(tensors) + 1, 2**39):
      self.write(tensors, config | {'num_hidden_layers': layers})
      self.assert_refused()

  @parameterized.parameters(
      ('vocab_size', 'model.embed_tokens.weight', 2**39),
      ('hidden_size', 'model.embed_tokens.weight', 2**39),
      ('num_local_experts', 'model.layers.0.mlp.gate.weight', 2**39),
      ('moe_intermediate_size', 'mlp.experts.0.gate_proj.weight', 2**39),
      ('head_dim', 'model.layers.0.self_attn.q_proj.weight', 4 * 2**39),
  )
  def test_a_size_that_no_file_holds_is_refused_at_once(self, key, name, size):
    tensors, config = read_tensors('qwen3_moe')
    self.write(tensors, config | {key: 2**39})
    self.assert_refused(name, size)


class FormsTest(FolderTest):

  @parameterized.parameters(False, True)
  def test_fused_and_single_experts_are_one_model(self, half):
    """In float16 too, which is widened."""
    single, config = read_tensors('qwen3_moe')
    fused, _ = read_tensors('qwen3_moe_fused')
    if half:
      single, fused = (
          {n: x.astype(np.float16) for n, x in t.items()}
          for t in (single, fused)
      )
    self.write(single, config)
    want = hf.load(self.folder)
    self.write(fused, config)
    got = hf.load(self.folder)
    self.assertEqual(got[0], want[0])
    self.assert_same(got[1], want[1])

  def test_one_projection_may_be_fused_alone(self):
    single, config = read_tensors('qwen3_moe')
    fused, _ = read_tensors('qwen3_moe_fused')
    want = hf.load(GOLDEN / 'qwen3_moe')[1]
    mixed = {n: x for n, x in single.items() if '.down_proj' not in n}
    mixed |= {n: x for n, x in fused.items() if '.down_proj' in n}
    self.write(mixed, config)
    self.assert_same(hf.load(self.folder)[1], want)

  @parameterized.parameters('llama_sharded', 'qwen3_moe', 'qwen3_moe_fused')
  def test_shards_are_one_model(self, case):
    tensors, config = read_tensors(case)
    want = hf.load(GOLDEN / case)[1]
    for shards in (1, 3):
      self.write(tensors, config, shards=shards)
      self.assert_same(hf.load(self.folder)[1], want)

  def test_values_are_those_of_the_tensors(self):
    tensors, _ = read_tensors('glm4_moe')
    params = hf.load(GOLDEN / 'glm4_moe')[1]
    moe = params['layers'][1]
    prefix = 'model.layers.1.'
    for name in ('mlp.gate', 'mlp.shared_experts.up_proj', 'input_layernorm'):
      want = tensors[f'{prefix}{name}.weight']
      self.assert_same(moe[name], want)
    for name in ('self_attn.k_proj.bias', 'mlp.gate.e_score_correction_bias'):
      self.assert_same(moe[name], tensors[f'{prefix}{name}'])
    self.assertEqual(moe['mlp.gate.e_score_correction_bias'].dtype, np.float32)
    for expert in range(8):
      want = tensors[f'{prefix}mlp.experts.{expert}.down_proj.weight']
      self.assert_same(moe['mlp.experts.down_proj'][expert], want)
    self.assertIn('mlp.up_proj', params['layers'][0])
    self.assertNotIn('mlp.gate', params['layers'][0])

  def test_float32_and_bfloat16_files_hold_one_model(self):
    want = hf.load(GOLDEN / 'llama')[1]
    got = hf.load(GOLDEN / 'llama_float32')[1]
    self.assertEqual({x.dtype.name for x in jax.tree.leaves(got)}, {'float32'})
    self.assert_same(got, jax.tree.map(lambda x: x.astype(np.float32), want))

  def test_float16_becomes_float32_exactly(self):
    """All 65,536 values: subnormals, infinities and NaN too."""
    tensors, config = read_tensors('llama')
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    tensors['model.embed_tokens.weight'] = every.reshape(-1, 64)
    self.write(tensors, config | {'vocab_size': 1024})
    got = hf.load(self.folder)[1]['embed_tokens'].reshape(-1)
    self.assertEqual(got.dtype, np.float32)
    with np.errstate(invalid='ignore'):
      want = every.astype(np.float64)
    np.testing.assert_array_equal(got, want)
    sign = np.signbit(got)
    np.testing.assert_array_equal(sign, np.arange(2**16) >= 2**15)

  def test_an_expert_beside_wider_ones_is_widened(self):
    tensors, config = read_tensors('qwen3_moe')
    want = hf.load(GOLDEN / 'qwen3_moe')[1]['layers'][0]
    for dtype in (np.float16, np.float32):
      name = 'model.layers.0.mlp.experts.3.up_proj.weight'
      wide = tensors[name].astype(dtype)
      self.write(tensors | {name: wide}, config)
      got = hf.load(self.folder)[1]['layers'][0]
      stack = want['mlp.experts.up_proj'].astype(np.float32)
      stack[3] = wide
      self.assert_same(got, {**want, 'mlp.experts.up_proj': stack})

  def test_the_output_head_may_repeat_a_tied_table(self):
    tensors, config = read_tensors('llama')
    self.assertTrue(config['tie_word_embeddings'])
    self.assertNotIn('lm_head.weight', tensors)
    want = hf.load(GOLDEN / 'llama')[1]
    self.assertNotIn('lm_head', want)
    table = tensors['model.embed_tokens.weight']
    self.write(tensors | {'lm_head.weight': table}, config)
    self.assert_same(hf.load(self.folder)[1], want)
    self.write(tensors | {'lm_head.weight': table}, config, shards=2)
    self.assert_same(hf.load(self.folder)[1], want)
    other = table.copy()
    other.view(np.uint16)[-1, -1] ^= 1
    for head in (other, table[:-1], table.T, table.astype(np.float32)):
      self.write(tensors | {'lm_head.weight': head}, config)
      self.assert_refused("'lm_head.weight'")

  def test_an_untied_head_is_needed(self):
    tensors, config = read_tensors('llama')
    self.write(tensors, config | {'tie_word_embeddings': False})
    self.assert_refused("'lm_head.weight' is missing")

  def test_layers_that_predict_further_tokens_are_ignored_if_announced(self):
    tensors, config = read_tensors('glm4_moe')
    want = hf.load(GOLDEN / 'glm4_moe')[1]
    key = 'num_nextn_predict_layers'
    self.assertEqual((config['num_hidden_layers'], config[key]), (3, 1))
    extra = {
        f'model.layers.3.{name}': np.ones((2, 2), np.float32)
        for name in ('eh_proj.weight', 'shared_head.norm.weight', 'mlp.gate')
    }
    self.write(tensors | extra, config)
    self.assert_same(hf.load(self.folder)[1], want)
    for value in (0, None):
      self.write(tensors | extra, config | {key: value})
      self.assert_refused("'model.layers.3.", 'no place')
    further = {'model.layers.4.eh_proj.weight': np.ones(2, np.float32)}
    self.write(tensors | extra | further, config)
    self.assert_refused("'model.layers.4.eh_proj.weight'", 'no place')
    for value in ('1', [1], 1.0, True, -1, 2**64):
      self.write(tensors | extra, config | {key: value})
      self.assert_refused(key, repr(value))

  def test_frequencies_in_old_checkpoints_are_ignored(self):
    tensors, config = read_tensors('llama')
    old = {
        f'model.layers.{i}.self_attn.rotary_emb.inv_freq': np.ones(8, '<f4')
        for i in range(2)
    }
    self.write(tensors | old, config)
    self.assert_same(hf.load(self.folder)[1], hf.load(GOLDEN / 'llama')[1])


class PartsTest(FolderTest):

  @parameterized.parameters('qwen3_moe', 'qwen3_moe_fused', 'glm4_moe')
  def test_a_part_of_the_experts_is_that_of_the_whole(self, case):
    checkpoint = hf.open_folder(GOLDEN / case)
    whole = hf.read_layer(checkpoint, 1)
    part = hf.read_layer(checkpoint, 1, experts=slice(2, 5))
    self.assertEqual(part.keys(), whole.keys())
    for name, x in part.items():
      want = whole[name]
      if name.startswith('mlp.experts.'):
        want = want[2:5]
        self.assertEqual(x.shape[0], 3)
      self.assert_same(x, want)

  def test_some_names_of_a_layer(self):
    checkpoint = hf.open_folder(GOLDEN / 'qwen3_moe')
    names = ('mlp.experts.up_proj', 'self_attn.k_norm')
    part = hf.read_layer(checkpoint, 2, names, slice(7, 8))
    whole = hf.read_layer(checkpoint, 2)
    self.assertEqual(tuple(part), names)
    self.assert_same(part[names[0]], whole[names[0]][7:])
    self.assert_same(part[names[1]], whole[names[1]])

  def test_parts_are_the_whole(self):
    checkpoint = hf.open_folder(GOLDEN / 'glm4_moe')
    config, params = hf.load(GOLDEN / 'glm4_moe')
    self.assertEqual(checkpoint.config, config)
    top = {name: x for name, x in params.items() if name != 'layers'}
    self.assert_same(hf.read_top(checkpoint), top)
    for i, layer in enumerate(params['layers']):
      self.assert_same(hf.read_layer(checkpoint, i), layer)

  @parameterized.parameters('qwen3_moe', 'qwen3_moe_fused', 'llama_sharded')
  def test_arrays_are_of_numpy_with_memory_of_their_own(self, case):
    shutil.copytree(GOLDEN / case, self.folder, dirs_exist_ok=True)
    with jax.transfer_guard('disallow_explicit'):
      params = hf.load(self.folder)[1]
    leaves = jax.tree.leaves(params)
    before = [x.tobytes() for x in leaves]
    for x in leaves:
      self.assertIs(type(x), np.ndarray)
      self.assertTrue(x.flags.writeable and x.flags.c_contiguous)
    for path in self.folder.iterdir():
      path.write_bytes(bytes(path.stat().st_size))
    self.assertEqual([x.tobytes() for x in leaves], before)
    # To write into one array changes no other.
    for x in leaves:
      x.view(np.uint8)[...] = 0
      self.assertFalse(x.view(np.uint8).any())
    spans = sorted(np.lib.array_utils.byte_bounds(x) for x in leaves)
    for (_, end), (start, _) in itertools.pairwise(spans):
      self.assertLessEqual(end, start)

  @parameterized.parameters(*CASES)
  def test_params_become_tensors_again(self, case):
    config, params = hf.load(GOLDEN / case)
    tree = {n: x for n, x in params.items() if n != 'layers'}
    for i, layer in enumerate(params['layers']):
      tree |= {f'layers.{i}.{name}': x for name, x in layer.items()}
    got = {}
    for path, param in tree.items():
      got |= hf.to_tensors(config, path, param, encode=lambda module, q: {})
    want, _ = read_tensors(case.removesuffix('_fused'))
    self.assertEqual(got.keys(), want.keys())
    for name, x in got.items():
      self.assert_same(x, want[name])


class ManifestTest(FolderTest):

  def test_a_flipped_bit_is_refused_unless_it_is_not_asked_for(self):
    shutil.copytree(GOLDEN / 'llama_sharded', self.folder, dirs_exist_ok=True)
    files.write_manifest(self.folder, {})
    want = hf.load(self.folder)[1]
    shard = 'model-00002-of-00007.safetensors'
    data = bytearray((self.folder / shard).read_bytes())
    data[-1] ^= 1
    (self.folder / shard).write_bytes(data)
    self.assert_refused(shard, 'SHA-256')
    got = hf.load(self.folder, verify=False)[1]
    differ = [
        x.tobytes() != y.tobytes()
        for x, y in zip(
            jax.tree.leaves(got), jax.tree.leaves(want), strict=True
        )
    ]
    self.assertEqual(sum(differ), 1)

  def test_a_changed_configuration_is_refused(self):
    tensors, config = read_tensors('llama')
    self.write(tensors, config)
    files.write_manifest(self.folder, {})
    hf.load(self.folder)
    changed = config | {'rms_norm_eps': 2e-5}
    (self.folder / 'config.json').write_text(json.dumps(changed))
    self.assert_refused('config.json', 'SHA-256')
    self.assertEqual(hf.load(self.folder, verify=False)[0].norm_eps, 2e-5)

  def test_what_is_no_folder_is_refused(self):
    for folder in (self.folder, self.folder / 'missing'):
      with self.assertRaisesRegex(files.CheckpointError, str(folder)):
        hf.load(folder)
    tensors, config = read_tensors('llama')
    self.write(tensors, config)
    (self.folder / safetensors.SINGLE).unlink()
    (self.folder / 'pytorch_model.bin').write_bytes(b'')
    self.assert_refused('pytorch_model.bin', 'never read')


if __name__ == '__main__':
  absltest.main()
