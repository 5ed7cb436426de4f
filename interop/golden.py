"""What tests/golden keeps of other projects' tools, for tests without them.

Models, in golden/hf; and values that tools read, in golden/interop. There,
`cases.json` says, for each layout and format, which folder in golden/hf was
converted by which recipe, and which tools read it; `values.npz` holds their
float32 values as `<case>__<rule>__<module>`, once for all tools of one rule of
`formulas.py`. No committed folder fills the blocks of 128x128 that ModelOpt
wants: there the bfloat16 weight itself is kept, as bits, in
`<case>__source__<module>`.
"""

from collections.abc import Collection, Iterator
import json
import pathlib
from typing import Any

import formulas
import numpy as np

from nvfp4_jax import safetensors

_MODEL = 'qwen3_moe'
_EXPERTS = tuple(
    f'model.layers.{layer}.mlp.experts.{expert}.{name}'
    for layer, expert, name in (
        (0, 0, 'gate_proj'),
        (1, 3, 'up_proj'),
        (2, 7, 'down_proj'),
    )
)
_LINEARS = (
    'model.layers.0.self_attn.q_proj',
    'model.layers.1.self_attn.o_proj',
    *_EXPERTS[1:],
)
_RECIPES = {
    'nvfp4': ('nvfp4_final', _EXPERTS),
    'mxfp8': ('mxfp8_dequantized', _LINEARS),
    'fp8_block': ('fp8_block', _LINEARS),
}
_WHOLE_BLOCKS = 'qwen3_moe_128'
_WHOLE_MODULES = ('model.layers.0.self_attn.q_proj',)


def compare_models(
    golden: pathlib.Path, models: pathlib.Path, besides: Collection[str]
) -> Iterator[tuple[dict[str, Any], dict[str, bool]]]:
  """Compares models that were made with those that are committed.

  torch draws normal numbers and adds up products in another order on another
  kind of CPU. So bytes may differ, but by no more than that explains.

  Args:
    golden: the directory tests/golden.
    models: folders of `torch_models.py`.
    besides: those that are not committed.

  Yields:
    What was found of a model, and what is required.
  """
  committed = {path.name for path in (golden / 'hf').iterdir()}
  made = {path.name for path in models.iterdir()} - set(besides)
  for case in sorted(committed | made):
    ours, theirs = (_contents(d / case) for d in (models, golden / 'hf'))
    parts = sorted(ours.keys() | theirs.keys())
    pairs = {part: (ours.get(part), theirs.get(part)) for part in parts}
    different = [part for part in parts if not _same_bytes(*pairs[part])]
    far = [part for part in different if not _is_near(*pairs[part])]
    row = {'case': case, 'parts': len(parts), 'unlike_golden': len(different)}
    yield row, {f'{", ".join(far)} are not those in golden/hf': not far}


def write_values(
    out: pathlib.Path,
    models: pathlib.Path,
    exports: pathlib.Path,
    read: pathlib.Path,
) -> None:
  """Writes what golden/interop holds.

  Args:
    out: receives them.
    models: folders of `torch_models.py`.
    exports: their conversions.
    read: what `read_exports.py` wrote of those.
  """
  cases: dict[str, Any] = {}
  arrays = {}
  for (layout, name), tools in formulas.TOOLS.items():
    case = f'{layout}_{name}'
    recipe, modules = _RECIPES[name]
    whole = (layout, name) == ('modelopt', 'fp8_block')
    model = _WHOLE_BLOCKS if whole else _MODEL
    if whole:
      modules = _WHOLE_MODULES
      infos = safetensors.read_index(models / model)
      for module in modules:
        weight = safetensors.read_tensor(infos[f'{module}.weight'])
        arrays[f'{case}__source__{module}'] = weight.view(np.uint16)
    folder = read / f'{model}-{recipe}-{layout}'
    readers: dict[str, list[str]] = {}
    for tool, rule in tools.items():
      if rule == 'bfloat16':
        continue
      about = json.loads((folder / f'{tool}.json').read_text())
      by_rule = readers.setdefault(rule, [])
      by_rule.append(f'{tool}: {about["package"]} {about["version"]}')
      values = np.load(folder / f'{tool}.npz')
      for module in modules:
        key = f'{case}__{rule}__{module}'
        if not np.array_equal(
            arrays.setdefault(key, values[module]), values[module]
        ):
          raise ValueError(f'{by_rule} differ in {key}.')
    cases[case] = {
        'source': None if whole else model,
        'recipe': recipe,
        'layout': layout,
        'format': name,
        'modules': list(modules),
        'read_by': readers,
    }
  out.mkdir(exist_ok=True)
  np.savez_compressed(out / 'values.npz', **arrays)
  (out / 'cases.json').write_text(json.dumps(cases, indent=2) + '\n')


def _contents(folder):
  """Returns arrays, and files as arrays, by name."""
  result = {}
  for path in folder.glob('*'):
    if path.suffix == '.npz':
      result |= dict(np.load(path))
    elif path.suffix == '.safetensors':
      for name, info in safetensors.read_header(path).items():
        result[f'{path.name}: {name}'] = safetensors.read_tensor(info)
    else:
      result[path.name] = np.frombuffer(path.read_bytes(), np.uint8)
  return result


def _same_bytes(x, y):
  return _same_type(x, y) and x.tobytes() == y.tobytes()


def _same_type(x, y):
  if x is None or y is None:
    return False
  return (x.dtype, x.shape) == (y.dtype, y.shape)


def _is_near(x, y):
  """Whether arrays differ by rounding, of bfloat16 weights or of logits."""
  if not _same_type(x, y) or np.issubdtype(x.dtype, np.integer):
    return False
  x, y = (a.astype(np.float32) for a in (x, y))
  return np.allclose(x, y, rtol=2.0**-7, atol=1e-3 if x.ndim == 3 else 1e-6)
