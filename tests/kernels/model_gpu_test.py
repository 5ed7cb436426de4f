"""What must hold of the kernels of a model on a GPU: `pytest -m gpu`."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import kernels
from nvfp4_jax import layers
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax.kernels import choice
from nvfp4_jax.kernels import reference
from tests.kernels import attention_cases
from tests.kernels import cases
from tests.kernels import sequence_cases

_Spec = quantization.QuantSpec
_Step = attention_cases.Case
# Of attention: shapes, and how many positions are attended to.
_STEPS = [
    (_Step(16, 8, 128, 64, (0,)), 64),
    (_Step(16, 8, 128, 256, (128,)), 256),
    (_Step(16, 8, 128, 256, (0, 63, 64, 127, 128, 200, 255, 256, 300)), 256),
    (_Step(9, 3, 64, 512, tuple(range(0, 512, 7))), 512),
    (_Step(8, 8, 64, 192, (191, 5, 70, 192, 300)), 192),
    (_Step(15, 1, 128, 4096, (4095, 1, 3000, 2047, 2048)), 4096),
    (_Step(32, 4, 128, 1024, (300, 511), normed=False), 512),
    (_Step(4, 2, 128, 1024, (1023, 600), block=128), 1024),
    (_Step(4, 2, 64, 8192, (8191, 77)), 8192),
]
_Sequences = sequence_cases.Case
_SEQUENCES = [
    _Sequences(3, 1, 4, 2, 64),
    _Sequences(2, 65, 9, 3, 64),
    _Sequences(32, 256, 16, 8, 128),
    _Sequences(8, 300, 16, 8, 128),
    _Sequences(2, 700, 6, 2, 128, block=128),
    _Sequences(2, 200, 4, 4, 64, block=128),
    _Sequences(2, 2048, 16, 8, 128),
    _Sequences(1, 4100, 4, 1, 64),
]


def _norm(x, gain, y):
  total = x if y is None else layers.add(x, y)
  return total, layers.rms_norm(total, gain, 1e-6)


@pytest.mark.gpu
class ModelKernelsTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    if problem := choice.cannot_run_triton():
      self.skipTest(problem)

  @parameterized.parameters(
      (1024, 3072), (3072, 1024), (70, 192), (4096, 4096), (576, 1536)
  )
  def test_bits_of_few_bfloat16_rows_are_those_of_many(self, n, k):
    # XLA's own matmuls of few rows divide K for some of these.
    x, w = cases.operands(1024, n, k)
    x = jnp.where(jnp.arange(k) % 97 == 5, 300 * x, x)
    want = np.asarray(cases.jit(reference.matmul)(x, w))
    stack = qtensor.Layer(jnp.stack([2 * w, w]), jnp.int32(1))
    for rows in (1, 2, 16, 17, 33, 64, 129, 256):
      y = kernels.matmul(x[:rows], w, implementation='triton')
      np.testing.assert_array_equal(y, want[:rows])
      for got in kernels.matmuls(x[:rows], (stack, stack)):
        np.testing.assert_array_equal(got, want[:rows])

  @parameterized.product(
      shape=((3072, 1024), (1536, 576)), rows=(1, 16, 33, 64, 65, 256)
  )
  def test_swiglu_of_few_rows_has_the_learners_bits(self, shape, rows):
    n, k = shape
    x, w = cases.operands(1024, 2 * n, k)
    x = x * jnp.geomspace(0.1, 30, 1024)[::-1, None].astype(jnp.bfloat16)

    @cases.jit
    def learned(x, gate, up):
      products = (reference.matmul(x, w) for w in (gate, up))
      return layers.swiglu(*(y.astype(jnp.bfloat16) for y in products))

    want = np.asarray(learned(x, w[:n], w[n:]))[:rows]
    gate, up = (
        qtensor.Layer(jnp.stack([-part, part]), jnp.int32(1))
        for part in (w[:n], w[n:])
    )
    got = np.asarray(kernels.decoding.swiglu(x[:rows], gate, up))
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))

  @parameterized.parameters(None, _Spec('nvfp4', 'token'))
  def test_quantized_weights_share_a_launch(self, lhs):
    x, w = cases.operands(64, 2 * 1024, 1024)
    x = x if lhs is None else quantization.quantize(x, lhs)
    wq = quantization.quantize(
        w.reshape(2, 1024, 1024), _Spec('nvfp4', four_over_six='mse')
    )
    ws = [qtensor.Layer(wq, jnp.int32(i)) for i in (1, 0, 1)]
    for y, w in zip(kernels.matmuls(x, ws), ws, strict=True):
      np.testing.assert_array_equal(y, kernels.scaled_matmul(x, w.take()))

  @parameterized.parameters(*_STEPS)
  def test_attention_of_a_token_has_the_learners_bits(self, case, live):
    operands = attention_cases.operands(case)
    static = dict(live=live, block=case.block)
    want = cases.jit(functools.partial(attention_cases.reference, **static))(
        **operands
    )
    for got in (
        kernels.decoding.attend_token(
            **operands, **static, eps=attention_cases.EPS
        )
        for _ in range(3)
    ):
      for ours, wanted in zip(
          jax.tree.leaves(got), jax.tree.leaves(want), strict=True
      ):
        np.testing.assert_array_equal(
            np.asarray(ours).view(np.uint16), np.asarray(wanted).view(np.uint16)
        )

  @parameterized.parameters(*map(tuple, _SEQUENCES))
  def test_attention_of_sequences_has_the_references_bits(self, *case):
    case = _Sequences(*case)
    attend = functools.partial(kernels.sequences.attention, block=case.block)
    reference = functools.partial(sequence_cases.reference, block=case.block)
    for make in (sequence_cases.operands, sequence_cases.exact_operands):
      operands = make(case)
      want = np.asarray(cases.jit(reference)(*operands)).view(np.uint16)
      for _ in range(3):
        got = np.asarray(jax.jit(attend)(*operands)).view(np.uint16)
        np.testing.assert_array_equal(got, want)

  @parameterized.parameters(*map(tuple, _SEQUENCES))
  def test_gradients_of_attention_of_sequences(self, *case):
    case = _Sequences(*case)
    operands = sequence_cases.operands(case)
    differentiate = lambda attend, operands: jax.jit(
        functools.partial(
            sequence_cases.gradients, lambda *t: attend(*t, block=case.block)
        )
    )(operands)
    got, again = (
        differentiate(kernels.sequences.attention, operands) for _ in range(2)
    )
    operands = tuple(t.astype(jnp.float32) for t in operands)
    with jax.default_matmul_precision('highest'):
      want = differentiate(sequence_cases.reference, operands)
    chex.assert_trees_all_equal(got, again)
    for ours, wanted in zip(got, want, strict=True):
      self.assertLess(sequence_cases.relative_error(ours, wanted), 0.01)

  @parameterized.product(
      rows=(1, 7, 256), channels=(64, 576, 1024, 5120), adds=(False, True)
  )
  def test_norm_of_rows_has_the_learners_bits(self, rows, channels, adds):
    x, y, gain = jax.random.normal(
        jax.random.key(0), (3, rows, channels), jnp.bfloat16
    )
    x = x * jnp.exp(3 * y.astype(jnp.float32)).astype(jnp.bfloat16)
    y = y if adds else None
    got = kernels.decoding.rms_norm(x, gain[0], 1e-6, y)
    want = cases.jit(_norm)(x, gain[0], y)
    for ours, wanted in zip(got, want, strict=True):
      np.testing.assert_array_equal(
          np.asarray(ours).view(np.uint16), np.asarray(wanted).view(np.uint16)
      )


if __name__ == '__main__':
  absltest.main()
