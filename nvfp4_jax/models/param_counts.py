"""How many parameters a config.json stands for, of what class, in what bytes.

Only shapes by path are needed, so it works without weights, and for DeepSeek-V3
too, whose forward pass is not in this package. All else follows from the paths:
the class of a parameter, and what a precision policy makes of it.

Layers for multi-token prediction (MTP), which serve training and speculative
decoding, follow the decoder's own; they are named, not counted.
"""

from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from nvfp4_jax import files
from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import quantization
from nvfp4_jax.models import hf_config
from nvfp4_jax.models import layouts
from nvfp4_jax.models import transformer

type Shapes = dict[str, tuple[int, ...]]

FAMILIES = ('deepseek_v3', 'glm4_moe', 'llama', 'qwen3', 'qwen3_moe')

# Every path matches one of them.
_CLASSES = {
    'embeddings': r'embed_tokens',
    'lm_head': r'lm_head',
    'attention': r'layers\.\d+\.self_attn\.\w+_proj(_with_mqa)?(\.bias)?',
    'router': r'layers\.\d+\.mlp\.gate(\.e_score_correction_bias)?',
    'routed experts': r'layers\.\d+\.mlp\.experts\.(gate|up|down)_proj',
    'shared experts': r'layers\.\d+\.mlp\.shared_experts\.(gate|up|down)_proj',
    'dense MLP': r'layers\.\d+\.mlp\.(gate|up|down)_proj',
    'norms': r'(layers\.\d+\.(self_attn\.)?)?\w*norm',
}
CLASSES = tuple(_CLASSES)

_FLOAT32 = 'e_score_correction_bias'  # `policy.quantize_params` keeps it.
_MAX_LAYERS = 1000  # A file that asks for more would only fill the memory.


@dataclasses.dataclass(frozen=True)
class Counts:
  """Parameters of a model; static.

  Attributes:
    by_class: number by class, all of `CLASSES`; 0 for what the model lacks.
    active: the same without the routed experts that a token is not sent to. The
      embedding table counts whole.
    not_counted: names of the MTP layers.
  """

  by_class: Mapping[str, int]
  active: Mapping[str, int]
  not_counted: tuple[str, ...]

  @property
  def total(self) -> int:
    """The number of all parameters."""
    return sum(self.by_class.values())

  @property
  def total_active(self) -> int:
    """The number of parameters that are active for one token."""
    return sum(self.active.values())


def shapes(raw: Mapping[str, Any], *, where: str = 'config.json') -> Shapes:
  """Returns the shape of every parameter by its path, experts stacked.

  Args:
    raw: the object of a config.json.
    where: names the file in errors.

  Raises:
    files.CheckpointError: the family is unknown, a key is missing or of another
      type, or the file asks for what is not supported.
  """
  family = raw.get('model_type')
  if family not in FAMILIES:
    raise files.CheckpointError(
        f'{where}: model_type {family!r:.80} is not one of'
        f' {", ".join(FAMILIES)}.'
    )
  _integer(raw, 'num_hidden_layers', where, most=_MAX_LAYERS)
  if family == 'deepseek_v3':
    return _deepseek_v3(raw, where)
  specs = transformer.param_specs_by_path(hf_config.from_hf(raw, where=where))
  result = {path: spec.shape for path, spec in specs.items()}
  for path, shape in result.items():
    if not all(shape):
      raise files.CheckpointError(f'{where}: {path} has the shape {shape}.')
  return result


def class_of(path: str) -> str:
  """Returns the class in `CLASSES` of a parameter.

  Raises:
    ValueError: it is of none.
  """
  for name, pattern in _CLASSES.items():
    if re.fullmatch(pattern, path):
      return name
  raise ValueError(f'Path {path!r} is of no class.')


def count(raw: Mapping[str, Any], *, where: str = 'config.json') -> Counts:
  """Returns the numbers of parameters of a config.json.

  Args:
    raw: its object.
    where: names the file in errors.

  Raises:
    files.CheckpointError: see `shapes`.
  """
  by_class = dict.fromkeys(CLASSES, 0)
  active = dict.fromkeys(CLASSES, 0)
  for path, shape in shapes(raw, where=where).items():
    name, size = class_of(path), math.prod(shape)
    by_class[name] += size
    if name == 'routed experts':
      size = size // shape[0] * raw['num_experts_per_tok']
    active[name] += size
  return Counts(by_class, active, _mtp_layers(raw, where))


def tensor_bytes(
    shapes: Shapes, precision_policy: policy.PrecisionPolicy
) -> int:
  """Returns the bytes of the tensors that a model is stored as.

  They are those of the 'modelopt' layout without input scales: nvfp4 has half a
  byte an element, a byte for 16 and four bytes a matrix (each expert is one),
  mxfp8 a byte an element and a byte for 32, fp8_block a byte an element and
  four bytes a block of 128 x 128, rounded up. The rest is bfloat16, the
  correction bias of a router float32. Headers of files are not in it.

  Args:
    shapes: of all parameters by path.
    precision_policy: decides the format of each.

  Raises:
    ValueError: a required rule matches nothing, or a format or layout cannot
      hold a weight, which is named.
  """
  precisions = policy.resolve(precision_policy, list(shapes))
  total = 0
  for path, shape in shapes.items():
    try:
      total += _stored_bytes(path, shape, precisions[path])
    except ValueError as error:
      raise ValueError(f'{path}: {error}') from error
  return total


