"""Triton's matmuls in its interpreter: `make aot`.

The interpreter adds in an order of its own, so that only a GPU can show that a
row's bits do not depend on the number of rows.
"""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import formats
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from tests.kernels import cases

triton = pytest.importorskip('triton')
if not triton.knobs.runtime.interpret:
  pytest.skip('TRITON_INTERPRET is not set.', allow_module_level=True)

from nvfp4_jax.kernels import triton_blackwell  # noqa: E402
from nvfp4_jax.kernels import triton_matmul  # noqa: E402
from tests.kernels import interpreter  # noqa: E402

pytestmark = pytest.mark.aot

_TENSOR = quantization.QuantSpec('nvfp4', four_over_six='mse')
_TOKEN = quantization.QuantSpec('nvfp4', 'token')
_MXFP8 = quantization.QuantSpec('mxfp8')


def _scaled_matmul(module, x, wq, tile=None):
  with interpreter.installed():
    return np.asarray(module.scaled_matmul(x, wq, tile=tile))


class TritonMatmulTest(chex.TestCase):

  def assert_close(self, y, x, wq):
    want, magnitude = cases.exact_product(x, wq)
    # A rounding of the sum for each step, part and scale, and to spare.
    self.assertLess(np.max(np.abs(y - want) / magnitude), 1e-6)

  @parameterized.product(
      shape=((1, 64, 128), (5, 70, 256), (33, 130, 1024), (130, 64, 384)),
      lhs=(None, _TOKEN, _TENSOR, _MXFP8),
  )
  def test_hopper(self, shape, lhs):
    x, w = cases.operands(*shape)
    x = x if lhs is None else quantization.quantize(x, lhs)
    wq = quantization.quantize(w, _TENSOR)
    self.assert_close(_scaled_matmul(triton_matmul, x, wq), x, wq)

  @parameterized.parameters((5, 64, 128), (5, 70, 1024), (130, 64, 128))
  def test_result_may_be_bfloat16(self, *shape):  # one part, two, many rows
    x, w = cases.operands(*shape)
    wq = quantization.quantize(w, _TENSOR)
    with interpreter.installed():
      y = triton_matmul.scaled_matmul(x, wq)
      rounded = triton_matmul.scaled_matmul(x, wq, dtype=jnp.bfloat16)
    self.assertEqual(rounded.dtype, jnp.bfloat16)
    np.testing.assert_array_equal(rounded, y.astype(jnp.bfloat16))

  def test_every_code_and_scale_is_decoded_exactly(self):
    # One column of x picks one column of w.
    codes = np.arange(256, dtype=np.uint8)
    data = np.tile(codes, (127, 1))[:, :64] | np.zeros((127, 1), np.uint8)
    data = np.concatenate([np.roll(data, s, 1) + s for s in (0, 64)], 0)
    scale = np.tile(np.arange(127, dtype=np.uint8)[:, None], (2, 8))
    wq = qtensor.QTensor(
        jnp.asarray(data.astype(np.uint8)),
        jax.lax.bitcast_convert_type(jnp.asarray(scale), jnp.float8_e4m3fn),
        jnp.ones((1, 1)),
        formats.NVFP4,
    )
    x = jnp.eye(128, dtype=jnp.bfloat16)
    y = _scaled_matmul(triton_matmul, x, wq)
    want = np.asarray(qtensor.decode(wq), np.float32).T
    np.testing.assert_array_equal(y, want)

  def test_row_of_nan_scales_is_nan(self):
    x, w = cases.operands(4, 64, 128)
    w = w.at[3].set(jnp.nan)
    wq = quantization.quantize(w, _TENSOR)
    self.assertTrue(np.isnan(_scaled_matmul(triton_matmul, x, wq)).all())

  @parameterized.product(
      rows=(2, 130),  # few and many
      axes=((0, None), (None, 0), (0, 0)),
  )
  def test_vmap(self, rows, axes):
    x, w = cases.operands(3 * rows, 3 * 64, 128)
    x, w = x.reshape(3, rows, 128), w.reshape(3, 64, 128)
    wq = quantization.quantize(w, _TENSOR)
    take = lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree)
    lanes = [
        take(tree, 0) if axis is None else tree
        for tree, axis in zip((x, wq), axes, strict=True)
    ]
    with interpreter.installed():
      y = jax.vmap(triton_matmul.scaled_matmul, axes)(*lanes)
      for i in range(3):
        one = [
            take(tree, 0 if axis is None else i)
            for tree, axis in zip((x, wq), axes, strict=True)
        ]
        np.testing.assert_array_equal(y[i], triton_matmul.scaled_matmul(*one))

  def test_vmap_of_vmap(self):
    x, w = cases.operands(12, 4 * 64, 128)
    x, w = x.reshape(2, 2, 3, 128), w.reshape(2, 2, 64, 128)
    wq = quantization.quantize(w, _TENSOR)
    with interpreter.installed():
      y = jax.vmap(jax.vmap(triton_matmul.scaled_matmul))(x, wq)
      for i, j in np.ndindex(2, 2):
        take = lambda leaf, i=i, j=j: leaf[i, j]
        want = triton_matmul.scaled_matmul(x[i, j], jax.tree.map(take, wq))
        np.testing.assert_array_equal(y[i, j], want)

  @parameterized.parameters(2, 130)
  def test_layer_of_a_stack(self, rows):
    x, w = cases.operands(rows, 3 * 64, 128)
    wq = quantization.quantize(w.reshape(3, 64, 128), _TENSOR)
    with interpreter.installed():
      for i in range(3):
        layer = qtensor.Layer(wq, jnp.int32(i))
        got = jax.jit(triton_matmul.scaled_matmul)(x, layer)
        want = triton_matmul.scaled_matmul(x, layer.take())
        np.testing.assert_array_equal(got, want)

  def test_hopper_says_what_it_cannot_do(self):
    x, w = cases.operands(4, 64, 192)
    wq = quantization.quantize(w, _TENSOR)
    why = triton_matmul.unsupported
    self.assertIn('not a multiple of 128', why(x, wq, None, 9.0))
    wq = quantization.quantize(w[:, :128], _TENSOR)
    x = x[:, :128]
    self.assertIsNone(why(x, wq, None, 9.0))
    self.assertIn('9.0, not 10.0', why(x, wq, None, 10.0))
    self.assertIn('groups', why(x, wq, jnp.array([4]), 9.0))
    self.assertIn('float32', why(x.astype(jnp.float32), wq, None, 9.0))
    mxfp8 = quantization.quantize(w[:, :128], _MXFP8)
    self.assertIn('mxfp8', why(x, mxfp8, None, 9.0))

  @parameterized.product(
      shape=((1, 64, 256), (130, 140, 512)),
      specs=((_TOKEN, _TENSOR), (_TENSOR, _TENSOR), (_MXFP8, _MXFP8)),
  )
  def test_blackwell(self, shape, specs):
    x, w = cases.operands(*shape)
    x, wq = (
        quantization.quantize(a, s) for a, s in zip((x, w), specs, strict=True)
    )
    self.assert_close(_scaled_matmul(triton_blackwell, x, wq), x, wq)

  def test_blackwell_is_for_blackwell_only(self):
    x, w = cases.operands(4, 64, 256)
    xq, wq = quantization.quantize(x, _TOKEN), quantization.quantize(w, _TENSOR)
    why = triton_blackwell.unsupported
    self.assertIsNone(why(xq, wq, None, 10.0))
    for capability in (8.9, 9.0, 11.0):
      self.assertIn(f'not {capability}', why(xq, wq, None, capability))
    self.assertIn('quantized x', why(x, wq, None, 10.0))
    mxfp8 = quantization.quantize(x, _MXFP8)
    self.assertIn('mxfp8 x nvfp4', why(mxfp8, wq, None, 10.0))


if __name__ == '__main__':
  absltest.main()
