"""Tests of checkpoint."""

import contextlib
import pathlib
import shutil
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from nvfp4_jax import checkpoint


class CheckpointTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(root) / 'run' / 'checkpoints'

  def save_steps(self, *steps):
    for step in steps:
      arrays, record = {'x': jnp.int32(step)}, {'step': step}
      checkpoint.save(self.folder, step, arrays, record)

  def restored_step(self):
    arrays, record = checkpoint.restore(self.folder, {'x': jnp.int32(0)})
    self.assertEqual(arrays['x'], record['step'])
    return record['step']


class RoundTripTest(CheckpointTest):

  def test_arrays_keep_bits_and_dtypes(self):
    # Random bytes: subnormals, infinities and NaN payloads occur.
    data = np.random.default_rng(0).integers(0, 256, (16, 32), dtype=np.uint8)
    arrays = {
        np.dtype(dtype).name: jnp.asarray(data.view(dtype))
        for dtype in (
            np.float32,
            ml_dtypes.bfloat16,
            np.int32,
            np.uint32,
            np.uint8,
            ml_dtypes.float8_e4m3fn,
        )
    }
    arrays['scalar'] = jnp.int32(7)
    checkpoint.save(self.folder, 1, arrays, {})
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays
    )
    got, _ = checkpoint.restore(self.folder, like)
    _assert_bits_equal(got, arrays)

  def test_a_per_layer_tree_keeps_its_list(self):
    # More than ten layers, so that sorting by name would show.
    layers = [{'mlp.gate': jnp.full((2, 3), float(i))} for i in range(12)]
    params = {'embed_tokens': jnp.arange(4.0), 'layers': layers}
    state = {'params': params, 'opt_state': ({'mu': params}, ())}
    checkpoint.save(self.folder, 1, state, {})
    got, _ = checkpoint.restore(
        self.folder, jax.tree.map(jnp.zeros_like, state)
    )
    self.assertIsInstance(got['params']['layers'], list)
    _assert_bits_equal(got, state)

  def test_like_may_be_numpy_arrays(self):
    arrays = {'x': jnp.arange(4.0)}
    checkpoint.save(self.folder, 1, arrays, {})
    got, _ = checkpoint.restore(self.folder, {'x': np.zeros(4, np.float32)})
    _assert_bits_equal(got, arrays)

  def test_keys_travel_as_key_data(self):
    key = jax.random.key(5)
    arrays = {'key': jax.random.key_data(key)}
    checkpoint.save(self.folder, 1, arrays, {})
    got, _ = checkpoint.restore(self.folder, arrays)
    self.assertEqual(jax.random.wrap_key_data(got['key']), key)

  def test_the_record_comes_back(self):
    record = {
        'step': 3,
        'rate': 0.1,
        'policy': {'rules': [{'pattern': r'\d+', 'precision': None}]},
        'name': 'Größe',
        'flag': True,
    }
    checkpoint.save(self.folder, 3, {'x': jnp.zeros(1)}, record)
    _, got = checkpoint.restore(self.folder, {'x': jnp.zeros(1)})
    self.assertEqual(got, record)

  def test_a_relative_folder_will_do(self):
    self.save_steps(1)
    self.enterContext(contextlib.chdir(self.folder.parent))
    self.folder = pathlib.Path('checkpoints')
    self.save_steps(2)
    self.assertEqual(self.restored_step(), 2)


