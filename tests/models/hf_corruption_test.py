"""Damaged checkpoint folders, and those of somebody who means harm.

Every mutation of a folder gives one CheckpointError, or arrays whose bytes are
those that the official safetensors package reads from the same files.
"""

import collections
import dataclasses
import json
import os
import pathlib
import random
import resource
import sys
import tempfile
import time
import tracemalloc
from typing import Any
import warnings

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np

from nvfp4_jax import export
from nvfp4_jax import files
from nvfp4_jax import qtensor
from nvfp4_jax import recipes
from nvfp4_jax import safetensors
from nvfp4_jax.models import hf
from tests import safetensors_oracle as oracle
from tests.models import folder_mutations

_FOLDERS = ('single', 'sharded', 'modelopt', 'compressed_tensors')
_MUTATIONS_A_FOLDER = 500
_EXPERTS = 3
_TEXT_BUFFER = 64 << 20  # reserved, not filled, for a text of unknown size

_opened: list[str] | None = None


def _record_open(event, args):
  if event == 'open' and _opened is not None:
    _opened.append(args[0])


def _raw_config(layers):
  return {
      'architectures': ['Qwen3MoeForCausalLM'],
      'attention_bias': False,
      'decoder_sparse_step': 1,
      'dtype': 'bfloat16',
      'eos_token_id': 1,
      'head_dim': 8,
      'hidden_act': 'silu',
      'hidden_size': 16,
      'mlp_only_layers': [],
      'model_type': 'qwen3_moe',
      'moe_intermediate_size': 16,
      'norm_topk_prob': True,
      'num_attention_heads': 2,
      'num_experts_per_tok': 2,
      'num_hidden_layers': layers,
      'num_key_value_heads': 1,
      'num_local_experts': _EXPERTS,
      'rms_norm_eps': 1e-6,
      'rope_parameters': {'rope_theta': 1e6, 'rope_type': 'default'},
      'tie_word_embeddings': False,
      'use_sliding_window': False,
      'vocab_size': 8,
  }


def _shapes(layers):
  """Returns the shapes of `_raw_config`'s tensors by name."""
  shapes = {'model.embed_tokens': (8, 16), 'model.norm': (16,)}
  shapes['lm_head'] = (8, 16)
  for i in range(layers):
    prefix = f'model.layers.{i}'
    shapes |= {
        f'{prefix}.input_layernorm': (16,),
        f'{prefix}.post_attention_layernorm': (16,),
        f'{prefix}.self_attn.q_proj': (16, 16),
        f'{prefix}.self_attn.k_proj': (8, 16),
        f'{prefix}.self_attn.v_proj': (8, 16),
        f'{prefix}.self_attn.o_proj': (16, 16),
        f'{prefix}.self_attn.q_norm': (8,),
        f'{prefix}.self_attn.k_norm': (8,),
        f'{prefix}.mlp.gate': (_EXPERTS, 16),
    }
    for e in range(_EXPERTS):
      for name in ('gate', 'up', 'down'):
        shapes[f'{prefix}.mlp.experts.{e}.{name}_proj'] = (16, 16)
  return {f'{name}.weight': shape for name, shape in shapes.items()}


def _write_folder(folder, layers, shards):
  rng = np.random.default_rng(0)
  tensors = {
      name: rng.normal(size=shape).astype(ml_dtypes.bfloat16)
      for name, shape in _shapes(layers).items()
  }
  folder.mkdir()
  (folder / folder_mutations.CONFIG).write_text(json.dumps(_raw_config(layers)))
  if shards == 1:
    safetensors.write_file(folder / safetensors.SINGLE, tensors)
    return
  weight_map = {}
  for i in range(shards):
    name = f'model-{i + 1:05}-of-{shards:05}.safetensors'
    part = dict(list(tensors.items())[i::shards])
    safetensors.write_file(folder / name, part)
    weight_map |= dict.fromkeys(part, name)
  index = {'metadata': {'total_size': 0}, 'weight_map': weight_map}
  (folder / safetensors.INDEX).write_text(json.dumps(index))


