"""Tests of safetensors: whole files, and folders of them."""

import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy as official

from nvfp4_jax import files
from nvfp4_jax import safetensors
from tests import safetensors_oracle as oracle


class SafetensorsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(root) / 'model'
    self.folder.mkdir()
    self.path = self.folder / 'model.safetensors'


class RoundTripTest(SafetensorsTest):

  @parameterized.parameters(*oracle.DTYPES)
  def test_we_read_what_the_official_package_writes(self, name):
    for shape in ((3, 4), (2, 1, 2), (0, 4), (2,)):
      array = oracle.random_array(name, shape)
      self.path.write_bytes(oracle.write({'x': array}))
      got = _read_all(self.path)
      self.assertEqual(list(got), ['x'])
      _assert_same(got['x'], array)

  @parameterized.parameters(*oracle.DTYPES)
  def test_the_official_package_reads_what_we_write(self, name):
    for shape in ((3, 4), (2, 1, 2), (0, 4), (2,)):
      array = oracle.random_array(name, shape)
      safetensors.write_file(self.path, {'x': array})
      got = oracle.read(self.path.read_bytes())
      self.assertEqual(
          got, {'x': (name, shape, oracle.packed(array).tobytes())}
      )

  def test_the_bytes_of_a_file_are_the_official_ones(self):
    shapes = ((3, 2), (1, 6), (0, 2))
    tensors = {
        f'{shape} of {name}': oracle.random_array(name, shape)
        for name in oracle.DTYPES
        for shape in shapes
    }
    tensors |= {
        'Größe "\\\n\t\x01\x7f😀': oracle.random_array('U8', (3,)),
        '': np.ones(()),
    }
    for part in ({}, {'x': tensors['(3, 2) of F4']}, tensors):
      for metadata in (None, {'format': 'pt'}):
        safetensors.write_file(self.path, part, metadata)
        want = oracle.write(part, metadata)
        self.assertEqual(self.path.read_bytes(), want)

  def test_tensors_are_aligned(self):
    tensors = {
        f'{i}.{name}': oracle.random_array(name, (i, 2))
        for name in oracle.DTYPES
        for i in range(4)
    }
    safetensors.write_file(self.path, tensors)
    for info in safetensors.read_header(self.path).values():
      self.assertEqual(info.start % info.dtype.itemsize, 0)

  @parameterized.parameters(*(name for name in oracle.DTYPES if name != 'F4'))
  def test_scalars(self, name):
    array = oracle.random_array(name, ())
    safetensors.write_file(self.path, {'x': array})
    _assert_same(_read_all(self.path)['x'], array)
    want = {'x': (name, (), array.tobytes())}
    self.assertEqual(oracle.read(self.path.read_bytes()), want)

  def test_all_codes_of_float4(self):
    codes = np.arange(16, dtype=np.uint8)
    # What stands in the high half of a value's byte in memory is not written.
    array = (codes | 0xA0).view(ml_dtypes.float4_e2m1fn).reshape(2, 8)
    safetensors.write_file(self.path, {'x': array})
    data = self.path.read_bytes()[-8:]
    self.assertEqual(data, bytes.fromhex('1032547698badcfe'))
    got = _read_all(self.path)['x']
    np.testing.assert_array_equal(got.view(np.uint8).ravel(), codes)

  def test_the_pair_0_5_and_6_is_byte_71(self):
    array = np.array([0.5, 6], ml_dtypes.float4_e2m1fn)
    safetensors.write_file(self.path, {'x': array})
    self.assertEqual(self.path.read_bytes()[-1:], b'\x71')

  @parameterized.parameters(((),), ((3,),), ((4, 1),))
  def test_float4_of_an_odd_last_axis_is_not_written(self, shape):
    with self.assertRaisesRegex(ValueError, "tensor 'x'.*even"):
      safetensors.write_file(self.path, {'x': oracle.random_array('F4', shape)})
    self.assertEmpty(os.listdir(self.folder))

  @parameterized.named_parameters(
      ('transposed', lambda w: w.T),
      ('every_other_column', lambda w: w[:, ::2]),
      ('rows_reversed', lambda w: w[::-1]),
      ('fortran', np.asfortranarray),
      ('one_column', lambda w: w[:, 1:2]),
      ('broadcast', lambda w: np.broadcast_to(w[:1], (5, *w.shape[1:]))),
      ('big_endian', lambda w: w.astype('>f4')),
      ('big_endian_transposed', lambda w: w.astype('>f4').T),
      ('read_only', lambda w: np.frombuffer(w.tobytes(), w.dtype)),
      ('numpy_scalar', lambda w: w[1, 2]),
      ('bfloat16_transposed', lambda w: w.astype(ml_dtypes.bfloat16).T),
      ('float4_transposed', lambda w: w.astype(ml_dtypes.float4_e2m1fn).T),
  )
  def test_any_layout_is_written_right(self, change):
    w = change(np.arange(12, dtype=np.float32).reshape(3, 4).T)
    if w.dtype == ml_dtypes.float4_e2m1fn and w.shape[-1] % 2:
      self.fail('The case would test something else.')
    safetensors.write_file(self.path, {'w': w})
    got = _read_all(self.path)['w']
    want = np.array(w, w.dtype.newbyteorder('='), order='C')
    _assert_same(got, want)
    got = oracle.read(self.path.read_bytes())['w'][2]
    self.assertEqual(got, oracle.packed(want).tobytes())

  def test_jax_arrays(self):
    tensors = {
        str(dtype): jnp.arange(8).reshape(4, 2).astype(dtype).T
        for dtype in (
            jnp.float32,
            jnp.bfloat16,
            jnp.float8_e4m3fn,
            jnp.float4_e2m1fn,
            jnp.int32,
            jnp.bool_,
        )
    }
    safetensors.write_file(self.path, tensors)
    got = _read_all(self.path)
    self.assertEqual(set(got), set(tensors))
    for name, tensor in tensors.items():
      _assert_same(got[name], np.asarray(tensor))

  def test_a_read_array_is_its_callers(self):
    for name in oracle.DTYPES:
      safetensors.write_file(
          self.path, {'x': oracle.random_array(name, (3, 4))}
      )
      data = self.path.read_bytes()
      got = _read_all(self.path)['x']
      self.assertTrue(got.flags.owndata and got.flags.writeable)
      self.assertTrue(got.flags.c_contiguous)
      got.view(np.uint8)[:] = 0
      self.assertEqual(self.path.read_bytes(), data)

  def test_float8_that_the_official_numpy_reader_cannot_load(self):
    array = oracle.random_array('F8_E4M3', (2, 4))
    scale = oracle.random_array('F8_E8M0', (2, 1))
    tensors = {'weight': array, 'weight_scale': scale}
    self.path.write_bytes(oracle.write(tensors))
    with self.assertRaises(Exception):  # noqa: B017  It varies by version.
      official.load_file(self.path)
    got = _read_all(self.path)
    for name, tensor in tensors.items():
      _assert_same(got[name], tensor)

  def test_the_hash_is_that_of_the_file(self):
    tensors = {
        name: oracle.random_array(name, (3, 4)) for name in oracle.DTYPES
    }
    got = safetensors.write_file(self.path, tensors, {'format': 'np'})
    want = hashlib.sha256(self.path.read_bytes()).hexdigest()
    self.assertEqual(got, want)


