"""Reads exported checkpoints with other projects' tools.

  python interop/read_exports.py OUT DIR [DIR ...]

DIR is a Hugging Face directory of quantized weights, with `tokens.npy` int32
`[B, T]` besides. Its `quantization_config` says which layout it has:

- compressed-tensors: nvfp4-pack-quantized, mxfp8-quantized, float-quantized or
  naive-quantized in blocks of 128x128;
- ModelOpt: NVFP4, W4A16_NVFP4, MXFP8, FP8_PB_WO;
- `quant_method` fp8, as DeepSeek writes it.

For each tool that can read the layout, OUT/<name of DIR> receives

- `<tool>.npz`: module name -> dequantized weight, widened to float32;
- `<tool>.json`: package, version, layout, and dtype of the tool's values;
- `logits_<tool>.npz`: `tokens`, and `logits` float32 `[B, T, V]` of the model
  with those weights, by transformers in float32.

`logits_transformers_load.npz` is of transformers reading DIR itself. It does
not know all layouts and gets some wrong, so a failure there is only printed.
A directory fails that contradicts itself: shards and index, config.json and
hf_quant_config.json, scheme and format, modules that are quantized and left
out. The others are read all the same; then the program exits with an error.
"""

import argparse
from collections.abc import Callable
import dataclasses
import fnmatch
import importlib.metadata
import json
import pathlib
import tempfile
import traceback
from typing import Any

from compressed_tensors import compressors
from compressed_tensors import quantization
from compressed_tensors.compressors import format as ct_format
from compressed_tensors.compressors import nvfp4 as ct_nvfp4
from compressed_tensors.entrypoints.convert import converters
from compressed_tensors.quantization import lifecycle
from compressed_tensors.utils import match
from llm_dequant import model as llm_model
from llm_dequant import nvfp4 as llm_nvfp4
from modelopt.torch.quantization import qtensor
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


def _layout(directory: pathlib.Path, config: dict[str, Any]) -> str:
  """Returns the layout that a `quantization_config` names."""
  method = config['quant_method']
  if method == 'compressed-tensors':
    groups = config['config_groups'].values()
    outer = config['format']
    inner = {group.get('format') or outer for group in groups}
    return f'{method} {_only(inner | {outer}, "format")}'
  if method == 'modelopt':
    file = directory / 'hf_quant_config.json'
    other = json.loads(file.read_text())['quantization']
    for key, other_key in [
        ('quant_algo', 'quant_algo'),
        ('ignore', 'exclude_modules'),
    ]:
      if config[key] != other[other_key]:
        raise ValueError(
            f'config.json has {key} {config[key]}, {file.name} has'
            f' {other_key} {other[other_key]}.'
        )
    # ModelOpt itself writes this one in lower case, and the others in upper.
    return f'{method} {config["quant_algo"].upper()}'
  if method == 'fp8':
    if config['weight_block_size'] != [FP8_BLOCK, FP8_BLOCK]:
      raise ValueError(f'Blocks of {config["weight_block_size"]}.')
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
    ValueError: a quantized module is left out; a server would take its codes
      for weights.
  """
  config = export.config['quantization_config']
  if export.layout == 'fp8':
    left_out = config.get('modules_to_not_convert') or []
    matches = lambda name, pattern: pattern in name
  else:
    left_out = config['ignore']
    modelopt = export.layout.startswith('modelopt')
    matches = fnmatch.fnmatchcase if modelopt else match.match_name
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


def _scheme(export: Export) -> quantization.QuantizationScheme:
  """Returns how compressed-tensors understands the configuration."""
  config = quantization.QuantizationConfig.model_validate(
      export.config['quantization_config']
  )
  (scheme,) = config.config_groups.values()  # All that we write.
  inferred = ct_format.infer_module_format(torch.nn.Linear, scheme)
  if inferred.value != config.format:
    raise ValueError(f'A scheme of {inferred.value} in {config.format}.')
  return scheme


def compressed_tensors(export: Export, module: Tensors) -> torch.Tensor:
  """compressed-tensors' decompressor of the format."""
  scheme = _scheme(export)
  form = export.layout.partition(' ')[2]
  compressor = compressors.BaseCompressor.get_value_from_registry(form)
  return compressor.decompress(module, scheme)['weight']


