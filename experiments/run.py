"""What every experiment shares: presets, flags, resume, and the log.

    python -m experiments.NAME PRESET [--flags]
    python -m experiments.NAME resume WORKDIR [--flags]

A run writes WORKDIR/config.json and one JSON object a line to
WORKDIR/metrics.jsonl. `resume` takes the run's own configuration; flags go on
top.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any, Protocol

import tyro

from nvfp4_jax import config
from nvfp4_jax import files
from nvfp4_jax import self_check

# XLA would choose matmuls by their time, in each program anew: Triton's by
# their tiles, cuBLAS's by algorithms, which divide K or do not. Sums would have
# an order of each program's and each run's own: learner and sampler would not
# have the same bits, nor would a run that is resumed.
GPU_FLAGS = ('--xla_gpu_enable_triton_gemm=false', '--xla_gpu_autotune_level=0')


class Experiment(Protocol):
  """A frozen dataclass of flags; every experiment has a `workdir`."""

  @property
  def workdir(self) -> pathlib.Path:
    """Where the run is written."""


class Log:
  """The rows of WORKDIR/metrics.jsonl, or of another file there.

  A row is written with one call and flushed; a line that a kill cut short is
  dropped when the file is opened again.
  """

  def __init__(self, workdir: pathlib.Path, name: str = 'metrics.jsonl'):
    workdir.mkdir(parents=True, exist_ok=True)
    self.path = workdir / name
    if self.path.exists() and not self.path.read_bytes().endswith(b'\n'):
      self._write(read_rows(self.path))

  def __call__(self, row: Mapping[str, Any]) -> None:
    """Appends one row."""
    with self.path.open('a') as file:
      file.write(json.dumps(row) + '\n')

  def rewind(self, step: int) -> None:
    """Drops the rows from `step` on, which are going to be written again."""
    kept = [row for row in read_rows(self.path) if row['step'] < step]
    self._write(kept)

  def _write(self, rows):
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    files.write_atomically(self.path, text)


class Progress:
  """One line that says how far a run is and how long it will take."""

  def __init__(self, name: str, total: int, done: int = 0):
    self._name, self._total, self._first = name, total, done
    self._start = self._last = time.monotonic()
    self._live = sys.stderr.isatty()

  def __call__(self, done: int, text: str) -> None:
    """Shows that `done` of `total` steps are finished."""
    now = time.monotonic()
    if not self._live and now - self._last < 5 and done < self._total:
      return
    self._last = now
    rate = (now - self._start) / max(done - self._first, 1)
    left = time.strftime('%M:%S', time.gmtime(rate * (self._total - done)))
    line = f'{self._name} {done}/{self._total}  {text}  left {left}'
    end = '\n' if done >= self._total or not self._live else '\r'
    print(line.ljust(79), end=end, file=sys.stderr, flush=True)


class StopRequest:
  """Notices SIGTERM, so that a run can end after the step that it is in.

  A second SIGTERM ends the process at once.

  Attributes:
    requested: whether the signal has come.
  """

  def __init__(self):
    self.requested = False
    self._previous = None

  def __enter__(self) -> 'StopRequest':
    # Python delivers signals to the main thread only.
    if threading.current_thread() is threading.main_thread():
      self._previous = signal.signal(signal.SIGTERM, self._notice)
    return self

  def __exit__(self, *exc_info: object) -> None:
    if self._previous is not None:
      signal.signal(signal.SIGTERM, self._previous)
      self._previous = None

  def _notice(self, number, frame):
    del frame
    if self.requested:
      signal.signal(number, signal.SIG_DFL)
      signal.raise_signal(number)
    self.requested = True
    print('SIGTERM: stopping after this step.', file=sys.stderr, flush=True)


@contextlib.contextmanager
def trackers(
    cfg: Any, first_step: int
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
  """Yields what hands a row to TensorBoard and Weights & Biases, as asked for.

  metrics.jsonl stays the record of a run: these are copies.

  Args:
    cfg: has `workdir`, `tensorboard` and `wandb`.
    first_step: rows from there on are written, perhaps again.
  """
  writer = tracker = None
  if cfg.tensorboard:
    writer = _optional('tensorboardX', '--tensorboard').SummaryWriter(
        str(cfg.workdir / 'tensorboard'), purge_step=first_step
    )
  if cfg.wandb:
    tracker = _optional('wandb', '--wandb').init(
        project=cfg.wandb,
        dir=str(cfg.workdir),
        config=config.to_json(cfg),
        name=str(cfg.workdir),
    )

  def track(row):
    values = {name: value for name, value in row.items() if name != 'step'}
    if writer is not None:
      for name, value in values.items():
        writer.add_scalar(name, value, row['step'])
      writer.flush()
    if tracker is not None:
      tracker.log(values, step=row['step'])

  try:
    yield track
  finally:
    if writer is not None:
      writer.close()
    if tracker is not None:
      tracker.finish()


def _optional(package, flag):
  """Returns a package that only a flag needs."""
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise SystemExit(f'{flag} needs: pip install {package}') from error


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the whole rows of a metrics.jsonl, [] if there is none."""
  if not path.exists():
    return []
  lines = path.read_text().split('\n')
  return [json.loads(line) for line in lines[:-1] if line]


