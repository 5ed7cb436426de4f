"""Times our kernels beside XLA's and torch's, in one run.

    python -m experiments.kernel_bench smoke             # seconds, on a CPU
    python -m experiments.kernel_bench h200              # minutes; one H200
    python -m experiments.kernel_bench h200 --sweep=true --workdir=runs/sweep

For each workload, all candidates are compiled, compared with the reference and
then timed in turn. A time is the slope between few and many calls that are in
flight together, so that neither launch nor synchronization counts as long as
the host is faster than the device; operands rotate through more memory than a
cache holds. Rows say the median, the least and the largest of the repeats, the
share of the copy that was measured in the same run, and how many bytes or
values differ from the reference. `host_us` is what one call costs the host:
where it is near the time, the host is the limit. `device_us` is how long the
device's kernels of one call ran, as the profiler saw them, gaps not counted.

`rows` workloads time nothing: they count the values of 16 rows whose bits are
others where they are computed 1, 16 or 512 at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import importlib
import math
import os
import pathlib
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import run
from nvfp4_jax import kernels
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

_TOKEN = quantization.QuantSpec('nvfp4', 'token')
_WEIGHTS = quantization.QuantSpec('nvfp4', four_over_six='mse')
_QUANTIZERS = {
    'quantize nvfp4 per token': _TOKEN,
    'quantize nvfp4 4/6 per token': quantization.QuantSpec(
        'nvfp4', 'token', four_over_six='mse'
    ),
    'quantize nvfp4 4/6 per tensor': _WEIGHTS,
    'quantize nvfp4 2D': quantization.QuantSpec('nvfp4', block_2d=True),
    'quantize mxfp8': quantization.QuantSpec('mxfp8'),
}
_COLUMNS = (
    *('us', 'min_us', 'max_us', 'host_us', 'device_us'),
    *('gb_s', 'of_copy', 'device_gb_s', 'tflop_s', 'melem_s'),
    *('mparam_s', 'temp_bytes', 'residual_bytes'),
)
_ROW_TILES = (2, 1), (4, 1), (8, 1), (16, 1), (4, 2), (8, 2), (8, 4)
_TILES = [(4, 1024, 4), (4, 512, 4), (8, 512, 4), (2, 1024, 4), (8, 1024, 8)]
_FEW_TILES = [
    (16, features, warps, stages)
    for features, warps in ((64, 4), (128, 4), (128, 8))
    for stages in (2, 3, 4, 6, 8)
]
_MANY_TILES = [
    (128, 128, 8, 3),
    (128, 128, 4, 4),
    (128, 256, 8, 3),
    (128, 256, 8, 4),
    (256, 128, 8, 3),
    (256, 128, 8, 4),
    (64, 256, 8, 4),
]


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/kernel_bench')
  implementations: tuple[str, ...] = ('triton', 'reference')
  torch: bool = True  # as a peer, if it can be imported
  sweep: bool = False  # also time other tiles of our kernels
  only: str = ''  # workloads with this in their name
  quantized_shape: tuple[int, int] = (8192, 4096)
  linear: tuple[int, int, int] = (2048, 8192, 2048)  # M, N, K
  decode: tuple[int, int] = (14336, 4096)  # N, K
  decode_rows: tuple[int, ...] = (1, 16)
  rotated_bytes: int = 512 << 20
  calls: int = 4  # of all rotated operands, at most, in flight
  repeats: int = 9


PRESETS = {
    'smoke': (
        'The reference on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/kernel_bench_smoke'),
            implementations=('reference',),
            torch=False,
            quantized_shape=(64, 128),
            linear=(32, 64, 128),
            decode=(64, 128),
            rotated_bytes=1 << 16,
            calls=2,
            repeats=3,
        ),
    ),
    'h200': ('The workloads of one H200.', Config()),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to do a workload.

  Attributes:
    name: who does it.
    start: calls it once for each rotated operand; does not wait.
    wait: waits until what the last `start` returned is there.
    result: what it makes of the first operand, as numpy arrays; None for peers.
    facts: what its row says besides, that is not a time.
  """

  name: str
  start: Callable[[], object]
  wait: Callable[[object], object]
  result: list[np.ndarray] | None = None
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Workload:
  """What is computed, and by whom.

  Attributes:
    name: as in the table.
    bytes: read and written by one call at least.
    flops: of one call; 0 where bytes count.
    operands: how many are rotated.
    candidates: yields them, each compiled; or an error for one that cannot run.
    counts: what else one call does, by the name of the rate in a row.
  """

  name: str
  bytes: float
  flops: float
  operands: int
  candidates: Callable[[], Iterator[Candidate | tuple[str, Exception]]]
  counts: Mapping[str, float] = dataclasses.field(default_factory=dict)


