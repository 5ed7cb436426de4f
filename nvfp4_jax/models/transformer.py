"""A decoder as pure functions on a parameter tree.

Masters are float32. Layers are stacked into segments that the precision policy
treats alike (`policy.segments`), and each segment is one `lax.scan`. The
per-layer tree, `layers` a list of dicts, is what initialization and checkpoints
hold; `stack` and `unstack` convert.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from nvfp4_jax import exact
from nvfp4_jax import kernels
from nvfp4_jax import kv_cache
from nvfp4_jax import layers
from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax.models import config as model_config


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """Shape and initialization of one parameter; static.

  Attributes:
    shape: its shape, for one layer.
    axes: logical name of each axis.
    init: standard deviation of its normal initialization; 'ones' for a gain,
      'zeros' for a bias.
  """

  shape: tuple[int, ...]
  axes: tuple[str, ...]
  init: float | Literal['ones', 'zeros']


def param_specs(config: model_config.ModelConfig) -> policy.ParamTree:
  """Returns the per-layer tree of ParamSpecs."""
  c = config
  table = ParamSpec(
      (c.vocab_size, c.embed_dim), ('vocab', 'embed'), c.embed_dim**-0.5
  )
  specs: policy.ParamTree = {
      'embed_tokens': dataclasses.replace(table, init=0.5),
      'layers': [layer_specs(c, i) for i in range(c.num_layers)],
      'norm': ParamSpec((c.embed_dim,), ('embed',), 'ones'),
  }
  if not c.tie_embeddings:
    specs['lm_head'] = table
  return specs


def layer_specs(
    config: model_config.ModelConfig, layer: int
) -> dict[str, ParamSpec]:
  """Returns the ParamSpec of every parameter of one layer by its name."""
  c = config
  d, head = c.embed_dim, c.head_dim
  residual = (2 * c.num_layers) ** -0.5  # keeps the residual stream near 1

  def weight(n, k, n_axis, k_axis, experts=0, gain=1.0):
    lead, axis = ((experts,), ('expert',)) if experts else ((), ())
    return ParamSpec((*lead, n, k), (*axis, n_axis, k_axis), gain * k**-0.5)

  def mlp(prefix, hidden, experts=0):
    up = weight(hidden, d, 'mlp', 'embed', experts)
    return {
        f'{prefix}.gate_proj': up,
        f'{prefix}.up_proj': up,
        f'{prefix}.down_proj': weight(
            d, hidden, 'embed', 'mlp', experts, residual
        ),
    }

  norm = ParamSpec((d,), ('embed',), 'ones')
  kv = weight(c.num_kv_heads * head, d, 'heads', 'embed')
  specs = {
      'input_layernorm': norm,
      'self_attn.q_proj': weight(c.num_heads * head, d, 'heads', 'embed'),
      'self_attn.k_proj': kv,
      'self_attn.v_proj': kv,
      'self_attn.o_proj': weight(
          d, c.num_heads * head, 'embed', 'heads', gain=residual
      ),
      'post_attention_layernorm': norm,
  }
  if c.qk_norm:
    head_norm = ParamSpec((head,), ('head',), 'ones')
    specs |= {'self_attn.q_norm': head_norm, 'self_attn.k_norm': head_norm}
  for name in c.attention_bias:
    proj = specs[f'self_attn.{name}_proj']
    specs[f'self_attn.{name}_proj.bias'] = ParamSpec(
        proj.shape[:1], proj.axes[:1], 'zeros'
    )
  if not c.is_moe(layer):
    return specs | mlp('mlp', c.mlp_dim)
  specs['mlp.gate'] = weight(c.num_experts, d, 'expert', 'embed')
  if c.router.kind == 'sigmoid':
    specs['mlp.gate.e_score_correction_bias'] = ParamSpec(
        (c.num_experts,), ('expert',), 'zeros'
    )
  specs |= mlp('mlp.experts', c.moe_dim, c.num_experts)
  if c.shared_expert_dim:
    specs |= mlp('mlp.shared_experts', c.shared_expert_dim)
  return specs


def param_specs_by_path(
    config: model_config.ModelConfig,
) -> dict[str, ParamSpec]:
  """Returns the ParamSpec of every parameter by its path."""
  specs = param_specs(config)
  by_path = {name: spec for name, spec in specs.items() if name != 'layers'}
  for i, layer in enumerate(specs['layers']):
    by_path |= {f'layers.{i}.{name}': spec for name, spec in layer.items()}
  return by_path


def param_paths(config: model_config.ModelConfig) -> list[str]:
  """Returns the path of every parameter."""
  return list(param_specs_by_path(config))


def init_params(
    key: jax.Array, config: model_config.ModelConfig
) -> policy.ParamTree:
  """Returns freshly initialized float32 masters, as a per-layer tree."""
  specs, treedef = jax.tree.flatten(
      param_specs(config), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
  )
  keys = jax.random.split(key, len(specs))
  return treedef.unflatten(
      _init_param(key, spec) for key, spec in zip(keys, specs, strict=True)
  )


def _init_param(key, spec):
  if spec.init == 'ones':
    return jnp.ones(spec.shape)
  if spec.init == 'zeros':
    return jnp.zeros(spec.shape)
  return spec.init * jax.random.normal(key, spec.shape)


def stack(
    params: policy.ParamTree, segments: Sequence[int]
) -> policy.ParamTree:
  """Returns the tree with its layers stacked into segments of given lengths."""
  num_layers = len(params['layers'])
  if sum(segments) != num_layers:
    raise ValueError(f'Segments {segments} do not add up to {num_layers}.')
  rest = iter(params['layers'])
  stacked = tuple(
      jax.tree.map(
          lambda *leaves: jnp.stack(leaves), *itertools.islice(rest, length)
      )
      for length in segments
  )
  return {**params, 'layers': stacked}


def unstack(params: policy.ParamTree) -> policy.ParamTree:
  """Returns the per-layer tree of a stacked one."""
  per_layer = []
  for segment in params['layers']:
    length = jax.tree.leaves(segment)[0].shape[0]
    per_layer += [
        jax.tree.map(lambda leaf, i=i: leaf[i], segment) for i in range(length)
    ]
  return {**params, 'layers': per_layer}


def map_params(
    fn: Callable[[policy.ParamTree], policy.ParamTree], tree: Any
) -> Any:
  """Applies `fn` to every parameter tree inside `tree` (an optimizer state)."""
  is_params = lambda node: isinstance(node, dict) and 'layers' in node
  return jax.tree.map(
      lambda node: fn(node) if is_params(node) else node,
      tree,
      is_leaf=is_params,
  )


def forward(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    tokens: jax.Array,
    quantizer: policy.Quantizer,
    *,
    quantized: policy.ParamTree | None = None,
    expert_ids: jax.Array | None = None,
    remat: bool = False,
    taps: dict[str, Any] | None = None,
) -> jax.Array:
  """Returns the last hidden states, all positions at once (teacher-forced).

  Args:
    config: the model.
    params: stacked masters, or `quantize_params` of them.
    tokens: `[B, T]` int32, padded on the right.
    quantizer: decides the precision of every linear.
    quantized: `quantize_params(quantizer, params)`, where the caller has it;
      computed here by default.
    expert_ids: `[B, T, L, k]` integers, the experts of each token in each of
      the L layers that have experts, to be replayed; None to choose them.
    remat: compute the inside of a layer again for its gradient, instead of
      keeping it.
    taps: an empty dict, which gets what is computed on the way: `embed_tokens`
      and `norm` `[B, T, D]`; `layers`, for each segment an ordered dict of
      `[L, B, T, F]` by stage, in the order of computation. Stages are named
      after modules (`self_attn.q_proj`). None to keep nothing.

  Returns:
    `[B, T, D]` of `config.dtype`, normalized; `logits` makes logits of them.
  """
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  if expert_ids is not None:
    expert_ids = jnp.moveaxis(expert_ids.astype(jnp.int32), 2, 0)
  hidden, _, _ = _run(
      config,
      params,
      tokens,
      positions,
      quantizer,
      quantized=quantized,
      expert_ids=expert_ids,
      remat=remat,
      taps=taps,
  )
  return hidden


def prefill(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    tokens: jax.Array,
    lengths: jax.Array,
    quantizer: policy.Quantizer,
    cache: kv_cache.KVCache,
    *,
    taps: dict[str, Any] | None = None,
) -> tuple[jax.Array, kv_cache.KVCache, jax.Array | None]:
  """Runs prompts and fills the cache.

  Args:
    config: the model.
    params: `quantize_params` of stacked masters.
    tokens: `[B, P]` int32, padded on the right.
    lengths: `[B]` int32 prompt lengths, at least 1.
    quantizer: decides the precision of every linear.
    cache: an empty cache of at least P positions.
    taps: see `forward`.

  Returns:
    Hidden states `[B, D]` of each row's last token, the cache, and the experts
    `[B, P, L, k]` int32 that were chosen; None in a model without.
  """
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden, cache, experts = _run(
      config, params, tokens, positions, quantizer, cache=cache, taps=taps
  )
  last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
  return last[:, 0], dataclasses.replace(cache, lengths=lengths), experts


def decode_step(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    tokens: jax.Array,
    quantizer: policy.Quantizer,
    cache: kv_cache.KVCache,
    live: int,
    *,
    taps: dict[str, Any] | None = None,
) -> tuple[jax.Array, kv_cache.KVCache, jax.Array | None]:
  """Runs one more token of every row.

  Args:
    config: the model.
    params: `quantize_params` of stacked masters.
    tokens: `[B]` int32, the tokens at positions `cache.lengths`.
    quantizer: decides the precision of every linear.
    cache: the cache.
    live: how many positions of the cache are attended to; every row's length
      must be below it.
    taps: see `forward`; T is 1.

  Returns:
    Hidden states `[B, D]`, the cache with lengths one longer, and the experts
    `[B, 1, L, k]` int32 that were chosen; None in a model without.
  """
  hidden, cache, experts = _run(
      config,
      params,
      tokens[:, None],
      cache.lengths[:, None],
      quantizer,
      cache=cache,
      live=live,
      taps=taps,
  )
  cache = dataclasses.replace(cache, lengths=cache.lengths + 1)
  return hidden[:, 0], cache, experts


def logits(params: policy.ParamTree, hidden: jax.Array) -> jax.Array:
  """Returns float32 logits `[..., V]` of hidden states `[..., D]`."""
  table = params.get('lm_head', params['embed_tokens'])
  x = hidden.astype(jnp.float32)
  return matmul.unquantized_matmul(x, table, dtype=hidden.dtype)


def _run(
    config,
    params,
    tokens,
    positions,
    quantizer,
    *,
    quantized=None,
    cache=None,
    live=None,
    expert_ids=None,
    remat=False,
    taps=None,
) -> tuple[jax.Array, Any, jax.Array | None]:
  """Runs all layers; `live` is None but in a decode step.

  Returns:
    Hidden states, cache, and experts `[B, T, L, k]` or None.
  """
  if quantized is None and not _holds_qtensors(params):
    quantized = policy.quantize_params(quantizer, params)
  all_precisions = policy.segment_precisions(quantizer.policy, params)
  rope = _rope(config, tokens, positions, cache)
  kv_spec = kv_cache.SPECS[quantizer.policy.kv_cache]
  call = _Pass(positions, rope, kv_spec, live)
  x = embedded = layers.embed(tokens, params['embed_tokens'], config.dtype)
  add_norm = functools.partial(layers.add_rms_norm, has_gradient=cache is None)
  # What an MLP returns is added in the next norm, where one kernel does both;
  # in the first, zeros, which change nothing but the sign of a zero.
  defers = cache is not None and taps is None
  y = jnp.zeros_like(x) if defers else None
  layer, first, all_experts, all_noted = jnp.int32(0), 0, [], []
  for i, (segment, precisions) in enumerate(
      zip(params['layers'], all_precisions, strict=True)
  ):
    segment_q = {} if quantized is None else _qtensors(quantized['layers'][i])
    length = jax.tree.leaves(segment)[0].shape[0]
    replayed = None
    if expert_ids is not None and 'mlp.gate' in segment:
      replayed, expert_ids = expert_ids[:length], expert_ids[length:]

    stacks = {} if cache is None else _stacks(segment, live is not None)
    segment = {k: v for k, v in segment.items() if k not in stacks}

    def body(carry, weights, precisions=precisions, stacks=stacks, first=first):
      x, y, cache, layer = carry
      params, quantized, experts = weights
      params |= {
          name: qtensor.Layer(stack, layer - first)
          for name, stack in stacks.items()
      }
      key = policy.fold_in(quantizer, layer).key
      noted = None if taps is None else collections.OrderedDict()
      weights = layers.LayerWeights(params, quantized, precisions, key, noted)
      with jax.named_scope('attention'):
        x, h = add_norm(x, params['input_layernorm'], config.norm_eps, y)
        h = weights.note('input_layernorm', h)
        y, cache = _attention(config, weights, h, call, cache, layer)
      with jax.named_scope('mlp'):
        gain = params['post_attention_layernorm']
        x, h = add_norm(x, gain, config.norm_eps, y)
        x = weights.note('attention_residual', x)
        y, experts = _mlp(config, weights, h, experts)
      if not defers:
        x, y = weights.note('mlp_residual', layers.add(x, y)), None
      noted = jax.tree.map(lambda t: t.reshape(*tokens.shape, -1), noted)
      return (x, y, cache, layer + 1), (experts, noted)

    (x, y, cache, layer), (experts, noted) = lax.scan(
        jax.checkpoint(body) if remat else body,
        (x, y, cache, layer),
        (segment, segment_q, replayed),
        length,
    )
    first += length
    all_noted.append(noted)
    if experts is not None:
      all_experts.append(experts)
  experts = jnp.concatenate(all_experts) if all_experts else None
  if experts is not None:
    experts = jnp.moveaxis(experts, 0, 2)
  _, x = add_norm(x, params['norm'], config.norm_eps, y)
  if taps is not None:
    taps.update(embed_tokens=embedded, layers=tuple(all_noted), norm=x)
  return x, cache, experts


class _Pass(NamedTuple):
  """What attention is told alike in all layers.

  Attributes:
    positions: `[B, T]` int32.
    rope: cosines and sines at the positions.
    kv_spec: how keys and values are quantized, or None.
    live: how many positions of the cache are attended to; None but in a decode
      step.
  """

  positions: jax.Array
  rope: tuple[jax.Array, jax.Array]
  kv_spec: quantization.QuantSpec | None
  live: int | None


def _attention(config, weights, h, call, cache, layer):
  """Returns attention of normed `h`, and the cache."""
  names = tuple(f'self_attn.{n}_proj' for n in 'qkv')
  hq = layers.quantize_input(h.reshape(-1, h.shape[-1]), weights, names)
  projected = layers.linears(h, weights, names, xq=hq)
  gains = None
  if config.qk_norm:
    gains = tuple(weights.params[f'self_attn.{n}_norm'] for n in 'qk')
  attended = None
  if call.live is not None and weights.taps is None:
    attended = _attend_token(config, projected, gains, call, cache, layer)
  if attended is None:
    attended = _attend(config, weights, projected, gains, call, cache, layer)
  y, cache = attended
  return layers.linear(y, weights, 'self_attn.o_proj'), cache


def _attend_token(config, projected, gains, call, cache, layer):
  """Does what `_attend` does in one kernel; returns None if there is none."""
  q, k, v = (t[:, 0] for t in projected)
  rope, live = tuple(t[:, 0] for t in call.rope), call.live
  stored, block = (cache.k, cache.v), config.attention_block
  if not kernels.decoding.attends_tokens(q, rope, stored, live, block):
    return None
  y, (k, v) = kernels.decoding.attend_token(
      q,
      k,
      v,
      gains,
      rope,
      stored,
      layer,
      cache.lengths,
      live=live,
      block=block,
      eps=config.norm_eps,
  )
  return y[:, None], dataclasses.replace(cache, k=k, v=v)


def _attend(config, weights, projected, gains, call, cache, layer):
  """Returns attention's output before `o_proj`, and the cache."""
  heads = lambda t: t.reshape(*t.shape[:2], -1, config.head_dim)
  q, k, v = map(heads, projected)
  v = v.transpose(0, 2, 1, 3)
  if gains is not None:
    q, k = (
        layers.add_rms_norm(t, gain, config.norm_eps)[1]
        for t, gain in zip((q, k), gains, strict=True)
    )
    weights.note('self_attn.q_norm', q)
    weights.note('self_attn.k_norm', k)
  q = layers.rope(q, *call.rope, scale=config.head_dim**-0.5)
  q = weights.note('self_attn.q_rope', q)
  k = weights.note('self_attn.k_rope', layers.rope(k, *call.rope))
  k = k.transpose(0, 2, 1, 3)
  if cache is None:
    k, v = (kv_cache.round_trip(t, call.kv_spec) for t in (k, v))
  else:
    k, v = (kv_cache.store(t, call.kv_spec) for t in (k, v))
    if call.live is None:
      cache = kv_cache.write_prompt(cache, layer, k, v)
    else:
      cache = kv_cache.write_token(cache, layer, k, v)
      k, v = kv_cache.read(cache, layer, call.live)
    k, v = (kv_cache.load(t, q.dtype) for t in (k, v))
  block = config.attention_block
  if call.live is None and kernels.sequences.attends(q, k, v, block):
    y = kernels.sequences.attention(q, k, v, block)
  else:
    y = layers.attention(q, k, v, call.positions, block)
  return weights.note('self_attn.attention', y), cache


