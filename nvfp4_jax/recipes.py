"""Published low-precision RL recipes, as data.

A recipe is a pair of precision policies, for learner and sampler, and what it
changes in the objective, with its source and with what the source leaves open.
The policies are equal but where the difference is the point. All are made of
the same parts, which `vary` exchanges.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import types

from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import quantization
from nvfp4_jax import residual
from nvfp4_jax import variants
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import losses
from nvfp4_jax.rl import triage

_MXFP8 = quantization.QuantSpec('mxfp8')
_FP8 = quantization.QuantSpec('fp8_block')
_FP8_WEIGHT = quantization.QuantSpec('fp8_block', block_2d=True)
_TOKEN = quantization.QuantSpec('nvfp4', 'token')
_TENSOR = quantization.QuantSpec('nvfp4', 'tensor')

_MILES = "The Miles team's post of 2026-07-29, and run_qwen3_30b_a3b.py."
_BITTER = 'humans&, "The 4-bitter Lesson" (2026)'


class UnsupportedPairError(ValueError):
  """A learner and a sampler that make no sense together."""


@dataclasses.dataclass(frozen=True)
class Recipe:
  """One low-precision RL recipe; static.

  Attributes:
    name: its name.
    learner: precision policy of the learner.
    sampler: precision policy of the sampler.
    source: where it was published.
    inferred: what the source does not state and we chose.
    grpo: its objective; what is at its default is left to the run.
  """

  name: str
  learner: policy.PrecisionPolicy
  sampler: policy.PrecisionPolicy
  source: str
  inferred: str = ''
  grpo: learner.GRPOConfig = learner.GRPOConfig()

  @property
  def consistent(self) -> bool:
    """Whether learner and sampler are one policy."""
    return self.learner == self.sampler


def get(name: str) -> Recipe:
  """Returns a recipe by name; a ValueError for an unknown one lists all."""
  if name not in RECIPES:
    raise ValueError(f'Recipe {name!r} is not one of {sorted(RECIPES)}.')
  return RECIPES[name]


def pair(name: str, sampler: str) -> Recipe:
  """Returns a recipe with the sampler of another one."""
  one, other = get(name), get(sampler)
  return dataclasses.replace(
      one,
      name=f'{name}/{sampler}',
      sampler=other.sampler,
      source=f'{one.source} Sampler: {other.source}',
      inferred='The pair.',
  )


def vary(recipe: Recipe, variant: variants.Variant) -> Recipe:
  """Returns the recipe with parts exchanged, on both sides alike.

  Where nothing is quantized, as in bf16, only the cache can be changed; for the
  rest such a recipe is a baseline, and stays as it is.

  Raises:
    ValueError: a part that the recipe does not have.
  """
  if variant == variants.Variant():
    return recipe
  changed = {
      field.name: value
      for field in dataclasses.fields(variant)
      if (value := getattr(variant, field.name)) is not None
  }
  missing = sorted(changed.keys() - _parts(recipe))
  if missing:
    raise ValueError(f'Recipe {recipe.name!r} has no {missing[0]} to change.')
  words = ', '.join(f'{name} {value}' for name, value in changed.items())
  return dataclasses.replace(
      recipe,
      name=f'{recipe.name} ({words})',
      learner=variants.vary_policy(recipe.learner, variant),
      sampler=variants.vary_policy(
          recipe.sampler, dataclasses.replace(variant, backward=None)
      ),
      inferred=f'{recipe.inferred} Changed: {words}.'.strip(),
  )


def _parts(recipe):
  """Returns the fields of a Variant that mean something to a recipe."""
  fields = {field.name for field in dataclasses.fields(variants.Variant)}
  precisions = [
      rule.precision
      for side in (recipe.learner, recipe.sampler)
      for rule in side.rules
      if rule.precision is not None
  ]
  if not precisions:
    return fields
  is_nvfp4 = lambda spec: spec is not None and spec.format == 'nvfp4'
  if not any(is_nvfp4(p.lhs) for p in precisions):
    fields.remove('activation_scale')
  if not any(is_nvfp4(p.lhs) or is_nvfp4(p.rhs) for p in precisions):
    fields.remove('four_over_six')
  if not any(p.residual for p in precisions):
    fields.remove('residual_share')
  return fields


def objective(recipe: Recipe, grpo: learner.GRPOConfig) -> learner.GRPOConfig:
  """Returns the objective of a run: its own parts, else those of the recipe.

  Args:
    recipe: the recipe.
    grpo: the run's; parts at their default are taken from the recipe.
  """
  default = learner.GRPOConfig()
  parts = {
      field.name: getattr(recipe.grpo, field.name)
      for field in dataclasses.fields(grpo)
      if getattr(grpo, field.name) == getattr(default, field.name)
  }
  return dataclasses.replace(grpo, **parts)


def check(recipe: Recipe, paths: Sequence[str]) -> None:
  """Raises UnsupportedPairError where the pair makes no sense; it says why.

  Learner and sampler may differ where the sampler alone quantizes something,
  or adds to it: what that costs can be measured, and corrected. They must not
  where the learner would train on an error that nobody samples, or where one
  weight would be quantized in two ways.

  Args:
    recipe: the recipe.
    paths: all parameter paths of the model.
  """
  if (recipe.learner.kv_cache, recipe.sampler.kv_cache) == ('fp8', 'bf16'):
    raise UnsupportedPairError(
        f'{recipe.name}: the learner attends to keys and values in fp8, which'
        ' the sampler keeps in bf16: it would train on an error that nobody'
        ' samples.'
    )
  for path, (one, other) in _resolved(recipe, paths):
    reason = _conflict(one, other)
    if reason is not None:
      raise UnsupportedPairError(f'{recipe.name}: {path}: {reason}')


def differences(recipe: Recipe, paths: Sequence[str]) -> dict[str, str]:
  """Returns, for each path that both sides do not compute alike, how.

  Args:
    recipe: the recipe.
    paths: all parameter paths of the model.

  Returns:
    By path, `W4A16 / W4A4`-like text, learner first; `kv_cache` likewise.
  """
  result = {
      path: f'{describe(one)} / {describe(other)}'
      for path, (one, other) in _resolved(recipe, paths)
      if _forward(one) != _forward(other)
  }
  if recipe.learner.kv_cache != recipe.sampler.kv_cache:
    kv = (recipe.learner.kv_cache, recipe.sampler.kv_cache)
    result['kv_cache'] = ' / '.join(kv)
  return result


def describe(precision: matmul.MatmulPrecision | None) -> str:
  """Returns a precision in a few words: `nvfp4 x nvfp4 per token`."""
  if precision is None:
    return 'bf16'
  sides = [_describe_spec(spec) for spec in (precision.rhs, precision.lhs)]
  words = ' x '.join(sides)
  extra = precision.residual
  if extra is not None:
    words += f' + residual of {extra.share:g} of {extra.pattern}'
  return words


def quads(share: float = 0.0625) -> Recipe:
  """Returns QUADS with a share of channels that are compensated."""
  weights = matmul.MatmulPrecision(lhs=None, rhs=_TENSOR)
  return Recipe(
      'quads',
      learner=_policy(weights, 'experts'),
      sampler=_policy(
          _w4a4('high_precision', extra=residual.Residual('channels', share)),
          'experts',
      ),
      source='QUADS (arXiv 2607.15810), its abstract: the learner'
      ' fake-quantizes weights only, as the sync does; residual activation'
      ' compensation of high-error channels in a W4A4 sampler.',
      inferred='Per-token activation scales; which channels, in each call, how'
      ' many, and their form (ARCQuant, arXiv 2601.07475); the same linears as'
      ' nvfp4_final, all layers.',
  )


def resq(share: float = 0.5) -> Recipe:
  """Returns Rollout-ResQ with a share of elements that are compensated."""
  return Recipe(
      'resq',
      learner=_policy(_w4a4('quantized'), 'experts'),
      sampler=_policy(
          _w4a4('high_precision', extra=residual.Residual('elements', share)),
          'experts',
      ),
      source='HiFloat4 and Rollout-ResQ (arXiv 2607.26515), its abstract: FP4'
      ' forward and backward; one residual of a sparse pattern in the'
      " rollout's matmuls only.",
      inferred='NVFP4 for HiFloat4, per-token scales, gradients rounded to'
      ' nearest; the pattern: the largest two errors of every four elements;'
      ' the same linears as nvfp4_final, all layers.',
  )


def _policy(precision, scope, *, keep_last=0.0, keep_first=0.0):
  return policy.PrecisionPolicy(
      rules=variants.scope_rules(precision, scope),
      keep_last=keep_last,
      keep_first=keep_first,
  )


def _w4a4(
    backward: matmul.Backward,
    *,
    outer: quantization.Outer = 'token',
    four_over_six: quantization.FourOverSix | None = None,
    extra: residual.Residual | None = None,
) -> matmul.MatmulPrecision:
  lhs = quantization.QuantSpec('nvfp4', outer, four_over_six=four_over_six)
  return matmul.MatmulPrecision(
      lhs=lhs,
      rhs=quantization.QuantSpec(
          'nvfp4', 'tensor', four_over_six=four_over_six
      ),
      grad=lhs if backward == 'quantized' else None,
      backward=backward,
      residual=extra,
  )


def _fp8(
    spec: quantization.QuantSpec,
    backward: matmul.Backward,
    *,
    rhs: quantization.QuantSpec | None = None,
) -> policy.PrecisionPolicy:
  precision = matmul.MatmulPrecision(
      lhs=spec,
      rhs=rhs or spec,
      grad=spec if backward == 'quantized' else None,
      backward=backward,
  )
  return _policy(precision, 'all')


def _resolved(recipe, paths) -> Iterable:
  """Yields each path, and the precision of learner and sampler."""
  one, other = (
      policy.resolve(side, paths) for side in (recipe.learner, recipe.sampler)
  )
  return ((path, (one[path], other[path])) for path in paths)


def _conflict(one, other):
  """Returns why a learner's precision does not go with a sampler's, or None."""
  if one is None:
    return None
  if one.residual is not None:
    return 'a residual is for samplers; the learner has no operands for it.'
  nobody = ': it would train on an error that nobody samples.'
  if other is None:
    return f'the learner has {describe(one)}, the sampler bf16{nobody}'
  if one.rhs != other.rhs:
    return (
        f'one weight would be quantized in two ways, {describe(one)} for the'
        f' learner and {describe(other)} for the sampler.'
    )
  if one.lhs is None:
    return None
  if other.lhs is None:
    return f'the learner quantizes activations, the sampler does not{nobody}'
  if one.lhs.format != other.lhs.format:
    return (
        f'activations are {one.lhs.format} for the learner and'
        f' {other.lhs.format} for the sampler{nobody}'
    )
  return None


def _forward(precision):
  """Returns what of a precision the forward pass depends on."""
  if precision is None:
    return None
  return precision.fprop_lhs, precision.rhs, precision.residual


def _describe_spec(spec):
  if spec is None:
    return 'bf16'
  words = spec.format
  if spec.block_2d:
    words += ' 2D'
  if spec.four_over_six:
    words += ' 4/6'
  return words + (' per token' if spec.outer == 'token' else '')


def _one_policy(name, precision_policy, source, inferred='', **objective):
  return Recipe(
      name, precision_policy, precision_policy, source, inferred, **objective
  )


_FINAL = _w4a4('dequantized', four_over_six='mse')
_W4A16 = matmul.MatmulPrecision(lhs=None, rhs=_TENSOR)
_W4A8 = matmul.MatmulPrecision(lhs=_MXFP8, rhs=_TENSOR)
_PRETRAINING = matmul.MatmulPrecision(
    lhs=dataclasses.replace(_TENSOR, hadamard=True),
    rhs=dataclasses.replace(_TENSOR, block_2d=True),
    grad=dataclasses.replace(_TENSOR, hadamard=True, rounding='stochastic'),
    backward='quantized',
)

RECIPES: Mapping[str, Recipe] = types.MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            _one_policy(
                'bf16', policy.BF16, 'The baseline of every comparison.'
            ),
            _one_policy('mxfp8', _fp8(_MXFP8, 'quantized'), _MILES),
            _one_policy(
                'mxfp8_high_precision', _fp8(_MXFP8, 'high_precision'), _MILES
            ),
            _one_policy(
                'mxfp8_dequantized', _fp8(_MXFP8, 'dequantized'), _MILES
            ),
            _one_policy(
                'fp8_block',
                _fp8(_FP8, 'quantized', rhs=_FP8_WEIGHT),
                'Jet-RL (arXiv 2601.14243): one FP8 flow for both sides.',
                'Blocks of 1 x 128 for activations and gradients, 128 x 128 for'
                ' weights, float32 scales, as DeepSeek-V3; all linears but the'
                ' router and the output head.',
            ),
            _one_policy(
                'nvfp4_high_precision',
                _policy(_w4a4('high_precision'), 'experts'),
                _MILES,
            ),
            _one_policy(
                'nvfp4_dequantized',
                _policy(_w4a4('dequantized'), 'experts'),
                _MILES,
            ),
            _one_policy(
                'nvfp4_final',
                _policy(_FINAL, 'experts', keep_last=0.15),
                _BITTER,
                'Four over six with E = 256 and the strict error, as in the'
                ' Miles scripts; without experts, the MLP is quantized.',
            ),
            Recipe(
                'nvfp4_naive',
                learner=policy.BF16,
                sampler=_policy(
                    _w4a4('high_precision', outer='tensor'), 'experts'
                ),
                source='The set-up that QUADS (arXiv 2607.15810) reports to'
                ' collapse: NVFP4 sampler, bf16 learner.',
                inferred='Per-tensor activation scales; the same linears as'
                ' nvfp4_final, all layers.',
            ),
            quads(),
            resq(),
            _one_policy(
                'triage',
                _policy(_w4a4('dequantized'), 'experts'),
                'TRIAGE (arXiv 2610.07043), public summaries: the forward pass'
                ' stays W4A4, segments of the response are reweighted.',
                'nvfp4_dequantized for the precision; all that rl.triage says'
                ' is inferred.',
                grpo=learner.GRPOConfig(segment_triage=triage.TriageConfig()),
            ),
            _one_policy(
                'qarl',
                _policy(_W4A16, 'experts'),
                'QaRL (arXiv 2604.07853), its abstract: the learner runs the'
                " sampler's quantized forward pass; TBPO bounds negatives.",
                'NVFP4 weights, bfloat16 activations; see losses for what of'
                ' TBPO is inferred.',
                grpo=learner.GRPOConfig(loss=losses.LossConfig(kind='tbpo')),
            ),
            _one_policy(
                'nvfp4_w4a16',
                _policy(_W4A16, 'experts'),
                'Miles (radixark/miles#2020, #2864): fake-quantized weights.',
                'The same linears as nvfp4_final, all layers.',
            ),
            _one_policy(
                'nvfp4_w4a8',
                _policy(_W4A8, 'experts'),
                "miniTE's axis of activation formats: MXFP8 activations.",
                'The same linears as nvfp4_final, all layers.',
            ),
            _one_policy(
                'nvfp4_pretraining',
                _policy(
                    _PRETRAINING,
                    'all',
                    keep_first=2 / 62,
                    keep_last=8 / 62,
                ),
                'NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv'
                ' 2509.25149): 2D weights, rotated operands of wgrad,'
                ' stochastic rounding of gradients, first and last layers in'
                ' bfloat16.',
                'The same forward pass in the sampler; the share of layers is'
                " that of the 12B model; fused linears share a weight's global"
                ' scale.',
            ),
        )
    }
)
