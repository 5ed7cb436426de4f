"""Guarded access to the files of a checkpoint folder.

A checkpoint comes from somewhere else. So a name in it never leads out of its
folder, a text has a size limit, and JSON means one thing only. What is written
appears under its name when it is whole, or not at all.
"""

from collections.abc import Generator, Mapping
import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
import secrets
import stat
from typing import Any, BinaryIO

MANIFEST = 'nvfp4_jax_manifest.json'

# The tokenizer.json of a large vocabulary has 11 MB.
_MAX_TEXT_BYTES = 64 << 20
_PARTIAL = '.partial'


class CheckpointError(ValueError):
  """What is on disk is not a whole checkpoint of the kind asked for."""


def resolve(folder: pathlib.Path, name: str) -> pathlib.Path:
  """Returns `folder / name`, a regular file that lies in the folder.

  Args:
    folder: the checkpoint.
    name: one path component. A symbolic link may stand there if its target
      lies in the folder too.

  Raises:
    CheckpointError: the name is not a plain file name, nothing is there, it
      leads out of the folder, or it is no regular file.
  """
  path = _join(folder, name)
  try:
    real = os.path.realpath(path, strict=True)
    home = os.path.realpath(folder, strict=True)
    mode = os.stat(real).st_mode
  except OSError as error:
    reason = (error.strerror or 'cannot be read').lower()
    raise CheckpointError(f'{name!r} in {folder}: {reason}.') from error
  if not pathlib.Path(real).is_relative_to(home):
    raise CheckpointError(
        f'{name!r} leads out of {folder}. If its links are to be trusted, as in'
        ' a download cache, copy the folder with links followed (cp -rL).'
    )
  if not stat.S_ISREG(mode):
    raise CheckpointError(f'{name!r} in {folder} is not a regular file.')
  return path


def exists(folder: pathlib.Path, name: str) -> bool:
  """Returns whether `resolve` finds the file; False if nothing is there.

  Raises:
    CheckpointError: something is there that `resolve` refuses. To take it for
      missing would hide it.
  """
  if not os.path.lexists(_join(folder, name)):
    return False
  resolve(folder, name)
  return True


def read_text(
    folder: pathlib.Path, name: str, max_bytes: int = _MAX_TEXT_BYTES
) -> str:
  """Returns a UTF-8 file of the folder, its line ends as they are.

  Raises:
    CheckpointError: `resolve` refuses it, it has more than `max_bytes` or it is
      not UTF-8.
  """
  with resolve(folder, name).open('rb') as file:
    size = os.fstat(file.fileno()).st_size
    data = file.read(min(size, max_bytes) + 1)
  if len(data) > max_bytes:
    raise CheckpointError(
        f'{name!r} in {folder} has more than {max_bytes} bytes.'
    )
  try:
    return data.decode()
  except UnicodeDecodeError as error:
    raise CheckpointError(f'{name!r} in {folder} is not UTF-8.') from error


def read_json(
    folder: pathlib.Path, name: str, max_bytes: int = _MAX_TEXT_BYTES
) -> dict[str, Any]:
  """Returns a JSON file of the folder, read as by `parse_json`.

  Raises:
    CheckpointError: `read_text` or `parse_json` refuses it.
  """
  text = read_text(folder, name, max_bytes)
  return parse_json(text, f'{name!r} in {folder}')


def parse_json(text: str, where: str) -> dict[str, Any]:
  """Returns a JSON object that every reader takes alike.

  Args:
    text: the JSON.
    where: what the error message calls it.

  Raises:
    CheckpointError: it is not an object, is nested too deep for the parser, or
      holds a duplicate key, a number that is not finite, or half a surrogate
      pair.
  """
  try:
    value = json.loads(
        text,
        object_pairs_hook=_unique,
        parse_constant=_finite,
        parse_float=_finite,
        parse_int=_integer,
    )
    if re.search(r'\\u[dD]', text):
      json.dumps(value, ensure_ascii=False).encode()  # Halves have no UTF-8.
  except (ValueError, RecursionError) as error:
    raise CheckpointError(f'{where} is not sound JSON: {error}') from error
  if not isinstance(value, dict):
    raise CheckpointError(f'{where} is not a JSON object.')
  return value