def main(cfg: Config, log: run.Log) -> None:
  """Logs one row for each candidate of each workload, and prints a table."""
  workloads = (*_quantizers(cfg), *_matmuls(cfg))
  measure(cfg, log, workloads, lambda: _rows_of_few_and_many(cfg))


def measure(
    cfg: Config,
    log: run.Log,
    workloads: Iterable[Workload],
    rows_of_bits: Callable[[], Iterable[dict[str, Any]]] = tuple,
    labels: Callable[[], Mapping[str, Any]] = dict,
) -> None:
  """Times a copy and the workloads, logs their rows and prints a table.

  Args:
    cfg: flags.
    log: for the rows.
    workloads: what is timed.
    rows_of_bits: yields more rows, of the `rows` workloads.
    labels: returns what each row also says, when it is written.
  """
  rows = record(log, _rows(cfg, workloads, rows_of_bits), labels)
  print(table(rows, _COLUMNS))


def record(
    log: run.Log,
    rows: Iterable[Mapping[str, Any]],
    labels: Callable[[], Mapping[str, Any]] = dict,
) -> list[dict[str, Any]]:
  """Logs and prints each row as it comes, and returns all of them.

  Args:
    log: for the rows; what it held is dropped.
    rows: in their order, which becomes `step`.
    labels: returns what each row also says, when it is written.
  """
  log.rewind(0)
  written: list[dict[str, Any]] = []
  for row in rows:
    written.append({'step': len(written), **row, **labels()})
    log(written[-1])
    print(written[-1], flush=True)
  return written


def _rows(cfg, workloads, rows_of_bits):
  """Yields the rows of a machine, a copy and the workloads."""
  yield machine(_torch(cfg))
  copy = None
  for workload in (_copy(cfg), *workloads):
    if cfg.only in workload.name or workload.name == 'copy':
      timed = list(_time(cfg, workload, copy))
      if workload.name == 'copy':
        copy = max(
            (row['gb_s'] for row in timed if 'gb_s' in row), default=None
        )
      yield from timed
  if cfg.only in 'rows':
    yield from rows_of_bits()


def machine(torch: Any = None) -> dict[str, Any]:
  """Returns the first row of a run, which says where it is; torch if used."""
  device = jax.devices()[0]
  return {
      'workload': 'machine',
      'device': device.device_kind,
      'jax': jax.__version__,
      'torch': getattr(torch, '__version__', None),
      'load': os.getloadavg()[0],
  }


