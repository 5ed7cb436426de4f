"""Where the time of a GRPO step goes, part by part, under several recipes.

    python -m experiments.profile smoke
    python -m experiments.profile tiny            # the demo's step; CPU
    python -m experiments.profile smollm2

The parts of one step, each compiled and timed by itself with the step's own
arrays:

* `sync`: quantizing the masters for learner and sampler;
* `rollout`: prefill and decode loop;
* `reward`: on the host;
* `reference`: log-probs of the reference policy;
* `update`: forward and backward pass, and the optimizer;
* `prepare`, `gemm`: of that, quantizing the activations of every quantized
  linear, and its matmul alone, with the learner's number of rows, all layers.

FLOPs are those of the model, not of its program: 2 for each active parameter
and token, attention's products, three times that for a gradient. Bytes are the
program's: arguments (weights as stored, caches, states) and temporaries. Rows
of metrics.jsonl say the rest; `step` is the sum of the parts that make one.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments import grpo
from experiments import run
from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import profiling
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import advantages
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import loop
from nvfp4_jax.rl import rollouts
from nvfp4_jax.rl import types

_STEP = ('sync', 'rollout', 'reward', 'reference', 'update')


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/profile')
  recipes: tuple[str, ...] = ('bf16', 'nvfp4_final')
  training: grpo.Config = grpo.PRESETS['demo'][1]
  repeats: int = 5  # calls that are timed
  trace: bool = False  # a trace for Perfetto or XProf, in WORKDIR/trace


def _preset(name, text, of, **changes):
  workdir = pathlib.Path('runs') / f'profile_{name}'
  cfg = Config(workdir=workdir, training=grpo.PRESETS[of][1], **changes)
  return {name: (text, cfg)}


PRESETS = {
    **_preset(
        'smoke',
        'Seconds on a CPU; run by the tests.',
        'smoke',
        recipes=('nvfp4_dequantized',),
        repeats=1,
    ),
    **_preset('tiny', "The demo's step; CPU.", 'demo'),
    **_preset('smollm2', 'A step of SmolLM2-135M.', 'smollm2'),
}


def main(cfg: Config, log: run.Log) -> None:
  """Logs one row for each recipe and part, and their sum."""
  log.rewind(0)
  start = grpo.load_start(
      dataclasses.replace(cfg.training, workdir=cfg.workdir)
  )
  tracing = (
      jax.profiler.trace(str(cfg.workdir / 'trace'))
      if cfg.trace
      else contextlib.nullcontext()
  )
  with tracing:
    for name in cfg.recipes:
      rows, total = [], 0.0
      for part, values in parts(cfg, start, recipes.get(name)):
        rows.append({'step': 0, 'recipe': name, 'part': part, **values})
        log(rows[-1])
        total += values['seconds'] if part in _STEP else 0.0
      log({'step': 0, 'recipe': name, 'part': 'step', 'seconds': total})
      print(make_table(name, rows, total))


def make_table(name: str, rows: list[dict[str, Any]], total: float) -> str:
  """Returns the parts of a recipe's step as a Markdown table."""
  lines = [
      f'{name}: {1e3 * total:.1f} ms a step',
      '',
      '| part | ms | share | GFLOP | GFLOP/s | arguments, MB'
      ' | temporaries, MB | compile, s |',
      '|---|---|---|---|---|---|---|---|',
  ]
  for row in rows:
    share = f'{row["seconds"] / total:.0%}' if row['part'] in _STEP else ''
    flops = row.get('flops', 0.0)
    cells = (
        row['part'],
        f'{1e3 * row["seconds"]:.2f}',
        share,
        f'{flops / 1e9:.2f}' if flops else '',
        f'{flops / 1e9 / row["seconds"]:.1f}' if flops else '',
        f'{row.get("argument_bytes", 0) / 1e6:.1f}',
        f'{row.get("temporary_bytes", 0) / 1e6:.1f}',
        f'{row.get("compile_seconds", 0.0):.1f}',
    )
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join([*lines, ''])


