"""The 16-point randomized Hadamard transform (RHT).

It spreads an outlier over 16 neighbours. With T = diag(signs) H / 4, H the
Sylvester matrix of +-1, T is orthogonal: rotating both operands of a matmul
along the contraction axis leaves the product as it is.
"""

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import exact

SIZE = 16

# TransformerEngine's fixed signs (2.20, get_random_sign_vector of the recipe).
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def matrix(signs: tuple[int, ...] = SIGNS) -> np.ndarray:
  """Returns T = diag(signs) H / 4, float64 `[16, 16]`.

  Raises:
    ValueError: `signs` are not 16 numbers of +-1.
  """
  if len(signs) != SIZE or not set(signs) <= {-1, 1}:
    raise ValueError(f'signs {signs} are not {SIZE} numbers of +-1.')
  h = np.ones((1, 1))
  while len(h) < SIZE:
    h = np.block([[h, h], [h, -h]])
  return np.array(signs)[:, None] * h / np.sqrt(SIZE)


def transform(x: jax.Array, signs: tuple[int, ...] = SIGNS) -> jax.Array:
  """Returns `x @ T` for each 16 consecutive elements of the last axis.

  Sums are float64, then rounded to float32 and to bfloat16, as
  TransformerEngine's bfloat16 matmul does.

  Args:
    x: `[..., K]`, K a multiple of 16; its bfloat16 values are taken.
    signs: 16 numbers of +-1.

  Returns:
    bfloat16 `[..., K]`. A NaN or infinity makes its 16 elements NaN or
    infinite.

  Raises:
    ValueError: K is not a multiple of 16.
  """
  return _multiply(x, matrix(signs))


def inverse(x: jax.Array, signs: tuple[int, ...] = SIGNS) -> jax.Array:
  """Returns `x @ T.T`, which undoes `transform` but for its rounding."""
  return _multiply(x, matrix(signs).T)


def _multiply(x, factor):
  if x.shape[-1] % SIZE:
    raise ValueError(f'K of {x.shape} is not a multiple of {SIZE}.')
  if x.dtype != jnp.bfloat16:
    x = exact.round_to_bfloat16(x.astype(jnp.float32))
  blocks = x.reshape(*x.shape[:-1], x.shape[-1] // SIZE, SIZE)
  return exact.to_bfloat16(exact.matmul(blocks, factor).reshape(x.shape))
