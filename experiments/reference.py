"""A dense decoder in float64 numpy, written to be read: what is right.

It shares no code with `nvfp4_jax.models.transformer` but the rotary
frequencies and takes no shortcut: every position attends by a full matrix.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nvfp4_jax.models import config as model_config


def logits(
    config: model_config.ModelConfig, params: Mapping[str, Any], tokens: Any
) -> np.ndarray:
  """Returns float64 logits `[T, V]` of one sequence.

  Args:
    config: a model without experts.
    params: its per-layer tree, as `models.hf.load` returns it; no QTensors.
    tokens: `[T]` integers.

  Raises:
    ValueError: the model has experts.
  """
  if config.num_experts:
    raise ValueError('Only models without experts have a float64 reference.')
  table = _float64(params['embed_tokens'])
  angles = np.outer(
      np.arange(len(tokens)), model_config.rope_frequencies(config)
  )
  x = table[np.asarray(tokens)]
  for layer in params['layers']:
    x = x + _attention(config, layer, x, angles)
    h = _rms_norm(x, layer['post_attention_layernorm'], config.norm_eps)
    gate, up = (h @ _float64(layer[f'mlp.{n}_proj']).T for n in ('gate', 'up'))
    hidden = gate / (1 + np.exp(-gate)) * up
    x = x + hidden @ _float64(layer['mlp.down_proj']).T
  head = _float64(params['lm_head']) if 'lm_head' in params else table
  return _rms_norm(x, params['norm'], config.norm_eps) @ head.T


def _attention(config, layer, x, angles):
  h = _rms_norm(x, layer['input_layernorm'], config.norm_eps)
  length, outputs = len(x), []
  q, k, v = (_heads(config, layer, h, name) for name in 'qkv')
  if config.qk_norm:
    q = _rms_norm(q, layer['self_attn.q_norm'], config.norm_eps)
    k = _rms_norm(k, layer['self_attn.k_norm'], config.norm_eps)
  q, k = (_rotate(t, angles[:, None]) for t in (q, k))
  future = np.triu(np.ones((length, length), bool), 1)
  for head in range(config.num_heads):
    kv = head * config.num_kv_heads // config.num_heads
    scores = q[:, head] @ k[:, kv].T / config.head_dim**0.5
    scores = np.where(future, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    outputs.append(weights @ v[:, kv])
  y = np.concatenate(outputs, axis=1) @ _float64(layer['self_attn.o_proj']).T
  return y + _float64(layer.get('self_attn.o_proj.bias', 0.0))


def _heads(config, layer, h, name):
  """Returns q, k or v, `[T, heads, head_dim]`."""
  y = h @ _float64(layer[f'self_attn.{name}_proj']).T
  y = y + _float64(layer.get(f'self_attn.{name}_proj.bias', 0.0))
  return y.reshape(len(h), -1, config.head_dim)


def _rotate(x, angles):
  half = angles.shape[-1]
  first, second, rest = np.split(x, (half, 2 * half), axis=-1)
  cos, sin = np.cos(angles), np.sin(angles)
  return np.concatenate(
      (first * cos - second * sin, second * cos + first * sin, rest), axis=-1
  )


def _rms_norm(x, gain, eps):
  mean_square = np.mean(x * x, axis=-1, keepdims=True)
  return x / np.sqrt(mean_square + eps) * _float64(gain)


def _float64(x):
  return np.asarray(x, np.float64)
