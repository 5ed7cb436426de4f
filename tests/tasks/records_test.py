"""Tests of tasks.records, on files for tasks.dapo_math."""

import hashlib
import json
import sys
import tracemalloc
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from nvfp4_jax.tasks import dapo_math
from nvfp4_jax.tasks import records
from tests.tasks import file_cases

_SPLITS = ('train', 'held_out')


class FilesTest(file_cases.FileTestCase):

  @parameterized.parameters(
      (b'{"prompt": \n', 'it is not JSON: Expecting value'),
      (b'\xff\xfe\n', 'it is not UTF-8'),
      (b'"x"\n', "it is not an object but 'x'"),
      (b'null\n', 'it is not an object but None'),
      (b'{} {}\n', 'it is not JSON: Extra data'),
      (b'{"label": "5", "prompt": "cut off', 'it is not JSON: Unterminated'),
      (b'[' * 100_000 + b'\n', 'it is not JSON'),
      (b'{"label": ' + b'9' * 5000 + b'}\n', 'it is not JSON'),
  )
  def test_a_malformed_line_raises_and_is_named(self, line, message):
    path = self.file(file_cases.dapo_row(), b'\n', line)
    with self.assertRaisesRegex(records.DataError, message) as caught:
      dapo_math.make(path)
    self.assertStartsWith(str(caught.exception), f'{path}:3: ')

  def test_an_endless_line_is_not_read_to_its_end(self):
    path = self.file(file_cases.dapo_row(), b'x' * 2000)
    with (
        mock.patch.object(records, '_MAX_LINE_BYTES', 1000),
        self.assertRaisesRegex(records.DataError, ':2: has more than 1000'),
    ):
      dapo_math.make(path)

  @parameterized.parameters(b'', b'\n\n', b' \n')
  def test_an_empty_file_raises(self, content):
    with self.assertRaisesRegex(records.DataError, 'data.jsonl is empty'):
      dapo_math.make(self.file(content))

  def test_a_file_that_cannot_be_read_raises_and_is_named(self):
    folder = self.file().parent
    with self.assertRaisesRegex(records.DataError, 'none.jsonl: No such file'):
      dapo_math.make(folder / 'none.jsonl')
    with self.assertRaisesRegex(records.DataError, f'{folder}: Is a directory'):
      dapo_math.make(folder)

  def test_line_ends_byte_order_mark_and_empty_lines_do_not_matter(self):
    row = json.dumps(file_cases.dapo_row()).encode()
    table = dapo_math.make(self.file(b'\xef\xbb\xbf' + row + b'\r\n\n')).table
    self.assertEqual(table.counts.rows, 1)
    self.assertEqual(dapo_math.make(self.file(row)).table.counts.rows, 1)

  def test_fingerprint_is_that_of_the_bytes(self):
    path = self.file(
        file_cases.dapo_row(), b'\n', file_cases.dapo_row('1 + 1?', '2')
    )
    want = hashlib.sha256(path.read_bytes()).hexdigest()
    self.assertEqual(dapo_math.make(path).fingerprint, want)
    with path.open('a') as file:
      file.write(' ')
    self.assertNotEqual(dapo_math.make(path).fingerprint, want)


class DuplicatesTest(file_cases.FileTestCase):

  def test_repeated_problems_are_dropped_and_counted(self):
    path = self.file(
        file_cases.dapo_row('a?', '1'),
        file_cases.dapo_row('b?', '2'),
        file_cases.dapo_row(' a?\n', '1'),  # The same but for its spaces.
        file_cases.dapo_row('a?', '1'),
        file_cases.dapo_row('b?', '3'),
        file_cases.dapo_row('A?', '1'),
    )
    table = dapo_math.make(path).table
    self.assertEqual(table.counts, records.Counts(6, 3, 2, 1))
    answers = sorted(p.answer for p in table.train + table.held_out)
    self.assertEqual(answers, ['1', '1', '2'])  # Of a conflict, the first.

  def test_memory_does_not_grow_with_repetitions(self):
    rows = [file_cases.dapo_row(f'{i} ' + 'x' * 1000, '1') for i in range(50)]

    def peak(times):
      path = self.file(*(rows * times))
      tracemalloc.start()
      dapo_math.make(path)
      _, most = tracemalloc.get_traced_memory()
      tracemalloc.stop()
      return most

    self.assertLess(peak(times=40), 1.5 * peak(times=2))


