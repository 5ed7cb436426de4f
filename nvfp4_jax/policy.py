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
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import matmul
from nvfp4_jax import quantization

type Precisions = Mapping[str, matmul.MatmulPrecision | None]
type ParamTree = dict[str, Any]

_LAYER_PATH = re.compile(r'layers\.(\d+)\.(.+)')


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
  """

  rules: tuple[Rule, ...] = ()
  keep_last: float = 0.15
  keep_first: float = 0.0

  def __post_init__(self):
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
  """

  policy: PrecisionPolicy = struct.field(pytree_node=False)


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


def quantize_params(quantizer: Quantizer, params: ParamTree) -> ParamTree:
  """Returns the tree that runs: quantized weights, and bfloat16 for the rest.

  It is computed once per update and shared: the learner takes its QTensors as
  `wq`, the sampler holds it in place of the parameters. What is quantized is
  the bfloat16 value of the master. gate_proj and up_proj of one MLP, or of one
  expert, share their amax, so that their global scales are equal.

  Args:
    quantizer: the quantizer.
    params: float32 or bfloat16 master parameters.

  Returns:
    A tree of the same structure with QTensor leaves.

  Raises:
    NonFiniteError: a weight to be quantized holds NaN or infinity; it is named.
      Not checked on tracers.
    TypeError, ValueError: a weight that its format cannot hold; it is named.
  """
  tree, finite = _quantize_tree(quantizer.policy, params)
  if not any(isinstance(flag, jax.core.Tracer) for flag in finite.values()):
    bad = [path for path, flag in finite.items() if not flag]
    if bad:
      raise NonFiniteError(f'NaN or infinity in {", ".join(bad)}.')
  return tree


@functools.partial(jax.jit, static_argnums=0)
def _quantize_tree(policy, params):
  finite = {}
  tree = {
      name: _bfloat16(leaf) for name, leaf in params.items() if name != 'layers'
  }
  all_precisions = segment_precisions(policy, params)
  tree['layers'] = tuple(
      _quantize_segment(segment, precisions, start, finite)
      for (start, segment), precisions in zip(
          _segments_of(params), all_precisions, strict=True
      )
  )
  return tree, finite


def _quantize_segment(segment, precisions, start, finite):
  result = {}
  for name, leaf in segment.items():
    precision, leaf = precisions[name], _bfloat16(leaf)
    if precision is None:
      result[name] = leaf
      continue
    path = f'layers.{start}-{start + _length(segment) - 1}.{name}'
    try:
      quantization.check_operand(leaf, precision.rhs)
    except (TypeError, ValueError) as error:
      raise type(error)(f'{path}: {error}') from error
    finite[path] = jnp.all(jnp.isfinite(leaf))
    amax = None
    partner = _joint_partner(name)
    is_joint = partner in segment and precisions[partner] == precision
    if is_joint and precision.rhs.outer == 'tensor':
      both = leaf, _bfloat16(segment[partner])
      amax = jnp.maximum(
          *(quantization.compute_amax(w, precision.rhs) for w in both)
      )
    result[name] = quantization.quantize(leaf, precision.rhs, amax=amax)
  return result


def _joint_partner(name):
  """Returns the name whose global scale `name` shares, or None."""
  head, _, tail = name.rpartition('.')
  partner = {'gate_proj': 'up_proj', 'up_proj': 'gate_proj'}.get(tail)
  return partner and f'{head}.{partner}'


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


def _bfloat16(leaf):
  return exact.to_bfloat16(leaf) if leaf.dtype == jnp.float32 else leaf
