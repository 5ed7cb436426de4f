"""Published low-precision RL recipes, as data.

A recipe is a pair of precision policies, for learner and sampler, with its
source and with what the source leaves open. They are equal but where the
difference is the point (`nvfp4_naive`).
"""

from collections.abc import Mapping
import dataclasses
import types

from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import quantization

# Routed experts; in a model without experts, the three linears of the MLP.
_EXPERTS = r'layers\.\d+\.mlp\.experts\.(gate|up|down)_proj'
_MLP = r'layers\.\d+\.mlp\.(gate|up|down)_proj'
# Every linear but the router and the output head.
_LINEARS = (
    r'layers\.\d+\.(self_attn\.((q|k|v|o|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa)'
    r'|mlp\.(experts\.|shared_experts\.)?(gate|up|down)_proj)'
)

_MXFP8 = quantization.QuantSpec('mxfp8')
_FP8 = quantization.QuantSpec('fp8_block')
_FP8_WEIGHT = quantization.QuantSpec('fp8_block', block_2d=True)

_MILES = "The Miles team's post of 2026-07-29, and run_qwen3_30b_a3b.py."
_BITTER = 'humans&, "The 4-bitter Lesson" (2026)'


@dataclasses.dataclass(frozen=True)
class Recipe:
  """One low-precision RL recipe; static.

  Attributes:
    name: its name.
    learner: precision policy of the learner.
    sampler: precision policy of the sampler.
    source: where it was published.
    inferred: what the source does not state and we chose.
  """

  name: str
  learner: policy.PrecisionPolicy
  sampler: policy.PrecisionPolicy
  source: str
  inferred: str = ''

  @property
  def consistent(self) -> bool:
    """Whether learner and sampler are one policy."""
    return self.learner == self.sampler


def get(name: str) -> Recipe:
  """Returns a recipe by name; a ValueError for an unknown one lists all."""
  if name not in RECIPES:
    raise ValueError(f'Recipe {name!r} is not one of {sorted(RECIPES)}.')
  return RECIPES[name]


def _nvfp4(
    backward: matmul.Backward,
    *,
    outer: quantization.Outer = 'token',
    four_over_six: quantization.FourOverSix | None = None,
    keep_last: float = 0.0,
) -> policy.PrecisionPolicy:
  precision = matmul.MatmulPrecision(
      lhs=quantization.QuantSpec('nvfp4', outer, four_over_six=four_over_six),
      rhs=quantization.QuantSpec(
          'nvfp4', 'tensor', four_over_six=four_over_six
      ),
      backward=backward,
  )
  return policy.PrecisionPolicy(
      rules=(
          policy.Rule(_EXPERTS, precision),
          policy.Rule(_MLP, precision, fallback=True),
      ),
      keep_last=keep_last,
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
  rules = (policy.Rule(_LINEARS, precision),)
  return policy.PrecisionPolicy(rules=rules, keep_last=0.0)


def _one_policy(name, precision_policy, source, inferred=''):
  return Recipe(name, precision_policy, precision_policy, source, inferred)


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
                'nvfp4_high_precision', _nvfp4('high_precision'), _MILES
            ),
            _one_policy('nvfp4_dequantized', _nvfp4('dequantized'), _MILES),
            _one_policy(
                'nvfp4_final',
                _nvfp4('dequantized', four_over_six='mse', keep_last=0.15),
                _BITTER,
                'Four over six with E = 256 and the strict error, as in the'
                ' Miles scripts; without experts, the MLP is quantized.',
            ),
            Recipe(
                'nvfp4_naive',
                learner=policy.BF16,
                sampler=_nvfp4('high_precision', outer='tensor'),
                source='The set-up that QUADS (arXiv 2607.15810) reports to'
                ' collapse: NVFP4 sampler, bf16 learner.',
                inferred='Per-tensor activation scales; the same linears as'
                ' nvfp4_final, all layers.',
            ),
        )
    }
)