def _time(cfg, workload, copy) -> Iterator[dict[str, Any]]:
  """Yields the rows of a workload."""
  candidates = []
  for candidate in workload.candidates():
    if isinstance(candidate, Candidate):
      candidates.append(candidate)
    else:
      name, error = candidate
      text = f'{type(error).__name__}: {error}'[:300]
      yield {'workload': workload.name, 'candidate': name, 'error': text}
  times = {candidate.name: [] for candidate in candidates}
  host = {candidate.name: [] for candidate in candidates}
  for candidate in candidates:
    candidate.wait(candidate.start())
  on_device = {c.name: device_seconds(c) for c in candidates}
  for _ in range(cfg.repeats):
    for candidate in candidates:
      seconds = {}
      for calls in (1, 1 + cfg.calls):
        begin = time.perf_counter()
        last = candidate.start()
        for _ in range(calls - 1):
          last = candidate.start()
        started = time.perf_counter() - begin
        candidate.wait(last)
        seconds[calls] = time.perf_counter() - begin
      slope = (seconds[1 + cfg.calls] - seconds[1]) / cfg.calls
      times[candidate.name].append(slope / workload.operands)
      host[candidate.name].append(started / (1 + cfg.calls) / workload.operands)
  reference = next(
      (c.result for c in candidates if c.name == 'reference'), None
  )
  for candidate in candidates:
    seconds = times[candidate.name]
    median = float(np.median(seconds))
    row = {
        'workload': workload.name,
        'candidate': candidate.name,
        'us': 1e6 * median,
        'min_us': 1e6 * min(seconds),
        'max_us': 1e6 * max(seconds),
        'host_us': 1e6 * float(np.median(host[candidate.name])),
    }
    busy = on_device[candidate.name]
    if busy:
      row['device_us'] = 1e6 * busy / workload.operands
      if workload.bytes:
        row['device_gb_s'] = 1e-9 * workload.bytes * workload.operands / busy
    # A slope of a few microseconds may come out negative.
    rate = 1 / max(median, 1e-9)
    row['gb_s'] = 1e-9 * workload.bytes * rate
    if copy:
      row['of_copy'] = row['gb_s'] / copy
    if workload.flops:
      row['tflop_s'] = 1e-12 * workload.flops * rate
    row |= {name: count * rate for name, count in workload.counts.items()}
    row |= candidate.facts
    if candidate.result is not None and reference is not None:
      row |= _differences(candidate.result, reference)
    yield row


