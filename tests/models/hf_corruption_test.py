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

_CONFIG = 'config.json'
_HF_QUANT = 'hf_quant_config.json'
_FOLDERS = ('single', 'sharded', 'modelopt', 'compressed_tensors')
_MUTATIONS_A_FOLDER = 500
_EXPERTS = 3
_TEXT_BUFFER = 64 << 20  # reserved, not filled, for a text of unknown size

_opened: list[str] | None = None


def _record_open(event, args):
  if event == 'open' and _opened is not None:
    _opened.append(args[0])


@dataclasses.dataclass(frozen=True)
class _Link:
  """A symbolic link; 'fifo' and 'folder' stand for what is no file at all."""

  target: str


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
  (folder / _CONFIG).write_text(json.dumps(_raw_config(layers)))
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
    elif content == _Link('fifo'):
      os.mkfifo(path)
    elif content == _Link('folder'):
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
    raw = json.loads((self.folder / _CONFIG).read_text())
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
      kind = _MUTATIONS[i % len(_MUTATIONS)]
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
        error.add_note(f'{kind.__name__} {i}: {_show(original, changed)}')
        raise
      for file in changed:
        self.put(file, original.get(file))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    self.assertLess(grown, 200 << 10)  # in KiB
    self.assertLen({kind for kind, _ in counts}, len(_MUTATIONS))
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
    raw = json.loads(self.originals['compressed_tensors'][_CONFIG])
    raw['quantization_config'][key] = value
    self.put(_CONFIG, json.dumps(raw).encode())
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
    self.put(_CONFIG, json.dumps(raw).encode())
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
    header, data = _split(self.originals['single'][safetensors.SINGLE])
    header = json.loads(header)
    end = len(data)
    for i in range(1, 2000):
      header[f'model.layers.{i}.input_layernorm.weight'] = {
          'dtype': 'BF16',
          'shape': [0],
          'data_offsets': [end, end],
      }
    self.put(safetensors.SINGLE, _file(header, data))
    raw = _raw_config(1) | {'num_hidden_layers': 2000}
    self.put(_CONFIG, json.dumps(raw).encode())
    start = time.monotonic()
    result = self.load(verify=True)
    self.assertRegex(str(result), "'model.layers.1.*shape")
    self.assertLess(time.monotonic() - start, 5)


class OutsideTest(CorruptionTest):

  @parameterized.parameters(
      _CONFIG, safetensors.INDEX, 'model-00002-of-00002.safetensors'
  )
  def test_a_link_out_of_the_folder_is_refused(self, file):
    self.place('sharded')
    for target in (str(self.outside / file), f'../outside/{file}'):
      self.put(file, _Link(target))
      result = self.load(verify=True)
      self.assertIsInstance(result, files.CheckpointError)
      self.assertRegex(str(result), f"'{file}' leads out of")

  def test_a_link_within_the_folder_is_followed(self):
    self.place('sharded')
    shard = 'model-00002-of-00002.safetensors'
    self.put('blob', self.originals['sharded'][shard])
    self.put(shard, _Link('blob'))
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


def _show(original, changed):
  """Returns what a mutation changed, for an error message."""
  result = {}
  for file, content in changed.items():
    if isinstance(content, bytes) and len(content) > 3000:
      content = f'{len(content)} bytes, {len(original.get(file, b""))} before'
    result[file] = content
  return result


def _split(data):
  end = 8 + int.from_bytes(data[:8], 'little')
  return data[8:end], data[end:]


def _raw(header, data):
  return len(header).to_bytes(8, 'little') + header + data


def _file(header, data):
  return _raw(json.dumps(header).encode(), data)


def _shards(original):
  return [name for name in original if name.endswith('.safetensors')]


def _shard(original, rng):
  return rng.choice(_shards(original))


