"""Attention of whole sequences in one kernel, and its gradient in two.

Where no kernel can run, `layers.attention` does the same, with the same bits:
`attends` says so.
"""

import jax

from nvfp4_jax.kernels import choice


def attends(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> bool:
  """Returns whether `attention` can, and is to, attend with whole sequences.

  If not, `layers.attention` does; both give the same bits.

  Args:
    q: see `attention`; so are the others.
    k: see there.
    v: see there.
    block: see there.
  """
  return _attends(q, k, v, block, None)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, block: int
) -> jax.Array:
  """Returns causal grouped-query attention, with a query at every position.

  It has the bits of `layers.attention` at positions 0 to T - 1, where values
  are finite: there a NaN reaches all queries, here none of earlier tiles. Its
  gradient (reverse mode, first order) has bits of its own, the same in every
  run: weights and the scores' gradient are rounded to bfloat16 where they enter
  a dot, sums are float32.

  Args:
    q: `[B, T, H, D]` bfloat16, already scaled by 1 / sqrt(D).
    k: `[B, H_kv, T, D]` bfloat16.
    v: `[B, H_kv, T, D]` bfloat16.
    block: number of keys in a block: see `layers.attention`.

  Returns:
    `[B, T, H * D]` bfloat16.

  Raises:
    NotImplementedError: the kernel cannot run here, or not with these operands.
  """
  _attends(q, k, v, block, 'triton')
  return choice.triton_sequences().attention(q, k, v, block=block)


def _attends(q, k, v, block, implementation) -> bool:
  unsupported = lambda: choice.triton_sequences().unsupported(
      q, k, v, block, choice.compute_capability()
  )
  return choice.is_triton('attention', implementation, unsupported)
