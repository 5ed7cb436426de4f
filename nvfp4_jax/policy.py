"""One object that says how every tensor of a model is quantized.

A *precision policy* is an ordered list of rules on parameter paths. The
`Quantizer` made of it is what learner, sampler and checkpoint take; none of
them holds another opinion. Paths are Hugging Face module names without
`model.`, expert index and `.weight`: `layers.12.mlp.experts.gate_proj`.

A parameter tree is a dict of arrays by path, but for `layers`: a tuple of
*segments*, each a dict of arrays stacked over consecutive layers that are all
quantized alike.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any, get_args, Literal

from flax import struct
import jax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import kernels
from nvfp4_jax import matmul
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

type Precisions = Mapping[str, matmul.MatmulPrecision | None]
type ParamTree = dict[str, Any]
type KVCacheFormat = Literal['bf16', 'fp8']

_LAYER_PATH = re.compile(r'layers\.(\d+)\.(.+)')

# Linears that servers fuse into one matmul, and that share a global scale.
_FUSED = (('gate_proj', 'up_proj'), ('q_proj', 'k_proj', 'v_proj'))
# What is never rounded to bfloat16: a router's choice hangs on its last bits.
_FLOAT32 = 'e_score_correction_bias'


class NonFiniteError(ValueError):
  """A weight that was to be quantized holds NaN or infinity."""


@dataclasses.dataclass(frozen=True)
class Rule:
  """What happens to the parameters of some paths; static.

  Attributes:
    pattern: regular expression that must match the whole path.
    precision: how their matmuls are computed; None for bfloat16.
    required: it is an error if the pattern matches no path of the model.
    fallback: the rule counts only in a model in which no rule before it
      matches any path.
  """

  pattern: str
  precision: matmul.MatmulPrecision | None
  required: bool = False
  fallback: bool = False

  def __post_init__(self):
    try:
      re.compile(self.pattern)
    except re.error as error:
      raise ValueError(f'Rule pattern {self.pattern!r}: {error}.') from error
    if not isinstance(self.precision, matmul.MatmulPrecision | None):
      raise ValueError(
          f'Rule {self.pattern!r}: precision {self.precision!r} is neither a'
          ' MatmulPrecision nor None.'
      )


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
  """Ordered rules; the first match wins, no match means bfloat16; static.

  Attributes:
    rules: the rules.
    keep_last: fraction f of the layers that stay bfloat16 at the end of the
      model: floor(f * layers + 1/2) of them. 0.15 is 7 of 48, 5 of 30, 1 of 4.
    keep_first: the same at its start.
    kv_cache: keys and values are held in 'bf16' (the model's dtype) or 'fp8'
      (`kv_cache.FP8`). The learner then attends to what the sampler's cache
      would hold.
  """

  rules: tuple[Rule, ...] = ()
  keep_last: float = 0.15
  keep_first: float = 0.0
  kv_cache: KVCacheFormat = 'bf16'

  def __post_init__(self):
    if self.kv_cache not in (formats := get_args(KVCacheFormat.__value__)):
      raise ValueError(f'kv_cache {self.kv_cache!r} is not one of {formats}.')
    for name in ('keep_last', 'keep_first'):
      value = getattr(self, name)
      if not 0 <= value <= 1:
        raise ValueError(f'{name} {value} is not a fraction between 0 and 1.')


BF16 = PrecisionPolicy(rules=(), keep_last=0.0)


@struct.dataclass
class Quantizer:
  """The quantizer of a policy (RL) as a pytree: what everything takes.

  Attributes:
    policy: the precision policy; static.
    key: randomness of gradients that are rounded stochastically, into which
      step, micro-batch, layer and name are folded. None where nothing is
      rounded so.
  """

  policy: PrecisionPolicy = struct.field(pytree_node=False)
  key: jax.Array | None = None


def is_stochastic(policy: PrecisionPolicy) -> bool:
  """Returns whether gradients are rounded stochastically: a key is needed."""
  return any(
      rule.precision is not None
      and rule.precision.grad is not None
      and rule.precision.grad.rounding == 'stochastic'
      for rule in policy.rules
  )


def fold_in(quantizer: Quantizer, index: int | jax.Array) -> Quantizer:
  """Returns the quantizer with an index folded into its key, if it has one."""
  if quantizer.key is None:
    return quantizer
  key = jax.random.fold_in(quantizer.key, index)
  return dataclasses.replace(quantizer, key=key)


def resolve(policy: PrecisionPolicy, paths: Sequence[str]) -> Precisions:
  """Returns the precision of every path of a model.

  Args:
    policy: the precision policy.
    paths: all parameter paths of the model, layers included.

  Returns:
    A dict from path to MatmulPrecision, or None where it is bfloat16.

  Raises:
    ValueError: a required rule matches nothing.
  """
  live, matched_any = [], False
  for rule in policy.rules:
    matches = any(re.fullmatch(rule.pattern, path) for path in paths)
    if rule.required and not matches:
      raise ValueError(
          f'Required rule {rule.pattern!r} matches none of the'
          f' {len(paths)} paths of the model, such as'
          f' {next(iter(paths), None)!r}.'
      )
    if not (rule.fallback and matched_any):
      live.append(rule)
    matched_any = matched_any or matches
  layers = [int(m[1]) for m in map(_LAYER_PATH.fullmatch, paths) if m]
  kept = _kept_layers(policy, max(layers, default=-1) + 1)
  return {path: _first_match(path, live, kept) for path in paths}


def segments(
    policies: Iterable[PrecisionPolicy], paths: Sequence[str]
) -> tuple[int, ...]:
  """Returns the lengths of the maximal runs of layers that resolve alike.

  Args:
    policies: precision policies; a run is alike in every one of them, so that
      learner and sampler can share one parameter tree.
    paths: all parameter paths of the model.
  """
  layers: dict[int, list] = {}
  for policy in policies:
    for path, precision in resolve(policy, paths).items():
      match = _LAYER_PATH.fullmatch(path)
      if match:
        layers.setdefault(int(match[1]), []).append((match[2], precision))
  lengths, last = [], None
  for _, signature in sorted(layers.items()):
    if signature == last:
      lengths[-1] += 1
    else:
      lengths.append(1)
    last = signature
  return tuple(lengths)


def tree_paths(params: ParamTree) -> list[str]:
  """Returns the paths of all parameters, those of every layer included."""
  paths = [path for path in params if path != 'layers']
  for start, segment in _segments_of(params):
    for i in range(_length(segment)):
      paths += [f'layers.{start + i}.{name}' for name in segment]
  return paths


def segment_precisions(
    policy: PrecisionPolicy, params: ParamTree
) -> tuple[Precisions, ...]:
  """Returns, for each segment, the precision of each of its names.

  Raises:
    ValueError: the layers of a segment do not resolve alike.
  """
  precisions = resolve(policy, tree_paths(params))
  result = []
  for start, segment in _segments_of(params):
    layers = [
        {name: precisions[f'layers.{start + i}.{name}'] for name in segment}
        for i in range(_length(segment))
    ]
    if any(layer != layers[0] for layer in layers):
      raise ValueError(
          f'Layers {start} to {start + len(layers) - 1} are stacked in one'
          ' segment, but the precision policy does not treat them alike.'
      )
    result.append(layers[0])
  return tuple(result)


def quantize_params(
    quantizer: Quantizer,
    params: ParamTree,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> ParamTree:
  """Returns the tree that runs: quantized weights, and `dtype` for the rest.

  It is computed once per update and shared: the learner takes its QTensors as
  `wq`, the sampler holds it in place of the parameters. What is quantized is
  the bfloat16 value of the master. Linears that servers fuse (gate_proj and
  up_proj of an MLP or of one expert; q_proj, k_proj and v_proj), if they have
  one format, share their amax, so that their global scales are equal. The
  correction bias of a router stays float32.

  Args:
    quantizer: the quantizer.
    params: float32 or bfloat16 master parameters. A QTensor, as a quantized
      checkpoint has, is kept if its format is the policy's.
    dtype: of what is not quantized, bfloat16 or float32: the model's.

  Returns:
    A tree of the same structure with QTensor leaves.

  Raises:
    NonFiniteError: a weight to be quantized holds NaN or infinity; it is named.
      Not checked on tracers.
    TypeError, ValueError: a weight that its format cannot hold, or one that
      lacks a linear it is fused with; it is named.
  """
  dtype = jnp.dtype(dtype)
  all_precisions = segment_precisions(quantizer.policy, params)
  segments = list(_segments_of(params))
  prefixes = [
      f'layers.{start}-{start + _length(segment) - 1}.'
      for start, segment in segments
  ]
  tree = {
      name: _as(name, leaf, dtype)
      for name, leaf in params.items()
      if name != 'layers'
  }
  tree['layers'] = tuple(
      quantize_layers(segment, precisions, prefix, dtype=dtype)
      for (_, segment), precisions, prefix in zip(
          segments, all_precisions, prefixes, strict=True
      )
  )
  return tree


def quantize_layers(
    weights: ParamTree,
    precisions: Precisions,
    prefix: str,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> ParamTree:
  """Returns some parameters of a layer, or of a stack, as they run.

  Leading axes (layers, experts) are batch: any part of a stack gives the bytes
  that it has in the whole. `quantize_params` is this for every segment.

  Args:
    weights: arrays by name; with a linear, all that it is fused with.
    precisions: of at least these names.
    prefix: of the names, in errors.
    dtype: of what is not quantized.

  Raises:
    NonFiniteError, TypeError, ValueError: as `quantize_params`.
  """
  kept, arrays = {}, {}
  for name, leaf in weights.items():
    if isinstance(leaf, qtensor.QTensor):
      _check_qtensor(name, leaf, precisions, prefix)
      kept[name] = leaf
      continue
    arrays[name] = leaf
    if precisions[name] is not None:
      _check_weight(name, leaf, weights, precisions, prefix)
  of_name = {name: precisions[name] for name in sorted(arrays)}
  specs = tuple((n, None if p is None else p.rhs) for n, p in of_name.items())
  result, finite = _quantize_layers(arrays, specs, jnp.dtype(dtype))
  if not any(isinstance(flag, jax.core.Tracer) for flag in finite.values()):
    bad = [prefix + name for name, flag in finite.items() if not flag]
    if bad:
      raise NonFiniteError(f'NaN or infinity in {", ".join(bad)}.')
  return {name: kept.get(name, result.get(name)) for name in weights}


def dequantize_params(params: ParamTree) -> ParamTree:
  """Returns float32 masters of a tree with QTensors: the values that run."""
  is_qtensor = lambda leaf: isinstance(leaf, qtensor.QTensor)
  return jax.tree.map(
      lambda leaf: qtensor.dequantize(leaf, jnp.float32)
      if is_qtensor(leaf)
      else leaf.astype(jnp.float32),
      params,
      is_leaf=is_qtensor,
  )


def fused_names(name: str) -> tuple[str, ...]:
  """Returns the names of all linears that servers fuse with `name`, its too."""
  head, _, tail = name.rpartition('.')
  for group in _FUSED:
    if tail in group:
      return tuple(f'{head}.{member}' for member in group)
  return (name,)


def _check_qtensor(name, leaf, precisions, prefix):
  precision = precisions[name]
  wanted = 'bfloat16' if precision is None else precision.rhs.format
  if leaf.format.name != wanted:
    raise ValueError(
        f'{prefix}{name} is {leaf.format.name}, but {wanted} under the'
        ' precision policy. `dequantize_params` makes masters of it.'
    )


def _check_weight(name, leaf, weights, precisions, prefix):
  spec = precisions[name].rhs
  try:
    quantization.check_operand(leaf, spec)
  except (TypeError, ValueError) as error:
    raise type(error)(f'{prefix}{name}: {error}') from error
  fused = fused_names(name) if spec.outer == 'tensor' else ()
  for other in fused:
    if other not in weights:
      raise ValueError(
          f'{prefix}{name} shares its global scale with {other}, which is'
          ' missing.'
      )
    if isinstance(weights[other], qtensor.QTensor):
      raise ValueError(
          f'{prefix}{name} shares its global scale with {other}, which is'
          ' quantized already.'
      )


@functools.partial(jax.jit, static_argnames=('specs', 'dtype'))
def _quantize_layers(weights, specs, dtype):
  of_name = dict(specs)
  result, finite = {}, {}
  for name, leaf in weights.items():
    spec = of_name[name]
    if spec is None:
      result[name] = _as(name, leaf, dtype)
      continue
    leaf, amax = _bfloat16(leaf), None
    finite[name] = jnp.all(jnp.isfinite(leaf))
    fused = [n for n in fused_names(name) if of_name.get(n) == spec]
    if len(fused) > 1 and spec.outer == 'tensor':
      amax = functools.reduce(
          jnp.maximum,
          (
              quantization.compute_amax(_bfloat16(weights[n]), spec)
              for n in fused
          ),
      )
    result[name] = kernels.quantize(leaf, spec, amax=amax)
  return result, finite


def _first_match(path, rules, kept):
  layer = _LAYER_PATH.fullmatch(path)
  if layer and int(layer[1]) in kept:
    return None
  for rule in rules:
    if re.fullmatch(rule.pattern, path):
      return rule.precision
  return None


def _kept_layers(policy, num_layers):
  first, last = (
      math.floor(fraction * num_layers + 0.5)
      for fraction in (policy.keep_first, policy.keep_last)
  )
  return {*range(first), *range(num_layers - last, num_layers)}


def _segments_of(params):
  """Yields the index of its first layer, and each segment."""
  start = 0
  for segment in params['layers']:
    yield start, segment
    start += _length(segment)


def _length(segment):
  """Returns how many layers are stacked in a segment."""
  return jax.tree.leaves(segment)[0].shape[0]


def _as(name, leaf, dtype):
  """Returns a parameter that is not quantized in the dtype in which it runs."""
  if dtype == jnp.bfloat16 and not name.endswith(_FLOAT32):
    return _bfloat16(leaf)
  return leaf.astype(jnp.float32)


def _bfloat16(leaf):
  return exact.to_bfloat16(leaf) if leaf.dtype == jnp.float32 else leaf
