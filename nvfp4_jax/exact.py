"""Float32 operations whose bits do not depend on how XLA compiles them.

XLA may rewrite float32 arithmetic: on CPU it turns `x / c` into a multiply by
the reciprocal, reorders chains of products and contracts `a * b + c` into one
rounding (FMA); on GPU, division and square root are not correctly rounded and
a cast to bfloat16 and back is dropped. `jnp.sum` adds in an order that depends
on the length. Each of these changes a quantizer's bytes, or makes a token's
log-prob depend on the shape of the batch that it was computed in.

Two groups of functions:

* `divide`, `multiply`, `add`, `subtract` compute in float64 and round once to
  float32. A float64 result of one operation on float32 numbers always rounds
  to the correctly rounded float32 result, also when XLA replaces the division
  by a multiply with a float64 reciprocal (a quotient of 24-bit numbers keeps
  2^-49 away from every rounding boundary; that rewrite is off by 2^-52).
  The rounding itself is integer arithmetic on the float64 bits, and the cast
  that follows is then exact. A bare cast does not do: XLA on GPU computes
  f32(f64(a) / f64(b)) in float32, where its division is not exact (on an H200,
  1,104 of 1.2 million packed bytes came out wrong), and XLA on CPU may drop the
  rounding before another float64 operation (YNNPACK does, with whatever follows
  a reduction: 1,510 of 8,704 block scales). Barriers round the cast cure both,
  but cut a quantizer into twice as many loops to compile and run.
* `fence`, `tree_sum`, `rsqrt`, `exp`, `log`, `to_bfloat16` are the rounding
  points of the model: where they stand, learner and sampler compute the same
  bits.

Subnormals are not preserved: XLA on CPU flushes them to zero.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

_FLOAT64_MAGNITUDE = np.uint64(2**63 - 1)
_SMALLEST_NORMAL_FLOAT32 = np.float64(2.0**-126).view(np.uint64)
_LOG2_E = 1.4426950408889634
# log(2) = HIGH + LOW; HIGH has 9 significant bits, so that n * HIGH is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4


def divide(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> jax.Array:
  """Returns the correctly rounded float32 quotient `a / b`."""
  return _in_float64(lax.div, a, b)


def multiply(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> jax.Array:
  """Returns the float32 product `a * b`, rounded once, never contracted."""
  return _in_float64(lax.mul, a, b)


def add(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> jax.Array:
  """Returns the float32 sum `a + b`, rounded once, never contracted."""
  return _in_float64(lax.add, a, b)


def subtract(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> jax.Array:
  """Returns the float32 difference `a - b`, rounded once."""
  return _in_float64(lax.sub, a, b)


def matmul(x: jax.Array, matrix: np.ndarray) -> jax.Array:
  """Returns `x @ matrix`, summed in float64 and rounded once to float32.

  Args:
    x: `[..., K]`.
    matrix: `[K, N]` float64.
  """
  with jax.enable_x64(True):
    contract = (((x.ndim - 1,), (0,)), ((), ()))
    y = lax.dot_general(x.astype(jnp.float64), jnp.asarray(matrix), contract)
    return _round_to_float32(y)


def padded_rows(rows: int, dtype: jax.typing.DTypeLike) -> int:
  """Returns how many rows a dot must have for bits that do not depend on them.

  XLA adds in another order where there is one row. On CPUs with bfloat16
  instructions (AVX512-BF16, AMX) the kernels for few rows, and for what is left
  of a tile, differ as well; multiples of 16 rows met only one of them, for all
  shapes that were tried. `self_check` asks for it.

  Args:
    rows: of the operand; the others are to be zeros.
    dtype: of both operands.
  """
  if jnp.dtype(dtype) == jnp.bfloat16 and _few_rows_differ():
    return -(-rows // 16) * 16
  return max(rows, 2)


@functools.cache
def _few_rows_differ() -> bool:
  """Returns whether bfloat16 dots of 2, 17 and 64 rows have other bits here."""
  if jax.default_backend() != 'cpu':
    return False
  random = np.random.default_rng(0)
  x, w = random.standard_normal((2, 64, 256)).astype(jnp.bfloat16)
  contract = (((1,), (1,)), ((), ()))
  dot = jax.jit(
      lambda x: lax.dot_general(
          x, w, contract, preferred_element_type=jnp.float32
      )
  )
  with jax.ensure_compile_time_eval():
    few, some, many = (np.asarray(dot(x[:rows])) for rows in (2, 17, 64))
  return any(
      np.any(part.view(np.uint32) != many[: len(part)].view(np.uint32))
      for part in (few, some)
  )


def sum_in_order(x: jax.Array) -> jax.Array:
  """Returns the float32 sum of `x` over its last axis, first to last.

  Args:
    x: float32; not a bare product, which an FMA could take unrounded, but the
      result of `multiply` or of a sum.
  """
  total = x[..., 0]
  for i in range(1, x.shape[-1]):
    total = total + x[..., i]
  return total


@jax.custom_jvp
def round_to_bfloat16(x: jax.Array) -> jax.Array:
  """Returns float32 `x` rounded to bfloat16 values; its derivative is 1."""
  return lax.reduce_precision(x, 8, 7)


round_to_bfloat16.defjvp(lambda x, t: (round_to_bfloat16(*x), *t))


def to_bfloat16(x: jax.Array) -> jax.Array:
  """Rounds to bfloat16, to nearest even, where a bare cast might be dropped."""
  return round_to_bfloat16(x).astype(jnp.bfloat16)


@jax.custom_jvp
def fence(x: jax.Array) -> jax.Array:
  """Rounds float32 `x` to 22 fraction bits; XLA cannot move or fuse this.

  Put it on an inexact product that feeds a sum, so that no FMA can change the
  sum, and on a factor that must not be reordered with others.
  """
  return _fence(x)


fence.defjvp(lambda x, t: (fence(*x), *t))


@jax.custom_jvp
def tree_sum(x: jax.Array) -> jax.Array:
  """Returns the sum over the last axis, as a tree of power-of-two halves.

  The order depends on nothing but the position of each element: appending
  zeros, also up to the next powers of two, does not change a bit.

  Args:
    x: `[..., n]` float32.
  """
  n = x.shape[-1]
  size = 1 << max(n - 1, 0).bit_length()
  if size != n:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - n)])
  while size > 1:
    size //= 2
    x = x[..., :size] + x[..., size:]
  return x[..., 0]


tree_sum.defjvp(lambda x, t: (tree_sum(*x), jnp.sum(*t, axis=-1)))


@jax.custom_jvp
def rsqrt(x: jax.Array) -> jax.Array:
  """Returns 1 / sqrt(x) for float32 `x > 0`, each step rounded.

  The fence between the steps keeps XLA from replacing both by its own, less
  exact rsqrt where nothing else uses the square root.
  """
  return _fence(1.0 / _fence(jnp.sqrt(x)))


@rsqrt.defjvp
def _rsqrt_jvp(primals, tangents):
  y = rsqrt(*primals)
  return y, -0.5 * y**3 * tangents[0]


@jax.custom_jvp
def exp(x: jax.Array) -> jax.Array:
  """Returns e**x for float32 `x <= 88`, 0 below -87, within 3e-7 relative.

  The polynomial is evaluated with a `fence` between product and sum, so that
  scalar and vector code give the same bits. NaN gives NaN.
  """
  clipped = jnp.maximum(x, -87.0)
  n = jnp.round(_fence(clipped * _LOG2_E))
  r = (clipped - n * _LN2_HIGH) - _fence(n * _LN2_LOW)
  p = jnp.full_like(r, 1 / 720)
  for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
    p = _fence(p * r) + jnp.float32(coefficient)
  power = (n.astype(jnp.int32) + 127) << 23
  return jnp.where(
      x < -87.0, 0.0, p * lax.bitcast_convert_type(power, jnp.float32)
  )


@exp.defjvp
def _exp_jvp(primals, tangents):
  y = exp(*primals)
  return y, y * tangents[0]


@jax.custom_jvp
def log(x: jax.Array) -> jax.Array:
  """Returns the natural logarithm of normal float32 `x > 0`, within 4e-7.

  Evaluated like `exp`, with fences instead of contractions. NaN gives NaN.
  """
  bits = lax.bitcast_convert_type(x, jnp.int32)
  exponent = (bits - 0x3F3504F3) >> 23  # mantissa in [sqrt(1/2), sqrt(2))
  m = lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32)
  z = (m - 1.0) / (m + 1.0)
  square = _fence(z * z)
  p = jnp.full_like(z, 1 / 9)
  for coefficient in (1 / 7, 1 / 5, 1 / 3, 1.0):
    p = _fence(p * square) + jnp.float32(coefficient)
  n = exponent.astype(jnp.float32)
  y = (_fence(2.0 * z * p) + _fence(n * _LN2_LOW)) + n * _LN2_HIGH
  return jnp.where(jnp.isnan(x), x, y)


@log.defjvp
def _log_jvp(primals, tangents):
  return log(*primals), tangents[0] / primals[0]


def _fence(x):
  """`fence` without its derivative, for functions that have their own."""
  return lax.reduce_precision(x, 8, 22)


def _in_float64(operation, a, b):
  """Returns `operation` of two broadcast float32 arrays, rounded once."""
  a, b = (jnp.asarray(v, jnp.float32) for v in (a, b))
  with jax.enable_x64(True):
    a, b = (v.astype(jnp.float64) for v in jnp.broadcast_arrays(a, b))
    return _round_to_float32(operation(a, b))


def _round_to_float32(x):
  """Rounds float64 to float32, to nearest even, where XLA cannot undo it.

  The 29 bits that float32 lacks are rounded away in the float64 number. A
  result below float32's normal range has fewer bits, and is left to the cast.
  """
  bits = lax.bitcast_convert_type(x, jnp.uint64)
  odd = (bits >> np.uint64(29)) & np.uint64(1)
  rounded = (bits + (np.uint64(2**28 - 1) + odd)) & ~np.uint64(2**29 - 1)
  is_normal = (bits & _FLOAT64_MAGNITUDE) >= _SMALLEST_NORMAL_FLOAT32
  rounded = jnp.where(is_normal, rounded, bits)
  return lax.bitcast_convert_type(rounded, jnp.float64).astype(jnp.float32)
