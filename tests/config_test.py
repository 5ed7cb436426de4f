"""Tests of config."""

import dataclasses
import json
import pathlib
from typing import Any, Literal

from absl.testing import absltest
from absl.testing import parameterized

from experiments import grpo
from experiments import sft
from nvfp4_jax import config
from nvfp4_jax import quantization


@dataclasses.dataclass(frozen=True)
class _Inner:
  rate: float = 0.5
  kind: Literal['mse', 'mae', 3, None] = 'mse'

  def __post_init__(self):
    if self.rate < 0:
      raise ValueError(f'rate {self.rate} is negative.')


@dataclasses.dataclass(frozen=True)
class _Outer:
  flag: bool = False
  count: int = 1
  name: str = 'a'
  where: pathlib.Path = pathlib.Path('runs/a')
  inner: _Inner = _Inner()
  inners: tuple[_Inner, ...] = ()
  pair: tuple[int, str] = (1, 'a')
  cap: float | None = 2.0
  start: pathlib.Path | None = None
  other: _Inner | None = None


@dataclasses.dataclass(frozen=True)
class _Required:
  level: Literal[1, 2]


_FULL = _Outer(
    flag=True,
    count=-7,
    name='',
    where=pathlib.Path('/x/y'),
    inner=_Inner(1e-30, None),
    inners=(_Inner(2.0), _Inner(kind=3)),
    pair=(4, 'b'),
    cap=None,
    start=pathlib.Path('z'),
    other=_Inner(3.0, 'mae'),
)


class RoundTripTest(parameterized.TestCase):

  @parameterized.parameters(
      _Outer(),
      _FULL,
      *(preset for _, preset in grpo.PRESETS.values()),
      *(preset for _, preset in sft.PRESETS.values()),
  )
  def test_json_text_gives_the_same_dataclass(self, value):
    data = json.loads(json.dumps(config.to_json(value)))
    got = config.from_json(type(value), data)
    self.assertEqual(got, value)
    self.assertEqual(_types(got), _types(value))

  @parameterized.parameters(0.1, 1e-30, 1.7976931348623157e308, -0.0)
  def test_floats_keep_their_bits(self, number):
    data = json.loads(json.dumps(config.to_json(_Outer(cap=number))))
    got = config.from_json(_Outer, data)
    self.assertEqual(got.cap.hex(), number.hex())

  def test_a_missing_field_takes_its_default(self):
    self.assertEqual(config.from_json(_Outer, {}), _Outer())
    self.assertEqual(
        config.from_json(_Outer, {'inner': {'rate': 2.0}}),
        _Outer(inner=_Inner(2.0)),
    )

  def test_an_integer_is_a_float(self):
    got = config.from_json(_Outer, {'cap': 3, 'inner': {'rate': 1}})
    self.assertEqual(got, _Outer(cap=3.0, inner=_Inner(1.0)))
    self.assertIs(type(got.cap), float)
    self.assertIs(type(got.inner.rate), float)


class ToJsonTest(parameterized.TestCase):

  def test_values(self):
    self.assertEqual(
        config.to_json(_FULL),
        {
            'flag': True,
            'count': -7,
            'name': '',
            'where': '/x/y',
            'inner': {'rate': 1e-30, 'kind': None},
            'inners': [
                {'rate': 2.0, 'kind': 'mse'},
                {'rate': 0.5, 'kind': 3},
            ],
            'pair': [4, 'b'],
            'cap': None,
            'start': 'z',
            'other': {'rate': 3.0, 'kind': 'mae'},
        },
    )

  @parameterized.parameters(({1, 2},), (b'x',), (object,), (_Inner,))
  def test_a_value_without_json_form_raises(self, value):
    name = type(value).__name__
    with self.assertRaisesRegex(TypeError, f'type {name} has no JSON form'):
      config.to_json((1, value))


