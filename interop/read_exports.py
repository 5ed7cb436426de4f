"""Reads an exported checkpoint with other projects' tools.

  python interop/read_exports.py DIR OUT

DIR is a Hugging Face directory of quantized weights, with `tokens.npy` int32
`[B, T]` besides. Its `quantization_config` says which layout it has:

- compressed-tensors: nvfp4-pack-quantized, mxfp8-quantized, float-quantized or
  naive-quantized in blocks;
- ModelOpt: NVFP4, W4A16_NVFP4, MXFP8, FP8_PB_WO;
- `quant_method` fp8, as DeepSeek writes it.

For each tool that can read the layout, OUT receives

- `<tool>.npz`: module name -> dequantized weight, float32;
- `<tool>.json`: package, version, layout, the dtype that the tool computed in,
  and modules whose weight is not quantized though the configuration does not
  list them as such;
- `logits_<tool>.npz`: `tokens`, and `logits` float32 `[B, T, V]` of the model
  with those weights, by transformers in float32.

`transformers_load` is transformers reading DIR itself, for its logits only. It
does not know every layout and gets some wrong, so a failure is recorded as
`error` in its JSON file and is no failure of this program. For any other tool
it is one.
"""

import argparse
from collections.abc import Callable
import dataclasses
import fnmatch
import importlib.metadata
import json
import pathlib
import shutil
import tempfile
from typing import Any

from compressed_tensors.compressors.nvfp4 import helpers as ct_nvfp4
from compressed_tensors.entrypoints.convert import converters as ct_converters
from compressed_tensors.quantization import lifecycle as ct_lifecycle
from compressed_tensors.quantization import quant_config as ct_config
from compressed_tensors.quantization.utils import helpers as ct_helpers
from compressed_tensors.utils import match as ct_match
from llm_dequant import model as llm_dequant
from modelopt.torch.quantization import qtensor as modelopt
import numpy as np
from safetensors import torch as safetensors_torch
import torch
import torch_models
import transformers
from transformers.integrations import finegrained_fp8

NVFP4_BLOCK = 16
FP8_BLOCK = 128

# Endings of tensors that belong to a quantized weight.
_PARTS = (
    'weight_packed',
    'weight_scale',
    'weight_scale_2',
    'weight_scale_inv',
    'weight_global_scale',
    'input_scale',
    'input_global_scale',
)

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Export:
  """An exported checkpoint.

  Attributes:
    directory: where it lies.
    layout: `compressed-tensors <format>`, `modelopt <algorithm>` or `fp8`.
    config: the content of config.json.
    modules: tensors of each quantized module, by the end of their names.
    plain: all other tensors, by name.
  """

  directory: pathlib.Path
  layout: str
  config: dict[str, Any]
  modules: dict[str, Tensors]
  plain: Tensors


def _only(values: set[str], what: str) -> str:
  if len(values) != 1:
    raise ValueError(f'Expected one {what}, found {sorted(values)}.')
  return values.pop()


def _layout(directory: pathlib.Path, quantization: dict[str, Any]) -> str:
  """Returns the layout that config.json, and hf_quant_config.json, name."""
  method = quantization['quant_method']
  if method == 'compressed-tensors':
    groups = quantization['config_groups'].values()
    outer = quantization['format']
    inner = {group.get('format') or outer for group in groups}
    return f'{method} {_only(inner | {outer}, "format")}'
  if method == 'modelopt':
    file = directory / 'hf_quant_config.json'
    other = json.loads(file.read_text())['quantization']
    for key, other_key in [
        ('quant_algo', 'quant_algo'),
        ('ignore', 'exclude_modules'),
    ]:
      if quantization[key] != other[other_key]:
        raise ValueError(
            f'config.json has {key} {quantization[key]}, {file.name} has'
            f' {other_key} {other[other_key]}.'
        )
    # ModelOpt itself writes this one in lower case, and the others in upper.
    return f'{method} {quantization["quant_algo"].upper()}'
  if method == 'fp8':
    if quantization['weight_block_size'] != [FP8_BLOCK, FP8_BLOCK]:
      raise ValueError(f'Blocks of {quantization["weight_block_size"]}.')
    return method
  raise ValueError(f'Unknown quant_method {method}.')


