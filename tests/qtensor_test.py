"""Tests of qtensor."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nvfp4_jax import formats
from nvfp4_jax import qtensor
from tests import golden_cases

_jitted_dequantize = jax.jit(qtensor.dequantize, static_argnames='dtype')


class DecodeTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_every_product_of_code_and_block_scale_is_exact(self):
    # Block scales are non-negative: 16 x 127 of the 4,064 products.
    q = _all_products()
    got = np.asarray(self.variant(qtensor.decode)(q))
    chex.assert_type(got, jnp.bfloat16)
    tables = golden_cases.read('decode_tables')
    want = np.outer(
        tables['e4m3'][:127].astype(np.float64), tables['e2m1']
    ).ravel()
    self.assertLen(want, 2_032)
    np.testing.assert_array_equal(got.astype(np.float64).ravel(), want)
    np.testing.assert_array_equal(np.signbit(got).ravel(), np.signbit(want))

  def test_all_4064_products_are_bfloat16_numbers(self):
    tables = golden_cases.read('decode_tables')
    scales = tables['e4m3'][np.isfinite(tables['e4m3'])]
    products = np.outer(scales.astype(np.float64), tables['e2m1'])
    self.assertEqual(products.size, 4_064)
    np.testing.assert_array_equal(
        products.astype(ml_dtypes.bfloat16).astype(np.float64), products
    )

  def test_leaves_the_global_scale_out(self):
    q = _random_qtensor((24, 64))
    decode = jax.jit(qtensor.decode)
    other = q.replace(global_scale=7 * q.global_scale)
    chex.assert_trees_all_equal(decode(q), decode(other))


class DequantizeTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(((1, 1),), ((24, 1),))
  def test_is_code_times_rounded_scale(self, global_shape):
    q = _random_qtensor((24, 64), global_shape)
    want = _dequantize(q)
    got = self.variant(lambda q: qtensor.dequantize(q, jnp.float32))(q)
    chex.assert_type(got, jnp.float32)
    _assert_bits_equal(got, want)
    got = self.variant(lambda q: qtensor.dequantize(q, jnp.bfloat16))(q)
    chex.assert_type(got, jnp.bfloat16)
    _assert_bits_equal(got, want.astype(ml_dtypes.bfloat16))

  def test_rounds_scales_before_it_multiplies(self):
    # The other orders would be seen on these inputs.
    q = _random_qtensor((24, 64), (24, 1))
    codes, scales = _code_and_scale_values(q)
    other = (codes * scales) * np.asarray(q.global_scale)
    self.assertGreater(np.mean(other != _dequantize(q)), 0.05)

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_report_22_tiny_scales_do_not_underflow(self, dtype):
    # Their product with the block scale is rounded to float32 and no further.
    q = _random_qtensor((24, 64), (24, 1))
    tiny = q.replace(global_scale=q.global_scale * np.float32(2.0**-90))
    want = np.asarray(_jitted_dequantize(q, dtype), np.float32)
    self.assertGreater(np.mean(want != 0), 0.8)
    got = np.asarray(_jitted_dequantize(tiny, dtype), np.float32)
    np.testing.assert_array_equal(got, want * np.float32(2.0**-90))

  @chex.variants(with_jit=True, without_jit=True)
  def test_a_nan_scale_makes_exactly_its_block_nan(self):
    q = _random_qtensor((24, 64))
    scales = np.array(q.block_scale)
    scales[5, 2] = np.nan
    q = q.replace(block_scale=jnp.asarray(scales))
    want = np.zeros((24, 64), bool)
    want[5, 32:48] = True
    for function in (
        qtensor.decode,
        lambda q: qtensor.dequantize(q, jnp.float32),
        lambda q: qtensor.dequantize(q, jnp.bfloat16),
    ):
      got = np.asarray(self.variant(function)(q), np.float32)
      np.testing.assert_array_equal(np.isnan(got), want)

  def test_empty_gives_empty(self):
    q = _random_qtensor((0, 32))
    chex.assert_shape(qtensor.decode(q), (0, 32))
    chex.assert_shape(qtensor.dequantize(q, jnp.bfloat16), (0, 32))

  @parameterized.parameters(jnp.float16, jnp.float64, jnp.int32)
  def test_another_dtype_raises(self, dtype):
    with self.assertRaisesRegex(ValueError, f'{np.dtype(dtype)}.*float32'):
      qtensor.dequantize(_random_qtensor((1, 16)), dtype)


class TreeTest(chex.TestCase):
  """No shape is stored, so that leading axes behave as those of an array."""

  def setUp(self):
    super().setUp()
    self.q = _random_qtensor((3, 4, 32), (3, 4, 1))
    self.values = _dequantize(self.q)

  def test_indexing_selects_matrices(self):
    for i in range(3):
      q = jax.tree.map(lambda a, i=i: a[i], self.q)
      _assert_bits_equal(_jitted_dequantize(q, jnp.float32), self.values[i])

  def test_stacking_undoes_indexing(self):
    parts = [jax.tree.map(lambda a, i=i: a[i], self.q) for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    chex.assert_trees_all_equal(stacked, self.q)

  def test_scan_and_vmap_see_matrices(self):
    dequantize = lambda q: qtensor.dequantize(q, jnp.float32)
    scanned = jax.lax.scan(lambda _, q: (None, dequantize(q)), None, self.q)[1]
    _assert_bits_equal(scanned, self.values)
    vmapped = jax.jit(jax.vmap(dequantize))(self.q)
    _assert_bits_equal(vmapped, self.values)

  def test_format_is_static(self):
    leaves, treedef = jax.tree.flatten(self.q)
    self.assertLen(leaves, 3)
    self.assertEqual(jax.tree.unflatten(treedef, leaves).format, formats.NVFP4)

  def test_packed_is_the_stored_bytes(self):
    chex.assert_type(self.q.packed(), jnp.uint8)
    chex.assert_shape(self.q.packed(), (3, 4, 16))
    q = qtensor.QTensor(
        data=jnp.array([[0x71] + [0] * 7], jnp.uint8),
        block_scale=jnp.ones((1, 1), formats.NVFP4.scale_dtype),
        global_scale=jnp.ones((1, 1)),
        format=formats.NVFP4,
    )
    got = _jitted_dequantize(q, jnp.float32)
    np.testing.assert_array_equal(got, [[0.5, 6.0] + [0.0] * 14])

  def test_nbytes_counts_all_arrays(self):
    # Codes, block scales, and 4 bytes for each of 12 rows.
    self.assertEqual(qtensor.nbytes(self.q), 192 + 24 + 48)
    tree = {'a': self.q, 'b': jnp.zeros((2, 5), jnp.bfloat16)}
    self.assertEqual(qtensor.nbytes(tree), 192 + 24 + 48 + 20)


def _all_products():
  """Returns `[127, 16]`: every code under every finite block scale."""
  packed = np.arange(0, 16, 2) | (np.arange(1, 16, 2) << 4)
  scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
  return qtensor.QTensor(
      data=jnp.asarray(np.tile(packed.astype(np.uint8), (127, 1))),
      block_scale=jnp.asarray(scales[:, None]),
      global_scale=jnp.ones((1, 1)),
      format=formats.NVFP4,
  )


def _random_qtensor(shape, global_shape=None):
  *batch, k = shape
  rng = np.random.default_rng(0)
  scales = rng.integers(0, 127, (*batch, k // 16), dtype=np.uint8)
  global_shape = global_shape or (*batch[:-1], 1, 1)
  return qtensor.QTensor(
      data=jnp.asarray(rng.integers(0, 256, (*batch, k // 2), dtype=np.uint8)),
      block_scale=jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn)),
      global_scale=jnp.asarray(rng.uniform(1e-4, 1, global_shape), jnp.float32),
      format=formats.NVFP4,
  )


def _code_and_scale_values(q):
  """Returns both as float32 `[..., M, K]` by the golden tables, in numpy."""
  tables = golden_cases.read('decode_tables')
  data = np.asarray(q.data)
  codes = np.stack([data & 0xF, data >> 4], axis=-1)
  codes = codes.reshape(*data.shape[:-1], -1)
  scales = np.asarray(q.block_scale).view(np.uint8)
  return tables['e2m1'][codes], np.repeat(tables['e4m3'][scales], 16, axis=-1)


def _dequantize(q):
  codes, scales = _code_and_scale_values(q)
  return codes * (scales * np.asarray(q.global_scale))


def _assert_bits_equal(got, want):
  got, want = np.asarray(got), np.asarray(want)
  chex.assert_equal_shape((got, want))
  bits = np.uint16 if want.dtype.itemsize == 2 else np.uint32
  np.testing.assert_array_equal(got.view(bits), want.view(bits))


class SwizzleTest(chex.TestCase):

  @parameterized.parameters((5, 3), (128, 4), (130, 9), (1, 1))
  def test_offsets_are_those_of_the_tile_layout_and_padding_is_zero(self, m, c):
    scale = np.arange(1, m * c + 1, dtype=np.uint8).reshape(m, c) | 1
    swizzled = np.asarray(qtensor.swizzle(scale.view(ml_dtypes.float8_e4m3fn)))
    self.assertEqual(swizzled.dtype, ml_dtypes.float8_e4m3fn)
    want = np.zeros(-(-m // 128) * -(-c // 4) * 512, np.uint8)
    for row in range(m):
      for column in range(c):
        tile = row // 128 * -(-c // 4) + column // 4
        offset = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        want[tile * 512 + offset] = scale[row, column]
    np.testing.assert_array_equal(swizzled.view(np.uint8), want)
    back = qtensor.unswizzle(swizzled, m, c)
    np.testing.assert_array_equal(np.asarray(back).view(np.uint8), scale)

  def test_leading_axes_are_kept(self):
    scale = np.arange(2 * 3 * 130 * 5).astype(np.uint8).reshape(2, 3, 130, 5)
    swizzled = qtensor.swizzle(scale)
    self.assertEqual(swizzled.shape, (2, 3, 2 * 2 * 512))
    np.testing.assert_array_equal(swizzled[1, 2], qtensor.swizzle(scale[1, 2]))
    np.testing.assert_array_equal(qtensor.unswizzle(swizzled, 130, 5), scale)

  def test_wrong_sizes_are_refused(self):
    with self.assertRaisesRegex(TypeError, 'not float32'):
      qtensor.swizzle(np.zeros((4, 4), np.float32))
    with self.assertRaisesRegex(ValueError, '512 scales are not those of 129'):
      qtensor.unswizzle(np.zeros(512, np.uint8), 129, 4)
