"""Tests of ratios: held exponents and KL estimates."""

import functools

from absl.testing import parameterized
import chex
import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import diagnostics
from nvfp4_jax.rl import ratios
from tests.rl import numpy_oracle

_ALL = np.ones((1, 1), bool)
_PAIRS = tuple((kl, g) for kl in ratios.KLS for g in ratios.KL_GRADIENTS)


class HoldExponentTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_holds_and_counts_what_is_live(self):
    x = jnp.array([[1.0, 20.5, -1e4, 200.0, np.nan, np.inf, np.inf, 20.0]])
    live = np.array([[True, True, True, False, False, False, True, True]])
    got, count = self.variant(ratios.hold_exponent)(x, live)
    np.testing.assert_array_equal(got, [[1, 20, -20, 0, 0, 0, 20, 20]])
    chex.assert_type(count, jnp.int32)
    self.assertEqual(int(count), 3)

  def test_what_is_held_or_masked_has_gradient_zero(self):
    x = jnp.array([[1.0, 200.0, np.nan, np.inf]])
    live = np.array([[True, True, False, True]])
    gradient = jax.grad(lambda x: jnp.sum(ratios.hold_exponent(x, live)[0]))(x)
    np.testing.assert_array_equal(gradient, [[1, 0, 0, 0]])


