"""The description of a folder's quantized weights: read, and written.

It stands in `quantization_config` of config.json and, in the 'modelopt' layout,
once more in hf_quant_config.json. One folder has one format; modules that are
not quantized are listed by name or pattern.
"""

from collections.abc import Iterable, Mapping
import pathlib
import re
from typing import Any

from nvfp4_jax import files
from nvfp4_jax import formats
from nvfp4_jax import matmul
from nvfp4_jax.models import layouts

_MODELOPT = {
    'NVFP4': 'nvfp4',
    'W4A16_NVFP4': 'nvfp4',
    'MXFP8': 'mxfp8',
    'FP8_PB_WO': 'fp8_block',
}
_COMPRESSED = {
    'nvfp4-pack-quantized': 'nvfp4',
    'mxfp8-quantized': 'mxfp8',
    'float-quantized': 'fp8_block',
}
_HF_QUANT = 'hf_quant_config.json'
_BLOCK = formats.FP8_BLOCK.block
_EXPERTS = re.compile(r'(model\.layers\.\d+\.mlp\.experts)\.\d+\.\w+')


def read(
    folder: pathlib.Path, raw_config: Mapping[str, Any]
) -> layouts.Quantization | None:
  """Returns what a folder's configuration says; None if nothing is quantized.

  It stands in `quantization_config` of config.json, in hf_quant_config.json, or
  in both, which must agree.

  Raises:
    files.CheckpointError: what it says is not supported.
  """
  said = []
  if raw_config.get('quantization_config') is not None:
    found = raw_config['quantization_config']
    said.append(_read_one(found, f'quantization_config in {folder}'))
  if files.exists(folder, _HF_QUANT):
    found = files.read_json(folder, _HF_QUANT).get('quantization')
    if isinstance(found, dict):
      found = {'quant_method': 'modelopt', **found}
    said.append(_read_one(found, f'{_HF_QUANT} in {folder}'))
  if len(set(said)) > 1:
    raise files.CheckpointError(
        f'{folder}: config.json says {said[0]}, {_HF_QUANT} {said[1]}.'
    )
  return said[0] if said else None


def _read_one(found, where):
  if not isinstance(found, dict):
    raise files.CheckpointError(f'{where} is not an object.')
  method = found.get('quant_method')
  if method == 'modelopt':
    return layouts.Quantization('modelopt', _modelopt_format(found, where))
  if method == 'compressed-tensors':
    return layouts.Quantization(
        'compressed_tensors', _compressed_format(found, where)
    )
  if method == 'fp8':
    _check_blocks(found.get('weight_block_size'), where)
    return layouts.Quantization('deepseek', 'fp8_block')
  raise files.CheckpointError(
      f"{where}: quant_method {method!r:.80} is not one of 'modelopt',"
      " 'compressed-tensors', 'fp8'."
  )


_COMPRESSED_MXFP8 = {
    'num_bits': 8,
    'strategy': 'group',
    'group_size': formats.MXFP8.block,
    'scale_dtype': 'torch.uint8',
}


def describe(
    layout: layouts.Layout,
    precision: matmul.MatmulPrecision,
    unquantized: Iterable[str],
    producer: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, Any] | None]:
  """Returns `quantization_config`, and hf_quant_config.json or None.

  Per-token scales of nvfp4 activations have no field in any layout. 'modelopt'
  says them by an input scale of 1; 'compressed_tensors' describes the weights
  only.

  Args:
    layout: the layout.
    precision: that of all quantized linears.
    unquantized: names of all linear modules that are not quantized.
    producer: name and version of the writer.

  Raises:
    ValueError: the layout cannot say this.
  """
  name = precision.rhs.format
  if name not in layouts.formats_of(layout):
    raise ValueError(
        f'Layout {layout!r} has no {name!r}, only {layouts.formats_of(layout)}.'
    )
  _check_activations(layout, precision)
  is_glob = layout == 'modelopt'
  ignore = sorted({_without_expert(m, is_glob) for m in unquantized})
  if layout == 'compressed_tensors':
    return _compressed_config(precision, ignore), None
  if layout == 'deepseek':
    return {
        'quant_method': 'fp8',
        'activation_scheme': 'dynamic',
        'weight_block_size': [_BLOCK, _BLOCK],
        'fmt': 'e4m3',
        'modules_to_not_convert': sorted(set(unquantized)),
    }, None
  return _modelopt_configs(precision, ignore, producer)


def _check_activations(layout, precision):
  """Raises if a layout cannot say how activations are quantized."""
  lhs, rhs = precision.lhs, precision.rhs
  if lhs is None:
    if layout == 'modelopt' and rhs.format == 'mxfp8':
      raise ValueError("Layout 'modelopt' has no mxfp8 of weights only.")
    return
  pair = (rhs.format, lhs.format)
  mixed = layout == 'compressed_tensors' and pair == ('nvfp4', 'mxfp8')
  if lhs.format != rhs.format and not mixed:
    raise ValueError(
        f'Layout {layout!r} has no {rhs.format} weights with {lhs.format}'
        ' activations.'
    )
  if layout == 'modelopt' and lhs.outer == 'tensor':
    raise ValueError(
        "Layout 'modelopt' stores a fixed scale of nvfp4 activations, found by"
        ' calibration, or says that each token has its own. This precision'
        " policy has neither: its activations' scale is that of the batch."
    )


