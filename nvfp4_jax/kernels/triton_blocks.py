"""What Triton's quantizers do with blocks of 16 elements.

A tile `[R, B]` of blocks is held as sixteen elements, float32 `[R, B]` each: a
thread has whole blocks, so that nothing here but a square's rows crosses
threads. `low` and `high` are tuples of elements 0 to 7 and 8 to 15.

Every float32 operation rounds once: divisions are `div_rn`, and nothing is
contracted but by `tl.fma`, where that is exact, or in estimates whose error has
a bound: four over six compares estimates of its two errors, and computes a tile
anew, exactly, where for one block they are too near to decide.
"""

import triton
import triton.language as tl

_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
_ONE_SIXTH = tl.constexpr(0.16666667163372040)  # f32(1/6)
ONE_448TH = tl.constexpr(0.0022321429569274187)  # f32(1/448)
_NAN_E4M3 = tl.constexpr(0x7F)
_ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)

# With p the power of two of v, 1 to 4, p 2^22 + v is rounded to E2M1's unit
# there. Its bits are 149 + log2(p) times 2^23, plus the multiple m of the unit,
# and the code is m + 2 log2(p): times _TO_TOP they have it in bits 28 to 31,
# but for a bias.
_UNITS = tl.constexpr(2.0**22)
_TO_TOP = tl.constexpr((1 << 28) + (1 << 6))
_TOP_BIAS = tl.constexpr(6 << 28)

# Below 1 E2M1 has a fixed unit, as float32 has below 2^-126. Hence, of a
# float32 v 2^-126, sign, exponent and one bit of the fraction are an E2M1
# number.
_E2M1_BITS = tl.constexpr(-0x400000)
_HALF_UNIT = tl.constexpr(0x200000)
# Estimates are of x S 2^-10, whose squares neither overflow nor underflow.
_QUICK = tl.constexpr(2.0**-10)
_QUICK_FACTOR = tl.constexpr(2.0**-116)
_QUICK_STEP = tl.constexpr(-(2.0**116))

# How far estimates can be off. Let u = 2^-24, X = x S, B the block's largest X,
# r the decoded element and e = X - r its error, all in units of amax / 6 E. An
# estimate of e is off by 2 u X + u e (S, x S, e), a strict e by 2 u r + u e
# (times amax, by 6 E, e), so that they differ by 4 u X + 4 u e at most. Where
# they round x to different codes, X is within 6 u X of the middle of two, where
# X <= 7 e: 84 u e more. Hence, over 16 elements, with roundings of terms and
# sums:
#
#   sums of |e|  a, a' differ by  64 u B + (90 + 38) u a,
#   sums of e^2  a, a' differ by  32 u B sqrt(a) + (180 + 41) u a + (16 u B)^2,
#
# and sqrt(a) + sqrt(b) <= sqrt(2 (a + b)). Sixteen rows have sixteen times the
# first term of |e|, four times that of e^2. The constants are 256 u, 144 u, and
# 2560 u^2 as the square of sqrt(2) 32 u; that of B^2 is larger than needed,
# also for squares that underflow in the strict sum.
_OF_SUMS = tl.constexpr(-(2.0**-16))
_OF_LARGEST = tl.constexpr(144.0 * 2.0**-24)
_OF_ROOTS = tl.constexpr(2560.0 * 2.0**-48)
_OF_SQUARE = tl.constexpr(-(2.0**-30))


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
def _split4(x):
  """Returns the four elements of the last axis."""
  x = tl.reshape(x, (x.shape[0], x.shape[1], 2, 2))
  even, odd = tl.split(x)
  e0, e2 = tl.split(even)
  e1, e3 = tl.split(odd)
  return e0, e1, e2, e3