def parts(
    cfg: Config, start: grpo.Start, recipe: recipes.Recipe
) -> Iterator[tuple[str, Mapping[str, Any]]]:
  """Yields the name and the numbers of each part."""
  run_cfg, model = cfg.training, start.model
  quantizers = grpo.make_quantizers(recipe, run_cfg.seed)
  paths = transformer.param_paths(model)
  segments = policy.segments((recipe.learner, recipe.sampler), paths)
  measure = functools.partial(profiling.measure, repeats=cfg.repeats)
  state = learner.init_state(
      transformer.stack(start.params, segments), run_cfg.optimizer
  )

  synced, cost = measure(
      lambda params: loop.sync(quantizers, params), state.params
  )
  yield 'sync', dataclasses.asdict(cost)

  problems = [
      start.task.problem('train', i)
      for i in range(run_cfg.rollout.prompts_per_step)
      for _ in range(run_cfg.rollout.group_size)
  ]
  prompts, lengths = sampler.pad_prompts([p.prompt for p in problems])
  sample = sampler.SampleConfig(
      start.task.max_answer_tokens,
      start.task.eos_ids,
      run_cfg.rollout.temperature,
  )
  completions, cost = measure(
      lambda tree, key: sampler.generate(
          model, tree, quantizers.sampler, prompts, lengths, key, sample
      ),
      synced.sampler,
      rollouts.step_key(run_cfg.seed, 0),
  )
  made = int(jnp.sum(completions.mask))
  context = float(jnp.sum(completions.mask) + lengths.sum()) / len(problems)
  run_tokens = int(lengths.sum()) + made
  forward = functools.partial(model_flops, model, context=context / 2)
  yield 'rollout', dataclasses.asdict(cost) | {'flops': forward(run_tokens)}

  began = time.perf_counter()
  results = rollouts.score_completions(start.task, problems, completions)
  yield 'reward', {'seconds': time.perf_counter() - began}

  batch = _batch(run_cfg, completions, results)
  positions = batch.rollout.tokens.size
  bf16 = policy.Quantizer(policy.BF16)
  reference = policy.quantize_params(bf16, state.params, dtype=model.dtype)
  temperature = run_cfg.rollout.temperature
  ref_logprobs, cost = measure(
      lambda tree, tokens: learner.logprobs(
          model, tree, bf16, tree, tokens, temperature
      ),
      reference,
      batch.rollout.tokens,
  )
  yield 'reference', dataclasses.asdict(cost) | {'flops': forward(positions)}

  batch = dataclasses.replace(batch, ref_logprobs=ref_logprobs)
  objective = recipes.objective(recipe, run_cfg.grpo)
  _, cost = measure(
      lambda state, quantized, batch: learner.train_step(
          model,
          run_cfg.optimizer,
          objective,
          state,
          quantizers.learner,
          quantized,
          batch,
          memory=run_cfg.memory,
      ),
      state,
      synced.learner,
      batch,
      donate=(0,),
  )
  yield 'update', dataclasses.asdict(cost) | {'flops': 3 * forward(positions)}

  linears = list(_linears(model, recipe.learner, positions))
  if linears:
    yield from _kernels(measure, linears)


def model_flops(
    model: model_config.ModelConfig, tokens: int, context: float
) -> float:
  """Returns the FLOPs of a forward pass.

  2 for each active matmul parameter and token, and 4 heads x head_dim x context
  for attention in each layer.

  Args:
    model: the model.
    tokens: how many are run.
    context: how many keys a token attends to, on average.
  """
  active = 0.0
  for path, spec in transformer.param_specs_by_path(model).items():
    if len(spec.shape) < 2 or (
        path == 'embed_tokens' and not model.tie_embeddings
    ):
      continue
    share = 1.0
    if '.experts.' in path:
      share = model.experts_per_token / model.num_experts
    active += share * math.prod(spec.shape)
  attention = 4 * model.num_layers * model.num_heads * model.head_dim * context
  return tokens * (2 * active + attention)


def _batch(cfg, completions, results):
  rewards = jnp.array([r.reward or 0.0 for r in results], jnp.float32)
  rows = rewards.shape[0]
  group = jnp.arange(rows, dtype=jnp.int32) // cfg.rollout.group_size
  rollout = types.Rollout(
      tokens=completions.tokens,
      completion_mask=completions.mask,
      sampler_logprobs=completions.logprobs,
      temperature=jnp.float32(cfg.rollout.temperature),
      rewards=rewards,
      group=group,
      version=jnp.zeros(completions.tokens.shape, jnp.int32),
      valid=jnp.ones((rows,), bool),
  )
  computed = advantages.compute(
      cfg.grpo.advantage,
      rewards,
      group,
      valid=rollout.valid,
      mask=rollout.completion_mask,
  )
  return types.Batch(rollout, computed, None, None)


def _linears(model, precision_policy, rows):
  """Yields precision, shape and rows of each quantized linear."""
  specs = transformer.param_specs_by_path(model)
  resolved = policy.resolve(precision_policy, list(specs))
  for path, precision in resolved.items():
    if precision is None:
      continue
    shape = specs[path].shape
    routed = rows * model.experts_per_token if len(shape) == 3 else rows
    yield precision, shape, routed


def _kernels(measure, linears):
  """Yields the quantizer of activations and the matmul, of all linears."""
  counts = {}
  for linear in linears:
    counts[linear] = counts.get(linear, 0) + 1
  totals = {'prepare': {}, 'gemm': {}}
  for (precision, shape, rows), count in counts.items():
    x = jax.random.normal(jax.random.key(0), (rows, shape[-1]), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    wq = quantization.quantize(w, precision.rhs)
    sizes = None
    if len(shape) == 3:
      sizes = jnp.full((shape[0],), rows // shape[0], jnp.int32)
    xq = None
    if precision.fprop_lhs is not None:
      xq, cost = measure(
          functools.partial(quantization.quantize, spec=precision.fprop_lhs), x
      )
      _add(totals['prepare'], dataclasses.asdict(cost), count)

    def multiply(x, xq, wq, sizes, precision=precision):
      if sizes is None:
        return matmul.quantized_matmul(x, None, precision, xq=xq, wq=wq)
      return matmul.quantized_grouped_matmul(
          x, None, sizes, precision, xq=xq, wq=wq
      )

    _, cost = measure(multiply, x, xq, wq, sizes)
    flops = 2.0 * rows * shape[-1] * shape[-2]
    _add(totals['gemm'], dataclasses.asdict(cost) | {'flops': flops}, count)
  for name, total in totals.items():
    if total:
      yield name, total


def _add(total, values, count):
  """Adds what several calls take; temporaries are those of the largest."""
  for name, value in values.items():
    if name == 'temporary_bytes':
      total[name] = max(total.get(name, 0), value)
    elif name == 'compile_seconds':
      total[name] = total.get(name, 0.0) + value
    else:
      total[name] = total.get(name, 0) + count * value


if __name__ == '__main__':
  run.launch(main, PRESETS)
