"""Triton's attention of one token in its interpreter: `make aot`.

The interpreter's dots add in an order of their own, so that only a GPU can show
that the bits are those of the reference.
"""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import qtensor
from tests.kernels import attention_cases

triton = pytest.importorskip('triton')
if not triton.knobs.runtime.interpret:
  pytest.skip('TRITON_INTERPRET is not set.', allow_module_level=True)

from nvfp4_jax.kernels import triton_attention  # noqa: E402
from tests.kernels import interpreter  # noqa: E402

pytestmark = pytest.mark.aot

_Case = attention_cases.Case
_CASES = {
    'blocks': (_Case(4, 2, 64, 256, (0, 64, 255)), 256),
    'live_part': (_Case(3, 1, 64, 512, (3, 100)), 128),
    'three_wide_blocks': (_Case(2, 1, 64, 384, (7, 300), block=128), 384),
    'wide_heads': (_Case(2, 1, 128, 64, (63,)), 64),
    'no_norm': (_Case(9, 3, 64, 64, (31,), normed=False), 64),
    'no_room': (_Case(2, 1, 64, 192, (192, 270, 191)), 192),
}


def _run(case, live, operands):
  with interpreter.installed():
    y = triton_attention.attend_token(
        **operands, live=live, block=case.block, eps=attention_cases.EPS
    )
    return jax.tree.map(np.asarray, y)


class TritonAttentionTest(chex.TestCase):

  def assert_same_step(self, got, want):
    """Checks the cache's bits and attention up to a rounding of bfloat16."""
    (y, cache), (want_y, want_cache) = got, want
    for ours, wanted in zip(cache, want_cache, strict=True):
      np.testing.assert_array_equal(
          ours.view(np.uint16), np.asarray(wanted).view(np.uint16)
      )
    y, want_y = (np.asarray(t, np.float32) for t in (y, want_y))
    np.testing.assert_allclose(y, want_y, rtol=2**-7, atol=1e-3)
    self.assertGreater(np.mean(y == want_y), 0.9)

  @parameterized.named_parameters((k, *v) for k, v in _CASES.items())
  def test_a_step(self, case, live):
    operands = attention_cases.operands(case)
    want = attention_cases.reference(**operands, live=live, block=case.block)
    self.assert_same_step(_run(case, live, operands), want)

  def test_lanes_of_vmap_have_caches_of_their_own(self):
    case, live = _CASES['blocks']
    lanes = [attention_cases.operands(case, seed) for seed in range(2)]
    lanes[1]['layer'] = jnp.int32(0)
    for operands in lanes:  # gains of a stack
      q_gain, k_gain = operands['gains']
      stack = jnp.stack([k_gain, q_gain])
      operands['gains'] = (
          qtensor.Layer(stack, jnp.int32(1)),
          qtensor.Layer(stack, jnp.int32(0)),
      )
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes)

    def step(operands):
      return triton_attention.attend_token(
          **operands, live=live, block=case.block, eps=attention_cases.EPS
      )

    with interpreter.installed():
      got = jax.tree.map(np.asarray, jax.jit(jax.vmap(step))(stacked))
    for i, operands in enumerate(lanes):
      operands['gains'] = tuple(gain.take() for gain in operands['gains'])
      want = attention_cases.reference(**operands, live=live, block=case.block)
      self.assert_same_step(jax.tree.map(lambda t, i=i: t[i], got), want)

  def test_nan_stays_in_its_row(self):
    case, live = _CASES['blocks']
    operands = attention_cases.operands(case)
    operands['q'] = operands['q'].at[1, 3].set(jnp.nan)
    y, _ = _run(case, live, operands)
    bad = np.isnan(np.asarray(y, np.float32)).any(axis=1)
    np.testing.assert_array_equal(bad, [False, True, False])


if __name__ == '__main__':
  absltest.main()