def _junk(rng) -> Any:
  """Returns a JSON value that hardly fits."""
  nested: Any = 0
  for _ in range(rng.choice([1, 3, 300])):
    nested = rng.choice([[nested], {'weights': nested}])
  return rng.choice(
      [
          *(None, True, False, 0, 1, 2, 3, -1, 4, 8, 16, 127),
          *(2**31, 2**39, 2**40, 2**63, 2**64, -(2**63), 10**400),
          *(0.0, -0.0, 0.5, 1.0, 1.5, -2.0, 1e300, 1e-300, float('nan')),
          *('', 'x', '1', '..', '../outside/model.safetensors', '/dev/zero'),
          *('model.safetensors', 'llama', 'glm4_moe', 'fp8', 'MXFP8', 'yarn'),
          *('\ud800', 'ü\0', 'x' * 500, [], {}, [0], ['x'], {'x': 0}),
          nested,
      ]
  )


def _change_json(value, rng):
  """Replaces, removes, adds or swaps something at any depth, in place."""
  inner = [v for v in _children(value) if isinstance(v, dict | list) and v]
  if inner and rng.random() < 0.6:
    _change_json(rng.choice(inner), rng)
    return
  if isinstance(value, list):
    at = rng.randrange(len(value))
    value[at : at + rng.randrange(2)] = [_junk(rng)] * rng.randrange(2)
    return
  key = rng.choice(list(value))
  how = rng.random()
  if how < 0.6:
    value[key] = _junk(rng)
  elif how < 0.75:
    del value[key]
  elif how < 0.9:
    other = rng.choice(list(value))
    value[key], value[other] = value[other], value[key]
  else:
    value[rng.choice(['', 'x', f'{key}x'])] = value.pop(key)


def _children(value):
  return value.values() if isinstance(value, dict) else value


def _json_of(original, file, rng):
  value = json.loads(original[file])
  _change_json(value, rng)
  return {file: json.dumps(value).encode()}


def _edit_text(data, rng):
  """Inserts, deletes or replaces characters."""
  changed = bytearray(data)
  for _ in range(rng.randint(1, 3)):
    at = rng.randrange(len(changed))
    text = rng.choice([*'0123456789-+.eE"\\{}[],: \n', 'F', 'null', '\xff'])
    changed[at : at + rng.randrange(2)] = text.encode('latin-1')
  return bytes(changed)


def _flip(data, rng, end=None):
  changed = bytearray(data)
  changed[rng.randrange(end or len(data))] ^= 1 << rng.randrange(8)
  return bytes(changed)


def _flip_a_bit_of_a_header(original, rng, outside):
  del outside
  name = _shard(original, rng)
  header, _ = _split(original[name])
  return {name: _flip(original[name], rng, 8 + len(header))}


def _flip_a_bit_of_a_tensor(original, rng, outside):
  del outside
  name = _shard(original, rng)
  header, data = _split(original[name])
  return {name: _raw(header, _flip(data, rng))}


def _edit_a_header(original, rng, outside):
  del outside
  name = _shard(original, rng)
  header, data = _split(original[name])
  return {name: _raw(_edit_text(header, rng), data)}


def _change_a_header(original, rng, outside):
  """Another dtype, shape or name, or two tensors that change places."""
  del outside
  name = _shard(original, rng)
  text, data = _split(original[name])
  header = json.loads(text)
  one, other = rng.choices([n for n in header if n[0] != '_'], k=2)
  how = rng.randrange(5)
  if how == 0:
    dtypes = [*oracle.DTYPES, 'F16', 'F16', 'C64', '', None, 0]
    header[one]['dtype'] = rng.choice(dtypes)
  elif how == 1:
    rng.choice([header[one]['shape'], header[one]['data_offsets']]).reverse()
  elif how == 2:
    header[one], header[other] = header[other], header[one]
  elif how == 3:
    stem, _, tail = one.rpartition('.')
    renamed = [
        *('', 'x', '__metadata__', f'{stem}.bias', f'{one}.weight'),
        *(f'model.layers.{n}.x' for n in ('9' * 5000, '1', '-1', '٣', '01')),
        one.replace('experts.0', 'experts.3'),
        f'model.layers.0.self_attn.rotary_emb.inv_freq.{tail}',
    ]
    header[rng.choice(renamed)] = header.pop(one)
  else:
    _change_json(header, rng)
  return {name: _file(header, data)}


