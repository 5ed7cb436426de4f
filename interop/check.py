"""Proves that this project and other projects' tools read the same values.

  python interop/check.py --python PYTHON3.11 [--out runs/interop]

PYTHON3.11 has what `requirements.txt` names; this program itself runs in the
project's environment, without torch. `make interop` makes both. In turn:

1. `torch_models.py` makes checkpoints; they are those in tests/golden/hf, byte
   for byte on the kind of CPU where those were made.
2. Our float32 logits of each are those of transformers.
3. Models are converted by several recipes to each layout that holds them, also
   from quantized folders.
4. `read_exports.py` reads the results. Each tool's values, and transformers'
   logits with them, are compared with ours: `formulas.py` says what is expected
   of which tool. How transformers loads a folder by itself is only reported.

OUT receives `interop.jsonl`, a row for each comparison, and all folders. Exits
with an error that names every comparison that fails.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import time
from typing import Any

import formulas
import golden
import jax
import numpy as np

import nvfp4_jax
from nvfp4_jax import export
from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import recipes
from nvfp4_jax import safetensors
from nvfp4_jax.models import hf
from nvfp4_jax.models import layouts
from nvfp4_jax.models import transformer

_HERE = pathlib.Path(__file__).resolve().parent
_GOLDEN = _HERE.parent / 'tests' / 'golden'

# All sizes of this model fill blocks of 128x128. It is not committed.
_WHOLE_BLOCKS = 'qwen3_moe_128'
_MODELS = ('llama', 'qwen3', 'qwen3_moe', 'glm4_moe', _WHOLE_BLOCKS)
_RECIPES = {
    'nvfp4_final': 'nvfp4',
    'nvfp4_high_precision': 'nvfp4',
    'mxfp8_dequantized': 'mxfp8',
    'fp8_block': 'fp8_block',
}
# Source, recipe, layout.
_FROM_QUANTIZED = (
    ('qwen3_moe-fp8_block-deepseek', 'nvfp4_final', 'modelopt'),
    ('qwen3_moe-fp8_block-deepseek', 'mxfp8_dequantized', 'modelopt'),
    ('qwen3_moe-nvfp4_final-modelopt', 'nvfp4_final', 'compressed_tensors'),
)

# Logits are of order 1; float32 models are this near to one another.
_MODEL_TOLERANCE = 1e-5
# One position of one model is four times as sensitive as all others: there,
# transformers and we are each up to 1e-5 from float64. To round rotary angles
# to float32, as transformers does, is 7e-6 of it; ours are float64's.
_EXPORT_TOLERANCE = 2e-5
_BFLOAT16_TOLERANCE = 2.0**-7


@dataclasses.dataclass(frozen=True)
class Conversion:
  """One quantized folder.

  Attributes:
    source: name of the folder that is converted.
    recipe: name of the recipe.
    layout: how quantized weights are stored.
  """

  source: str
  recipe: str
  layout: layouts.Layout

  @property
  def name(self) -> str:
    """Name of the folder."""
    return f'{self.source}-{self.recipe}-{self.layout}'

  @property
  def format(self) -> str:
    """Name of the number format."""
    return _RECIPES[self.recipe]


class Report:
  """The rows, written as they come, and what failed."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._versions = {
        'nvfp4_jax': nvfp4_jax.__version__,
        'jax': jax.__version__,
    }
    self.failures = []
    path.write_text('')

  def add(self, row: Mapping[str, Any], requirements: Mapping[str, bool]):
    """Writes and prints a row, with the requirements that it misses."""
    missed = [text for text, holds in requirements.items() if not holds]
    row = {**row, 'failed': missed, 'versions': self._versions}
    with self._path.open('a') as file:
      file.write(json.dumps(row) + '\n')
    where = [
        row[k]
        for k in ('check', 'case', 'recipe', 'layout', 'tool')
        if k in row
    ]
    self.failures += [f'{" ".join(where)}: {text}' for text in missed]
    print(_line(row), flush=True)


def _line(row):
  """Returns a row of the table."""
  name = '-'.join(row[k] for k in ('case', 'recipe', 'layout') if k in row)
  numbers = ', '.join(
      f'{key} {value:.2g}' if isinstance(value, float) else f'{key} {value}'
      for key, value in row.items()
      if isinstance(value, int | float)
  )
  tool = row.get('tool', row['check'])
  mark = f'  FAILED: {"; ".join(row["failed"])}' if row['failed'] else ''
  return f'{name:62} {tool:26} {numbers}{mark}'


def conversions() -> list[Conversion]:
  """Returns all conversions; those of quantized folders after their sources."""
  result = []
  for model in _MODELS:
    for recipe, name in _RECIPES.items():
      for layout in layouts.LAYOUTS:
        holds = name in layouts.formats_of(layout)
        if (layout, name) == ('modelopt', 'fp8_block'):
          holds = model == _WHOLE_BLOCKS
        if holds:
          result.append(Conversion(model, recipe, layout))
  return result + [Conversion(*fields) for fields in _FROM_QUANTIZED]


