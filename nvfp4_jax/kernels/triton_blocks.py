"""What Triton's quantizers do with blocks of 16 elements.

A tile `[R, B]` of blocks is held as sixteen elements, float32 `[R, B]` each: a
thread has whole blocks, so that nothing here but a square's rows crosses
threads. `low` and `high` are tuples of elements 0 to 7 and 8 to 15.

Every float32 operation rounds once: divisions are `div_rn`, and nothing is
contracted but by `tl.fma`, where that is exact.
"""

import triton
import triton.language as tl

_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
_ONE_SIXTH = tl.constexpr(0.16666667163372040)  # f32(1/6)
ONE_448TH = tl.constexpr(0.0022321429569274187)  # f32(1/448)
_NAN_E4M3 = tl.constexpr(0x7F)
_ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)

# Adding 1.5 * 2^22, 2^23 or 2^24 rounds to a multiple of 0.5, 1 or 2, the steps
# of E2M1 from 0, 2 and 4 on, and leaves the multiple in the low bits. What is
# added besides makes it the code on each stretch. The code is concave in the
# value, hence the smallest of the three; it is kept with the bits of the first.
_STEP_HALF = tl.constexpr(6291456.0)
_STEP_ONE = tl.constexpr(12582912.0 + 2.0)
_STEP_TWO = tl.constexpr(25165824.0 + 8.0)
_ONE_TO_HALF = tl.constexpr(0x800000)
_TWO_TO_HALF = tl.constexpr(0x1000000)
_LARGEST_CODE = tl.constexpr(0x4AC00000 + 7)
# The sum of 0x4AC00000 << 4 i, i = 0 to 7, modulo 2^32.
_BIASES = tl.constexpr((0x4AC00000 + 0xAC000000 + 0xC0000000) & 0xFFFFFFFF)


@triton.jit
def float_bits(x):
  """Returns the bits of float32 numbers, int32."""
  return x.to(tl.int32, bitcast=True)


@triton.jit
def _split8(x):
  """Returns the eight elements of the last axis, float32."""
  x = tl.reshape(x, (x.shape[0], x.shape[1], 2, 2, 2))
  even, odd = tl.split(x)
  e04, e26 = tl.split(even)
  e15, e37 = tl.split(odd)
  e0, e4 = tl.split(e04)
  e2, e6 = tl.split(e26)
  e1, e5 = tl.split(e15)
  e3, e7 = tl.split(e37)
  return e0, e1, e2, e3, e4, e5, e6, e7


@triton.jit
def _larger(a, b):
  """Returns the larger magnitude; NaN if one is NaN."""
  return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=_ALL_NAN)


@triton.jit
def _amax8(e):
  return _larger(
      _larger(_larger(e[0], e[1]), _larger(e[2], e[3])),
      _larger(_larger(e[4], e[5]), _larger(e[6], e[7])),
  )


@triton.jit
def amax(low, high):
  """Returns the largest magnitude of each block; NaN if it holds one."""
  return _larger(_amax8(low), _amax8(high))


@triton.jit
def _divide(a, b):
  """Returns a / b, rounded once; `a` is a Python number."""
  return tl.div_rn(tl.full(b.shape, a, tl.float32), b)


@triton.jit
def _code(v):
  """Returns the E2M1 magnitude code of `v`, plus 0x4AC00000."""
  v = tl.abs(v)
  half = float_bits(v + _STEP_HALF)
  one = float_bits(v + _STEP_ONE) - _ONE_TO_HALF
  two = float_bits(v + _STEP_TWO) - _TWO_TO_HALF
  return tl.minimum(tl.minimum(half, one), tl.minimum(two, _LARGEST_CODE))


@triton.jit
def _signs(low, high):
  """Returns bit 15 where low < 0 and bit 31 where high < 0."""
  # Adding zero makes -0.0 positive.
  low = (low + 0.0).to(tl.uint32, bitcast=True)
  high = (high + 0.0).to(tl.uint32, bitcast=True)
  return ((low >> 16) & 0x8000) | (high & 0x80000000)


@triton.jit
def pack8(e, encode):
  """Returns the codes of eight elements times `encode`, uint32."""
  v0, v1, v2, v3 = e[0] * encode, e[1] * encode, e[2] * encode, e[3] * encode
  v4, v5, v6, v7 = e[4] * encode, e[5] * encode, e[6] * encode, e[7] * encode
  word = _code(v7)
  word = (word << 4) + _code(v6)
  word = (word << 4) + _code(v5)
  word = (word << 4) + _code(v4)
  word = (word << 4) + _code(v3)
  word = (word << 4) + _code(v2)
  word = (word << 4) + _code(v1)
  word = (word << 4) + _code(v0)
  signs = _signs(v0, v4)
  signs = (signs >> 4) | _signs(v1, v5)
  signs = (signs >> 4) | _signs(v2, v6)
  signs = (signs >> 4) | _signs(v3, v7)
  return (word.to(tl.uint32, bitcast=True) - _BIASES) | signs


