"""Tests of losses."""

import functools

from absl.testing import parameterized
import chex
import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np

from nvfp4_jax.rl import losses
from tests.rl import numpy_oracle

# Compiling dominates the time of these tests, so that they share shapes.
_surrogate = functools.partial(
    losses.clipped_surrogate, clip_eps=0.2, clip_eps_high=0.28
)
_MASK = np.array(  # of three completions, as the sampler makes them
    [
        [1, 1, 1, 0, 0],  # [5, 9, EOS] and fill
        [1, 1, 1, 1, 1],  # cut off by the length limit
        [1, 0, 0, 0, 0],  # EOS at once
    ],
    bool,
)


class ClippedSurrogateTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_both_signs_on_both_sides_of_the_clip(self):
    # Ratio, advantage, loss, gradient in the log-prob, clipped.
    cases = np.array(
        [
            (1.5, 2.0, -2.56, 0.0, True),  # more of a good one: held at 1.28
            (0.5, 2.0, -1.00, -1.0, False),  # less of a good one: comes back
            (1.5, -2.0, 3.00, 3.0, False),  # more of a bad one: comes back
            (0.5, -2.0, 1.60, 0.0, True),  # less of a bad one: held at 0.8
            (1.25, 2.0, -2.50, -2.5, False),  # the upper bound is not 1.2
            (0.75, -2.0, 1.60, 0.0, True),  # the lower bound is not 0.72
            (1.1, 0.0, 0.00, 0.0, False),
        ]
    ).T
    ratio, advantage, loss, gradient, clipped = cases[:, None]
    old = np.full_like(ratio, -1.0)
    got, got_gradient = self.variant(_loss_and_gradient)(
        old + np.log(ratio), old, advantage, np.ones_like(ratio, bool)
    )
    chex.assert_type(got.loss, jnp.float32)
    np.testing.assert_allclose(got.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(got_gradient, gradient, rtol=1e-6)
    np.testing.assert_array_equal(got.clipped, clipped.astype(bool))
    # Exactly 0 where it is clipped, not merely small.
    np.testing.assert_array_equal(got_gradient == 0, gradient == 0)

  def test_on_policy_it_is_the_policy_gradient(self):
    # The ratio is 1 in value, and its gradient is that of the log-prob.
    new, _, advantage, mask = _random_batch()
    got, gradient = _jitted(new, new, advantage, mask)
    want = np.where(mask, -advantage, 0)
    np.testing.assert_array_equal(got.loss, want)
    np.testing.assert_array_equal(gradient, want)
    self.assertFalse(np.any(got.clipped))

  @parameterized.parameters(
      # log-ratio, advantage, in the mask, loss
      (200.0, 0.0, True, 0.0),
      (-200.0, 1.0, True, -np.exp(-20)),
      (200.0, 1.0, True, -1.28),
      (200.0, -1.0, True, np.exp(20)),
      (-200.0, -1.0, True, 0.8),
      (200.0, 1.0, False, 0.0),
      (200.0, -1.0, False, 0.0),
      (float('inf'), -1.0, False, 0.0),
      (float('nan'), 1.0, False, 0.0),
      (float('-inf'), 1.0, False, 0.0),
  )
  def test_extreme_ratios_have_a_finite_loss_and_no_gradient(
      self, log_ratio, advantage, live, loss
  ):
    # Beside a token of ratio 1, which keeps its gradient.
    got, gradient = _jitted(
        *np.array([[[log_ratio, -1.0]], [[0.0, -1.0]], [[advantage, 3.0]]]),
        np.array([[live, True]]),
    )
    np.testing.assert_allclose(got.loss, [[loss, -3.0]], rtol=1e-5)
    np.testing.assert_array_equal(gradient, [[0.0, -3.0]])
    np.testing.assert_array_equal(got.clipped[:, 1], [False])

  def test_masked_tokens_have_no_loss_and_are_not_clipped(self):
    got, gradient = _jitted(
        np.full((3, 5), 3.0), np.zeros((3, 5)), np.ones((3, 5)), _MASK
    )
    np.testing.assert_array_equal(got.loss[~_MASK], np.zeros(6))
    np.testing.assert_array_equal(gradient[~_MASK], np.zeros(6))
    np.testing.assert_array_equal(got.clipped, _MASK)

  @parameterized.parameters(0, 1, 2)
  def test_values_under_the_mask_change_no_bit(self, argument):
    batch = list(_random_batch())
    want = _jitted(*batch)
    for value in (7.0, -1e30, np.nan):
      batch[argument] = np.where(_MASK, batch[argument], value)
      chex.assert_trees_all_equal(_jitted(*batch), want)

  def test_depends_on_the_ratio_alone(self):
    new, old, advantage, mask = _random_batch()
    got = _jitted(new + 2.0, old + 2.0, advantage, mask)
    want = _jitted(new, old, advantage, mask)
    chex.assert_trees_all_close(got, want, rtol=1e-5)

  def test_is_differentiable_inside_the_clip(self):
    rng = np.random.default_rng(0)
    old = jnp.asarray(-rng.exponential(size=(3, 5)), jnp.float32)
    new = old + jnp.asarray(rng.uniform(-0.15, 0.15, (3, 5)), jnp.float32)
    advantage = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)
    loss = jax.jit(
        lambda new: losses.token_mean(
            _surrogate(new, old, advantage, _MASK).loss, _MASK
        )
    )
    # Central differences in float32.
    test_util.check_grads(
        loss, (new,), order=1, modes=['rev'], atol=1e-3, rtol=1e-2, eps=1e-2
    )

  def test_unequal_shapes_raise(self):
    new, old, advantage, mask = _random_batch()
    with self.assertRaises(AssertionError):
      _surrogate(new, old, advantage[:, :1], mask)


class TokenMeanTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_is_the_mean_over_all_tokens_of_the_batch(self):
    # Not the mean of the rows' means, and not over B T.
    values = np.array([[1.0] * 5, [2.0] * 5, [9.0] * 5])
    got = self.variant(losses.token_mean)(jnp.asarray(values), _MASK)
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, (3 * 1 + 5 * 2 + 1 * 9) / 9, rtol=1e-6)

  def test_its_gradient_is_one_over_the_count(self):
    gradient = jax.grad(losses.token_mean)(jnp.ones((3, 5)), _MASK)
    np.testing.assert_allclose(gradient, _MASK / 9, rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_nothing_under_the_mask_gives_zero(self):
    value, gradient = self.variant(jax.value_and_grad(losses.token_mean))(
        jnp.ones((3, 5)), np.zeros((3, 5), bool)
    )
    self.assertEqual(value, 0)
    np.testing.assert_array_equal(gradient, np.zeros((3, 5)))

  def test_an_all_masked_loss_is_zero(self):
    new, old, advantage, _ = _random_batch()
    mask = np.zeros((3, 5), bool)

    @jax.jit
    @jax.value_and_grad
    def loss(new):
      return losses.token_mean(_surrogate(new, old, advantage, mask).loss, mask)

    value, gradient = loss(new)
    self.assertEqual(value, 0)
    np.testing.assert_array_equal(gradient, np.zeros((3, 5)))

  @parameterized.parameters(1e30, float('nan'), float('inf'))
  def test_values_outside_the_mask_do_not_matter(self, bad):
    values = jnp.arange(15.0).reshape(3, 5)
    mean = jax.jit(jax.value_and_grad(losses.token_mean))
    chex.assert_trees_all_equal(
        mean(jnp.where(_MASK, values, bad), _MASK), mean(values, _MASK)
    )


_CONFIGS = (
    losses.LossConfig('ppo'),
    losses.LossConfig('ppo', dual_clip=1.5),
    losses.LossConfig('gspo', 0.05, 0.1),
    losses.LossConfig('cispo', clip_eps_high=0.3),
    losses.LossConfig('tbpo', 0.05, 0.1, dual_clip=1.2),
)


class SurrogateTest(chex.TestCase):

  @parameterized.product(config=_CONFIGS, scale=(0.3, 30.0))
  def test_equals_the_oracle_with_its_gradient(self, config, scale):
    flags = ('clipped_low', 'clipped_high', 'clipped_dual')
    for seed in range(5):
      batch = numpy_oracle.ragged(seed, scale=scale)
      got, gradient = _of_config(config, *batch)
      want = numpy_oracle.surrogate(
          config.kind,
          *batch[:2],
          np.broadcast_to(batch[2][:, None], batch[3].shape),
          batch[3],
          *config.bounds,
      )
      np.testing.assert_allclose(got.loss, want['loss'], rtol=5e-5, atol=1e-6)
      np.testing.assert_allclose(
          gradient, want['gradient'], rtol=5e-5, atol=1e-6
      )
      for name in flags:
        np.testing.assert_array_equal(getattr(got, name), want[name], name)
      clipped = np.any([want[name] for name in flags], axis=0)
      np.testing.assert_array_equal(got.clipped, clipped)
      self.assertEqual(int(got.ratio_clamped), want['ratio_clamped'])

  def test_dual_clip_by_hand(self):
    # Ratio, advantage, loss, gradient, low, high, dual.
    cases = np.array(
        [
            (4.0, -1.0, 3.0, 0.0, 0, 0, 1),  # by -3 A, not by -4 A
            (2.0, -1.0, 2.0, 2.0, 0, 0, 0),
            (0.5, -1.0, 0.8, 0.0, 1, 0, 0),
            (4.0, 1.0, -1.28, 0.0, 0, 1, 0),  # not for good ones
            (4.0, 0.0, 0.0, 0.0, 0, 0, 0),
        ]
    ).T[:, None]
    ratio, advantage, loss, gradient, low, high, dual = cases
    got, got_gradient = _of_config(
        losses.LossConfig(dual_clip=3.0),
        np.float32(np.log(ratio)),
        np.zeros((1, 5), np.float32),
        np.float32(advantage),
        np.ones((1, 5), bool),
    )
    np.testing.assert_allclose(got.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(got_gradient, gradient, rtol=1e-6)
    np.testing.assert_array_equal(got.clipped_low, low)
    np.testing.assert_array_equal(got.clipped_high, high)
    np.testing.assert_array_equal(got.clipped_dual, dual)

  def test_gspo_has_the_gradient_of_the_sequence_ratio(self):
    config = losses.LossConfig('gspo', 0.05, 0.1)
    new, old, advantage, mask = numpy_oracle.ragged(0, scale=0.1)

    def plain(new):
      gap = jnp.where(mask, new - old, 0.0)
      count = np.maximum(mask.sum(axis=1), 1)
      s = jnp.exp(gap.sum(axis=1) / count)
      clipped = jnp.clip(s, 1 - 0.05, 1 + 0.1) * advantage
      return -jnp.sum(jnp.minimum(s * advantage, clipped)[mask.any(axis=1)]) / 5

    def ours(new):
      got = losses.surrogate(config, new, old, advantage, mask)
      return losses.aggregate(got.loss, mask, 'seq_mean_token_mean')

    self.assertEqual(np.sum(mask.any(axis=1)), 5)
    want, want_gradient = jax.value_and_grad(plain)(jnp.asarray(new))
    got, gradient = jax.value_and_grad(ours)(jnp.asarray(new))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(
        gradient[mask], want_gradient[mask], rtol=1e-4, atol=1e-7
    )

  def test_tbpo_keeps_negative_advantages_within_the_band(self):
    config = losses.LossConfig('tbpo', 0.1, 0.2, dual_clip=1.3)
    ratio = np.array([0.8, 0.95, 1.25, 1.4])[:, None]
    mask = np.ones((4, 1), bool)
    got, gradient = _of_config(
        config, np.float32(np.log(ratio)), 0 * ratio, -np.ones(4), mask
    )
    want = np.array([[0.9], [0.95], [1.25], [1.3]])
    np.testing.assert_allclose(got.loss, want, rtol=1e-6)
    inside = np.array([[False], [True], [True], [False]])
    np.testing.assert_allclose(gradient, want * inside, rtol=1e-6)
    # A good one is clipped as in GSPO.
    got, _ = _of_config(
        config, np.float32(np.log(ratio)), 0 * ratio, np.ones(4), mask
    )
    np.testing.assert_allclose(
        got.loss, [[-0.8], [-0.95], [-1.2], [-1.2]], rtol=1e-6
    )

  def test_cispo_never_loses_a_gradient(self):
    config = losses.LossConfig('cispo')
    old = np.full((1, 3), -2.0, np.float32)
    new = np.float32(old + np.log([[0.01, 2.0, 50.0]]))
    mask = np.ones((1, 3), bool)
    got, gradient = _of_config(config, new, old, np.ones(1), mask)
    np.testing.assert_allclose(gradient, [[-0.01, -2.0, -5.0]], rtol=1e-5)
    np.testing.assert_array_equal(got.clipped, [[False, False, True]])

  @parameterized.product(config=_CONFIGS, log_ratio=(200.0, 1e4))
  def test_report_a12_ratios_are_held_and_counted(self, config, log_ratio):
    # +x with advantage 0; -x with advantage 1; masked and +x: one a batch.
    for x, advantage, live, count in (
        (log_ratio, 0.0, True, 1),
        (-log_ratio, 1.0, True, 1),
        (log_ratio, -1.0, True, 1),
        (log_ratio, -1.0, False, 0),
    ):
      batch = (
          np.float32([[x], [-1.0]]),
          np.float32([[0.0], [-1.0]]),
          np.float32([advantage, 3.0]),
          np.array([[live], [True]]),
      )
      got, gradient = _of_config(config, *batch)
      self.assertEqual(int(got.ratio_clamped), count)
      self.assertTrue(np.all(np.isfinite(got.loss)))
      self.assertTrue(np.all(np.isfinite(gradient)))
      self.assertEqual(float(gradient[1, 0]), -3.0)
      if not live or config.kind != 'cispo':
        self.assertEqual(float(gradient[0, 0]), 0.0)

  @parameterized.parameters(*_CONFIGS)
  def test_values_under_the_mask_change_no_bit(self, config):
    batch = [np.nan_to_num(x) for x in numpy_oracle.ragged(1)[:3]]
    mask = numpy_oracle.ragged(1)[3]
    batch[2] = np.broadcast_to(batch[2][:, None], mask.shape)
    want = _of_config(config, *batch, mask)
    for argument in range(3):
      for bad in (np.nan, np.inf, -np.inf, 1e30):
        given = list(batch)
        given[argument] = np.where(mask, batch[argument], np.float32(bad))
        got = _of_config(config, *given, mask)
        chex.assert_trees_all_equal(got, want)
    np.testing.assert_array_equal(got[1][~mask], 0)

  @parameterized.parameters(*_CONFIGS)
  def test_on_policy_it_is_the_policy_gradient(self, config):
    new, _, advantage, mask = numpy_oracle.ragged(2)
    got, gradient = _of_config(config, new, new, advantage, mask)
    want = np.where(mask, -advantage[:, None], 0)
    np.testing.assert_array_equal(gradient, want)
    self.assertFalse(np.any(got.clipped))
    self.assertEqual(int(got.ratio_clamped), 0)

  # The value of cispo is not what its gradient is of.
  @parameterized.parameters(*(c for c in _CONFIGS if c.kind != 'cispo'))
  def test_is_the_gradient_where_smooth(self, config):
    new, old, advantage, mask = numpy_oracle.ragged(3, (3, 4), scale=0.02)
    new, old = (np.where(mask, x, 0) for x in (new, old))
    if config.kind != 'ppo':  # Their token form has the gradient of the mean.
      mask = mask & (np.cumsum(mask, axis=1) == 1)
    loss = jax.jit(
        lambda new: jnp.sum(
            losses.surrogate(config, new, old, advantage, mask).loss
        )
    )
    test_util.check_grads(
        loss, (new,), order=1, modes=['rev'], atol=1e-3, rtol=1e-2, eps=1e-2
    )

  def test_nothing_trained_gives_zero(self):
    for config in _CONFIGS:
      batch = numpy_oracle.ragged(0)[:3]
      got, gradient = _of_config(config, *batch, np.zeros((6, 9), bool))
      for leaf in jax.tree.leaves((got, gradient)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


@functools.partial(jax.jit, static_argnums=0)
def _of_config(config, new, old, advantage, mask):
  new, old, advantage = (
      jnp.asarray(x, jnp.float32) for x in (new, old, advantage)
  )
  fn = lambda new: losses.surrogate(config, new, old, advantage, mask)
  return fn(new), jax.grad(lambda new: jnp.sum(fn(new).loss))(new)


def _loss_and_gradient(new, old, advantage, mask):
  new, old, advantage = (
      jnp.asarray(x, jnp.float32) for x in (new, old, advantage)
  )
  fn = lambda new: _surrogate(new, old, advantage, mask)
  total = lambda new: jnp.sum(fn(new).loss)
  return fn(new), jax.grad(total)(new)


_jitted = jax.jit(_loss_and_gradient)


def _random_batch():
  rng = np.random.default_rng(0)
  new, old = -rng.exponential(size=(2, 3, 5))
  advantage = rng.normal(size=(3, 5))
  return *(np.float32(x) for x in (new, old, advantage)), _MASK
