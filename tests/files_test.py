"""Tests of files."""

import hashlib
import json
import os
import pathlib
import stat
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from nvfp4_jax import files


class FolderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.outside = pathlib.Path(root)
    self.folder = self.outside / 'model'
    self.folder.mkdir()

  def assert_refused(self, name, reason=''):
    with self.assertRaisesRegex(files.CheckpointError, reason) as context:
      files.resolve(self.folder, name)
    self.assertIn(repr(name), str(context.exception))


class ResolveTest(FolderTest):

  def test_a_regular_file(self):
    path = self.folder / 'config.json'
    path.write_text('{}')
    self.assertEqual(files.resolve(self.folder, 'config.json'), path)
    self.assertTrue(files.exists(self.folder, 'config.json'))

  def test_the_folder_may_be_a_link(self):
    (self.folder / 'a').touch()
    link = self.outside / 'link'
    link.symlink_to(self.folder)
    self.assertEqual(files.resolve(link, 'a'), link / 'a')

  @parameterized.parameters(
      '',
      '.',
      '..',
      '../secret',
      'sub/../../secret',
      'sub/file',
      './a',
      'a/',
      '/etc/passwd',
      '..\\secret',
      'C:\\secret',
      'a\0b',
      'half \ud800 pair',
  )
  def test_what_is_no_plain_name_is_refused(self, name):
    (self.outside / 'secret').touch()
    (self.folder / 'sub').mkdir()
    (self.folder / 'sub' / 'file').touch()
    (self.folder / 'a').touch()
    self.assert_refused(name)
    with self.assertRaises(files.CheckpointError):
      files.exists(self.folder, name)

  @parameterized.parameters('missing', 'a' * 300)
  def test_a_missing_file_is_refused(self, name):
    self.assert_refused(name)
    self.assertFalse(files.exists(self.folder, name))

  def test_a_missing_folder(self):
    self.folder.rmdir()
    self.assert_refused('a')
    self.assertFalse(files.exists(self.folder, 'a'))

  def test_a_link_out_is_refused_with_advice(self):
    (self.outside / 'blob').touch()
    (self.folder / 'a').symlink_to('../blob')
    self.assert_refused('a', 'links followed')

  def test_a_link_to_a_folder_of_similar_name_is_refused(self):
    other = self.outside / 'model2'
    other.mkdir()
    (other / 'a').touch()
    (self.folder / 'a').symlink_to(other / 'a')
    self.assert_refused('a', 'leads out')

  def test_a_link_within_is_followed(self):
    (self.folder / 'a').write_text('text')
    (self.folder / 'b').symlink_to('a')
    self.assertEqual(files.read_text(self.folder, 'b'), 'text')

  def test_other_than_regular_files_are_refused(self):
    (self.folder / 'folder').mkdir()
    os.mkfifo(self.folder / 'pipe')
    (self.folder / 'zero').symlink_to('/dev/zero')
    (self.folder / 'dangling').symlink_to('nothing')
    (self.folder / 'loop').symlink_to('loop')
    for name in ('folder', 'pipe', 'zero', 'dangling', 'loop'):
      with self.subTest(name):
        self.assert_refused(name)
        with self.assertRaises(files.CheckpointError):
          files.exists(self.folder, name)


