"""Triton's attention of whole sequences in its interpreter: `make aot`.

The interpreter's dots add in an order of their own, so that bits are compared
where dots are exact. Only a GPU can show the rest.
"""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

triton = pytest.importorskip('triton')
if not triton.knobs.runtime.interpret:
  pytest.skip('TRITON_INTERPRET is not set.', allow_module_level=True)

from nvfp4_jax.kernels import triton_sequences  # noqa: E402
from tests.kernels import interpreter  # noqa: E402
from tests.kernels import sequence_cases  # noqa: E402

pytestmark = pytest.mark.aot

_Case = sequence_cases.Case
_CASES = [
    _Case(1, 1, 2, 1, 64),
    _Case(2, 5, 2, 2, 64),
    _Case(1, 64, 3, 1, 128),
    _Case(1, 65, 2, 1, 128, block=128),
    _Case(1, 130, 3, 1, 64),
    _Case(1, 200, 2, 2, 64, block=128),
    _Case(1, 300, 1, 1, 128),
    _Case(1, 300, 1, 1, 64, block=128),
    _Case(1, 900, 1, 1, 64),
    _Case(1, 600, 1, 1, 64, block=128),
]
_reference = jax.jit(sequence_cases.reference, static_argnames='block')


def _attend(*operands, block):
  with interpreter.installed():
    return np.asarray(triton_sequences.attention(*operands, block=block))


class TritonSequencesTest(chex.TestCase):

  def assert_near(self, y, want):
    """Checks up to a rounding of bfloat16, and that most bits are the same."""
    y, want = (np.asarray(t, np.float32) for t in (y, want))
    np.testing.assert_allclose(y, want, rtol=2**-7, atol=1e-3)
    self.assertGreater(np.mean(y == want), 0.9)

  def assert_gradients_are_near(self, got, want, most=0.01):
    for ours, wanted in zip(got, want, strict=True):
      self.assertEqual(ours.dtype, jnp.bfloat16)
      error = sequence_cases.relative_error(ours, wanted)
      self.assertLess(error, most)

  @parameterized.parameters(*map(tuple, _CASES))
  def test_bits_where_dots_are_exact(self, *case):
    case = _Case(*case)
    operands = sequence_cases.exact_operands(case)
    want = _reference(*operands, block=case.block)
    sums = jax.jit(sequence_cases.softmax_sums)(*operands[:2])
    with interpreter.installed():
      got = triton_sequences._forward(*operands, case.block, True)
      y, *rows = map(np.asarray, got)
    np.testing.assert_array_equal(
        y.view(np.uint16), np.asarray(want).view(np.uint16)
    )
    for ours, wanted in zip(rows, sums, strict=True):
      np.testing.assert_array_equal(ours, wanted)

  def test_programs_attend_with_several_tiles(self):
    case = _Case(1, 260, 2, 1, 64)
    operands = sequence_cases.exact_operands(case)
    want = _reference(*operands, block=case.block)
    programs = mock.patch.object(triton_sequences, '_PROGRAMS', 3)
    with programs, interpreter.installed():
      y, *_ = triton_sequences._forward(*operands, case.block, False)
    y = np.asarray(y)
    np.testing.assert_array_equal(
        y.view(np.uint16), np.asarray(want).view(np.uint16)
    )

  def test_lanes_of_vmap(self):
    case = _Case(1, 70, 2, 1, 64)
    lanes = [sequence_cases.operands(case, seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes)
    attend = functools.partial(triton_sequences.attention, block=case.block)
    differentiate = functools.partial(sequence_cases.gradients, attend)
    with interpreter.installed():
      got = jax.tree.map(np.asarray, jax.jit(jax.vmap(attend))(*stacked))
      gradients = jax.jit(jax.vmap(differentiate))(stacked)
      gradients = jax.tree.map(np.asarray, gradients)
    for i, operands in enumerate(lanes):
      self.assert_near(got[i], _reference(*operands, block=case.block))
      want = self._gradients(operands, case.block)
      self.assert_gradients_are_near([g[i] for g in gradients], want)

  def _gradients(self, operands, block):
    """Returns those of the reference in float32."""
    attend = functools.partial(sequence_cases.reference, block=block)
    operands = [t.astype(jnp.float32) for t in operands]
    differentiate = functools.partial(sequence_cases.gradients, attend)
    return jax.jit(differentiate)(tuple(operands))

  @parameterized.parameters(*map(tuple, (*_CASES[:2], *_CASES[3:5])))
  def test_gradients(self, *case):
    case = _Case(*case)
    operands = sequence_cases.operands(case)
    attend = functools.partial(triton_sequences.attention, block=case.block)
    with interpreter.installed():
      got = sequence_cases.gradients(attend, operands)
      got = jax.tree.map(np.asarray, got)
    self.assert_gradients_are_near(got, self._gradients(operands, case.block))

  def test_gradients_through_a_scan_of_checkpoints(self):
    case = _CASES[1]
    operands = sequence_cases.operands(case)

    def attend(*operands):
      @jax.checkpoint
      def body(carry, _):
        y = triton_sequences.attention(carry, *operands[1:], block=case.block)
        return y.reshape(carry.shape), None

      y, _ = jax.lax.scan(body, operands[0], length=2)
      return y.reshape(*y.shape[:2], -1)

    def reference(*operands):
      q, *kv = operands
      for _ in range(2):
        y = sequence_cases.reference(q, *kv, block=case.block)
        q = y.reshape(q.shape)
      return y

    differentiate = functools.partial(sequence_cases.gradients, attend)
    with interpreter.installed():
      got = jax.tree.map(np.asarray, jax.jit(differentiate)(operands))
    differentiate = functools.partial(sequence_cases.gradients, reference)
    want = jax.jit(differentiate)(
        tuple(t.astype(jnp.float32) for t in operands)
    )
    self.assert_gradients_are_near(got, want, 0.02)

  def test_nan_stays_with_its_query(self):
    case = _CASES[4]
    q, k, v = sequence_cases.operands(case)
    y = _attend(q.at[0, 70, 1, 3].set(jnp.nan), k, v, block=case.block)
    y = y.astype(np.float32).reshape(case.length, case.heads, case.dim)
    bad = np.isnan(y).any(axis=-1)
    self.assertTrue(bad[70, 1])
    self.assertEqual(bad.sum(), 1)


if __name__ == '__main__':
  absltest.main()
