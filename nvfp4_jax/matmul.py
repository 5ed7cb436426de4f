"""Matmuls whose forward pass is quantized and whose backward pass is chosen.

The quantizers are never differentiated. With `y = x @ w.T`, `dgrad = dy @ w`
and `wgrad = dy.T @ x`, a *backward mode* names their operands:

* 'high_precision': the bfloat16 values of `x` and `w`, and `dy`.
* 'dequantized': bfloat16 `dequantize(xq)` and `dequantize(wq)`, the operands
  that the forward pass (fprop) really multiplied, and `dy`. Gradients then
  belong to the function that was computed, and only codes and scales are kept.
* 'quantized': all operands are quantized again, along the contraction axis of
  their matmul: *column copies* of the original `x` (blocks of tokens) and `w`
  (blocks of output features), made in the forward pass and kept, and `dy` both
  ways. Where tokens do not fill a block, or the group's last block in a grouped
  matmul, zeros do. There, column copies have a global scale for each group, and
  `dy` by rows one for all groups, as `x` has in the forward pass.

In the first two modes gradients are bfloat16 dots with float32 accumulation,
but for `dy`, which is float32 where `x` is: a float32 model's gradients hardly
depend on the order of sums, and so on how a batch is divided. In the last mode
they are computed as fprop is.
"""

import dataclasses
import functools
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import formats
from nvfp4_jax import kernels
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import residual as residuals

type Backward = Literal['quantized', 'high_precision', 'dequantized']

_BFLOAT16 = jnp.dtype(jnp.bfloat16)
_BACKWARD_MODES = ('quantized', 'high_precision', 'dequantized')


@dataclasses.dataclass(frozen=True)
class MatmulPrecision:
  """How one matmul is computed; static.

  W4A4 has both sides in a four-bit format, W4A8 `lhs` in mxfp8, W4A16 no `lhs`.

  Attributes:
    lhs: how activations are quantized; None leaves them in bfloat16. With
      `hadamard`, only the column copy of 'quantized' is rotated, as in
      TransformerEngine.
    rhs: how weights are quantized.
    grad: how the gradient `dy` is quantized, in 'quantized' and only there.
    backward: 'quantized', 'high_precision' or 'dequantized'; see the module.
    residual: which part of the error of activations is multiplied too, for
      samplers; nvfp4 and 'high_precision' only. None for nothing.

  Raises:
    ValueError: a pair that makes no sense; the message says why.
  """

  lhs: quantization.QuantSpec | None
  rhs: quantization.QuantSpec
  grad: quantization.QuantSpec | None = None
  backward: Backward = 'dequantized'
  residual: residuals.Residual | None = None

  def __post_init__(self):
    if self.backward not in _BACKWARD_MODES:
      raise ValueError(
          f'backward {self.backward!r} is not one of {_BACKWARD_MODES}.'
      )
    for name in ('lhs', 'rhs', 'grad'):
      spec = getattr(self, name)
      if spec is None and name != 'rhs':
        continue
      if not isinstance(spec, quantization.QuantSpec):
        raise ValueError(f'{name} {spec!r} is not a QuantSpec.')
      _check_operand_spec(name, spec)
    if self.residual is not None:
      self._check_residual()
    if self.backward == 'quantized':
      self._check_quantized_backward()
      return
    if self.grad is not None:
      raise ValueError(
          f'grad {self.grad!r}: backward {self.backward!r} does not quantize'
          ' gradients; grad must be None.'
      )
    if self.lhs is not None and self.lhs.hadamard:
      raise ValueError(
          f'lhs.hadamard: backward {self.backward!r} has no column copy to'
          ' rotate; only "quantized" has.'
      )

  @property
  def fprop_lhs(self) -> quantization.QuantSpec | None:
    """How the forward pass quantizes activations: `lhs`, never rotated."""
    if self.lhs is None or not self.lhs.hadamard:
      return self.lhs
    return dataclasses.replace(self.lhs, hadamard=False)

  def _check_residual(self):
    found = tuple(s and s.format for s in (self.lhs, self.rhs))
    if found != ('nvfp4', 'nvfp4'):
      raise ValueError(
          f'residual: lhs and rhs must be nvfp4, not {found[0]} and {found[1]}.'
      )
    if self.backward != 'high_precision':
      raise ValueError(
          f'residual: backward {self.backward!r} has no operands for it; only'
          ' "high_precision" has.'
      )

  def _check_quantized_backward(self):
    lhs, grad = self.lhs, self.grad
    if lhs is None or grad is None:
      raise ValueError('backward "quantized" needs lhs and grad.')
    if any(s.outer == 'token' and s.four_over_six for s in (lhs, grad)):
      raise ValueError(
          'Per-token scales with four over six have no column copy for'
          ' backward "quantized"; "dequantized" and "high_precision" need none.'
      )
    if lhs.hadamard != grad.hadamard:
      raise ValueError(
          f'lhs.hadamard {lhs.hadamard} and grad.hadamard {grad.hadamard}:'
          ' wgrad needs both of its operands rotated, or none.'
      )


