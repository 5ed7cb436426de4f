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

_DIRECTORY = pathlib.Path(__file__).parent / 'golden'

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
  inputs = read('inputs')
  return [
      Case(name, jnp.asarray(inputs[name].view(ml_dtypes.bfloat16)), arrays)
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