@contextlib.contextmanager
def open_atomically(path: pathlib.Path) -> Generator[BinaryIO, None, None]:
  """Yields a file that takes its name when the block ends without exception.

  Until then, and after an exception, what was at `path` stays. A killed process
  leaves `.<name>.<random>.partial` behind, which nothing reads.

  Args:
    path: the file; its folder must be there. A link is replaced, not followed.
  """
  partial = path.with_name(f'.{path.name}.{secrets.token_hex(4)}{_PARTIAL}')
  try:
    with partial.open('xb') as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise
  sync_folder(path.parent)


def write_atomically(path: pathlib.Path, data: bytes | str) -> None:
  """Writes a file, text as UTF-8, as `open_atomically` does."""
  with open_atomically(path) as file:
    file.write(data.encode() if isinstance(data, str) else data)


def sync_folder(folder):
  """Makes a rename in the folder outlive a power failure."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def sha256(path: pathlib.Path) -> str:
  """Returns the SHA-256 of a file in hexadecimal."""
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def write_manifest(
    folder: pathlib.Path,
    record: Mapping[str, Any],
    *,
    hashes: Mapping[str, str] | None = None,
) -> None:
  """Writes the sizes and hashes of the folder's files, and a record.

  To be called last: the manifest vouches for all other regular files that lie
  directly in the folder then, but for what `open_atomically` left behind.

  Args:
    folder: the checkpoint.
    record: JSON values; `files` is taken.
    hashes: SHA-256 of files by name, where known, to spare reading them.

  Raises:
    CheckpointError: a file is a link out of the folder.
    ValueError: the record has `files`, or a hash has no file.
  """
  if 'files' in record:
    raise ValueError("The record has a field 'files', which the manifest adds.")
  hashes = dict(hashes or {})
  listed = {}
  for name in _names(folder):
    path = resolve(folder, name)
    digest = hashes.pop(name, None) or sha256(path)
    listed[name] = {'bytes': path.stat().st_size, 'sha256': digest}
  if hashes:
    raise ValueError(f'No file in {folder} for the hashes of {sorted(hashes)}.')
  text = json.dumps({**record, 'files': listed}, indent=2, allow_nan=False)
  write_atomically(folder / MANIFEST, f'{text}\n')


def check_manifest(folder: pathlib.Path) -> dict[str, Any] | None:
  """Returns the manifest's record if every listed file is as it was written.

  Files that are not listed are not looked at.

  Returns:
    What `write_manifest` was given, or None if there is no manifest.

  Raises:
    CheckpointError: a listed file is missing or differs, or the manifest is
      not one.
  """
  if not exists(folder, MANIFEST):
    return None
  record = read_json(folder, MANIFEST)
  listed = record.pop('files', None)
  if not isinstance(listed, dict):
    raise CheckpointError(f'{MANIFEST!r} in {folder} lists no files.')
  for name, entry in listed.items():
    if not isinstance(entry, dict) or set(entry) != {'bytes', 'sha256'}:
      raise CheckpointError(f'{MANIFEST!r} in {folder} lists {name!r} wrongly.')
    path = resolve(folder, name)
    size = path.stat().st_size
    if size != entry['bytes']:
      raise CheckpointError(
          f'{name!r} in {folder} has {size} bytes, not {entry["bytes"]} as'
          ' written.'
      )
    if sha256(path) != entry['sha256']:
      raise CheckpointError(
          f'{name!r} in {folder} has another SHA-256 than when written.'
      )
  return record


def _join(folder, name):
  """Returns `folder / name` for a name that is one path component."""
  # A backslash separates on other systems; NUL ends a name in system calls.
  if name in ('', '.', '..') or re.search(r'[/\\\0]', name):
    raise CheckpointError(f'{name!r} is not the name of a file of {folder}.')
  try:
    name.encode()
  except UnicodeEncodeError as error:
    raise CheckpointError(f'{name!r} has no UTF-8 form.') from error
  return folder / name


def _names(folder):
  """Returns what the manifest lists, sorted."""
  return sorted(
      path.name
      for path in folder.iterdir()
      if path.is_file()
      and path.name != MANIFEST
      and not (path.name.startswith('.') and path.name.endswith(_PARTIAL))
  )


def _unique(pairs):
  result = dict(pairs)
  if len(result) != len(pairs):
    seen = set()
    twice = next(k for k, _ in pairs if k in seen or seen.add(k))
    raise ValueError(f'{twice!r} stands twice in one object.')
  return result


def _finite(digits):
  value = float(digits)  # 1e999 is an infinity too.
  if not math.isfinite(value):
    raise ValueError(f'{digits} is not a finite number.')
  return value


def _integer(digits):
  # Other parsers take -0 for a float, which is no size and no offset.
  return -0.0 if digits == '-0' else int(digits)
