"""What other projects' tools compute, in numpy, from the tensors as stored.

Tools that read NVFP4 disagree in the last place, by what they do with the
global scale. Some divide by it, as the field of compressed-tensors says; ours
multiplies by its reciprocal. These are both formulas, apart from the code of
either side, and what is expected of each tool.
"""

from collections.abc import Mapping
import types
from typing import Literal

import numpy as np

# How a tool's values relate to ours:
# - 'multiplies': they are equal;
# - 'divides': they are `divided` to the bit; a scale is at most 1 ulp off;
# - 'bfloat16': they are computed in bfloat16.
type Rule = Literal['multiplies', 'divides', 'bfloat16']

_CT = {
    'compressed_tensors_float32': 'multiplies',
    'compressed_tensors': 'multiplies',
    'modelopt': 'multiplies',
}
_FP8_ARRAYS = {
    'modelopt': 'multiplies',
    'compressed_tensors_float32': 'multiplies',
}

# By layout and format: the tools that must read it.
TOOLS: Mapping[tuple[str, str], Mapping[str, Rule]] = types.MappingProxyType(
    {
        ('compressed_tensors', 'nvfp4'): {
            'compressed_tensors_float32': 'divides',
            'compressed_tensors': 'bfloat16',
            'llm_dequant': 'divides',
        },
        ('compressed_tensors', 'mxfp8'): _CT,
        ('compressed_tensors', 'fp8_block'): _CT,
        ('modelopt', 'nvfp4'): {
            'modelopt': 'multiplies',
            'compressed_tensors_float32': 'divides',
        },
        ('modelopt', 'mxfp8'): _FP8_ARRAYS,
        ('modelopt', 'fp8_block'): _FP8_ARRAYS,
        ('deepseek', 'fp8_block'): {
            'compressed_tensors': 'multiplies',
            'modelopt': 'multiplies',
            'transformers': 'multiplies',
        },
    }
)

NVFP4_BLOCK = 16
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def divided(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns `code * f32(block_scale / S)` of an NVFP4 weight `[N, K]`.

  Args:
    tensors: of one module, by name suffix. S is weight_global_scale, or else
      f32(1 / weight_scale_2).
  """
  return _values(tensors, divided_scales(tensors))


def multiplied(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns `code * f32(block_scale * s)`, as `multiplied_scales` says."""
  return _values(tensors, multiplied_scales(tensors))


def divided_scales(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns f32(block_scale / S), `[N, K / 16]`."""
  divisor = tensors.get('weight_global_scale')
  if divisor is None:
    divisor = np.float32(1.0) / tensors['weight_scale_2']
  return tensors['weight_scale'].astype(np.float32) / divisor


def multiplied_scales(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns f32(block_scale * s), `[N, K / 16]`.

  s is weight_scale_2, or else f32(1 / weight_global_scale).
  """
  factor = tensors.get('weight_scale_2')
  if factor is None:
    factor = np.float32(1.0) / tensors['weight_global_scale']
  return tensors['weight_scale'].astype(np.float32) * factor


def ulps(x: np.ndarray, y: np.ndarray) -> int:
  """Returns the most float32 numbers by which two positive arrays differ."""
  bits = [a.astype(np.float32).view(np.int32).astype(np.int64) for a in (x, y)]
  return int(np.abs(bits[0] - bits[1]).max())


def block_error(got: np.ndarray, want: np.ndarray) -> float:
  """Returns the largest error, relative to its block's largest magnitude.

  Blocks are of 16; infinite if a block of zeros is not read as one.
  """
  blocks = lambda x: np.abs(x).reshape(*x.shape[:-1], -1, NVFP4_BLOCK).max(-1)
  error, largest = blocks(got - want), blocks(want)
  if error[largest == 0].any():
    return float('inf')
  return float((error / np.where(largest == 0, 1, largest)).max())


def _values(tensors, scales):
  name = 'weight_packed' if 'weight_packed' in tensors else 'weight'
  packed = tensors[name]
  nibbles = np.stack([packed & 0xF, packed >> 4], axis=-1)
  codes = nibbles.reshape(packed.shape[0], -1)
  magnitudes = _E2M1[codes & 7]
  values = np.where(codes & 8, -magnitudes, magnitudes)
  return values * np.repeat(scales, NVFP4_BLOCK, axis=-1)