@triton.jit
def _step(scale, decode):
  """Returns the factor of elements for E4M3 scales: 1 / (scale * D)."""
  factor = _divide(1.0, scale.to(tl.float32) * decode)
  return tl.minimum(factor, _FLOAT32_MAX)


@triton.jit
def _to_e4m3(scale):
  return tl.minimum(scale, 448.0).to(tl.float8e4nv)


@triton.jit
def _value(x, factor):
  """Returns the E2M1 magnitude nearest to `x * factor`."""
  v = tl.minimum(tl.abs(x * factor), 6.0)
  power = float_bits(v) & 0x7F800000
  power = tl.maximum(power, 0x3F800000).to(tl.float32, bitcast=True)
  # power * 2^22 has a unit of half a power of two: E2M1's step.
  rounded = tl.fma(power, 4194304.0, v)
  return tl.fma(power, -4194304.0, rounded)


@triton.jit
def _add_error(total, x, factor, scale, amax, NUMERATOR, MSE, FAST, SAFE):
  """Adds an element's error to `total`; amax is S where FAST."""
  product = _value(x, factor) * scale
  if FAST:
    difference = product - tl.abs(x * amax)
  else:
    product = product * amax
    if SAFE:
      # Exact where neither quotient nor remainder is subnormal or infinite.
      quotient = product * (1.0 / NUMERATOR)
      remainder = tl.fma(quotient, -NUMERATOR, product)
      value = tl.fma(remainder, 1.0 / NUMERATOR, quotient)
    else:
      value = tl.div_rn(product, tl.full(product.shape, NUMERATOR, tl.float32))
    difference = value - tl.abs(x)
  if MSE:
    return total + difference * difference
  return total + tl.abs(difference)


@triton.jit
def _error8(total, e, factor, scale, amax, NUMERATOR, MSE, FAST, SAFE):
  for i in tl.static_range(8):
    total = _add_error(
        total, e[i], factor, scale, amax, NUMERATOR, MSE, FAST, SAFE
    )
  return total


@triton.jit
def _error(low, high, scale, decode, amax, NUMERATOR, MSE, FAST, SAFE):
  factor, scale = _step(scale, decode), scale.to(tl.float32)
  total = tl.zeros(scale.shape, tl.float32)
  total = _error8(total, low, factor, scale, amax, NUMERATOR, MSE, FAST, SAFE)
  return _error8(total, high, factor, scale, amax, NUMERATOR, MSE, FAST, SAFE)