class WriteErrorsTest(SafetensorsTest):

  @parameterized.named_parameters(
      ('complex', np.ones(2, np.complex64)),
      ('object', np.array([None])),
      ('text', np.array(['a'])),
      ('record', np.zeros(2, [('a', np.int8)])),
      ('int4', np.ones(2, ml_dtypes.int4)),
      ('other_float8', np.ones(2, ml_dtypes.float8_e4m3b11fnuz)),
  )
  def test_a_dtype_without_a_name_raises(self, array):
    with self.assertRaisesRegex(TypeError, "'weight'.*BF16"):
      safetensors.write_file(self.path, {'weight': array})
    self.assertEmpty(os.listdir(self.folder))

  def test_a_key_raises(self):
    with self.assertRaisesRegex(TypeError, "'rng'"):
      safetensors.write_file(self.path, {'rng': jax.random.key(0)})

  def test_names_and_metadata_that_cannot_be_read_back_raise(self):
    ones = np.ones(2)
    for tensors, metadata, error in (
        ({'__metadata__': ones}, None, ValueError),
        ({'half \ud800': ones}, None, ValueError),
        ({'x': ones}, {'step': 1}, TypeError),
        ({'x': ones}, {'long': 'x' * 10**8}, ValueError),
    ):
      with self.assertRaises(error):
        safetensors.write_file(self.path, tensors, metadata)
    self.assertEmpty(os.listdir(self.folder))

  def test_an_exception_midway_leaves_the_old_file(self):

    class Lost:
      dtype, shape = np.dtype(np.int8), (4,)  # int8: written after the others.

      def __array__(self, *args, **kwargs):
        raise RuntimeError('lost')

    safetensors.write_file(self.path, {'x': np.ones(3)})
    old = self.path.read_bytes()
    with self.assertRaisesRegex(RuntimeError, 'lost'):
      safetensors.write_file(self.path, {'x': np.zeros(10**5), 'y': Lost()})
    self.assertEqual(self.path.read_bytes(), old)
    self.assertEqual(os.listdir(self.folder), [self.path.name])

  def test_a_killed_process_leaves_the_old_file(self):
    safetensors.write_file(self.path, {'x': np.ones(3)})
    old = self.path.read_bytes()
    program = textwrap.dedent("""
        import os, pathlib, signal, sys
        import numpy as np
        from nvfp4_jax import safetensors

        class Killer:
          dtype, shape = np.dtype(np.int8), (4,)
          def __array__(self, *args, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)

        tensors = {'x': np.zeros(10**5), 'y': Killer()}
        safetensors.write_file(pathlib.Path(sys.argv[1]), tensors)
    """)
    result = subprocess.run(
        [sys.executable, '-c', program, self.path],
        cwd=pathlib.Path(__file__).resolve().parents[1],
    )
    self.assertEqual(result.returncode, -signal.SIGKILL)
    self.assertEqual(self.path.read_bytes(), old)
    self.assertLen(os.listdir(self.folder), 2)
    safetensors.write_file(self.path, {'x': np.ones(3)})
    files.write_manifest(self.folder, {})
    manifest = files.read_json(self.folder, files.MANIFEST)
    self.assertEqual(list(manifest['files']), [self.path.name])


