"""Parts of a precision policy that can be exchanged: what, where, and how.

Every policy of a recipe quantizes some linears, its *scope*, in one precision.
"""

import dataclasses
from typing import get_args, Literal

from nvfp4_jax import matmul
from nvfp4_jax import policy

type Scope = Literal['experts', 'mlp', 'all']
type Operands = Literal['none', 'weights', 'activations', 'all']

_EXPERTS = r'layers\.\d+\.mlp\.experts\.(gate|up|down)_proj'
_MLP = r'layers\.\d+\.mlp\.(gate|up|down)_proj'
_SHARED = r'layers\.\d+\.mlp\.shared_experts\.(gate|up|down)_proj'
_ATTENTION = (
    r'layers\.\d+\.self_attn\.((q|k|v|o|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa)'
)
# Multi-head latent attention contracts this weight along either axis, depending
# on whether it is absorbed: blocks in one dimension would change.
_ABSORBED = r'layers\.\d+\.self_attn\.kv_b_proj'


@dataclasses.dataclass(frozen=True)
class Variant:
  """What is changed in both policies of a recipe; None leaves it; static.

  Attributes:
    scope: which linears are quantized, if any are: routed 'experts' (in a model
      without, the MLP), every 'mlp', or 'all' but router and output head.
    shared_experts: whether shared experts are quantized; with a scope, the
      default is that they are in 'mlp' and 'all'.
    keep_last: fraction of the layers that stay bfloat16 at the end.
    keep_first: the same at the start.
    kv_cache: 'bf16' or 'fp8'.
    four_over_six: which nvfp4 operands choose between two scales (by squared
      error, E = 256): 'none', 'weights', 'activations' or 'all'.
    activation_scale: what shares a global scale of nvfp4 activations: 'token'
      or 'tensor'.
    backward: mode of the learner's quantized matmuls.
    residual_share: of a sampler that has a residual, its share.

  Raises:
    ValueError: an unknown value, or shared_experts without scope.
  """

  scope: Scope | None = None
  shared_experts: bool | None = None
  keep_last: float | None = None
  keep_first: float | None = None
  kv_cache: policy.KVCacheFormat | None = None
  four_over_six: Operands | None = None
  activation_scale: Literal['token', 'tensor'] | None = None
  backward: Literal['high_precision', 'dequantized'] | None = None
  residual_share: float | None = None

  def __post_init__(self):
    for name, choices in _VARIANT_CHOICES.items():
      value = getattr(self, name)
      if value is not None and value not in choices:
        raise ValueError(f'{name} {value!r} is not one of {choices}.')
    if self.shared_experts is not None and self.scope is None:
      raise ValueError('shared_experts needs a scope.')


_VARIANT_CHOICES = {
    'scope': get_args(Scope.__value__),
    'four_over_six': get_args(Operands.__value__),
    'activation_scale': ('token', 'tensor'),
    'backward': ('high_precision', 'dequantized'),
}


def vary_policy(
    precision_policy: policy.PrecisionPolicy, variant: Variant
) -> policy.PrecisionPolicy:
  """Returns the policy with parts exchanged."""
  rules = precision_policy.rules
  if variant.scope is not None and rules:
    rules = scope_rules(
        _precision(precision_policy), variant.scope, variant.shared_experts
    )
  rules = tuple(
      rule
      if rule.precision is None
      else dataclasses.replace(
          rule, precision=_vary_precision(rule.precision, variant)
      )
      for rule in rules
  )
  fields = ('keep_last', 'keep_first', 'kv_cache')
  kept = {name: getattr(variant, name) for name in fields}
  kept = {name: value for name, value in kept.items() if value is not None}
  return dataclasses.replace(precision_policy, rules=rules, **kept)


def scope_rules(
    precision: matmul.MatmulPrecision,
    scope: Scope,
    shared_experts: bool | None = None,
) -> tuple[policy.Rule, ...]:
  """Returns the rules that quantize a scope.

  Args:
    precision: of its linears.
    scope: see `Variant`.
    shared_experts: likewise.
  """
  rules = []
  if scope == 'all':
    if not precision.rhs.block_2d:
      rules.append(policy.Rule(_ABSORBED, None))
    rules.append(policy.Rule(_ATTENTION, precision))
  if shared_experts is None:
    shared_experts = scope != 'experts'
  if shared_experts:
    rules.append(policy.Rule(_SHARED, precision))
  experts = policy.Rule(_EXPERTS, precision)
  if scope != 'experts':
    return (*rules, experts, policy.Rule(_MLP, precision))
  # Rules of shared experts must not keep the MLP of other models from it.
  return (experts, policy.Rule(_MLP, precision, fallback=True), *rules)


def _precision(precision_policy):
  """Returns the one precision that the rules of a recipe's policy share."""
  found = {
      rule.precision
      for rule in precision_policy.rules
      if rule.precision is not None
  }
  if len(found) != 1:
    raise ValueError(f'{len(found)} precisions in one policy; 1 is needed.')
  return found.pop()


def _vary_precision(precision, variant):
  changes = {}
  lhs, rhs = precision.lhs, precision.rhs
  if variant.four_over_six is not None:
    on = variant.four_over_six
    if rhs.format == 'nvfp4':
      rhs = _choose_scales(rhs, on in ('weights', 'all'))
    if lhs is not None and lhs.format == 'nvfp4':
      lhs = _choose_scales(lhs, on in ('activations', 'all'))
  if variant.activation_scale is not None and lhs and lhs.format == 'nvfp4':
    lhs = dataclasses.replace(lhs, outer=variant.activation_scale)
  if variant.backward is not None:
    changes |= {'backward': variant.backward, 'grad': None}
    lhs = lhs and dataclasses.replace(lhs, hadamard=False)
  if variant.residual_share is not None and precision.residual is not None:
    changes['residual'] = dataclasses.replace(
        precision.residual, share=variant.residual_share
    )
  return dataclasses.replace(precision, lhs=lhs, rhs=rhs, **changes)


def _choose_scales(spec, on):
  """Returns a spec with four over six on (E = 256) or off (E = 448)."""
  return dataclasses.replace(
      spec, four_over_six='mse' if on else None, scale_max=256 if on else 448
  )
