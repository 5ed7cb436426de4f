"""Parameter counts, against published totals and against real trees."""

import json
import math
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from nvfp4_jax import files
from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax import safetensors
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import hf
from nvfp4_jax.models import hf_config
from nvfp4_jax.models import layouts
from nvfp4_jax.models import param_counts
from nvfp4_jax.models import transformer

_GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
_FOLDERS = tuple(sorted(path.name for path in (_GOLDEN / 'hf').iterdir()))
_PUBLISHED = ('deepseek_v3', 'glm_4_5', 'qwen3_30b_a3b')
_RECIPES = ('bf16', 'mxfp8', 'fp8_block', 'nvfp4_final', 'nvfp4_naive')
_EXPERTS = r'layers\.\d+\.mlp\.experts\.(gate|up|down)_proj'


def _published(name):
  return json.loads((_GOLDEN / 'configs' / f'{name}.json').read_text())


def _folder(name):
  return json.loads((_GOLDEN / 'hf' / name / 'config.json').read_text())


def _policy(spec, pattern=_EXPERTS):
  precision = matmul.MatmulPrecision(lhs=None, rhs=spec)
  return policy.PrecisionPolicy((policy.Rule(pattern, precision),), 0.0)


def _quantized(config, precision_policy):
  """Returns shapes and dtypes of what a model's masters are quantized to."""
  paths = transformer.param_paths(config)
  segments = policy.segments([precision_policy], paths)
  quantizer = policy.Quantizer(precision_policy)

  def quantize(key):
    params = transformer.init_params(key, config)
    return policy.quantize_params(
        quantizer, transformer.stack(params, segments)
    )

  return jax.eval_shape(quantize, jax.random.key(0))


def _converted_bytes(config, precision_policy):
  """Returns the bytes of the tensors that a model is written as."""

  def encode(unused_module, q):
    # Modelopt holds whole blocks of fp8_block only.
    is_block = q.format.name == 'fp8_block'
    return layouts.encode(q, 'deepseek' if is_block else 'modelopt')

  params = jax.tree.map(
      lambda leaf: np.ones(leaf.shape, leaf.dtype),
      _quantized(config, precision_policy),
  )
  params = transformer.unstack(params)
  by_path = {path: leaf for path, leaf in params.items() if path != 'layers'}
  for i, layer in enumerate(params['layers']):
    by_path |= {f'layers.{i}.{name}': leaf for name, leaf in layer.items()}
  return sum(
      tensor.nbytes
      for path, leaf in by_path.items()
      for _, tensor in hf.to_tensors(config, path, leaf, encode)
  )


class PublishedTest(parameterized.TestCase):

  def test_qwen3_30b_a3b(self):
    counts = param_counts.count(_published('qwen3_30b_a3b'))
    self.assertEqual(counts.total, 30_532_122_624)
    self.assertEqual(counts.by_class['routed experts'], 48 * 128 * 3 * 1572864)
    self.assertEqual(counts.not_counted, ())

  def test_glm_4_5(self):
    counts = param_counts.count(_published('glm_4_5'))
    self.assertEqual(counts.total, 352_797_829_024)
    self.assertEqual(counts.not_counted, ('layers.92',))

  def test_deepseek_v3(self):
    counts = param_counts.count(_published('deepseek_v3'))
    self.assertEqual(counts.total, 671_026_419_200)
    routed = counts.by_class['routed experts']
    shared = counts.by_class['shared experts']
    self.assertEqual(f'{routed / counts.total:.3%}', '97.449%')
    self.assertEqual(f'{(routed + shared) / counts.total:.3%}', '97.830%')
    self.assertEqual(counts.not_counted, ('layers.61',))

  @parameterized.parameters(
      ('qwen3_30b_a3b', 128), ('glm_4_5', 160), ('deepseek_v3', 256)
  )
  def test_all_but_the_other_experts_are_active(self, name, experts):
    counts = param_counts.count(_published(name))
    routed = counts.by_class['routed experts']
    idle = routed // experts * (experts - 8)
    self.assertEqual(counts.active['routed experts'], routed - idle)
    self.assertEqual(counts.total_active, counts.total - idle)

  @parameterized.parameters(*_PUBLISHED)
  def test_classes_add_up_to_the_shapes(self, name):
    raw = _published(name)
    sizes = map(math.prod, param_counts.shapes(raw).values())
    counts = param_counts.count(raw)
    self.assertEqual(counts.total, sum(sizes))
    self.assertEqual(tuple(counts.by_class), param_counts.CLASSES)
    self.assertEqual(tuple(counts.active), param_counts.CLASSES)

  @parameterized.parameters(
      ('nvfp4_naive', 0.5 + 1 / 16), ('nvfp4_final', 0.5 + 1 / 16)
  )
  def test_recipes_find_the_experts_of_deepseek_v3(self, name, size):
    shapes = param_counts.shapes(_published('deepseek_v3'))
    precision_policy = recipes.get(name).sampler
    kept = math.floor(precision_policy.keep_last * 61 + 0.5)
    matrices = (61 - 3 - kept) * 256 * 3
    saved = matrices * (7168 * 2048 * (2 - size) - 4)
    bf16 = param_counts.tensor_bytes(shapes, policy.BF16)
    got = param_counts.tensor_bytes(shapes, precision_policy)
    self.assertEqual(bf16 - got, saved)

  def test_correction_biases_are_float32(self):
    raw = _published('deepseek_v3')
    got = param_counts.tensor_bytes(param_counts.shapes(raw), policy.BF16)
    self.assertEqual(got, 2 * 671_026_419_200 + 2 * 58 * 256)


class DeepseekTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.raw = _published('deepseek_v3')

  def test_attention_has_low_rank_latents(self):
    shapes = param_counts.shapes(self.raw)
    prefix = 'layers.60.self_attn.'
    attention = {
        path.removeprefix(prefix): shape
        for path, shape in shapes.items()
        if path.startswith(prefix)
    }
    want = {
        'q_a_proj': (1536, 7168),
        'q_a_layernorm': (1536,),
        'q_b_proj': (128 * 192, 1536),
        'kv_a_proj_with_mqa': (576, 7168),
        'kv_a_layernorm': (512,),
        'kv_b_proj': (128 * 256, 512),
        'o_proj': (7168, 128 * 128),
    }
    self.assertEqual(attention, want)

  def test_queries_may_have_no_latent(self):
    self.raw['q_lora_rank'] = None
    shapes = param_counts.shapes(self.raw)
    self.assertEqual(shapes['layers.0.self_attn.q_proj'], (128 * 192, 7168))
    self.assertNotIn('layers.0.self_attn.q_a_proj', shapes)
    del self.raw['q_lora_rank']
    with self.assertRaisesRegex(files.CheckpointError, 'q_lora_rank is miss'):
      param_counts.shapes(self.raw)

  def test_first_layers_are_dense(self):
    shapes = param_counts.shapes(self.raw)
    self.assertEqual(shapes['layers.2.mlp.down_proj'], (7168, 18432))
    self.assertNotIn('layers.2.mlp.gate', shapes)
    self.assertEqual(shapes['layers.3.mlp.gate'], (256, 7168))
    self.assertNotIn('layers.3.mlp.down_proj', shapes)

  def test_a_tied_head_is_not_counted_twice(self):
    self.raw['tie_word_embeddings'] = True
    counts = param_counts.count(self.raw)
    self.assertEqual(counts.by_class['lm_head'], 0)
    self.assertEqual(counts.total, 671_026_419_200 - 129280 * 7168)

  def test_shared_experts_are_one_mlp_or_none(self):
    for number in (0, 2):
      self.raw['n_shared_experts'] = number
      shared = param_counts.count(self.raw).by_class['shared experts']
      self.assertEqual(shared, 58 * number * 3 * 7168 * 2048)

  @parameterized.parameters(
      ('moe_layer_freq', 2),
      ('attention_bias', True),
      ('topk_method', 'greedy'),
      ('tie_word_embeddings', 'false'),
      ('n_routed_experts', 0),
      ('n_routed_experts', '256'),
      ('num_experts_per_tok', 257),
      ('num_experts_per_tok', True),
      ('kv_lora_rank', 1.5),
      ('kv_lora_rank', None),
      ('hidden_size', -1),
      ('q_lora_rank', 0),
      ('num_nextn_predict_layers', -1),
  )
  def test_what_it_cannot_count_is_an_error(self, key, value):
    self.raw[key] = value
    with self.assertRaisesRegex(files.CheckpointError, f'here: .*{key}'):
      param_counts.count(self.raw, where='here')


class FoldersTest(parameterized.TestCase):

  @parameterized.parameters(*_FOLDERS)
  def test_counts_are_those_of_the_tensors(self, name):
    tensors = safetensors.read_index(_GOLDEN / 'hf' / name)
    sizes = [
        math.prod(info.shape)
        for path, info in tensors.items()
        if not path.endswith('.inv_freq')
    ]
    self.assertEqual(param_counts.count(_folder(name)).total, sum(sizes))

  @parameterized.parameters('glm4_moe', 'qwen3_moe', 'llama')
  def test_bf16_bytes_are_those_of_the_tensors(self, name):
    tensors = safetensors.read_index(_GOLDEN / 'hf' / name)
    size = sum(
        math.prod(info.shape) * (4 if path.endswith('correction_bias') else 2)
        for path, info in tensors.items()
    )
    shapes = param_counts.shapes(_folder(name))
    self.assertEqual(param_counts.tensor_bytes(shapes, policy.BF16), size)

  @parameterized.parameters(*_FOLDERS)
  def test_paths_are_those_of_the_model(self, name):
    config = hf_config.from_hf(_folder(name))
    paths = transformer.param_paths(config)
    self.assertEqual(list(param_counts.shapes(_folder(name))), paths)

  def test_tied_embeddings_are_counted_once(self):
    counts = param_counts.count(_folder('llama'))
    self.assertEqual(counts.by_class['embeddings'], 128 * 64)
    self.assertEqual(counts.by_class['lm_head'], 0)
    self.assertEqual(counts.total_active, counts.total)