class StrictnessTest(parameterized.TestCase):

  @parameterized.parameters(
      ('flag', 1),
      ('flag', 'true'),
      ('flag', None),
      ('count', True),
      ('count', 1.0),
      ('count', '1'),
      ('count', None),
      ('name', 1),
      ('where', 1),
      ('where', None),
      ('inner', 1),
      ('inner', [0.5, 'mse']),
      ('inner', None),
      ('inner.rate', True),
      ('inner.rate', '1'),
      ('inner.rate', None),
      ('inner.kind', 'MSE'),
      ('inner.kind', 4),
      ('inner.kind', ['mse']),
      ('inners', {}),
      ('inners', 'ab'),
      ('inners[1]', 1),
      ('inners[1].rate', 'x'),
      ('pair', [1]),
      ('pair', [1, 'a', 'b']),
      ('pair[0]', 'a'),
      ('pair[1]', 2),
      ('cap', 'x'),
      ('cap', True),
      ('start', 1),
      ('other', 1),
  )
  def test_a_wrong_type_raises_and_names_the_field(self, path, value):
    with self.assertRaises(ValueError) as context:
      config.from_json(_Outer, _with(path, value))
    message = str(context.exception)
    self.assertStartsWith(message, f'_Outer.{path}: ')
    self.assertIn(repr(value), message)

  @parameterized.parameters(
      ('', 'zz', 'inners'),
      ('inner.', 'Rate', 'rate'),
      ('inners[1].', 'rat', 'rate'),
  )
  def test_an_unknown_field_raises_and_lists_all(self, parent, name, valid):
    where = f'_Outer.{parent}'.rstrip('.')
    with self.assertRaises(ValueError) as context:
      config.from_json(_Outer, _with(parent + name, 1))
    message = str(context.exception)
    self.assertStartsWith(message, f'{where} has no field [{name!r}]')
    self.assertIn(repr(valid), message)

  def test_what_a_dataclass_itself_refuses_raises(self):
    with self.assertRaisesRegex(ValueError, 'rate -1.0 is negative'):
      config.from_json(_Outer, {'inner': {'rate': -1}})
    with self.assertRaisesRegex(ValueError, "Recipe 'x' is not one of"):
      config.from_json(grpo.Config, {'recipe': 'x'})

  def test_a_saved_run_with_another_field_is_refused(self):
    data = config.to_json(grpo.Config())
    data['optimizer']['lr'] = 1.0
    with self.assertRaisesRegex(
        ValueError, r"Config\.optimizer has no field \['lr'\].*learning_rate"
    ):
      config.from_json(grpo.Config, data)

  def test_a_bool_is_not_a_literal_integer(self):
    with self.assertRaises(ValueError):
      config.from_json(_Required, {'level': True})

  def test_a_missing_field_without_default_raises_and_is_named(self):
    with self.assertRaisesRegex(ValueError, '_Required.*level'):
      config.from_json(_Required, {})

  def test_a_wrong_value_in_an_optional_dataclass_is_named(self):
    data = {'other': {'kind': 'x'}}
    with self.assertRaisesRegex(ValueError, r'^_Outer\.other\.kind: '):
      config.from_json(_Outer, data)

  def test_an_aliased_literal_is_understood(self):
    spec = quantization.QuantSpec('nvfp4', outer='token')
    self.assertEqual(
        config.from_json(quantization.QuantSpec, config.to_json(spec)), spec
    )


def _with(path: str, value: Any) -> dict[str, Any]:
  """Returns the JSON of _FULL with one value replaced or added."""
  data = node = config.to_json(_FULL)
  *parents, last = path.replace('[', '.[').split('.')
  key = lambda part: int(part[1:-1]) if part[0] == '[' else part
  for part in parents:
    node = node[key(part)]
  node[key(last)] = value
  return data


def _types(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    fields = (getattr(value, f.name) for f in dataclasses.fields(value))
    return type(value), [_types(field) for field in fields]
  if isinstance(value, tuple):
    return tuple, [_types(item) for item in value]
  return type(value)


if __name__ == '__main__':
  absltest.main()
