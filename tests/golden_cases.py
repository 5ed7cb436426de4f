"""The cases of tests/golden: inputs and expected arrays.

Each file is described in tests/golden/README.md.
"""

from collections.abc import Sequence
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nvfp4_jax import formats
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

_DIRECTORY = pathlib.Path(__file__).parent / 'golden'

NON_FINITE = ('inf_', 'neginf_', 'nan_')

# XLA on CPU flushes subnormal numbers to zero, and these cases have subnormal
# inputs or a subnormal global scale (1 / FLT_MAX).
FLUSHED_ON_CPU = ('tiny_', 'subnormal_')


@dataclasses.dataclass(frozen=True)
class Case:
  """One input matrix and what the reference made of it.

  Attributes:
    name: what the input is, and its shape.
    x: bfloat16 `[M, K]`.
    want: expected arrays by name, e.g. `codes`, `scales`, `amax`.
  """

  name: str
  x: jax.Array
  want: dict[str, np.ndarray]


def read(file: str) -> dict[str, np.ndarray]:
  """Returns the arrays of one file, given without its extension."""
  with np.load(_DIRECTORY / f'{file}.npz') as arrays:
    return dict(arrays)


def bfloat16(bits: np.ndarray) -> jax.Array:
  """Returns the bfloat16 array of these uint16 bits."""
  return jnp.asarray(bits.view(ml_dtypes.bfloat16))


def load(file: str, exclude: Sequence[str] = FLUSHED_ON_CPU) -> list[Case]:
  """Returns the cases of one file.

  Args:
    file: a file's name without its extension.
    exclude: prefixes of names of cases to leave out.
  """
  want = {}
  for key, value in read(file).items():
    name, array = key.split('__')
    want.setdefault(name, {})[array] = value
  inputs = read('inputs') | read('fp8_block_inputs_extra')
  return [
      Case(name, bfloat16(inputs[name]), arrays)
      for name, arrays in want.items()
      if not name.startswith(tuple(exclude))
  ]


def transposed(cases: Sequence[Case]) -> list[Case]:
  """Returns the transposed twins (x^T, `codes_t`, ...) of cases with one."""
  return [
      Case(
          f'{case.name}^T',
          case.x.T,
          {
              key.removesuffix('_t'): value
              for key, value in case.want.items()
              if key.endswith('_t')
          },
      )
      for case in cases
      if 'codes_t' in case.want
  ]


def stack(arrays: Sequence[np.typing.ArrayLike]) -> np.ndarray:
  """Stacks matrices, padded with zeros at the end to a common shape."""
  arrays = [np.asarray(array) for array in arrays]
  rows, columns = np.max([array.shape for array in arrays], axis=0)
  result = np.zeros((len(arrays), rows, columns), arrays[0].dtype)
  for padded, array in zip(result, arrays, strict=True):
    padded[: array.shape[0], : array.shape[1]] = array
  return result


def quantize_all(
    cases: Sequence[Case], spec: quantization.QuantSpec
) -> list[qtensor.QTensor]:
  """Returns the QTensor of each case, in numpy, of its own shape.

  One compilation serves all: padded with zeros, which must not show.
  """
  stacked = _quantize(stack([case.x for case in cases]), spec)
  stacked = jax.tree.map(np.asarray, stacked)
  block = formats.FORMATS[spec.format].block
  results = []
  for i, case in enumerate(cases):
    m, k = case.x.shape
    k_data = k if stacked.format.elem_max == 448 else k // 2
    global_scale = stacked.global_scale
    results.append(
        qtensor.QTensor(
            stacked.data[i, :m, :k_data],
            stacked.block_scale[i, :m, : -(-k // block)],
            None if global_scale is None else global_scale[i, :m],
            stacked.format,
        )
    )
  return results


_quantize = jax.jit(quantization.quantize, static_argnames='spec')
