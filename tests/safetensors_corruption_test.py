"""Tests of safetensors: damaged files, and those of somebody who means harm."""

import collections
import json
import os
import pathlib
import random
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from nvfp4_jax import files
from nvfp4_jax import safetensors
from tests import safetensors_oracle as oracle


class CorruptionTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(root) / 'model'
    self.folder.mkdir()
    self.path = self.folder / 'model.safetensors'

  def assert_refused(self, data, reason=''):
    self.path.write_bytes(data)
    with self.assertRaisesRegex(files.CheckpointError, reason):
      _read_all(self.path)


class HeaderErrorsTest(CorruptionTest):

  def test_every_truncation_is_refused(self):
    tensors = {
        'a': oracle.random_array('F32', (2, 3)),
        'b': oracle.random_array('F4', (1, 2)),
    }
    safetensors.write_file(self.path, tensors, {'format': 'pt'})
    data = self.path.read_bytes()
    for size in range(len(data)):
      self.assert_refused(data[:size])
    self.assert_refused(data + b'\0', 'tensors end')

  @parameterized.parameters(
      ('dtype', 'F8_E3M4', "'x'.*'F8_E3M4'.*known.*BF16"),
      ('dtype', 'u8', "'x'"),
      ('dtype', None, "'x'"),
      ('dtype', ['U8'], "'x'"),
      ('dtype', 'U16', "'x'.*takes 8"),
      ('dtype', 'F4', "'x'.*takes 2"),
      ('shape', 4, "'x'"),
      ('shape', None, "'x'"),
      ('shape', [5], "'x'"),
      ('shape', [2, True, 2], "'x'"),
      ('shape', [4.0], "'x'"),
      ('shape', ['4'], "'x'"),
      ('shape', [[4]], "'x'"),
      ('shape', [-4], "'x'"),
      ('shape', [-2, -2], "'x'"),
      ('shape', [4, 2**64], "'x'"),
      ('shape', [2**32, 2**32, 4], "'x'.*too large"),
      ('shape', [0, 2**62, 4], "'x'.*too large"),
      ('shape', [4] + [1] * 64, "'x'"),
      ('data_offsets', [0], "'x'"),
      ('data_offsets', [0, 4, 4], "'x'"),
      ('data_offsets', {'0': 0, '4': 4}, "'x'"),
      ('data_offsets', [False, 4], "'x'"),
      ('data_offsets', [0.0, 4], "'x'"),
      ('data_offsets', [-4, 0], "'x'"),
      ('data_offsets', [4, 0], "'x'"),
      ('data_offsets', [1, 5], "'x'"),
      ('data_offsets', [0, 5], "'x'"),
      ('data_offsets', [2**64, 2**64 + 4], "'x'"),
  )
  def test_a_wrong_field_is_refused(self, field, value, reason):
    entry = {'dtype': 'U8', 'shape': [4], 'data_offsets': [0, 4]}
    self.path.write_bytes(_file({'x': entry}, bytes(4)))
    _read_all(self.path)
    self.assert_refused(_file({'x': {**entry, field: value}}, bytes(4)), reason)
    del entry[field]
    self.assert_refused(_file({'x': entry}, bytes(4)), "'x' must have")

  def test_ranges_must_cover_the_data(self):
    byte = lambda start, end: {
        'dtype': 'U8',
        'shape': [end - start],
        'data_offsets': [start, end],
    }
    for x, y in (
        (byte(0, 3), byte(2, 4)),  # An overlap.
        (byte(0, 4), byte(0, 4)),
        (byte(0, 4), byte(1, 2)),
        (byte(0, 1), byte(2, 4)),  # A gap.
        (byte(1, 2), byte(2, 4)),
        (byte(0, 1), byte(1, 3)),
        (byte(0, 4), byte(3, 3)),
    ):
      self.assert_refused(_file({'x': x, 'y': y}, bytes(4)))
    self.assert_refused(_file({}, bytes(4)))
    header = {'y': byte(2, 4), 'e': byte(2, 2), 'x': byte(0, 2)}
    self.path.write_bytes(_file(header, b'abcd'))
    got = _read_all(self.path)
    self.assertEqual(list(got), ['x', 'e', 'y'])
    self.assertEqual([x.tobytes() for x in got.values()], [b'ab', b'', b'cd'])

  @parameterized.named_parameters(
      ('empty', b''),
      ('spaces', b'   '),
      ('list', b'[]'),
      ('space_before', b' {}'),
      ('not_json', b'{"x"}'),
      ('not_utf8', b'{"\xff": 1}'),
      ('entry_no_object', b'{"x": 1}'),
      (
          'entry_with_more',
          b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"y":0}}',
      ),
      (
          'negative_zero',
          b'{"x":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}',
      ),
      (
          'duplicate_tensor',
          b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
          b'"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
      ),
      (
          'duplicate_field',
          b'{"x":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
      ),
      ('metadata_null', b'{"__metadata__":null}'),
      ('metadata_number', b'{"__metadata__":{"step":1}}'),
      ('deep', b'{"x":' + b'[' * 10**5),
      ('nul_padding', b'{}\0\0'),
  )
  def test_a_wrong_header_is_refused(self, header):
    self.assert_refused(_raw(header))

  @parameterized.parameters(2**64 - 1, 2**63, 100_000_001, 3)
  def test_a_wrong_length_is_refused(self, length):
    self.assert_refused(length.to_bytes(8, 'little') + b'{}')

  def test_a_header_above_the_limit_is_refused_unread(self):
    self.path.write_bytes((100_000_001).to_bytes(8, 'little'))
    os.truncate(self.path, 2 * 10**8)  # Sparse.
    with self.assertRaisesRegex(files.CheckpointError, '100000000'):
      safetensors.read_header(self.path)

  def test_what_is_no_file_is_refused(self):
    os.mkfifo(self.folder / 'pipe')
    for path in (self.folder, self.path, self.folder / 'pipe'):
      with self.assertRaisesRegex(files.CheckpointError, str(path)):
        safetensors.read_header(path)

  def test_a_boolean_of_2_is_refused(self):
    data = oracle.write({'x': np.ones(3, np.bool_)})
    self.assert_refused(data[:-1] + b'\x02', 'neither')

  def test_a_file_that_changes_after_its_header_is_refused(self):
    safetensors.write_file(self.path, {'x': np.ones(3), 'y': np.ones(3)})
    infos = safetensors.read_header(self.path)
    os.truncate(self.path, infos['y'].end - 1)
    np.testing.assert_array_equal(
        safetensors.read_tensor(infos['x']), np.ones(3)
    )
    with self.assertRaisesRegex(files.CheckpointError, 'cut short'):
      safetensors.read_tensor(infos['y'])
    self.path.unlink()
    with self.assertRaisesRegex(files.CheckpointError, 'gone'):
      safetensors.read_tensor(infos['x'])


