"""What a sampler computes besides single matmuls, in one kernel each.

Nothing here has a derivative. Where no kernel can run, functions of `layers` do
the same, with the same bits: the first function of each pair says so.
"""

import jax

from nvfp4_jax import qtensor
from nvfp4_jax.kernels import choice

type Vector = jax.Array | qtensor.Layer[jax.Array]  # one of a stack


def normalizes_rows(x: jax.Array) -> bool:
  """Returns whether `rms_norm` can, and is to, normalize rows `[M, D]`.

  If not, `layers.rms_norm` does; both give the same bits.
  """
  return _normalizes(x, None)


def rms_norm(
    x: jax.Array, gain: Vector, eps: float, y: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns `x + y` and its RMSNorm, with the bits of `layers`' functions.

  It has no derivative.

  Args:
    x: `[M, D]` bfloat16.
    gain: `[D]`, or that of a stack.
    eps: added to the mean square.
    y: `[M, D]` bfloat16; None for nothing.

  Returns:
    The sum, rounded, and its norm, both `[M, D]` bfloat16.

  Raises:
    NotImplementedError: the kernel cannot run here, or not with these operands.
  """
  _normalizes(x, 'triton')
  return choice.triton_norm().rms_norm(x, gain, eps, y)


def projects_swiglu(
    x: jax.Array, gate: qtensor.Layer, up: qtensor.Layer
) -> bool:
  """Returns whether `swiglu` can, and is to, compute this.

  If not, `matmuls` and `layers.swiglu` do; all give the same bits.
  """
  return _projects_swiglu(x, gate, up, None)


def swiglu(x: jax.Array, gate: qtensor.Layer, up: qtensor.Layer) -> jax.Array:
  """Returns `silu(x @ gate.T) * (x @ up.T)`, with the bits of `layers.swiglu`.

  Both products are rounded to bfloat16 first, then silu.

  Args:
    x: `[M, K]` bfloat16.
    gate: `[N, K]` bfloat16, of a stack.
    up: `[N, K]` bfloat16, of a stack.

  Returns:
    `[M, N]` bfloat16.

  Raises:
    NotImplementedError: the kernel cannot run here, or not with these operands.
  """
  _projects_swiglu(x, gate, up, 'triton')
  return choice.triton_few().swiglu(x, gate, up)


def attends_tokens(
    q: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array | qtensor.QTensor, jax.Array | qtensor.QTensor],
    live: int,
    block: int,
) -> bool:
  """Returns whether `attend_token` can do, and is to do, a step of attention.

  If not, `layers.attention` does; both give the same bits.

  Args:
    q: see `attend_token`; so are the others.
    rope: see there.
    cache: see there; QTensors where it is quantized.
    live: see there.
    block: see there.
  """
  return _attends(q, rope, cache, live, block, None)


def attend_token(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gains: tuple[Vector, Vector] | None,
    rope: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array, jax.Array],
    layer: jax.Array,
    lengths: jax.Array,
    *,
    live: int,
    block: int,
    eps: float,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Attends with one new token of every row, whose key and value it caches.

  RMSNorm of heads, RoPE, the write and grouped-query attention in one kernel,
  with the bits of `layers.rms_norm`, `layers.rope` and `layers.attention`.

  Args:
    q: `[B, H * D]` bfloat16, projected queries.
    k: `[B, H_kv * D]` bfloat16, projected keys.
    v: `[B, H_kv * D]` bfloat16.
    gains: `[D]` of the norms of q and k heads, or such layers of stacks; None
      in a model without.
    rope: cosines and sines `[B, D / 2]` float32 at the rows' lengths.
    cache: keys and values `[L, B, H_kv, S, D]` bfloat16.
    layer: int32, which layer of the cache.
    lengths: `[B]` int32, where the token is written and up to where its row
      attends. A row without room, S or more, is not written.
    live: how many positions of the cache are attended to.
    block: number of keys in a block: see `layers.attention`.
    eps: of the norms.

  Returns:
    `[B, H * D]` bfloat16, and the cache.

  Raises:
    NotImplementedError: the kernel cannot run here, or not with these operands.
  """
  _attends(q, rope, cache, live, block, 'triton')
  return choice.triton_attention().attend_token(
      q,
      k,
      v,
      gains,
      rope,
      cache,
      layer,
      lengths,
      live=live,
      block=block,
      eps=eps,
  )


def _normalizes(x, implementation) -> bool:
  unsupported = lambda: choice.triton_norm().unsupported(x)
  return choice.is_triton('rms_norm', implementation, unsupported)


def _projects_swiglu(x, gate, up, implementation) -> bool:
  def unsupported():
    if any(isinstance(w.stack, qtensor.QTensor) for w in (gate, up)):
      return 'weights are quantized'
    shapes = [jax.eval_shape(w.take) for w in (gate, up)]
    if shapes[0].shape != shapes[1].shape:
      return f'gate of shape {shapes[0].shape} is not like up {shapes[1].shape}'
    capability = choice.compute_capability()
    problems = (
        choice.triton_few().unsupported_bfloat16(x, shape, capability)
        for shape in shapes
    )
    return next((problem for problem in problems if problem), None)

  return choice.is_triton('swiglu', implementation, unsupported)


def _attends(q, rope, cache, live, block, implementation) -> bool:
  unsupported = lambda: choice.triton_attention().unsupported(
      q, rope, cache, live, block, choice.compute_capability()
  )
  return choice.is_triton('attend_token', implementation, unsupported)
