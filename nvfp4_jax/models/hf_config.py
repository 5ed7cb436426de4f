"""config.json of Hugging Face folders: read as a ModelConfig, and written.

Both generations of keys are read (`num_experts` and `num_local_experts`,
`rope_theta` and `rope_parameters`, `torch_dtype` and `dtype`), and both are
written; a file whose keys contradict each other is refused. What it asks for
and this package does not compute is an error; nothing falls back to a default
of another family.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from nvfp4_jax import files
from nvfp4_jax import routing
from nvfp4_jax.models import config as model_config

_ARCHITECTURES = {
    'llama': 'LlamaForCausalLM',
    'qwen3': 'Qwen3ForCausalLM',
    'qwen3_moe': 'Qwen3MoeForCausalLM',
    'glm4_moe': 'Glm4MoeForCausalLM',
}
_MISSING = object()
_TOO_LARGE = 2**40
_ROPE_AT_TOP = ('rope_theta', 'partial_rotary_factor')


class _Reader:
  """Typed access to the keys of a config.json."""

  def __init__(self, raw: Mapping[str, Any], where: str):
    self.raw, self.where = raw, where

  def get(
      self, kind: type, *names: str, default: Any = _MISSING, least: int = 1
  ) -> Any:
    """Returns the value of a key that has one of some names; null is none.

    Args:
      kind: its type; an integer may stand for a float.
      *names: the names; those that are there must agree.
      default: where none is there; an error by default.
      least: the least integer; a float is above 0.
    """
    found = {n: self.raw[n] for n in names if self.raw.get(n) is not None}
    if not found:
      if default is _MISSING:
        self.fail(f'{" or ".join(names)} is missing')
      return default
    name, value = next(iter(found.items()))
    for other in found:
      if found[other] != value:
        self.fail(f'{name} is {value!r:.80}, but {other} {found[other]!r:.80}')
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted:
      self.fail(f'{name} is {value!r:.80}, not {kind.__name__}')
    if kind is int and not least <= value < _TOO_LARGE:
      self.fail(f'{name} is {value!r:.80}, not from {least} to 2**40 - 1')
    if kind is float and not 0 < value < _TOO_LARGE:
      self.fail(f'{name} is {value!r:.80}, not between 0 and 2**40')
    return kind(value)

  def refuse(self, name, accepted):
    """Fails if a key has a value whose meaning is not computed here."""
    value = self.raw.get(name)
    same = value == accepted and isinstance(value, bool) == isinstance(
        accepted, bool
    )
    if value is not None and not same:
      self.fail(f'{name} {value!r:.80} is not supported, only {accepted!r}')

  def fail(self, message):
    raise files.CheckpointError(f'{self.where}: {message}.')


def from_hf(
    raw: Mapping[str, Any],
    *,
    dtype: model_config.Dtype = 'bfloat16',
    where: str = 'config.json',
) -> model_config.ModelConfig:
  """Returns the ModelConfig of a config.json.

  Args:
    raw: its object.
    dtype: of activations; the file's own says only how weights are stored.
    where: names the file in errors.

  Raises:
    files.CheckpointError: the family is unknown, a key is missing or of another
      type, or the file asks for what is not supported.
  """
  reader = _Reader(raw, where)
  family = reader.get(str, 'model_type')
  if family not in _ARCHITECTURES:
    reader.fail(
        f'model_type {family!r:.80} is not supported, only'
        f' {sorted(_ARCHITECTURES)}'
    )
  reader.refuse('hidden_act', 'silu')
  reader.refuse('use_sliding_window', False)
  reader.refuse('mlp_bias', False)
  layers = reader.get(list, 'layer_types', default=[])
  if any(layer != 'full_attention' for layer in layers):
    reader.fail(
        f"layer_types {layers!r:.80} is not supported, only 'full_attention'"
    )
  count_extra_layers(raw, where=where)
  fields = _common_fields(reader, family)
  if family == 'qwen3_moe':
    fields |= _qwen3_moe_fields(reader)
  elif family == 'glm4_moe':
    fields |= _glm4_moe_fields(reader)
  else:
    fields['mlp_dim'] = reader.get(int, 'intermediate_size')
  try:
    return model_config.ModelConfig(dtype=dtype, **fields)
  except (ValueError, ArithmeticError) as error:
    raise files.CheckpointError(f'{where}: {error}') from error


def count_extra_layers(raw: Mapping[str, Any], *, where: str) -> int:
  """Returns how many layers that predict further tokens follow the decoder's.

  Raises:
    files.CheckpointError: it is no number.
  """
  reader = _Reader(raw, where)
  return reader.get(int, 'num_nextn_predict_layers', default=0, least=0)


def family_of(config: model_config.ModelConfig) -> str:
  """Returns the Hugging Face model_type that computes a ModelConfig.

  Raises:
    ValueError: none of the supported ones does.
  """
  c = config
  if c.router.kind == 'sigmoid':
    family = 'glm4_moe'
  elif c.num_experts:
    family = 'qwen3_moe'
  else:
    family = 'qwen3' if c.qk_norm else 'llama'
  if dataclasses.replace(_round_trip(c, family), **_not_in_file(c)) != c:
    raise ValueError(f'No Hugging Face family computes {c}.')
  return family


def to_hf(config: model_config.ModelConfig) -> dict[str, Any]:
  """Returns the config.json of a model that was not loaded from one.

  Raises:
    ValueError: no supported family computes it.
  """
  return _to_hf(config, family_of(config))


def both_generations(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config.json with the keys that old and new readers look for."""
  raw = dict(raw)
  for names in (('num_experts', 'num_local_experts'), ('torch_dtype', 'dtype')):
    known = [raw[name] for name in names if raw.get(name) is not None]
    if known:
      raw |= dict.fromkeys(names, known[0])
  nested = dict(raw.get('rope_parameters') or raw.get('rope_scaling') or {})
  nested.setdefault('rope_type', nested.pop('type', 'default'))
  for name in _ROPE_AT_TOP:
    value = nested.get(name, raw.get(name))
    if value is not None:
      raw[name] = nested[name] = value
  raw['rope_parameters'] = nested
  is_default = nested['rope_type'] == 'default'
  raw['rope_scaling'] = None if is_default else nested
  return raw