class FuzzTest(CorruptionTest):

  def test_mutations_are_refused_or_read_as_the_official_package_does(self):
    tensors = {
        'a': oracle.random_array('F32', (2, 3)),
        'b.weight': oracle.random_array('F4', (2, 4)),
        'c': oracle.random_array('BOOL', (3,)),
        'd': oracle.random_array('BF16', (1, 2)),
        'e': oracle.random_array('I64', ()),
        'f': oracle.random_array('F8_E4M3', (0, 2)),
    }
    safetensors.write_file(self.path, tensors, {'format': 'pt'})
    data = self.path.read_bytes()
    rng = random.Random(0)
    counts = collections.Counter()
    for i in range(2000):
      kind = _MUTATIONS[i % len(_MUTATIONS)]
      changed = kind(data, rng)
      self.path.write_bytes(changed)
      try:
        got = {
            name: (
                oracle.dtype_name(x.dtype),
                x.shape,
                oracle.packed(x).tobytes(),
            )
            for name, x in _read_all(self.path).items()
        }
      except files.CheckpointError:
        counts[kind.__name__, 'refused'] += 1
        continue
      counts[kind.__name__, 'read'] += 1
      self.assertEqual(got, oracle.read(changed), changed)
    # Each kind does something; both outcomes occur often enough to mean it.
    self.assertLen({kind for kind, _ in counts}, len(_MUTATIONS))
    for outcome in ('refused', 'read'):
      total = sum(n for (_, how), n in counts.items() if how == outcome)
      self.assertGreater(total, 200, counts)


