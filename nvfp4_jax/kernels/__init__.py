"""The matmuls, quantized or not, that everything else calls.

Shapes: `x` is `[M, K]`, `w` is `[N, K]` (contraction axis last), `y` and `dy`
are `[M, N]`. With `group_sizes` `[E]` int32, `w` is `[E, N, K]` and the rows of
`x` are sorted by group: the first `group_sizes[0]` rows meet `w[0]`, and so on;
groups may be empty, and rows after the last group give zeros. All results are
float32 and not yet rounded; operands that are not quantized are bfloat16, or
float32 where the model asks for it.

`reference` is the only backend so far. It runs wherever XLA does and defines
the answer.
"""

import jax

from nvfp4_jax import qtensor
from nvfp4_jax.kernels import reference


def scaled_matmul(
    x: jax.Array | qtensor.QTensor,
    wq: qtensor.QTensor,
    group_sizes: jax.Array | None = None,
) -> jax.Array:
  """Returns `x @ w.T`, float32 `[M, N]`, of quantized operands.

  Codes times block scales are multiplied exactly, as bfloat16, and added in
  float32; the product of the global scales, f32(D_x * D_w), is applied to the
  sum. fp8_block has float32 block scales: both operands are then float32, and
  so are products.

  Args:
    x: quantized `[M, K]`, or bfloat16.
    wq: quantized `[N, K]`, or `[E, N, K]` with `group_sizes`.
    group_sizes: `[E]` int32 or None.
  """
  return reference.scaled_matmul(x, wq, group_sizes)


def scaled_wgrad(
    dyq: qtensor.QTensor,
    xq: qtensor.QTensor,
    group_sizes: jax.Array | None = None,
) -> jax.Array:
  """Returns `dy.T @ x` of column copies, whose contraction axis M is last.

  Args:
    dyq: quantized `[N, M]`.
    xq: quantized `[K, M]`.
    group_sizes: `[E]` int32, multiples of the block, or None. With it, global
      scales are those of `quantization.quantize_in_groups`.

  Returns:
    float32 `[N, K]`, or `[E, N, K]` with `group_sizes`.
  """
  return reference.scaled_wgrad(dyq, xq, group_sizes)


def matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array | None = None
) -> jax.Array:
  """Returns `x @ w.T`, float32 `[M, N]`, of unquantized operands."""
  return reference.matmul(x, w, group_sizes)


def dgrad(
    dy: jax.Array, w: jax.Array, group_sizes: jax.Array | None = None
) -> jax.Array:
  """Returns `dy @ w`, float32 `[M, K]`, of unquantized operands."""
  return reference.dgrad(dy, w, group_sizes)


def wgrad(
    dy: jax.Array, x: jax.Array, group_sizes: jax.Array | None = None
) -> jax.Array:
  """Returns `dy.T @ x`, float32 `[N, K]`, or `[E, N, K]` with `group_sizes`.

  A group's rows are added block by block, so that in a grouped wgrad the order
  of the sum differs from that of one dot over the group.
  """
  return reference.wgrad(dy, x, group_sizes)
