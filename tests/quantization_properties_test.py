"""Properties of every format that hold for all inputs, found by hypothesis.

Shapes are few, since each compiles; values are hypothesis'.
"""

import functools
import os
import subprocess
import sys

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nvfp4_jax import qtensor
from nvfp4_jax import quantization

_Spec = quantization.QuantSpec
_TENSOR, _TOKEN = _Spec('nvfp4'), _Spec('nvfp4', 'token')
_TOKEN_46 = _Spec('nvfp4', 'token', four_over_six='mse')
_2D_46 = _Spec('nvfp4', block_2d=True, four_over_six='mae')
_MXFP8, _MXFP4, _FP8 = _Spec('mxfp8'), _Spec('mxfp4'), _Spec('fp8_block')
_NVFP4 = (_TENSOR, _TOKEN, _TOKEN_46, _2D_46)
_ALL = (*_NVFP4, _MXFP8, _MXFP4, _FP8)
_ROWWISE = (_TOKEN, _TOKEN_46, _MXFP8, _MXFP4, _FP8)

_SHAPE = (16, 64)
_quantize = jax.jit(quantization.quantize, static_argnames='spec')
_dequantize = jax.jit(qtensor.dequantize, static_argnames='dtype')

settings = hypothesis.settings(
    max_examples=20, deadline=None, database=None, derandomize=True
)


@st.composite
def matrices(draw, nonzero=False):
  """bfloat16 `[16, 64]`, of magnitudes 2^-12 to 2^12, and zeros."""
  seed = draw(st.integers(0, 2**32 - 1))
  rng = np.random.default_rng(seed)
  exponents = draw(
      hnp.arrays(np.int32, (_SHAPE[0], 1), elements=st.integers(-6, 6))
  )
  within = draw(st.integers(0, 6))
  x = rng.choice([-1, 1], _SHAPE) * rng.uniform(1, 2, _SHAPE)
  x = np.ldexp(x, exponents + rng.integers(-within, within + 1, _SHAPE))
  if not nonzero:
    x *= rng.uniform(size=_SHAPE) > draw(st.sampled_from([0.0, 0.1, 0.9]))
  return x.astype(ml_dtypes.bfloat16)