class CorruptionTest(parameterized.TestCase):

  originals: dict[str, dict[str, bytes]]

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    sys.addaudithook(_record_open)  # which cannot be removed again
    with tempfile.TemporaryDirectory() as root:
      folders = {name: pathlib.Path(root) / name for name in _FOLDERS}
      _write_folder(folders['single'], layers=1, shards=1)
      _write_folder(folders['sharded'], layers=2, shards=2)
      policy = recipes.get('nvfp4_high_precision').sampler
      for layout in ('modelopt', 'compressed_tensors'):
        target = export.Target(policy, layout=layout)
        export.convert(folders['single'], folders[layout], target)
      cls.originals = {
          name: {path.name: path.read_bytes() for path in folder.iterdir()}
          for name, folder in folders.items()
      }

  def setUp(self):
    super().setUp()
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.folder, self.outside = root / 'model', root / 'outside'

  def place(self, name):
    """Writes a folder, and a whole copy of it outside of itself."""
    for folder in (self.folder, self.outside):
      folder.mkdir(exist_ok=True)
      for file, data in self.originals[name].items():
        (folder / file).write_bytes(data)

  def put(self, name, content):
    """Makes a file what a mutation says; None for missing."""
    path = self.folder / name
    if path.is_dir() and not path.is_symlink():
      path.rmdir()
    else:
      path.unlink(missing_ok=True)
    if isinstance(content, bytes):
      path.write_bytes(content)
    elif content == folder_mutations.Link('fifo'):
      os.mkfifo(path)
    elif content == folder_mutations.Link('folder'):
      path.mkdir()
    elif content is not None:
      path.symlink_to(content.target)

  def load(self, verify) -> Any:
    """Returns what `hf.load` does, or the error; checks what it opened."""
    global _opened
    try:
      with warnings.catch_warnings():
        warnings.simplefilter('error')
        _opened = []
        result = hf.load(self.folder, verify=verify)
    except files.CheckpointError as error:
      self.assertIs(type(error), files.CheckpointError)
      result = error
    finally:
      opened, _opened = _opened, None
    home = os.path.realpath(self.folder)
    for path in opened or ():
      real = os.path.realpath(path)
      self.assertEqual(os.path.dirname(real), home, f'{path} was opened')
    return result

  def official(self):
    """Returns what the official package reads, by name."""
    shards = [safetensors.SINGLE]
    if (self.folder / safetensors.INDEX).exists():
      index = json.loads((self.folder / safetensors.INDEX).read_text())
      shards = sorted(set(index['weight_map'].values()))
    tensors = {}
    for shard in shards:
      found = oracle.read((self.folder / shard).read_bytes())
      self.assertIsNotNone(found)
      self.assertEmpty(found.keys() & tensors.keys())
      tensors |= found
    return tensors

  def assert_loaded(self, config, params):
    """Asserts that the model is what the files say."""
    raw = json.loads((self.folder / folder_mutations.CONFIG).read_text())
    rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
    self.assertEqual(config.norm_eps, raw['rms_norm_eps'])
    self.assertEqual(config.experts_per_token, raw['num_experts_per_tok'])
    self.assertEqual(config.router.normalize, raw['norm_topk_prob'])
    self.assertIn(
        config.rope_theta, (raw.get('rope_theta'), rope.get('rope_theta'))
    )
    self.assertIs(
        config.tie_embeddings, raw.get('tie_word_embeddings') or False
    )
    tensors = self.official()
    self.assertLen(params['layers'], config.num_layers)
    for name, param in params.items():
      if name == 'lm_head':
        self.assert_param(tensors, name, param)
      elif name != 'layers':
        self.assert_param(tensors, f'model.{name}', param)
    for i, layer in enumerate(params['layers']):
      for name, param in layer.items():
        prefix = f'model.layers.{i}.'
        if not name.startswith('mlp.experts.'):
          self.assert_param(tensors, f'{prefix}{name}', param)
          continue
        projection = name.removeprefix('mlp.experts.')
        for e in range(config.num_experts):
          module = f'{prefix}mlp.experts.{e}.{projection}'
          self.assert_param(tensors, module, _part(param, e))
    if config.tie_embeddings:
      tensors.pop('lm_head.weight', None)
    # Scales of activations are not read.
    unread = ('.input_scale', '.input_global_scale')
    self.assertEmpty([name for name in tensors if not name.endswith(unread)])

  def assert_param(self, tensors, module, param):
    """Asserts that a parameter is what its tensors say, and removes them."""
    if isinstance(param, qtensor.QTensor):
      codes = tensors.pop(f'{module}.weight', None)
      factor = tensors.pop(f'{module}.weight_scale_2', None)
      if codes is None:
        codes = tensors.pop(f'{module}.weight_packed')
      want = [codes[2], tensors.pop(f'{module}.weight_scale')[2]]
      if factor is None:
        divisor = tensors.pop(f'{module}.weight_global_scale')[2]
        factor = np.float32(1) / np.frombuffer(divisor, np.float32)
        want.append(factor.tobytes())
      else:
        want.append(factor[2])
      fields = (param.data, param.block_scale, param.global_scale)
      self.assertEqual([np.asarray(x).tobytes() for x in fields], want, module)
      return
    dtype, shape, data = tensors.pop(f'{module}.weight')
    # float16 is widened, and experts are that are stacked with wider ones.
    widened = param.dtype == np.float32 and '.experts.' in module
    if dtype == 'F16' or (dtype == 'BF16' and widened):
      values = np.frombuffer(data, oracle.DTYPES[dtype])
      with np.errstate(invalid='ignore'):
        data = values.astype(np.float32).tobytes()
      dtype = 'F32'
    got = (oracle.dtype_name(param.dtype), param.shape, param.tobytes())
    self.assertEqual(got, (dtype, shape, data), module)