def run_torch(python: pathlib.Path, script: str, *arguments: Any) -> None:
  """Runs a script of this directory; exits if it fails."""
  environment = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
  # Nothing is looked up elsewhere, and warnings do not hide the progress.
  environment |= {'HF_HUB_OFFLINE': '1', 'TRANSFORMERS_VERBOSITY': 'error'}
  command = [python, '-W', 'ignore', '-u', _HERE / script, *arguments]
  result = subprocess.run([str(x) for x in command], env=environment)
  if result.returncode:
    raise SystemExit(f'{script} failed: see above.')


def check_models(models: pathlib.Path, report: Report) -> None:
  """Compares our logits of each model with transformers'."""
  for folder in sorted(models.iterdir()):
    reference = np.load(folder / 'reference.npz')
    config, params = hf.load(folder, dtype='float32')
    version = files.read_json(folder, 'config.json')['transformers_version']
    got = _logits_of(config, params, reference['tokens'])
    compared = compare_logits(got, reference['logits'])
    report.add(
        {
            'check': 'model',
            'case': folder.name,
            **compared,
            'read_by': {'logits_by': f'transformers {version}'},
        },
        _logits_required(compared, _MODEL_TOLERANCE)
        | {'another token is the likeliest': compared['argmax_equal'] == 1},
    )


def compare_logits(got: np.ndarray, want: np.ndarray) -> dict[str, float]:
  """Returns how far logits `[B, T, V]` are apart."""
  same = got.argmax(-1) == want.argmax(-1)
  return {
      'logit_difference': float(np.abs(got - want).max()),
      'largest_logit': float(np.abs(want).max()),
      'argmax_equal': float(same.mean()),
  }


def _logits_required(compared, tolerance):
  close = compared['logit_difference'] <= tolerance
  return {f'logits differ by more than {tolerance}': close}


def _logits_of(config, params, tokens):
  """Returns float32 logits of a per-layer tree, its values as they are."""
  segments = policy.segments([policy.BF16], transformer.param_paths(config))
  masters = transformer.stack(policy.dequantize_params(params), segments)
  return np.asarray(_forward(config, masters, tokens))


@functools.partial(jax.jit, static_argnums=0)
def _forward(config, params, tokens):
  bf16 = policy.Quantizer(policy.BF16)  # The model's dtype: float32 here.
  hidden = transformer.forward(config, params, tokens, bf16)
  return transformer.logits(params, hidden)


def convert(
    conversion: Conversion, models: pathlib.Path, exports: pathlib.Path
) -> None:
  """Makes a quantized folder, with the tokens of its model."""
  model = models / conversion.source.partition('-')[0]
  source = exports / conversion.source
  target = export.Target(
      recipes.get(conversion.recipe).sampler,
      conversion.layout,
      conversion.recipe,
  )
  export.convert(
      source if source.exists() else model, exports / conversion.name, target
  )
  tokens = np.load(model / 'reference.npz')['tokens']
  np.save(exports / conversion.name / 'tokens.npy', tokens)


def check_export(
    conversion: Conversion,
    folder: pathlib.Path,
    read: pathlib.Path,
    report: Report,
) -> None:
  """Compares a folder, as each tool read it, with how we read it.

  Args:
    conversion: what the folder is.
    folder: the folder.
    read: what `read_exports.py` wrote of it.
    report: receives the rows.
  """
  config, params = hf.load(folder, dtype='float32')
  weights = dict(_quantized(config, params))
  tensors = _stored(folder, weights)
  tokens = np.load(folder / 'tokens.npy')
  logits = _logits_of(config, params, tokens)
  common = {
      'check': 'export',
      'case': conversion.source,
      'recipe': conversion.recipe,
      'layout': conversion.layout,
  }
  tools = formulas.TOOLS[conversion.layout, conversion.format]
  for tool, rule in tools.items():
    about = json.loads((read / f'{tool}.json').read_text())
    row = common | {'tool': tool, 'rule': rule}
    values, required = compare_values(
        dict(np.load(read / f'{tool}.npz')), weights, tensors, rule
    )
    found = np.load(read / f'logits_{tool}.npz')['logits']
    compared = compare_logits(found, logits)
    if rule != 'bfloat16':
      required |= _logits_required(compared, _EXPORT_TOLERANCE)
    report.add(row | values | compared | {'read_by': about}, required)
  by_itself = read / 'logits_transformers_load.npz'
  if by_itself.exists():
    compared = compare_logits(np.load(by_itself)['logits'], logits)
    row = common | {'tool': 'transformers_load'} | compared
    report.add(row | {'read_by': {'logits_by': about['logits_by']}}, {})


