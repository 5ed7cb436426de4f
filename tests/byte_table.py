"""Counts the bytes of every format that differ from the numpy oracle.

    PYTHONPATH=. python tests/byte_table.py results/bytes/cpu.jsonl

One row for each format and way of calling it: bytes compared and different, on
this device, with default flags. The table in the README holds these rows.
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import quantization
from tests import numpy_oracle

_Spec = quantization.QuantSpec
SPECS = {
    'nvfp4': _Spec('nvfp4'),
    'nvfp4 per token': _Spec('nvfp4', 'token'),
    'nvfp4 2D': _Spec('nvfp4', block_2d=True),
    'nvfp4 4/6': _Spec('nvfp4', four_over_six='mse'),
    'nvfp4 4/6 per token': _Spec('nvfp4', 'token', four_over_six='mse'),
    'nvfp4 4/6 2D, MAE, fast, E = 448': _Spec(
        'nvfp4',
        block_2d=True,
        four_over_six='mae',
        scale_max=448,
        error='fast',
    ),
    'nvfp4 RHT': _Spec('nvfp4', hadamard=True),
    'mxfp8': _Spec('mxfp8'),
    'mxfp8 2D': _Spec('mxfp8', block_2d=True),
    'mxfp4': _Spec('mxfp4'),
    'fp8_block 1x128': _Spec('fp8_block'),
    'fp8_block 128x128': _Spec('fp8_block', block_2d=True),
    'fp8_block 1x128, power of two': _Spec(
        'fp8_block', scale_rounding='power_of_two'
    ),
}


def matrix() -> np.ndarray:
  """Returns a bfloat16 matrix whose rows differ in size; 9.4 M elements."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4096, 2304)) * np.exp(3 * rng.normal(size=(4096, 1)))
  return x.astype(jnp.bfloat16)


def different_bytes(q, want) -> tuple[int, int]:
  """Returns how many bytes were compared, and how many differ."""
  compared = different = 0
  arrays = q.data, q.block_scale, q.global_scale
  for got, array in zip(arrays, want, strict=True):
    if array is not None:
      got = np.ascontiguousarray(np.asarray(got)).view(np.uint8)
      different += int(
          np.sum(got != np.ascontiguousarray(array).view(np.uint8))
      )
      compared += got.size
  return compared, different


def main(path: str) -> None:
  """Writes the rows."""
  x = matrix()
  lines = []
  for name, spec in SPECS.items():
    want = numpy_oracle.quantize(x, spec)
    quantize = functools.partial(quantization.quantize, spec=spec)
    for way, fn in (('eager', quantize), ('jit', jax.jit(quantize))):
      compared, different = different_bytes(fn(jnp.asarray(x)), want)
      row = {'format': name, 'backend': jax.default_backend(), 'way': way}
      row |= {'bytes': compared, 'different': different}
      print(row, flush=True)
      lines.append(json.dumps(row) + '\n')
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  pathlib.Path(path).write_text(''.join(lines))


if __name__ == '__main__':
  main(sys.argv[1])