def _ct_float32(
    scheme: quantization.QuantizationScheme, module: Tensors
) -> torch.Tensor:
  """compressed-tensors' unpacking and dequantize function, in float32."""
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
  return lifecycle.dequantize(
      x_q=codes,
      scale=scale.float(),
      args=scheme.weights,
      global_scale=module.get('weight_global_scale'),
      dtype=torch.float32,
  )


def compressed_tensors_float32(export: Export, module: Tensors) -> torch.Tensor:
  """The same as `compressed_tensors` without a rounding to bfloat16."""
  return _ct_float32(_scheme(export), module)


def compressed_tensors_fp8_arrays(
    export: Export, module: Tensors
) -> torch.Tensor:
  """The same for ModelOpt's FP8 layouts, which store the same arrays."""
  preset = 'MXFP8' if export.layout.endswith('MXFP8') else 'FP8_BLOCK'
  scale = module['weight_scale']
  if scale.ndim == 4:  # [N / 128, 1, K / 128, 1]
    scale = scale[:, 0, :, 0]
  return _ct_float32(
      quantization.preset_name_to_scheme(preset, ['Linear']),
      module | {'weight_scale': scale},
  )


def compressed_tensors_modelopt_nvfp4(
    export: Export, module: Tensors
) -> torch.Tensor:
  """compressed-tensors' converter of ModelOpt NVFP4, then in float32.

  It inverts the global scale, so values can differ in the last place.
  """
  del export
  converter = converters.ModelOptNvfp4Converter(targets=['x'])
  found = converter.validate({f'x.{part}': x for part, x in module.items()})
  (scheme,) = converter.update_config(None).config_groups.values()
  return _ct_float32(
      scheme, {name.removeprefix('x.'): x for name, x in found.items()}
  )


def compressed_tensors_fp8(export: Export, module: Tensors) -> torch.Tensor:
  """compressed-tensors' converter of DeepSeek's layout."""
  del export
  converter = converters.FP8BlockDequantizer(targets=['x'], dtype=torch.float32)
  found = converter.validate({f'x.{part}': x for part, x in module.items()})
  return found['x.weight']


def llm_dequant_nvfp4(export: Export, module: Tensors) -> torch.Tensor:
  """llm-dequant, an implementation apart from compressed-tensors."""
  del export
  return llm_nvfp4.dequantize_nvfp4(
      module['weight_packed'],
      module['weight_scale'],
      module['weight_global_scale'],
      dtype=torch.float32,
  )


def modelopt_nvfp4(export: Export, module: Tensors) -> torch.Tensor:
  """ModelOpt's NVFP4 tensor."""
  del export
  packed = module['weight']
  shape = torch.Size((*packed.shape[:-1], 2 * packed.shape[-1]))
  return qtensor.NVFP4QTensor(shape, torch.float32, packed).dequantize(
      scale=module['weight_scale'],
      double_scale=module['weight_scale_2'],
      block_sizes={-1: NVFP4_BLOCK},
  )


def modelopt_mxfp8(export: Export, module: Tensors) -> torch.Tensor:
  """ModelOpt's MXFP8 tensor; compressed-tensors stores the same arrays."""
  del export
  codes = module['weight']
  return qtensor.MXFP8QTensor(codes.shape, torch.float32, codes).dequantize(
      scale=module['weight_scale']
  )


