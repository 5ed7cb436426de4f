"""Frozen dataclasses to JSON and back, strictly."""

import dataclasses
import pathlib
import types
import typing
from typing import Any, Literal


def to_json(value: Any) -> Any:
  """Returns a dataclass, tuple, path or plain value as JSON values."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {
        field.name: to_json(getattr(value, field.name))
        for field in dataclasses.fields(value)
    }
  if isinstance(value, tuple | list):
    return [to_json(item) for item in value]
  if isinstance(value, pathlib.Path):
    return str(value)
  if value is None or isinstance(value, bool | int | float | str):
    return value
  raise TypeError(f'{value!r} of type {type(value).__name__} has no JSON form.')


def from_json[T](cls: type[T], data: dict[str, Any]) -> T:
  """Returns a `cls` built from JSON values.

  Args:
    cls: a dataclass; nested dataclasses, tuples, paths, Literal, aliases and
      optional fields are understood.
    data: what `to_json` returned. A missing field takes its default.

  Raises:
    ValueError: an unknown field, a missing one without default, or a value that
      its field cannot hold; it is named.
  """
  return _read(cls, data, cls.__name__)


def _read(kind, value, where):
  if isinstance(kind, typing.TypeAliasType):
    kind = kind.__value__
  if dataclasses.is_dataclass(kind):
    return _read_dataclass(kind, value, where)
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin in (typing.Union, types.UnionType):
    return _read_union(args, value, where)
  if origin is Literal:
    if any(value == arg and type(value) is type(arg) for arg in args):
      return value
  elif origin is tuple and isinstance(value, list | tuple):
    kinds = [args[0]] * len(value) if args[-1:] == (...,) else args
    if len(kinds) == len(value):
      return tuple(
          _read(k, item, f'{where}[{i}]')
          for i, (k, item) in enumerate(zip(kinds, value, strict=True))
      )
  elif kind is pathlib.Path and isinstance(value, str):
    return pathlib.Path(value)
  elif kind is float and type(value) in (int, float):
    return float(value)
  elif kind in (int, bool, str) and type(value) is kind:
    return value
  elif kind is type(None) and value is None:
    return None
  raise ValueError(f'{where}: {value!r} is not a {kind}.')


def _read_dataclass(kind, value, where):
  if not isinstance(value, dict):
    raise ValueError(f'{where}: {value!r} is not a {kind.__name__}.')
  hints = typing.get_type_hints(kind)
  fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
  unknown = sorted(set(value) - set(fields))
  if unknown:
    raise ValueError(
        f'{where} has no field {unknown}; it has {sorted(fields)}.'
    )
  missing = sorted(
      name
      for name, field in fields.items()
      if name not in value
      and field.default is dataclasses.MISSING
      and field.default_factory is dataclasses.MISSING
  )
  if missing:
    raise ValueError(f'{where} lacks {missing}, which have no default.')
  return kind(
      **{
          name: _read(hints[name], item, f'{where}.{name}')
          for name, item in value.items()
      }
  )


def _read_union(args, value, where):
  if isinstance(value, dict):  # so that an error names the inner field
    for kind in args:
      if dataclasses.is_dataclass(kind):
        return _read(kind, value, where)
  for kind in args:
    try:
      return _read(kind, value, where)
    except ValueError:
      continue
  raise ValueError(f'{where}: {value!r} is none of {args}.')
