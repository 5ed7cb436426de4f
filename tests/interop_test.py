"""Our conversions, against values that other projects' tools read of them.

`make interop` ran the tools and wrote golden/interop: see interop/golden.py for
what it holds, interop/formulas.py for what is expected of which tool.
"""

import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np

from interop import formulas
from nvfp4_jax import export
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax import safetensors
from nvfp4_jax.models import layouts

_GOLDEN = pathlib.Path(__file__).parent / 'golden'
_CASES = json.loads((_GOLDEN / 'interop' / 'cases.json').read_text())
_VALUES = _GOLDEN / 'interop' / 'values.npz'


def converted(case: dict) -> dict[str, dict[str, np.ndarray]]:
  """Returns the tensors of a case's modules by suffix, as we convert them."""
  with tempfile.TemporaryDirectory() as root:
    folder = pathlib.Path(root) / 'folder'
    target = export.Target(
        recipes.get(case['recipe']).sampler, case['layout'], case['recipe']
    )
    export.convert(_GOLDEN / 'hf' / case['source'], folder, target)
    infos = safetensors.read_index(folder)
    suffixes = layouts.suffixes(
        layouts.Quantization(case['layout'], case['format'])
    )
    return {
        module: {
            suffix: safetensors.read_tensor(infos[f'{module}.{suffix}'])
            for suffix in suffixes
            if f'{module}.{suffix}' in infos
        }
        for module in case['modules']
    }


def encoded(name: str, case: dict) -> dict[str, dict[str, np.ndarray]]:
  """Returns the same of a case that keeps the weights themselves."""
  precision = next(
      rule.precision
      for rule in recipes.get(case['recipe']).sampler.rules
      if rule.precision is not None
  )
  result = {}
  for module in case['modules']:
    bits = np.load(_VALUES)[f'{name}__source__{module}']
    q = quantization.quantize(bits.view(ml_dtypes.bfloat16), precision.rhs)
    result[module] = layouts.encode(q, case['layout'])
  return result


class InteropTest(parameterized.TestCase):

  def test_every_layout_and_format_has_values(self):
    kinds = {(case['layout'], case['format']) for case in _CASES.values()}
    self.assertEqual(kinds, set(formulas.TOOLS))
    held = {(x, f) for x in layouts.LAYOUTS for f in layouts.formats_of(x)}
    self.assertEqual(kinds, held)

  @parameterized.parameters(*_CASES)
  def test_tools_read_the_values_that_we_wrote(self, name):
    case = _CASES[name]
    modules = converted(case) if case['source'] else encoded(name, case)
    values = np.load(_VALUES)
    for module, tensors in modules.items():
      q = layouts.decode(tensors, case['layout'], case['format'], module)
      ours = np.asarray(qtensor.dequantize(q, np.float32))
      for rule in case['read_by']:
        found = values[f'{name}__{rule}__{module}']
        if rule == 'multiplies':
          np.testing.assert_array_equal(ours, found)
          continue
        np.testing.assert_array_equal(formulas.divided(tensors), found)
        np.testing.assert_array_equal(formulas.multiplied(tensors), ours)
        scales = formulas.divided_scales(tensors)
        others = formulas.multiplied_scales(tensors)
        self.assertLessEqual(formulas.ulps(scales, others), 1)


if __name__ == '__main__':
  absltest.main()
