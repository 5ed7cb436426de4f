"""Tests of quantization; golden_test compares its bytes with a reference."""

import functools
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nvfp4_jax import exact
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from tests import numpy_oracle

_TENSOR = quantization.QuantSpec('nvfp4', outer='tensor')
_TOKEN = quantization.QuantSpec('nvfp4', outer='token')
_TENSOR_46 = quantization.QuantSpec(
    'nvfp4', outer='tensor', four_over_six='mse', scale_max=256
)
_TOKEN_46 = quantization.QuantSpec(
    'nvfp4', outer='token', four_over_six='mse', scale_max=256
)
_SPECS = (_TENSOR, _TOKEN, _TENSOR_46, _TOKEN_46)

# Compiling dominates the time of these tests, so that they share shapes.
_SHAPE = (8, 64)
_quantize = jax.jit(quantization.quantize, static_argnames='spec')
_dequantize = jax.jit(qtensor.dequantize, static_argnames='dtype')


class OracleTest(chex.TestCase):
  """The rule once more, in numpy's float32 and ml_dtypes' casts."""

  @parameterized.parameters(
      (_TOKEN, 'float32'),
      (_TOKEN, 'float16'),
      (_TOKEN, 'bfloat16'),
      (_TENSOR, 'bfloat16'),
  )
  def test_equals_numpy(self, spec, dtype):
    x = _coarse((42, 256, 256)).astype(jnp.dtype(dtype))
    _assert_equals_numpy(_quantize(x, spec), x, spec)

  @parameterized.parameters(_TENSOR_46, _TOKEN_46)
  def test_equals_numpy_with_four_over_six(self, spec):
    # At this shape XLA on CPU once dropped a rounding of the block scale.
    x = _coarse((2176, 64))
    _assert_equals_numpy(_quantize(x, spec), x, spec)

  @parameterized.parameters(*_SPECS)
  def test_equals_numpy_on_float32_with_all_bits(self, spec):
    x = _normal(0, _SHAPE)
    _assert_equals_numpy(_quantize(x, spec), x, spec)

  @parameterized.parameters(
      quantization.QuantSpec('nvfp4', block_2d=True),
      quantization.QuantSpec('nvfp4', block_2d=True, four_over_six='mae'),
      quantization.QuantSpec('nvfp4', four_over_six='mse', error='fast'),
      quantization.QuantSpec('nvfp4', hadamard=True),
      quantization.QuantSpec('mxfp8'),
      quantization.QuantSpec('mxfp8', block_2d=True),
      quantization.QuantSpec('mxfp4'),
      quantization.QuantSpec('fp8_block'),
      quantization.QuantSpec('fp8_block', block_2d=True),
      quantization.QuantSpec('fp8_block', scale_rounding='power_of_two'),
  )
  def test_equals_numpy_in_other_formats(self, spec):
    x = _coarse((1024, 1024)).astype(ml_dtypes.bfloat16)
    _assert_equals_numpy(_quantize(x, spec), x, spec)

  def test_would_see_a_reciprocal_in_place_of_a_division(self):
    reciprocal = lambda a, b: jnp.float32(a) * (1 / b)
    x = _coarse((8, 256, 256))
    data, _, _ = numpy_oracle.quantize(x, _TOKEN)
    with mock.patch.object(exact, 'divide', reciprocal):
      q = jax.jit(lambda x: quantization.quantize(x, _TOKEN))(x)
    self.assertTrue(np.any(q.packed() != data))


