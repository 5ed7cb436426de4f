"""Quantized weights on disk: the layouts that servers read.

A *layout* names the tensors that stand for one quantized weight `[N, K]`, with
the meaning of their scales. Everything is row-major and not swizzled.

| layout | format | tensors |
|---|---|---|
| modelopt | nvfp4 | weight, weight_scale, weight_scale_2, input_scale |
| modelopt | mxfp8 | weight, weight_scale (exponent bytes) |
| modelopt | fp8_block | weight, weight_scale `[N/128, 1, K/128, 1]` |
| compressed_tensors | nvfp4 | weight_packed, weight_scale, *_global_scale |
| compressed_tensors | mxfp8 | weight, weight_scale (exponent bytes) |
| compressed_tensors | fp8_block | weight, weight_scale |
| deepseek | fp8_block | weight, weight_scale_inv |

Scales multiply, but for weight_global_scale: the values are divided by it.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, Literal

import ml_dtypes
import numpy as np

from nvfp4_jax import files
from nvfp4_jax import formats
from nvfp4_jax import qtensor

type Layout = Literal['modelopt', 'compressed_tensors', 'deepseek']

LAYOUTS = ('modelopt', 'compressed_tensors', 'deepseek')
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
_BLOCK = formats.FP8_BLOCK.block

# A larger decode scale belongs to weights above 2688, which no model has: more
# likely it is a divisor that was taken for a factor.
_LARGEST_GLOBAL_SCALE = 1.0


@dataclasses.dataclass(frozen=True)
class Stored:
  """One tensor that stands for a weight, or a part of it.

  Attributes:
    dtypes: what it may be; the first is what is written.
    shape: its shape.
    optional: a file may lack it. It concerns activations and is not read.
  """

  dtypes: tuple[np.dtype, ...]
  shape: tuple[int, ...]
  optional: bool = False


@dataclasses.dataclass(frozen=True)
class Quantization:
  """How the quantized weights of a folder are stored.

  Attributes:
    layout: the layout.
    format: name of the number format.
  """

  layout: Layout
  format: str


def suffixes(quantization: Quantization) -> tuple[str, ...]:
  """Returns the suffixes of a quantized weight's tensors; the codes first."""
  block = 128  # fills whole blocks of every format
  shape = (block, block)
  return tuple(stored_tensors(quantization.layout, quantization.format, shape))


