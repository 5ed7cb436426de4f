"""How far apart two policies, or a tensor and its quantized form, are."""

from flax import struct
import jax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import formats
from nvfp4_jax import qtensor

_MAX_LOG_RATIO = 20.0


def logprob_gap(a: jax.Array, b: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns mean |a - b| over the mask, in nats; 0 over an empty mask."""
  return _masked_mean(jnp.abs(a - b), mask)


def kl_k3(a: jax.Array, b: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the k3 estimate of KL(b || a) from samples of b.

  Mean of exp(x) - 1 - x with x = a - b held within +-20; never negative.

  Args:
    a: `[B, T]` log-probs.
    b: `[B, T]` log-probs of the distribution that was sampled.
    mask: `[B, T]` bool.

  Reference: Schulman, "Approximating KL Divergence" (2020).
  """
  x = jnp.where(mask, a - b, 0.0)  # before exp: no NaN in the gradient
  x = jnp.clip(x, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  return _masked_mean(jnp.expm1(x) - x, mask)


def kl_median(a: jax.Array, b: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns a robust estimate of KL(b || a): a median over sequences.

  Of each sequence with a token in the mask, the mean over these tokens of k2,
  (a - b)**2 / 2; then the median over such sequences. A single token makes
  `kl_k3` of a batch as large as e**20; here it moves one sequence, and fewer
  than half of the sequences do not move the median far. Never negative; 0 where
  no token is in the mask.

  Args:
    a: `[B, T]` log-probs.
    b: `[B, T]` log-probs of the distribution that was sampled.
    mask: `[B, T]` bool.
  """
  squares = jnp.where(mask, a - b, 0.0) ** 2 / 2
  count = jnp.sum(mask, axis=1)
  means = jnp.sum(squares, axis=1) / jnp.maximum(count, 1)
  means = jnp.sort(jnp.where(count > 0, means, jnp.inf))
  live = jnp.maximum(jnp.sum(count > 0), 1)
  median = (means[(live - 1) // 2] + means[live // 2]) / 2
  return jnp.where(jnp.any(mask), median, 0.0)


@struct.dataclass
class ErrorParts:
  """The error `dequantize(Q(x)) - x` of each element, in three parts.

  Their sum is the error. With s the scale that was used, s* = amax / elem_max
  that of the 1D block alone, not rounded, not shared by a 2D block, not chosen
  by four over six, and q rounding to the element grid:

  Attributes:
    scale_bias: `s q(x / s) - s* q(x / s*)`, what using s for s* adds. It may be
      a gain: four over six has more of it, and less error.
    deadzone: `-x` where `q(x / s*)` is 0, else 0.
    grid_noise: `s* q(x / s*) - x` where it is not 0, else 0.
  """

  scale_bias: jax.Array
  deadzone: jax.Array
  grid_noise: jax.Array


@struct.dataclass
class QuantizationStats:
  """What quantization did to one tensor; counts int32, the rest float32.

  Attributes:
    sqnr_db: 10 log10(sum x^2 / sum error^2); infinite without error.
    underflow_blocks: blocks that are not zero, but whose scale is; a 2D block
      counts once for each of its rows.
    underflow_elements: elements of such blocks that are not zero.
    zeroed_elements: other elements that became zero.
    saturated_elements: elements beyond the largest value of their block.
    scale_bias: sum of squares of this part of the error / sum x^2.
    deadzone: likewise.
    grid_noise: likewise. The three do not add up to the error's: the parts are
      correlated.
  """

  sqnr_db: jax.Array
  underflow_blocks: jax.Array
  underflow_elements: jax.Array
  zeroed_elements: jax.Array
  saturated_elements: jax.Array
  scale_bias: jax.Array
  deadzone: jax.Array
  grid_noise: jax.Array


def error_parts(x: jax.Array, q: qtensor.QTensor) -> ErrorParts:
  """Splits the error of `q` = Q(x) into scale bias, deadzone and grid noise.

  Args:
    x: `[..., M, K]`.
    q: its quantized form.

  Returns:
    float32 `[..., M, K]` each.

  Reference: arXiv 2605.20402 splits MXFP4's error into parts of these names.
    Only its abstract was at hand: the formulas, and their use for formats with
    other scales, are ours.
  """
  x = x.astype(jnp.float32)
  blocks = qtensor.split_blocks(x, q.format.block)
  amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True, initial=0.0)
  ideal = exact.divide(amax, q.format.elem_max)
  scaled = jnp.where(ideal > 0, blocks / jnp.where(ideal > 0, ideal, 1.0), 0.0)
  on_grid = qtensor.merge_blocks(_round_to_grid(scaled, q) * ideal, x.shape[-1])
  is_zero = on_grid == 0
  return ErrorParts(
      scale_bias=qtensor.dequantize(q, jnp.float32) - on_grid,
      deadzone=jnp.where(is_zero, -x, 0.0),
      grid_noise=jnp.where(is_zero, 0.0, on_grid - x),
  )


def quantization_stats(x: jax.Array, q: qtensor.QTensor) -> QuantizationStats:
  """Returns the statistics of a tensor `[..., M, K]` and its quantized form."""
  x = x.astype(jnp.float32)
  values = qtensor.dequantize(q, jnp.float32)
  scale = formats.decode_scale(q.block_scale)
  if q.global_scale is not None:
    scale = scale * q.global_scale
  blocks = qtensor.split_blocks(x, q.format.block)
  is_lost = (scale == 0)[..., None] & (blocks != 0)
  zeroed = (x != 0) & (values == 0)
  saturated = jnp.abs(blocks) > q.format.elem_max * scale[..., None]
  count = lambda flags: jnp.sum(flags, dtype=jnp.int32)
  energy = lambda t: jnp.sum(jnp.square(t))
  signal = energy(x)
  relative = lambda t: energy(t) / jnp.where(signal > 0, signal, 1.0)
  parts = error_parts(x, q)
  return QuantizationStats(
      sqnr_db=-10.0 * jnp.log10(relative(values - x)),
      underflow_blocks=count(jnp.any(is_lost, axis=-1)),
      underflow_elements=count(is_lost),
      zeroed_elements=count(zeroed) - count(is_lost),
      saturated_elements=count(saturated & ~is_lost),
      scale_bias=relative(parts.scale_bias),
      deadzone=relative(parts.deadzone),
      grid_noise=relative(parts.grid_noise),
  )


def _round_to_grid(v, q):
  """Returns `v` rounded to the nearest element of the format."""
  if q.format.elem_max == formats.NVFP4.elem_max:
    return formats.decode_e2m1(formats.encode_e2m1(v))
  return formats.decode_e4m3(formats.encode_e4m3(v))


def _masked_mean(values, mask):
  total = jnp.sum(jnp.where(mask, values, 0.0))
  return total / jnp.maximum(jnp.sum(mask), 1)
