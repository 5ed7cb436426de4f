"""Checkpoints: everything that a run needs to go on, in one atomic step.

A step holds the arrays and a JSON record (cursor, keys, precision policy). A
step that was cut short is never taken for a whole one: orbax writes to a
temporary folder and renames it.
"""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

_KEEP = 2


class PolicyMismatchError(ValueError):
  """A checkpoint was written under another precision policy."""


class DataMismatchError(ValueError):
  """A checkpoint was written with another data file or other problems."""


def save(
    directory: pathlib.Path, step: int, arrays: Any, record: dict[str, Any]
) -> None:
  """Writes a step and waits until it is whole; the last two are kept.

  Args:
    directory: the run's checkpoint folder; made if need be.
    step: its number, above those already there.
    arrays: pytree of arrays; typed keys as `jax.random.key_data`.
    record: JSON values.

  Raises:
    ValueError: the step is not above the last one.
  """
  with _manager(directory) as manager:
    latest = manager.latest_step()
    if latest is not None and step <= latest:
      raise ValueError(f'Step {step} is not above {latest}, the last one.')
    manager.save(
        step,
        args=ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays),
            record=ocp.args.JsonSave(
                {'record': record, 'dtypes': _dtypes(arrays)}
            ),
        ),
    )
    manager.wait_until_finished()


def latest_step(directory: pathlib.Path) -> int | None:
  """Returns the last whole step, or None."""
  if not directory.exists():
    return None
  with _manager(directory) as manager:
    return manager.latest_step()


def restore(
    directory: pathlib.Path,
    like: Any,
    *,
    policy: Any = None,
) -> tuple[Any, dict[str, Any]]:
  """Returns the arrays and the record of the last whole step.

  Args:
    directory: the run's checkpoint folder.
    like: pytree of arrays or ShapeDtypeStructs that the arrays must match.
    policy: JSON of the precision policy that the caller runs; where given, it
      must equal the record's `policy`.

  Raises:
    FileNotFoundError: there is no whole step.
    PolicyMismatchError: the policies differ.
    ValueError: an array has another shape, dtype or place than in `like`.
  """
  if latest_step(directory) is None:
    raise FileNotFoundError(f'No checkpoint in {directory}.')
  with _manager(directory) as manager:
    step = manager.latest_step()
    saved = manager.restore(
        step, args=ocp.args.Composite(record=ocp.args.JsonRestore())
    )['record']
    record = saved['record']
    if policy is not None and record.get('policy') != policy:
      raise PolicyMismatchError(
          f'The checkpoint in {directory} was written under the precision'
          f' policy {record.get("policy")}, not under {policy}.'
      )
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    _check_dtypes(saved['dtypes'], _dtypes(shapes))
    arrays = manager.restore(
        step,
        args=ocp.args.Composite(arrays=ocp.args.StandardRestore(shapes)),
    )['arrays']
  return arrays, record


def _dtypes(arrays):
  """Returns the dtype of each array by its place in the tree."""
  return {
      jax.tree_util.keystr(path): str(leaf.dtype)
      for path, leaf in jax.tree.leaves_with_path(arrays)
  }


def _check_dtypes(saved, wanted):
  """Raises where orbax would cast an array, or not find it."""
  for place in sorted({*saved, *wanted}):
    found, want = saved.get(place), wanted.get(place)
    if found != want:
      raise ValueError(f'{place} is saved as {found}, not as {want}.')


def _manager(directory):
  return ocp.CheckpointManager(
      directory.absolute(),
      options=ocp.CheckpointManagerOptions(
          max_to_keep=_KEEP, enable_async_checkpointing=False
      ),
  )
