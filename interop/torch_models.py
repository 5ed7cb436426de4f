"""Tiny Hugging Face checkpoints with their logits, for tests of our reader.

  python interop/torch_models.py OUT [CASE ...]

writes one directory a case: what `save_pretrained` writes, and
`reference.npz` with `tokens` int32 `[2, 24]` and `logits` float32
`[2, 24, V]`. The logits are of the weights as saved: the directory is read
back, widened to float32 and run there. Needs `requirements.txt`; runs on a CPU
in seconds.

A reader that forgets something must not pass, so nothing has a neutral value:
norm gains are in [0.5, 1.5], biases and the router's correction bias are not
zero, and the program prints how far the logits move without each of them. All
cases have `head_dim` unlike `hidden_size / num_attention_heads` unless noted.
"""

import argparse
from collections.abc import Callable
import dataclasses
import pathlib
import shutil
from typing import Any

import numpy as np
import torch
import transformers

BATCH, LENGTH, VOCAB = 2, 24, 128

# Logits of other implementations differ by 1e-6 or so. A choice of experts
# closer than this could turn on that, and the comparison would mean nothing.
MIN_ROUTER_MARGIN = 5e-4


@dataclasses.dataclass(frozen=True)
class Case:
  """One checkpoint.

  Attributes:
    config: makes the model's configuration.
    seed: of weights and tokens. Cases with one seed and one shape have the same
      weights.
    dtype: of the saved weights.
    keep_float32: name endings that stay float32, as in published checkpoints.
    eos: `eos_token_id` of generation_config.json.
    save: arguments of `save_pretrained`.
  """

  config: Callable[[], transformers.PreTrainedConfig]
  seed: int
  dtype: torch.dtype = torch.bfloat16
  keep_float32: tuple[str, ...] = ()
  eos: int | list[int] = 127
  save: dict[str, Any] = dataclasses.field(default_factory=dict)


def _common(**changes: Any) -> dict[str, Any]:
  """Returns arguments that the configurations share."""
  return {
      'vocab_size': VOCAB,
      'hidden_size': 64,
      'num_hidden_layers': 2,
      'num_attention_heads': 4,
      'num_key_value_heads': 2,
      'head_dim': 32,
      'max_position_embeddings': 256,
      'bos_token_id': 1,
      'eos_token_id': 127,
      'tie_word_embeddings': False,
  } | changes


def _llama() -> transformers.PreTrainedConfig:
  """Returns a tied Llama whose RoPE scaling acts within 24 positions."""
  return transformers.LlamaConfig(
      **_common(
          head_dim=16,  # 64 / 4; published configurations may leave it out.
          intermediate_size=96,
          rms_norm_eps=1e-5,
          tie_word_embeddings=True,
          rope_parameters={
              'rope_type': 'llama3',
              'rope_theta': 500.0,
              'factor': 4.0,
              'low_freq_factor': 1.0,
              'high_freq_factor': 4.0,
              'original_max_position_embeddings': 32,
          },
      )
  )


def _llama_sharded() -> transformers.PreTrainedConfig:
  return transformers.LlamaConfig(
      **_common(
          intermediate_size=96,
          rms_norm_eps=1e-5,
          attention_bias=False,
          rope_parameters={'rope_type': 'default', 'rope_theta': 1e4},
      )
  )


def _qwen3() -> transformers.PreTrainedConfig:
  return transformers.Qwen3Config(
      **_common(
          num_hidden_layers=3,
          intermediate_size=96,
          rope_parameters={'rope_type': 'default', 'rope_theta': 1e6},
      )
  )


def _qwen3_moe(**changes: Any) -> transformers.PreTrainedConfig:
  return transformers.Qwen3MoeConfig(
      **_common(
          head_dim=16,
          intermediate_size=96,  # Of dense layers; there is none.
          moe_intermediate_size=32,
          num_experts=8,
          num_experts_per_tok=2,
          rope_parameters={'rope_type': 'default', 'rope_theta': 1e6},
      )
      | changes
  )


def _qwen3_moe_normalized() -> transformers.PreTrainedConfig:
  """Returns three layers, narrow so that the files stay small."""
  return _qwen3_moe(hidden_size=32, num_hidden_layers=3, norm_topk_prob=True)


def _qwen3_moe_unnormalized() -> transformers.PreTrainedConfig:
  return _qwen3_moe(norm_topk_prob=False)  # head_dim is 64 / 4 here.


def _qwen3_moe_128() -> transformers.PreTrainedConfig:
  """Returns a model whose quantized weights all fill blocks of 128x128."""
  return _qwen3_moe(
      hidden_size=128,
      num_hidden_layers=1,
      head_dim=64,
      moe_intermediate_size=256,
      num_experts=4,
      norm_topk_prob=True,
  )