def _check_operand_spec(name, spec):
  if name != 'grad' and spec.rounding == 'stochastic':
    raise ValueError(f'{name}: only gradients are rounded stochastically.')
  if name != 'rhs' and spec.block_2d:
    raise ValueError(f'{name}.block_2d: 2D blocks are for weights.')
  if name == 'rhs' and spec.hadamard:
    raise ValueError('rhs.hadamard: weights are not rotated.')
  if name == 'rhs' and spec.outer == 'token':
    raise ValueError("rhs.outer 'token': weights need 'tensor'.")


def quantized_matmul(
    x: jax.Array,
    w: jax.Array | None,
    precision: MatmulPrecision,
    *,
    xq: qtensor.QTensor | None = None,
    wq: qtensor.QTensor | qtensor.Layer | None = None,
    key: jax.Array | None = None,
    axis_name: str | None = None,
) -> jax.Array:
  """Returns `Q(x) @ Q(w).T`; its VJP is that of matmul at chosen operands.

  Q quantizes the bfloat16 values of its argument (without `precision.lhs`, Q(x)
  is `x`). Products of codes and block scales are exact, sums are float32,
  f32(D_x * D_w) is applied to the sum; with fp8_block products are float32.

  Args:
    x: `[..., K]` bfloat16 or float32 activations; leading axes are flattened.
    w: `[N, K]` weight; it receives the gradient, in its own dtype. None where
      `wq` is given and no gradient is wanted.
    precision: formats and backward mode.
    xq: Q(x) flattened to `[M, K]`, where the caller has it. No cotangent.
    wq: Q(w), where the caller quantized it once for many calls; or a layer of a
      stack (`kernels.reads_layers`), without `w`. No cotangent.
    key: randomness, where `precision.grad` rounds stochastically and `w` gets a
      gradient, and only there. No cotangent.
    axis_name: mesh axis that splits K. Amax is reduced over it before
      quantizing; the caller adds the partial results.

  Returns:
    `[..., N]` in the dtype of `x`, rounded once.

  Raises:
    TypeError, ValueError: an operand that cannot be quantized, shapes that do
      not fit, neither `w` nor `wq`, or a key missing or not needed.
  """
  return _checked_matmul(x, w, None, precision, xq, wq, key, axis_name)