def compare_values(
    found: Mapping[str, np.ndarray],
    ours: Mapping[str, np.ndarray],
    tensors: Mapping[str, Mapping[str, np.ndarray]],
    rule: formulas.Rule,
) -> tuple[dict[str, Any], dict[str, bool]]:
  """Returns how a tool's values differ from ours, and what is required.

  Args:
    found: the tool's values by module.
    ours: our values by module.
    tensors: the tensors by module, then by suffix.
    rule: what is expected of the tool.
  """
  if found.keys() != ours.keys():
    return {}, {f'modules {sorted(found.keys() ^ ours.keys())}': False}
  count = lambda want: sum(int((want[m] != x).sum()) for m, x in found.items())
  row = {
      'values': sum(x.size for x in found.values()),
      'unlike_ours': count(ours),
  }
  if rule == 'multiplies':
    return row, {'values differ': not row['unlike_ours']}
  if rule == 'bfloat16':
    errors = [formulas.block_error(x, ours[m]) for m, x in found.items()]
    row['block_error'] = float(np.max(errors))  # NaN if one is.
    close = row['block_error'] <= _BFLOAT16_TOLERANCE
    return row, {f'values differ by more than {_BFLOAT16_TOLERANCE}': close}
  row['unlike_formula'] = count(
      {module: formulas.divided(x) for module, x in tensors.items()}
  )
  row['scale_ulps'] = max(
      formulas.ulps(formulas.divided_scales(x), formulas.multiplied_scales(x))
      for x in tensors.values()
  )
  we_multiply = all(
      np.array_equal(ours[module], formulas.multiplied(x))
      for module, x in tensors.items()
  )
  return row, {
      'values are not those of the formula': not row['unlike_formula'],
      'scales differ by more than 1 ulp': row['scale_ulps'] <= 1,
      'our values are not those of our formula': we_multiply,
  }


def _quantized(config, params) -> Iterator[tuple[str, np.ndarray]]:
  """Yields each quantized module's name and float32 values."""
  for layer, tree in enumerate(params['layers']):
    for name, leaf in tree.items():
      if isinstance(leaf, qtensor.QTensor):
        values = np.asarray(qtensor.dequantize(leaf, np.float32))
        modules = hf.module_names(config, f'layers.{layer}.{name}')
        parts = values.reshape(-1, *values.shape[-2:])
        yield from zip(modules, parts, strict=True)


def _stored(folder, modules):
  """Returns the tensors of each module by suffix."""
  result = {module: {} for module in modules}
  for name, info in safetensors.read_index(folder).items():
    module, _, suffix = name.rpartition('.')
    if module in result:
      result[module][suffix] = safetensors.read_tensor(info)
  return result


def run(python: pathlib.Path, out: pathlib.Path, update_golden: bool) -> Report:
  """Runs all checks."""
  models, exports, read = (out / x for x in ('models', 'exports', 'read'))
  for folder in (models, exports, read):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
  report = Report(out / 'interop.jsonl')
  print('Making the models with transformers', flush=True)
  run_torch(python, 'torch_models.py', models)
  identical = True
  for row, required in golden.compare_models(_GOLDEN, models, (_WHOLE_BLOCKS,)):
    report.add({'check': 'golden', **row}, required)
    identical = identical and not row['unlike_golden']
  check_models(models, report)
  todo = conversions()
  for i, conversion in enumerate(todo, 1):
    print(f'Converting [{i}/{len(todo)}] {conversion.name}', flush=True)
    convert(conversion, models, exports)
  names = [conversion.name for conversion in todo]
  run_torch(python, 'read_exports.py', read, *(exports / n for n in names))
  for conversion in todo:
    name = conversion.name
    check_export(conversion, exports / name, read / name, report)
  if update_golden and not report.failures:
    if not identical:
      raise SystemExit('Not the models in golden/hf: another kind of CPU.')
    golden.write_values(_GOLDEN / 'interop', models, exports, read)
  return report


def main(arguments: Sequence[str] | None = None) -> None:
  """Runs all checks and exits with what failed."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--python', type=pathlib.Path, required=True)
  parser.add_argument(
      '--out', type=pathlib.Path, default=pathlib.Path('runs/interop')
  )
  parser.add_argument('--update-golden', action='store_true')
  flags = parser.parse_args(arguments)
  start = time.monotonic()
  report = run(flags.python, flags.out, flags.update_golden)
  seconds = time.monotonic() - start
  if report.failures:
    raise SystemExit('\n'.join([*report.failures, 'Interop FAILED.']))
  print(f'Interop passed in {seconds:.0f} s. Rows: {flags.out}/interop.jsonl')


if __name__ == '__main__':
  main()
