"""Matmuls whose forward pass is quantized and whose backward pass is chosen.

The quantizers are never differentiated. A *backward mode* names the operands
at which the plain matmul's VJP is taken:

* 'high_precision': the bfloat16 values of `(x, w)`.
* 'dequantized': bfloat16 `(dequantize(xq), dequantize(wq))`, the operands that
  the forward pass (fprop) really multiplied. Gradients then belong to the
  function that was computed, and only codes and scales are kept for them.

With `y = x @ w.T`, `dgrad = dy @ w` and `wgrad = dy.T @ x`; both are bfloat16
dots with float32 accumulation in every mode.
"""

import dataclasses
import functools
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import kernels
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

type Backward = Literal['high_precision', 'dequantized']

_BACKWARD_MODES = ('high_precision', 'dequantized')


@dataclasses.dataclass(frozen=True)
class MatmulPrecision:
  """How one matmul is computed; static.

  Attributes:
    lhs: how activations are quantized.
    rhs: how weights are quantized.
    grad: how the gradient `dy` is quantized; None, as both modes keep it.
    backward: 'high_precision' or 'dequantized'; see the module.
  """

  lhs: quantization.QuantSpec
  rhs: quantization.QuantSpec
  grad: None = None
  backward: Backward = 'dequantized'

  def __post_init__(self):
    if self.backward not in _BACKWARD_MODES:
      raise ValueError(
          f'backward {self.backward!r} is not one of {_BACKWARD_MODES}.'
      )
    for name in ('lhs', 'rhs'):
      if not isinstance(getattr(self, name), quantization.QuantSpec):
        raise ValueError(f'{name} {getattr(self, name)!r} is not a QuantSpec.')
    if self.grad is not None:
      raise ValueError(
          f'grad {self.grad!r}: backward {self.backward!r} does not quantize'
          ' gradients; grad must be None.'
      )
    if self.rhs.outer != 'tensor':
      raise ValueError(f'rhs.outer {self.rhs.outer!r}: weights need "tensor".')


def quantized_matmul(
    x: jax.Array,
    w: jax.Array | None,
    precision: MatmulPrecision,
    *,
    xq: qtensor.QTensor | None = None,
    wq: qtensor.QTensor | None = None,
    key: jax.Array | None = None,
    axis_name: str | None = None,
) -> jax.Array:
  """Returns `Q(x) @ Q(w).T`; its VJP is that of matmul at chosen operands.

  Q quantizes the bfloat16 values of its argument. Products of codes and block
  scales are exact, sums are float32, f32(D_x * D_w) is applied to the sum.

  Args:
    x: `[..., K]` bfloat16 or float32 activations; leading axes are flattened.
    w: `[N, K]` weight; it receives the gradient, in its own dtype. None where
      `wq` is given and no gradient is wanted.
    precision: formats and backward mode.
    xq: Q(x) flattened to `[M, K]`, where the caller has it. No cotangent.
    wq: Q(w), where the caller quantized it once for many calls. No cotangent.
    key: randomness for stochastic rounding, which no mode here uses: None.
    axis_name: mesh axis that splits K. Amax is reduced over it before
      quantizing; the caller adds the partial results.

  Returns:
    `[..., N]` in the dtype of `x`, rounded once.

  Raises:
    TypeError, ValueError: an operand that cannot be quantized, shapes that do
      not fit, or neither `w` nor `wq`.
  """
  return _checked_matmul(x, w, None, precision, xq, wq, key, axis_name)


def quantized_grouped_matmul(
    x: jax.Array,
    w: jax.Array | None,
    group_sizes: jax.Array,
    precision: MatmulPrecision,
    *,
    xq: qtensor.QTensor | None = None,
    wq: qtensor.QTensor | None = None,
    key: jax.Array | None = None,
    axis_name: str | None = None,
) -> jax.Array:
  """Returns `Q(x) @ Q(w[e]).T` for the rows of each group e.

  See `quantized_matmul`; each group's weight has its own global scale.

  Args:
    x: `[M, K]`, rows sorted by group.
    w: `[E, N, K]` or None.
    group_sizes: `[E]` int32, may hold zeros; rows past their sum give zeros.
    precision: formats and backward mode.
    xq: Q(x). No cotangent.
    wq: Q(w). No cotangent.
    key: None, see `quantized_matmul`.
    axis_name: mesh axis that splits K.

  Returns:
    `[M, N]` in the dtype of `x`.

  Raises:
    TypeError, ValueError: as `quantized_matmul`.
  """
  if x.ndim != 2:
    raise ValueError(f'Grouped x has shape {x.shape}, not [M, K].')
  return _checked_matmul(x, w, group_sizes, precision, xq, wq, key, axis_name)