class ParquetTest(file_cases.FileTestCase):

  def test_without_pyarrow_the_error_names_json_lines(self):
    with (
        mock.patch.dict(sys.modules, {'pyarrow': None}),
        self.assertRaisesRegex(records.DataError, r'JSON lines \(\.jsonl\)'),
    ):
      dapo_math.make(self.file(b'PAR1', name='data.parquet'))

  def test_with_pyarrow_its_rows_are_read(self):
    path = self.file(b'PAR1', name='data.parquet')
    batches = [
        [file_cases.dapo_row('a?', '1'), file_cases.dapo_row('b?', '2')],
        [file_cases.dapo_row('c?', '3')],
    ]
    with mock.patch.dict(sys.modules, _fake_pyarrow(batches)):
      table = dapo_math.make(path).table
    self.assertEqual(table.counts, records.Counts(3, 3, 0, 0))
    self.assertEqual(table.fingerprint, hashlib.sha256(b'PAR1').hexdigest())

  def test_a_bad_row_is_named_by_its_number(self):
    path = self.file(b'PAR1', name='data.parquet')
    batches = [
        [file_cases.dapo_row('a?', '1')],
        [file_cases.dapo_row('b?', None)],
    ]
    with (
        mock.patch.dict(sys.modules, _fake_pyarrow(batches)),
        self.assertRaisesRegex(records.DataError, f"{path}:2: 'label' is not"),
    ):
      dapo_math.make(path)


class OrderTest(file_cases.FileTestCase):

  def _task(self, seed=0):
    rows = [file_cases.dapo_row(f'{i} + 0?', str(i)) for i in range(100)]
    return dapo_math.make(self.file(*rows), seed=seed)

  def test_splits_are_disjoint_and_complete(self):
    task = self._task()
    seen = {
        split: {task.problem(split, i).uid for i in range(task.size(split))}
        for split in _SPLITS
    }
    self.assertEmpty(seen['train'] & seen['held_out'])
    self.assertLen(seen['train'] | seen['held_out'], 100)
    self.assertBetween(len(seen['held_out']), 1, 30)

  def test_an_epoch_holds_every_problem_once_in_an_order_of_its_own(self):
    task = self._task()
    size = task.size('train')
    epochs = [
        [task.problem('train', epoch * size + i).uid for i in range(size)]
        for epoch in range(3)
    ]
    for epoch in epochs:
      self.assertLen(set(epoch), size)
    self.assertLen({tuple(epoch) for epoch in epochs}, 3)

  def test_a_problem_depends_on_seed_split_and_index_alone(self):
    first, second = self._task(seed=3), self._task(seed=3)
    want = [first.problem('train', i) for i in range(250)]
    for i in reversed(range(250)):
      self.assertEqual(second.problem('train', i), want[i])
    other = self._task(seed=4)
    self.assertNotEqual([other.problem('train', i) for i in range(250)], want)

  def test_held_out_problems_keep_their_order(self):
    task = self._task()
    size = task.size('held_out')
    got = tuple(task.problem('held_out', i) for i in range(2 * size))
    self.assertEqual(got, task.table.held_out * 2)

  def test_the_split_of_a_problem_does_not_depend_on_the_others(self):
    task = self._task()
    problem = task.problem('held_out', 0)
    prompt = problem.messages[0].content
    alone = dapo_math.make(
        self.file(file_cases.dapo_row(prompt, problem.answer))
    )
    self.assertEqual(alone.problem('held_out', 0), problem)
    with self.assertRaisesRegex(records.DataError, "no problems for 'train'"):
      alone.problem('train', 0)

  def test_a_bad_position_raises(self):
    with self.assertRaisesRegex(ValueError, "'test' is not one of"):
      self._task().problem('test', 0)
    with self.assertRaisesRegex(ValueError, "'test' is not one of"):
      self._task().size('test')
    with self.assertRaisesRegex(ValueError, 'Index -1 is below 0'):
      self._task().problem('train', -1)


def _fake_pyarrow(batches):
  """Returns modules that yield these rows, since pyarrow is no dependency."""

  class ParquetFile:

    def __init__(self, path):
      del path

    def __enter__(self):
      return self

    def __exit__(self, *exception):
      pass

    def iter_batches(self):
      for batch in batches:
        yield types.SimpleNamespace(to_pylist=lambda batch=batch: batch)

  parquet = types.ModuleType('pyarrow.parquet')
  parquet.ParquetFile = ParquetFile
  return {'pyarrow': types.ModuleType('pyarrow'), 'pyarrow.parquet': parquet}


if __name__ == '__main__':
  absltest.main()