def modelopt_fp8_block(export: Export, module: Tensors) -> torch.Tensor:
  """ModelOpt's FP8 tensor in blocks, for every layout of blocks."""
  codes = module['weight'].float()  # It cannot pad an FP8 tensor.
  blocks = [-(-size // FP8_BLOCK) for size in codes.shape]
  name = 'weight_scale_inv' if export.layout == 'fp8' else 'weight_scale'
  if export.layout.startswith('modelopt'):
    grid = [blocks[0], 1, blocks[1], 1]
  else:
    grid = blocks
  if list(module[name].shape) != grid:
    raise ValueError(f'Scales {list(module[name].shape)}, not {grid}.')
  return qtensor.FP8QTensor(codes.shape, torch.float32, codes).dequantize(
      scale=module[name].float().reshape(blocks),
      block_sizes={-1: FP8_BLOCK, -2: FP8_BLOCK},
  )


def transformers_fp8(export: Export, module: Tensors) -> torch.Tensor:
  """The dequantizer of DeepSeek's layout in transformers.

  It takes rows / scale rows for the block, which is another one where the last
  is partial. Raises there instead of returning wrong values.
  """
  del export
  codes = module['weight']
  for size in codes.shape:
    if size > FP8_BLOCK and size % FP8_BLOCK:
      raise NotImplementedError(f'transformers misreads a size of {size}.')
  return finegrained_fp8.Fp8Dequantize(None)._dequantize_one(
      codes, module['weight_scale_inv'], output_dtype=torch.float32
  )


@dataclasses.dataclass(frozen=True)
class Tool:
  """A way to read a layout.

  Attributes:
    package: distribution whose code it is.
    dequantize: returns a module's weight, in the dtype that the tool gives.
  """

  package: str
  dequantize: Callable[[Export, Tensors], torch.Tensor]


_CT = 'compressed-tensors'
_MODELOPT = 'nvidia-modelopt'
_CT_TOOLS = {
    'compressed_tensors_float32': Tool(_CT, compressed_tensors_float32),
    'compressed_tensors': Tool(_CT, compressed_tensors),
}
_CT_BLOCK = _CT_TOOLS | {'modelopt': Tool(_MODELOPT, modelopt_fp8_block)}
_CT_ARRAYS = {
    'compressed_tensors_float32': Tool(_CT, compressed_tensors_fp8_arrays)
}
_MODELOPT_NVFP4 = {
    'modelopt': Tool(_MODELOPT, modelopt_nvfp4),
    'compressed_tensors_float32': Tool(_CT, compressed_tensors_modelopt_nvfp4),
}

TOOLS: dict[str, dict[str, Tool]] = {
    'compressed-tensors nvfp4-pack-quantized': _CT_TOOLS
    | {'llm_dequant': Tool('llm-dequant', llm_dequant_nvfp4)},
    'compressed-tensors mxfp8-quantized': _CT_TOOLS
    | {'modelopt': Tool(_MODELOPT, modelopt_mxfp8)},
    'compressed-tensors float-quantized': _CT_BLOCK,
    'compressed-tensors naive-quantized': _CT_BLOCK,
    'modelopt NVFP4': _MODELOPT_NVFP4,
    'modelopt W4A16_NVFP4': _MODELOPT_NVFP4,
    'modelopt MXFP8': {'modelopt': Tool(_MODELOPT, modelopt_mxfp8)}
    | _CT_ARRAYS,
    'modelopt FP8_PB_WO': {'modelopt': Tool(_MODELOPT, modelopt_fp8_block)}
    | _CT_ARRAYS,
    'fp8': {
        'compressed_tensors': Tool(_CT, compressed_tensors_fp8),
        'modelopt': Tool(_MODELOPT, modelopt_fp8_block),
        'transformers': Tool('transformers', transformers_fp8),
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


def loaded_logits(export: Export, tokens: np.ndarray) -> np.ndarray:
  """Returns the logits of the directory as transformers itself reads it."""
  if export.layout == 'fp8':
    config = transformers.FineGrainedFP8Config(dequantize=True)
  elif export.layout.startswith('modelopt'):
    raise NotImplementedError('transformers has no reader of ModelOpt.')
  else:
    config = transformers.CompressedTensorsConfig(dequantize=True)
  model = transformers.AutoModelForCausalLM.from_pretrained(
      export.directory,
      dtype=torch.float32,
      attn_implementation='eager',
      quantization_config=config,
  )
  return torch_models.logits(model.eval(), tokens)


def run_tool(
    name: str,
    tool: Tool,
    export: Export,
    tokens: np.ndarray,
    out: pathlib.Path,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Writes a tool's weights and logits, and returns them."""
  found = {
      module: tool.dequantize(export, dict(tensors))
      for module, tensors in export.modules.items()
  }
  arrays = {module: x.float().numpy() for module, x in found.items()}
  values = logits(export, found, tokens)
  np.savez(out / f'{name}.npz', **arrays)
  np.savez(out / f'logits_{name}.npz', tokens=tokens, logits=values)
  report = {
      'package': tool.package,
      'version': importlib.metadata.version(tool.package),
      'layout': export.layout,
      'dtypes': sorted({str(x.dtype) for x in found.values()}),
      'modules': len(found),
      'logits_by': f'transformers {transformers.__version__}',
  }
  (out / f'{name}.json').write_text(json.dumps(report, indent=2) + '\n')
  return arrays, values


def read_directory(directory: pathlib.Path, out: pathlib.Path) -> None:
  """Reads a directory with all tools and prints how far they are apart."""
  export = read(directory)
  tokens = np.load(directory / 'tokens.npy')
  print(f'{export.layout}: {len(export.modules)} quantized modules')
  unlisted = check_lists(export)
  if unlisted:
    print(f'  neither quantized nor left out: {unlisted}')
  tools = TOOLS[export.layout]
  out.mkdir(parents=True, exist_ok=True)
  if any(out.iterdir()):
    raise ValueError(f'{out} is not empty; it may hold results of others.')
  if 'llm_dequant' in tools:
    # Packs each module again and compares bytes.
    result = llm_model.verify(
        export.directory, sample=len(export.modules), log=lambda line: None
    )
    if result['failures']:
      raise ValueError(f'llm-dequant verify: {result["failures"]}')

  results = {}
  for name, tool in tools.items():
    try:
      results[name] = run_tool(name, tool, export, tokens, out)
    except NotImplementedError as error:
      print(f'  {name}: {error}')
      continue
    arrays, values = results[name]
    first_arrays, first_values = next(iter(results.values()))
    differ = sum(int((first_arrays[m] != x).sum()) for m, x in arrays.items())
    print(
        f'  {name}: {differ} of {sum(x.size for x in arrays.values())} values'
        f' and logits by {np.abs(values - first_values).max():.1e} unlike the'
        ' first'
    )
  try:
    loaded = loaded_logits(export, tokens)
  except Exception as error:  # What it cannot read is a finding.
    print(f'  transformers_load: {type(error).__name__}: {error}')
  else:
    np.savez(out / 'logits_transformers_load.npz', tokens=tokens, logits=loaded)
    print(
        '  transformers_load: logits by'
        f' {np.abs(loaded - first_values).max():.1e} unlike the first'
    )


def main() -> None:
  """Reads the directories that the command line names."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('directory', type=pathlib.Path, nargs='+')
  arguments = parser.parse_args()
  directories = {path.resolve().name: path for path in arguments.directory}
  if len(directories) < len(arguments.directory):
    parser.error('Two directories have one name.')
  transformers.logging.disable_progress_bar()
  torch.use_deterministic_algorithms(True)
  failed = []
  for i, (name, directory) in enumerate(directories.items(), 1):
    print(f'[{i}/{len(directories)}] {name}', flush=True)
    try:
      read_directory(directory, arguments.out / name)
    except Exception:  # The others are read before it counts.
      traceback.print_exc()
      failed.append(name)
  if failed:
    raise SystemExit(f'Failed: {", ".join(failed)}.')


if __name__ == '__main__':
  main()