def _not_in_file(c):
  """Returns the fields that a config.json does not hold."""
  return dict(dtype=c.dtype, attention_block=c.attention_block)


def _round_trip(config, family):
  return from_hf(_to_hf(config, family))


def _common_fields(reader, family) -> dict[str, Any]:
  heads = reader.get(int, 'num_attention_heads')
  embed_dim = reader.get(int, 'hidden_size')
  # Only a Llama of the first generation leaves head_dim out.
  default = embed_dim // heads if family == 'llama' else _MISSING
  head_dim = reader.get(int, 'head_dim', default=default)
  if reader.raw.get('head_dim') is None and embed_dim % heads:
    reader.fail(
        f'num_attention_heads {heads} does not divide hidden_size {embed_dim},'
        ' and head_dim is missing'
    )
  rope = _rope(reader)
  if family != 'glm4_moe':
    rope.refuse('partial_rotary_factor', 1.0)
  has_bias = reader.get(bool, 'attention_bias', default=False)
  return dict(
      vocab_size=reader.get(int, 'vocab_size'),
      num_layers=reader.get(int, 'num_hidden_layers'),
      embed_dim=embed_dim,
      num_heads=heads,
      num_kv_heads=reader.get(int, 'num_key_value_heads', default=heads),
      head_dim=head_dim,
      qk_norm=family in ('qwen3', 'qwen3_moe'),
      attention_bias='qkvo' if has_bias else '',
      rope_theta=rope.get(float, 'rope_theta'),
      rope_scaling=_scaling(rope),
      norm_eps=reader.get(float, 'rms_norm_eps'),
      tie_embeddings=reader.get(bool, 'tie_word_embeddings', default=False),
  )


def _qwen3_moe_fields(reader) -> dict[str, Any]:
  reader.refuse('decoder_sparse_step', 1)
  reader.refuse('mlp_only_layers', [])
  reader.refuse('routed_scaling_factor', 1.0)
  return dict(
      num_experts=reader.get(int, 'num_experts', 'num_local_experts'),
      experts_per_token=reader.get(int, 'num_experts_per_tok'),
      moe_dim=reader.get(int, 'moe_intermediate_size'),
      router=_router(reader, 'softmax'),
  )


def _glm4_moe_fields(reader) -> dict[str, Any]:
  moe_dim = reader.get(int, 'moe_intermediate_size')
  return dict(
      mlp_dim=reader.get(int, 'intermediate_size'),
      num_experts=reader.get(int, 'n_routed_experts', 'num_experts'),
      experts_per_token=reader.get(int, 'num_experts_per_tok'),
      moe_dim=moe_dim,
      shared_expert_dim=moe_dim * reader.get(int, 'n_shared_experts', least=0),
      first_dense_layers=reader.get(int, 'first_k_dense_replace', least=0),
      router=_router(reader, 'sigmoid'),
      qk_norm=reader.get(bool, 'use_qk_norm'),
      attention_bias='qkv' if reader.get(bool, 'attention_bias') else '',
      rotary_fraction=_rope(reader).get(float, 'partial_rotary_factor'),
  )