def device_seconds(candidate: Candidate) -> float:
  """Returns how long the kernels of one `start` ran; 0 without a GPU."""
  if jax.default_backend() != 'gpu':
    return 0.0
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      candidate.wait(candidate.start())
    (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
    profile = jax.profiler.ProfileData.from_file(str(path))
  return 1e-9 * sum(
      event.duration_ns
      for plane in profile.planes
      if plane.name.startswith('/device:GPU')
      for line in plane.lines
      if line.name.startswith('Stream')
      for event in line.events
  )


def _differences(result, reference):
  """Returns how many bytes or values differ, and by how much."""
  pairs = list(zip(result, reference, strict=True))
  row = {
      'different': sum(int(np.sum(a != b)) for a, b in pairs),
      'compared': sum(a.size for a, _ in pairs),
  }
  if pairs[0][0].dtype == np.float32 and len(pairs) == 1:
    (a, b), *_ = pairs
    row['error'] = float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
  return row


def jax_candidate(
    name: str, fn: Callable[[Any], Any], operands: list[Any]
) -> Candidate | tuple[str, Exception]:
  """Returns the candidate that calls `fn` of each operand in one program."""
  try:
    # An operand is an argument of its own: a slice of a stack would be copied.
    program = jax.jit(lambda *args: [fn(arg) for arg in args])
    program = program.lower(*operands).compile()
    first = program(*operands)[0]
    result = [_bits(leaf) for leaf in jax.tree.leaves(first)]
  except Exception as error:
    return name, error
  start = functools.partial(program, *operands)
  return Candidate(name, start, jax.block_until_ready, result)


def _bits(array):
  """Returns float32 values, and what is narrower as bytes."""
  array = np.asarray(array)
  return array if array.dtype == np.float32 else array.view(np.uint8)


def _torch_candidate(torch, name, fn, operands):
  """Returns the candidate that replays `fn` of each operand as a CUDA graph."""
  try:
    for operand in operands:
      fn(operand)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
      for operand in operands:
        fn(operand)
  except Exception as error:
    return name, error
  return Candidate(name, graph.replay, lambda _: torch.cuda.synchronize())


def _torch(cfg) -> Any:
  """Returns torch, or None where it or its device is missing."""
  if not cfg.torch:
    return None
  if jax.default_backend() != 'gpu':
    return None
  try:
    torch = importlib.import_module('torch')
  except ImportError:
    return None
  return torch if torch.cuda.is_available() else None


def copies(cfg: Config, nbytes: float) -> int:
  """Returns how many operands are rotated, each of so many bytes."""
  return max(2, math.ceil(cfg.rotated_bytes / nbytes))


def _random(seed, shape):
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _torch_random(torch, shape):
  return torch.randn(*shape, dtype=torch.bfloat16, device='cuda')


def _copy(cfg):
  """Returns the ceiling: reads and writes a large array."""
  shape = cfg.quantized_shape
  nbytes = 2 * math.prod(shape)
  count = copies(cfg, nbytes)

  def candidates():
    xs = [_random(i, shape) for i in range(count)]
    yield jax_candidate('xla', jnp.negative, xs)
    torch = _torch(cfg)
    if torch:
      make = lambda: _torch_random(torch, shape)
      xs = [(make(), make()) for _ in range(count)]
      copy = lambda pair: pair[1].copy_(pair[0])
      yield _torch_candidate(torch, 'torch', copy, xs)

  return Workload('copy', 2 * nbytes, 0.0, count, candidates)


def _quantizers(cfg) -> Iterator[Workload]:
  m, k = cfg.quantized_shape
  for name, spec in _QUANTIZERS.items():
    count = copies(cfg, 2 * m * k)
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    out = jax.eval_shape(functools.partial(quantization.quantize, spec=spec), x)
    nbytes = 2.0 * m * k + qtensor.nbytes(out)
    candidates = functools.partial(_quantizer_candidates, cfg, spec, count)
    yield Workload(name, nbytes, 0.0, count, candidates)


def _quantizer_candidates(cfg, spec, count):
  m, k = cfg.quantized_shape
  xs = [_random(i, (m, k)) for i in range(count)]
  for name in cfg.implementations:
    fn = functools.partial(kernels.quantize, spec=spec, implementation=name)
    yield jax_candidate(name, fn, xs)
  if not cfg.sweep:
    return
  tiles = _TILES
  if spec.outer == 'token':
    columns = 1 << (k - 1).bit_length()
    tiles = [(rows, columns, warps) for warps, rows in _ROW_TILES]
  elif spec.block_2d:
    tiles = [(16, 128, 4), (16, 256, 4), (16, 512, 8), (32, 128, 4)]
  for tile in tiles:
    fn = functools.partial(
        kernels.quantize, spec=spec, implementation='triton', tile=tile
    )
    yield jax_candidate(f'triton {tile}', fn, xs)


def _matmuls(cfg) -> Iterator[Workload]:
  m, n, k = cfg.linear
  weights = _weight_bytes(n, k)
  nbytes = weights + _weight_bytes(m, k) + 4.0 * m * n
  count = copies(cfg, nbytes)
  candidates = functools.partial(_matmul_candidates, cfg, m, n, k, True, count)
  name = f'linear forward W4A4 {m} x {k} -> {n}'
  yield Workload(name, nbytes, 2.0 * m * n * k, count, candidates)
  n, k = cfg.decode
  weights = _weight_bytes(n, k)
  for m in cfg.decode_rows:
    nbytes = weights + 2.0 * m * k + 4.0 * m * n
    count = copies(cfg, nbytes)
    candidates = functools.partial(
        _matmul_candidates, cfg, m, n, k, False, count
    )
    name = f'decode linear W4A16 {m} x {k} -> {n}'
    yield Workload(name, nbytes, 0.0, count, candidates)
    nbytes = 2.0 * (n * k + m * k + m * n)
    count = copies(cfg, nbytes)
    candidates = functools.partial(_stack_candidates, cfg, m, n, k, count)
    name = f'decode linear bf16 in a stack {m} x {k} -> {n}'
    yield Workload(name, nbytes, 0.0, count, candidates)


def _weight_bytes(n, k):
  return n * k * (0.5 + 1 / 16)


def _matmul_candidates(cfg, m, n, k, quantized, count):
  quantize = jax.jit(quantization.quantize, static_argnames='spec')
  x = _random(0, (m, k))
  xq = quantize(x, spec=_TOKEN) if quantized else x
  wqs = [quantize(_random(i, (n, k)), spec=_WEIGHTS) for i in range(count)]
  for name in cfg.implementations:
    fn = functools.partial(kernels.scaled_matmul, xq, implementation=name)
    yield jax_candidate(name, fn, wqs)
  tiles = _MANY_TILES if m > 32 else _FEW_TILES
  for tile in tiles if cfg.sweep else ():
    fn = functools.partial(
        kernels.scaled_matmul, xq, implementation='triton', tile=tile
    )
    yield jax_candidate(f'triton {tile}', fn, wqs)
  del wqs
  ws = [_random(i, (n, k)) for i in range(count)]
  fn = functools.partial(kernels.matmul, x, implementation='reference')
  yield jax_candidate('xla bf16', fn, ws)
  del ws
  yield from _torch_matmul(cfg, m, n, k, count)


def _stack_candidates(cfg, m, n, k, count):
  """Yields matmuls with layers of one stack, in a loop over them."""
  x = _random(0, (m, k))
  stack = _random(1, (count, n, k))
  layers = [qtensor.Layer(stack, jnp.int32(i)) for i in range(count)]
  for name in cfg.implementations:
    fn = functools.partial(
        kernels.matmul, x, dtype=jnp.bfloat16, implementation=name
    )
    yield jax_candidate(name, fn, layers)
  del stack, layers
  yield from _torch_matmul(cfg, m, n, k, count)


def _torch_matmul(cfg, m, n, k, count):
  torch = _torch(cfg)
  if torch:
    given = _torch_random(torch, (m, k))
    ws = [_torch_random(torch, (n, k)) for _ in range(count)]
    yield _torch_candidate(torch, 'torch bf16', lambda w: given @ w.T, ws)


def torch_linear(
    cfg: Any, m: int, n: int, k: int, count: int
) -> Iterator[Candidate | tuple[str, Exception]]:
  """Yields torch's bfloat16 linear, forward and backward, if there is torch."""
  torch = _torch(cfg)
  if torch:
    x, dy = (_torch_random(torch, (m, c)) for c in (k, n))
    ws = [_torch_random(torch, (n, k)) for _ in range(count)]
    both = lambda w: (x @ w.T, dy @ w, dy.T @ x)
    yield _torch_candidate(torch, 'torch bf16', both, ws)


def _rows_of_few_and_many(cfg) -> Iterator[dict[str, Any]]:
  """Yields how many values depend on how many rows are computed together."""
  n, k = cfg.decode
  quantize = jax.jit(quantization.quantize, static_argnames='spec')
  wq = quantize(_random(1, (n, k)), spec=_WEIGHTS)
  # Outliers, so that float32 sums of exact products do round.
  x = _random(0, (512, k)) * jnp.where(jnp.arange(k) % 97 == 5, 300, 1)
  x = x.astype(jnp.bfloat16)
  for lhs, operand in (('A4', quantize(x, spec=_TOKEN)), ('A16', x)):
    for name in cfg.implementations:
      row = {'workload': f'rows W4{lhs} {k} -> {n}', 'candidate': name}
      multiply = jax.jit(
          functools.partial(kernels.scaled_matmul, implementation=name)
      )
      take = lambda a, b, q=operand: jax.tree.map(lambda leaf: leaf[a:b], q)
      try:
        many = np.asarray(multiply(operand, wq))[:16]
        few = np.asarray(multiply(take(0, 16), wq))
        each = [np.asarray(multiply(take(i, i + 1), wq)) for i in range(16)]
      except Exception as error:
        yield row | {'error': f'{type(error).__name__}: {error}'[:300]}
        continue
      different = int(np.sum(few != many)) + int(
          np.sum(few != np.stack(each)[:, 0])
      )
      yield row | {'different': different, 'compared': 2 * few.size}


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
  """Returns the rows as text, but for the first, and columns that they have."""
  columns = [name for name in columns if any(name in row for row in rows)]
  differ = 'different' if any('different' in row for row in rows) else ''
  lines: list[list[str]] = [['workload: candidate', *columns, differ]]
  for row in rows[1:]:
    cells = [
        f'{row[column]:.3g}' if column in row else '' for column in columns
    ]
    last = row.get('different', row.get('error', ''))
    name = f'{row["workload"]}: {row["candidate"]}'
    lines.append([name, *cells, str(last)[:60]])
  return run.aligned(lines)


if __name__ == '__main__':
  run.launch(main, PRESETS)