class IndexTest(SafetensorsTest):

  def setUp(self):
    super().setUp()
    self.shards = [f'model-0000{i}-of-00002.safetensors' for i in (1, 2)]
    for shard, name in zip(self.shards, 'ab', strict=True):
      safetensors.write_file(self.folder / shard, {name: np.ones(2)})
    self.weight_map = dict(zip('ab', self.shards, strict=True))

  def write_index(self, weight_map):
    index = {'metadata': {'total_size': 32}, 'weight_map': weight_map}
    (self.folder / safetensors.INDEX).write_text(json.dumps(index))

  def assert_index_refused(self, weight_map, *reasons):
    self.write_index(weight_map)
    with self.assertRaises(files.CheckpointError) as context:
      safetensors.read_index(self.folder)
    for reason in reasons:
      self.assertIn(reason, str(context.exception))

  def test_shards(self):
    self.write_index(self.weight_map)
    infos = safetensors.read_index(self.folder)
    paths = {name: info.path for name, info in infos.items()}
    self.assertEqual(paths['a'], self.folder / self.shards[0])
    self.assertEqual(paths['b'], self.folder / self.shards[1])
    _assert_same(safetensors.read_tensor(infos['b']), np.ones(2))

  def test_one_file_with_and_without_an_index(self):
    safetensors.write_file(self.path, {'x': np.ones(2)})
    want = safetensors.read_header(self.path)
    self.assertEqual(safetensors.read_index(self.folder), want)
    self.write_index({'x': self.path.name})
    self.assertEqual(safetensors.read_index(self.folder), want)

  def test_one_file_beside_the_index_of_others_is_refused(self):
    safetensors.write_file(self.path, {'x': np.ones(2)})
    self.assert_index_refused(self.weight_map, 'remove one')

  def test_a_mapped_tensor_must_be_in_its_shard(self):
    weight_map = {**self.weight_map, 'c': self.shards[0]}
    self.assert_index_refused(weight_map, "'c'", self.shards[0], 'lacks')
    weight_map = {'a': self.shards[1], 'b': self.shards[1]}
    self.assert_index_refused(weight_map, "'a'", self.shards[1], 'lacks')

  def test_a_tensor_of_a_shard_must_be_mapped(self):
    tensors = {'a': np.ones(2), 'c': np.ones(2)}
    safetensors.write_file(self.folder / self.shards[0], tensors)
    self.assert_index_refused(self.weight_map, "'c'", 'not map')

  def test_a_tensor_in_two_shards_is_refused(self):
    tensors = {'a': np.ones(2), 'b': np.zeros(2)}
    safetensors.write_file(self.folder / self.shards[0], tensors)
    self.assert_index_refused(self.weight_map, "'b'", self.shards[0])

  @parameterized.parameters(
      '../b.safetensors',
      'sub/b.safetensors',
      './model-00002-of-00002.safetensors',
      '..\\b.safetensors',
      'b\0.safetensors',
      'link.safetensors',
      'folder.safetensors',
      'pipe.safetensors',
      'dangling.safetensors',
      'missing.safetensors',
  )
  def test_a_shard_must_be_a_file_of_the_folder(self, shard):
    outside = self.folder.parent / 'b.safetensors'
    safetensors.write_file(outside, {'b': np.ones(2)})
    (self.folder / 'sub').mkdir()
    safetensors.write_file(
        self.folder / 'sub' / 'b.safetensors', {'b': np.ones(2)}
    )
    (self.folder / 'link.safetensors').symlink_to(outside)
    (self.folder / 'folder.safetensors').mkdir()
    (self.folder / 'dangling.safetensors').symlink_to('nothing')
    os.mkfifo(self.folder / 'pipe.safetensors')
    weight_map = {'a': self.shards[0], 'b': shard}
    self.assert_index_refused(weight_map, repr(shard))

  def test_an_absolute_shard_is_refused(self):
    shard = str(self.folder / self.shards[1])
    self.assert_index_refused({'a': self.shards[0], 'b': shard}, shard)

  @parameterized.parameters('pytorch_model.bin', 'model.safetensors.bin', 1)
  def test_a_shard_of_another_kind_is_refused(self, shard):
    if isinstance(shard, str):
      (self.folder / self.shards[1]).rename(self.folder / shard)
    self.assert_index_refused(
        {'a': self.shards[0], 'b': shard}, "'b'", repr(shard)
    )

  @parameterized.parameters((None,), ([],), ({},))
  def test_an_index_without_tensors_is_refused(self, weight_map):
    self.assert_index_refused(weight_map, safetensors.INDEX)

  def test_a_link_out_for_the_model_is_not_taken_for_a_missing_file(self):
    blob = self.folder.parent / 'blob'
    safetensors.write_file(blob, {'x': np.ones(2)})
    self.path.symlink_to(blob)
    with self.assertRaisesRegex(files.CheckpointError, 'links followed'):
      safetensors.read_index(self.folder)

  def test_nothing_to_read(self):
    message = "neither 'model.safetensors' nor 'model.safetensors.index.json'"
    with self.assertRaisesRegex(files.CheckpointError, message) as context:
      safetensors.read_index(self.folder)
    self.assertNotIn('ickle', str(context.exception))
    (self.folder / 'pytorch_model.bin').write_bytes(b'cos\nsystem\n')
    with self.assertRaisesRegex(
        files.CheckpointError, "'pytorch_model.bin' are never read"
    ):
      safetensors.read_index(self.folder)
    with self.assertRaisesRegex(files.CheckpointError, 'not a folder'):
      safetensors.read_index(self.folder / 'missing')


def _read_all(path):
  return {
      name: safetensors.read_tensor(info)
      for name, info in safetensors.read_header(path).items()
  }


def _assert_same(got, want):
  np.testing.assert_equal(got.dtype, want.dtype)
  np.testing.assert_equal(got.shape, want.shape)
  np.testing.assert_equal(got.tobytes(), want.tobytes())


if __name__ == '__main__':
  absltest.main()