def _read_tensors(directory: pathlib.Path) -> Tensors:
  """Returns the tensors of all shards."""
  index = directory / 'model.safetensors.index.json'
  if index.exists():
    weight_map = json.loads(index.read_text())['weight_map']
    files = sorted(set(weight_map.values()))
  else:
    weight_map, files = None, ['model.safetensors']
  tensors: Tensors = {}
  for file in files:
    found = safetensors_torch.load_file(directory / file)
    if weight_map is not None:
      listed = {name for name, where in weight_map.items() if where == file}
      if listed != set(found):
        raise ValueError(f'The index differs: {sorted(listed ^ set(found))}.')
    tensors |= found
  return tensors


def read(directory: pathlib.Path) -> Export:
  """Returns an exported checkpoint."""
  config = json.loads((directory / 'config.json').read_text())
  tensors = _read_tensors(directory)
  prefixes = {
      name.rpartition('.')[0]
      for name in tensors
      if name.endswith(('.weight_scale', '.weight_scale_inv'))
  }
  modules: dict[str, Tensors] = {prefix: {} for prefix in sorted(prefixes)}
  plain = {}
  for name, tensor in tensors.items():
    prefix, _, part = name.rpartition('.')
    if prefix in modules and part in ('weight', *_PARTS):
      modules[prefix][part] = tensor
    elif part in _PARTS:
      raise ValueError(f'{name} has no quantized weight.')
    else:
      plain[name] = tensor
  if not modules:
    raise ValueError(f'{directory} has no quantized weight.')
  return Export(
      directory=directory,
      layout=_layout(directory, config['quantization_config']),
      config=config,
      modules=modules,
      plain=plain,
  )


def check_lists(export: Export) -> list[str]:
  """Checks which modules the configuration leaves out.

  Returns:
    Modules with an unquantized matrix that are not left out. Embeddings and
    routers can be there: not all tools look for them.

  Raises:
    ValueError: a quantized module is left out; a server would read its codes
      as weights.
  """
  quantization = export.config['quantization_config']
  if export.layout == 'fp8':
    left_out = quantization.get('modules_to_not_convert') or []
    matches = lambda name, pattern: pattern in name
  elif export.layout.startswith('modelopt'):
    left_out = quantization['ignore']
    matches = fnmatch.fnmatchcase
  else:
    left_out = quantization['ignore']
    matches = ct_match.match_name
  listed = lambda name: any(matches(name, pattern) for pattern in left_out)
  wrong = [name for name in export.modules if listed(name)]
  if wrong:
    raise ValueError(f'Quantized and left out: {wrong}.')
  matrices = [
      name.removesuffix('.weight')
      for name, x in export.plain.items()
      if x.ndim > 1
  ]
  return [name for name in matrices if not listed(name)]


def _scheme_arguments(export: Export) -> Any:
  """Returns compressed-tensors' description of the weights."""
  config = ct_config.QuantizationConfig.model_validate(
      export.config['quantization_config']
  )
  # One group is all that `_layout` admits formats for, and all that we write.
  (group,) = config.config_groups.values()
  return group.weights


def _weights(export: Export, tensors: Tensors) -> Tensors:
  """Returns the weights of the quantized modules out of a whole model's."""
  return {name: tensors[f'{name}.weight'] for name in export.modules}


def _copies(export: Export) -> Tensors:
  """Returns the tensors as they lie on disk; the converters change them."""
  parts = {
      f'{name}.{part}': x
      for name, module in export.modules.items()
      for part, x in module.items()
  }
  return parts | export.plain


