"""Hugging Face folders, read as parameter trees.

This is the only module that knows the names of tensors in such a folder. All
names, shapes and dtypes are checked against the configuration before a tensor
is read: one that is missing, extra or misshapen is an error that names it.

A quantized weight becomes a QTensor of the bytes on disk. Experts, one by one
or fused to three axes, are stacked to `[E, N, K]`.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import pathlib
import re
from typing import Any

import jax
import ml_dtypes
import numpy as np

from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import safetensors
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import hf_config
from nvfp4_jax.models import layouts
from nvfp4_jax.models import quantization_config
from nvfp4_jax.models import transformer

_PLAIN = tuple(
    np.dtype(d) for d in (ml_dtypes.bfloat16, np.float32, np.float16)
)
_EXPERTS = 'mlp.experts.'
# What old checkpoints hold though it follows from the configuration.
_DERIVED = re.compile(r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq')
_LAYER = re.compile(r'model\.layers\.(0|[1-9][0-9]{0,9})\.')


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A folder whose tensors are known to be those of its configuration.

  Attributes:
    folder: the folder.
    config: the model.
    raw_config: the object of config.json.
    tensors: where each tensor lies, by name.
    quantization: how its quantized weights are stored; None if there are none.
  """

  folder: pathlib.Path
  config: model_config.ModelConfig
  raw_config: Mapping[str, Any]
  tensors: Mapping[str, safetensors.TensorInfo]
  quantization: layouts.Quantization | None


def open_folder(
    folder: pathlib.Path,
    *,
    dtype: model_config.Dtype = 'bfloat16',
    verify: bool = True,
) -> Checkpoint:
  """Returns the Checkpoint of a folder; no tensor is read yet.

  Args:
    folder: with config.json and safetensors.
    dtype: of the model's activations, bfloat16 or float32.
    verify: compare all files with the sizes and digests of the manifest, if
      there is one.

  Raises:
    files.CheckpointError: it is not a whole checkpoint of a supported family.
  """
  raw = files.read_json(folder, 'config.json')
  where = str(folder / 'config.json')
  config = hf_config.from_hf(raw, dtype=dtype, where=where)
  if verify:
    files.check_manifest(folder)
  checkpoint = Checkpoint(
      folder=folder,
      config=config,
      raw_config=raw,
      tensors=safetensors.read_index(folder),
      quantization=quantization_config.read(folder, raw),
  )
  _check(checkpoint)
  return checkpoint


def load(
    folder: pathlib.Path,
    *,
    dtype: model_config.Dtype = 'bfloat16',
    verify: bool = True,
) -> tuple[model_config.ModelConfig, policy.ParamTree]:
  """Returns the model of a folder and its per-layer parameter tree.

  Arrays are numpy's, of the dtypes on disk but for float16, which is widened to
  float32, as is an expert beside wider ones; quantized weights are QTensors.
  `policy.dequantize_params` makes float32 masters of it, `transformer.stack`
  segments.

  Raises:
    files.CheckpointError: see `open_folder`.
  """
  checkpoint = open_folder(folder, dtype=dtype, verify=verify)
  params = read_top(checkpoint)
  params['layers'] = [
      read_layer(checkpoint, i) for i in range(checkpoint.config.num_layers)
  ]
  return checkpoint.config, params


def read_top(checkpoint: Checkpoint) -> policy.ParamTree:
  """Returns the parameters outside of the layers."""
  specs = transformer.param_specs(checkpoint.config)
  return {
      name: _read(checkpoint, module_names(checkpoint.config, name)[0])
      for name in specs
      if name != 'layers'
  }


def read_layer(
    checkpoint: Checkpoint,
    layer: int,
    names: tuple[str, ...] | None = None,
    experts: slice = slice(None),
) -> policy.ParamTree:
  """Returns parameters of one layer.

  Args:
    checkpoint: the checkpoint.
    layer: index of the layer.
    names: which; None for all.
    experts: which of its experts, where a parameter is of experts.
  """
  specs = transformer.layer_specs(checkpoint.config, layer)
  result = {}
  for name in specs if names is None else names:
    modules = module_names(checkpoint.config, f'layers.{layer}.{name}')
    if name.startswith(_EXPERTS):
      parts = [_read(checkpoint, module) for module in modules[experts]]
      result[name] = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    else:
      result[name] = _read(checkpoint, modules[0])
  return result