class ZeroTest(chex.TestCase):

  @parameterized.parameters(*_SPECS)
  def test_zero_tensor_has_zero_bytes_and_global_scale_one(self, spec):
    q = _quantize(jnp.zeros(_SHAPE), spec)
    _assert_bytes(q, codes=np.zeros((8, 32)), scales=np.zeros((8, 4)))
    np.testing.assert_array_equal(q.global_scale, 1.0)
    np.testing.assert_array_equal(_dequantize(q, jnp.float32), 0.0)

  @parameterized.parameters((_TENSOR, 0x7E), (_TOKEN, 0x7E), (_TENSOR_46, 0x78))
  def test_zero_block_beside_a_one_is_exact(self, spec, scale):
    # Model-Optimizer#1397 wrote a NaN scale; ours is 448 (256), tie to 6.
    x = jnp.zeros((1, 32)).at[0, 16].set(1.0)
    q = _quantize(x, spec)
    codes = np.zeros((1, 16))
    codes[0, 8] = 0x07
    _assert_bytes(q, codes=codes, scales=[[0x00, scale]])
    np.testing.assert_array_equal(_dequantize(q, jnp.float32), x)

  @parameterized.parameters(*_SPECS)
  def test_zero_row_is_zero_beside_others(self, spec):
    x = _normal(0, _SHAPE)
    x[1] = 0
    q = _quantize(x, spec)
    np.testing.assert_array_equal(q.packed()[1], 0)
    np.testing.assert_array_equal(_scale_bytes(q)[1], 0)
    if spec.outer == 'token':
      self.assertEqual(q.global_scale[1, 0], 1.0)
    self.assertTrue(np.all(_scale_bytes(q)[::2] > 0))

  @parameterized.parameters(_TENSOR, _TOKEN)
  def test_block_whose_scale_underflows_is_zero_not_nan(self, spec):
    # pytorch/ao#4598: codes saturate, the scale is 0, values are 0.
    x = jnp.full((1, 32), 1e-6, jnp.bfloat16).at[0, 16].set(1.0)
    q = _quantize(x, spec)
    _assert_bytes(
        q, codes=[[0x77] * 8 + [0x07] + [0] * 7], scales=[[0x00, 0x7E]]
    )
    values = _dequantize(q, jnp.float32)
    np.testing.assert_array_equal(values, [[0.0] * 16 + [1.0] + [0.0] * 15])

  @parameterized.parameters(*_SPECS)
  def test_negative_zero_is_zero(self, spec):
    x = _normal(0, _SHAPE)
    x[:, ::3] = 0.0
    negative = np.where(x == 0, -0.0, x).astype(np.float32)
    self.assertTrue(np.any(np.signbit(negative) & (x == 0)))
    _assert_same(_quantize(negative, spec), _quantize(x, spec))


class ReportsTest(chex.TestCase):
  """Public reports of faults in other tools, as small inputs."""

  def test_a1_no_scale_byte_of_zeros_is_nan(self):
    # Model-Optimizer#1397.
    q = _quantize(jnp.zeros((2, 32)), _TENSOR)
    _assert_bytes(q, codes=np.zeros((2, 16)), scales=np.zeros((2, 2)))
    self.assertTrue(np.all(np.isfinite(1 / q.global_scale)))

  def test_a5_global_scale_is_a_decode_scale(self):
    # modular#6600: divisor and multiplier mixed up.
    x = jnp.zeros((1, 16)).at[0, :2].set(jnp.array([0.5, 6.0]))
    q = _quantize(x, _TENSOR)
    self.assertEqual(int(q.packed()[0, 0]), 0x71)
    self.assertEqual(_scale_bytes(q)[0, 0], 0x7E)
    global_scale = np.asarray(q.global_scale)[0, 0]
    self.assertEqual(global_scale, np.float32(0.0022321429))
    # Stored as its reciprocal, which is not quite 448, it comes back.
    self.assertEqual(
        np.float32(1) / (np.float32(1) / global_scale), global_scale
    )
    np.testing.assert_array_equal(_dequantize(q, jnp.float32), x)

  @parameterized.parameters(
      ('nvfp4', 'float8_e4m3fn'), ('mxfp8', 'float8_e8m0fnu')
  )
  def test_a7_scales_are_ml_dtypes_arrays_of_the_same_bytes(self, name, dtype):
    # safetensors#682: FP8 tensors that numpy readers cannot hold.
    q = _quantize(_normal(0, (8, 64)), quantization.QuantSpec(name))
    scale = np.asarray(q.block_scale)
    self.assertEqual(scale.dtype, np.dtype(getattr(ml_dtypes, dtype)))
    copied = np.frombuffer(scale.tobytes(), scale.dtype).reshape(scale.shape)
    _assert_same(q.replace(block_scale=copied), q)


class SymmetryTest(chex.TestCase):

  @parameterized.parameters(*_SPECS)
  def test_negation_flips_exactly_the_sign_bits(self, spec):
    x = _normal(0, _SHAPE)
    self.assertTrue(np.all(x != 0))
    q, negated = _quantize(x, spec), _quantize(-x, spec)
    np.testing.assert_array_equal(negated.packed(), q.packed() ^ 0x88)
    _assert_same(negated.replace(data=q.data), q)

  @parameterized.parameters(*_SPECS)
  def test_power_of_two_changes_only_the_global_scale(self, spec):
    x = _normal(0, _SHAPE)
    want = _quantize(x, spec)
    for k in range(-40, 41):
      q = _quantize(np.ldexp(x, k), spec)
      np.testing.assert_array_equal(
          q.global_scale, np.ldexp(want.global_scale, k)
      )
      _assert_same(q.replace(global_scale=want.global_scale), want)

  @parameterized.parameters(_TENSOR, _TOKEN, _TOKEN_46)
  def test_leading_axes_are_batch(self, spec):
    x = _normal(0, (2, 3, *_SHAPE)) * _normal(1, (2, 3, 1, 1))
    q = _quantize(x, spec)
    chex.assert_shape(q.packed(), (2, 3, 8, 32))
    chex.assert_shape(q.block_scale, (2, 3, 8, 4))
    num_rows = 8 if spec.outer == 'token' else 1
    chex.assert_shape(q.global_scale, (2, 3, num_rows, 1))
    for i in np.ndindex(2, 3):
      _assert_same(jax.tree.map(lambda a, i=i: a[i], q), _quantize(x[i], spec))


