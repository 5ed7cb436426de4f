"""Quantized checkpoints: Hugging Face folders that servers load.

`convert` makes one of another folder, layer by layer; `export` of the tree that
a sampler runs. Both quantize through the same function as the learner, and
write through the same code, so that equal weights give equal files.
A folder appears when it is whole (`models.folder`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_jax
from nvfp4_jax import config as config_json
from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import folder
from nvfp4_jax.models import hf
from nvfp4_jax.models import hf_config
from nvfp4_jax.models import layouts
from nvfp4_jax.models import quantization_config
from nvfp4_jax.models import transformer

type Progress = Callable[[int, int], None]

SHARD_BYTES = 2 * 2**30
_CHUNK_BYTES = 256 * 2**20  # of experts that are quantized at a time
_PRODUCER = {'name': 'nvfp4_jax', 'version': nvfp4_jax.__version__}


@dataclasses.dataclass(frozen=True)
class Target:
  """What is made; static.

  Attributes:
    policy: the precision policy, that of the sampler.
    layout: how quantized weights are stored; 'modelopt', 'compressed_tensors'
      or 'deepseek' (fp8_block only).
    recipe: name of the recipe, for the manifest; may be empty.
    shard_bytes: the most that the bfloat16 weights of a shard would take,
      unless a single layer takes more.
  """

  policy: policy.PrecisionPolicy
  layout: layouts.Layout = 'modelopt'
  recipe: str = ''
  shard_bytes: int = SHARD_BYTES

  def __post_init__(self):
    layouts.formats_of(self.layout)
    if self.shard_bytes < 1:
      raise ValueError(f'shard_bytes {self.shard_bytes} is below 1.')


def convert(
    source: pathlib.Path,
    destination: pathlib.Path,
    target: Target,
    *,
    progress: Progress | None = None,
) -> None:
  """Writes a folder with the weights of another, quantized by a policy.

  Experts are read and quantized in parts, so that memory does not grow with
  the number of layers: it is that of one shard and of one part. What is
  quantized is the bfloat16 value of a weight. Weights that are quantized in the
  source are dequantized first, rounded once to bfloat16; those which already
  have the wanted format are copied, byte for byte.

  Args:
    source: a folder that `hf.open_folder` takes.
    destination: must not exist.
    target: what is made.
    progress: called with the number of layers that are done, and of all.

  Raises:
    FileExistsError: the destination is there.
    files.CheckpointError: the source is not a whole checkpoint, or an
      unfinished conversion of other arguments is in the way.
    policy.NonFiniteError, ValueError: a weight cannot be quantized, or the
      layout cannot say what the policy does; it is named.
  """
  checkpoint = hf.open_folder(source)
  precisions = policy.resolve(
      target.policy, transformer.param_paths(checkpoint.config)
  )
  plan = _Plan(
      config=checkpoint.config,
      raw_config=checkpoint.raw_config,
      precisions=precisions,
      target=target,
      companions=source,
      identity=_identity(checkpoint),
  )
  read = lambda layer: _converted_layer(checkpoint, precisions, layer)
  _write(
      destination,
      plan,
      lambda: _bfloat16(hf.read_top(checkpoint)),
      read,
      progress,
  )


def export(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    destination: pathlib.Path,
    target: Target,
    *,
    like: pathlib.Path | None = None,
) -> None:
  """Writes the tree that a sampler runs as a folder.

  Args:
    config: the model.
    params: `policy.quantize_params(quantizer, masters)` of stacked masters; it
      is only read.
    destination: must not exist.
    target: what is made; its policy is the quantizer's.
    like: a folder to take config.json and the tokenizer's files from. By
      default config.json says what the model's configuration says.

  Raises:
    FileExistsError: the destination is there.
    ValueError: the tree was not quantized by the target's policy, or the
      layout cannot hold it.
  """
  raw = hf_config.to_hf(config)
  if like is not None:
    raw = files.read_json(like, 'config.json')
    if hf_config.from_hf(raw, dtype=config.dtype) != config:
      raise ValueError(f'{like} holds a model of another configuration.')
  precisions = policy.resolve(target.policy, transformer.param_paths(config))
  plan = _Plan(
      config=config,
      raw_config=raw,
      precisions=precisions,
      target=target,
      companions=like,
      identity=None,
  )
  layers = _layers_of(params)

  def read(layer):
    tree = next(layers)
    for name, leaf in tree.items():
      _check_leaf(f'layers.{layer}.{name}', leaf, precisions)
    yield 0, tree

  top = {name: leaf for name, leaf in params.items() if name != 'layers'}
  _write(destination, plan, lambda: top, read, None)


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What a folder will be; `identity` tells a conversion from another one."""

  config: model_config.ModelConfig
  raw_config: Mapping[str, Any]
  precisions: policy.Precisions
  target: Target
  companions: pathlib.Path | None
  identity: Mapping[str, Any] | None


