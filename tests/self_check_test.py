"""The self-check's digests are right, and it names the rule that is broken."""

from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import exact
from nvfp4_jax import quantization
from nvfp4_jax import self_check
from tests import numpy_oracle


class SelfCheckTest(parameterized.TestCase):

  @parameterized.parameters(*self_check.DIGESTS.items())
  def test_digests_are_those_of_numpy(self, spec, digests):
    arrays = numpy_oracle.quantize(self_check.input_matrix(), spec)
    want = tuple(None if a is None else self_check.digest(a) for a in arrays)
    self.assertEqual(digests, want)

  def test_passes_here(self):
    self.assertEqual(list(self_check.faults()), [])

  def test_names_the_first_broken_rule(self):
    reciprocal = lambda a, b: jnp.float32(a) * (1 / jnp.asarray(b))
    specs = (
        quantization.QuantSpec('nvfp4', outer='token'),
        quantization.QuantSpec('mxfp8'),
    )
    digests = {spec: self_check.DIGESTS[spec] for spec in specs}
    jax.clear_caches()
    with (
        mock.patch.object(exact, 'divide', reciprocal),
        mock.patch.object(self_check, 'DIGESTS', digests),
    ):
      found = list(self_check.faults())
    jax.clear_caches()
    with (
        mock.patch.object(self_check, 'faults', lambda: iter(found)),
        self.assertRaisesRegex(
            self_check.SelfCheckError, r'exact.divide.*\d+ of 131072 results'
        ),
    ):
      self_check.check()
    rules = [rule for rule, _ in found]
    self.assertEqual(rules[0], 'exact.divide rounds once')
    self.assertTrue(any("QuantSpec(format='nvfp4'" in rule for rule in rules))
    # MX scales need no division by a variable.
    self.assertFalse(any("QuantSpec(format='mxfp8'" in rule for rule in rules))

  def test_sees_rows_that_depend_on_how_many_there_are(self):
    if jax.default_backend() != 'cpu':
      self.skipTest('Asked on a CPU only.')
    unpadded = lambda rows, dtype: rows
    jax.clear_caches()
    with (
        mock.patch.object(exact, 'padded_rows', unpadded),
        mock.patch.object(self_check, 'DIGESTS', {}),
    ):
      found = list(self_check.faults())
    jax.clear_caches()
    self.assertRegex(str(found), "matmul's rows.*results of 1 rows differ")

  def test_input_spans_what_quantizers_meet(self):
    x = np.abs(self_check.input_matrix().astype(np.float32))
    blocks = x.reshape(x.shape[0], -1, 16)
    self.assertGreater(np.median(blocks.max(-1) / blocks.min(-1)), 2.0**6)
    self.assertGreater(x.max(1).max() / x.max(1).min(), 2.0**14)