@triton.jit
def _low_half(word):
  """Returns the bfloat16 in the low half of uint32, float32."""
  return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high_half(word):
  """Returns the bfloat16 in the high half of uint32, float32."""
  return (word & 0xFFFF0000).to(tl.float32, bitcast=True)


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
def _push(word, x, encode, SATURATE):
  """Returns `word` moved up by 4 bits, and below it the code of x * encode."""
  v = tl.abs(x) * encode
  # Its sign is that of `x`, but positive where `v` is zero.
  sign = tl.fma(x, v, 0.0).to(tl.uint32, bitcast=True) & 0x80000000
  if SATURATE:
    v = tl.minimum(v, 6.0)
  power = float_bits(tl.maximum(v, 1.0)) & 0x7F800000
  units = tl.fma(power.to(tl.float32, bitcast=True), _UNITS, v)
  code = float_bits(units) * _TO_TOP + _TOP_BIAS
  code = code.to(tl.uint32, bitcast=True) | sign
  return (word << 4) | (code >> 28)


@triton.jit
def pack8(e, encode, SATURATE):
  """Returns the codes of eight elements times `encode`, uint32.

  Without SATURATE no product may be 7 or more.
  """
  word = tl.zeros(encode.shape, tl.uint32)
  for i in tl.static_range(8):
    word = _push(word, e[7 - i], encode, SATURATE)
  return word


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
  return _select(to_four < to_six, four, six)


@triton.jit
def _select(condition, a, b):
  """Returns E4M3 `a` where the condition holds, else `b`."""
  a, b = a.to(tl.uint8, bitcast=True), b.to(tl.uint8, bitcast=True)
  return tl.where(condition, a, b).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _add_quick_error(total, x, factor, step, MSE):
  """Adds to `total` the error of `x`, in steps x * factor * 2^126."""
  bits = (float_bits(x * factor) + _HALF_UNIT) & _E2M1_BITS
  difference = tl.fma(bits.to(tl.float32, bitcast=True), step, x)
  if MSE:
    return tl.fma(difference, difference, total)
  return total + tl.abs(difference)


@triton.jit
def _quick_errors(low, high, encode, factors, steps, MSE):
  """Returns estimates of both candidates' errors, of elements * encode."""
  six = tl.zeros(steps[0].shape, tl.float32)
  four = tl.zeros(steps[0].shape, tl.float32)
  for i in tl.static_range(16):
    x = (low[i] if i < 8 else high[i - 8]) * encode
    six = _add_quick_error(six, x, factors[0], steps[0], MSE)
    four = _add_quick_error(four, x, factors[1], steps[1], MSE)
  return six, four


@triton.jit
def _is_decided(six, four, largest, MSE, ROWS):
  """Returns where exact errors are ordered as their estimates are."""
  both = six + four
  margin = tl.fma(both, _OF_SUMS, tl.abs(six - four))
  if MSE:
    square = largest * largest
    margin = tl.fma(square, ROWS * _OF_SQUARE, margin)
    return margin * tl.abs(margin) > both * square * (ROWS * _OF_ROOTS)
  return margin > largest * (ROWS * _OF_LARGEST)


@triton.jit
def _choose_quickly(low, high, block, amax, encode, decode, MSE, SQUARES):
  """Returns scales, factors of elements, and which blocks are in doubt.

  A block that is not in doubt is zero, or has no product of 7 or more.
  """
  # Exact, but where the scale is 0 anyway or the block is in doubt.
  sixth = block * _ONE_SIXTH
  sixth = tl.fma(tl.fma(sixth, -6.0, block), _ONE_SIXTH, sixth)
  base = sixth * encode
  six, four = _to_e4m3(base), _to_e4m3(base * 1.5)
  by_six, by_four = _step(six, decode), _step(four, decode)
  # Of other rows an operation may underflow or overflow: their tiles, as those
  # of small gradients, are computed twice. NaN decides nothing.
  usual = (amax > 1e-11) & (amax < 1e14)
  encode = tl.where(usual, encode * _QUICK, float('nan'))
  factors = by_six * decode * _QUICK_FACTOR, by_four * decode * _QUICK_FACTOR
  steps = six.to(tl.float32) * _QUICK_STEP, four.to(tl.float32) * _QUICK_STEP
  to_six, to_four = _quick_errors(low, high, encode, factors, steps, MSE)
  if SQUARES:
    to_six, to_four = _sum_of_16_rows(to_six), _sum_of_16_rows(to_four)
  largest = block * encode
  rows: tl.constexpr = 16.0 if SQUARES else 1.0
  decided = _is_decided(to_six, to_four, largest, MSE, rows)
  # Where E is 448, both are 448 in the block of amax.
  decided |= steps[0] == steps[1]
  # Neither estimates nor codes of what is decided saturate.
  decided &= largest * factors[0] < 6.9 * 2.0**-126
  take_four = to_four < to_six
  scale = _select(take_four, four, six)
  factor = tl.where(take_four, by_four, by_six)
  return scale, factor, tl.where(decided, 0.0, block) != 0.0