def compressed_tensors(export: Export) -> Tensors:
  """compressed-tensors converting the checkpoint, led by its configuration.

  NVFP4 and MXFP8 come out rounded to bfloat16: its decompressors compute so.
  """
  converter = ct_converters.CompressedTensorsDequantizer(
      export.directory, dtype=torch.float32
  )
  return _weights(export, converter.validate(_copies(export)))


def compressed_tensors_float32(export: Export) -> Tensors:
  """compressed-tensors' unpacking and dequantize function, in float32."""
  arguments = _scheme_arguments(export)
  found = {}
  for name, module in export.modules.items():
    scale = module['weight_scale']
    if 'weight_packed' in module:
      rows, half = module['weight_packed'].shape
      codes = ct_nvfp4.unpack_fp4_from_uint8(
          module['weight_packed'], rows, 2 * half, dtype=torch.float32
      )
    else:
      codes = module['weight'].float()
    if scale.dtype == torch.uint8:
      scale = torch.exp2(scale.float() - 127)
    shape = codes.shape
    if arguments.block_structure is not None:
      codes = ct_helpers.maybe_pad_tensor_for_block_quant(
          codes, tuple(arguments.block_structure)
      )
    found[name] = ct_lifecycle.dequantize(
        x_q=codes,
        scale=scale.float(),
        args=arguments,
        global_scale=module.get('weight_global_scale'),
        dtype=torch.float32,
    )[: shape[0], : shape[1]]
  return found


def compressed_tensors_fp8_block(export: Export) -> Tensors:
  """compressed-tensors' converter of DeepSeek's layout."""
  converter = ct_converters.FP8BlockDequantizer.from_pretrained(
      export.directory, dtype=torch.float32
  )
  return _weights(export, converter.validate(_copies(export)))


def compressed_tensors_from_modelopt(export: Export) -> Tensors:
  """compressed-tensors' converter of ModelOpt NVFP4, then in float32.

  It inverts the global scale, so values can differ in the last place.
  """
  names = list(export.modules)
  converter = ct_converters.ModelOptNvfp4Converter(targets=names)
  tensors = converter.validate(_copies(export))
  modules: dict[str, Tensors] = {name: {} for name in names}
  for name, x in tensors.items():
    prefix, _, part = name.rpartition('.')
    if prefix in modules:
      modules[prefix][part] = x
  config = converter.update_config(None).model_dump()
  config['quant_method'] = 'compressed-tensors'
  return compressed_tensors_float32(
      dataclasses.replace(
          export, modules=modules, config={'quantization_config': config}
      )
  )


def llm_dequant_convert(export: Export) -> Tensors:
  """llm-dequant: its check of every module, then its converter, in float32."""
  result = llm_dequant.verify(
      export.directory, sample=len(export.modules), log=lambda line: None
  )
  if result['failures']:
    raise ValueError(f'llm-dequant verify: {result["failures"]}')
  with tempfile.TemporaryDirectory() as directory:
    llm_dequant.convert(
        export.directory, directory, dtype='fp32', log=lambda line: None
    )
    return _weights(export, _read_tensors(pathlib.Path(directory)))


def modelopt_nvfp4(export: Export) -> Tensors:
  """ModelOpt's NVFP4 tensor."""
  found = {}
  for name, module in export.modules.items():
    packed = module['weight']
    shape = torch.Size((*packed.shape[:-1], 2 * packed.shape[-1]))
    tensor = modelopt.NVFP4QTensor(shape, torch.float32, packed)
    found[name] = tensor.dequantize(
        scale=module['weight_scale'],
        double_scale=module['weight_scale_2'],
        block_sizes={-1: NVFP4_BLOCK},
    )
  return found


def modelopt_mxfp8(export: Export) -> Tensors:
  """ModelOpt's MXFP8 tensor; compressed-tensors stores the same arrays."""
  found = {}
  for name, module in export.modules.items():
    codes = module['weight']
    tensor = modelopt.MXFP8QTensor(codes.shape, torch.float32, codes)
    found[name] = tensor.dequantize(scale=module['weight_scale'])
  return found


