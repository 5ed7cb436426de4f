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


def _one_policy(name, precision_policy, source, inferred=''):
  return Recipe(name, precision_policy, precision_policy, source, inferred)


RECIPES: Mapping[str, Recipe] = types.MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            _one_policy(
                'bf16', policy.BF16, 'The baseline of every comparison.'
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
