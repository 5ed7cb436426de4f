"""The shape of a decoder."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A Qwen3-style decoder, dense or mixture of experts; static.

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
    shared_expert_dim: hidden width of the shared expert; 0 for none.
    qk_norm: RMSNorm on each query and key head.
    rope_theta: base of the rotary frequencies.
    norm_eps: epsilon of RMSNorm.
    tie_embeddings: the output head is the embedding table.
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
  qk_norm: bool = True
  rope_theta: float = 1e4
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  attention_block: int = 64

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          f'num_kv_heads {self.num_kv_heads} does not divide num_heads'
          f' {self.num_heads}.'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim {self.head_dim} is odd; RoPE needs pairs.')
    if self.num_experts:
      if not 1 <= self.experts_per_token <= self.num_experts:
        raise ValueError(
            f'experts_per_token {self.experts_per_token} is not between 1 and'
            f' num_experts {self.num_experts}.'
        )
      if not self.moe_dim:
        raise ValueError('num_experts needs moe_dim.')
    elif not self.mlp_dim:
      raise ValueError('A model without experts needs mlp_dim.')


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