class TokenTest(chex.TestCase):
  """With outer='token', a row's bytes depend on that row only."""

  def setUp(self):
    super().setUp()
    x = _normal(0, (8, 512)).astype(ml_dtypes.bfloat16)
    x[3] *= 100
    self.x = jnp.asarray(x)

  @parameterized.parameters(_TOKEN, _TOKEN_46)
  def test_token_is_independent_of_batch(self, spec):
    want = _quantize(self.x, spec)
    order = np.random.default_rng(0).permutation(8)
    _assert_same(_quantize(self.x[order], spec), _row(want, order))
    padded = jnp.pad(self.x, [(0, 5), (0, 0)])
    _assert_same(_row(_quantize(padded, spec), slice(8)), want)
    for i in range(8):
      alone = _quantize(self.x[i : i + 1], spec)
      _assert_same(_row(alone, 0), _row(want, i))

  def test_token_is_independent_of_transformations(self):
    quantize = functools.partial(quantization.quantize, spec=_TOKEN)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('data',))
    rows = jax.P('data')
    want = _quantize(self.x, _TOKEN)
    token = lambda x: _row(quantize(x[None]), 0)
    scan = lambda x: jax.lax.scan(lambda _, t: (None, token(t)), None, x)[1]
    shard_map = jax.shard_map(
        quantize, mesh=mesh, in_specs=rows, out_specs=rows
    )
    for name, function in {
        'vmap': jax.vmap(token),
        'scan': scan,
        'shard_map': shard_map,
    }.items():
      got = jax.jit(function)(self.x)
      with self.subTest(name):
        _assert_same(got, want)

  @parameterized.parameters(_TOKEN, _TOKEN_46)
  def test_later_token_never_changes_an_earlier_one(self, spec):
    want = _quantize(self.x, spec)
    for value in (1e6, 0.0, jnp.inf, jnp.nan):
      changed = _quantize(self.x.at[7, 5].set(value), spec)
      _assert_same(_row(changed, slice(7)), _row(want, slice(7)))
      self.assertTrue(np.any(_row(changed, 7).data != _row(want, 7).data))

  def test_later_token_changes_earlier_ones_with_a_tensor_scale(self):
    want = _quantize(self.x, _TENSOR)
    changed = _quantize(self.x.at[7, 5].set(1e6), _TENSOR)
    self.assertTrue(np.any(changed.packed()[0] != want.packed()[0]))
    # And so does the batch that a row comes with.
    alone = _quantize(self.x[:1], _TENSOR)
    self.assertTrue(np.any(alone.packed()[0] != want.packed()[0]))


