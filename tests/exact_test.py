"""Tests of exact: numpy's float32 results are the oracle, bit for bit.

Each trap test also shows that its inputs would betray the rewrite in question.
"""

import functools
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import jax.test_util
import ml_dtypes
import numpy as np

from nvfp4_jax import exact

_OPERATIONS = {
    'divide': (exact.divide, np.divide),
    'multiply': (exact.multiply, np.multiply),
    'add': (exact.add, np.add),
    'subtract': (exact.subtract, np.subtract),
}
_ONE_SIXTH = np.float32(1 / 6)


class PaddedRowsTest(chex.TestCase):

  @parameterized.parameters((1, 2), (2, 2), (3, 3), (17, 17))
  def test_there_are_at_least_two(self, rows, padded):
    self.assertEqual(exact.padded_rows(rows, jnp.float32), padded)
    with mock.patch.object(exact, '_few_rows_differ', lambda: False):
      self.assertEqual(exact.padded_rows(rows, jnp.bfloat16), padded)

  @parameterized.parameters((1, 16), (16, 16), (17, 32), (65, 80))
  def test_where_few_rows_differ_16_go_together(self, rows, padded):
    with mock.patch.object(exact, '_few_rows_differ', lambda: True):
      self.assertEqual(exact.padded_rows(rows, jnp.bfloat16), padded)
      self.assertEqual(exact.padded_rows(rows, jnp.float32), max(rows, 2))

  def test_this_machine_is_asked_also_while_tracing(self):
    exact._few_rows_differ.cache_clear()
    traced = jax.jit(jax.vmap(lambda x: x * exact._few_rows_differ()))
    got = bool(traced(jnp.ones(1))[0])
    exact._few_rows_differ.cache_clear()
    self.assertEqual(got, exact._few_rows_differ())


class OperationTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.product(
      name=tuple(_OPERATIONS),
      rhs=('array', 'row', 'column', 6.0, 2688.0),
  )
  def test_rounds_once_to_nearest(self, name, rhs):
    operation, numpy_operation = _OPERATIONS[name]
    a = _random(0, (512, 512))
    if isinstance(rhs, float):
      got = self.variant(lambda a: operation(a, rhs))(jnp.asarray(a))
      b = np.float32(rhs)
    else:
      shape = {'array': (512, 512), 'row': (512,), 'column': (512, 1)}[rhs]
      b = _random(1, shape)
      got = self.variant(operation)(jnp.asarray(a), jnp.asarray(b))
    chex.assert_type(got, jnp.float32)
    _assert_bits_equal(got, numpy_operation(a, b))

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(1.0, 1536.0, 2688.0)
  def test_quotient_of_a_constant_rounds_once(self, numerator):
    b = _random(1, (512, 512))
    got = self.variant(lambda b: exact.divide(numerator, b))(jnp.asarray(b))
    _assert_bits_equal(got, np.float32(numerator) / b)

  @parameterized.product(name=tuple(_OPERATIONS), way=('vmap', 'scan'))
  def test_rounds_once_inside_vmap_and_scan(self, name, way):
    operation, numpy_operation = _OPERATIONS[name]
    a, b = _random(0, (64, 4096)), _random(1, (64, 1))
    run = {
        'vmap': jax.jit(jax.vmap(operation)),
        'scan': lambda a, b: jax.lax.scan(
            lambda _, ab: (None, operation(*ab)), None, (a, b)
        )[1],
    }[way]
    got = run(jnp.asarray(a), jnp.asarray(b))
    _assert_bits_equal(got, numpy_operation(a, b))

  def test_a_reciprocal_multiply_would_be_seen(self):
    a = _random(0, (512, 512))
    for divisor in np.array([6, 448, 2688], np.float32):
      rewritten = a * (np.float32(1) / divisor)
      self.assertGreater(np.mean(rewritten != a / divisor), 0.1)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.named_parameters(
      ('overflow', 'multiply', 3e38, 10.0, np.inf),
      ('underflow_of_a_quotient', 'divide', 1.0, np.inf, 0.0),
      ('division_by_zero', 'divide', 1.0, 0.0, np.inf),
      ('zero_by_zero', 'divide', 0.0, 0.0, np.nan),
      ('nan', 'add', np.nan, 1.0, np.nan),
      ('infinities', 'subtract', np.inf, np.inf, np.nan),
      ('negative_zero', 'multiply', -1.0, 0.0, -0.0),
  )
  def test_special_values_are_those_of_float32(self, name, a, b, want):
    got = self.variant(_OPERATIONS[name][0])(jnp.float32(a), jnp.float32(b))
    np.testing.assert_array_equal(got, np.float32(want))
    if not np.isnan(want):
      self.assertEqual(np.signbit(got), np.signbit(want))

  def test_leaves_the_default_dtypes_alone(self):
    chex.assert_type(exact.divide(1.0, 3.0), jnp.float32)
    chex.assert_type(jnp.ones(2) * 2, jnp.float32)
    chex.assert_type(exact.add(jnp.ones(2, jnp.bfloat16), 1), jnp.float32)