def _bytes(array):
  return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def _assert_same(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(_bytes(a), _bytes(b))


class PropertiesTest(chex.TestCase):

  @parameterized.parameters(*_NVFP4)
  @hypothesis.given(x=matrices(), k=st.integers(-40, 40))
  @settings
  def test_power_of_two_changes_only_the_global_scale(self, spec, x, k):
    q = _quantize(x, spec)
    scaled = _quantize(np.ldexp(np.float32(1), k) * x.astype(np.float32), spec)
    _assert_same((scaled.data, scaled.block_scale), (q.data, q.block_scale))
    amax = np.asarray(quantization.compute_amax(jnp.asarray(x), spec))
    want = np.where(amax == 0, 1, np.ldexp(q.global_scale, k))
    np.testing.assert_array_equal(scaled.global_scale, want)

  @parameterized.parameters(_MXFP8, _MXFP4)
  @hypothesis.given(x=matrices(nonzero=True), k=st.integers(-40, 40))
  @settings
  def test_power_of_two_changes_only_the_exponents(self, spec, x, k):
    q = _quantize(x, spec)
    scaled = _quantize(np.ldexp(np.float32(1), k) * x.astype(np.float32), spec)
    _assert_same(scaled.data, q.data)
    np.testing.assert_array_equal(
        _bytes(scaled.block_scale), _bytes(q.block_scale).astype(int) + k
    )

  @parameterized.parameters(*_ALL)
  @hypothesis.given(x=matrices(nonzero=True))
  @settings
  def test_negation_flips_exactly_the_sign_bits(self, spec, x):
    q, negative = _quantize(x, spec), _quantize(-x, spec)
    signs = 0x80 if q.format.elem_max == 448 else 0x88
    np.testing.assert_array_equal(negative.data, np.asarray(q.data) ^ signs)
    _assert_same(
        (negative.block_scale, negative.global_scale),
        (q.block_scale, q.global_scale),
    )

  @parameterized.parameters(*_ROWWISE)
  @hypothesis.given(x=matrices(), seed=st.integers(0, 999))
  @settings
  def test_rows_commute_with_permutation(self, spec, x, seed):
    order = np.random.default_rng(seed).permutation(_SHAPE[0])
    want = jax.tree.map(lambda leaf: leaf[order], _quantize(x, spec))
    _assert_same(_quantize(x[order], spec), want)

  @parameterized.parameters(*_ROWWISE)
  @hypothesis.given(x=matrices(), row=st.integers(1, 15))
  @settings
  def test_a_later_token_never_changes_an_earlier_one(self, spec, x, row):
    changed = x.copy()
    changed[row:] = changed[row:] * 1000 + 7
    q, other = _quantize(x, spec), _quantize(changed, spec)
    _assert_same(
        jax.tree.map(lambda leaf: leaf[:row], other),
        jax.tree.map(lambda leaf: leaf[:row], q),
    )

  @parameterized.parameters(
      # Largest error as a share of its block's amax. E2M1: half the gap from 4
      # to 6 is 1/6, and an E4M3 scale is off by 1/16 at most; a power-of-two
      # scale by up to 2, which halves the grid. E4M3: half a gap of 32 / 448.
      (_TENSOR, 1 / 6 * (1 + 1 / 16) + 1 / 16),
      (_TOKEN, 1 / 6 * (1 + 1 / 16) + 1 / 16),
      (_TOKEN_46, 1 / 6 * (1 + 1 / 16) + 1 / 16),
      (_MXFP4, 1 / 3),
      (_MXFP8, 16 / 448 * 2),
      (_FP8, 16 / 448 * (1 + 1e-5)),  # a division and a product round
  )
  @hypothesis.given(x=matrices())
  @settings
  def test_error_is_bounded_by_the_amax_of_the_block(self, spec, bound, x):
    q = _quantize(x, spec)
    x = x.astype(np.float32)
    error = qtensor.split_blocks(
        np.abs(_dequantize(q, jnp.float32) - x), q.format.block
    )
    limit = bound * np.abs(qtensor.split_blocks(x, q.format.block)).max(-1)
    if q.global_scale is not None:  # a subnormal E4M3 scale is off by 2^-10
      limit = limit + 6 * 2.0**-10 * np.asarray(q.global_scale)
    worst = np.asarray(error).max(-1) - limit
    self.assertLessEqual(worst.max(), 0)

  @hypothesis.given(x=matrices(nonzero=True))
  @settings
  def test_2d_codes_are_those_of_the_transpose(self, x):
    x = np.concatenate([x] * 2)[:, :32]
    for spec in (_Spec('nvfp4', block_2d=True), _Spec('mxfp8', block_2d=True)):
      q, t = _quantize(x, spec), _quantize(x.T, spec)
      values = [np.asarray(_dequantize(v, jnp.float32)) for v in (q, t)]
      np.testing.assert_array_equal(values[0], values[1].T)


class StochasticTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    self.spec = _Spec('nvfp4', rounding='stochastic')
    self.x = jax.random.normal(jax.random.key(0), (8, 256), jnp.bfloat16)

  def test_same_key_same_bytes(self):
    one, again, other = (
        _quantize(self.x, self.spec, key=jax.random.key(i)) for i in (1, 1, 2)
    )
    _assert_same(one, again)
    _assert_same(one.block_scale, other.block_scale)
    self.assertGreater(float(jnp.mean(one.data != other.data)), 0.2)

  def test_is_unbiased_within_four_sigma(self):
    keys = jax.random.split(jax.random.key(3), 4096)
    values = jax.jit(
        jax.vmap(
            lambda key: qtensor.dequantize(
                quantization.quantize(self.x, self.spec, key=key), jnp.float32
            )
        )
    )(keys)
    values = np.asarray(values, np.float64)
    x = np.asarray(self.x, np.float64)
    # A block's largest element may lie beyond 6 by the rounding of the scale.
    q = quantization.quantize(self.x, _TENSOR)
    scale = q.block_scale.astype(jnp.float32) * q.global_scale
    largest = np.repeat(6 * np.asarray(scale, np.float64), 16, axis=1)
    inside = np.abs(x) <= largest
    self.assertGreater(inside.mean(), 0.95)
    sigma = values.std(axis=0) / np.sqrt(len(keys))
    # Beside a grid point the other neighbour may never be drawn: the floor is
    # two draws of it, a gap of the grid being a third of `largest` at most.
    sigma = np.maximum(sigma, largest / (1.5 * len(keys)))
    bias = values.mean(axis=0) - x
    z = (bias / sigma)[inside]
    self.assertLess(np.abs(z).max(), 4.5)  # of 2,000 elements
    self.assertLess(np.abs(z.mean()) * np.sqrt(z.size), 4)
    nearest = np.asarray(qtensor.dequantize(q, jnp.float32), np.float64) - x
    self.assertGreater(np.abs(nearest).mean(), 20 * np.abs(bias).mean())

  def test_values_are_the_neighbours_on_the_grid(self):
    q = _quantize(self.x, self.spec, key=jax.random.key(5))
    nearest = _quantize(self.x, _TENSOR)
    order = lambda codes: np.where(codes & 8, -(codes & 7), codes & 7)
    unpack = lambda q: order(
        np.stack([q.data & 0xF, q.data >> 4], -1).astype(int)
    )
    self.assertLessEqual(np.abs(unpack(q) - unpack(nearest)).max(), 1)

  def test_key_is_needed_there_and_only_there(self):
    with self.assertRaisesRegex(ValueError, 'needs a key'):
      quantization.quantize(self.x, self.spec)
    with self.assertRaisesRegex(ValueError, 'takes no key'):
      quantization.quantize(self.x, _TOKEN, key=jax.random.key(0))


_SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from nvfp4_jax import quantization
mesh = jax.make_mesh((2,), ('data',))
x = jax.random.normal(jax.random.key(0), (8, 512), jnp.bfloat16)
x = x.at[3].mul(100)
sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, P('data')))
for options in ({'outer': 'token'}, {'outer': 'token', 'four_over_six': 'mse'}):
  spec = quantization.QuantSpec('nvfp4', **options)
  quantize = lambda x: quantization.quantize(x, spec)
  want = jax.jit(quantize)(x)
  got = jax.jit(jax.shard_map(
      quantize, mesh=mesh, in_specs=P('data'), out_specs=P('data')))(sharded)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert len(a.sharding.device_set) == 2
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8),
                                  np.asarray(b).view(np.uint8))