class AmaxTest(chex.TestCase):

  def test_shared_amax_gives_the_bytes_of_the_whole(self):
    # Gate and up projections share one global scale: 8 / 2688, not 2 / 2688.
    gate, up = (
        x / np.max(np.abs(x)) * np.float32(amax)
        for x, amax in ((_normal(0, (4, 64)), 2), (_normal(1, (4, 64)), 8))
    )
    whole = _quantize(np.concatenate([gate, up]), _TENSOR)
    amax = jnp.full((1, 1), 8.0)
    for x, rows in ((gate, slice(0, 4)), (up, slice(4, 8))):
      q = _quantize(x, _TENSOR, amax=amax)
      np.testing.assert_array_equal(q.packed(), whole.packed()[rows])
      np.testing.assert_array_equal(_scale_bytes(q), _scale_bytes(whole)[rows])
      np.testing.assert_array_equal(q.global_scale, whole.global_scale)
    self.assertNotEqual(
        _quantize(gate, _TENSOR).global_scale, whole.global_scale
    )
    numerator = np.float32(2688)
    self.assertEqual(
        whole.global_scale, np.float32(1) / (numerator / np.float32(8))
    )

  @parameterized.parameters(_TENSOR, _TOKEN)
  def test_amax_of_x_is_the_default(self, spec):
    x = _normal(0, (2, 3, *_SHAPE))
    amax = quantization.compute_amax(jnp.asarray(x), spec)
    axes = -1 if spec.outer == 'token' else (-2, -1)
    np.testing.assert_array_equal(
        amax, np.max(np.abs(x), axis=axes, keepdims=True)
    )
    _assert_same(_quantize(x, spec, amax=amax), _quantize(x, spec))

  def test_amax_of_a_shard_that_splits_k(self):
    x = _normal(0, (4, 64))
    amax = quantization.compute_amax(jnp.asarray(x), _TOKEN)
    whole = _quantize(x, _TOKEN)
    for i in range(2):
      q = _quantize(x[:, 32 * i : 32 * (i + 1)], _TOKEN, amax=amax)
      np.testing.assert_array_equal(
          q.packed(), whole.packed()[:, 16 * i : 16 * (i + 1)]
      )
      np.testing.assert_array_equal(q.global_scale, whole.global_scale)

  def test_zero_amax_of_an_empty_array(self):
    for spec, shape in ((_TENSOR, (1, 1)), (_TOKEN, (0, 1))):
      amax = quantization.compute_amax(jnp.zeros((0, 32)), spec)
      np.testing.assert_array_equal(amax, np.zeros(shape, np.float32))

  @parameterized.parameters(
      (_TENSOR, (4, 1)), (_TENSOR, ()), (_TOKEN, (1, 1)), (_TOKEN, (4,))
  )
  def test_amax_of_another_shape_raises(self, spec, shape):
    want = (4, 1) if spec.outer == 'token' else (1, 1)
    with self.assertRaises(ValueError) as error:
      quantization.quantize(jnp.zeros((4, 32)), spec, amax=jnp.ones(shape))
    self.assertIn(str(shape), str(error.exception))
    self.assertIn(str(want), str(error.exception))


class FourOverSixTest(chex.TestCase):

  def test_block_on_the_grid_of_four_maps_to_four(self):
    # 3/4 of the largest is 3 on the grid up to 4, and 4.5 on the grid up to 6.
    x = jnp.full((1, 32), 0.75).at[0, ::16].set(1.0)
    q = _quantize(x, _TENSOR_46)
    _assert_bytes(q, codes=[[0x56, *[0x55] * 7] * 2], scales=[[0x7C, 0x7C]])
    np.testing.assert_array_equal(_dequantize(q, jnp.float32), x)

  def test_block_on_the_grid_of_six_maps_to_six(self):
    x = jnp.full((1, 32), 0.5).at[0, ::16].set(1.0)
    q = _quantize(x, _TENSOR_46)
    _assert_bytes(q, codes=[[0x57, *[0x55] * 7] * 2], scales=[[0x78, 0x78]])
    np.testing.assert_array_equal(_dequantize(q, jnp.float32), x)

  @parameterized.parameters('mae', 'mse')
  def test_no_block_has_a_larger_error_than_with_six(self, error):
    x = _normal(0, _SHAPE)
    spec = quantization.QuantSpec(four_over_six=error, scale_max=448)

    def block_error(spec):
      values = _dequantize(_quantize(x, spec), jnp.float32)
      power = {'mae': 1, 'mse': 2}[error]
      error_of_element = np.abs(np.asarray(values, np.float64) - x) ** power
      return np.sum(error_of_element.reshape(8, 4, 16), axis=-1)

    chosen, six = block_error(spec), block_error(_TENSOR)
    # The error that decides is rounded to float32 sixteen times.
    self.assertTrue(np.all(chosen <= six * (1 + 1e-5)))
    self.assertGreater(np.mean(chosen < 0.99 * six), 0.2)

  def test_mae_and_mse_choose_differently(self):
    x = _normal(0, _SHAPE)
    mae, mse = (
        quantization.QuantSpec(four_over_six=error, scale_max=448)
        for error in ('mae', 'mse')
    )
    self.assertTrue(
        np.any(_quantize(x, mae).packed() != _quantize(x, mse).packed())
    )