class ChainTest(chex.TestCase):
  """Chains in one jit: no step may be skipped, contracted or reordered."""

  def setUp(self):
    super().setUp()
    self.a = _random(0, (512, 512))
    self.b = _random(1, (512, 512))
    self.c = _random(2, (512, 512))
    self.column = _random(3, (512, 1))

  @chex.variants(with_jit=True, without_jit=True)
  def test_product_and_sum_are_two_roundings(self):
    def chain(a, b, c):
      return exact.add(exact.multiply(a, b), c)

    want = self.a * self.b + self.c
    fused = self.a.astype(np.float64) * self.b + self.c
    self.assertGreater(np.mean(fused.astype(np.float32) != want), 0.1)
    got = self.variant(chain)(*map(jnp.asarray, (self.a, self.b, self.c)))
    _assert_bits_equal(got, want)

  @chex.variants(with_jit=True, without_jit=True)
  def test_product_with_a_column_and_sum_are_two_roundings(self):
    def chain(a, b, c):
      return exact.add(exact.multiply(a, b), c)

    want = self.column * self.b + self.c
    got = self.variant(chain)(*map(jnp.asarray, (self.column, self.b, self.c)))
    _assert_bits_equal(got, want)

  @chex.variants(with_jit=True, without_jit=True)
  def test_product_and_difference_are_two_roundings(self):
    def chain(a, b, c):
      return exact.subtract(exact.multiply(a, b), c)

    want = self.a * self.b - self.c
    got = self.variant(chain)(*map(jnp.asarray, (self.a, self.b, self.c)))
    _assert_bits_equal(got, want)

  @chex.variants(with_jit=True, without_jit=True)
  def test_factors_keep_their_order(self):
    def chain(a, column):
      return exact.multiply(exact.multiply(a, _ONE_SIXTH), column)

    want = (self.a * _ONE_SIXTH) * self.column
    reordered = self.a * (_ONE_SIXTH * self.column)
    self.assertGreater(np.mean(reordered != want), 0.1)
    got = self.variant(chain)(*map(jnp.asarray, (self.a, self.column)))
    _assert_bits_equal(got, want)

  @chex.variants(with_jit=True, without_jit=True)
  def test_block_scale_of_rows_is_rounded_at_every_step(self):
    # The chain of a per-token block scale, fused into one kernel.
    def chain(blocks):
      block_amax = jnp.max(jnp.abs(blocks), axis=-1)
      amax = jnp.max(block_amax, axis=-1, keepdims=True)
      encode = exact.divide(2688.0, amax)
      sixth = exact.multiply(encode, _ONE_SIXTH)
      return exact.multiply(block_amax, sixth)

    blocks = _random(4, (42, 256, 16, 16))
    block_amax = np.max(np.abs(blocks), axis=-1)
    amax = np.max(block_amax, axis=-1, keepdims=True)
    encode = np.float32(2688) / amax
    want = block_amax * (encode * _ONE_SIXTH)
    skipped = block_amax * (encode * np.float64(_ONE_SIXTH))
    self.assertGreater(np.mean(skipped.astype(np.float32) != want), 0.1)
    got = self.variant(chain)(jnp.asarray(blocks))
    _assert_bits_equal(got, want)

  @chex.variants(with_jit=True, without_jit=True)
  def test_quotient_of_a_quotient_is_rounded_twice(self):
    def chain(a, b):
      return exact.divide(1.0, exact.divide(a, b))

    want = np.float32(1) / (self.a / self.b)
    self.assertGreater(np.mean(self.b / self.a != want), 0.1)
    got = self.variant(chain)(*map(jnp.asarray, (self.a, self.b)))
    _assert_bits_equal(got, want)

  @chex.variants(with_jit=True, without_jit=True)
  def test_sum_in_order_adds_first_to_last(self):
    x = _random(5, (4096, 16))
    want = functools.reduce(np.add, x.T)
    self.assertGreater(np.mean(np.sum(x, axis=-1) != want), 0.1)
    got = self.variant(exact.sum_in_order)(jnp.asarray(x))
    _assert_bits_equal(got, want)

  @chex.variants(with_jit=True, without_jit=True)
  def test_sum_of_squares_rounds_every_square(self):
    def chain(x):
      return exact.sum_in_order(exact.multiply(x, x))

    x = _random(5, (4096, 16))
    want = functools.reduce(np.add, (x * x).T)
    fused = functools.reduce(
        lambda total, v: (total + v.astype(np.float64) ** 2).astype(np.float32),
        x.T[1:],
        x.T[0] * x.T[0],
    )
    self.assertGreater(np.mean(fused != want), 0.1)
    got = self.variant(chain)(jnp.asarray(x))
    _assert_bits_equal(got, want)


class RoundingPointTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_to_bfloat16_rounds_to_nearest_even(self):
    ties = (np.arange(2**12, dtype=np.uint32) << 15) + np.uint32(0x3F000000)
    bits = np.concatenate([ties - 1, ties, ties + 1])
    x = np.concatenate([_random(0, (2**16,)), bits.view(np.float32)])
    got = self.variant(lambda x: exact.to_bfloat16(x).astype(jnp.float32))(
        jnp.asarray(x)
    )
    _assert_bits_equal(got, x.astype(ml_dtypes.bfloat16).astype(np.float32))

  @chex.variants(with_jit=True, without_jit=True)
  def test_fence_rounds_to_22_fraction_bits(self):
    x = _random(0, (2**16,))
    bits = x.view(np.uint32)
    want = ((bits + ((bits >> 1) & 1)) & ~np.uint32(1)).view(np.float32)
    got = self.variant(exact.fence)(jnp.asarray(x))
    _assert_bits_equal(got, want)

  @chex.variants(with_jit=True, without_jit=True)
  def test_fence_keeps_a_product_out_of_a_sum(self):
    a, b, c = (jnp.asarray(_random(i, (512, 512))) for i in range(3))
    got = self.variant(lambda a, b, c: exact.fence(a * b) + c)(a, b, c)
    fence = jax.jit(exact.fence)
    product = np.asarray(fence(np.asarray(a) * np.asarray(b)))
    _assert_bits_equal(got, product + np.asarray(c))


class TreeSumTest(chex.TestCase):

  def test_adds_halves(self):
    tree_sum = jax.jit(exact.tree_sum)
    for n in (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 40):
      x = _random(n, (3, n))
      _assert_bits_equal(tree_sum(x), _tree_sum(x))

  @chex.variants(with_jit=True, without_jit=True)
  def test_zero_padding_does_not_change_a_bit(self):
    x = _random(0, (7, 13))
    want = _tree_sum(x)
    self.assertTrue(np.any(want != np.sum(x, axis=-1)))
    for n in (13, 14, 16, 17, 100):
      padded = jnp.asarray(np.pad(x, [(0, 0), (0, n - 13)]))
      _assert_bits_equal(self.variant(exact.tree_sum)(padded), want)

  def test_leading_axes_are_batch(self):
    x = _random(0, (2, 3, 40))
    got = jax.jit(exact.tree_sum)(x)
    _assert_bits_equal(got, _tree_sum(x))
    _assert_bits_equal(jax.vmap(exact.tree_sum)(x), got)


class ExponentialTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_exp_is_within_its_relative_error(self):
    x = np.linspace(-87, 88, 2**18, dtype=np.float32)
    got = np.asarray(self.variant(exact.exp)(jnp.asarray(x)), np.float64)
    want = np.exp(x.astype(np.float64))
    self.assertLess(np.max(np.abs(got / want - 1)), 3e-7)

  @chex.variants(with_jit=True, without_jit=True)
  def test_log_is_within_its_error(self):
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            np.exp2(rng.uniform(-126, 127.9, 2**17)),
            rng.uniform(0.5, 2, 2**17),
            1 + np.arange(-512, 512) * 2.0**-23,
        ]
    ).astype(np.float32)
    got = np.asarray(self.variant(exact.log)(jnp.asarray(x)), np.float64)
    want = np.log(x.astype(np.float64))
    # Relative beyond [1/e, e], absolute within.
    error = np.abs(got - want) / np.maximum(1, np.abs(want))
    self.assertLess(np.max(error), 2e-7)
    # Relative everywhere, also near log(1) = 0.
    error = np.abs(got - want) / np.where(want == 0, 1, np.abs(want))
    self.assertLess(np.max(error), 4e-7)

  def test_special_values(self):
    x = jnp.array([0.0, -0.0, -88.0, -jnp.inf, jnp.nan])
    np.testing.assert_array_equal(exact.exp(x), [1, 1, 0, 0, np.nan])
    self.assertGreater(exact.exp(jnp.float32(-87.0)), 0)
    np.testing.assert_array_equal(exact.log(jnp.float32(1.0)), 0)

  @chex.variants(with_jit=True, without_jit=True)
  def test_rsqrt_is_within_its_relative_error(self):
    x = np.exp2(np.linspace(-125, 126, 2**16)).astype(np.float32)
    got = np.asarray(self.variant(exact.rsqrt)(jnp.asarray(x)), np.float64)
    want = 1 / np.sqrt(x.astype(np.float64))
    # Two fences and two operations: at most 3.5 roundings of 2^-23, 2^-24.
    self.assertLess(np.max(np.abs(got / want - 1)), 3.6e-7)

  @parameterized.parameters('exp', 'log', 'rsqrt')
  def test_bits_do_not_depend_on_length_or_position(self, name):
    function = getattr(exact, name)
    jitted = jax.jit(function)
    x = np.abs(_random(0, (2**16,)))
    x = np.minimum(x, 80) if name == 'exp' else x
    want = np.asarray(jitted(x))
    _assert_bits_equal(function(jnp.asarray(x)), want)
    for n in (1, 2, 3, 5, 7, 9, 17, 39):
      start = 17 * n
      part = jitted(x[start : start + n])
      _assert_bits_equal(part, want[start : start + n])
    part = function(jnp.asarray(x[3:10]))
    _assert_bits_equal(part, want[3:10])
    scanned = jax.lax.scan(lambda _, v: (None, function(v)), None, x[:100])[1]
    _assert_bits_equal(scanned, want[:100])
    rows = jax.jit(jax.vmap(function))(x.reshape(-1, 64))
    _assert_bits_equal(rows, want.reshape(-1, 64))

  def test_exp_in_one_jit_with_its_consumer_gives_the_same_bits(self):
    x = _random(0, (64, 33))
    y = np.asarray(jax.jit(exact.exp)(x))
    got = jax.jit(lambda x: exact.tree_sum(exact.exp(x)))(x)
    _assert_bits_equal(got, _tree_sum(y))

  @parameterized.parameters('exp', 'log', 'rsqrt')
  def test_gradients_are_those_of_the_function(self, name):
    x = jnp.linspace(0.3, 3.0, 7)
    jax.test_util.check_grads(
        jax.jit(getattr(exact, name)),
        (x,),
        order=1,
        modes=('fwd', 'rev'),
        rtol=2e-2,
    )
    derivative = {
        'exp': np.exp,
        'log': np.reciprocal,
        'rsqrt': lambda x: -0.5 * x**-1.5,
    }[name]
    want = derivative(np.asarray(x))
    got = jax.jit(jax.vmap(jax.grad(getattr(exact, name))))(x)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def _random(seed, shape):
  """Returns float32 of random sign, 24-bit significand and size 2^-8 to 2^8."""
  rng = np.random.default_rng(seed)
  significand = rng.integers(2**23, 2**24, shape).astype(np.float32)
  exponent = rng.integers(-8, 8, shape) - 23
  sign = rng.choice(np.array([-1, 1], np.float32), shape)
  return np.ldexp(sign * significand, exponent).astype(np.float32)


def _tree_sum(x):
  """Returns the sum over the last axis by halves, in numpy."""
  size = 1
  while size < x.shape[-1]:
    size *= 2
  x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
  while x.shape[-1] > 1:
    x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
  return x[..., 0]


def _assert_bits_equal(got, want):
  got, want = np.asarray(got), np.asarray(want)
  chex.assert_equal_shape((got, want))
  chex.assert_type((got, want), np.float32)
  np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