def _converted_layer(checkpoint, precisions, layer):
  """Yields (first expert, quantized parameters) of all parts of a layer."""
  names = transformer.layer_specs(checkpoint.config, layer)
  prefix = f'layers.{layer}.'
  of_name = {name: precisions[prefix + name] for name in names}
  experts = tuple(n for n in names if n.startswith('mlp.experts.'))
  others = tuple(n for n in names if n not in experts)
  quantize = lambda weights: _quantize(weights, of_name, prefix)
  yield 0, quantize(hf.read_layer(checkpoint, layer, others))
  if not experts:
    return
  elements = sum(math.prod(names[name].shape[1:]) for name in experts)
  step = max(_CHUNK_BYTES // (2 * elements), 1)
  for first in range(0, checkpoint.config.num_experts, step):
    part = slice(first, first + step)
    yield first, quantize(hf.read_layer(checkpoint, layer, experts, part))


def _quantize(weights, precisions, prefix):
  """Returns what runs, of arrays and QTensors as they are stored."""
  weights = dict(weights)
  for name, leaf in weights.items():
    if isinstance(leaf, qtensor.QTensor):
      precision = precisions[name]
      if precision is None or precision.rhs.format != leaf.format.name:
        weights[name] = qtensor.dequantize(leaf, jnp.bfloat16)
      else:
        _check_fused(name, weights, prefix)
  return policy.quantize_layers(weights, precisions, prefix)


def _check_fused(name, weights, prefix):
  """Raises if servers cannot fuse a weight, as it is stored, with others."""
  scale = np.asarray(weights[name].global_scale)
  for other in policy.fused_names(name):
    partner = weights.get(other)
    if isinstance(partner, qtensor.QTensor) and np.any(
        scale != np.asarray(partner.global_scale)
    ):
      raise files.CheckpointError(
          f'{prefix}{name} and {other} have different global scales, but'
          ' servers fuse them under one: convert unquantized weights instead.'
      )


def _bfloat16(top):
  bf16 = policy.Quantizer(policy.BF16)
  tree = policy.quantize_params(bf16, {**top, 'layers': ()})
  return {name: leaf for name, leaf in tree.items() if name != 'layers'}


def _layers_of(params):
  """Yields the parameters of each layer of a stacked tree, on the host."""
  for segment in params['layers']:
    for i in range(jax.tree.leaves(segment)[0].shape[0]):
      yield jax.tree.map(lambda leaf, i=i: np.asarray(leaf[i]), segment)


def _check_leaf(path, leaf, precisions):
  precision = precisions[path]
  wanted = None if precision is None else precision.rhs.format
  found = leaf.format.name if isinstance(leaf, qtensor.QTensor) else None
  if found != wanted:
    raise ValueError(
        f'{path} is {found or "not quantized"}, but the precision policy says'
        f' {wanted or "not quantized"}.'
    )


def _write(
    destination: pathlib.Path,
    plan: _Plan,
    read_top: Callable[[], policy.ParamTree],
    read_layer: Callable[[int], Iterator[tuple[int, policy.ParamTree]]],
    progress: Progress | None,
) -> None:
  documents = _documents(plan)
  layers_of = _shards(plan)

  def tensors_of(number):
    tensors = {}
    if not number:
      for path, param in read_top().items():
        tensors |= hf.to_tensors(plan.config, path, param, _refuse_qtensor)
    for layer in layers_of[number]:
      for first, params in read_layer(layer):
        tensors |= _tensors(plan, layer, params, first)
    return tensors

  def show(shards_done):
    if progress is not None:
      progress(layers_of[shards_done - 1].stop, plan.config.num_layers)

  folder.write(
      destination,
      [functools.partial(tensors_of, n) for n in range(len(layers_of))],
      documents,
      {
          'version': nvfp4_jax.__version__,
          'recipe': plan.target.recipe,
          'layout': plan.target.layout,
          'policy': config_json.to_json(plan.target.policy),
          'shard_bytes': plan.target.shard_bytes,
      },
      companions=plan.companions,
      identity=plan.identity,
      progress=show,
  )


def _tensors(plan, layer, params, first_expert):
  """Returns the tensors by name of some parameters of a layer."""
  result = {}
  for name, param in params.items():
    path = f'layers.{layer}.{name}'
    precision = plan.precisions[path]
    encode = lambda module, q, precision=precision: _encode(
        module, q, plan.target.layout, precision
    )
    result |= hf.to_tensors(plan.config, path, param, encode, first_expert)
  return result


def _encode(module, q, layout, precision):
  try:
    return layouts.encode(
        q,
        layout,
        scale_max=precision.rhs.scale_max,
        input_scale=precision.lhs is not None,
    )
  except ValueError as error:
    raise ValueError(f'{module}: {error}') from error


def _refuse_qtensor(module, q):
  raise ValueError(f'{module} is {q.format.name}; no layout describes that.')


def _documents(plan):
  """Returns config.json and, where the layout has one, hf_quant_config.json."""
  raw = hf_config.both_generations(plan.raw_config)
  raw.pop('quantization_config', None)
  raw |= {'torch_dtype': 'bfloat16', 'dtype': 'bfloat16'}
  quantized = {p for p in plan.precisions.values() if p is not None}
  if not quantized:
    return {'config.json': raw}
  kinds = {(p.rhs, p.lhs) for p in quantized}
  if len(kinds) > 1:
    raise ValueError(
        'A folder has one format of weights and of activations, but the'
        f' precision policy has {len(kinds)}: {sorted(map(str, kinds))}.'
    )
  described, hf_quant = quantization_config.describe(
      plan.target.layout,
      next(iter(quantized)),
      _unquantized(plan),
      _PRODUCER,
  )
  documents = {'config.json': raw | {'quantization_config': described}}
  if hf_quant is not None:
    documents['hf_quant_config.json'] = hf_quant
  return documents


def _unquantized(plan):
  """Returns the names of the linears that are not quantized.

  Raises:
    ValueError: the layout cannot hold one that is.
  """
  names = {'lm_head'}
  if plan.target.layout == 'modelopt':
    names.add('model.embed_tokens')
  specs = transformer.param_specs_by_path(plan.config)
  for path, precision in plan.precisions.items():
    shape = specs[path].shape
    if precision is not None:
      _check_shape(path, shape[-2:], precision, plan.target.layout)
    elif len(shape) > 1 and path != 'embed_tokens':
      names.update(hf.module_names(plan.config, path))
  return names


def _check_shape(path, shape, precision, layout):
  try:
    layouts.stored_tensors(layout, precision.rhs.format, shape)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def _shards(plan) -> Sequence[range]:
  """Returns the layers of each shard; the rest of the model is in the first."""
  specs = transformer.param_specs_by_path(plan.config)
  layer_bytes = [0] * plan.config.num_layers
  top_bytes = 0
  for path, spec in specs.items():
    size = 2 * math.prod(spec.shape)
    if path.startswith('layers.'):
      layer_bytes[int(path.split('.')[1])] += size
    else:
      top_bytes += size
  shards, first, held = [], 0, top_bytes
  for layer, size in enumerate(layer_bytes):
    if held and held + size > plan.target.shard_bytes:
      shards.append(range(first, layer))
      first, held = layer, 0
    held += size
  return [*shards, range(first, plan.config.num_layers)]


def _identity(checkpoint):
  """Returns what tells a source from another or from its earlier self."""
  stats = {
      path.name: [path.stat().st_size, path.stat().st_mtime_ns]
      for path in {info.path for info in checkpoint.tensors.values()}
  }
  return {'source': str(checkpoint.folder.resolve()), 'files': stats}
