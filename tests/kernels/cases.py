"""Inputs that every implementation of a kernel is tested with."""

import itertools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments import run
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

_Spec = quantization.QuantSpec
_FOUR_OVER_SIX = [
    dict(four_over_six=metric, scale_max=scale_max, error=error)
    for metric, scale_max, error in itertools.product(
        ('mse', 'mae'), (256, 448), ('strict', 'fast')
    )
]
SPECS = [
    _Spec('nvfp4', 'token'),
    _Spec('nvfp4'),
    _Spec('nvfp4', block_2d=True),
    *[_Spec('nvfp4', 'token', **options) for options in _FOUR_OVER_SIX],
    *[_Spec('nvfp4', **options) for options in _FOUR_OVER_SIX],
    *[_Spec('nvfp4', block_2d=True, **options) for options in _FOUR_OVER_SIX],
    _Spec('mxfp8'),
    _Spec('mxfp8', block_2d=True),
    _Spec('mxfp4'),
]


def jit(fn):
  """Jits under the flags that experiments set, for this program alone."""
  flags = (flag.lstrip('-').split('=') for flag in run.GPU_FLAGS)
  options = {name: json.loads(value) for name, value in flags}
  return jax.jit(fn, compiler_options=options)


def matrix(m, k, dtype=ml_dtypes.bfloat16, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(m, k)) * np.exp(3 * rng.normal(size=(m, 1)))
  return x.astype(dtype)


def edges(k=64):
  """Returns rows of zeros, subnormal, tiny and huge numbers, mixed."""
  tiny = np.float32(2.0**-133)
  rows = np.zeros((16, k), np.float32)
  rows[1], rows[2] = -0.0, tiny
  rows[3] = matrix(1, k, np.float32)[0]
  rows[3, 5], rows[3, 6], rows[3, 16:32] = -0.0, -tiny, tiny
  rows[4] = 3e38 * np.sign(rows[3])
  rows[5, 0], rows[5, 1:] = 3e38, -1e-30
  rows[6] = 1e-36 * rows[3]
  rows[7] = np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0], k // 8)
  rows[8] = -rows[7]
  rows[9] = np.geomspace(1e-38, 1e38, k)
  rows[10] = -1.0
  rows[11, ::16] = 448.0 * 6
  rows[12, 1::2] = -1e-3
  rows[13] = 2.0 ** np.linspace(-140, 0, k)
  rows[14] = matrix(1, k, np.float32, 1)[0] * 1e-20
  rows[15] = 1.0
  return rows.astype(ml_dtypes.bfloat16)


def operands(m, n, k, seed=0):
  """Returns x `[m, k]`, rows of different size, and w `[n, k]`, bfloat16."""
  key_x, key_w, key_size = jax.random.split(jax.random.key(seed), 3)
  size = jnp.exp(2 * jax.random.normal(key_size, (m, 1)))
  x = (jax.random.normal(key_x, (m, k)) * size).astype(jnp.bfloat16)
  return x, jax.random.normal(key_w, (n, k), jnp.bfloat16)


def exact_product(x, wq):
  """Returns the float64 x @ w.T, and that of magnitudes."""
  values = []
  for operand in (x, wq):
    scale = 1.0
    if isinstance(operand, qtensor.QTensor):
      if operand.global_scale is not None:
        scale = np.asarray(operand.global_scale, np.float64)
      operand = qtensor.decode(operand)
    values.append(np.asarray(operand, np.float64) * scale)
  x, w = values
  return x @ w.T, np.abs(x) @ np.abs(w).T
