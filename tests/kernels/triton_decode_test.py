"""The Triton decoder in Triton's interpreter, against `qtensor`."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nvfp4_jax import formats
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from tests.kernels import cases

triton = pytest.importorskip('triton')
if not triton.knobs.runtime.interpret:
  pytest.skip('TRITON_INTERPRET is not set.', allow_module_level=True)

from nvfp4_jax.kernels import triton_decode  # noqa: E402
from tests.kernels import interpreter  # noqa: E402

pytestmark = pytest.mark.aot


def _assert_same(got, want):
  nan = np.isnan(want.astype(np.float32))
  np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
  got, want = (np.where(nan, 0, a.view(np.uint16)) for a in (got, want))
  np.testing.assert_array_equal(got, want)


def _decoded(q, name, dtype=None):
  fn = lambda module: getattr(module, name)
  with interpreter.installed():
    got = fn(triton_decode)(q)
  return np.asarray(got), np.asarray(
      fn(qtensor)(q, *([dtype] if dtype else ()))
  )


class TritonDecodeTest(chex.TestCase):

  def test_every_code_and_scale(self):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32, axis=1)
    scale = scale.view(ml_dtypes.float8_e4m3fn)
    q = qtensor.QTensor(
        jnp.asarray(codes), jnp.asarray(scale), None, formats.NVFP4
    )
    _assert_same(*_decoded(q, 'decode'))

  @parameterized.parameters(
      ((3, 16), 'token'), ((2, 5, 48), 'token'), ((2, 130, 144), 'tensor')
  )
  def test_shapes_and_global_scales(self, shape, outer):
    x = cases.matrix(int(np.prod(shape[:-1])), shape[-1]).reshape(shape)
    q = quantization.quantize(
        jnp.asarray(x), quantization.QuantSpec('nvfp4', outer)
    )
    _assert_same(*_decoded(q, 'decode'))
    _assert_same(*_decoded(q, 'dequantize', jnp.bfloat16))

  def test_permuted(self):
    q = quantization.quantize(
        jnp.asarray(cases.matrix(5, 256)), quantization.QuantSpec('nvfp4')
    )
    with interpreter.installed():
      got = triton_decode.decode_permuted(q)
    want = triton_decode.permute(qtensor.decode(q)) / triton_decode.UNIT
    _assert_same(np.asarray(got), np.asarray(want))

  def test_nan_stays_in_its_row(self):
    x = cases.matrix(4, 32)
    x[1, 3] = np.nan
    q = quantization.quantize(
        jnp.asarray(x), quantization.QuantSpec('nvfp4', 'token')
    )
    _assert_same(*_decoded(q, 'dequantize', jnp.bfloat16))

  def test_jit_and_vmap(self):
    q = quantization.quantize(
        jnp.asarray(cases.matrix(12, 64)).reshape(3, 4, 64),
        quantization.QuantSpec('nvfp4', 'token'),
    )
    with interpreter.installed():
      lanes = jax.jit(jax.vmap(triton_decode.dequantize))(q)
    _assert_same(
        np.asarray(lanes), np.asarray(qtensor.dequantize(q, jnp.bfloat16))
    )

  def test_other_formats_are_refused(self):
    x = jnp.asarray(cases.matrix(4, 64))
    q = quantization.quantize(x, quantization.QuantSpec('mxfp4'))
    self.assertIn('mxfp4', triton_decode.unsupported(q))


if __name__ == '__main__':
  absltest.main()