class ReadTest(FolderTest):

  def assert_unread(self, data, reason='', **kwargs):
    (self.folder / 'x.json').write_bytes(data)
    with self.assertRaisesRegex(files.CheckpointError, reason) as context:
      files.read_json(self.folder, 'x.json', **kwargs)
    self.assertIn("'x.json'", str(context.exception))

  def test_text_keeps_its_line_ends(self):
    (self.folder / 'a').write_bytes('Größe\r\n\u2028'.encode())
    self.assertEqual(files.read_text(self.folder, 'a'), 'Größe\r\n\u2028')

  def test_json(self):
    value = {'a': [1, -2.5, None, True, {'b': 'ü\n😀'}], 'big': 2**70}
    for escaped in (True, False):
      text = json.dumps(value, ensure_ascii=escaped)
      (self.folder / 'x').write_text(text)
      self.assertEqual(files.read_json(self.folder, 'x'), value)

  def test_the_limit_is_inclusive(self):
    (self.folder / 'x.json').write_bytes(b'{}  ')
    self.assertEqual(files.read_json(self.folder, 'x.json', max_bytes=4), {})
    self.assert_unread(b'{}   ', '4 bytes', max_bytes=4)

  @parameterized.named_parameters(
      ('empty', b'', ''),
      ('cut_short', b'{"a": [1, 2', ''),
      ('more_behind', b'{} {}', ''),
      ('list', b'[{}]', 'object'),
      ('not_utf8', b'{"a": "\xff"}', 'UTF-8'),
      ('utf16', '{}'.encode('utf-16'), ''),
      ('byte_order_mark', b'\xef\xbb\xbf{}', ''),
      ('duplicate', b'{"c": {"b": 1, "a": 2, "b": 1}}', "'b' stands twice"),
      ('duplicate_by_escape', b'{"b": 1, "\\u0062": 2}', "'b' stands twice"),
      ('nan', b'{"a": NaN}', 'NaN'),
      ('infinity', b'{"a": [-Infinity]}', 'Infinity'),
      ('infinite_number', b'{"a": 1e999}', '1e999'),
      ('endless_number', b'{"a": ' + b'9' * 5000 + b'}', ''),
      ('half_a_pair', b'{"a": ["\\ud800"]}', ''),
      ('half_a_pair_in_a_key', b'{"\\uDC00": 1}', ''),
      ('deep_lists', b'{"a":' + b'[' * 10**6, ''),
      ('deep_objects', b'{"a":' * 10**6, ''),
      ('raw_line_end', b'{"a": "\n"}', ''),
  )
  def test_other_json_is_refused(self, data, reason):
    self.assert_unread(data, reason)


class WriteTest(FolderTest):

  def setUp(self):
    super().setUp()
    self.path = self.folder / 'a'

  def test_text_and_bytes(self):
    for data in ('Größe\n', b'\0\xff', ''):
      files.write_atomically(self.path, data)
      want = data.encode() if isinstance(data, str) else data
      self.assertEqual(self.path.read_bytes(), want)
    self.assertEqual(os.listdir(self.folder), ['a'])

  def test_a_file_may_be_read_by_whom_the_umask_allows(self):
    files.write_atomically(self.path, 'text')
    (self.folder / 'b').touch()
    self.assertEqual(
        stat.S_IMODE(self.path.stat().st_mode),
        stat.S_IMODE((self.folder / 'b').stat().st_mode),
    )

  @parameterized.parameters(OSError, KeyboardInterrupt)
  def test_an_exception_leaves_the_old_file_and_nothing_else(self, kind):
    self.path.write_text('old')
    with self.assertRaises(kind), files.open_atomically(self.path) as file:
      file.write(b'new')
      file.flush()
      self.assertEqual(self.path.read_text(), 'old')
      raise kind
    self.assertEqual(self.path.read_text(), 'old')
    self.assertEqual(os.listdir(self.folder), ['a'])

  def test_a_link_is_replaced_not_followed(self):
    target = self.outside / 'target'
    target.write_text('kept')
    self.path.symlink_to(target)
    files.write_atomically(self.path, 'new')
    self.assertFalse(self.path.is_symlink())
    self.assertEqual(target.read_text(), 'kept')

  def test_sha256(self):
    data = bytes(range(256)) * 5000
    self.path.write_bytes(data)
    want = hashlib.sha256(data).hexdigest()
    self.assertEqual(files.sha256(self.path), want)