def modelopt_fp8_block(export: Export) -> Tensors:
  """ModelOpt's FP8 tensor in blocks, for all layouts of blocks."""
  found = {}
  for name, module in export.modules.items():
    codes = module['weight'].float()  # It cannot pad an FP8 tensor.
    tensor = modelopt.FP8QTensor(codes.shape, torch.float32, codes)
    scale = module.get('weight_scale', module.get('weight_scale_inv'))
    blocks = [-(-size // FP8_BLOCK) for size in codes.shape]
    found[name] = tensor.dequantize(
        scale=scale.float().reshape(blocks),
        block_sizes={-1: FP8_BLOCK, -2: FP8_BLOCK},
    )
  return found


def transformers_fp8(export: Export) -> Tensors:
  """transformers' dequantizer of DeepSeek's layout.

  It infers the block as rows / scale rows. Where the last block is partial
  that is another block, so this raises instead of returning wrong values.
  """
  dequantizer = finegrained_fp8.Fp8Dequantize(None)
  found = {}
  for name, module in export.modules.items():
    codes, scale = module['weight'], module['weight_scale_inv']
    for size in codes.shape:
      if size > FP8_BLOCK and size % FP8_BLOCK:
        raise ValueError(f'{name}: transformers misreads size {size}.')
    found[name] = dequantizer._dequantize_one(
        codes, scale, output_dtype=torch.float32
    )
  return found


@dataclasses.dataclass(frozen=True)
class Tool:
  """A way to read a layout.

  Attributes:
    package: distribution whose code it is.
    dtype: dtype that it computes or rounds in.
    dequantize: returns the weight of each quantized module.
  """

  package: str
  dtype: str
  dequantize: Callable[[Export], Tensors]


_CT = 'compressed-tensors'
_CT_FLOAT32 = Tool(_CT, 'float32', compressed_tensors_float32)
_MODELOPT = 'nvidia-modelopt'
_BLOCK = {
    # The decompressor takes the dtype of the scales.
    'compressed_tensors': Tool(_CT, "the scale's", compressed_tensors),
    'compressed_tensors_float32': _CT_FLOAT32,
    'modelopt': Tool(_MODELOPT, 'float32', modelopt_fp8_block),
}
_MODELOPT_NVFP4 = {
    'modelopt': Tool(_MODELOPT, 'float32', modelopt_nvfp4),
    'compressed_tensors_float32': Tool(
        _CT, 'float32', compressed_tensors_from_modelopt
    ),
}

TOOLS: dict[str, dict[str, Tool]] = {
    'compressed-tensors nvfp4-pack-quantized': {
        'compressed_tensors': Tool(_CT, 'bfloat16', compressed_tensors),
        'compressed_tensors_float32': _CT_FLOAT32,
        'llm_dequant': Tool('llm-dequant', 'float32', llm_dequant_convert),
    },
    'compressed-tensors mxfp8-quantized': {
        'compressed_tensors': Tool(_CT, 'bfloat16', compressed_tensors),
        'compressed_tensors_float32': _CT_FLOAT32,
        'modelopt': Tool(_MODELOPT, 'float32', modelopt_mxfp8),
    },
    'compressed-tensors float-quantized': _BLOCK,
    'compressed-tensors naive-quantized': _BLOCK,
    'modelopt NVFP4': _MODELOPT_NVFP4,
    'modelopt W4A16_NVFP4': _MODELOPT_NVFP4,
    'modelopt MXFP8': {
        'modelopt': Tool(_MODELOPT, 'float32', modelopt_mxfp8)
    },
    'modelopt FP8_PB_WO': {
        'modelopt': Tool(_MODELOPT, 'float32', modelopt_fp8_block)
    },
    'fp8': {
        'transformers': Tool('transformers', 'float32', transformers_fp8),
        'compressed_tensors': Tool(
            _CT, 'float32', compressed_tensors_fp8_block
        ),
        'modelopt': Tool(_MODELOPT, 'float32', modelopt_fp8_block),
    },
}


def logits(export: Export, weights: Tensors, tokens: np.ndarray) -> np.ndarray:
  """Returns logits `[B, T, V]` of the model with these weights, in float32."""
  tensors = {name: x.float() for name, x in export.plain.items()}
  for name, weight in weights.items():
    tensors[f'{name}.weight'] = weight.float().contiguous()
  config = {
      key: value
      for key, value in export.config.items()
      if key not in ('quantization_config', 'torch_dtype')
  }
  with tempfile.TemporaryDirectory() as name:
    directory = pathlib.Path(name)
    safetensors_torch.save_file(
        tensors, directory / 'model.safetensors', metadata={'format': 'pt'}
    )
    (directory / 'config.json').write_text(
        json.dumps(config | {'dtype': 'float32'})
    )
    return torch_models.logits(torch_models.load(directory), tokens)


def loaded_logits(directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
  """Returns the logits of the directory as transformers itself reads it."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation='eager'
  )
  if not hasattr(model, 'hf_quantizer'):
    raise ValueError('transformers ignored the quantization.')
  return torch_models.logits(model.eval(), tokens)


def _write_json(file: pathlib.Path, content: dict[str, Any]) -> None:
  file.write_text(json.dumps(content, indent=2) + '\n')


def main() -> None:
  """Reads DIR with all tools and prints how far they are from one another."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('directory', type=pathlib.Path)
  parser.add_argument('out', type=pathlib.Path)
  arguments = parser.parse_args()
  transformers.logging.disable_progress_bar()
  torch.use_deterministic_algorithms(True)

  export = read(arguments.directory)
  tokens = np.load(arguments.directory / 'tokens.npy')
  unlisted = check_lists(export)
  shutil.rmtree(arguments.out, ignore_errors=True)
  arguments.out.mkdir(parents=True)
  print(f'{export.layout}: {len(export.modules)} quantized modules')
  if unlisted:
    print(f'  not quantized and not listed: {unlisted}')

  first = None
  for name, tool in TOOLS[export.layout].items():
    found = tool.dequantize(export)
    arrays = {module: x.float().numpy() for module, x in found.items()}
    want = logits(export, found, tokens)
    np.savez(arguments.out / f'{name}.npz', **arrays)
    np.savez(
        arguments.out / f'logits_{name}.npz', tokens=tokens, logits=want
    )
    _write_json(
        arguments.out / f'{name}.json',
        {
            'package': tool.package,
            'version': importlib.metadata.version(tool.package),
            'transformers': transformers.__version__,
            'layout': export.layout,
            'dtype': tool.dtype,
            'modules': len(arrays),
            'not_quantized_and_not_listed': unlisted,
        },
    )
    first = first or (arrays, want)
    differ = sum(int((first[0][m] != x).sum()) for m, x in arrays.items())
    total = sum(x.size for x in arrays.values())
    print(
        f'  {name}: {differ} of {total} values and logits by'
        f' {np.abs(want - first[1]).max():.1e} unlike the first'
    )

  report = {'package': 'transformers', 'version': transformers.__version__}
  try:
    found = loaded_logits(arguments.directory, tokens)
  except Exception as error:  # What it cannot read is a finding.
    report['error'] = f'{type(error).__name__}: {error}'
    print(f'  transformers_load: {report["error"].splitlines()[0]}')
  else:
    np.savez(
        arguments.out / 'logits_transformers_load.npz',
        tokens=tokens,
        logits=found,
    )
    print(
        '  transformers_load: logits by'
        f' {np.abs(found - first[1]).max():.1e} unlike the first'
    )
  _write_json(arguments.out / 'transformers_load.json', report)


if __name__ == '__main__':
  main()