def quantized_grouped_matmul(
    x: jax.Array,
    w: jax.Array | None,
    group_sizes: jax.Array,
    precision: MatmulPrecision,
    *,
    xq: qtensor.QTensor | None = None,
    wq: qtensor.QTensor | qtensor.Layer | None = None,
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
    wq: Q(w), or such a layer of a stack, without `w`. No cotangent.
    key: see `quantized_matmul`.
    axis_name: mesh axis that splits K.

  Returns:
    `[M, N]` in the dtype of `x`.

  Raises:
    TypeError, ValueError: as `quantized_matmul`.
  """
  if x.ndim != 2:
    raise ValueError(f'Grouped x has shape {x.shape}, not [M, K].')
  return _checked_matmul(x, w, group_sizes, precision, xq, wq, key, axis_name)


def unquantized_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array | None = None,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> jax.Array:
  """Returns `x @ w.T` of both rounded to `dtype`, with sums in float32.

  The VJP is that of a plain matmul, with operands of `dtype` too.

  Args:
    x: `[..., K]`, or `[M, K]` with `group_sizes`.
    w: `[N, K]`, or `[E, N, K]` with `group_sizes`; gets a gradient of its own
      dtype.
    group_sizes: `[E]` int32, or None.
    dtype: bfloat16 or float32.

  Returns:
    `[..., N]` in the dtype of `x`.
  """
  return _checked_matmul(
      x, w, group_sizes, None, None, None, None, None, jnp.dtype(dtype)
  )


def _checked_matmul(
    x,
    w,
    group_sizes,
    precision,
    xq,
    wq,
    key,
    axis_name,
    dtype=_BFLOAT16,
):
  if w is None and wq is None:
    raise ValueError('Give w, wq or both.')
  ndim = 2 if group_sizes is None else 3
  if isinstance(wq, qtensor.Layer):
    if w is not None:
      raise ValueError('wq is a layer of a stack: w must be None.')
    k = qtensor.num_columns(wq.stack)
    if precision is not None and precision.residual is not None:
      wq = wq.take()
  else:
    k = w.shape[-1] if w is not None else qtensor.num_columns(wq)
  if w is not None and w.ndim != ndim:
    raise ValueError(f'w has shape {w.shape}; {ndim} axes are needed.')
  if x.shape[-1] != k:
    raise ValueError(f'x {x.shape} and w do not share K: {k}.')
  rows = x.reshape(-1, k)
  if precision is not None:
    _check_operands(rows, w, xq, precision)
    _check_given('xq', xq, precision.lhs, rows.shape)
    _check_given('wq', wq, precision.rhs, None if w is None else w.shape)
  if precision is not None and precision.residual and axis_name is not None:
    raise ValueError('residual: K must not be split over a mesh axis.')
  grad = None if precision is None or w is None else precision.grad
  needs_key = grad is not None and grad.rounding == 'stochastic'
  if needs_key != (key is not None):
    raise ValueError(
        'Stochastic rounding of gradients needs a key.'
        if needs_key
        else 'Nothing is rounded stochastically here; key must be None.'
    )
  static = _Static(
      precision=precision,
      axis_name=axis_name,
      dtype=dtype,
      x_dtype=jnp.dtype(x.dtype),
      w_dtype=None if w is None else jnp.dtype(w.dtype),
  )
  y = _matmul(rows, w, xq, wq, group_sizes, key, static)
  return y.reshape(*x.shape[:-1], y.shape[-1])


def _check_given(name, q, spec, shape):
  if q is None:
    return
  q = q.stack if isinstance(q, qtensor.Layer) else q
  if q.format.name != spec.format:
    raise ValueError(f'{name} is {q.format.name}, not {spec.format}.')
  if shape is None:
    return
  given = (*q.data.shape[:-1], qtensor.num_columns(q))
  if given != shape:
    raise ValueError(f'{name} is of shape {given}, not {shape}.')


def _check_operands(x, w, xq, precision):
  if precision.lhs is not None:
    quantization.check_operand(x, precision.lhs)
  else:
    quantization.check_dtype(x)
    if xq is not None:
      raise ValueError('xq was given, but precision.lhs is None.')
  if w is None:
    return
  quantization.check_operand(w, precision.rhs)
  if precision.backward == 'quantized':
    features = jax.ShapeDtypeStruct((x.shape[0], w.shape[-2]), x.dtype)
    for spec in (precision.rhs, precision.grad):  # blocks of output features
      quantization.check_operand(features, _in_rows(spec))


@dataclasses.dataclass(frozen=True)
class _Static:
  precision: MatmulPrecision | None
  axis_name: str | None
  dtype: jnp.dtype  # of operands that are not quantized
  x_dtype: jnp.dtype
  w_dtype: jnp.dtype | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _matmul(x, w, xq, wq, group_sizes, key, static):
  return _fwd(x, w, xq, wq, group_sizes, key, static)[0]


def _fwd(x, w, xq, wq, group_sizes, key, static):
  precision = static.precision
  x = _clear_dead_rows(_as(x, static.dtype), group_sizes)
  if precision is None:
    y = kernels.matmul(x, _as(w, static.dtype), group_sizes)
    return _as(y, static.x_dtype), (x, w, group_sizes, None)
  if precision.fprop_lhs is None:
    xq = x
  elif xq is None:
    xq = _quantize(x, precision.fprop_lhs, static.axis_name)
  if wq is None:
    wq = _quantize(w, precision.rhs, static.axis_name)
  if precision.residual is not None:
    xq, wq = residuals.extend(
        x, xq, wq, precision.lhs, precision.rhs, precision.residual, group_sizes
    )
  rounded = jnp.bfloat16 if static.x_dtype == jnp.bfloat16 else jnp.float32
  y = kernels.scaled_matmul(xq, wq, group_sizes, dtype=rounded)
  y = _as(y, static.x_dtype)
  if precision.backward == 'high_precision':
    return y, (x, w, group_sizes, None)
  if precision.backward == 'dequantized':
    return y, (xq, wq, group_sizes, None)
  copies = _column_copies(x, w, group_sizes, precision, static.axis_name)
  return y, (*copies, group_sizes, key)


def _bwd(static, residuals, dy):
  x, w, group_sizes, key = residuals
  if static.w_dtype is None:
    raise ValueError('A gradient needs w; only wq was given.')
  precision = static.precision
  backward = None if precision is None else precision.backward
  dtype = static.dtype
  if backward in ('high_precision', 'dequantized'):
    dtype = jnp.promote_types(dtype, static.x_dtype)
  dy = _clear_dead_rows(_as(dy, dtype), group_sizes)
  if backward == 'quantized':
    dgrad, wgrad = _quantized_gradients(dy, x, w, group_sizes, key, precision)
  else:
    x, w = (_backward_operand(operand, static.dtype) for operand in (x, w))
    dgrad = kernels.dgrad(dy, w, group_sizes)
    wgrad = kernels.wgrad(dy, x, group_sizes)
  dgrad, wgrad = _as(dgrad, static.x_dtype), _as(wgrad, static.w_dtype)
  return dgrad, wgrad, None, None, None, None


_matmul.defvjp(_fwd, _bwd)


def _column_copies(x, w, group_sizes, precision, axis_name):
  """Returns Q(x.T) `[K, M]`, with padded tokens, and Q(w.T) `[..., K, N]`."""
  block = _wgrad_block(precision)
  tokens, sizes = _pad_tokens(x, group_sizes, block)
  if sizes is None:
    # A per-token copy has a scale for each of the K channels, which stay local.
    local = precision.lhs.outer == 'token'
    xq = _quantize(tokens.T, precision.lhs, None if local else axis_name)
  else:
    xq = _quantize_tokens(tokens.T, precision.lhs, sizes, None)
  if w is None:
    return xq, None
  return xq, _quantize(w.swapaxes(-1, -2), precision.rhs, axis_name)


def _quantize_tokens(x, spec, group_sizes, key):
  """Returns Q of `[K, M]`, a global scale for each group of tokens."""
  block = formats.FORMATS[spec.format].block
  starts = jnp.arange(x.shape[1] // block) * block
  ends = jnp.cumsum(group_sizes)
  group = jnp.sum(ends <= starts[:, None], axis=1)
  # Blocks of padding past the last group are a group of their own.
  num_groups = group_sizes.shape[0] + 1
  return quantization.quantize_in_groups(x, spec, group, num_groups, key=key)


def _quantized_gradients(dy, x, w, group_sizes, key, precision):
  """Returns dgrad and wgrad, float32, of column copies `x` and `w`."""
  keys = (None, None) if key is None else jax.random.split(key)
  grad = precision.grad
  by_features = dataclasses.replace(grad, hadamard=False)
  dyq = kernels.quantize(dy, by_features, key=keys[0])
  dgrad = kernels.scaled_matmul(dyq, w, group_sizes)
  tokens, sizes = _pad_tokens(dy, group_sizes, _wgrad_block(precision))
  if sizes is None:
    dyq = kernels.quantize(tokens.T, grad, key=keys[1])
  else:
    dyq = _quantize_tokens(tokens.T, grad, sizes, keys[1])
  return dgrad, kernels.scaled_wgrad(dyq, x, sizes)


def _wgrad_block(precision):
  """Returns the number of tokens that fill a block of both operands."""
  specs = (precision.lhs, precision.grad)
  return max(formats.FORMATS[spec.format].block for spec in specs)


def _pad_tokens(x, group_sizes, block):
  """Returns rows padded with zeros so that blocks hold one group's rows only.

  Args:
    x: `[M, K]`, rows sorted by group.
    group_sizes: `[E]` or None.
    block: a power of two.

  Returns:
    `[M', K]` and the padded group sizes, all multiples of the block, or None.
  """
  rows = x.shape[0]
  if group_sizes is None:
    return jnp.pad(x, ((0, -rows % block), (0, 0))), None
  groups = group_sizes.shape[0]
  sizes = (group_sizes + block - 1) // block * block
  before = jnp.tri(groups, k=-1, dtype=jnp.int32)  # [i, j]: j comes before i
  shift = jnp.sum(before * (sizes - group_sizes), axis=1)
  ends = jnp.cumsum(group_sizes)
  index = jnp.arange(rows)
  group = jnp.sum(ends <= index[:, None], axis=1)
  # Rows past the last group go nowhere.
  size = -(-(rows + groups * (block - 1)) // block) * block
  position = jnp.where(
      group < groups, index + shift[jnp.minimum(group, groups - 1)], size
  )
  padded = jnp.zeros((size, x.shape[1]), x.dtype)
  return padded.at[position].set(x, mode='drop'), sizes


def _clear_dead_rows(x, group_sizes):
  """Clears the rows past the last group, so that no amax sees them."""
  if group_sizes is None:
    return x
  live = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
  return jnp.where(live[:, None], x, 0)


def _in_rows(spec):
  """Returns `spec` with 1D blocks, whose rows may have any number."""
  return dataclasses.replace(spec, block_2d=False)


def _backward_operand(operand, dtype):
  if isinstance(operand, qtensor.QTensor):
    return kernels.dequantize(operand, dtype)
  return _as(operand, dtype)


def _quantize(x, spec, axis_name):
  x = _bfloat16(x)
  if axis_name is not None and x.shape[-1] % formats.FORMATS[spec.format].block:
    raise ValueError(
        f'{x.shape[-1]} columns of a shard do not fill blocks of {spec.format}.'
    )
  if axis_name is None or spec.outer == 'none':
    return kernels.quantize(x, spec)
  # As integers: a maximum of floats may lose a NaN.
  amax = quantization.compute_amax(x, spec)
  bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), axis_name)
  amax = lax.bitcast_convert_type(bits, jnp.float32)
  return kernels.quantize(x, spec, amax=amax)


def _bfloat16(x):
  return _as(x, jnp.bfloat16)


def _as(x, dtype):
  """Casts; to bfloat16 with a rounding that XLA cannot drop."""
  if dtype == jnp.bfloat16 and x.dtype != jnp.bfloat16:
    return exact.to_bfloat16(x.astype(jnp.float32))
  return x.astype(dtype)
