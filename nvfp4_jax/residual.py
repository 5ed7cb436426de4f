"""Part of the quantization error of activations, multiplied as well.

With x^ = dequantize(Q(x)) and the error r = x - x^, a residual is Q of a part
of r that a pattern names, with the global scale of Q(x). It meets the weight in
further columns of one quantized matmul:

    y = [Q(x), Q(r)] @ [Q(w), Q(w)_pattern].T

Both operands stay NVFP4. Columns of the weight that are taken one by one lie in
new blocks, so that they are quantized again, with the global scale of Q(w).

The pattern of channels is RAC of QUADS (arXiv 2607.15810, an abstract), in the
form of ARCQuant (arXiv 2601.07475); the pattern of elements is that of
Rollout-ResQ (arXiv 2607.26515, an abstract). Inferred, that is ours: how
channels are ranked, that they are ranked in each call, and that the sparse
pattern is so many of every four elements.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import formats
from nvfp4_jax import kernels
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

type Pattern = Literal['channels', 'elements']

_PATTERNS = ('channels', 'elements')
_GROUP = 4  # neighbours among which elements compete


@dataclasses.dataclass(frozen=True)
class Residual:
  """Which part of the error is multiplied too; static.

  Attributes:
    pattern: 'channels': those with the largest sum of squared errors over the
      rows that meet one weight (in a grouped matmul, over a group's rows). A
      row then depends on the others of its call. 'elements': in every row, of
      every four neighbours those with the largest error.
    share: the fraction of channels, rounded up to whole blocks of the format;
      or of elements, a multiple of 1/4.

  Raises:
    ValueError: an unknown pattern, or a share that it does not have.
  """

  pattern: Pattern = 'channels'
  share: float = 0.0625

  def __post_init__(self):
    if self.pattern not in _PATTERNS:
      raise ValueError(f'pattern {self.pattern!r} is not one of {_PATTERNS}.')
    if not 0 < self.share <= 1:
      raise ValueError(f'share {self.share} is not above 0 and at most 1.')
    if self.pattern == 'elements' and self.share * _GROUP % 1:
      raise ValueError(
          f'share {self.share}: of elements, multiples of 1/{_GROUP} are kept.'
      )


class Extended(NamedTuple):
  """The operands of the longer matmul.

  Attributes:
    x: Q(x) and Q(r), `[M, K + n]`.
    w: Q(w) and the columns that Q(r) meets, `[N, K + n]` or `[E, N, K + n]`.
  """

  x: qtensor.QTensor
  w: qtensor.QTensor


def extend(
    x: jax.Array,
    xq: qtensor.QTensor,
    wq: qtensor.QTensor,
    lhs: quantization.QuantSpec,
    rhs: quantization.QuantSpec,
    residual: Residual,
    group_sizes: jax.Array | None = None,
) -> Extended:
  """Returns operands whose matmul adds the residual to `Q(x) @ Q(w).T`.

  Args:
    x: `[M, K]` bfloat16; rows past the last group must be 0.
    xq: Q(x).
    wq: Q(w), `[N, K]`, or `[E, N, K]` with `group_sizes`.
    lhs: how x is quantized; nvfp4.
    rhs: how w is quantized; nvfp4.
    residual: the pattern.
    group_sizes: `[E]` int32, or None.
  """
  rq, channels = _quantize_error(x, xq, lhs, residual, group_sizes)
  columns = wq
  if channels is not None:
    # In units of the global scale: 6 E is the largest value, its D is 1.
    units = qtensor.decode(wq)
    index = channels if group_sizes is None else channels[:, None]
    taken = jnp.take_along_axis(
        units, jnp.broadcast_to(index, (*units.shape[:-1], index.shape[-1])), -1
    )
    amax = jnp.full((*wq.block_scale.shape[:-2], 1, 1), _largest(rhs))
    columns = kernels.quantize(taken, rhs, amax=amax)
  return Extended(_join(xq, rq), _join(wq, columns))


def compensated(
    x: jax.Array,
    lhs: quantization.QuantSpec,
    residual: Residual,
    group_sizes: jax.Array | None = None,
) -> jax.Array:
  """Returns float32 `[M, K]` x^ + r^: the activations that are multiplied."""
  xq = kernels.quantize(x, lhs)
  rq, channels = _quantize_error(x, xq, lhs, residual, group_sizes)
  values = qtensor.dequantize(xq, jnp.float32)
  rest = qtensor.dequantize(rq, jnp.float32)
  if channels is None:
    return values + rest
  index = _of_rows(channels, group_sizes, x.shape[0])
  return values.at[jnp.arange(x.shape[0])[:, None], index].add(rest)


def _quantize_error(x, xq, lhs, residual, group_sizes):
  """Returns Q(r) `[M, n]`, and the channels `[1 or E, n]` or None."""
  error = x.astype(jnp.float32) - qtensor.dequantize(xq, jnp.float32)
  channels = None
  if residual.pattern == 'elements':
    kept = round(residual.share * _GROUP)
    error = _keep_largest(error, kept)
  else:
    channels = _worst_channels(error, lhs, residual.share, group_sizes)
    index = _of_rows(channels, group_sizes, x.shape[0])
    error = jnp.take_along_axis(error, index, axis=-1)
  amax = quantization.compute_amax(x, lhs)
  return (
      kernels.quantize(exact.to_bfloat16(error), lhs, amax=amax),
      channels,
  )


def _worst_channels(error, lhs, share, group_sizes):
  """Returns the channels `[1 or E, n]` of largest error, in rising order."""
  block = formats.FORMATS[lhs.format].block
  columns = error.shape[-1]
  count = min(math.ceil(share * columns / block) * block, columns)
  # What is not finite marks its row elsewhere, and must not choose for others.
  energy = jnp.where(jnp.isfinite(error), jnp.square(error), 0.0)
  if group_sizes is None:
    total = jnp.sum(energy, axis=0, keepdims=True)
  else:
    groups = jnp.arange(group_sizes.shape[0])
    member = _group_of_row(group_sizes, error.shape[0]) == groups[:, None]
    total = lax.dot(
        member.astype(jnp.float32), energy, precision=lax.Precision.HIGHEST
    )
  return jnp.sort(lax.top_k(total, count)[1], axis=-1)


def _of_rows(channels, group_sizes, rows):
  """Returns the channels `[M, n]` of each row."""
  if group_sizes is None:
    return jnp.broadcast_to(channels, (rows, channels.shape[-1]))
  return channels[_group_of_row(group_sizes, rows)]


def _group_of_row(group_sizes, rows):
  """Returns `[M]` groups; rows past the last group count as of the last."""
  ends = jnp.cumsum(group_sizes)
  group = jnp.sum(ends <= jnp.arange(rows)[:, None], axis=1)
  return jnp.minimum(group, group_sizes.shape[0] - 1)


def _keep_largest(error, kept):
  """Returns the error, 0 but for the largest `kept` of every four."""
  groups = error.reshape(error.shape[0], -1, _GROUP)
  order = jnp.argsort(-jnp.abs(groups), axis=-1, stable=True)
  rank = jnp.argsort(order, axis=-1)
  return jnp.where(rank < kept, groups, 0.0).reshape(error.shape)


def _join(q, other):
  """Returns a QTensor with the columns of both and the global scale of one."""
  join = lambda a, b: jnp.concatenate([a, b], axis=-1)
  return dataclasses.replace(
      q,
      data=join(q.data, other.data),
      block_scale=join(q.block_scale, other.block_scale),
  )


def _largest(spec):
  """Returns the largest value in units of a global scale of 1."""
  return jnp.float32(formats.FORMATS[spec.format].elem_max * spec.scale_max)