@triton.jit
def over_rows(x, ROWS: tl.constexpr):
  """Returns for each row the largest of its group of ROWS rows."""
  rows: tl.constexpr = x.shape[0]
  columns: tl.constexpr = x.shape[1]
  groups = tl.reshape(x, (rows // ROWS, ROWS, columns))
  largest = tl.max(groups, axis=1)[:, None, :]
  return tl.reshape(tl.broadcast_to(largest, groups.shape), (rows, columns))


@triton.jit
def _sum_of_16_rows(x):
  """Returns for each row the sum of its 16 rows: those 8 apart, 4, 2, 1."""
  rows: tl.constexpr = x.shape[0]
  columns: tl.constexpr = x.shape[1]
  y = tl.reshape(x, (rows // 16, 2, 2, 2, 2, columns))
  y = tl.sum(tl.sum(tl.sum(tl.sum(y, axis=1), axis=1), axis=1), axis=1)
  shape: tl.constexpr = (rows // 16, 16, columns)
  return tl.reshape(tl.broadcast_to(y[:, None, :], shape), (rows, columns))


@triton.jit
def _choose(
    low, high, block, amax, encode, decode, E, MSE, FAST, SQUARES, SAFE
):
  """Returns the E4M3 scales of the better of map-to-six and map-to-four."""
  base = tl.div_rn(block, tl.full(block.shape, 6.0, tl.float32)) * encode
  six, four = _to_e4m3(base), _to_e4m3(base * 1.5)
  size = encode if FAST else amax
  to_six = _error(low, high, six, decode, size, 6.0 * E, MSE, FAST, SAFE)
  to_four = _error(low, high, four, decode, size, 6.0 * E, MSE, FAST, SAFE)
  if SQUARES:
    to_six, to_four = _sum_of_16_rows(to_six), _sum_of_16_rows(to_four)
  take_four = to_four < to_six
  return tl.where(
      take_four,
      four.to(tl.uint8, bitcast=True),
      six.to(tl.uint8, bitcast=True),
  ).to(tl.float8e4nv, bitcast=True)


@triton.jit
def nvfp4(low, high, block, amax, finite, E, FOUR, MSE, FAST, SQUARES):
  """Returns code words, scale bytes and D of a tile `[R, blocks]`.

  `block` holds block amax, `amax` and `finite` the outer ones `[R]`.
  """
  ordinary = (amax > 0) & (float_bits(amax) < 0x7F800000)
  encode = tl.where(ordinary, _divide(6.0 * E, amax), 1.0)
  encode = tl.minimum(encode, _FLOAT32_MAX)
  decode = _divide(1.0, encode)
  if FOUR:
    if FAST:
      scale = _choose(
          low, high, block, amax[:, None], encode[:, None], decode[:, None],
          E, MSE, FAST, SQUARES, True,
      )  # fmt: skip
    else:
      # Where the shorter division by 6 E is exact.
      smallest = tl.min(amax) > 1e-20
      if smallest & (tl.max(amax) < 1e30):
        scale = _choose(
            low, high, block, amax[:, None], encode[:, None], decode[:, None],
            E, MSE, FAST, SQUARES, True,
        )  # fmt: skip
      else:
        scale = _choose(
            low, high, block, amax[:, None], encode[:, None], decode[:, None],
            E, MSE, FAST, SQUARES, False,
        )  # fmt: skip
  else:
    scale = _to_e4m3(block * (encode * _ONE_SIXTH)[:, None])
  factor = _step(scale, decode[:, None])
  finite = tl.broadcast_to(finite[:, None], block.shape)
  first = tl.where(finite, pack8(low, factor), 0)
  second = tl.where(finite, pack8(high, factor), 0)
  scale = tl.where(finite, scale.to(tl.uint8, bitcast=True), _NAN_E4M3)
  return first, second, scale, decode


@triton.jit
def load(x_ptr, row, block, live, K):
  """Returns the two halves of blocks of 16, `[R, blocks]` each, float32."""
  offset = (row[:, None].to(tl.int64) * K)[:, :, None]
  offset += (block * 16)[None, :, None] + tl.arange(0, 8)[None, None, :]
  live = tl.broadcast_to(live[:, :, None], offset.shape)
  low = tl.load(x_ptr + offset, mask=live, other=0.0).to(tl.float32)
  high = tl.load(x_ptr + offset + 8, mask=live, other=0.0).to(tl.float32)
  return _split8(low), _split8(high)


@triton.jit
def store_words(data_ptr, row, block, live, K, first, second):
  """Stores two words of E2M1 codes for each block, as 8 bytes of uint8 data."""
  data_ptr = data_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
  offset = (row[:, None].to(tl.int64) * (K // 8))[:, :, None]
  offset += (block * 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
  live = tl.broadcast_to(live[:, :, None], offset.shape)
  tl.store(data_ptr + offset, tl.join(first, second), mask=live)


@triton.jit
def store_scale(scale_ptr, row, block, live, blocks_per_row, scale):
  """Stores the byte of each block's scale."""
  scale_ptr = scale_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
  offset = row[:, None].to(tl.int64) * blocks_per_row + block[None, :]
  tl.store(scale_ptr + offset, scale, mask=live)


@triton.jit
def to_e8m0(scale):
  """Returns the byte of the smallest power of two not below finite `scale`."""
  bits = float_bits(scale)
  exponent, mantissa = bits >> 23, bits & 0x7FFFFF
  is_small = (exponent == 0) & (mantissa <= 0x400000)
  up = (mantissa != 0) & (exponent != 254) & (is_small == 0)
  return exponent + up.to(tl.int32)


@triton.jit
def _e4m3_word(a, b, c, d, factor):
  """Returns the E4M3 codes of four elements times `factor`, uint32."""
  a = (a * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
  b = (b * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
  c = (c * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
  d = (d * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
  return (a | (b << 8)) | ((c << 16) | (d << 24))


@triton.jit
def store_e4m3(data_ptr, row, block, live, K, e, factor, finite, FIRST):
  """Stores codes of the elements FIRST to FIRST + 7 of each 16."""
  low = _e4m3_word(e[0], e[1], e[2], e[3], factor)
  high = _e4m3_word(e[4], e[5], e[6], e[7], factor)
  low, high = tl.where(finite, low, 0), tl.where(finite, high, 0)
  data_ptr = data_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
  offset = (row[:, None].to(tl.int64) * (K // 4))[:, :, None]
  offset += (block * 4)[None, :, None] + tl.arange(0, 2)[None, None, :]
  live = tl.broadcast_to(live[:, :, None], offset.shape)
  tl.store(data_ptr + offset + FIRST // 4, tl.join(low, high), mask=live)
