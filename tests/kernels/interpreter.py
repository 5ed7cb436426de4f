"""Runs Triton kernels on a CPU, on numpy arrays, in Triton's interpreter.

The interpreter (3.6) is wrong for some narrow types: products and `tl.dot` take
the raw bits of bfloat16, float32 is rounded to E4M3 without carry or
saturation, and `tl.fma` rounds twice. It has no `tl.dot_scaled`. `call` repairs
that, with ml_dtypes.
TRITON_INTERPRET=1 must be set before Triton is imported.
"""

from collections.abc import Sequence
from concurrent import futures
import contextlib
import functools
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from nvfp4_jax.kernels import triton_call

_E4M3 = ml_dtypes.float8_e4m3fn
_TRITON_TYPES = {
    'bfloat16': 'bf16',
    'float16': 'fp16',
    'float32': 'fp32',
    'float8_e4m3fn': 'fp8e4nv',
    'uint8': 'u8',
    'int32': 'i32',
    'uint32': 'u32',
}


# XLA's threads, which run callbacks, flush subnormal numbers; a thread started
# here does not.
_thread = futures.ThreadPoolExecutor(1)
_thread.submit(int).result()


class Array:
  """A numpy array with what the interpreter asks of a torch tensor."""

  device = 'cpu'

  def __init__(self, array: np.ndarray):
    self.array = np.ascontiguousarray(array)
    self.dtype = _TRITON_TYPES[self.array.dtype.name]

  def data_ptr(self) -> int:
    return self.array.ctypes.data

  def cpu(self) -> 'Array':
    return self

  def untyped_storage(self) -> 'Array':
    return self

  def copy_(self, other: 'Array') -> None:
    if other.array is not self.array:
      self.array[...] = other.array

  def new_empty(self, *_: object, **__: object) -> 'Array':
    return Array(self.array)

  def set_(self, *_: object) -> 'Array':
    return self

  def storage_offset(self) -> int:
    return 0

  def size(self) -> Sequence[int]:
    return self.array.shape

  def stride(self) -> Sequence[int]:
    return tuple(s // self.array.itemsize for s in self.array.strides)

  def element_size(self) -> int:
    return self.array.itemsize


def call(
    kernel, grid, inputs, outputs, aliases=None, **constants
) -> list[np.ndarray]:
  """Returns what the kernel writes.

  Args:
    kernel: a `triton.jit` function.
    grid: numbers of programs.
    inputs: numpy arrays.
    outputs: (shape, dtype) of each.
    aliases: inputs, by number, that outputs start as.
    **constants: its constexpr arguments.
  """
  return _thread.submit(
      _call, kernel, grid, inputs, outputs, aliases or {}, constants
  ).result()


def _call(kernel, grid, inputs, outputs, aliases, constants):
  _repair()
  results = [Array(_not_written(*output)) for output in outputs]
  for source, output in aliases.items():
    results[output].array[...] = inputs[source]
  arguments = [Array(x) for x in inputs]
  with np.errstate(all='ignore'):
    kernel[grid](*arguments, *results, **constants)
  return [result.array for result in results]


def _triton_call(
    kernel,
    *arrays,
    out_shape,
    grid,
    num_warps,
    num_stages=3,
    aliases=None,
    **constants,
):
  """Stands in for `triton_call.call`, also under jit."""
  del num_warps, num_stages

  def run(*arrays):
    given = [np.asarray(array) for array in arrays]
    shapes = [(s.shape, s.dtype) for s in out_shape]
    return call(kernel, grid, given, shapes, aliases, **constants)

  return jax.pure_callback(run, list(out_shape), *arrays)


def installed() -> contextlib.AbstractContextManager:
  """Returns a context in which kernels are interpreted."""
  return mock.patch.object(triton_call, 'call', _triton_call)


def _not_written(shape, dtype):
  """Returns bytes 255, NaN in floats: XLA does not clear an output first."""
  array = np.empty(shape, dtype)
  array.view(np.uint8)[...] = 255
  return array


@functools.cache
def _repair():
  builder = interpreter.InterpreterBuilder
  dot, multiply = builder.create_dot, builder.create_fmul
  fma = builder.create_fma
  convert = interpreter._convert_float
  patch = interpreter._patch_lang_tensor

  def create_dot(self, a, b, d, precision, max_imprecise):
    if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
      return dot(self, a, b, d, precision, max_imprecise)
    product = np.matmul(_values(a), _values(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

  def create_fmul(self, a, b):
    if a.dtype.scalar != tl.bfloat16:
      return multiply(self, a, b)
    product = (_values(a) * _values(b)).astype(ml_dtypes.bfloat16)
    return interpreter.TensorHandle(product.view(np.uint16), a.dtype.scalar)

  def create_fma(self, a, b, c):
    if c.dtype.scalar != tl.float32:
      return fma(self, a, b, c)
    return interpreter.TensorHandle(_fma(a.data, b.data, c.data), tl.float32)

  def convert_float(x, source, target, rounding):
    if (source, target) == (tl.bfloat16, tl.float32):
      return (np.asarray(x).view(np.uint16).astype(np.uint32) << 16).view(
          np.float32
      )
    if (source, target) == (tl.float8e4nv, tl.float32):
      return np.asarray(x).view(np.uint8).view(_E4M3).astype(np.float32)
    if source == tl.float32 and 'RTZ' not in str(rounding):
      x = np.asarray(x)
      x = x if x.dtype == np.float32 else x.view(np.float32)
      if target == tl.bfloat16:
        return x.astype(ml_dtypes.bfloat16).view(np.uint16)
      if target == tl.float8e4nv:
        x = np.clip(x, -448, 448).astype(_E4M3)
        return x.view(np.uint8)
    return convert(x, source, target, rounding)

  def create_dot_scaled(
      self, a, a_scale, a_type, b, b_scale, b_type, fast, a_k, b_k, acc
  ):
    del self, a_type, b_type, fast
    assert a_k and b_k  # codes are packed along K
    x, w = _scaled(a.data, a_scale), _scaled(b.data.T, b_scale)
    y = (x @ w.T).astype(np.float32) + acc.data
    return interpreter.TensorHandle(y, tl.float32)

  def patch_tensor(tensor, scope):
    patch(tensor, scope)
    # A scalar that was loaded has one axis, which NumPy 2.5 refuses in int().
    scope.set_attr(tensor, '__index__', lambda self: self.handle.data.item())

  builder.create_dot, builder.create_fmul = create_dot, create_fmul
  builder.create_fma = create_fma
  builder.create_dot_scaled = create_dot_scaled
  interpreter._convert_float = convert_float
  interpreter._patch_lang_tensor = patch_tensor


def _fma(a, b, c):
  """Returns float32 a b + c, rounded once."""
  product = a.astype(np.float64) * b  # exact
  total = product + c
  # What was lost, exactly. Where it is not zero, an odd last bit of the float64
  # keeps the second rounding from a false tie.
  part = total - product
  lost = (product - (total - part)) + (c - part)
  bits = total.view(np.int64)
  toward = np.where((lost > 0) == (total > 0), 1, -1)
  inexact = np.isfinite(lost) & (lost != 0) & (bits % 2 == 0)
  bits = np.where(inexact, bits + toward, bits)
  return bits.view(np.float64).astype(np.float32)


def _scaled(data, scale):
  """Returns float64 codes times scales, which are E8M0 where they are bytes."""
  is_e4m3 = scale.dtype.scalar == tl.float8e4nv
  scale_type = _E4M3 if is_e4m3 else ml_dtypes.float8_e8m0fnu
  scale = scale.data.view(np.uint8).view(scale_type).astype(np.float64)
  data = np.ascontiguousarray(data).view(np.uint8)
  if is_e4m3:
    codes = np.stack([data & 15, data >> 4], axis=-1)
    values = codes.reshape(data.shape[0], -1).view(ml_dtypes.float4_e2m1fn)
  else:
    values = data.view(_E4M3)
  block = values.shape[1] // scale.shape[1]
  return values.astype(np.float64) * np.repeat(scale, block, axis=1)


def _values(handle):
  if handle.dtype.scalar != tl.bfloat16:
    return handle.data
  bits = handle.data.view(np.uint16).astype(np.uint32) << 16
  return bits.view(np.float32)
