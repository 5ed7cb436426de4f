"""NVFP4 quantization in numpy: every float32 operation rounds once.

Casts are ml_dtypes', so that it shares no code with the package.
"""

import functools

import ml_dtypes
import numpy as np

from nvfp4_jax import quantization


def quantize(
    x: np.typing.ArrayLike, spec: quantization.QuantSpec
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns packed codes, block scales as bytes, and the global scale.

  Args:
    x: `[..., M, K]`, finite, no zero amax.
    spec: NVFP4; four over six by 'mse' or not at all.
  """
  x = np.asarray(x, np.float32)
  blocks = x.reshape(*x.shape[:-1], -1, 16)
  block_amax = np.max(np.abs(blocks), axis=-1)
  axes = -1 if spec.outer == 'token' else (-2, -1)
  amax = np.max(block_amax, axis=axes, keepdims=True)
  encode = np.float32(6 * spec.scale_max) / amax
  global_scale = np.float32(1) / encode

  def elements(scale):
    scale = np.minimum(scale, 448).astype(ml_dtypes.float8_e4m3fn)
    with np.errstate(divide='ignore'):
      factor = np.float32(1) / (scale.astype(np.float32) * global_scale)
    factor = np.minimum(factor, np.finfo(np.float32).max)
    scaled = blocks * factor[..., None]
    codes = scaled.astype(ml_dtypes.float4_e2m1fn)
    return np.where(scaled == 0, np.zeros_like(codes), codes), scale

  def error(codes, scale):
    product = codes.astype(np.float32) * scale.astype(np.float32)[..., None]
    value = product * amax[..., None] / np.float32(6 * spec.scale_max)
    terms = (value - blocks) * (value - blocks)
    return functools.reduce(np.add, np.moveaxis(terms, -1, 0))

  if spec.four_over_six:
    base = block_amax / np.float32(6) * encode
    six, four = elements(base), elements(base * np.float32(1.5))
    is_four = error(*four) < error(*six)
    codes = np.where(is_four[..., None], four[0], six[0])
    scale = np.where(is_four, four[1], six[1])
  else:
    codes, scale = elements(block_amax * (encode * np.float32(1 / 6)))
  codes = codes.view(np.uint8).reshape(x.shape)
  packed = codes[..., ::2] | (codes[..., 1::2] << 4)
  return packed, scale.view(np.uint8), global_scale
