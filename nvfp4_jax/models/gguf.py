"""GGUF files of Llama models, as Hugging Face checkpoints.

The weights are dequantized: each becomes the value that the file stands for, in
float32, and is then rounded once to the dtype of the checkpoint. RoPE in GGUF
turns neighbouring channels, in Hugging Face channels half a head apart; so GGUF
holds the rows of the query and key projections in another order, which is
undone here.

Needs the extra `gguf`.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Iterator, Mapping
import json
import pathlib
import shutil
from typing import Any, Literal

import ml_dtypes
import numpy as np

import nvfp4_jax
from nvfp4_jax import files
from nvfp4_jax import safetensors
from nvfp4_jax.models import gguf_tokenizer

_DTYPES = {'bfloat16': ml_dtypes.bfloat16, 'float32': np.float32}

# All that may stand under `llama.`. What is not read here could change the
# function of the model (rope.scaling.*, expert_count), so it is refused.
_KEYS = frozenset(
    {
        'attention.head_count',
        'attention.head_count_kv',
        'attention.key_length',
        'attention.layer_norm_rms_epsilon',
        'attention.value_length',
        'block_count',
        'context_length',
        'embedding_length',
        'feed_forward_length',
        'rope.dimension_count',
        'rope.freq_base',
        'vocab_size',
    }
)


def convert(
    src: pathlib.Path,
    dst: pathlib.Path,
    *,
    dtype: Literal['bfloat16', 'float32'] = 'bfloat16',
) -> None:
  """Writes a GGUF file as a Hugging Face checkpoint folder.

  The folder appears under its name when it is whole. Until then it is called
  `dst` + '.partial'; such a folder that a killed run left is removed.

  Args:
    src: the file, of the architecture 'llama' with a byte-level BPE tokenizer.
    dst: the folder to make.
    dtype: of all weights; bfloat16 is rounded to nearest even.

  Raises:
    FileExistsError: `dst` is there.
    ImportError: the extra `gguf` is not installed.
    files.CheckpointError: the file is malformed or of another kind, or a tensor
      is missing, unknown or of another shape than the metadata say.
    ValueError: the dtype is not one of the two.
  """
  if dtype not in _DTYPES:
    raise ValueError(f'dtype {dtype!r} is none of {sorted(_DTYPES)}.')
  if dst.exists():
    raise FileExistsError(f'{dst} is there already.')
  metadata, tensors = _read(src)
  config = _config(metadata, tied='output.weight' not in tensors)
  partial = dst.with_name(f'{dst.name}.partial')
  if partial.exists():
    shutil.rmtree(partial)
  partial.mkdir(parents=True)
  try:
    _write(partial, metadata, config, _weights(tensors, config), dtype)
    record = {
        'converted_from': {'name': src.name, 'sha256': files.sha256(src)},
        'dtype': dtype,
        'nvfp4_jax': nvfp4_jax.__version__,
    }
    files.write_manifest(partial, record)
    partial.rename(dst)
  except BaseException:
    shutil.rmtree(partial)
    raise


def dequantize(src: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the weights of a GGUF file, float32, by Hugging Face name.

  Raises:
    ImportError: the extra `gguf` is not installed.
    files.CheckpointError: as for `convert`, but the tokenizer is not read.
  """
  metadata, tensors = _read(src)
  config = _config(metadata, tied='output.weight' not in tensors)
  return {name: np.array(weight) for name, weight in _weights(tensors, config)}


def _import_gguf():
  try:
    import gguf
  except ImportError as error:
    raise ImportError(
        'Reading GGUF needs the package gguf: pip install nvfp4-jax[gguf]'
    ) from error
  return gguf


def _read(src):
  """Returns the metadata and the stored tensors of a file, by name."""
  gguf = _import_gguf()
  if not src.is_file():
    raise files.CheckpointError(f'{src} is not a file.')
  try:
    reader = gguf.GGUFReader(src)
    metadata = {name: f.contents() for name, f in reader.fields.items()}
  except Exception as error:  # A damaged file fails wherever the reader is.
    raise files.CheckpointError(f'{src} is not a GGUF file: {error}') from error
  architecture = metadata.get('general.architecture')
  if architecture != 'llama':
    raise files.CheckpointError(
        f"{src} has the architecture {architecture!r}; only 'llama' is known."
    )
  return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _write(folder, metadata, config, weights, dtype):
  """Writes all files but the manifest."""
  special_ids = gguf_tokenizer.special_ids(metadata)
  gguf_tokenizer.write(folder, metadata, config['max_position_embeddings'])
  # Readers of either generation: transformers 5 writes `dtype` and
  # `rope_parameters`, transformers 4 `torch_dtype` and `rope_theta`.
  written = {**config, **special_ids, 'dtype': dtype, 'torch_dtype': dtype}
  _write_json(folder / 'config.json', written)
  _write_json(folder / 'generation_config.json', special_ids)
  tensors = {name: w.astype(_DTYPES[dtype]) for name, w in weights}
  safetensors.write_file(folder / safetensors.SINGLE, tensors, {'format': 'pt'})


def _write_json(path, value):
  files.write_atomically(path, f'{json.dumps(value, indent=2)}\n')