def _mlp(config, weights, x, experts):
  """Returns the MLP of normed `x`, and the experts `[B, T, k]` or None."""
  h = x.reshape(-1, x.shape[-1])
  h = weights.note('post_attention_layernorm', h)
  if 'mlp.gate' not in weights.params:
    return layers.mlp(h, weights, 'mlp').reshape(x.shape), None
  k = config.experts_per_token
  if experts is not None:
    experts = experts.reshape(-1, k)
  y, experts = layers.moe(h, weights, k, config.router, experts)
  if config.shared_expert_dim:
    y = y + layers.mlp(h, weights, 'mlp.shared_experts').astype(jnp.float32)
  y = exact.to_bfloat16(y) if x.dtype == jnp.bfloat16 else y
  y = weights.note('mlp', y)
  return y.reshape(x.shape), experts.reshape(*x.shape[:2], k)


def _rope(config, tokens, positions, cache):
  length = tokens.shape[1] if cache is None else kv_cache.capacity(cache)
  frequencies = model_config.rope_frequencies(config)
  cos, sin = layers.rope_table(length, frequencies)
  return jnp.asarray(cos)[positions], jnp.asarray(sin)[positions]


def _qtensors(segment):
  return {k: v for k, v in segment.items() if isinstance(v, qtensor.QTensor)}


def _stacks(segment, decodes):
  """Returns what kernels read in the stack, layer by layer.

  Those are QTensors; where tokens are decoded, bfloat16 weights and gains too.
  """
  read = dict(_qtensors(segment))
  if decodes:
    read |= {k: v for k, v in segment.items() if k.endswith('_proj')}
  stacks = {k: v for k, v in read.items() if kernels.reads_layers(v)}
  if decodes and stacks:
    stacks |= {k: v for k, v in segment.items() if k.endswith('norm')}
  return stacks


def _holds_qtensors(params):
  return any(_qtensors(segment) for segment in params['layers'])
