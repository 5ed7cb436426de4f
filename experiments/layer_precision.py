"""Which layers pay for four bits: one layer at a time, and ends of the model.

    python -m experiments.layer_precision smoke
    python -m experiments.layer_precision tiny       # the demo's model; CPU
    python -m experiments.layer_precision smollm2

A bfloat16 sampler completes the task's problems once. Then the same tokens are
run teacher-forced under precision policies that differ in where they quantize,
and compared with bfloat16: mean |log-prob gap| and k3, which estimates
KL(bfloat16 || quantized). Kinds of rows:

* `all`: every layer is quantized;
* `only`: this layer alone is;
* `but`: every layer but this one is;
* `last`, `first`: the last or first so many layers stay bfloat16;
* `shared_experts`: they stay bfloat16, where the model has them.

`saved` is the share of the gap of `all` that a row is without.

activations.jsonl says what the inputs of each layer's linears lose in NVFP4
with a scale per token: the share of non-zero elements that become zero, and the
error |Q(x) - x| / |x|; by itself, and with the residuals of ResQ and QUADS.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import mismatch_matrix
from experiments import plots
from experiments import run
from nvfp4_jax import formats
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax import residual
from nvfp4_jax import variants
from nvfp4_jax.models import config as model_config
from nvfp4_jax.rl import trace


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/layer_precision')
  recipe: str = 'nvfp4_dequantized'  # whose forward pass it is
  every: int = 1  # of `only` and `but`, every so many layers
  matrix: mismatch_matrix.Config = mismatch_matrix.PRESETS['tiny'][1]

  def __post_init__(self):
    if self.every < 1:
      raise ValueError(f'every {self.every} is below 1.')
    if not recipes.get(self.recipe).sampler.rules:
      raise ValueError(f'Recipe {self.recipe!r} quantizes nothing.')


def _preset(name, text, **changes):
  workdir = pathlib.Path('runs') / f'layer_precision_{name}'
  matrix = mismatch_matrix.PRESETS[name][1]
  return {name: (text, Config(workdir=workdir, matrix=matrix, **changes))}


PRESETS = {
    **_preset('smoke', 'Seconds on a CPU; run by the tests.', every=2),
    **_preset('tiny', "The demo's model with a shared expert; CPU."),
    **_preset('smollm2', 'SmolLM2-135M-Instruct adds numbers in chats.'),
}


_TOKEN = quantization.QuantSpec('nvfp4', 'token')
_BLOCK = formats.NVFP4.block
# As the samplers of these recipes have them.
_RESIDUALS = {
    'resq': residual.Residual('elements', 0.5),
    'quads': residual.Residual('channels', 0.0625),
}
# What linears read it, by the stage of a trace; experts sort their own rows.
_INPUTS = {
    'input_layernorm': 'q, k, v',
    'self_attn.attention': 'o',
    'post_attention_layernorm': 'gate, up',
    'mlp.swiglu': 'down',
    'mlp.shared_experts.swiglu': 'down of shared experts',
}


class Case(NamedTuple):
  """One precision policy: its kind, and which or how many layers."""

  kind: str
  layers: int


def main(cfg: Config, log: run.Log) -> None:
  """Measures the cases that have no row yet; table and picture."""
  matrix = dataclasses.replace(cfg.matrix, workdir=cfg.workdir)
  start = mismatch_matrix.load_start(matrix)
  whole = variants.vary_policy(
      recipes.get(cfg.recipe).sampler,
      variants.Variant(scope=matrix.scope, keep_last=0.0, keep_first=0.0),
  )
  cases = dict(make_cases(cfg, start.model, whole))
  rows = run.read_rows(log.path)
  done = {Case(row['kind'], row['layers']) for row in rows}
  completed = mismatch_matrix.complete(matrix, start, policy.BF16)
  _log_activations(cfg, matrix, start)
  progress = run.Progress('policies', len(cases), len(done))
  for case, precision_policy in cases.items():
    if case in done:
      continue
    logprobs = mismatch_matrix.learn(matrix, start, precision_policy, completed)
    row = case._asdict() | mismatch_matrix.measure(completed, logprobs)
    rows.append(row | {'saved': 1 - row['mean'] / (rows or [row])[0]['mean']})
    log(rows[-1])
    progress(len(rows), f'{case.kind} {case.layers}: {row["mean"]:.4f}')
  for row in rows:
    print(
        f'{row["kind"]:>15} {row["layers"]:>3}  gap {row["mean"]:.4f}'
        f' ± {row["half_width"]:.4f}  k3 {row["k3"]:.4f}'
        f'  saved {row["saved"]:.2f}'
    )
  path = plots.layer_precision(rows, cfg.workdir / 'figures')
  print(f'Figure: {path}', file=sys.stderr)


def activation_losses(
    x: jax.Array, residuals: Mapping[str, residual.Residual]
) -> Mapping[str, float]:
  """Returns what activations lose, by themselves and with each residual.

  Args:
    x: `[M, K]` bfloat16.
    residuals: by name.

  Returns:
    `underflow` and `error`, and the same of each residual, `underflow_NAME`.
  """
  kept = {'': qtensor.dequantize(quantization.quantize(x, _TOKEN), 'float32')}
  for name, extra in residuals.items():
    kept[f'_{name}'] = residual.compensated(x, _TOKEN, extra)
  exact, losses = x.astype(jnp.float32), {}
  live = jnp.maximum(jnp.sum(exact != 0), 1)
  for name, values in kept.items():
    zeroed = jnp.sum((values == 0) & (exact != 0))
    error = jnp.linalg.norm(values - exact) / jnp.linalg.norm(exact)
    losses[f'underflow{name}'] = float(zeroed / live)
    losses[f'error{name}'] = float(error)
  return losses


def _log_activations(cfg, matrix, start):
  log = run.Log(cfg.workdir, 'activations.jsonl')
  if run.read_rows(log.path):
    return
  quantizer, tree = mismatch_matrix.stacked(start, policy.BF16)
  sampled = mismatch_matrix.sample(matrix, start, quantizer, tree)
  traced = trace.trace_learner(start.model, tree, quantizer, tree, sampled)
  ends = sampled.lengths + sampled.counts - 1
  live = np.arange(sampled.tokens.shape[1]) < ends[:, None]
  rows: list[dict[str, Any]] = []
  for stage, x in traced.stages.items():
    _, _, name = stage.removeprefix('layers.').partition('.')
    if name in _INPUTS and x.shape[-1] % _BLOCK == 0:
      x = jnp.asarray(x[live], jnp.bfloat16)
      losses = activation_losses(x, _RESIDUALS)
      layer = int(stage.split('.')[1])
      rows.append({'layer': layer, 'input': _INPUTS[name], **losses})
  for row in rows:
    log(row)
  for name in _INPUTS.values():
    own = [row for row in rows if row['input'] == name]
    if own:
      mean = lambda key, own=own: sum(row[key] for row in own) / len(own)
      print(
          f'{name:>22}  underflow {mean("underflow"):.3f}, with ResQ'
          f' {mean("underflow_resq"):.3f}, QUADS {mean("underflow_quads"):.3f};'
          f'  error {mean("error"):.3f}, {mean("error_resq"):.3f},'
          f' {mean("error_quads"):.3f}'
      )


def make_cases(
    cfg: Config,
    model: model_config.ModelConfig,
    whole: policy.PrecisionPolicy,
) -> Iterator[tuple[Case, policy.PrecisionPolicy]]:
  """Yields the cases and their policies; `all` comes first.

  Args:
    cfg: flags.
    model: the model.
    whole: the policy that quantizes every layer.
  """
  count = model.num_layers
  yield Case('all', count), whole
  for layer in range(0, count, cfg.every):
    yield Case('only', layer), _only(whole, layer)
    yield Case('but', layer), _but(whole, layer)
  for kept in cfg.matrix.keep_layers:
    share = kept / count
    if share < 1:
      yield Case('last', kept), dataclasses.replace(whole, keep_last=share)
      yield Case('first', kept), dataclasses.replace(whole, keep_first=share)
  if model.shared_expert_dim:
    variant = variants.Variant(scope=cfg.matrix.scope, shared_experts=False)
    yield Case('shared_experts', count), variants.vary_policy(whole, variant)


def _only(whole, layer):
  """Returns a policy's rules for one layer."""
  return dataclasses.replace(
      whole,
      rules=tuple(
          dataclasses.replace(
              rule, pattern=rule.pattern.replace(r'\d+', str(layer))
          )
          for rule in whole.rules
      ),
  )


def _but(whole, layer):
  """Returns a policy with one layer in bfloat16."""
  keep = policy.Rule(rf'layers\.{layer}\..*', None)
  return dataclasses.replace(whole, rules=(keep, *whole.rules))


if __name__ == '__main__':
  run.launch(main, PRESETS)