def _cut_or_extend(original, rng, outside):
  del outside
  name = rng.choice(list(original))
  data = original[name]
  if rng.random() < 0.7:
    return {name: data[: rng.randrange(len(data))]}
  return {name: data + rng.choice([rng.randbytes(rng.randint(1, 9)), b' \n'])}


def _remove_or_add(original, rng, outside):
  del outside
  name = rng.choice(list(original))
  extra = [
      {name: None},
      {safetensors.SINGLE: rng.choice(list(original.values()))},
      {safetensors.INDEX: b'{"weight_map": {}}'},
      {_HF_QUANT: b'{"quantization": {"quant_algo": "NVFP4"}}'},
      {_HF_QUANT: b'{"quantization": []}'},
      {files.MANIFEST: b'{"files": {}}'},
      {'pytorch_model.bin': b'', 'other.safetensors': b''},
      {'.hidden': b'', 'generation_config.json': b'{'},
  ]
  return rng.choice(extra)


def _swap_files(original, rng, outside):
  """Shards, or a shard and another file, change places."""
  del outside
  one, other = rng.sample(list(original), 2)
  if len(_shards(original)) > 1 and rng.random() < 0.5:
    one, other = rng.sample(_shards(original), 2)
  return {one: original[other], other: original[one]}


def _swap_bytes(original, rng, outside):
  """Two pieces of the tensors change places; headers stay."""
  del outside
  name = _shard(original, rng)
  header, data = _split(original[name])
  size = rng.choice([2, 16, 512])
  at, to = rng.sample(range(0, len(data) - size, size), 2)
  changed = bytearray(data)
  changed[at : at + size] = data[to : to + size]
  changed[to : to + size] = data[at : at + size]
  return {name: _raw(header, bytes(changed))}


def _change_the_config(original, rng, outside):
  del outside
  return _json_of(original, _CONFIG, rng)


def _change_a_value_of_the_config(original, rng, outside):
  """Values of the right kind; some are harmless."""
  del outside
  raw = json.loads(original[_CONFIG])
  for _ in range(rng.randint(1, 2)):
    key, values = rng.choice(
        [
            ('rms_norm_eps', [1e-5, 1, 0, -1e-6, 10**400]),
            ('rope_theta', [1e6, 1e4, 0, '1']),
            (
                'rope_parameters',
                [None, {}, {'rope_theta': 1e6}, {'rope_theta': 1}],
            ),
            (
                'rope_scaling',
                [None, {}, {'type': 'default'}, {'type': 'llama3'}],
            ),
            ('norm_topk_prob', [True, False, 1, 'yes']),
            ('num_experts_per_tok', [1, 2, 3, 4, 0]),
            ('num_local_experts', [3, 2, 4, 0, 2**39]),
            ('num_experts', [3, 2, None, 0]),
            ('tie_word_embeddings', [True, False, None]),
            ('num_hidden_layers', [1, 2, 3, 0, 2**39]),
            ('num_nextn_predict_layers', [0, 1, 2**39, '1', [1], -1]),
            ('hidden_size', [16, 32, 2**39]),
            ('vocab_size', [8, 9, 2**39]),
            ('attention_bias', [True, False, 0]),
            (
                'model_type',
                ['llama', 'qwen3', 'qwen3_moe', 'glm4_moe', '', None],
            ),
            ('torch_dtype', ['float16', None, 3]),
            ('quantization_config', [None, {}, [], {'quant_method': 'fp8'}]),
            ('x', [_junk(rng)]),
        ]
    )
    raw[key] = rng.choice(values)
  return {_CONFIG: json.dumps(raw).encode()}