class ShapeTest(chex.TestCase):

  @parameterized.parameters(_TENSOR, _TOKEN)
  def test_empty_gives_empty(self, spec):
    q = _quantize(jnp.zeros((0, 32)), spec)
    chex.assert_shape(q.packed(), (0, 16))
    chex.assert_shape(q.block_scale, (0, 2))
    num_rows = 0 if spec.outer == 'token' else 1
    chex.assert_shape(q.global_scale, (num_rows, 1))

  @parameterized.parameters(jnp.float32, jnp.bfloat16, jnp.float16)
  def test_dtypes_do_not_depend_on_the_input(self, dtype):
    q = _quantize(jnp.ones((1, 16), dtype), _TOKEN)
    chex.assert_type(q.packed(), jnp.uint8)
    chex.assert_type(q.block_scale, jnp.float8_e4m3fn)
    chex.assert_type(q.global_scale, jnp.float32)
    chex.assert_shape(q.packed(), (1, 8))

  @parameterized.parameters((8, 40), (8, 88), (2, 1), (3, 8, 24))
  def test_k_that_is_no_multiple_of_the_block_raises(self, *shape):
    with self.assertRaises(ValueError) as error:
      quantization.quantize(jnp.zeros(shape), _TENSOR)
    for word in (str(shape), f'size {shape[-1]}', 'multiple of 16', 'nvfp4'):
      self.assertIn(word, str(error.exception))

  def test_one_axis_raises(self):
    with self.assertRaisesRegex(ValueError, r'\(32,\).*\[\.\.\., M, K\]'):
      quantization.quantize(jnp.zeros((32,)), _TENSOR)

  def test_raises_while_tracing(self):
    with self.assertRaises(ValueError):
      jax.eval_shape(
          lambda x: quantization.quantize(x, _TENSOR), jnp.zeros((8, 40))
      )

  @parameterized.parameters('int32', 'bool', 'float8_e4m3fn')
  def test_another_dtype_raises(self, dtype):
    with self.assertRaisesRegex(TypeError, f'{dtype}.*bfloat16, float16'):
      quantization.quantize(jnp.zeros((2, 32), dtype), _TENSOR)

  def test_float64_raises(self):
    with jax.enable_x64(True):
      x = jnp.zeros((2, 32), jnp.float64)
      with self.assertRaisesRegex(TypeError, 'float64.*bfloat16, float16'):
        quantization.quantize(x, _TENSOR)

  def test_key_raises(self):
    with self.assertRaisesRegex(ValueError, 'key'):
      quantization.quantize(jnp.zeros((2, 32)), _TOKEN, key=jax.random.key(0))


class QuantSpecTest(chex.TestCase):

  @parameterized.parameters(
      ('format', 'nvfp5', ('nvfp4',)),
      ('outer', 'row', ('tensor', 'token', 'None')),
      ('four_over_six', 'abs_max', ('mae', 'mse', 'None')),
      ('scale_max', 240, ('256', '448')),
  )
  def test_unknown_value_raises_and_names_the_valid_ones(
      self, field, value, valid
  ):
    with self.assertRaises(ValueError) as error:
      quantization.QuantSpec(**{field: value})
    for word in (field, repr(value), *valid):
      self.assertIn(word, str(error.exception))

  def test_256_without_four_over_six_raises(self):
    with self.assertRaisesRegex(ValueError, '256.*four_over_six'):
      quantization.QuantSpec(scale_max=256)

  def test_defaults_are_filled_in(self):
    self.assertEqual(quantization.QuantSpec(), _TENSOR)
    self.assertEqual(_TENSOR.scale_max, 448)
    spec = quantization.QuantSpec(outer='token', four_over_six='mse')
    self.assertEqual(spec, _TOKEN_46)

  def test_equal_specs_share_one_trace(self):
    traced = []

    @functools.partial(jax.jit, static_argnames='spec')
    def quantize(x, spec):
      traced.append(spec)
      return quantization.quantize(x, spec)

    for seed in range(3):
      spec = quantization.QuantSpec('nvfp4', outer='token')
      quantize(_normal(seed, (2, 32)), spec)
    self.assertLen(traced, 1)


def _normal(seed, shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _coarse(shape):
  """Returns multiples of 1/16, whose block scales are often near a tie."""
  return np.round(_normal(0, shape) * 16) / 16


def _assert_equals_numpy(q, x, spec):
  data, scales, global_scale = numpy_oracle.quantize(x, spec)
  _assert_bytes(q, data, scales.view(np.uint8))
  np.testing.assert_array_equal(q.global_scale, global_scale)


def _scale_bytes(q):
  return np.asarray(q.block_scale).view(np.uint8)


def _row(q, index):
  return jax.tree.map(lambda a: a[index], q)


def _assert_same(got, want):
  for name in ('data', 'global_scale'):
    np.testing.assert_array_equal(
        getattr(got, name), getattr(want, name), err_msg=name
    )
  np.testing.assert_array_equal(_scale_bytes(got), _scale_bytes(want))


def _assert_bytes(q, codes, scales):
  np.testing.assert_array_equal(q.packed(), codes)
  np.testing.assert_array_equal(_scale_bytes(q), scales)
