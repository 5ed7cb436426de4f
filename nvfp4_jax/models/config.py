"""The shape of a decoder."""

import dataclasses
import math
from typing import Literal

import numpy as np

from nvfp4_jax import routing

type Dtype = Literal['bfloat16', 'float32']


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3's stretching of long wavelengths; static.

  A wavelength above `original_length / low_freq_factor` is stretched by
  `factor`; one below `original_length / high_freq_factor` is kept; between
  them, frequencies are blended linearly in `original_length / wavelength`.

  Attributes:
    factor: of wavelengths.
    low_freq_factor: see above.
    high_freq_factor: see above.
    original_length: positions that the model was first trained with.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_length: int

  def __post_init__(self):
    for name in ('factor', 'original_length'):
      value = getattr(self, name)
      if not 0 < value < math.inf:
        raise ValueError(f'{name} {value} of RopeScaling is not above 0.')
    if not 0 < self.low_freq_factor < self.high_freq_factor:
      raise ValueError(
          f'low_freq_factor {self.low_freq_factor} is not between 0 and'
          f' high_freq_factor {self.high_freq_factor}.'
      )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder of the Llama, Qwen3, Qwen3-MoE or GLM-4.5 kind; static.

  Attributes:
    vocab_size: number of tokens V.
    num_layers: number of layers.
    embed_dim: width of the residual stream.
    num_heads: query heads.
    num_kv_heads: key and value heads; divides `num_heads` (GQA).
    head_dim: width of a head; even.
    mlp_dim: hidden width of a dense MLP; used without experts.
    num_experts: routed experts E; 0 for a dense model.
    experts_per_token: experts that each token is routed to.
    moe_dim: hidden width of a routed expert.
    shared_expert_dim: hidden width of the shared experts, which are one MLP; 0
      for none.
    first_dense_layers: so many layers at the start have a dense MLP, of width
      `mlp_dim`, in a model with experts.
    router: how experts are chosen and weighted.
    qk_norm: RMSNorm on each query and key head.
    attention_bias: letters of the projections that have a bias.
    rope_theta: base of the rotary frequencies.
    rotary_fraction: part of a head's channels that is rotated.
    rope_scaling: stretching of the wavelengths, or None.
    norm_eps: epsilon of RMSNorm.
    tie_embeddings: the output head is the embedding table.
    dtype: of activations, of the cache, and of the weights that are not
      quantized. 'float32' is for comparisons with other implementations; it
      does not give the same bits for all shapes.
    attention_block: number of keys whose values are summed in one dot; blocks
      are then added as a tree. Part of the numerics: learner and sampler agree
      bit for bit because both use it, whatever the length of the cache.
  """

  vocab_size: int
  num_layers: int
  embed_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int = 0
  num_experts: int = 0
  experts_per_token: int = 0
  moe_dim: int = 0
  shared_expert_dim: int = 0
  first_dense_layers: int = 0
  router: routing.Router = routing.Router()
  qk_norm: bool = True
  attention_bias: Literal['', 'qkv', 'qkvo'] = ''
  rope_theta: float = 1e4
  rotary_fraction: float = 1.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  dtype: Dtype = 'bfloat16'
  attention_block: int = 64

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          f'num_kv_heads {self.num_kv_heads} does not divide num_heads'
          f' {self.num_heads}.'
      )
    rotary = self.rotary_fraction * self.head_dim
    if rotary % 2 or not 0 < rotary <= self.head_dim:
      raise ValueError(
          f'RoPE rotates pairs of channels, not {rotary} of head_dim'
          f' {self.head_dim}.'
      )
    if self.dtype not in ('bfloat16', 'float32'):
      raise ValueError(f"dtype {self.dtype!r} is not 'bfloat16' or 'float32'.")
    if self.num_experts:
      if not 1 <= self.experts_per_token <= self.num_experts:
        raise ValueError(
            f'experts_per_token {self.experts_per_token} is not between 1 and'
            f' num_experts {self.num_experts}.'
        )
      if not self.moe_dim:
        raise ValueError('num_experts needs moe_dim.')
      self._check_groups()
    if not self.mlp_dim and (self.first_dense_layers or not self.num_experts):
      raise ValueError('A layer without experts needs mlp_dim.')

  def _check_groups(self):
    groups, topk_groups = self.router.groups, self.router.topk_groups
    size, rest = divmod(self.num_experts, groups)
    if rest:
      raise ValueError(
          f'{self.num_experts} experts do not fill {groups} groups.'
      )
    if groups > 1 and size < 2:
      raise ValueError(
          f'{self.num_experts} experts in {groups} groups: the two best of a'
          ' group are what ranks it.'
      )
    if self.experts_per_token > topk_groups * size:
      raise ValueError(
          f'experts_per_token {self.experts_per_token} is more than'
          f' topk_groups {topk_groups} have, {size} each.'
      )

  def is_moe(self, layer: int) -> bool:
    """Whether a layer has experts."""
    return bool(self.num_experts) and layer >= self.first_dense_layers


def rope_frequencies(config: ModelConfig) -> np.ndarray:
  """Returns the angle per position of each rotated pair, float64 `[R/2]`."""
  rotary = int(config.rotary_fraction * config.head_dim)
  frequencies = config.rope_theta ** (-np.arange(0, rotary, 2) / rotary)
  scaling = config.rope_scaling
  if scaling is None:
    return frequencies
  turns = scaling.original_length * frequencies / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
  return frequencies * (kept + (1 - kept) / scaling.factor)


def tiny(vocab_size: int) -> ModelConfig:
  """Returns the MoE that the demo trains: small enough for two CPU cores."""
  return ModelConfig(
      vocab_size=vocab_size,
      num_layers=4,
      embed_dim=64,
      num_heads=4,
      num_kv_heads=2,
      head_dim=16,
      num_experts=8,
      experts_per_token=2,
      moe_dim=32,
      attention_block=16,
  )