def _glm4_moe(**changes: Any) -> transformers.PreTrainedConfig:
  """Returns a dense layer and two layers of routed and shared experts."""
  return transformers.Glm4MoeConfig(
      **_common(
          hidden_size=32,
          num_hidden_layers=3,
          head_dim=16,
          intermediate_size=64,
          moe_intermediate_size=32,
          first_k_dense_replace=1,
          n_routed_experts=8,
          num_experts_per_tok=2,
          n_shared_experts=1,
          routed_scaling_factor=1.5,
          norm_topk_prob=True,
          partial_rotary_factor=0.5,
          attention_bias=True,
          use_qk_norm=True,
          n_group=1,
          topk_group=1,
          rope_parameters={
              'rope_type': 'default',
              'rope_theta': 1e4,
              'partial_rotary_factor': 0.5,
          },
          # As published, although no layer for it is saved here.
          num_nextn_predict_layers=1,
      )
      | changes
  )


def _glm4_moe_groups() -> transformers.PreTrainedConfig:
  return _glm4_moe(
      n_group=4,
      topk_group=2,
      use_qk_norm=False,
      n_shared_experts=2,
      num_nextn_predict_layers=0,
  )


CASES = {
    'llama': Case(_llama, seed=0, eos=[125, 127]),
    'llama_float32': Case(_llama, seed=0, dtype=torch.float32, eos=[125, 127]),
    'llama_sharded': Case(
        _llama_sharded, seed=1, save={'max_shard_size': '40KB'}
    ),
    'qwen3': Case(_qwen3, seed=2),
    'qwen3_moe': Case(_qwen3_moe_normalized, seed=3),
    'qwen3_moe_fused': Case(
        _qwen3_moe_normalized, seed=3, save={'save_original_format': False}
    ),
    'qwen3_moe_unnormalized': Case(_qwen3_moe_unnormalized, seed=7),
    'glm4_moe': Case(
        _glm4_moe,
        seed=10,
        keep_float32=('gate.weight', 'e_score_correction_bias'),
    ),
    'glm4_moe_groups': Case(_glm4_moe_groups, seed=11),
    # Too large to be committed; check.py makes and uses it.
    'qwen3_moe_128': Case(_qwen3_moe_128, seed=31),
}


def _draw(
    name: str,
    shape: torch.Size,
    tied: bool,
    generator: torch.Generator,
) -> torch.Tensor:
  """Returns a value for a tensor: no neutral one, logits of order 1."""
  if name.endswith('norm.weight'):
    return 0.5 + torch.rand(shape, generator=generator)
  if name.endswith('e_score_correction_bias'):
    return 0.4 * torch.rand(shape, generator=generator) - 0.2
  x = torch.randn(shape, generator=generator)
  if name.endswith('.bias'):
    return 0.3 * x
  if name.endswith('embed_tokens.weight') and not tied:
    return x
  # All other weights end in [..., K], the contraction axis.
  gain = 1.5 if name.endswith(('lm_head.weight', 'q_proj.weight')) else 1.0
  gain = 2.0 if name.endswith('mlp.gate.weight') else gain
  return gain * x * shape[-1] ** -0.5


def make(case: Case) -> transformers.PreTrainedModel:
  """Returns the case's model, with the values and dtypes that are saved."""
  config = case.config()
  tied = config.tie_word_embeddings
  model = transformers.AutoModelForCausalLM.from_config(config)
  generator = torch.Generator().manual_seed(case.seed)
  persistent = model.state_dict()
  tensors = (*model.named_parameters(), *model.named_buffers())
  for name, x in sorted(tensors, key=lambda item: item[0]):
    if name not in persistent:
      continue
    value = _draw(name, x.shape, tied, generator)
    if case.keep_float32 and name.endswith(case.keep_float32):
      x.data = value
    else:
      # Rounded even for a file in float32, which then holds the same model.
      x.data = value.to(torch.bfloat16).to(case.dtype)
  model.generation_config.eos_token_id = case.eos
  return model.eval()


def load(directory: pathlib.Path) -> transformers.PreTrainedModel:
  """Returns the saved model, widened to float32."""
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
      directory,
      dtype=torch.float32,
      attn_implementation='eager',
      output_loading_info=True,
  )
  for kind, names in info.items():
    if names:
      raise ValueError(f'{directory.name}: {kind}: {names}')
  return model.eval()


@torch.no_grad()
def logits(
    model: transformers.PreTrainedModel, tokens: np.ndarray
) -> np.ndarray:
  """Returns float32 logits `[B, T, V]` of tokens `[B, T]`."""
  return model(torch.from_numpy(tokens).long()).logits.numpy()


def _routers(model: transformers.PreTrainedModel) -> list[torch.nn.Module]:
  return [m for name, m in model.named_modules() if name.endswith('mlp.gate')]


def _choices(
    model: transformers.PreTrainedModel, tokens: np.ndarray
) -> list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]]:
  """Returns (router, its input, chosen experts `[B * T, k]`) of each layer."""
  found = []

  def record(module, inputs, outputs):
    found.append((module, inputs[0], outputs[2].sort(-1).values))

  hooks = [r.register_forward_hook(record) for r in _routers(model)]
  logits(model, tokens)
  for hook in hooks:
    hook.remove()
  return found