def _router(reader, kind):
  try:
    return routing.Router(
        kind=kind,
        normalize=reader.get(bool, 'norm_topk_prob'),
        scale=reader.get(float, 'routed_scaling_factor', default=1.0),
        groups=reader.get(int, 'n_group', default=1),
        topk_groups=reader.get(int, 'topk_group', default=1),
    )
  except ValueError as error:
    raise files.CheckpointError(f'{reader.where}: {error}') from error


def _rope(reader):
  """Returns a reader of the keys of RoPE, which stand in up to three places."""
  found: dict[str, Any] = {}
  for source in (
      {name: reader.raw.get(name) for name in _ROPE_AT_TOP},
      reader.get(dict, 'rope_parameters', default={}),
      reader.get(dict, 'rope_scaling', default={}),
  ):
    for name, value in source.items():
      name = 'rope_type' if name == 'type' else name
      if value is not None and found.setdefault(name, value) != value:
        reader.fail(f'{name} is both {found[name]!r:.80} and {value!r:.80}')
  return _Reader(found, reader.where)


def _scaling(rope):
  """Returns the RopeScaling or None."""
  kind = rope.get(str, 'rope_type', default='default')
  if kind == 'default':
    return None
  if kind != 'llama3':
    rope.fail(
        f"rope_type {kind!r:.80} is not supported, only 'default' and 'llama3'"
    )
  try:
    return model_config.RopeScaling(
        factor=rope.get(float, 'factor'),
        low_freq_factor=rope.get(float, 'low_freq_factor'),
        high_freq_factor=rope.get(float, 'high_freq_factor'),
        original_length=rope.get(int, 'original_max_position_embeddings'),
    )
  except ValueError as error:
    raise files.CheckpointError(f'{rope.where}: {error}') from error


def _to_hf(c, family):
  rope: dict[str, Any] = {'rope_type': 'default', 'rope_theta': c.rope_theta}
  if c.rope_scaling is not None:
    scaling = c.rope_scaling
    rope |= {
        'rope_type': 'llama3',
        'factor': scaling.factor,
        'low_freq_factor': scaling.low_freq_factor,
        'high_freq_factor': scaling.high_freq_factor,
        'original_max_position_embeddings': scaling.original_length,
    }
  raw = {
      'architectures': [_ARCHITECTURES[family]],
      'model_type': family,
      'vocab_size': c.vocab_size,
      'hidden_size': c.embed_dim,
      'num_hidden_layers': c.num_layers,
      'num_attention_heads': c.num_heads,
      'num_key_value_heads': c.num_kv_heads,
      'head_dim': c.head_dim,
      'hidden_act': 'silu',
      'rms_norm_eps': c.norm_eps,
      'tie_word_embeddings': c.tie_embeddings,
      'attention_bias': bool(c.attention_bias),
      'rope_parameters': rope,
      'rope_theta': c.rope_theta,
      'torch_dtype': 'bfloat16',
      'dtype': 'bfloat16',
  }
  if c.rope_scaling is not None:
    raw['rope_scaling'] = rope
  if family in ('llama', 'qwen3'):
    return raw | {'intermediate_size': c.mlp_dim}
  raw |= {
      'num_experts_per_tok': c.experts_per_token,
      'moe_intermediate_size': c.moe_dim,
      'norm_topk_prob': c.router.normalize,
  }
  if family == 'qwen3_moe':
    return raw | {
        'num_experts': c.num_experts,
        'num_local_experts': c.num_experts,
        'intermediate_size': c.moe_dim,
        'decoder_sparse_step': 1,
        'mlp_only_layers': [],
    }
  rope['partial_rotary_factor'] = c.rotary_fraction
  return raw | {
      'partial_rotary_factor': c.rotary_fraction,
      'intermediate_size': c.mlp_dim,
      'n_routed_experts': c.num_experts,
      'n_shared_experts': c.shared_expert_dim // c.moe_dim,
      'first_k_dense_replace': c.first_dense_layers,
      'use_qk_norm': c.qk_norm,
      'routed_scaling_factor': c.router.scale,
      'n_group': c.router.groups,
      'topk_group': c.router.topk_groups,
      'num_nextn_predict_layers': 0,
  }
