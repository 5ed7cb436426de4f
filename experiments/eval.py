"""What can be said of a model: commands that print a report.

    python -m experiments.eval params --config tests/golden/configs/glm_4_5.json
    python -m experiments.eval params --config FOLDER --recipe nvfp4_final
    python -m experiments.eval params --config FOLDER --json
    python -m experiments.eval generate --model FOLDER --recipe nvfp4_final
    python -m experiments.eval reference --model FOLDER

`params` needs a config.json and no weights. It counts parameters by class, in
all and active per token, and the bytes of the model's tensors under the sampler
policy of each recipe, or of one.

`generate` answers a prompt with a model of a Hugging Face folder, quantized or
not, and measures loading, memory and speed.

`reference` compares the logits of a dense model with a forward pass in float64
numpy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
import pathlib
import resource
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments import reference
from experiments import run
from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax import tokenizer
from nvfp4_jax.models import hf
from nvfp4_jax.models import param_counts
from nvfp4_jax.models import transformer

type Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParamsConfig:
  """Counts the parameters and bytes of a config.json."""

  config: pathlib.Path  # a config.json, or a folder with one
  recipe: str | None = None  # besides bf16; all of recipes.RECIPES by default
  json: bool = False  # print JSON lines, not tables
  output: pathlib.Path | None = None  # a file for the JSON lines

  def __post_init__(self):
    if self.recipe is not None:
      recipes.get(self.recipe)


def params(cfg: ParamsConfig) -> None:
  """Prints the parameter report, and writes its rows if asked to.

  Raises:
    files.CheckpointError: the config.json is not sound or not supported, or
      `cfg.recipe` cannot be used for its model.
  """
  raw = _read_config(cfg.config)
  rows = list(params_rows(raw, recipe=cfg.recipe, where=str(cfg.config)))
  lines = ''.join(json.dumps(row) + '\n' for row in rows)
  _write(cfg.output, lines)
  print(lines if cfg.json else _report(rows), end='')


def params_rows(
    raw: Mapping[str, Any],
    *,
    recipe: str | None = None,
    where: str = 'config.json',
) -> Iterator[Row]:
  """Yields the rows of the parameter report.

  Rows of four kinds: `class`, one for each of `param_counts.CLASSES`; `total`;
  `not_counted`, one for each layer that is left out; `bytes`, one for each
  recipe, with a `reason` in place of numbers where a recipe that was not asked
  for cannot be used.

  Args:
    raw: the object of a config.json.
    recipe: the recipe, besides bf16; None for all.
    where: names the file in errors.

  Raises:
    files.CheckpointError: see `params`.
  """
  head = {'model_type': raw.get('model_type')}
  counts = param_counts.count(raw, where=where)
  total = ('total', counts.total, counts.total_active)
  classes = (
      (name, number, counts.active[name])
      for name, number in counts.by_class.items()
  )
  for name, number, active in (*classes, total):
    kind = 'total' if name == 'total' else 'class'
    row = {'kind': kind, **head, 'name': name, 'parameters': number}
    yield row | {'share': number / counts.total, 'active': active}
  for name in counts.not_counted:
    yield {'kind': 'not_counted', **head, 'name': name}

  shapes = param_counts.shapes(raw, where=where)
  bf16 = param_counts.tensor_bytes(shapes, recipes.get('bf16').sampler)
  names = recipes.RECIPES if recipe is None else ('bf16', recipe)
  for name in dict.fromkeys(names):
    row = {'kind': 'bytes', **head, 'name': name}
    try:
      size = param_counts.tensor_bytes(shapes, recipes.get(name).sampler)
    except ValueError as error:
      if name == recipe:
        raise files.CheckpointError(
            f'{where} and recipe {name}: {error}'
        ) from error
      yield row | {'reason': str(error)}
      continue
    yield row | {
        'bytes': size,
        'share_of_bf16': size / bf16,
        'bits_per_parameter': 8 * size / counts.total,
    }


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
  """Answers a prompt and measures loading, memory and speed."""

  model: pathlib.Path  # a Hugging Face folder
  prompt: str = 'What is 7 + 5?'
  recipe: str = 'bf16'  # its sampler runs the model
  dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # of activations
  max_new_tokens: int = 64
  temperature: float = 0.0  # 0 is greedy
  completions: int = 1  # of the same prompt, side by side
  seed: int = 0
  chat: bool = True  # render the prompt by the chat template
  output: pathlib.Path | None = None  # a file for the row, as JSON

  def __post_init__(self):
    recipes.get(self.recipe)
    if self.completions < 1:
      raise ValueError(f'completions {self.completions} is below 1.')


def generate(cfg: GenerateConfig) -> None:
  """Prints the completions, and a row of measurements.

  Raises:
    files.CheckpointError: the folder is not a whole checkpoint.
    ValueError: it is quantized otherwise than the recipe says.
  """
  watch = _Watch()
  config, params = hf.load(cfg.model, dtype=cfg.dtype)
  words = tokenizer.load(cfg.model)
  watch('load_seconds')
  precision_policy = recipes.get(cfg.recipe).sampler
  quantizer = policy.Quantizer(precision_policy)
  paths = transformer.param_paths(config)
  segments = policy.segments([precision_policy], paths)
  params = policy.quantize_params(
      quantizer, transformer.stack(params, segments), dtype=cfg.dtype
  )
  jax.block_until_ready(params)
  watch('quantize_seconds')
  text = cfg.prompt
  if cfg.chat:
    message = {'role': 'user', 'content': cfg.prompt}
    text = tokenizer.render_chat(words, [message])
  prompt = tokenizer.encode(words, text)
  prompts, lengths = sampler.pad_prompts([prompt] * cfg.completions)
  settings = sampler.SampleConfig(
      cfg.max_new_tokens, words.eos_ids, temperature=cfg.temperature
  )
  key = jax.random.key(cfg.seed)
  complete = lambda: jax.block_until_ready(
      sampler.generate(
          config, params, quantizer, prompts, lengths, key, settings
      )
  )
  complete()
  watch('compile_and_generate_seconds')
  completions = complete()
  seconds = watch('generate_seconds')
  mask = np.asarray(completions.mask)
  for tokens, row_mask in zip(
      np.asarray(completions.tokens), mask, strict=True
  ):
    print(tokenizer.decode(words, tokens[row_mask].tolist()))
  row = {
      'model': cfg.model.name,
      'recipe': cfg.recipe,
      'dtype': cfg.dtype,
      'prompt_tokens': len(prompt),
      'tokens': int(mask.sum()),
      'tokens_per_second': int(mask.sum()) / seconds,
      **watch.seconds,
      'param_bytes': qtensor.nbytes(params),
      # In KiB on Linux, in bytes on macOS.
      'peak_memory': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
  }
  line = json.dumps(row) + '\n'
  _write(cfg.output, line)
  print(line, end='')


@dataclasses.dataclass(frozen=True)
class ReferenceConfig:
  """Compares the logits of a dense model with float64."""

  model: pathlib.Path  # a Hugging Face folder, not quantized
  prompt: str = 'What is 7 + 5?'
  output: pathlib.Path | None = None  # a file for the rows, as JSON lines


def compare_with_float64(cfg: ReferenceConfig) -> None:
  """Prints a row for activations in float32, and one for bfloat16.

  Raises:
    files.CheckpointError: the folder is not a whole checkpoint.
    ValueError: the model has experts.
  """
  words = tokenizer.load(cfg.model)
  tokens = np.array(tokenizer.encode(words, cfg.prompt), np.int32)
  bf16 = policy.Quantizer(policy.BF16)
  want, lines = None, ''
  for dtype in ('float32', 'bfloat16'):
    config, params = hf.load(cfg.model, dtype=dtype)
    if want is None:
      want = reference.logits(config, params, tokens)
    stacked = transformer.stack(
        policy.dequantize_params(params), (config.num_layers,)
    )
    hidden = transformer.forward(
        config, stacked, jnp.asarray(tokens[None]), bf16
    )
    got = np.asarray(transformer.logits(stacked, hidden))[0]
    row = {
        'model': cfg.model.name,
        'dtype': dtype,
        'tokens': len(tokens),
        'largest_logit': float(np.abs(want).max()),
        'max_abs_difference': float(np.abs(got - want).max()),
        'argmax_equal': float(np.mean(got.argmax(-1) == want.argmax(-1))),
        'mean_kl': float(np.mean(_kl(want, got))),
    }
    lines += json.dumps(row) + '\n'
  _write(cfg.output, lines)
  print(lines, end='')


def _kl(want, got):
  """Returns KL(want || got) of softmax distributions, in nats, per row."""
  log_p, log_q = (
      x - np.logaddexp.reduce(x.astype(np.float64), axis=-1, keepdims=True)
      for x in (want, got)
  )
  return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)


class _Watch:
  """Times one step after another."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._last = time.perf_counter()

  def __call__(self, name: str) -> float:
    now = time.perf_counter()
    self.seconds[name], self._last = now - self._last, now
    return self.seconds[name]