def _part(param, expert):
  if isinstance(param, qtensor.QTensor):
    return dataclasses.replace(
        param,
        data=param.data[expert],
        block_scale=param.block_scale[expert],
        global_scale=None
        if param.global_scale is None
        else param.global_scale[expert],
    )
  return param[expert]


class FuzzTest(CorruptionTest):

  @parameterized.parameters(*_FOLDERS)
  def test_mutations_are_refused_or_read_as_the_official_package_does(
      self, name
  ):
    self.place(name)
    original = self.originals[name]
    self.assertLess(sum(map(len, original.values())), 24_000)
    self.assert_loaded(*self.load(verify=True))
    has_manifest = files.MANIFEST in original
    rng = random.Random(name)
    counts = collections.Counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(_MUTATIONS_A_FOLDER):
      kind = folder_mutations.MUTATIONS[i % len(folder_mutations.MUTATIONS)]
      changed = kind(original, rng, self.outside)
      verify = not has_manifest or rng.random() < 0.3
      for file, content in changed.items():
        self.put(file, content)
      try:
        result = self.load(verify)
        if isinstance(result, files.CheckpointError):
          counts[kind.__name__, 'refused'] += 1
          self.assertRegex(str(result), 'model')
        else:
          counts[kind.__name__, 'read'] += 1
          self.assert_loaded(*result)
          # What the manifest vouches for has not changed.
          if verify and has_manifest and files.MANIFEST not in changed:
            for file in changed:
              data = (self.folder / file).read_bytes()
              self.assertEqual(data, original.get(file, data))
      except Exception as error:
        error.add_note(
            f'{kind.__name__} {i}: {folder_mutations.show(original, changed)}'
        )
        raise
      for file in changed:
        self.put(file, original.get(file))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    self.assertLess(grown, 200 << 10)  # in KiB
    self.assertLen(
        {kind for kind, _ in counts}, len(folder_mutations.MUTATIONS)
    )
    for outcome in ('refused', 'read'):
      total = sum(n for (_, how), n in counts.items() if how == outcome)
      self.assertGreater(total, _MUTATIONS_A_FOLDER // 10, counts)


class QuantizedTest(CorruptionTest):

  def change_tensors(self, name, change):
    """Writes a folder with other tensors; None for missing."""
    self.place(name)
    infos = safetensors.read_index(self.folder)
    tensors = {n: safetensors.read_tensor(x) for n, x in infos.items()}
    tensors |= change
    safetensors.write_file(
        self.folder / safetensors.SINGLE,
        {n: x for n, x in tensors.items() if x is not None},
    )

  def assert_refused(self, *words):
    result = self.load(verify=False)
    self.assertIsInstance(result, files.CheckpointError)
    for word in words:
      self.assertIn(word, str(result))

  def test_experts_are_all_quantized_or_none(self):
    prefix = 'model.layers.0.mlp.experts'
    for expert in range(_EXPERTS):
      module = f'{prefix}.{expert}.up_proj'
      change = {
          f'{module}.weight': np.ones((16, 16), ml_dtypes.bfloat16),
          f'{module}.weight_scale': None,
          f'{module}.weight_scale_2': None,
          f'{module}.input_scale': None,
      }
      self.change_tensors('modelopt', change)
      self.assert_refused(f'{prefix}.0.up_proj', 'only one is quantized')

  @parameterized.parameters(
      ('modelopt', 'weight_scale'),
      ('modelopt', 'weight_scale_2'),
      ('compressed_tensors', 'weight_scale'),
      ('compressed_tensors', 'weight_global_scale'),
      ('compressed_tensors', 'weight_packed'),
  )
  def test_a_missing_tensor_of_a_weight_is_named(self, name, suffix):
    module = 'model.layers.0.mlp.experts.2.down_proj'
    self.change_tensors(name, {f'{module}.{suffix}': None})
    suffix = 'weight' if suffix == 'weight_packed' else suffix
    self.assert_refused(f"'{module}.{suffix}' is missing")

  @parameterized.parameters(
      ('modelopt', 'weight_scale_2', np.float32(3.0)),
      ('modelopt', 'weight_scale_2', np.float32('nan')),
      ('modelopt', 'weight_scale_2', np.float32(0)),
      ('compressed_tensors', 'weight_global_scale', np.array([1e-4], '<f4')),
      ('compressed_tensors', 'weight_global_scale', np.array([0], '<f4')),
      ('compressed_tensors', 'weight_global_scale', np.array([-1], '<f4')),
  )
  def test_a_wrong_global_scale_is_named(self, name, suffix, value):
    module = 'model.layers.0.mlp.experts.2.down_proj'
    self.change_tensors(name, {f'{module}.{suffix}': value})
    self.assert_refused(module, 'scale')

  def test_a_vector_is_never_quantized(self):
    codes = np.zeros((16,), np.uint8)
    for name in ('model.norm', 'model.layers.0.self_attn.q_norm'):
      self.change_tensors('modelopt', {f'{name}.weight': codes})
      self.assert_refused(f"'{name}.weight' is uint8")

  @parameterized.parameters(
      ('quant_method', [1]),
      ('quant_method', {}),
      ('format', ['nvfp4-pack-quantized']),
      ('format', {}),
      ('format', None),
      ('config_groups', []),
      ('config_groups', {'a': {}, 'b': {}}),
  )
  def test_a_wrong_description_is_named(self, key, value):
    self.place('compressed_tensors')
    raw = json.loads(
        self.originals['compressed_tensors'][folder_mutations.CONFIG]
    )
    raw['quantization_config'][key] = value
    self.put(folder_mutations.CONFIG, json.dumps(raw).encode())
    self.assert_refused(key, repr(value))


class HugeTest(CorruptionTest):

  @parameterized.parameters(
      'vocab_size',
      'hidden_size',
      'num_hidden_layers',
      'num_attention_heads',
      'num_key_value_heads',
      'head_dim',
      'num_local_experts',
      'moe_intermediate_size',
      'num_nextn_predict_layers',
  )
  def test_a_huge_number_costs_neither_memory_nor_time(self, key):
    self.place('single')
    raw = _raw_config(1) | {key: 2**39}
    self.put(folder_mutations.CONFIG, json.dumps(raw).encode())
    start = time.monotonic()
    tracemalloc.start()
    try:
      result = self.load(verify=True)
      _, peak = tracemalloc.get_traced_memory()
    finally:
      tracemalloc.stop()
    self.assertLess(peak, _TEXT_BUFFER + 2_000_000)
    self.assertLess(time.monotonic() - start, 5)
    if key == 'num_nextn_predict_layers':  # None of them is there.
      self.assert_loaded(*result)
    else:
      self.assertIsInstance(result, files.CheckpointError)

  def test_all_layers_in_one_name_are_refused(self):
    """As many layers as the file has tensors, of names that look right."""
    self.place('single')
    header, data = folder_mutations.split(
        self.originals['single'][safetensors.SINGLE]
    )
    header = json.loads(header)
    end = len(data)
    for i in range(1, 2000):
      header[f'model.layers.{i}.input_layernorm.weight'] = {
          'dtype': 'BF16',
          'shape': [0],
          'data_offsets': [end, end],
      }
    self.put(safetensors.SINGLE, folder_mutations.to_file(header, data))
    raw = _raw_config(1) | {'num_hidden_layers': 2000}
    self.put(folder_mutations.CONFIG, json.dumps(raw).encode())
    start = time.monotonic()
    result = self.load(verify=True)
    self.assertRegex(str(result), "'model.layers.1.*shape")
    self.assertLess(time.monotonic() - start, 5)


class OutsideTest(CorruptionTest):

  @parameterized.parameters(
      folder_mutations.CONFIG,
      safetensors.INDEX,
      'model-00002-of-00002.safetensors',
  )
  def test_a_link_out_of_the_folder_is_refused(self, file):
    self.place('sharded')
    for target in (str(self.outside / file), f'../outside/{file}'):
      self.put(file, folder_mutations.Link(target))
      result = self.load(verify=True)
      self.assertIsInstance(result, files.CheckpointError)
      self.assertRegex(str(result), f"'{file}' leads out of")

  def test_a_link_within_the_folder_is_followed(self):
    self.place('sharded')
    shard = 'model-00002-of-00002.safetensors'
    self.put('blob', self.originals['sharded'][shard])
    self.put(shard, folder_mutations.Link('blob'))
    self.assert_loaded(*self.load(verify=True))

  @parameterized.parameters(
      '../outside/model-00002-of-00002.safetensors',
      'sub/../model-00002-of-00002.safetensors',
      './model-00002-of-00002.safetensors',
      '..\\outside\\model-00002-of-00002.safetensors',
      '/model-00002-of-00002.safetensors',
      'model-00002-of-00002.safetensors\0.safetensors',
      '..safetensors',
      '.safetensors',
      '',
      '..',
      'config.json',
      'model.bin',
      'x' * 300 + '.safetensors',
      '\ud800.safetensors',
  )
  def test_an_index_names_files_of_its_folder_only(self, name):
    self.place('sharded')
    index = json.loads(self.originals['sharded'][safetensors.INDEX])
    shard = 'model-00002-of-00002.safetensors'
    for tensor, file in index['weight_map'].items():
      if file == shard:
        index['weight_map'][tensor] = name
    self.put(safetensors.INDEX, json.dumps(index).encode())
    self.assertIsInstance(self.load(verify=True), files.CheckpointError)

  def test_a_manifest_names_files_of_its_folder_only(self):
    self.place('modelopt')
    manifest = json.loads(self.originals['modelopt'][files.MANIFEST])
    manifest['files'] |= {'../outside/config.json': {'bytes': 1, 'sha256': ''}}
    self.put(files.MANIFEST, json.dumps(manifest).encode())
    result = self.load(verify=True)
    self.assertRegex(str(result), 'outside/config.json')
    self.assert_loaded(*self.load(verify=False))


if __name__ == '__main__':
  absltest.main()
