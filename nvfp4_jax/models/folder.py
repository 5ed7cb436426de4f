"""Writing a Hugging Face folder: shard by shard, whole or not at all.

A folder is built beside its destination, in `DESTINATION.partial`, and renamed
when it is whole. There, progress.json tells which shards are whole and what is
being made, so that a run that was killed goes on behind them if it is started
again with the same arguments.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from nvfp4_jax import files
from nvfp4_jax import safetensors

# What a folder holds besides its weights and configuration.
COMPANIONS = (
    'generation_config.json',
    'tokenizer.json',
    'tokenizer_config.json',
    'tokenizer.model',
    'special_tokens_map.json',
    'added_tokens.json',
    'vocab.json',
    'merges.txt',
    'chat_template.jinja',
)
_PROGRESS = 'progress.json'


def write(
    destination: pathlib.Path,
    shards: Sequence[Callable[[], Mapping[str, Any]]],
    documents: Mapping[str, Any],
    record: Mapping[str, Any],
    *,
    companions: pathlib.Path | None = None,
    identity: Any = None,
    progress: Callable[[int], None] | None = None,
) -> None:
  """Writes a folder.

  Args:
    destination: must not exist.
    shards: each returns its tensors by name, when it is asked to.
    documents: JSON objects by file name.
    record: JSON values for the manifest.
    companions: folder to copy the tokenizer's files from.
    identity: JSON values that, with `record`, tell what is made from all else.
      None for what cannot be made again, such as arrays in memory: then an
      unfinished folder is thrown away.
    progress: called with the number of shards that are written.

  Raises:
    FileExistsError: the destination is there.
    files.CheckpointError: something else is in the way.
  """
  if destination.exists():
    raise FileExistsError(f'{destination} exists.')
  partial = destination.with_name(destination.name + '.partial')
  making = {'record': dict(record), 'identity': identity, 'shards': len(shards)}
  done = _resume(partial, making)
  for number, tensors_of in enumerate(shards):
    name = _shard_name(number, len(shards))
    if name not in done:
      done[name] = _write_shard(partial / name, tensors_of())
      text = json.dumps({'making': making, 'done': done})
      files.write_atomically(partial / _PROGRESS, text)
    if progress is not None:
      progress(number + 1)
  for name, document in documents.items():
    _write_json(partial / name, document)
  if len(shards) > 1:
    _write_json(partial / safetensors.INDEX, _index(done))
  for name in COMPANIONS:
    if companions is not None and files.exists(companions, name):
      data = files.resolve(companions, name).read_bytes()
      files.write_atomically(partial / name, data)
  (partial / _PROGRESS).unlink(missing_ok=True)
  hashes = {name: entry['sha256'] for name, entry in done.items()}
  files.write_manifest(partial, record, hashes=hashes)
  os.replace(partial, destination)
  files.sync_folder(destination.parent)


def _resume(partial, making):
  """Returns the whole shards of an unfinished folder; makes it if none."""
  if making['identity'] is None and partial.exists():
    shutil.rmtree(partial)
  if not partial.exists():
    partial.mkdir(parents=True)
    return {}
  for leftover in partial.glob('.*.partial'):  # of a write that was cut short
    leftover.unlink()
  if not files.exists(partial, _PROGRESS):
    if any(partial.iterdir()):
      raise files.CheckpointError(
          f'{partial} is in the way and no unfinished folder: remove it.'
      )
    return {}
  saved = files.read_json(partial, _PROGRESS)
  if saved.get('making') != making:
    raise files.CheckpointError(
        f'{partial} is unfinished, with other arguments or of another source:'
        ' finish that one, or remove it.'
    )
  return dict(saved['done'])


def _shard_name(number, count):
  if count == 1:
    return safetensors.SINGLE
  return f'model-{number + 1:05}-of-{count:05}.safetensors'


def _write_shard(path, tensors):
  """Writes a shard and returns its digest, and its tensors' bytes by name."""
  tensors = {name: np.asarray(tensor) for name, tensor in tensors.items()}
  digest = safetensors.write_file(path, tensors, {'format': 'pt'})
  sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
  return {'sha256': digest, 'tensors': sizes}


def _index(done):
  shards = {t: shard for shard, entry in done.items() for t in entry['tensors']}
  total = sum(sum(entry['tensors'].values()) for entry in done.values())
  return {
      'metadata': {'total_size': total},
      'weight_map': dict(sorted(shards.items())),
  }


def _write_json(path, value):
  files.write_atomically(path, json.dumps(value, indent=2) + '\n')