def save_config(workdir: pathlib.Path, cfg: Any) -> None:
  """Writes WORKDIR/config.json."""
  workdir.mkdir(parents=True, exist_ok=True)
  text = json.dumps(config.to_json(cfg), indent=2) + '\n'
  files.write_atomically(workdir / 'config.json', text)


def aligned(table: Sequence[Sequence[str]]) -> str:
  """Returns the lines of a table, the first column to the left."""
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  lines = []
  for first, *rest in table:
    cells = [first.ljust(widths[0])]
    cells += [c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)]
    lines.append('  '.join(cells) + '\n')
  return ''.join(lines)


def launch[C: Experiment](
    main: Callable[[C, Log], None],
    presets: Mapping[str, tuple[str, C]],
    args: Sequence[str] | None = None,
) -> None:
  """Runs `main` with the configuration that the command line asks for.

  Before that, XLA is told `GPU_FLAGS`, unless XLA_FLAGS says otherwise, and the
  device is checked (`nvfp4_jax.self_check`).

  Args:
    main: takes the configuration and the log.
    presets: description and configuration by name.
    args: command line; by default that of the process.
  """
  args = list(sys.argv[1:] if args is None else args)
  if args[:1] == ['resume']:
    cfg = _resumed(next(iter(presets.values()))[1], args[1:])
  else:
    cfg = tyro.extras.overridable_config_cli(
        dict(presets), args=args, use_underscores=True
    )
    _refuse_other_run(cfg)
  _set_gpu_flags()
  self_check.check()
  save_config(cfg.workdir, cfg)
  main(cfg, Log(cfg.workdir))


def _set_gpu_flags():
  """Adds `GPU_FLAGS` to XLA_FLAGS; too late once a device has been used."""
  given = os.environ.get('XLA_FLAGS', '')
  for flag in GPU_FLAGS:
    if flag.split('=')[0] not in given:
      given = f'{given} {flag}'.strip()
  os.environ['XLA_FLAGS'] = given


def _resumed(example, args):
  if not args or args[0].startswith('-'):
    raise SystemExit('usage: resume WORKDIR [--flags]')
  path = pathlib.Path(args[0]) / 'config.json'
  if not path.exists():
    raise SystemExit(f'{path} does not exist: there is no run to resume.')
  try:
    saved = config.from_json(type(example), json.loads(path.read_text()))
  except ValueError as error:
    raise SystemExit(f'{path}: {error}') from error
  saved = dataclasses.replace(saved, workdir=path.parent)
  return tyro.cli(
      type(example), default=saved, args=args[1:], use_underscores=True
  )


def _refuse_other_run(cfg):
  """Keeps a run from being overwritten by one with other flags."""
  path = cfg.workdir / 'config.json'
  if path.exists() and json.loads(path.read_text()) != config.to_json(cfg):
    raise SystemExit(
        f'{cfg.workdir} holds a run with another configuration. Choose another'
        f' --workdir, or continue it with: resume {cfg.workdir}'
    )
