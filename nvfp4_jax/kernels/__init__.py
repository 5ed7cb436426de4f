"""The matmuls, quantized or not, that everything else calls.

Shapes: `x` is `[M, K]`, `w` is `[N, K]` (contraction axis last), `y` and `dy`
are `[M, N]`. With `group_sizes` `[E]` int32, `w` is `[E, N, K]` and the rows of
`x` are sorted by group: the first `group_sizes[0]` rows meet `w[0]`, and so on;
groups may be empty, and rows after the last group give zeros. Results are
float32 and not yet rounded, where nothing else is asked for; operands that are
not quantized are bfloat16, or float32 where the model asks for it.

`implementation` names a backend, whose kernels then do the work: where it
cannot serve, NotImplementedError says why. None chooses one when the call is
traced, by the default backend of JAX, and logs the choice once; where a
function says so, None is the reference. `reference` runs wherever XLA does and
defines the answer.
"""

from collections.abc import Sequence
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax.kernels import choice
from nvfp4_jax.kernels import decoding as decoding  # part of the interface
from nvfp4_jax.kernels import reference
from nvfp4_jax.kernels import sequences as sequences  # part of the interface

type Implementation = Literal['reference', 'triton']

_IMPLEMENTATIONS = ('reference', 'triton')


def quantize(
    x: jax.Array,
    spec: quantization.QuantSpec,
    *,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    implementation: Implementation | None = None,
    tile: tuple[int, int, int] | None = None,
) -> qtensor.QTensor:
  """Quantizes `x` along its last axis: see `quantization.quantize`.

  Every implementation gives the same bytes. 'triton' has no sharding rule:
  with several devices it is chosen inside a shard_map only.

  Args:
    x: `[..., M, K]` bfloat16, float16 or float32.
    spec: how.
    key: randomness, for stochastic rounding and only then.
    amax: see `quantization.quantize`.
    implementation: 'reference', 'triton', or None to choose.
    tile: of 'triton': rows and columns that a program computes, and its number
      of warps; powers of two. None for what suits the shape.

  Raises:
    TypeError, ValueError: see `quantization.quantize`; another implementation;
      a tile without 'triton'.
    NotImplementedError: 'triton' cannot run here, or not with this spec.
  """
  _check_choice(implementation, tile)

  def unsupported():
    quantization.check_quantize(x, spec, key, amax)
    return choice.triton_quantize().unsupported(x, spec)

  if choice.is_triton('quantize', implementation, unsupported):
    return choice.triton_quantize().quantize(x, spec, amax=amax, tile=tile)
  return quantization.quantize(x, spec, key=key, amax=amax)


def decode(
    q: qtensor.QTensor, *, implementation: Implementation | None = None
) -> jax.Array:
  """Returns `code * block_scale`, `[..., M, K]`: see `qtensor.decode`.

  Every implementation gives the same values; 'triton' is for nvfp4.

  Args:
    q: the quantized tensor.
    implementation: 'reference', 'triton', or None to choose.

  Raises:
    ValueError: another implementation.
    NotImplementedError: 'triton' cannot run here, or not with this format.
  """
  _check_choice(implementation, None)
  if _decodes_in_triton('decode', q, implementation):
    return choice.triton_decode().decode(q)
  return qtensor.decode(q)