@triton.jit
def _choose_exactly(
    low, high, block, amax, encode, decode, E, MSE, FAST, SQUARES
):
  """Returns the E4M3 scales of the better candidates."""
  if FAST:
    scale = _choose(
        low, high, block, amax[:, None], encode[:, None], decode[:, None],
        E, MSE, FAST, SQUARES, True,
    )  # fmt: skip
  else:
    # Where the shorter division by 6 E is exact; it is for zeros.
    is_safe = tl.min(tl.where(amax > 0, amax, 1.0)) > 1e-20
    if is_safe & (tl.max(amax) < 1e30):
      scale = _choose(
          low, high, block, amax[:, None], encode[:, None], decode[:, None],
          E, MSE, FAST, SQUARES, True,
      )  # fmt: skip
    else:
      scale = _choose(
          low, high, block, amax[:, None], encode[:, None], decode[:, None],
          E, MSE, FAST, SQUARES, False,
      )  # fmt: skip
  return scale


@triton.jit
def _four_over_six(
    low, high, block, amax, encode, decode, E, MSE, FAST, SQUARES
):
  """Returns code words and E4M3 scales."""
  scale, factor, doubtful = _choose_quickly(
      low, high, block, amax[:, None], encode[:, None], decode[:, None],
      MSE, SQUARES,
  )  # fmt: skip
  if tl.max(doubtful.to(tl.int32)) > 0:
    scale = _choose_exactly(
        low, high, block, amax, encode, decode, E, MSE, FAST, SQUARES
    )
    factor = _step(scale, decode[:, None])
    first, second = pack8(low, factor, True), pack8(high, factor, True)
  else:
    first, second = pack8(low, factor, False), pack8(high, factor, False)
  return first, second, scale


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
    first, second, scale = _four_over_six(
        low, high, block, amax, encode, decode, E, MSE, FAST, SQUARES
    )
  else:
    scale = _to_e4m3(block * (encode * _ONE_SIXTH)[:, None])
    factor = _step(scale, decode[:, None])
    first, second = pack8(low, factor, True), pack8(high, factor, True)
  finite = tl.broadcast_to(finite[:, None], block.shape)
  first, second = tl.where(finite, first, 0), tl.where(finite, second, 0)
  scale = tl.where(finite, scale.to(tl.uint8, bitcast=True), _NAN_E4M3)
  return first, second, scale, decode


@triton.jit
def _load8(x_ptr, offset, live):
  """Returns eight elements from each offset `[R, blocks, 1]`, float32."""
  if x_ptr.dtype.element_ty == tl.bfloat16:
    # By words: two elements from a word are two instructions, not three.
    x_ptr = x_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    offset = offset // 2 + tl.arange(0, 4)[None, None, :]
    live = tl.broadcast_to(live, offset.shape)
    words = _split4(tl.load(x_ptr + offset, mask=live, other=0))
    return (
        _low_half(words[0]), _high_half(words[0]),
        _low_half(words[1]), _high_half(words[1]),
        _low_half(words[2]), _high_half(words[2]),
        _low_half(words[3]), _high_half(words[3]),
    )  # fmt: skip
  else:
    offset += tl.arange(0, 8)[None, None, :]
    live = tl.broadcast_to(live, offset.shape)
    x = tl.load(x_ptr + offset, mask=live, other=0.0)
    return _split8(x.to(tl.float32))


@triton.jit
def load(x_ptr, row, block, live, K):
  """Returns the two halves of blocks of 16, `[R, blocks]` each, float32."""
  offset = row[:, None].to(tl.int64) * K + (block * 16)[None, :]
  offset, live = offset[:, :, None], live[:, :, None]
  return _load8(x_ptr, offset, live), _load8(x_ptr, offset + 8, live)


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
