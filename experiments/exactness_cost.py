"""What it costs that bits are fixed: quantizers, and the policy's programs.

    python -m experiments.exactness_cost smoke
    python -m experiments.exactness_cost figure     # the table in the README

Times quantizers against the same formulas in float32 as XLA compiles them (a
division may become a multiply by a reciprocal), and the learner's forward pass,
an update and a rollout against plain XLA in place of the functions of
`nvfp4_jax.exact` that fix the order of sums and the rounding points (jnp.sum,
jnp.exp, no fences, attention in one block). Both are compiled ahead, then run
in turn; a row holds the ratio of the medians.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import itertools
import pathlib
import time
from unittest import mock

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments import run
from nvfp4_jax import exact
from nvfp4_jax import policy
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import types

type Programs = dict[str, Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/exactness_cost')
  recipes: tuple[str, ...] = ('bf16', 'nvfp4_final')
  models: tuple[model_config.ModelConfig, ...] = (
      model_config.tiny(16),
      dataclasses.replace(
          model_config.tiny(1024),
          num_layers=2,
          embed_dim=512,
          num_heads=8,
          head_dim=64,
          moe_dim=256,
          attention_block=64,
      ),
  )
  batches: tuple[int, ...] = (128, 16)  # one for each model
  prompt_length: int = 16
  new_tokens: int = 16
  quantized_shape: tuple[int, int] = (2048, 2048)
  repeats: int = 9


PRESETS = {
    'smoke': (
        'Seconds on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/exactness_cost_smoke'),
            recipes=('bf16',),
            models=(dataclasses.replace(model_config.tiny(16), num_layers=1),),
            batches=(4,),
            new_tokens=4,
            quantized_shape=(128, 128),
            repeats=1,
        ),
    ),
    'figure': ('The table in the README.', Config()),
}


_SPECS = {
    'nvfp4': quantization.QuantSpec('nvfp4'),
    'nvfp4 per token': quantization.QuantSpec('nvfp4', 'token'),
    'nvfp4 4/6 per token': quantization.QuantSpec(
        'nvfp4', 'token', four_over_six='mse'
    ),
    'mxfp8': quantization.QuantSpec('mxfp8'),
    'fp8_block': quantization.QuantSpec('fp8_block'),
}


def main(cfg: Config, log: run.Log) -> None:
  """Logs one row for each quantizer, and each model, recipe and program."""
  log.rewind(0)
  steps = itertools.count()

  def log_ratios(labels, programs):
    seconds = _time_in_turn(cfg, programs)
    for program in dict.fromkeys(name for _, name in programs):
      fixed, plain = seconds['exact', program], seconds['plain', program]
      row = labels | {'program': program}
      times = {'seconds': fixed, 'ratio': fixed / plain}
      log({'step': next(steps), **row, **times})
      print(f'{row}  {1e3 * fixed:.1f} ms  ratio {fixed / plain:.2f}')

  log_ratios({'shape': cfg.quantized_shape}, _quantizers(cfg))
  for model, batch in zip(cfg.models, cfg.batches, strict=True):
    for name in cfg.recipes:
      labels = {'embed_dim': model.embed_dim, 'recipe': name}
      log_ratios(labels, _programs(cfg, model, batch, name))


def _quantizers(cfg):
  """Returns compiled quantizers by (arithmetic, name)."""
  x = jax.random.normal(jax.random.key(0), cfg.quantized_shape, jnp.bfloat16)
  programs = {}
  for kind in ('exact', 'plain'):
    jax.clear_caches()
    with _plain_division() if kind == 'plain' else contextlib.nullcontext():
      for name, spec in _SPECS.items():
        fn = jax.jit(functools.partial(quantization.quantize, spec=spec))
        fn = fn.lower(x).compile()
        programs[kind, f'quantize {name}'] = functools.partial(fn, x)
  return programs


def _programs(cfg, model, batch, name):
  """Returns compiled programs by (arithmetic, program)."""
  programs = {}
  one_block = dataclasses.replace(
      model, attention_block=cfg.prompt_length + cfg.new_tokens
  )
  for kind, config in (('exact', model), ('plain', one_block)):
    jax.clear_caches()
    with _plain_arithmetic() if kind == 'plain' else contextlib.nullcontext():
      for program, fn in _compile(cfg, config, batch, name).items():
        programs[kind, program] = fn
  return programs


def _compile(cfg, config, batch, name) -> Programs:
  quantizer = policy.Quantizer(recipes.get(name).learner)
  segments = policy.segments(
      [quantizer.policy], transformer.param_paths(config)
  )
  params = transformer.stack(
      transformer.init_params(jax.random.key(0), config), segments
  )
  tree = policy.quantize_params(quantizer, params)
  shape = (batch, cfg.prompt_length + cfg.new_tokens)
  tokens = jax.random.randint(jax.random.key(1), shape, 1, config.vocab_size)
  optimizer = learner.OptimizerConfig()
  rollout = types.Rollout(
      tokens=tokens,
      completion_mask=jnp.arange(shape[1]) >= cfg.prompt_length + 0 * tokens,
      sampler_logprobs=jnp.zeros(shape),
      temperature=jnp.float32(1.0),
      rewards=jnp.zeros(batch),
      group=jnp.zeros(batch, jnp.int32),
      version=jnp.zeros(shape, jnp.int32),
  )
  step = types.Batch(rollout, jnp.linspace(-1, 1, batch), None, None)
  state = learner.init_state(params, optimizer)
  forward = learner.logprobs.lower(
      config, params, quantizer, tree, tokens, 1.0
  ).compile()
  update = learner.train_step.lower(
      config, optimizer, learner.GRPOConfig(), state, quantizer, tree, step
  ).compile()
  prompts = tokens[:, : cfg.prompt_length]
  lengths = jnp.full((batch,), cfg.prompt_length)
  sample = sampler.SampleConfig(cfg.new_tokens)
  generate = lambda: sampler.generate(
      config, tree, quantizer, prompts, lengths, jax.random.key(2), sample
  )
  generate = jax.jit(generate).lower().compile()
  return {
      'forward': lambda: forward(params, quantizer, tree, tokens, 1.0),
      'update': lambda: update(
          optimizer, jax.tree.map(jnp.copy, state), quantizer, tree, step
      ),
      'rollout': generate,
  }


def _plain_arithmetic():
  """Returns a context in which `exact` leaves the model to XLA."""
  same = lambda x: x
  return _patched(
      fence=same,
      tree_sum=lambda x: jnp.sum(x, axis=-1),
      rsqrt=lax.rsqrt,
      exp=jnp.exp,
      log=jnp.log,
  )


def _plain_division():
  """Returns a context in which `exact` leaves quantizers to XLA."""
  return _patched(
      divide=lambda a, b: jnp.float32(a) / b,
      multiply=lambda a, b: a * b,
      sum_in_order=lambda x: jnp.sum(x, axis=-1),
      fence=lambda x: x,
  )


def _patched(**functions):
  stack = contextlib.ExitStack()
  for name, fn in functions.items():
    stack.enter_context(mock.patch.object(exact, name, fn))
  return stack


def _time_in_turn(cfg, programs):
  times = {name: [] for name in programs}
  for fn in programs.values():
    jax.block_until_ready(fn())
  for _ in range(cfg.repeats):
    for name, fn in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(fn())
      times[name].append(time.perf_counter() - start)
  return {name: float(np.median(values)) for name, values in times.items()}


if __name__ == '__main__':
  run.launch(main, PRESETS)