def dequantize(
    q: qtensor.QTensor,
    dtype: jax.typing.DTypeLike,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
  """Returns `code * f32(block_scale * global_scale)`, rounded to `dtype`.

  See `qtensor.dequantize`. Every implementation gives the same values; 'triton'
  is for nvfp4 and gives bfloat16.

  Args:
    q: the quantized tensor.
    dtype: jnp.float32 or jnp.bfloat16.
    implementation: 'reference', 'triton', or None to choose.

  Raises:
    ValueError: another implementation or dtype.
    NotImplementedError: 'triton' cannot run here, or not with these arguments.
  """
  _check_choice(implementation, None)
  if jnp.dtype(dtype) == jnp.bfloat16:
    if _decodes_in_triton('dequantize', q, implementation):
      return choice.triton_decode().dequantize(q)
  elif implementation == 'triton':
    raise NotImplementedError(f'dequantize: Triton gives no {dtype}.')
  return qtensor.dequantize(q, dtype)


def implementations(
    x: jax.Array | jax.ShapeDtypeStruct, spec: quantization.QuantSpec
) -> tuple[Implementation, ...]:
  """Returns those of `quantize` that can run here, with these operands."""
  if choice.cannot_run_triton() or choice.triton_quantize().unsupported(
      x, spec
  ):
    return ('reference',)
  return ('reference', 'triton')


def scaled_matmul(
    x: jax.Array | qtensor.QTensor,
    wq: qtensor.QTensor | qtensor.Layer,
    group_sizes: jax.Array | None = None,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: Implementation | None = None,
    tile: tuple[int, int, int, int] | None = None,
) -> jax.Array:
  """Returns `x @ w.T` `[M, N]` of quantized operands.

  Codes times block scales are multiplied exactly, as bfloat16, and added in
  float32; the product of the global scales, f32(D_x * D_w), is applied to the
  sum, which is rounded to `dtype` at last. fp8_block has float32 block scales:
  both operands are then float32, and so are products.

  Args:
    x: quantized `[M, K]`, or bfloat16.
    wq: quantized `[N, K]`, or `[E, N, K]` with `group_sizes`; or such a layer
      of a stack.
    group_sizes: `[E]` int32 or None.
    dtype: of the result: float32, or bfloat16.
    implementation: 'reference', 'triton', or None to choose. 'triton' adds in
      an order of its own. On Hopper it takes nvfp4 weights with K a multiple
      of 128 (with groups, and N one of 64), and a row's bits do not depend on
      how many rows there are. On Blackwell, where it has been compiled but not
      run, it takes both operands nvfp4 or both mxfp8, no groups, and must be
      named.
    tile: of 'triton': rows of x and features that a program computes, its
      number of warps and of stages. None for what suits the shape.

  Raises:
    ValueError: another implementation or dtype; a tile without 'triton'.
    NotImplementedError: 'triton' cannot run here, or not with these operands.
  """
  _check_choice(implementation, tile)
  _check_dtype(dtype)
  unsupported = functools.partial(
      _why_no_triton_matmul, x, wq, group_sizes, implementation
  )
  if choice.is_triton('scaled_matmul', implementation, unsupported):
    module = _module_of_scaled(group_sizes)
    groups = () if group_sizes is None else (group_sizes,)
    return module.scaled_matmul(x, wq, *groups, dtype=dtype, tile=tile)
  if isinstance(wq, qtensor.Layer):
    wq = wq.take()
  decoder = decode if implementation is None else qtensor.decode
  y = reference.scaled_matmul(x, wq, group_sizes, decoder)
  return exact.to_bfloat16(y) if jnp.dtype(dtype) == jnp.bfloat16 else y


def reads_layers(stack: qtensor.QTensor | jax.Array) -> bool:
  """Returns whether matmuls of few rows may read a layer where it is.

  If so, they are to be given `qtensor.Layer`s. Those of many rows take them.

  Args:
    stack: `[L, N, K]`, or quantized `[L, E, N, K]` of experts.
  """
  if choice.why_not_triton(None) is not None:
    return False
  layer = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], stack))
  if isinstance(layer, qtensor.QTensor):
    x = jax.ShapeDtypeStruct((1, qtensor.num_columns(layer)), jnp.bfloat16)
    experts = layer.data.shape[:-2]
    if len(experts) > 1:
      return False
    sizes = jax.ShapeDtypeStruct(experts, jnp.int32) if experts else None
    return _why_no_triton_matmul(x, layer, sizes, None) is None
  x = jax.ShapeDtypeStruct((1, layer.shape[-1]), jnp.bfloat16)
  return _why_no_few(x, layer) is None


def matmuls(
    x: jax.Array | qtensor.QTensor,
    ws: Sequence[qtensor.Layer],
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[jax.Array, ...]:
  """Returns what `matmul` or `scaled_matmul` gives of each weight.

  Weights that share few rows share a launch, where `reads_layers` says that
  they may be read in their stacks. Without derivative.

  Args:
    x: `[M, K]`, quantized or not.
    ws: layers of `[L, N, K]`, quantized or not, up to three.
    dtype: of the results: float32, or bfloat16.
  """
  if _few_share_a_launch(x, ws):
    return choice.triton_few().matmuls(x, tuple(ws), dtype=dtype)
  if isinstance(x, qtensor.QTensor):
    return tuple(scaled_matmul(x, w, dtype=dtype) for w in ws)
  return tuple(
      scaled_matmul(x, w, dtype=dtype)
      if isinstance(w.stack, qtensor.QTensor)
      else matmul(x, w, dtype=dtype)
      for w in ws
  )


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
    x: jax.Array,
    w: jax.Array | qtensor.Layer,
    group_sizes: jax.Array | None = None,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: Implementation | None = None,
    tile: tuple[int, int, int, int] | None = None,
) -> jax.Array:
  """Returns `x @ w.T` `[M, N]` of unquantized operands, added in float32.

  Args:
    x: `[M, K]`.
    w: `[N, K]`, or `[E, N, K]` with `group_sizes`; or `[N, K]` of a stack.
    group_sizes: `[E]` int32 or None.
    dtype: of the result: float32, or bfloat16.
    implementation: 'reference', 'triton', or None to choose. 'triton' is for
      bfloat16 on Hopper: with groups, N and K multiples of 64; without, K one
      of 64 and up to 256 rows (128, if N is over 8192), whose bits are then
      those that XLA's matmul gives among many rows. With groups, it adds in an
      order of its own.
    tile: of 'triton': rows of x and features that a program computes, its
      number of warps and of stages. None for what suits the shape.

  Raises:
    ValueError: another implementation or dtype; a tile without 'triton'.
    NotImplementedError: 'triton' cannot run here, or not with these operands.
  """
  _check_choice(implementation, tile)
  _check_dtype(dtype)
  if group_sizes is None:
    unsupported = functools.partial(_why_no_few, x, w)
    if choice.is_triton('matmul of few rows', implementation, unsupported):
      ws = (qtensor.as_layer(w),)
      (y,) = choice.triton_few().matmuls(x, ws, dtype=dtype, tile=tile)
      return y
    w = w.take() if isinstance(w, qtensor.Layer) else w
    y = reference.matmul(x, w, None)
  elif _is_triton_grouped('matmul', x, w, group_sizes, implementation):
    y = choice.triton_grouped().matmul(x, w, group_sizes, tile=tile)
  else:
    y = reference.matmul(x, w, group_sizes)
  return exact.to_bfloat16(y) if jnp.dtype(dtype) == jnp.bfloat16 else y