def bfloat16_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array | None = None
) -> jax.Array:
  """Returns `x @ w.T` of the bfloat16 values of both, sums in float32.

  The VJP is that of a plain matmul, with bfloat16 operands too.

  Args:
    x: `[..., K]`, or `[M, K]` with `group_sizes`.
    w: `[N, K]`, or `[E, N, K]` with `group_sizes`; gets a gradient of its own
      dtype.
    group_sizes: `[E]` int32, or None.

  Returns:
    `[..., N]` in the dtype of `x`.
  """
  return _checked_matmul(x, w, group_sizes, None, None, None, None, None)


def _checked_matmul(x, w, group_sizes, precision, xq, wq, key, axis_name):
  if w is None and wq is None:
    raise ValueError('Give w, wq or both.')
  if key is not None:
    raise ValueError(
        'No backward mode here rounds stochastically; key is None.'
    )
  ndim = 2 if group_sizes is None else 3
  k = w.shape[-1] if w is not None else 2 * wq.data.shape[-1]
  if w is not None and w.ndim != ndim:
    raise ValueError(f'w has shape {w.shape}; {ndim} axes are needed.')
  if x.shape[-1] != k:
    raise ValueError(f'x {x.shape} and w do not share K: {k}.')
  rows = x.reshape(-1, k)
  if precision is not None:
    quantization.check_operand(rows, precision.lhs)
    if w is not None:
      quantization.check_operand(w, precision.rhs)
  static = _Static(
      precision=precision,
      axis_name=axis_name,
      x_dtype=jnp.dtype(x.dtype),
      w_dtype=None if w is None else jnp.dtype(w.dtype),
  )
  y = _matmul(rows, w, xq, wq, group_sizes, static)
  return y.reshape(*x.shape[:-1], y.shape[-1])


@dataclasses.dataclass(frozen=True)
class _Static:
  precision: MatmulPrecision | None
  axis_name: str | None
  x_dtype: jnp.dtype
  w_dtype: jnp.dtype | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _matmul(x, w, xq, wq, group_sizes, static):
  return _fwd(x, w, xq, wq, group_sizes, static)[0]


def _fwd(x, w, xq, wq, group_sizes, static):
  precision = static.precision
  if precision is None:
    y = kernels.matmul(_bfloat16(x), _bfloat16(w), group_sizes)
    return _as(y, static.x_dtype), (x, w, group_sizes)
  if xq is None:
    xq = _quantize(x, precision.lhs, static.axis_name)
  if wq is None:
    wq = _quantize(w, precision.rhs, static.axis_name)
  y = _as(kernels.scaled_matmul(xq, wq, group_sizes), static.x_dtype)
  if precision.backward == 'high_precision':
    return y, (x, w, group_sizes)
  return y, (xq, wq, group_sizes)


def _bwd(static, residuals, dy):
  x, w, group_sizes = residuals
  if static.w_dtype is None:
    raise ValueError('A gradient needs w; only wq was given.')
  x, w, dy = _backward_operand(x), _backward_operand(w), _bfloat16(dy)
  dgrad = _as(kernels.dgrad(dy, w, group_sizes), static.x_dtype)
  wgrad = _as(kernels.wgrad(dy, x, group_sizes), static.w_dtype)
  return dgrad, wgrad, None, None, None


_matmul.defvjp(_fwd, _bwd)


def _backward_operand(operand):
  if isinstance(operand, qtensor.QTensor):
    return qtensor.dequantize(operand, jnp.bfloat16)
  return _bfloat16(operand)


def _quantize(x, spec, axis_name):
  x = _bfloat16(x)
  if axis_name is None:
    return quantization.quantize(x, spec)
  amax = lax.pmax(quantization.compute_amax(x, spec), axis_name)
  return quantization.quantize(x, spec, amax=amax)


def _bfloat16(x):
  return _as(x, jnp.bfloat16)


def _as(x, dtype):
  """Casts; to bfloat16 with a rounding that XLA cannot drop."""
  if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
    return exact.to_bfloat16(x)
  return x.astype(dtype)
