"""Quantized matmuls: forward bits, backward operands, residuals, errors."""

import dataclasses
import functools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import exact
from nvfp4_jax import matmul
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

TOKEN = quantization.QuantSpec('nvfp4', 'token')
TENSOR = quantization.QuantSpec('nvfp4', 'tensor')
FINAL = matmul.MatmulPrecision(
    quantization.QuantSpec('nvfp4', 'token', four_over_six='mse'),
    quantization.QuantSpec('nvfp4', 'tensor', four_over_six='mse'),
)
DEQUANTIZED = matmul.MatmulPrecision(TOKEN, TENSOR)
PRECISIONS = {
    'dequantized': DEQUANTIZED,
    'high_precision': matmul.MatmulPrecision(
        TOKEN, TENSOR, backward='high_precision'
    ),
    'per_tensor': matmul.MatmulPrecision(TENSOR, TENSOR),
    'four_over_six': FINAL,
}
MXFP8 = matmul.MatmulPrecision(
    *[quantization.QuantSpec('mxfp8')] * 3, backward='quantized'
)
GROUP_SIZES = (11, 0, 11, 1, 0, 11)  # of 36 rows, two of them in no group


def _dot(x, w):
  return lax.dot_general(
      x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
  )


def _operands(key, shape_x, shape_w, dtype=jnp.bfloat16):
  kx, kw, ky = jax.random.split(jax.random.key(key), 3)
  x = jax.random.normal(kx, shape_x, dtype)
  w = jax.random.normal(kw, shape_w, jnp.float32)
  dy = jax.random.normal(ky, (*shape_x[:-1], shape_w[-2]), dtype)
  return x, w, dy


def _mode_operands(precision, x, w):
  """The bfloat16 operands at which a mode takes the VJP."""
  x, w = x.astype(jnp.bfloat16), exact.to_bfloat16(w)
  if precision.backward == 'high_precision':
    return x, w
  return (
      qtensor.dequantize(quantization.quantize(x, precision.lhs), jnp.bfloat16),
      qtensor.dequantize(quantization.quantize(w, precision.rhs), jnp.bfloat16),
  )


@functools.partial(jax.jit, static_argnums=0)
def _run(precision, x, w, dy, group_sizes=None):
  """Returns y, dgrad and wgrad; `precision` None is bfloat16."""

  def fn(x, w):
    if precision is None:
      return matmul.unquantized_matmul(x, w, group_sizes)
    if group_sizes is None:
      return matmul.quantized_matmul(x, w, precision)
    return matmul.quantized_grouped_matmul(x, w, group_sizes, precision)

  y, vjp = jax.vjp(fn, x, w)
  return y, *vjp(dy)


class QuantizedMatmulTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.named_parameters(PRECISIONS.items())
  def test_forward_is_dot_of_decoded_operands_times_outer_scales(
      self, precision
  ):
    x, w, _ = _operands(0, (15, 64), (32, 64))
    xq = quantization.quantize(x, precision.lhs)
    wq = quantization.quantize(exact.to_bfloat16(w), precision.rhs)
    scale = np.asarray(xq.global_scale) * np.asarray(wq.global_scale)
    accumulated = np.asarray(_dot(qtensor.decode(xq), qtensor.decode(wq)))
    want = jnp.asarray(accumulated * scale).astype(jnp.bfloat16)
    fn = lambda x, w: matmul.quantized_matmul(x, w, precision)
    chex.assert_trees_all_equal(self.variant(fn)(x, w), want)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.named_parameters(PRECISIONS.items())
  def test_gradient_is_matmul_vjp_at_the_operands_of_the_mode(self, precision):
    x, w, dy = _operands(1, (15, 64), (32, 64))

    @self.variant
    def gradients(x, w, dy):
      fn = lambda x, w: matmul.quantized_matmul(x, w, precision)
      return jax.vjp(fn, x, w)[1](dy)

    mx, mw = _mode_operands(precision, x, w)
    dgrad = lax.dot(dy, mw, preferred_element_type=jnp.float32)
    wgrad = lax.dot_general(
        dy, mx, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    want = dgrad.astype(jnp.bfloat16), wgrad
    chex.assert_trees_all_equal(gradients(x, w, dy), want)

  @parameterized.named_parameters(PRECISIONS.items())
  def test_gradient_of_float32_is_not_rounded(self, precision):
    x, w, dy = _operands(14, (15, 64), (32, 64), jnp.float32)
    fn = lambda x, w: matmul.quantized_matmul(x, w, precision)
    dx, dw = jax.jit(lambda x, w, dy: jax.vjp(fn, x, w)[1](dy))(x, w, dy)
    dy, mx, mw = (
        np.asarray(v, np.float64)
        for v in (dy, *_mode_operands(precision, x, w))
    )
    np.testing.assert_allclose(dx, dy @ mw, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, dy.T @ mx, rtol=1e-5, atol=1e-5)

  def test_modes_have_equal_forward_and_different_gradients(self):
    x, w, dy = _operands(2, (15, 64), (32, 64))
    results = {}
    for name in ('dequantized', 'high_precision'):
      fn = functools.partial(
          matmul.quantized_matmul, precision=PRECISIONS[name]
      )
      y, vjp = jax.vjp(fn, x, w)
      results[name] = (y, *vjp(dy))
    a, b = results.values()
    chex.assert_trees_all_equal(a[0], b[0])
    for i in (1, 2):
      self.assertGreater(float(jnp.mean(a[i] != b[i])), 0.9)

  @parameterized.named_parameters(PRECISIONS.items())
  def test_given_quantized_operands_change_nothing(self, precision):
    x, w, dy = _operands(3, (3, 5, 64), (32, 64))
    xq = quantization.quantize(x.reshape(15, 64), precision.lhs)
    wq = quantization.quantize(exact.to_bfloat16(w), precision.rhs)

    def run(**given):
      fn = lambda x, w: matmul.quantized_matmul(x, w, precision, **given)
      y, vjp = jax.vjp(fn, x, w)
      return y, vjp(dy)

    want = run()
    for given in ({'wq': wq}, {'xq': xq}, {'xq': xq, 'wq': wq}):
      chex.assert_trees_all_equal(run(**given), want)
    y = matmul.quantized_matmul(x, None, precision, wq=wq)
    chex.assert_trees_all_equal(y, want[0])

  def test_dequantized_residuals_hold_codes_and_scales_only(self):
    m, n, k = 256, 128, 512
    x, w, _ = _operands(4, (m, k), (n, k))
    residuals = lambda precision: jax.tree.leaves(
        jax.eval_shape(
            lambda x, w: jax.vjp(
                lambda x, w: matmul.quantized_matmul(x, w, precision), x, w
            )[1],
            x,
            w,
        )
    )
    saved = residuals(PRECISIONS['dequantized'])
    dtypes = {leaf.dtype for leaf in saved}
    self.assertEqual(
        dtypes, {jnp.dtype(d) for d in ('uint8', 'float8_e4m3fn', 'float32')}
    )
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in saved)
    # 4 bits an element, 8 bits a block of 16, a float32 a token and one more.
    self.assertEqual(size, (m + n) * k * 9 // 16 + 4 * m + 4)
    kept = residuals(PRECISIONS['high_precision'])
    self.assertIn(jnp.dtype('bfloat16'), {leaf.dtype for leaf in kept})

  def test_dtypes_of_results_are_those_of_the_operands(self):
    for x_dtype in (jnp.bfloat16, jnp.float32):
      x, w, dy = _operands(5, (4, 32), (16, 32), x_dtype)
      fn = lambda x, w: matmul.quantized_matmul(x, w, FINAL)
      y, vjp = jax.vjp(fn, x, w)
      dx, dw = vjp(dy)
      self.assertEqual((y.dtype, dx.dtype), (x_dtype, x_dtype))
      self.assertEqual(dw.dtype, jnp.float32)

  def test_float32_operands_are_rounded_to_bfloat16_first(self):
    x, w, _ = _operands(6, (4, 32), (16, 32), jnp.float32)
    rounded = lambda v: exact.to_bfloat16(v).astype(jnp.float32)
    for fn in (
        lambda x, w: matmul.quantized_matmul(x, w, FINAL),
        matmul.unquantized_matmul,
    ):
      chex.assert_trees_all_equal(fn(x, w), fn(rounded(x), rounded(w)))

  @parameterized.parameters(1, 2, 3, 17, 33, 65)  # one is left of a tile
  def test_row_does_not_depend_on_other_rows(self, rows):
    x, w, _ = _operands(7, (66, 256), (256, 256))
    for fn in (
        lambda x: matmul.quantized_matmul(x, w, FINAL),
        lambda x: matmul.unquantized_matmul(x, w),
    ):
      chex.assert_trees_all_equal(jax.jit(fn)(x[:rows]), jax.jit(fn)(x)[:rows])

  @parameterized.parameters(2, 3, 8)
  def test_row_does_not_depend_on_other_rows_with_few_features(self, features):
    x, w, _ = _operands(13, (33, 256), (features, 256), jnp.float32)
    fn = jax.jit(matmul.unquantized_matmul)
    whole = fn(x, w)
    for rows in (1, 2, 3):
      chex.assert_trees_all_equal(fn(x[:rows], w), whole[:rows])

  def test_error_against_float64_is_the_rounding_of_the_result(self):
    x, w, _ = _operands(8, (64, 512), (128, 512), jnp.float32)
    y = np.asarray(matmul.quantized_matmul(x, w, FINAL), np.float64)
    mx, mw = (
        np.asarray(
            qtensor.dequantize(quantization.quantize(v, spec), 'float32')
        )
        for v, spec in (
            (exact.to_bfloat16(x), FINAL.lhs),
            (exact.to_bfloat16(w), FINAL.rhs),
        )
    )
    want = mx.astype(np.float64) @ mw.astype(np.float64).T
    self.assertLess(np.abs(y - want).max(), 1e-5 * np.abs(want).max())

  def test_axis_name_shares_amax_over_shards_of_k(self):
    x, w, _ = _operands(9, (6, 64), (16, 64))
    x = x.astype(jnp.float32)

    def in_shards(axis_name):
      fn = lambda x, w: matmul.quantized_matmul(
          x, w, DEQUANTIZED, axis_name=axis_name
      )
      split = lambda v: jnp.stack(jnp.split(v, 2, axis=-1))
      return jax.jit(jax.vmap(fn, axis_name='k'))(split(x), split(w)).sum(0)

    whole = jax.jit(matmul.quantized_matmul, static_argnums=2)(
        x, w, DEQUANTIZED
    )
    np.testing.assert_allclose(in_shards('k'), whole, rtol=1e-5, atol=1e-5)
    self.assertGreater(float(jnp.abs(in_shards(None) - whole).max()), 1e-3)

  def test_bad_operands_are_refused(self):
    x, w, _ = _operands(10, (4, 32), (16, 32))
    call = lambda x, w, **kw: matmul.quantized_matmul(x, w, FINAL, **kw)
    with self.assertRaisesRegex(ValueError, 'not a multiple of 16'):
      call(x[:, :24], w[:, :24])
    with self.assertRaisesRegex(TypeError, 'int32'):
      call(x.astype(jnp.int32), w)
    with self.assertRaisesRegex(ValueError, 'do not share K'):
      call(x, w[:, :16])
    with self.assertRaisesRegex(ValueError, 'Give w, wq or both'):
      call(x, None)
    with self.assertRaisesRegex(ValueError, 'key must be None'):
      call(x, w, key=jax.random.key(0))
    with self.assertRaisesRegex(ValueError, '2 axes are needed'):
      call(x, w[None])
    wq = quantization.quantize(w, FINAL.rhs)
    with self.assertRaisesRegex(ValueError, 'A gradient needs w'):
      jax.grad(lambda x: call(x, None, wq=wq).astype(jnp.float32).sum())(x)

  def test_bad_precisions_are_refused(self):
    with self.assertRaisesRegex(ValueError, "'quantised'.*high_precision"):
      dataclasses.replace(FINAL, backward='quantised')
    with self.assertRaisesRegex(ValueError, 'grad must be None'):
      dataclasses.replace(FINAL, grad=TENSOR)
    with self.assertRaisesRegex(ValueError, 'is not a QuantSpec'):
      dataclasses.replace(FINAL, lhs='nvfp4')
    with self.assertRaisesRegex(ValueError, 'weights need'):
      dataclasses.replace(FINAL, rhs=TOKEN)


class GroupedMatmulTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    self.sizes = jnp.array(GROUP_SIZES, jnp.int32)
    self.x, self.w, self.dy = _operands(
        11, (sum(GROUP_SIZES) + 2, 64), (len(GROUP_SIZES), 32, 64)
    )

  def _loop(self, precision):
    """Forward, dgrad and wgrad of each group by itself."""
    y = np.zeros((self.x.shape[0], 32), np.float32)
    dx = np.zeros(self.x.shape, np.float32)
    dw = np.zeros(self.w.shape, np.float32)
    start = 0
    for e, size in enumerate(GROUP_SIZES):
      rows = slice(start, start + size)
      start += size
      if size:
        # All groups in one program: rows of zeros change no other row, no sum.
        pad = ((0, max(GROUP_SIZES) - size), (0, 0))
        x, dy = (jnp.pad(a[rows], pad) for a in (self.x, self.dy))
        got_y, got_dx, dw[e] = _run(precision, x, self.w[e], dy)
        y[rows], dx[rows] = got_y[:size], got_dx[:size]
    return y, dx, dw

  def _grouped(self, precision):
    results = _run(precision, self.x, self.w, self.dy, self.sizes)
    return jax.tree.map(lambda a: np.asarray(a, np.float32), results)

  @parameterized.named_parameters(
      *(item for item in PRECISIONS.items() if item[0] != 'per_tensor'),
      ('bf16', None),
  )
  def test_equals_a_loop_over_groups(self, precision):
    y, dx, dw = self._grouped(precision)
    want_y, want_dx, want_dw = self._loop(precision)
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(dx, want_dx)
    # Blocks of rows are added in turn: float32 sums in another order.
    np.testing.assert_allclose(dw, want_dw, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(dw[[1, 4]], 0)  # groups without rows
    np.testing.assert_array_equal(y[-2:], 0)  # rows without group
    np.testing.assert_array_equal(dx[-2:], 0)

  def test_wgrad_is_bit_equal_where_sums_are_exact(self):
    # Small integers times powers of two: no order of summation rounds.
    key = jax.random.key(12)
    self.dy = jax.random.randint(key, self.dy.shape, -4, 5).astype(jnp.bfloat16)
    self.x = jax.random.randint(key, self.x.shape, -6, 7).astype(jnp.bfloat16)
    precision = PRECISIONS['high_precision']
    np.testing.assert_array_equal(
        self._grouped(precision)[2], self._loop(precision)[2]
    )

  def test_row_does_not_depend_on_its_group(self):
    fn = jax.jit(
        lambda x, sizes: matmul.quantized_grouped_matmul(
            x, self.w, sizes, FINAL
        )
    )
    w3 = jnp.zeros(6, jnp.int32).at[3]
    for rows in (1, 9):
      alone = fn(self.x[:rows], w3.set(rows))
      many = fn(jnp.tile(self.x, (20, 1)), w3.set(520))
      chex.assert_trees_all_equal(alone, many[:rows])

  def test_all_groups_empty_gives_zeros(self):
    self.sizes = jnp.zeros(6, jnp.int32)
    for array in self._grouped(FINAL):
      np.testing.assert_array_equal(array, 0)

  def test_work_does_not_grow_with_experts_times_rows(self):
    def flops(experts):
      sizes = jnp.zeros(experts, jnp.int32)
      w = jnp.zeros((experts, 32, 64), jnp.bfloat16)
      x = jnp.zeros((4096, 64), jnp.bfloat16)
      fn = jax.jit(lambda x, w, s: matmul.unquantized_matmul(x, w, s))
      hlo = fn.lower(x, w, sizes).compile().as_text()
      # The only dot is the one of a block, inside the loop.
      self.assertNotIn(f'f32[{experts},4096', hlo)
      return fn.lower(x, w, sizes).compile().cost_analysis()['flops']

    self.assertLess(flops(64), 1.5 * flops(8))

  @parameterized.parameters('bf16', 'per_tensor', 'quantized')
  def test_lanes_of_a_vmap_have_the_bits_of_each_alone(self, name):
    rows = 200
    specs = {'bf16': None, 'quantized': MXFP8, **PRECISIONS}
    sizes = np.zeros((3, len(GROUP_SIZES)), np.int32)
    sizes[0] = GROUP_SIZES
    sizes[1, 3] = rows  # one group has all rows
    sizes[2] = (rows // 2, 5, 0, 3, rows // 3, 0)
    args = [
        jnp.stack(lanes)
        for lanes in zip(
            *(_operands(i, (rows, 64), (6, 32, 64)) for i in range(3)),
            strict=True,
        )
    ]
    run = functools.partial(_run, specs[name])
    lanes = jax.vmap(run)(*args, jnp.asarray(sizes))
    for i in range(3):
      alone = run(*(x[i] for x in args), jnp.asarray(sizes[i]))
      chex.assert_trees_all_equal(
          jax.tree.map(lambda x, i=i: x[i], lanes), alone
      )
    # A weight that all lanes share, as under grad of a mean over lanes.
    shared = jax.vmap(run, (0, None, 0, 0))(
        args[0], args[1][0], args[2], jnp.asarray(sizes)
    )
    alone = run(args[0][2], args[1][0], args[2][2], jnp.asarray(sizes[2]))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[2], shared), alone)

  def test_lanes_of_a_vmap_do_not_walk_in_lockstep(self):
    x, w, dy = _operands(0, (2, 64, 32), (2, 4, 32, 32))
    sizes = jnp.full((2, 4), 16, jnp.int32)
    text = jax.jit(jax.vmap(functools.partial(_run, None))).lower(
        x, w, dy, sizes
    )
    self.assertEqual(text.as_text().count('stablehlo.while'), 1)  # of wgrad

  def test_rows_must_be_a_matrix(self):
    with self.assertRaisesRegex(ValueError, r'not \[M, K\]'):
      matmul.quantized_grouped_matmul(self.x[None], self.w, self.sizes, FINAL)