class ManifestTest(FolderTest):

  def setUp(self):
    super().setUp()
    self.record = {'recipe': 'nvfp4', 'versions': {'jax': '0.11.2'}}
    self.weights = self.folder / 'model.safetensors'
    self.weights.write_bytes(bytes(range(256)))
    (self.folder / 'config.json').write_text('{}')
    (self.folder / 'empty').touch()

  def assert_found(self, named):
    with self.assertRaisesRegex(files.CheckpointError, named):
      files.check_manifest(self.folder)

  def test_the_record_comes_back(self):
    self.assertIsNone(files.check_manifest(self.folder))
    for _ in range(2):  # The second one replaces the first.
      files.write_manifest(self.folder, self.record)
      self.assertEqual(files.check_manifest(self.folder), self.record)

  def test_it_lists_the_regular_files_but_itself(self):
    (self.folder / 'folder').mkdir()
    (self.folder / '.config.json.01234567.partial').touch()
    files.write_manifest(self.folder, self.record)
    files.write_manifest(self.folder, self.record)
    data = json.loads((self.folder / files.MANIFEST).read_text())
    want = {
        path.name: {
            'bytes': path.stat().st_size,
            'sha256': hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in (
            self.weights,
            self.folder / 'config.json',
            self.folder / 'empty',
        )
    }
    self.assertEqual(data, {**self.record, 'files': want})

  def test_every_flipped_bit_is_found(self):
    files.write_manifest(self.folder, self.record)
    data = self.weights.read_bytes()
    for bit in range(0, 8 * len(data), 37):
      changed = bytearray(data)
      changed[bit // 8] ^= 1 << bit % 8
      self.weights.write_bytes(changed)
      self.assert_found("'model.safetensors'.*SHA-256")
    self.weights.write_bytes(data)
    self.assertEqual(files.check_manifest(self.folder), self.record)

  def test_a_missing_file_is_found(self):
    files.write_manifest(self.folder, self.record)
    (self.folder / 'empty').unlink()
    self.assert_found("'empty'")

  @parameterized.parameters(0, 255, 257)
  def test_a_wrong_size_is_found(self, size):
    files.write_manifest(self.folder, self.record)
    os.truncate(self.weights, size)
    self.assert_found(f"'model.safetensors'.* {size} bytes, not 256")

  def test_known_hashes_are_taken(self):
    hashes = {self.weights.name: 'f' * 64}
    files.write_manifest(self.folder, {}, hashes=hashes)
    self.assert_found("'model.safetensors'.*SHA-256")
    hashes = {self.weights.name: files.sha256(self.weights)}
    files.write_manifest(self.folder, {}, hashes=hashes)
    self.assertEqual(files.check_manifest(self.folder), {})

  def test_what_it_cannot_vouch_for_raises(self):
    with self.assertRaisesRegex(ValueError, 'missing'):
      files.write_manifest(self.folder, {}, hashes={'missing': 'f' * 64})
    with self.assertRaisesRegex(ValueError, 'files'):
      files.write_manifest(self.folder, {'files': []})
    with self.assertRaises(ValueError):
      files.write_manifest(self.folder, {'loss': float('nan')})
    (self.outside / 'blob').touch()
    (self.folder / 'link').symlink_to(self.outside / 'blob')
    with self.assertRaisesRegex(files.CheckpointError, 'link'):
      files.write_manifest(self.folder, {})
    self.assertFalse((self.folder / files.MANIFEST).exists())

  @parameterized.parameters(
      '{}',
      '{"files": []}',
      '{"files": {"empty": null}}',
      '{"files": {"empty": {"bytes": 0}}}',
      '{"files": {"empty": {"bytes": 0, "sha256": null}}}',
      '{"files": {"empty": {"bytes": "0", "sha256": ""}}}',
      '{"files": {"../blob": {"bytes": 0, "sha256": ""}}}',
      '{"files": ',
  )
  def test_what_is_no_manifest_is_refused(self, text):
    (self.folder / files.MANIFEST).write_text(text)
    with self.assertRaises(files.CheckpointError):
      files.check_manifest(self.folder)


if __name__ == '__main__':
  absltest.main()