class KlPenaltyTest(chex.TestCase):

  @parameterized.parameters(
      ('k1', np.log(2.0), 1.0),
      ('k2', np.log(2.0) ** 2 / 2, np.log(2.0)),
      ('k3', 0.5 - 1 + np.log(2.0), 0.5),
      ('low_var_kl', 0.5 - 1 + np.log(2.0), 0.5),
  )
  def test_by_hand_where_new_is_twice_the_reference(self, kl, value, slope):
    for gradient, want in (
        ('value', slope),
        ('k2', np.log(2.0)),
        ('score', slope + value),
        ('importance', slope + value),  # at r = 1
    ):
      x = np.full((6, 9), np.log(0.8), np.float32)
      ref, mask = np.float32(x - np.log(2.0)), np.ones((6, 9), bool)
      got, got_slope = _run(kl, gradient, x, ref, x, mask)
      np.testing.assert_allclose(got.values, 0 * x + value, rtol=1e-5)
      np.testing.assert_allclose(got_slope, 0 * x + want, rtol=1e-5)

  @parameterized.parameters(*_PAIRS)
  def test_equals_the_oracle_with_its_gradient(self, kl, gradient):
    for seed, scale in ((0, 0.3), (1, 3.0), (2, 30.0)):
      new, ref, _, mask = numpy_oracle.ragged(seed, scale=scale)
      rng = np.random.default_rng(seed)
      old = np.float32(new + rng.normal(size=new.shape) * scale)
      got, slope = _run(kl, gradient, new, ref, old, mask)
      count = 0
      for i, t in zip(*np.nonzero(mask), strict=True):
        # As float32 has them; the exponentials blow up their rounding.
        x, y = new[i, t] - ref[i, t], new[i, t] - old[i, t]
        value, want = numpy_oracle.kl(kl, gradient, float(x), 0, float(x - y))
        np.testing.assert_allclose(
            got.values[i, t], value, rtol=3e-4, atol=1e-6
        )
        # The two parts of 'score' cancel, each as large as the exponential.
        atol = 1e-6 * np.exp(min(max(-x, 0), 20))
        np.testing.assert_allclose(slope[i, t], want, rtol=3e-4, atol=atol)
        count += (kl in ('k3', 'low_var_kl') and abs(x) > 20) or (
            gradient == 'importance' and abs(y) > 20
        )
      self.assertEqual(int(got.ratio_clamped), count)
      np.testing.assert_array_equal(got.values[~mask], 0)
      np.testing.assert_array_equal(slope[~mask], 0)

  @parameterized.parameters(
      ('k3', 'score', 'sampled from new'),
      ('k1', 'score', 'sampled from new'),
      ('k2', 'value', 'sampled from new'),
      ('k3', 'k2', 'sampled from new'),
      ('k1', 'importance', 'sampled from old'),
      ('k3', 'importance', 'sampled from old'),
  )
  def test_gradient_is_that_of_the_kl_in_expectation(self, kl, gradient, how):
    # Over all four tokens of a vocabulary, weighted by the sampling policy.
    logits, ref_logits, old_logits = (
        jnp.array([[0.3, -1.0, 0.5, 0.1]]),
        jnp.array([[-0.2, 0.4, 0.6, -1.0]]),
        jnp.array([[0.1, -0.6, 0.9, 0.0]]),
    )
    ref, old = (jax.nn.log_softmax(x) for x in (ref_logits, old_logits))
    mask = np.ones((1, 4), bool)

    def exact(logits):
      new = jax.nn.log_softmax(logits)
      return jnp.sum(jnp.exp(new) * (new - ref))

    def estimate(logits):
      new = jax.nn.log_softmax(logits)
      sampling = old if how == 'sampled from old' else new
      each = ratios.kl_penalty(
          new, ref, mask, kl=kl, gradient=gradient, old_logprobs=old
      ).values
      return jnp.sum(jax.lax.stop_gradient(jnp.exp(sampling)) * each)

    np.testing.assert_allclose(
        jax.grad(estimate)(logits), jax.grad(exact)(logits), atol=1e-6
    )
    if kl != 'k2':
      np.testing.assert_allclose(estimate(logits), exact(logits), rtol=1e-5)

  @parameterized.parameters('k1', 'k3')
  def test_their_own_gradient_is_not(self, kl):
    # What 'score' is for: that of k1 vanishes, that of k3 is of the other KL.
    new = jax.nn.log_softmax(jnp.array([[0.3, -1.0, 0.5]]))
    ref = jax.nn.log_softmax(jnp.array([[-0.2, 0.4, 0.6]]))
    mask = np.ones((1, 3), bool)
    x = lambda kl, gradient: _run(kl, gradient, new, ref, new, mask)[1]
    own, score = x(kl, 'value'), x(kl, 'score')
    self.assertGreater(float(jnp.max(jnp.abs(own - score))), 0.01)

  def test_k3_is_that_of_diagnostics_bit_for_bit(self):
    new, ref, _, mask = numpy_oracle.ragged(0)
    got = _run('k3', 'value', new, ref, new, mask)[0].values
    want = jax.jit(diagnostics.kl_k3)(ref, new, mask)
    np.testing.assert_array_equal(
        jax.jit(lambda x: jnp.sum(x) / mask.sum())(got), want
    )

  @parameterized.parameters(*_PAIRS)
  def test_extreme_ratios_stay_finite(self, kl, gradient):
    new, none = np.zeros((6, 9), np.float32), np.zeros((6, 9), np.float32)
    new[0, :4] = 200, -200, 1e4, -1e4
    got, slope = _run(kl, gradient, new, none, none, np.ones((6, 9), bool))
    self.assertTrue(np.all(np.isfinite(got.values)))
    self.assertTrue(np.all(np.isfinite(slope)))
    if kl == 'low_var_kl':
      self.assertLessEqual(float(jnp.max(got.values)), 10)

  @parameterized.parameters(*_PAIRS)
  def test_values_under_the_mask_change_no_bit(self, kl, gradient):
    new, ref, _, mask = numpy_oracle.ragged(3)
    new, ref = (np.where(mask, x, 0) for x in (new, ref))
    want = _run(kl, gradient, new, ref, ref, mask)
    for bad in (np.nan, np.inf, -np.inf, 1e30):
      fill = lambda x, bad=bad: np.where(mask, x, np.float32(bad))
      for given in (
          (fill(new), ref, ref),
          (new, fill(ref), ref),
          (new, ref, fill(ref)),
          (fill(new), fill(ref), fill(ref)),
      ):
        chex.assert_trees_all_equal(_run(kl, gradient, *given, mask), want)

  def test_nothing_trained_gives_zero(self):
    new, ref, _, mask = numpy_oracle.ragged(0)
    got = _run('k3', 'value', new, ref, ref, np.zeros_like(mask))
    for leaf in jax.tree.leaves(got):
      np.testing.assert_array_equal(leaf, np.zeros_like(leaf))

  @parameterized.parameters('k1', 'k2', 'k3')
  def test_is_differentiable(self, kl):
    new, ref, _, mask = numpy_oracle.ragged(0, (3, 4))
    new, ref = (np.where(mask, x, 0) for x in (new, ref))
    fn = lambda new: jnp.sum(ratios.kl_penalty(new, ref, mask, kl=kl).values)
    test_util.check_grads(
        fn, (new,), order=1, modes=['rev'], atol=1e-3, rtol=1e-2, eps=1e-2
    )

  def test_the_reference_gets_no_gradient(self):
    x = jnp.array([[0.5]])
    fn = lambda ref, old: ratios.kl_penalty(
        x, ref, _ALL, gradient='importance', old_logprobs=old
    ).values[0, 0]
    for gradient in jax.grad(fn, (0, 1))(0 * x, 0 * x):
      np.testing.assert_array_equal(gradient, [[0]])

  @parameterized.parameters(
      ({'kl': 'k4'}, "'k4' is not one of .*k3"),
      ({'gradient': 'k3'}, "'k3' is not one of .*score"),
      ({'gradient': 'importance'}, 'needs old_logprobs'),
  )
  def test_bad_arguments_raise(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      ratios.kl_penalty(jnp.zeros((1, 1)), jnp.zeros((1, 1)), _ALL, **options)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(kl, gradient, new, ref, old, mask):
  fn = lambda new: ratios.kl_penalty(
      new, ref, mask, kl=kl, gradient=gradient, old_logprobs=old
  )
  return fn(new), jax.grad(lambda new: jnp.sum(fn(new).values))(new)