def _config(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
  """Returns config.json but for dtype and special tokens."""
  unknown = sorted(
      name
      for name in metadata
      if name.startswith('llama.') and name[len('llama.') :] not in _KEYS
  )
  if unknown:
    raise files.CheckpointError(f'The GGUF file has {unknown}, not known here.')
  heads = _size(metadata, 'attention.head_count')
  hidden = _size(metadata, 'embedding_length')
  head_dim = _size(metadata, 'attention.key_length', hidden // heads)
  for name in ('attention.value_length', 'rope.dimension_count'):
    if _size(metadata, name, head_dim) != head_dim:
      raise files.CheckpointError(
          f'llama.{name} is {metadata[f"llama.{name}"]}, not {head_dim}, the'
          ' width of a head.'
      )
  theta = _real(metadata, 'rope.freq_base', 10000.0)
  return {
      'architectures': ['LlamaForCausalLM'],
      'model_type': 'llama',
      'attention_bias': False,
      'head_dim': head_dim,
      'hidden_act': 'silu',
      'hidden_size': hidden,
      'intermediate_size': _size(metadata, 'feed_forward_length'),
      'max_position_embeddings': _size(metadata, 'context_length'),
      'mlp_bias': False,
      'num_attention_heads': heads,
      'num_hidden_layers': _size(metadata, 'block_count'),
      'num_key_value_heads': _size(metadata, 'attention.head_count_kv', heads),
      'rms_norm_eps': _real(metadata, 'attention.layer_norm_rms_epsilon'),
      'rope_parameters': {'rope_theta': theta, 'rope_type': 'default'},
      'rope_theta': theta,
      'tie_word_embeddings': tied,
      'vocab_size': len(gguf_tokenizer.tokens(metadata)),
  }


def _size(metadata, name, default=None):
  value = metadata.get(f'llama.{name}', default)
  if type(value) is not int or value < 1:
    raise files.CheckpointError(f'llama.{name} is {value!r}, not a size.')
  return value


def _real(metadata, name, default=None):
  value = metadata.get(f'llama.{name}', default)
  if not isinstance(value, float) or not 0 < value < np.inf:
    raise files.CheckpointError(f'llama.{name} is {value!r}, not above 0.')
  # The file has a float32: 9.99999975e-06. This is the number meant, 1e-05.
  return float(str(np.float32(value)))


def _expected(config):
  """Returns the Hugging Face name and the shape of each tensor by GGUF name."""
  hidden, mlp = config['hidden_size'], config['intermediate_size']
  vocab = config['vocab_size']
  q, kv = (
      config[f'num_{kind}_heads'] * config['head_dim']
      for kind in ('attention', 'key_value')
  )
  layer: dict[str, tuple[str, tuple[int, ...]]] = {
      'attn_norm': ('input_layernorm', (hidden,)),
      'attn_q': ('self_attn.q_proj', (q, hidden)),
      'attn_k': ('self_attn.k_proj', (kv, hidden)),
      'attn_v': ('self_attn.v_proj', (kv, hidden)),
      'attn_output': ('self_attn.o_proj', (hidden, q)),
      'ffn_norm': ('post_attention_layernorm', (hidden,)),
      'ffn_gate': ('mlp.gate_proj', (mlp, hidden)),
      'ffn_up': ('mlp.up_proj', (mlp, hidden)),
      'ffn_down': ('mlp.down_proj', (hidden, mlp)),
  }
  expected: dict[str, tuple[str, tuple[int, ...]]] = {
      'token_embd': ('model.embed_tokens', (vocab, hidden)),
      'output_norm': ('model.norm', (hidden,)),
  }
  if not config['tie_word_embeddings']:
    expected['output'] = ('lm_head', (vocab, hidden))
  for i in range(config['num_hidden_layers']):
    for gguf_name, (name, shape) in layer.items():
      expected[f'blk.{i}.{gguf_name}'] = (f'model.layers.{i}.{name}', shape)
  return {
      f'{gguf_name}.weight': (f'{name}.weight', shape)
      for gguf_name, (name, shape) in expected.items()
  }


def _weights(tensors, config) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the name and float32 value of each weight; checks names first."""
  expected = _expected(config)
  for verb, names in (
      ('lacks', set(expected) - set(tensors)),
      ('has unknown', set(tensors) - set(expected)),
  ):
    if names:
      raise files.CheckpointError(f'The GGUF file {verb} {sorted(names)}.')
  for gguf_name, (name, shape) in expected.items():
    weight = _dequantize(tensors[gguf_name], shape)
    if name.endswith('q_proj.weight'):
      weight = _to_half_rotation(weight, config['num_attention_heads'])
    elif name.endswith('k_proj.weight'):
      weight = _to_half_rotation(weight, config['num_key_value_heads'])
    yield name, weight


def _dequantize(tensor, shape):
  stored = tuple(int(n) for n in reversed(tensor.shape))  # Fastest axis first.
  if stored != shape:
    raise files.CheckpointError(
        f'{tensor.name} has the shape {stored}, not {shape}.'
    )
  try:
    return _import_gguf().dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise files.CheckpointError(
        f'{tensor.name} has the type {tensor.tensor_type.name}, which cannot be'
        ' dequantized.'
    ) from error


def _to_half_rotation(weight, heads):
  """Returns the rows of each head, even ones first and then the odd ones."""
  pairs = weight.reshape(heads, -1, 2, weight.shape[1])
  return pairs.swapaxes(1, 2).reshape(weight.shape)