def main(args: Sequence[str] | None = None) -> None:
  """Runs the command that the command line asks for.

  Args:
    args: command line; by default that of the process.
  """
  cfg = tyro.extras.subcommand_cli_from_dict(
      {name: flags for name, (flags, _) in COMMANDS.items()},
      prog='python -m experiments.eval',
      description=__doc__,
      args=args,
      use_underscores=True,
  )
  commands = dict(COMMANDS.values())
  try:
    commands[type(cfg)](cfg)
  except (ValueError, OSError) as error:
    raise SystemExit(str(error)) from error


def _write(path, lines):
  if path is not None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, lines)


def _read_config(path):
  folder, name = path.parent, path.name
  if path.is_dir():
    folder, name = path, 'config.json'
  return files.read_json(folder, name)


def _report(rows):
  """Returns the rows as text."""
  counted = [row for row in rows if row['kind'] in ('class', 'total')]
  table = [('class', 'parameters', 'share', 'active per token')]
  for row in counted:
    number, active = f'{row["parameters"]:,}', f'{row["active"]:,}'
    table.append((row['name'], number, f'{row["share"]:.3%}', active))
  text = run.aligned(table)
  left_out = [row['name'] for row in rows if row['kind'] == 'not_counted']
  if left_out:
    text += f'\nNot counted (multi-token prediction): {", ".join(left_out)}\n'

  table = [('sampler', 'bytes', 'GB', 'of bf16', 'bits a parameter')]
  for row in rows:
    if row['kind'] != 'bytes':
      continue
    if 'reason' in row:
      table.append((row['name'], '-', '-', '-', '-'))
      continue
    size = row['bytes']
    share, bits = row['share_of_bf16'], row['bits_per_parameter']
    sizes = f'{size:,}', f'{size / 1e9:.3f}'
    table.append((row['name'], *sizes, f'{share:.2%}', f'{bits:.3f}'))
  text += f'\n{run.aligned(table)}'
  for row in rows:
    if 'reason' in row:
      text += f'{row["name"]}: {row["reason"]}\n'
  return text


# Flags and function of every command.
COMMANDS: Mapping[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    'params': (ParamsConfig, params),
    'generate': (GenerateConfig, generate),
    'reference': (ReferenceConfig, compare_with_float64),
}


if __name__ == '__main__':
  main()