class BytesTest(parameterized.TestCase):

  @parameterized.parameters('nvfp4_final', 'nvfp4_naive')
  def test_nvfp4_is_as_large_on_disk_as_in_memory(self, recipe):
    config = model_config.tiny(16)
    precision_policy = recipes.get(recipe).sampler
    want = qtensor.nbytes(_quantized(config, precision_policy))
    shapes = param_counts.shapes(hf_config.to_hf(config))
    got = param_counts.tensor_bytes(shapes, precision_policy)
    self.assertEqual(got, want)

  @parameterized.product(
      name=('glm4_moe', 'qwen3_moe', 'qwen3'), recipe=_RECIPES
  )
  def test_bytes_are_what_a_conversion_writes(self, name, recipe):
    raw = _folder(name)
    precision_policy = recipes.get(recipe).sampler
    want = _converted_bytes(hf_config.from_hf(raw), precision_policy)
    shapes = param_counts.shapes(raw)
    got = param_counts.tensor_bytes(shapes, precision_policy)
    self.assertEqual(got, want)

  @parameterized.parameters(
      ('nvfp4', (256, 384), 256 * 384 // 2 + 256 * 384 // 16 + 4),
      ('mxfp8', (256, 384), 256 * 384 + 256 * 384 // 32),
      ('fp8_block', (256, 384), 256 * 384 + 4 * 2 * 3),
      ('fp8_block', (130, 300), 130 * 300 + 4 * 2 * 3),
  )
  def test_formula(self, name, shape, want):
    spec = quantization.QuantSpec(name, block_2d=name == 'fp8_block')
    path = 'layers.0.mlp.experts.up_proj'
    for experts in (1, 5):
      shapes = {path: (experts, *shape)}
      got = param_counts.tensor_bytes(shapes, _policy(spec))
      self.assertEqual(got, experts * want)

  @parameterized.parameters(
      (quantization.QuantSpec('nvfp4'), (2, 8, 24), 'multiple of 16'),
      (quantization.QuantSpec('mxfp8'), (2, 8, 16), 'multiple of 32'),
      (quantization.QuantSpec('nvfp4'), (16,), 'is not'),
      (quantization.QuantSpec('fp8_block'), (2, 128, 128), 'each row'),
      (quantization.QuantSpec('mxfp4'), (2, 32, 32), 'mxfp4'),
  )
  def test_what_cannot_be_stored_is_named(self, spec, shape, reason):
    path = 'layers.0.mlp.experts.up_proj'
    with self.assertRaisesRegex(ValueError, f'{path}: .*{reason}'):
      param_counts.tensor_bytes({path: shape}, _policy(spec))


class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters('gpt2', None, 3)
  def test_an_unknown_family_names_the_valid_ones(self, family):
    with self.assertRaises(files.CheckpointError) as context:
      param_counts.shapes({'model_type': family}, where='here')
    for name in ('here', str(family), *param_counts.FAMILIES):
      self.assertIn(name, str(context.exception))

  def test_families_are_those_of_the_package_and_deepseek_v3(self):
    with self.assertRaises(files.CheckpointError) as context:
      hf_config.from_hf({'model_type': 'gpt2'})
    supported = sorted({*param_counts.FAMILIES} - {'deepseek_v3'})
    self.assertIn(str(supported), str(context.exception))

  @parameterized.parameters(
      ('num_hidden_layers', 10**9),
      ('num_hidden_layers', 0),
      ('num_hidden_layers', None),
      ('num_nextn_predict_layers', 10**9),
      ('num_nextn_predict_layers', 'one'),
      ('vocab_size', 0),
      ('vocab_size', '128'),
      ('num_experts_per_tok', 0),
  )
  def test_a_wrong_value_is_an_error(self, key, value):
    raw = _published('glm_4_5') | {key: value}
    with self.assertRaisesRegex(files.CheckpointError, 'here: '):
      param_counts.count(raw, where='here')

  def test_a_path_of_no_class_is_an_error(self):
    for path in ('layers.0.mlp', 'norm.bias', 'layers.0.self_attn.sinks'):
      with self.assertRaisesRegex(ValueError, path):
        param_counts.class_of(path)


if __name__ == '__main__':
  absltest.main()
