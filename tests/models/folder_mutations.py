"""Ways to damage a checkpoint folder, for tests/models/hf_corruption_test.py.

A folder is a dict of bytes by file name. A mutation takes it, a random number
generator and the path of a file outside, and returns another folder.
"""

import dataclasses
import json
from typing import Any

from nvfp4_jax import files
from nvfp4_jax import safetensors
from tests import safetensors_oracle as oracle

CONFIG = 'config.json'
HF_QUANT = 'hf_quant_config.json'


@dataclasses.dataclass(frozen=True)
class Link:
  """A symbolic link; 'fifo' and 'folder' stand for what is no file at all."""

  target: str


def show(original, changed):
  """Returns what a mutation changed, for an error message."""
  result = {}
  for file, content in changed.items():
    if isinstance(content, bytes) and len(content) > 3000:
      content = f'{len(content)} bytes, {len(original.get(file, b""))} before'
    result[file] = content
  return result


def split(data):
  end = 8 + int.from_bytes(data[:8], 'little')
  return data[8:end], data[end:]


def _raw(header, data):
  return len(header).to_bytes(8, 'little') + header + data


def to_file(header, data):
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
  header, _ = split(original[name])
  return {name: _flip(original[name], rng, 8 + len(header))}


def _flip_a_bit_of_a_tensor(original, rng, outside):
  del outside
  name = _shard(original, rng)
  header, data = split(original[name])
  return {name: _raw(header, _flip(data, rng))}


def _edit_a_header(original, rng, outside):
  del outside
  name = _shard(original, rng)
  header, data = split(original[name])
  return {name: _raw(_edit_text(header, rng), data)}


def _change_a_header(original, rng, outside):
  """Another dtype, shape or name, or two tensors that change places."""
  del outside
  name = _shard(original, rng)
  text, data = split(original[name])
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
  return {name: to_file(header, data)}


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
      {HF_QUANT: b'{"quantization": {"quant_algo": "NVFP4"}}'},
      {HF_QUANT: b'{"quantization": []}'},
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
  header, data = split(original[name])
  size = rng.choice([2, 16, 512])
  at, to = rng.sample(range(0, len(data) - size, size), 2)
  changed = bytearray(data)
  changed[at : at + size] = data[to : to + size]
  changed[to : to + size] = data[at : at + size]
  return {name: _raw(header, bytes(changed))}


def _change_the_config(original, rng, outside):
  del outside
  return _json_of(original, CONFIG, rng)


def _change_a_value_of_the_config(original, rng, outside):
  """Values of the right kind; some are harmless."""
  del outside
  raw = json.loads(original[CONFIG])
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
  return {CONFIG: json.dumps(raw).encode()}


def _change_the_quantization(original, rng, outside):
  """What is said of quantized weights, in either place."""
  raw = json.loads(original[CONFIG])
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
    return {CONFIG: json.dumps(raw).encode()}
  how = rng.random()
  if HF_QUANT in original and how < 0.4:
    # It counts where config.json is silent.
    del raw['quantization_config']
    return {
        CONFIG: json.dumps(raw).encode(),
        **_json_of(original, HF_QUANT, rng),
    }
  if how < 0.5:
    return _json_of(original, rng.choice([CONFIG, files.MANIFEST]), rng)
  if how < 0.7:
    key = rng.choice(list(described))
    described[key] = _junk(rng)
  else:
    _change_json(described, rng)
  return {CONFIG: json.dumps(raw).encode()}


def _change_the_index(original, rng, outside):
  if safetensors.INDEX not in original:
    name = rng.choice([safetensors.SINGLE, '../outside/model.safetensors'])
    header = json.loads(split(original[safetensors.SINGLE])[0])
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
  return {name: Link(target), **kept}


MUTATIONS = (
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