def module_names(config: model_config.ModelConfig, path: str) -> list[str]:
  """Returns the module, or each expert's, that a parameter path stands for."""
  if path == 'lm_head':
    return [path]
  head, found, projection = path.partition(_EXPERTS)
  if not found:
    return [f'model.{path}']
  prefix = f'model.{head}{_EXPERTS}'
  return [f'{prefix}{e}.{projection}' for e in range(config.num_experts)]


def tensor_name(module: str) -> str:
  """Returns the tensor of a module that is not quantized."""
  is_tensor = module.endswith(('.bias', '.e_score_correction_bias'))
  return module if is_tensor else f'{module}.weight'


def to_tensors(
    config: model_config.ModelConfig,
    path: str,
    param: Any,
    encode: Callable[[str, qtensor.QTensor], Mapping[str, np.ndarray]],
    first_expert: int = 0,
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the tensors, by name, that a parameter is written as.

  Args:
    config: the model.
    path: the parameter's.
    param: array or QTensor; of experts, any part of the stack.
    encode: makes tensors by suffix of a module's quantized weight.
    first_expert: index of the first expert in `param`.
  """
  modules = module_names(config, path)
  if _EXPERTS in path:
    modules = modules[first_expert:]
    count = jax.tree.leaves(param)[0].shape[0]
    parts = [jax.tree.map(lambda x, e=e: x[e], param) for e in range(count)]
  else:
    parts = [param]
  for module, part in zip(modules, parts):  # noqa: B905, a part of the experts
    if isinstance(part, qtensor.QTensor):
      for suffix, tensor in encode(module, part).items():
        yield f'{module}.{suffix}', tensor
    else:
      yield tensor_name(module), np.asarray(part)


def _read(checkpoint, module):
  """Returns the array or the QTensor of a module."""
  fused = _fused_source(checkpoint.tensors, module)
  if fused is not None:
    name, expert, part = fused
    both = _read_plain(_at(checkpoint.tensors[name], expert))
    return both if part is None else np.split(both, 2)[part]
  quantization = checkpoint.quantization
  if not _is_quantized(checkpoint, module):
    return _read_plain(checkpoint.tensors[tensor_name(module)])
  assert quantization is not None
  prefix = f'{module}.'
  parts = {
      name.removeprefix(prefix): safetensors.read_tensor(info)
      for name, info in _of_module(checkpoint, module).items()
  }
  return layouts.decode(parts, quantization.layout, quantization.format, module)


def _read_plain(info):
  tensor = safetensors.read_tensor(info)
  if tensor.dtype != np.float16:
    return tensor
  with np.errstate(invalid='ignore'):  # which some NaNs raise
    return tensor.astype(np.float32)  # exact, as bfloat16 would not be


def _of_module(checkpoint, module):
  suffixes = layouts.suffixes(checkpoint.quantization)
  names = [f'{module}.{suffix}' for suffix in suffixes]
  return {n: checkpoint.tensors[n] for n in names if n in checkpoint.tensors}


def _is_quantized(checkpoint, module):
  """Whether a module's weight is stored in the quantized format."""
  if checkpoint.quantization is None:
    return False
  name = f'{module}.{layouts.suffixes(checkpoint.quantization)[0]}'
  info = checkpoint.tensors.get(name)
  return info is not None and info.dtype not in _PLAIN


def _fused_source(tensors, module):
  """Returns tensor, expert and half (None: all) of an expert's weight.

  None if the weight has a tensor of its own. gate_up_proj `[E, 2 I, D]` holds
  the gate in its first half.
  """
  head, found, tail = module.partition(_EXPERTS)
  if not found:
    return None
  expert, _, projection = tail.partition('.')
  half = {'gate_proj': 0, 'up_proj': 1}.get(projection)
  name = f'{head}{_EXPERTS}{projection if half is None else "gate_up_proj"}'
  return (name, int(expert), half) if name in tensors else None


def _at(info, index):
  """Returns where index `index` of a tensor's first axis lies."""
  size = (info.end - info.start) // info.shape[0]
  start = info.start + index * size
  return dataclasses.replace(
      info, shape=info.shape[1:], start=start, end=start + size
  )


def _check(checkpoint):
  """Raises unless the tensors are just those that the configuration needs."""
  config, tensors = checkpoint.config, checkpoint.tensors
  if config.num_layers > len(tensors):  # Far too many to list what they need.
    raise files.CheckpointError(
        f'{checkpoint.folder}: num_hidden_layers is {config.num_layers}, but'
        f' there are only {len(tensors)} tensors.'
    )
  unused = set(tensors)
  for path, spec in transformer.param_specs_by_path(config).items():
    modules = module_names(config, path)
    for module in modules:
      unused -= _check_module(checkpoint, module, spec.shape)
    _check_alike(checkpoint, modules)
  for name in sorted(unused):
    if not _is_ignored(checkpoint, name):
      raise files.CheckpointError(
          f'{checkpoint.folder}: tensor {name!r} has no place in a'
          f' {checkpoint.raw_config["model_type"]} of this configuration.'
      )


def _check_alike(checkpoint, modules):
  """Raises if some experts of a parameter are quantized and others are not."""
  first, *others = modules
  is_quantized = _is_quantized(checkpoint, first)
  for module in others:
    if _is_quantized(checkpoint, module) != is_quantized:
      raise files.CheckpointError(
          f'{checkpoint.folder}: of {first} and {module} only one is quantized.'
      )


def _check_module(checkpoint, module, shape):
  """Checks the tensors of a module and returns their names."""
  is_expert = _EXPERTS in module
  shape = shape[-2:] if is_expert else shape
  fused = _fused_source(checkpoint.tensors, module)
  if fused is not None:
    name, _, half = fused
    rows = shape[0] if half is None else 2 * shape[0]
    experts = checkpoint.config.num_experts
    stored = layouts.Stored(_PLAIN, (experts, rows, shape[1]))
    _check_tensor(checkpoint, name, stored)
    return {name}
  if len(shape) != 2 or not _is_quantized(checkpoint, module):
    name = tensor_name(module)
    _check_tensor(checkpoint, name, layouts.Stored(_PLAIN, shape))
    return {name}
  quantization = checkpoint.quantization
  try:
    needed = layouts.stored_tensors(
        quantization.layout, quantization.format, shape
    )
  except ValueError as error:
    raise files.CheckpointError(
        f'{checkpoint.folder}: {module}: {error}'
    ) from error
  names = set()
  for suffix, stored in needed.items():
    name = f'{module}.{suffix}'
    if name in checkpoint.tensors or not stored.optional:
      _check_tensor(checkpoint, name, stored)
      names.add(name)
  return names


def _check_tensor(checkpoint, name, stored):
  info = checkpoint.tensors.get(name)
  if info is None:
    raise files.CheckpointError(
        f'{checkpoint.folder}: tensor {name!r} is missing.'
    )
  if info.dtype not in stored.dtypes:
    raise files.CheckpointError(
        f'{checkpoint.folder}: tensor {name!r} is {info.dtype}, not'
        f' {" or ".join(map(str, stored.dtypes))}.'
    )
  if info.shape != stored.shape:
    raise files.CheckpointError(
        f'{checkpoint.folder}: tensor {name!r} has the shape {info.shape}, not'
        f' {stored.shape}.'
    )


def _is_ignored(checkpoint, name):
  """Whether a tensor may be there though nothing needs it."""
  if _DERIVED.fullmatch(name):
    return True
  layer = _LAYER.match(name)
  if layer and int(layer[1]) >= checkpoint.config.num_layers:
    # Layers that predict further tokens follow the decoder's own.
    extra = hf_config.count_extra_layers(
        checkpoint.raw_config, where=str(checkpoint.folder / 'config.json')
    )
    return int(layer[1]) < checkpoint.config.num_layers + extra
  if name == 'lm_head.weight' and checkpoint.config.tie_embeddings:
    head, table = (
        safetensors.read_tensor(checkpoint.tensors[n])
        for n in (name, 'model.embed_tokens.weight')
    )
    return head.shape == table.shape and head.tobytes() == table.tobytes()
  return False