def _change_the_quantization(original, rng, outside):
  """What is said of quantized weights, in either place."""
  raw = json.loads(original[_CONFIG])
  described = raw.get('quantization_config')
  if described is None:
    raw['quantization_config'] = rng.choice(
        [
            _junk(rng),
            {'quant_method': 'modelopt', 'quant_algo': _junk(rng)},
            {'quant_method': 'modelopt', 'quant_algo': 'NVFP4'},
            {'quant_method': 'compressed-tensors', 'format': _junk(rng)},
            {'quant_method': 'fp8', 'weight_block_size': _junk(rng)},
            {'quant_method': _junk(rng)},
        ]
    )
    return {_CONFIG: json.dumps(raw).encode()}
  how = rng.random()
  if _HF_QUANT in original and how < 0.4:
    # It counts where config.json is silent.
    del raw['quantization_config']
    return {
        _CONFIG: json.dumps(raw).encode(),
        **_json_of(original, _HF_QUANT, rng),
    }
  if how < 0.5:
    return _json_of(original, rng.choice([_CONFIG, files.MANIFEST]), rng)
  if how < 0.7:
    key = rng.choice(list(described))
    described[key] = _junk(rng)
  else:
    _change_json(described, rng)
  return {_CONFIG: json.dumps(raw).encode()}


def _change_the_index(original, rng, outside):
  if safetensors.INDEX not in original:
    name = rng.choice([safetensors.SINGLE, '../outside/model.safetensors'])
    header = json.loads(_split(original[safetensors.SINGLE])[0])
    weight_map = {n: name for n in header if n != '__metadata__'}
    value = {'weight_map': weight_map}
    if rng.random() < 0.5:
      _change_json(value, rng)
    return {safetensors.INDEX: json.dumps(value).encode()}
  value = json.loads(original[safetensors.INDEX])
  weight_map = value['weight_map']
  name = rng.choice(list(weight_map))
  how = rng.randrange(6)
  if how == 0:
    weight_map[name] = rng.choice(
        [
            *_shards(original),
            *(f'../outside/{shard}' for shard in _shards(original)),
            str(outside / _shards(original)[0]),
            *('..', '', 'x.safetensors', 'config.json', '\0.safetensors'),
        ]
    )
  elif how == 1:
    weight_map[name] = _junk(rng)
  elif how == 2:
    del weight_map[name]
  elif how == 3:
    weight_map[rng.choice(['x', '', f'{name}x'])] = weight_map[name]
  elif how == 4:
    value['metadata'] = _junk(rng)
  else:
    _change_json(value, rng)
  return {safetensors.INDEX: json.dumps(value).encode()}


def _edit_json_text(original, rng, outside):
  """Changes characters, or says a key twice."""
  del outside
  name = rng.choice([n for n in original if n.endswith('.json')])
  data = original[name]
  if rng.random() < 0.3:
    key = rng.choice(list(json.loads(data)))
    twice = f'{{{json.dumps(key)}: {json.dumps(_junk(rng))}, '.encode()
    return {name: twice + data.lstrip()[1:]}
  return {name: _edit_text(data, rng)}


def _make_a_link(original, rng, outside):
  """A link, or something that is no file, in place of a file."""
  name = rng.choice(list(original))
  target = rng.choice(
      [
          str(outside / name),
          f'../outside/{name}',
          f'../model/{name}x',
          name,
          '/dev/zero',
          '/proc/self/environ',
          'fifo',
          'folder',
          'kept',
          'kept',
      ]
  )
  # Within the folder, a link is as good as the file.
  kept = {'kept': original[name]} if target == 'kept' else {}
  return {name: _Link(target), **kept}


_MUTATIONS = (
    _flip_a_bit_of_a_header,
    _flip_a_bit_of_a_tensor,
    _edit_a_header,
    _change_a_header,
    _cut_or_extend,
    _remove_or_add,
    _swap_files,
    _swap_bytes,
    _change_the_config,
    _change_a_value_of_the_config,
    _change_the_quantization,
    _change_the_index,
    _edit_json_text,
    _make_a_link,
)


if __name__ == '__main__':
  absltest.main()