def stored_tensors(
    layout: Layout, format_name: str, shape: tuple[int, int]
) -> dict[str, Stored]:
  """Returns what a quantized weight of a shape is stored as, by name suffix.

  Raises:
    ValueError: the layout has no such format, or cannot hold the shape.
  """
  n, k = shape
  one = Stored((_FLOAT32,), ())
  if format_name not in formats_of(layout):
    raise ValueError(
        f'Layout {layout!r} has no {format_name!r}, only {formats_of(layout)}.'
    )
  if format_name != 'fp8_block' and k % formats.FORMATS[format_name].block:
    raise ValueError(f'K of {shape} does not fill blocks of {format_name}.')
  if format_name == 'nvfp4':
    packed = Stored((_UINT8,), (n, k // 2))
    scale = Stored((_E4M3,), (n, k // formats.NVFP4.block))
    if layout == 'modelopt':
      unread = dataclasses.replace(one, optional=True)
      return {
          'weight': packed,
          'weight_scale': scale,
          'weight_scale_2': one,
          'input_scale': unread,
      }
    one = Stored((_FLOAT32,), (1,))
    unread = dataclasses.replace(one, optional=True)
    return {
        'weight_packed': packed,
        'weight_scale': scale,
        'weight_global_scale': one,
        'input_global_scale': unread,
    }
  codes = Stored((_E4M3,), (n, k))
  if format_name == 'mxfp8':
    scale = Stored((_UINT8, _E8M0), (n, k // formats.MXFP8.block))
    return {'weight': codes, 'weight_scale': scale}
  blocks = (-(-n // _BLOCK), -(-k // _BLOCK))
  dtypes = (_FLOAT32, _BFLOAT16, _E8M0)
  if layout == 'modelopt':
    if n % _BLOCK or k % _BLOCK:
      raise ValueError(
          f"Layout 'modelopt' holds fp8_block weights of whole blocks of"
          f' {_BLOCK} x {_BLOCK} only, not {shape}.'
      )
    scale = Stored(dtypes, (blocks[0], 1, blocks[1], 1))
    return {'weight': codes, 'weight_scale': scale}
  name = (
      'weight_scale' if layout == 'compressed_tensors' else 'weight_scale_inv'
  )
  return {'weight': codes, name: Stored(dtypes, blocks)}


def formats_of(layout: Layout) -> tuple[str, ...]:
  """Returns the names of the formats that a layout can hold."""
  if layout not in LAYOUTS:
    raise ValueError(f'Layout {layout!r} is not one of {LAYOUTS}.')
  return (
      ('fp8_block',)
      if layout == 'deepseek'
      else ('nvfp4', 'mxfp8', 'fp8_block')
  )


def encode(
    q: qtensor.QTensor,
    layout: Layout,
    *,
    scale_max: int | None = None,
    input_scale: bool = False,
) -> dict[str, np.ndarray]:
  """Returns the tensors of one quantized weight `[N, K]`, by name suffix.

  Args:
    q: the weight; of 128 x 128 blocks if it is fp8_block.
    layout: the layout.
    scale_max: E of the nvfp4 global encode scale 6 E / amax, which a layout
      that divides stores.
    input_scale: write an input scale of 1, which says that activations have a
      scale of their own for each token; nvfp4 in 'modelopt' only, nothing
      elsewhere.

  Raises:
    ValueError: the layout cannot hold the weight.
  """
  shape = (q.data.shape[-2], qtensor.num_columns(q))
  format_name = q.format.name
  stored = stored_tensors(layout, format_name, shape)
  codes, scale = np.asarray(q.data), np.asarray(q.block_scale)
  if format_name == 'fp8_block':
    scale = _one_per_block(scale)
  elif format_name == 'mxfp8':
    scale = scale.view(np.uint8)
  if format_name != 'nvfp4':
    codes = codes.view(_E4M3)
  code_name, scale_name, *rest = stored
  tensors = {
      code_name: codes,
      scale_name: scale.reshape(stored[scale_name].shape),
  }
  if format_name == 'nvfp4':
    decode_scale = np.asarray(q.global_scale, np.float32).reshape(())
    _check_global_scale(decode_scale, 'the weight')
    if layout == 'compressed_tensors':
      decode_scale = _encode_scale(decode_scale, scale_max)[None]
    tensors[rest[0]] = decode_scale
    if input_scale and layout == 'modelopt':
      tensors[rest[1]] = np.ones((), np.float32)
  return tensors


def decode(
    tensors: Mapping[str, np.ndarray],
    layout: Layout,
    format_name: str,
    where: str,
) -> qtensor.QTensor:
  """Returns the QTensor, with numpy arrays, of the tensors of one weight.

  Args:
    tensors: by name suffix, checked against `stored_tensors`.
    layout: the layout.
    format_name: the format.
    where: names the weight in errors.

  Raises:
    files.CheckpointError: a global scale is not a positive number, or looks as
      if it belonged to the other layout.
  """
  codes, scale, global_scale = _decode(tensors, layout, format_name)
  if global_scale is not None:
    try:
      _check_global_scale(global_scale, where)
    except ValueError as error:
      raise files.CheckpointError(*error.args) from error
  fmt = formats.FORMATS[format_name]
  return qtensor.QTensor(codes, scale, global_scale, fmt)


def _decode(tensors, layout, format_name) -> tuple[Any, Any, Any]:
  """Returns the fields of the QTensor."""
  if format_name == 'nvfp4':
    scale = tensors['weight_scale']
    if layout == 'modelopt':
      factor = tensors['weight_scale_2']
      return tensors['weight'], scale, factor.reshape(1, 1)
    with np.errstate(all='ignore'):
      factor = np.float32(1.0) / tensors['weight_global_scale']
    return tensors['weight_packed'], scale, factor.reshape(1, 1)
  codes = tensors['weight'].view(np.uint8)
  name = 'weight_scale_inv' if layout == 'deepseek' else 'weight_scale'
  scale = tensors[name]
  if format_name == 'mxfp8':
    return codes, scale.view(_E8M0), None
  scale = scale.astype(np.float32).reshape(scale.shape[0], -1)
  return codes, np.repeat(scale, _BLOCK, axis=0)[: codes.shape[0]], None


def _one_per_block(scale):
  """Returns `[N/128, K/128]` of scales that are repeated on their rows."""
  kept = scale[::_BLOCK]
  if not np.array_equal(np.repeat(kept, _BLOCK, axis=0)[: len(scale)], scale):
    raise ValueError(
        'fp8_block weights are stored with blocks of 128 x 128 (block_2d=True),'
        ' not of 1 x 128.'
    )
  return kept


def _check_global_scale(decode_scale, where):
  if not 0 < decode_scale <= _LARGEST_GLOBAL_SCALE:
    raise ValueError(
        f'The decode scale {decode_scale} of {where} is not in (0,'
        f' {_LARGEST_GLOBAL_SCALE}]. Layouts differ: a weight_scale_2'
        ' multiplies, a weight_global_scale divides.'
    )


def _encode_scale(decode_scale, scale_max):
  """Returns the float32 encode scale S of which `decode_scale` is f32(1 / S).

  Several may be. The right one is f32(6 E / amax), where amax is a bfloat16
  number; without one, it is f32(1 / decode_scale), which has the same
  reciprocal (inverting three times rounds like inverting once).
  """
  one = np.float32(1.0)
  if scale_max is not None:
    largest = np.float32(formats.NVFP4.elem_max * scale_max)
    amax = (largest * decode_scale).astype(_BFLOAT16).astype(np.float32)
    if amax > 0 and one / (largest / amax) == decode_scale:
      return largest / amax
  return one / decode_scale
