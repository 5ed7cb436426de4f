"""Quantization in numpy: every float32 operation rounds once.

Casts are ml_dtypes', so that it shares no code with the package.
"""

import functools

import ml_dtypes
import numpy as np

from nvfp4_jax import quantization

_E4M3, _E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
_BLOCK = {'nvfp4': 16, 'mxfp8': 32, 'mxfp4': 32, 'fp8_block': 128}
_SIGNS = '+++-+------+-+--'  # of the Hadamard transform
_FLOAT32_MAX = np.finfo(np.float32).max


def quantize(
    x: np.typing.ArrayLike, spec: quantization.QuantSpec
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """Returns codes as stored, block scales, and the global scale.

  Args:
    x: `[..., M, K]` bfloat16 values, finite.
    spec: rounding to nearest.
  """
  x = np.asarray(x, np.float32)
  if spec.hadamard:
    x = hadamard(x)
  rows, columns = x.shape[-2:]
  block = _BLOCK[spec.format]
  pad = [(0, 0)] * (x.ndim - 1) + [(0, -columns % block)]
  blocks = np.pad(x, pad)
  blocks = blocks.reshape(*x.shape[:-1], -1, block)
  block_amax = np.max(np.abs(blocks), axis=-1)
  over_rows = lambda values, reduce: values
  if spec.block_2d:
    over_rows = functools.partial(_over_rows, rows=rows, block=block)
  block_amax = over_rows(block_amax, lambda v: np.max(v, axis=-2))
  if spec.format == 'nvfp4':
    codes, scale, global_scale = _nvfp4(blocks, block_amax, spec, over_rows)
  else:
    scale, factor = _single_level(block_amax, spec)
    scaled = blocks * factor[..., None]
    codes, global_scale = _elements(scaled, spec.format), None
  codes = codes.reshape(*x.shape[:-1], -1)[..., :columns]
  if spec.format in ('nvfp4', 'mxfp4'):
    codes = codes[..., ::2] | (codes[..., 1::2] << 4)
  return codes, scale, global_scale


def hadamard(x: np.ndarray) -> np.ndarray:
  """Returns bfloat16 values of each 16 elements times diag(signs) H / 4."""
  index = np.arange(16)
  bits = (index[:, None] & index)[..., None] >> np.arange(4) & 1
  h = 1.0 - 2.0 * (np.sum(bits, axis=-1) % 2)
  signs = np.array([1.0 if sign == '+' else -1.0 for sign in _SIGNS])
  rotated = (x.reshape(-1, 16).astype(np.float64) * signs) @ h / 4
  rotated = rotated.astype(np.float32).astype(ml_dtypes.bfloat16)
  return rotated.astype(np.float32).reshape(x.shape)


def _over_rows(values, reduce, rows, block):
  pad = [(0, 0)] * (values.ndim - 2) + [(0, -rows % block), (0, 0)]
  values = np.pad(values, pad)
  values = values.reshape(*values.shape[:-2], -1, block, values.shape[-1])
  return np.repeat(reduce(values), block, axis=-2)[..., :rows, :]


def _elements(scaled, name):
  """Returns uint8 codes; a scaled -0.0 counts as zero in E2M1."""
  if name in ('mxfp8', 'fp8_block'):
    return np.clip(scaled, -448, 448).astype(_E4M3).view(np.uint8)
  codes = scaled.astype(_E2M1).view(np.uint8)
  return np.where(scaled == 0, np.uint8(0), codes)


def _single_level(block_amax, spec):
  if spec.format == 'fp8_block':
    with np.errstate(divide='ignore', over='ignore'):
      encode = np.float32(448) / block_amax
    largest = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    encode = np.where(np.isinf(encode), largest, encode)
    encode = np.where(block_amax == 0, np.float32(1), encode)
    if spec.scale_rounding == 'power_of_two':
      encode = np.ldexp(np.float32(1), np.frexp(encode)[1] - 1)
    return np.float32(1) / encode, encode
  if spec.format == 'mxfp8':
    scale = block_amax * np.float32(1 / 448)
  else:
    scale = block_amax / np.float32(6)
  mantissa, exponent = np.frexp(scale)
  exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
  exponent = np.where(scale == 0, -127, np.maximum(exponent, -127))
  code = (exponent + 127).astype(np.uint8)
  factor = np.ldexp(np.float32(1), -exponent)
  return code.view(ml_dtypes.float8_e8m0fnu), factor


def _nvfp4(blocks, block_amax, spec, over_rows):
  axes = -1 if spec.outer == 'token' else (-2, -1)
  amax = np.max(block_amax, axis=axes, keepdims=True)
  numerator = np.float32(6 * spec.scale_max)
  with np.errstate(over='ignore'):
    encode = numerator / np.where(amax == 0, numerator, amax)
  encode = np.minimum(encode, _FLOAT32_MAX)
  global_scale = np.float32(1) / encode

  def elements(scale):
    scale = np.minimum(scale, 448).astype(_E4M3)
    with np.errstate(divide='ignore'):
      factor = np.float32(1) / (scale.astype(np.float32) * global_scale)
    factor = np.minimum(factor, _FLOAT32_MAX)
    return _elements(blocks * factor[..., None], 'nvfp4'), scale

  def error(codes, scale):
    product = codes.view(_E2M1).astype(np.float32)
    product = product * scale.astype(np.float32)[..., None]
    if spec.error == 'fast':
      difference = product - blocks * encode[..., None]
    else:
      difference = product * amax[..., None] / numerator - blocks
    terms = difference * difference
    if spec.four_over_six == 'mae':
      terms = np.abs(difference)
    total = functools.reduce(np.add, np.moveaxis(terms, -1, 0))
    return over_rows(total, _tree)

  if spec.four_over_six:
    base = block_amax / np.float32(6) * encode
    six, four = elements(base), elements(base * np.float32(1.5))
    is_four = error(*four) < error(*six)
    codes = np.where(is_four[..., None], four[0], six[0])
    scale = np.where(is_four, four[1], six[1])
  else:
    codes, scale = elements(block_amax * (encode * np.float32(1 / 6)))
  return codes, scale, global_scale


def _tree(rows):
  """Adds 16 rows: those 8 apart, then 4, 2 and 1."""
  for half in (8, 4, 2, 1):
    rows = rows[..., :half, :] + rows[..., half : 2 * half, :]
  return rows[..., 0, :]