@torch.no_grad()
def router_margin(
    model: transformers.PreTrainedModel, tokens: np.ndarray
) -> float:
  """Returns the least score by which a taken expert beats one left out."""
  margin = float('inf')
  for router, x, _ in _choices(model, tokens):
    scores = torch.nn.functional.linear(x.flatten(0, -2), router.weight)
    if not hasattr(router, 'e_score_correction_bias'):
      scores = scores.softmax(-1)
    else:
      scores = scores.sigmoid() + router.e_score_correction_bias
      groups = scores.unflatten(-1, (router.num_group, -1))
      ranked = groups.topk(2, -1).values.sum(-1).sort(-1, descending=True)
      taken, left = ranked.values.split(
          [router.topk_group, router.num_group - router.topk_group], -1
      )
      if left.numel():
        margin = min(margin, (taken[:, -1] - left[:, 0]).min().item())
      allowed = torch.zeros(ranked.indices.shape, dtype=torch.bool).scatter(
          -1, ranked.indices[:, : router.topk_group], True
      )
      scores = groups.masked_fill(~allowed[..., None], -1e9).flatten(-2)
    best = scores.sort(-1, descending=True).values
    k = router.top_k
    margin = min(margin, (best[:, k - 1] - best[:, k]).min().item())
  return margin


def used_experts(
    model: transformers.PreTrainedModel, tokens: np.ndarray
) -> list[int]:
  """Returns how many experts each layer uses."""
  return [len(chosen.unique()) for _, _, chosen in _choices(model, tokens)]


@torch.no_grad()
def changed_choices(
    model: transformers.PreTrainedModel,
    tokens: np.ndarray,
    change: Callable[[torch.nn.Module], None],
) -> float:
  """Returns the share of tokens that take other experts after a change.

  Each layer sees the inputs of the unchanged model. The routers stay changed.
  """
  shares = []
  for router, x, chosen in _choices(model, tokens):
    change(router)
    other = router(x)[2].sort(-1).values
    shares.append((other != chosen).any(-1).float().mean().item())
  return sum(shares) / len(shares)


def _without_bias(router: torch.nn.Module) -> None:
  router.e_score_correction_bias.zero_()


def _without_groups(router: torch.nn.Module) -> None:
  router.num_group = router.topk_group = 1


@torch.no_grad()
def least_effect(
    model: transformers.PreTrainedModel, tokens: np.ndarray
) -> tuple[float, str]:
  """Returns which tensor a reader could forget with the least effect.

  Norm gains are forgotten as 1, all else as 0.

  Returns:
    The largest change of a logit, and the tensor's name.
  """
  want = logits(model, tokens)
  effects = []
  for name, x in model.state_dict().items():
    kept = x.clone()
    x.fill_(float(name.endswith('norm.weight')))
    effects.append((float(np.abs(logits(model, tokens) - want).max()), name))
    x.copy_(kept)
  return min(effects)


def write(name: str, case: Case, out: pathlib.Path) -> None:
  """Writes one case and prints what makes it a good test."""
  directory = out / name
  shutil.rmtree(directory, ignore_errors=True)
  make(case).save_pretrained(directory, **case.save)
  model = load(directory)
  rng = np.random.default_rng(case.seed)
  tokens = rng.integers(0, VOCAB, (BATCH, LENGTH), dtype=np.int32)
  reference = logits(model, tokens)
  np.savez_compressed(
      directory / 'reference.npz', tokens=tokens, logits=reference
  )
  files = {p.name: p.stat().st_size for p in sorted(directory.iterdir())}
  print(f'{name}: {sum(files.values())} bytes')
  for file, size in files.items():
    print(f'  {file} {size}')
  print(
      f'  logits: largest {np.abs(reference).max():.2f},'
      f' deviation {reference.std():.2f}'
  )
  effect, forgotten = least_effect(model, tokens)
  print(f'  least effect: {effect:.3f} without {forgotten}')
  if _routers(model):
    margin = router_margin(model, tokens)
    print(f'  router margin: {margin:.1e}')
    print(f'  experts used: {used_experts(model, tokens)}')
    if margin < MIN_ROUTER_MARGIN:
      raise ValueError(f'{name}: choose another seed: margin {margin}.')
  if hasattr(model.config, 'n_group'):
    if model.config.n_group > 1:
      share = changed_choices(model, tokens, _without_groups)
      print(f'  other experts without groups: {share:.0%} of tokens')
      model = load(directory)
    share = changed_choices(model, tokens, _without_bias)
    print(f'  other experts without the bias: {share:.0%} of tokens')


def main() -> None:
  """Writes the cases that the command line names, or all."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('case', nargs='*', help=', '.join(CASES))
  arguments = parser.parse_args()
  torch.use_deterministic_algorithms(True)
  transformers.logging.disable_progress_bar()
  for name in arguments.case or CASES:
    write(name, CASES[name], arguments.out)


if __name__ == '__main__':
  main()