def dgrad(
    dy: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    tile: tuple[int, int, int, int] | None = None,
) -> jax.Array:
  """Returns `dy @ w`, float32 `[M, K]`, of unquantized operands: see `matmul`.

  The features of a tile are columns of w.
  """
  _check_choice(implementation, tile)
  if _is_triton_grouped('dgrad', dy, w, group_sizes, implementation):
    return choice.triton_grouped().dgrad(dy, w, group_sizes, tile=tile)
  return reference.dgrad(dy, w, group_sizes)


def wgrad(
    dy: jax.Array,
    x: jax.Array,
    group_sizes: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    tile: tuple[int, int, int, int] | None = None,
) -> jax.Array:
  """Returns `dy.T @ x`, float32 `[N, K]`, or `[E, N, K]` with `group_sizes`.

  'reference' adds a group's rows block by block, 'triton' 16 after 16,
  so that in a grouped wgrad the order of the sum differs from that of one dot
  over the group. The rest is as in `matmul`; a tile's first two numbers are
  columns of x and of dy.
  """
  _check_choice(implementation, tile)
  if _is_triton_grouped('wgrad', dy, x, group_sizes, implementation):
    return choice.triton_grouped().wgrad(dy, x, group_sizes, tile=tile)
  return reference.wgrad(dy, x, group_sizes)


def _check_choice(implementation, tile):
  if implementation not in (None, *_IMPLEMENTATIONS):
    raise ValueError(
        f'implementation {implementation!r} is not one of {_IMPLEMENTATIONS}.'
    )
  if tile is not None and implementation != 'triton':
    raise ValueError(f"tile {tile} is of implementation 'triton' only.")


def _check_dtype(dtype):
  if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f'dtype {dtype} is not float32 or bfloat16.')


def _module_of_scaled(group_sizes):
  if group_sizes is None:
    return choice.triton_matmul()
  return choice.triton_grouped()


def _why_no_triton_matmul(x, wq, group_sizes, implementation) -> str | None:
  """Returns why `scaled_matmul` cannot use Triton, or must not choose it."""
  module = _module_of_scaled(group_sizes)
  problem = module.unsupported(
      x, _matrix(wq), group_sizes, choice.compute_capability()
  )
  if problem is None and implementation is None:
    problem = module.WHY_NOT_CHOSEN
  return problem


def _matrix(w):
  """Returns a weight, or the shapes of that which a Layer stands for."""
  return jax.eval_shape(w.take) if isinstance(w, qtensor.Layer) else w


def _few_share_a_launch(x, ws) -> bool:
  """Returns whether `triton_few` multiplies these; none of them logs that."""
  if choice.why_not_triton(None) is not None or len(ws) > 3:
    return False
  if isinstance(x, qtensor.QTensor) or isinstance(ws[0].stack, qtensor.QTensor):
    rows = x.data.shape[0] if isinstance(x, qtensor.QTensor) else x.shape[0]
    return rows <= choice.triton_few().MOST_NVFP4_ROWS and all(
        isinstance(w.stack, qtensor.QTensor)
        and _why_no_triton_matmul(x, w, None, None) is None
        for w in ws
    )
  return not any(
      isinstance(w.stack, qtensor.QTensor) or _why_no_few(x, w) for w in ws
  )


def _why_no_few(x, w) -> str | None:
  """Returns why bfloat16 `x` and `w` are no matmul of few rows, or None."""
  return choice.triton_few().unsupported_bfloat16(
      x, _matrix(w), choice.compute_capability()
  )


def _is_triton_grouped(function, x, w, group_sizes, implementation) -> bool:
  """Returns whether Triton multiplies unquantized operands."""
  if group_sizes is None and implementation is None:
    return False

  def unsupported():
    if group_sizes is None:
      return 'Triton has this of groups only'
    return choice.triton_grouped().unsupported_bfloat16(
        x, w, group_sizes, choice.compute_capability()
    )

  return choice.is_triton(function, implementation, unsupported)


def _decodes_in_triton(function, q, implementation) -> bool:
  unsupported = lambda: choice.triton_decode().unsupported(q)
  return choice.is_triton(function, implementation, unsupported)
