"""`exact` inside of Triton kernels: the same rounding points, the same bits.

Division and square root are those of XLA on a GPU, which do not round
correctly (`div.full.f32`, `sqrt.approx.f32`); the tests ask a GPU whether both
agree. `triton_call` has Triton contract no product with a sum.
"""

import triton
import triton.language as tl


@triton.jit
def fence(x):
  """Returns `exact.fence`: float32 rounded to 22 fraction bits."""
  bits = x.to(tl.uint32, bitcast=True)
  bits = (bits + ((bits >> 1) & 1)) & 0xFFFFFFFE
  return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def round_to_bfloat16(x):
  """Returns float32 rounded to bfloat16 values."""
  return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def tree_sum(x, n: tl.constexpr):
  """Returns `exact.tree_sum` over the last axis of `[rows, n]`: `[rows]`."""
  rows: tl.constexpr = x.shape[0]
  for height in tl.static_range(n.bit_length() - 1):
    x = tl.sum(tl.reshape(x, (rows, 2, n >> (height + 1))), axis=1)
  return tl.reshape(x, (rows,))


@triton.jit
def rsqrt(x):
  """Returns `exact.rsqrt`."""
  return fence(1.0 / fence(tl.sqrt(x)))


@triton.jit
def _finite_fence(x):
  """Returns `fence` of numbers that are not infinite; subnormal ones stay.

  Adding the power of two that x has as its exponent leaves 22 fraction bits.
  """
  bits = x.to(tl.uint32, bitcast=True) & 0xFF800000
  power = bits.to(tl.float32, bitcast=True)
  return (x + power) - power


@triton.jit
def exp(x):
  """Returns `exact.exp`."""
  clipped = tl.where(x < -87.0, -87.0, x)  # keeps NaN
  # Adding 1.5 * 2**23 rounds to an integer, halves to even.
  shifted = _finite_fence(clipped * 1.4426950408889634) + 12582912.0
  n = shifted - 12582912.0
  r = (clipped - n * 0.693359375) - _finite_fence(n * -2.12194440e-4)
  p = tl.full(x.shape, 1 / 720, tl.float32)
  p = _finite_fence(p * r) + 1 / 120
  p = _finite_fence(p * r) + 1 / 24
  p = _finite_fence(p * r) + 1 / 6
  p = _finite_fence(p * r) + 0.5
  p = _finite_fence(p * r) + 1.0
  p = _finite_fence(p * r) + 1.0
  # The last bits of `shifted` are those of n.
  power = (shifted.to(tl.int32, bitcast=True) + 127) << 23
  power = power.to(tl.float32, bitcast=True)
  return tl.where(x < -87.0, 0.0, p * power)