def _without_expert(module, is_glob):
  """Returns the pattern of all experts of a layer for one of their modules."""
  expert = _EXPERTS.fullmatch(module)
  if expert is None:
    return module
  return f'{expert[1]}*' if is_glob else f're:{re.escape(expert[1])}\\..*'


def _compressed_config(precision, ignore):
  common = {'type': 'float', 'symmetric': True}
  name = precision.rhs.format
  if name == 'nvfp4':
    weights = {
        'num_bits': 4,
        'strategy': 'tensor_group',
        'group_size': formats.NVFP4.block,
        'scale_dtype': 'torch.float8_e4m3fn',
    }
    # Scales per token have no field, MXFP8 activations have one.
    is_mxfp8 = precision.lhs is not None and precision.lhs.format == 'mxfp8'
    activations = _COMPRESSED_MXFP8 if is_mxfp8 else None
  elif name == 'mxfp8':
    weights = activations = _COMPRESSED_MXFP8
  else:
    weights = {
        'num_bits': 8,
        'strategy': 'block',
        'group_size': None,
        'block_structure': [_BLOCK, _BLOCK],
    }
    activations = {'num_bits': 8, 'strategy': 'group', 'group_size': _BLOCK}
  if precision.lhs is None:
    activations = None
  file_format = {v: k for k, v in _COMPRESSED.items()}[name]
  group = {
      'format': file_format,
      'targets': ['Linear'],
      'weights': weights | common | {'dynamic': False},
      'input_activations': activations
      and activations | common | {'dynamic': True},
      'output_activations': None,
  }
  return {
      'quant_method': 'compressed-tensors',
      'format': file_format,
      'quantization_status': 'compressed',
      'config_groups': {'group_0': group},
      'ignore': ignore,
      'kv_cache_scheme': None,
      'global_compression_ratio': None,
  }


def _modelopt_configs(precision, ignore, producer):
  weight_only = precision.lhs is None
  name = precision.rhs.format
  algorithm = {
      'nvfp4': 'W4A16_NVFP4' if weight_only else 'NVFP4',
      'mxfp8': 'MXFP8',
      'fp8_block': 'fp8_pb_wo',  # Some readers know this spelling only.
  }[name]
  config = {
      'quant_method': 'modelopt',
      'quant_algo': algorithm,
      'ignore': ignore,
      'producer': dict(producer),
  }
  quantization = {
      'quant_algo': algorithm,
      'kv_cache_quant_algo': None,
      'exclude_modules': ignore,
  }
  if name != 'fp8_block':
    quantization['group_size'] = formats.FORMATS[name].block
  if name == 'nvfp4':
    four_bits = {
        'num_bits': 4,
        'type': 'float',
        'dynamic': False,
        'group_size': formats.NVFP4.block,
    }
    group = {'weights': four_bits, 'targets': ['Linear']}
    if not weight_only:
      group['input_activations'] = four_bits
    config['config_groups'] = {'group_0': group}
  return config, {'producer': dict(producer), 'quantization': quantization}


def _modelopt_format(found, where):
  algorithm = found.get('quant_algo')
  name = _MODELOPT.get(algorithm.upper() if isinstance(algorithm, str) else '')
  if name is None:
    raise files.CheckpointError(
        f'{where}: quant_algo {algorithm!r:.80} is not one of'
        f' {", ".join(_MODELOPT)}.'
    )
  return name


def _compressed_format(found, where):
  known = found.get('format')
  name = _COMPRESSED.get(known if isinstance(known, str) else '')
  if name is None:
    raise files.CheckpointError(
        f'{where}: format {known!r:.80} is not one of {", ".join(_COMPRESSED)}.'
    )
  groups = found.get('config_groups')
  if not isinstance(groups, dict) or len(groups) != 1:
    raise files.CheckpointError(
        f'{where}: config_groups must be one group, not {groups!r:.80}.'
    )
  group = next(iter(groups.values()))
  weights = group.get('weights') if isinstance(group, dict) else None
  if not isinstance(weights, dict):
    raise files.CheckpointError(f'{where}: the group does not say its weights.')
  if name == 'fp8_block':
    _check_blocks(weights.get('block_structure'), where)
    return name
  bits, block = weights.get('num_bits'), weights.get('group_size')
  wanted = (4 if name == 'nvfp4' else 8, formats.FORMATS[name].block)
  if (bits, block) != wanted:
    raise files.CheckpointError(
        f'{where}: {known} has num_bits and group_size {wanted}, not'
        f' {(bits, block)!r:.80}.'
    )
  return name


def _check_blocks(blocks, where):
  if blocks != [_BLOCK, _BLOCK]:
    raise files.CheckpointError(
        f'{where}: blocks of {blocks!r:.80} are not supported, only those of'
        f' {[_BLOCK, _BLOCK]}.'
    )