print('equal')
"""


class ReportA14Test(chex.TestCase):
  """A token's bytes never depend on its neighbours (TransformerEngine#2931)."""

  def setUp(self):
    super().setUp()
    x = jax.random.normal(jax.random.key(0), (8, 512), jnp.bfloat16)
    self.x = x.at[3].mul(100)

  @parameterized.parameters(_TOKEN, _TOKEN_46, _MXFP8)
  def test_row_is_the_same_however_it_is_quantized(self, spec):
    want = jax.tree.map(lambda leaf: leaf[:1], _quantize(self.x, spec))
    padded = jnp.pad(self.x, ((0, 5), (0, 0)))
    alone = functools.partial(quantization.quantize, spec=spec)
    first = lambda q: jax.tree.map(lambda leaf: leaf[:1], q)
    for got in (
        alone(self.x[:1]),
        first(_quantize(padded, spec)),
        jax.tree.map(lambda leaf: leaf[7:], _quantize(self.x[::-1], spec)),
        jax.tree.map(
            lambda leaf: leaf[0], jax.jit(jax.vmap(alone))(self.x[:, None])
        ),
    ):
      _assert_same(got, want)

  def test_per_tensor_scale_is_the_fault(self):
    together = _quantize(self.x, _TENSOR)
    alone = quantization.quantize(self.x[:1], _TENSOR)
    differ = np.sum(np.asarray(together.data[:1] != alone.data))
    self.assertGreater(differ, 0)

  def test_row_is_the_same_under_shard_map(self):
    env = os.environ | {
        'XLA_FLAGS': '--xla_force_host_platform_device_count=2',
        'PYTHONPATH': '.',
    }
    result = subprocess.run(
        [sys.executable, '-c', _SHARDED],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(result.stdout, 'equal\n', result.stderr)


class InputTest(chex.TestCase):
  """Report A8, and every other kind of input: a stated answer for each."""

  @parameterized.parameters(
      (_TENSOR, (8, 40), '40, which is not a multiple of 16'),
      (_TENSOR, (8, 88), '88, which is not a multiple of 16'),
      (_MXFP8, (8, 48), '48, which is not a multiple of 32'),
      (_MXFP4, (8, 16), '16, which is not a multiple of 32'),
      (_Spec('nvfp4', block_2d=True), (8, 32), 'row axis .* multiple of 16'),
      (_Spec('mxfp8', block_2d=True), (16, 32), 'row axis .* multiple of 32'),
      (_TENSOR, (16,), r'not \[\.\.\., M, K\]'),
  )
  def test_shape_is_refused_at_trace_time(self, spec, shape, message):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(lambda x: quantization.quantize(x, spec), x)

  @parameterized.product(
      spec=(_TENSOR, _MXFP8, _FP8), dtype=('int32', 'float64', 'bool', 'uint8')
  )
  def test_dtype_is_refused(self, spec, dtype):
    x = np.zeros((16, 128), dtype)
    with self.assertRaisesRegex(TypeError, f'Cannot quantize {dtype}'):
      quantization.quantize(x, spec)

  @parameterized.parameters(*_ALL)
  def test_empty_gives_empty(self, spec):
    for shape in ((0, 64), (3, 16, 0)):
      q = quantization.quantize(jnp.zeros(shape, jnp.bfloat16), spec)
      self.assertEqual(q.data.size, 0)
      self.assertEqual(q.data.shape[:-1], shape[:-1])
      self.assertEqual(qtensor.num_columns(q), shape[-1])
      self.assertEqual(_dequantize(q, jnp.float32).shape, shape)

  @parameterized.product(
      spec=(_MXFP8, _MXFP4, _FP8, _Spec('fp8_block', block_2d=True)),
      value=(np.inf, -np.inf, np.nan),
  )
  def test_non_finite_marks_exactly_its_block(self, spec, value):
    x = np.ones((160, 256), np.float32)
    x[1, 130] = value
    values = np.asarray(_dequantize(_quantize(x, spec), jnp.float32))
    marked = np.isnan(values)
    block = _quantize(x, spec).format.block
    rows = 128 if spec.block_2d else 1
    self.assertEqual(marked.sum(), block * rows)
    self.assertTrue(marked[1, 130])
    np.testing.assert_allclose(values[~marked], 1.0, rtol=1e-6)

  @parameterized.parameters(np.inf, np.nan)
  def test_non_finite_is_marked_also_under_a_given_amax(self, value):
    x = jnp.ones((16, 64)).at[3, 5].set(value)
    q = quantization.quantize(x, _TOKEN, amax=jnp.ones((16, 1)))
    values = np.asarray(_dequantize(q, jnp.float32))
    self.assertTrue(np.isnan(values[3]).all())
    np.testing.assert_array_equal(q.data[3], 0)
    self.assertTrue(np.isfinite(np.delete(values, 3, axis=0)).all())

  def test_fp8_block_of_small_float16_keeps_its_scale(self):
    x = np.full((1, 128), 1e-3, np.float16)
    q = quantization.quantize(x, _FP8)
    want = np.float32(1) / (np.float32(448) / np.float32(x[0, 0]))
    np.testing.assert_array_equal(q.block_scale, want)

  def test_amax_and_key_where_they_have_no_meaning_are_refused(self):
    x = jnp.ones((4, 64))
    with self.assertRaisesRegex(ValueError, 'mxfp8 has no global scale'):
      quantization.quantize(x, _MXFP8, amax=jnp.ones((1, 1)))
    with self.assertRaisesRegex(ValueError, 'fp8_block has no global scale'):
      quantization.compute_amax(x, _FP8)

  @parameterized.parameters(
      (dict(format='nvfp5'), "'nvfp5' is not one of .*'nvfp4'"),
      (dict(format='mxfp8', outer='tensor'), r"mxfp8 has \('none',\)"),
      (dict(outer='none'), r"nvfp4 has \('tensor', 'token'\)"),
      (dict(format='mxfp8', four_over_six='mse'), 'no four_over_six'),
      (dict(format='mxfp4', block_2d=True), 'excludes format'),
      (dict(format='fp8_block', rounding='stochastic'), 'no rounding'),
      (dict(scale_rounding='power_of_two'), 'no scale_rounding'),
      (dict(block_2d=True, outer='token'), 'excludes outer'),
      (dict(hadamard=True, four_over_six='mae'), 'excludes four_over_six'),
      (dict(rounding='stochastic', four_over_six='mse'), 'excludes'),
      (dict(scale_max=256), 'scale_max 256 excludes four_over_six None'),
      (dict(error='fast'), 'excludes four_over_six None'),
      (dict(hadamard='yes'), "hadamard 'yes' is not one of"),
  )
  def test_option_that_the_format_does_not_have_is_refused(self, kw, message):
    with self.assertRaisesRegex(ValueError, message):
      quantization.QuantSpec(**kw)
