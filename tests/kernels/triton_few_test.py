"""Triton's kernels for few rows in its interpreter: `make aot`.

The interpreter's dots add in an order of their own, so that only a GPU can show
that the bits are those of other kernels.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import layers
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from tests.kernels import cases

triton = pytest.importorskip('triton')
if not triton.knobs.runtime.interpret:
  pytest.skip('TRITON_INTERPRET is not set.', allow_module_level=True)

from nvfp4_jax.kernels import triton_few  # noqa: E402
from nvfp4_jax.kernels import triton_norm  # noqa: E402
from tests.kernels import interpreter  # noqa: E402

pytestmark = pytest.mark.aot

_WEIGHTS = quantization.QuantSpec('nvfp4', four_over_six='mse')
_TOKEN = quantization.QuantSpec('nvfp4', 'token')


def _stacks(k, features, quantized, num_layers=2):
  """Returns a layer of each of some stacks of weights."""
  stacks = []
  for i, n in enumerate(features):
    _, w = cases.operands(1, num_layers * n, k, seed=i)
    w = w.reshape(num_layers, n, k)
    stacks.append(quantization.quantize(w, _WEIGHTS) if quantized else w)
  return tuple(qtensor.Layer(stack, jnp.int32(1)) for stack in stacks)


def _run(x, ws, dtype=jnp.float32):
  with interpreter.installed():
    ys = jax.jit(triton_few.matmuls, static_argnames='dtype')(
        x, ws, dtype=dtype
    )
    return [np.asarray(y) for y in ys]


class TritonFewTest(chex.TestCase):

  @parameterized.parameters(
      (1, 64, (64,), None),
      (5, 128, (70, 64), None),
      (17, 192, (64, 128, 30), None),
      (130, 128, (64,), None),
      (1, 128, (64, 64), 'bfloat16'),
      (5, 1024, (70, 64, 128), 'bfloat16'),  # two parts
      (17, 256, (64, 30, 130), 'nvfp4'),
      (3, 1024, (64,), 'nvfp4'),
  )
  def test_weights_share_a_launch(self, rows, k, features, lhs):
    x, _ = cases.operands(rows, 8, k)
    ws = _stacks(k, features, quantized=lhs is not None)
    x = quantization.quantize(x, _TOKEN) if lhs == 'nvfp4' else x
    ys, rounded = _run(x, ws), _run(x, ws, jnp.bfloat16)
    for y, low, w, n in zip(ys, rounded, ws, features, strict=True):
      self.assertEqual(y.shape, (rows, n))
      want, magnitude = cases.exact_product(x, w.take())
      self.assertLess(np.max(np.abs(y - want) / magnitude), 1e-6)
      np.testing.assert_array_equal(low, y.astype(jnp.bfloat16))
      (alone,) = _run(x, (w,))
      np.testing.assert_array_equal(alone, y)

  @parameterized.parameters(
      (14336, 4096, 1), (4096, 4096, 4), (64, 128, 1), (64, 1024, 2)
  )
  def test_parts_follow_from_the_weights(self, n, k, parts):
    self.assertEqual(triton_few.num_parts(n, k), parts)

  def test_a_tile_has_steps_that_fit(self):
    x, w = cases.operands(2, 64, 128)
    multiply = functools.partial(
        triton_few.matmuls, x, dtype=jnp.float32, tile=(16, 64, 4, 3, 96)
    )
    layer = qtensor.Layer(w[None], jnp.int32(0))
    with self.assertRaisesRegex(ValueError, 'K = 128 is no multiple'):
      multiply((layer,))
    wq = quantization.quantize(w[None], _WEIGHTS)
    with self.assertRaisesRegex(ValueError, 'steps of 128'):
      multiply((qtensor.Layer(wq, jnp.int32(0)),))

  def test_says_what_it_cannot_do(self):
    x, w = cases.operands(300, 64, 192)
    why = triton_few.unsupported_bfloat16
    self.assertIsNone(why(x[:256], w, 9.0))
    self.assertIn('9.0, not 10.0', why(x[:256], w, 10.0))
    self.assertIn('more than 256 rows', why(x, w, 9.0))
    self.assertIn('no rows', why(x[:0], w, 9.0))
    self.assertIn('float32', why(x[:1], w.astype(jnp.float32), 9.0))
    self.assertIn('multiple of 64', why(x[:1, :96], w[:, :96], 9.0))
    wide = jax.ShapeDtypeStruct((16384, 192), jnp.bfloat16)
    self.assertIsNone(why(x[:128], wide, 9.0))
    self.assertIn('more than 128 rows', why(x[:129], wide, 9.0))

  @parameterized.parameters(False, True)
  def test_lanes_of_vmap(self, quantized):
    ws = _stacks(128, (64, 30), quantized)
    x, _ = cases.operands(6, 8, 128)
    x = x.reshape(3, 2, 128)
    index = jnp.array([1, 0, 1], jnp.int32)
    reverse = lambda leaf: jnp.stack([leaf, leaf[::-1]])
    stacks = jax.tree.map(reverse, ws[1].stack)
    others = qtensor.Layer(stacks, jnp.zeros((2,), jnp.int32))

    def run(x, index, stack):
      layer = qtensor.Layer(stack, index)
      return triton_few.matmuls(x, (ws[0], layer), dtype=jnp.float32)

    with interpreter.installed():
      shared = jax.vmap(run, (0, 0, None))(x, index, ws[1].stack)
      own = jax.vmap(jax.vmap(run, (0, None, None)), (None, 0, 0))(
          x, others.index, others.stack
      )
      for i in range(3):
        want = run(x[i], index[i], ws[1].stack)
        chex.assert_trees_all_equal([y[i] for y in shared], list(want))
        for j in range(2):
          stack = jax.tree.map(lambda leaf, j=j: leaf[j], others.stack)
          want = run(x[i], others.index[j], stack)
          chex.assert_trees_all_equal([y[j, i] for y in own], list(want))

  @parameterized.parameters((1, 64, 64), (5, 128, 70), (70, 192, 30))
  def test_swiglu_has_the_bits_of_two_products(self, rows, k, features):
    x, _ = cases.operands(rows, 8, k)
    gate, up = ws = _stacks(k, (features, features), quantized=False)
    # Gates from -90 to 90, one of them NaN.
    x = x.at[0].multiply(90).at[rows - 1, 3].set(jnp.nan)
    with interpreter.installed():
      got = np.asarray(triton_few.swiglu(x, gate, up))
    want = layers.swiglu(*(jnp.asarray(y) for y in _run(x, ws, jnp.bfloat16)))
    np.testing.assert_array_equal(
        got.astype(np.float32), np.asarray(want, np.float32)
    )
    self.assertTrue(np.isnan(got[-1].astype(np.float32)).all())

  def test_swiglu_of_lanes_of_vmap(self):
    gate, up = _stacks(128, (64, 64), quantized=False)
    x = cases.operands(6, 8, 128)[0].reshape(3, 2, 128)
    index = jnp.array([1, 0, 1], jnp.int32)
    run = lambda x, index: triton_few.swiglu(
        x, qtensor.Layer(gate.stack, index), up
    )
    with interpreter.installed():
      got = jax.vmap(run)(x, index)
      for i in range(3):
        np.testing.assert_array_equal(got[i], run(x[i], index[i]))

  @parameterized.product(
      rows=(1, 3), channels=(64, 96), adds=(False, True), stacked=(False, True)
  )
  def test_norm_has_the_bits_of_the_reference(
      self, rows, channels, adds, stacked
  ):
    x, y, gains = jax.random.normal(
        jax.random.key(0), (3, rows, channels), jnp.bfloat16
    )
    y = y if adds else None
    layer = qtensor.Layer(gains, jnp.int32(rows - 1))
    gain = layer if stacked else gains[-1]
    with interpreter.installed():
      total, normed = triton_norm.rms_norm(x, gain, 1e-6, y)
    want = x if y is None else layers.add(x, y)
    np.testing.assert_array_equal(total, want)
    np.testing.assert_array_equal(
        normed, layers.rms_norm(want, gains[-1], 1e-6)
    )

  def test_norm_of_nan_and_of_lanes(self):
    x, y = jax.random.normal(jax.random.key(0), (2, 2, 3, 64), jnp.bfloat16)
    x = x.at[0, 1, 5].set(jnp.nan)
    gains = jnp.stack([x[1, 0], x[1, 1]])
    with interpreter.installed():
      norm = lambda x, gain, y: triton_norm.rms_norm(x, gain, 1e-6, y)
      got = jax.vmap(norm)(x, gains, y)
      for i in range(2):
        want = norm(x[i], gains[i], y[i])
        chex.assert_trees_all_equal([t[i] for t in got], list(want))
    is_bad = np.isnan(np.asarray(got[1], np.float32)).all(axis=-1)
    np.testing.assert_array_equal(
        is_bad, [[False, True, False], [False, False, False]]
    )


if __name__ == '__main__':
  absltest.main()
