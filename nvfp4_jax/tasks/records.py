"""Files of problems: read line by line, repeated problems dropped, split.

Memory grows with the number of different problems, not with that of lines:
dapo-math-17k has 1.79 million lines for 17,917 problems.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import hashlib
import importlib
import json
import pathlib
from typing import Any

import numpy as np

from nvfp4_jax.tasks import text

# The longest problems have some 10 kB.
_MAX_LINE_BYTES = 16 << 20

type Row = Mapping[str, Any]
type Parse = Callable[[Row], tuple[tuple[text.Message, ...], str]]


class DataError(ValueError):
  """A file of problems is not as its format says; names file and line."""


@dataclasses.dataclass(frozen=True)
class Counts:
  """What was in a file.

  Attributes:
    rows: lines but for empty ones, or rows of a parquet file.
      problems: different ones, by their normalized prompts.
    duplicates: rows whose problem had come before, with the same answer.
    conflicts: rows whose problem had come before with another answer. The first
      answer is kept.
  """

  rows: int
  problems: int
  duplicates: int
  conflicts: int


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
  """The problems of a file.

  Attributes:
    path: the file.
    train: problems in the file's order.
    held_out: likewise. A problem's text alone decides where it belongs.
    fingerprint: SHA-256 of the file, in hexadecimal.
    counts: of rows.
  """

  path: pathlib.Path
  train: tuple[text.TextProblem, ...]
  held_out: tuple[text.TextProblem, ...]
  fingerprint: str
  counts: Counts


@dataclasses.dataclass(frozen=True, eq=False)
class FileTask:
  """A task of `text.TextTask` whose problems come from a file.

  Training problems are shuffled anew in every epoch; held-out ones keep the
  file's order.

  Attributes:
    name: of the task.
    table: the problems.
    seed: of the shuffles.
    score: returns the reward of a completion. `reward` does the same, but a
      `rewards.Pool` that is given `score` need not copy the table.
  """

  name: str
  table: Table
  seed: int
  score: text.Reward

  @property
  def fingerprint(self) -> str:
    """SHA-256 of the file."""
    return self.table.fingerprint

  def size(self, split: text.Split) -> int:
    """Returns the number of problems of a split; may be 0."""
    text.check_position(split, 0)
    return len(self._problems(split))

  def problem(self, split: text.Split, index: int) -> text.TextProblem:
    """Returns the index-th problem of a split, epoch after epoch.

    Raises:
      DataError: the split is empty.
    """
    text.check_position(split, index)
    problems = self._problems(split)
    if not problems:
      raise DataError(f'{self.table.path} has no problems for {split!r}.')
    epoch, place = divmod(index, len(problems))
    if split == 'train':
      place = int(_order(self.seed, epoch, len(problems))[place])
    return problems[place]

  def reward(self, problem: text.TextProblem, completion: str) -> float:
    """Returns the reward of a completion."""
    return self.score(problem, completion)

  def _problems(self, split):
    return self.table.train if split == 'train' else self.table.held_out


def read(path: pathlib.Path, name: str, parse: Parse) -> Table:
  """Returns the problems of a file.

  Args:
    path: JSON lines in UTF-8, or parquet if it is called so and pyarrow is
      installed.
    name: of the task, for uids.
    parse: returns the chat and the answer of a row; a ValueError from it says
      what is wrong with the row.

  Raises:
    DataError: the file cannot be read, a line is malformed, or there is none.
  """
  sha = hashlib.sha256()
  if path.suffix == '.parquet':
    rows = _parquet_rows(path, sha)
  else:
    rows = _json_rows(path, sha)
  problems: dict[str, text.TextProblem] = {}
  count = duplicates = conflicts = 0
  try:
    for number, row in rows:
      count += 1
      problem = _problem(path, number, name, row, parse)
      first = problems.setdefault(problem.uid, problem)
      if first is not problem:
        duplicates += first.answer == problem.answer
        conflicts += first.answer != problem.answer
  except OSError as error:
    raise DataError(f'{path}: {error.strerror or error}.') from error
  if not problems:
    raise DataError(f'{path} is empty.')
  split = {True: [], False: []}
  for problem in problems.values():
    split[text.is_held_out(problem.uid)].append(problem)
  return Table(
      path=path,
      train=tuple(split[False]),
      held_out=tuple(split[True]),
      fingerprint=sha.hexdigest(),
      counts=Counts(count, len(problems), duplicates, conflicts),
  )


def field(row: Row, name: str) -> str:
  """Returns a text of a row.

  Args:
    row: a row of a file.
    name: a field, or fields of nested objects with dots between.

  Raises:
    ValueError: it is missing, is no text, or only spaces.
  """
  value: Any = row
  for i, part in enumerate(name.split('.')):
    if not isinstance(value, dict):
      outer = '.'.join(name.split('.')[:i])
      raise ValueError(f'{outer!r} is not an object but {_short(value)}')
    if part not in value:
      raise ValueError(f'the field {name!r} is missing')
    value = value[part]
  if not isinstance(value, str):
    raise ValueError(f'{name!r} is not a text but {_short(value)}')
  if not value.strip():
    raise ValueError(f'{name!r} is empty')
  return value


def _problem(path, number, name, row, parse):
  try:
    if not isinstance(row, dict):
      raise ValueError(f'it is not an object but {_short(row)}')
    messages, answer = parse(row)
    answer.encode()  # Raises UnicodeEncodeError for half a surrogate pair.
  except ValueError as error:
    raise DataError(f'{path}:{number}: {error}.') from error
  # Another system prompt does not make another problem.
  asked = [
      f'{message.role}:{text.normalize(message.content)}'
      for message in messages
      if message.role != 'system'
  ]
  uid = f'{name}/{text.digest(*asked)[:16].hex()}'
  return text.TextProblem(messages, answer, uid)


def _json_rows(path, sha) -> Iterator[tuple[int, Any]]:
  """Yields (line number, value) and adds the file to the hash."""
  with path.open('rb') as file:
    number = 0
    while line := file.readline(_MAX_LINE_BYTES + 1):
      number += 1
      sha.update(line)
      if len(line) > _MAX_LINE_BYTES:
        raise DataError(
            f'{path}:{number}: has more than {_MAX_LINE_BYTES} bytes.'
        )
      if number == 1:
        line = line.removeprefix(b'\xef\xbb\xbf')  # A byte order mark.
      if not line.strip():
        continue
      try:
        value = json.loads(line.decode())
      except UnicodeDecodeError as error:
        raise DataError(f'{path}:{number}: it is not UTF-8.') from error
      except (ValueError, RecursionError) as error:
        reason = f'it is not JSON: {error}'
        raise DataError(f'{path}:{number}: {reason}.') from error
      yield number, value


def _parquet_rows(path, sha) -> Iterator[tuple[int, Any]]:
  """Yields (row number, row) and adds the file to the hash."""
  try:
    parquet: Any = importlib.import_module('pyarrow.parquet')
  except ImportError as error:
    raise DataError(
        f'{path}: reading parquet needs pyarrow, which is not installed.'
        ' Convert the file to JSON lines (.jsonl), or install pyarrow.'
    ) from error
  with path.open('rb') as file:
    while chunk := file.read(1 << 20):
      sha.update(chunk)
  number = 0
  try:
    with parquet.ParquetFile(path) as table:
      for batch in table.iter_batches():
        for row in batch.to_pylist():
          number += 1
          yield number, row
  except ValueError as error:  # Of these is pyarrow's ArrowInvalid.
    raise DataError(f'{path}: it is not parquet: {error}') from error


@functools.lru_cache(maxsize=8)
def _order(seed, epoch, size):
  """Returns a permutation; kept, since a run asks for it problem by problem."""
  drawn = int.from_bytes(text.digest('order', seed, epoch))
  return np.random.default_rng(drawn).permutation(size)


def _short(value):
  shown = repr(value)
  return shown if len(shown) <= 80 else f'{shown[:80]}...'