def _read_all(path):
  return {
      name: safetensors.read_tensor(info)
      for name, info in safetensors.read_header(path).items()
  }


def _raw(header, data=b''):
  return len(header).to_bytes(8, 'little') + header + data


def _file(header, data):
  return _raw(json.dumps(header).encode(), data)


def _split(data):
  end = 8 + int.from_bytes(data[:8], 'little')
  return data[8:end], data[end:]


def _flip_a_bit(data, rng):
  changed = bytearray(data)
  changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  return bytes(changed)


def _flip_a_bit_of_a_tensor(data, rng):
  header, tensors = _split(data)
  return _raw(header, _flip_a_bit(tensors, rng))


def _change_the_length(data, rng):
  length = int.from_bytes(data[:8], 'little')
  other = rng.choice(
      [length + rng.randint(-9, 9), rng.randrange(2**64), rng.randrange(300)]
  )
  return other.to_bytes(8, 'little') + data[8:]


def _edit_the_header(data, rng):
  """Inserts, deletes or replaces characters, with the right length."""
  header, tensors = _split(data)
  changed = bytearray(header)
  for _ in range(rng.randint(1, 3)):
    at = rng.randrange(len(changed))
    text = rng.choice([*'0123456789-+.eE"\\{}[],: \n', 'F', 'null', '\xff'])
    changed[at : at + rng.randrange(2)] = text.encode('latin-1')
  return _raw(bytes(changed), tensors)


def _cut_or_extend(data, rng):
  if rng.randrange(2):
    return data[: rng.randrange(len(data))]
  return data + rng.randbytes(rng.randint(1, 9))


def _change_a_field(data, rng):
  header, tensors = _split(data)
  header = json.loads(header)
  name = rng.choice(list(header))
  if name == '__metadata__':
    header[name] = rng.choice([{'a': 'b'}, {'a': None}, 'a', None, [], {}])
    return _file(header, tensors)
  field = rng.choice(['dtype', 'shape', 'data_offsets'])
  if field == 'dtype':
    header[name][field] = rng.choice(
        [*oracle.DTYPES, 'C64', 'F6_E2M3', '', None, 0]
    )
    return _file(header, tensors)
  numbers = header[name][field]
  if rng.randrange(2):
    rng.shuffle(numbers)
  elif numbers and rng.randrange(2):
    numbers[rng.randrange(len(numbers))] = rng.choice(
        [0, 1, 2, 3, -1, 2**31, 2**63, 2**64, 10**30, 1.0, '1', True, None, []]
    )
  else:
    numbers.insert(rng.randint(0, len(numbers)), rng.choice([0, 1, 2, 2**62]))
  return _file(header, tensors)


def _move_things(data, rng):
  """Renames, removes, repeats or reorders tensors."""
  header, tensors = _split(data)
  entries = list(json.loads(header).items())
  at = rng.randrange(len(entries))
  how = rng.randrange(4)
  if how == 0:
    entries[at] = (rng.choice(['', 'ü', 'a', '__metadata__']), entries[at][1])
  elif how == 1:
    del entries[at]
  elif how == 2:
    entries.append(entries[at])
  else:
    rng.shuffle(entries)
  text = ', '.join(f'{json.dumps(k)}: {json.dumps(v)}' for k, v in entries)
  return _raw(f'{{{text}}}'.encode(), tensors)


_MUTATIONS = (
    _flip_a_bit,
    _flip_a_bit_of_a_tensor,
    _change_the_length,
    _edit_the_header,
    _cut_or_extend,
    _change_a_field,
    _move_things,
)


if __name__ == '__main__':
  absltest.main()