def _stored_bytes(
    path: str, shape: tuple[int, ...], precision: matmul.MatmulPrecision | None
) -> int:
  if precision is None:
    return math.prod(shape) * (4 if path.endswith(_FLOAT32) else 2)
  spec = precision.rhs
  quantization.check_operand(jax.ShapeDtypeStruct(shape, jnp.bfloat16), spec)
  layout: layouts.Layout = 'modelopt'
  if spec.format == 'fp8_block':
    if not spec.block_2d:
      raise ValueError('No layout holds fp8_block scales for each row.')
    layout = 'deepseek'  # The same bytes, and it holds parts of blocks too.
  *lead, n, k = shape
  stored = layouts.stored_tensors(layout, spec.format, (n, k))
  matrix = sum(
      math.prod(tensor.shape) * tensor.dtypes[0].itemsize
      for tensor in stored.values()
      if not tensor.optional
  )
  return math.prod(lead) * matrix


def _deepseek_v3(raw, where) -> Shapes:
  """Returns the shapes of multi-head latent attention and of its experts."""
  for name, value in (
      ('attention_bias', False),
      ('moe_layer_freq', 1),
      ('topk_method', 'noaux_tc'),
  ):
    if raw.get(name) not in (None, value):
      raise files.CheckpointError(
          f'{where}: {name} {raw[name]!r:.80} is not supported, only {value!r}.'
      )
  tied = raw.get('tie_word_embeddings', False)
  if type(tied) is not bool:
    raise files.CheckpointError(
        f'{where}: tie_word_embeddings is {tied!r:.80}, not bool.'
    )
  get = lambda name, least=1: _integer(raw, name, where, least=least)
  num_layers, dense = get('num_hidden_layers'), get('first_k_dense_replace', 0)
  d, experts = get('hidden_size'), get('n_routed_experts')
  _integer(raw, 'num_experts_per_tok', where, most=experts)
  moe_dim, num_shared = get('moe_intermediate_size'), get('n_shared_experts', 0)
  layer = {
      'input_layernorm': (d,),
      **_latent_attention(raw, get),
      'post_attention_layernorm': (d,),
  }
  moe = {
      'mlp.gate': (experts, d),
      f'mlp.gate.{_FLOAT32}': (experts,),
      **_mlp('mlp.experts', moe_dim, d, (experts,)),
  }
  if num_shared:
    moe |= _mlp('mlp.shared_experts', num_shared * moe_dim, d)
  table = (get('vocab_size'), d)
  result: Shapes = {'embed_tokens': table}
  for i in range(num_layers):
    mlp = moe if i >= dense else _mlp('mlp', get('intermediate_size'), d)
    result |= {f'layers.{i}.{name}': s for name, s in (layer | mlp).items()}
  result['norm'] = (d,)
  if not tied:
    result['lm_head'] = table
  return result


def _latent_attention(raw, get) -> Shapes:
  """Returns the shapes of the projections through low-rank latents.

  Queries have a latent of q_lora_rank, or none if that is null; keys and values
  share one of kv_lora_rank, beside which one rotary key serves all heads.
  """
  d, heads = get('hidden_size'), get('num_attention_heads')
  plain, rotary = get('qk_nope_head_dim'), get('qk_rope_head_dim')
  latent, value = get('kv_lora_rank'), get('v_head_dim')
  query = heads * (plain + rotary)
  if 'q_lora_rank' in raw and raw['q_lora_rank'] is None:
    result = {'q_proj': (query, d)}
  else:
    rank = get('q_lora_rank')
    result = {
        'q_a_proj': (rank, d),
        'q_a_layernorm': (rank,),
        'q_b_proj': (query, rank),
    }
  result |= {
      'kv_a_proj_with_mqa': (latent + rotary, d),
      'kv_a_layernorm': (latent,),
      'kv_b_proj': (heads * (plain + value), latent),
      'o_proj': (d, heads * value),
  }
  return {f'self_attn.{name}': shape for name, shape in result.items()}


def _mlp(prefix, hidden, d, lead=()) -> Shapes:
  return {
      f'{prefix}.gate_proj': (*lead, hidden, d),
      f'{prefix}.up_proj': (*lead, hidden, d),
      f'{prefix}.down_proj': (*lead, d, hidden),
  }


def _mtp_layers(raw, where) -> tuple[str, ...]:
  name = 'num_nextn_predict_layers'
  if raw.get(name) is None:
    return ()
  first = raw['num_hidden_layers']
  extra = _integer(raw, name, where, least=0, most=_MAX_LAYERS)
  return tuple(f'layers.{first + i}' for i in range(extra))


def _integer(raw, name, where, *, least=1, most=2**40) -> int:
  """Returns the value of a key, which must be there and in a range."""
  value = raw.get(name)
  if value is None:
    raise files.CheckpointError(f'{where}: {name} is missing.')
  if type(value) is not int or not least <= value <= most:
    raise files.CheckpointError(
        f'{where}: {name} is {value!r:.80}, not an integer from {least} to'
        f' {most}.'
    )
  return value