class StepsTest(CheckpointTest):

  def test_the_last_two_are_kept(self):
    self.save_steps(1, 2, 5)
    kept = sorted(path.name for path in self.folder.iterdir())
    self.assertEqual(kept, ['2', '5'])
    self.assertEqual(checkpoint.latest_step(self.folder), 5)
    self.assertEqual(self.restored_step(), 5)

  def test_steps_are_compared_as_numbers(self):
    self.save_steps(9, 10)
    self.assertEqual(checkpoint.latest_step(self.folder), 10)

  def test_a_missing_folder_has_no_step_and_is_not_made(self):
    self.assertIsNone(checkpoint.latest_step(self.folder))
    with self.assertRaisesRegex(FileNotFoundError, str(self.folder)):
      self.restored_step()
    self.assertFalse(self.folder.exists())

  def test_an_empty_folder_has_no_step(self):
    self.folder.mkdir(parents=True)
    self.assertIsNone(checkpoint.latest_step(self.folder))
    with self.assertRaisesRegex(FileNotFoundError, str(self.folder)):
      self.restored_step()

  def test_a_save_that_broke_off_is_not_a_step(self):
    self.save_steps(1)
    with self.assertRaises(TypeError):  # after the arrays are written
      checkpoint.save(self.folder, 2, {'x': jnp.int32(2)}, {'step': object()})
    self.assertEqual(self.restored_step(), 1)
    self.save_steps(2)
    self.assertEqual(self.restored_step(), 2)

  @parameterized.parameters('', '-1732924800')
  def test_a_leftover_of_a_killed_save_is_not_a_step(self, suffix):
    # The hardest case: everything is written but the final rename.
    self.save_steps(1)
    name = f'2{ocp.utils.TMP_DIR_SUFFIX}{suffix}'
    shutil.copytree(self.folder / '1', self.folder / name)
    self.assertEqual(checkpoint.latest_step(self.folder), 1)
    self.assertEqual(self.restored_step(), 1)
    self.save_steps(2, 3)
    self.assertEqual(self.restored_step(), 3)

  def test_a_leftover_alone_is_no_checkpoint(self):
    self.save_steps(1)
    (self.folder / '1').rename(self.folder / f'1{ocp.utils.TMP_DIR_SUFFIX}')
    self.assertIsNone(checkpoint.latest_step(self.folder))
    with self.assertRaises(FileNotFoundError):
      self.restored_step()

  def test_a_step_that_is_not_above_the_last_raises(self):
    self.save_steps(5)
    with self.assertRaises(ValueError):
      self.save_steps(3)


class MismatchTest(CheckpointTest):

  def setUp(self):
    super().setUp()
    self.policy = {'keep_last': 0.15, 'rules': [{'pattern': 'a', 'spec': None}]}
    self.arrays = {'layers': [{'w': jnp.ones((2, 3))}]}
    record = {'policy': self.policy}
    checkpoint.save(self.folder, 1, self.arrays, record)

  def test_the_same_policy_restores(self):
    got, _ = checkpoint.restore(self.folder, self.arrays, policy=self.policy)
    _assert_bits_equal(got, self.arrays)

  def test_without_a_policy_nothing_is_compared(self):
    got, _ = checkpoint.restore(self.folder, self.arrays)
    _assert_bits_equal(got, self.arrays)

  def test_another_policy_raises_and_names_both(self):
    other = {'keep_last': 0.0, 'rules': []}
    with self.assertRaises(checkpoint.PolicyMismatchError) as context:
      checkpoint.restore(self.folder, self.arrays, policy=other)
    message = str(context.exception)
    for part in (str(self.policy), str(other), str(self.folder)):
      self.assertIn(part, message)
    self.assertIsInstance(context.exception, ValueError)

  def test_a_record_without_policy_is_a_mismatch(self):
    checkpoint.save(self.folder, 2, self.arrays, {})
    with self.assertRaises(checkpoint.PolicyMismatchError):
      checkpoint.restore(self.folder, self.arrays, policy=self.policy)

  @parameterized.named_parameters(
      ('larger', [{'w': np.ones((3, 3), np.float32)}], r'\(3, 3\)'),
      ('smaller', [{'w': np.ones((1, 3), np.float32)}], r'\(1, 3\)'),
      ('other_name', [{'v': np.ones((2, 3), np.float32)}], "'v'|\\.v"),
      ('more_layers', [{'w': np.ones((2, 3), np.float32)}] * 2, 'layers'),
      ('fewer_layers', [], 'layers'),
  )
  def test_arrays_of_another_shape_raise(self, layers, named):
    with self.assertRaisesRegex(ValueError, named):
      checkpoint.restore(self.folder, {'layers': layers})

  def test_arrays_of_another_dtype_raise(self):
    like = {'layers': [{'w': np.ones((2, 3), ml_dtypes.bfloat16)}]}
    with self.assertRaises(ValueError):
      checkpoint.restore(self.folder, like)


def _assert_bits_equal(got, want):
  np.testing.assert_equal(jax.tree.structure(got), jax.tree.structure(want))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_equal(a.dtype, b.dtype)
    np.testing.assert_equal(a.shape, b.shape)
    np.testing.assert_equal(np.asarray(a).tobytes(), np.asarray(b).tobytes())


if __name__ == '__main__':
  absltest.main()
