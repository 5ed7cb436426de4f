"""The randomized Hadamard transform: orthogonal, linear, its own inverse."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import hadamard


class HadamardTest(chex.TestCase):

  @parameterized.parameters(hadamard.SIGNS, (1,) * 16)
  def test_matrix_is_orthogonal_with_entries_of_a_quarter(self, *signs):
    t = hadamard.matrix(signs)
    np.testing.assert_array_equal(t @ t.T, np.eye(16))
    np.testing.assert_array_equal(np.abs(t), 0.25)
    np.testing.assert_array_equal(t[:, 0], np.array(signs) / 4)

  def test_inverse_undoes_the_transform_of_small_integers(self):
    # Multiples of 1/4 below 64: no rounding in either direction.
    x = jax.random.randint(jax.random.key(0), (5, 48), -3, 4)
    x = x.astype(jnp.bfloat16)
    rotated = hadamard.transform(x)
    self.assertGreater(float(jnp.mean(rotated != x)), 0.5)
    chex.assert_trees_all_equal(hadamard.inverse(rotated), x)

  def test_rotating_both_operands_leaves_the_product(self):
    x, w = (
        jax.random.randint(jax.random.key(i), (4, 32), -3, 4).astype(
            jnp.bfloat16
        )
        for i in range(2)
    )
    dot = lambda a, b: np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    np.testing.assert_array_equal(
        dot(hadamard.transform(x), hadamard.transform(w)), dot(x, w)
    )

  def test_spreads_an_outlier(self):
    x = jnp.zeros((1, 16)).at[0, 5].set(100.0)
    np.testing.assert_array_equal(jnp.abs(hadamard.transform(x)), 25.0)

  def test_bad_input_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'multiple of 16'):
      hadamard.transform(jnp.zeros((2, 24)))
    with self.assertRaisesRegex(ValueError, '16 numbers'):
      hadamard.matrix((1, -1))
