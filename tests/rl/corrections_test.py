"""Tests of corrections."""

import functools

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax.rl import corrections
from tests.rl import numpy_oracle

_ALL = np.ones((1, 4), bool)


class TokenTisTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_is_the_ratio_of_learner_to_sampler_up_to_the_cap(self):
    learner = np.log([[0.5, 0.2, 0.9, 0.4]])
    sampler = np.log([[0.25, 0.4, 0.1, 0.4]])
    got = self.variant(lambda *args: _weights(*args, cap=3))(
        learner, sampler, _ALL
    )
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, [[2.0, 0.5, 3.0, 1.0]], rtol=1e-6)

  def test_equal_log_probs_give_exactly_one(self):
    logprobs = -np.geomspace(1e-8, 50, 4)[None]
    got = _weights(logprobs, logprobs, _ALL)
    np.testing.assert_array_equal(got, np.ones((1, 4)))

  def test_a_cap_of_one_only_lowers(self):
    got = _weights([[0.0, -1.0]], [[-1.0, 0.0]], _ALL[:, :2], cap=1)
    np.testing.assert_allclose(got, [[1.0, np.exp(-1)]], rtol=1e-6)

  @parameterized.parameters(0.99, 0.0, -1.0, float('nan'))
  def test_a_cap_below_one_raises(self, cap):
    with self.assertRaisesRegex(ValueError, f'cap {cap} is below 1'):
      _weights([[0.0]], [[0.0]], _ALL[:, :1], cap=cap)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(float('nan'), float('-inf'), float('inf'))
  def test_a_log_prob_that_is_not_finite_is_neutral(self, bad):
    # Learner, sampler and both; the fourth token keeps its own weight.
    learner = np.array([[bad, -1.0, bad, -0.5]])
    sampler = np.array([[-1.0, bad, bad, 0.0]])
    got = self.variant(_weights)(learner, sampler, _ALL)
    np.testing.assert_allclose(got, [[1, 1, 1, np.exp(-0.5)]], rtol=1e-6)
    np.testing.assert_array_equal(got[:, :3], np.ones((1, 3)))

  def test_the_weight_is_one_outside_the_mask(self):
    learner = np.array([[5.0, -5.0, np.nan, 0.5]])
    mask = np.array([[False, False, False, True]])
    got = _weights(learner, np.zeros((1, 4)), mask)
    np.testing.assert_array_equal(got[:, :3], np.ones((1, 3)))
    np.testing.assert_allclose(got[:, 3], [np.exp(0.5)], rtol=1e-6)

  def test_a_huge_log_ratio_stays_finite(self):
    log_ratio = np.array([[200.0, -200.0, 3e38, -3e38]])
    got = _weights(log_ratio, np.zeros((1, 4)), _ALL, cap=1e30)
    want = np.exp([[20.0, -20.0, 20.0, -20.0]])
    np.testing.assert_allclose(got, want, rtol=1e-5)

  @chex.variants(with_jit=True, without_jit=True)
  def test_has_no_gradient_in_the_learner(self):
    learner = jnp.array([[-0.3, jnp.nan, 200.0, -0.1]])
    sampler = jnp.array([[-0.2, -1.0, 0.0, -0.1]])
    gradient = self.variant(
        jax.grad(lambda learner: jnp.sum(_weights(learner, sampler, _ALL)))
    )(learner)
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))

  def test_has_no_gradient_in_the_sampler(self):
    gradient = jax.grad(
        lambda sampler: _weights([[-0.3]], sampler, [[True]])[0, 0]
    )(jnp.array([[-0.2]]))
    np.testing.assert_array_equal(gradient, [[0.0]])

  def test_unequal_shapes_raise(self):
    with self.assertRaises(AssertionError):
      _weights([[0.0, 0.0]], [[0.0]], _ALL[:, :2])


_Config = corrections.CorrectionConfig
_CONFIGS = (
    _Config(),
    _Config(cap=None, token_bounds=(0.5, 5.0)),
    _Config('none', token_bounds=(0.8, 1.25)),
    _Config('sequence', cap=3.0),
    _Config(sequence_bounds=(0.9, 1.1)),
    _Config(
        'sequence',
        cap=None,
        sequence_level='product',
        sequence_bounds=(0.0, 3.0),
    ),
    _Config(cap=1.5, normalize=True, veto=0.5),
    _Config('none', opsm_delta=0.05),
    _Config(
        'sequence',
        token_bounds=(0.6, 1.6),
        sequence_bounds=(0.8, 1.3),
        veto=0.4,
        opsm_delta=0.2,
        normalize=True,
    ),
)


class CorrectTest(chex.TestCase):

  @hypothesis.settings(
      max_examples=12, deadline=None, database=None, derandomize=True
  )
  @hypothesis.given(
      seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.01, 0.3, 1.0])
  )
  def test_equals_the_oracle(self, seed, scale):
    batch = numpy_oracle.ragged(seed, scale=scale, bad=True)
    learner, sampler, advantage, mask = batch
    live = mask & np.isfinite(learner) & np.isfinite(sampler)
    for config in _CONFIGS:
      got = _correct(config, learner, sampler, mask, advantage)
      weights, kept = numpy_oracle.correction(
          config, learner, sampler, mask, advantage
      )
      np.testing.assert_allclose(got.weights, weights, rtol=2e-5)
      if got.mask is None:
        np.testing.assert_array_equal(kept, mask)
      else:
        np.testing.assert_array_equal(got.mask, kept)
      metrics = got.metrics
      self.assertEqual(int(metrics['missing_logprobs']), (mask & ~live).sum())
      n = max(live.sum(), 1)
      np.testing.assert_allclose(
          metrics['tis_weight_mean'], weights[live].sum() / n, rtol=1e-5
      )
      np.testing.assert_allclose(
          metrics['rejected_tokens'], (live & ~kept).sum() / n, rtol=1e-5
      )

  def test_default_is_token_tis_bit_for_bit(self):
    learner, sampler, _, mask = numpy_oracle.ragged(0, scale=3.0, bad=True)
    got = _correct(_Config(), learner, sampler, mask, np.ones(6))
    want = jax.jit(functools.partial(corrections.token_tis, cap=2.0))(
        learner, sampler, mask
    )
    np.testing.assert_array_equal(got.weights, want)
    self.assertIsNone(got.mask)

  def test_sequence_weight_is_the_product_of_its_tokens(self):
    log_ratio = np.log([[2.0, 0.5, 1.5, 1.0], [2.0, 2.0, 2.0, 2.0]])
    got = _of(_Config('sequence', cap=3.0), log_ratio)
    np.testing.assert_allclose(got.weights, [[1.5] * 4, [3.0] * 4], rtol=1e-6)
    self.assertEqual(float(got.metrics['tis_clipfrac']), 0.5)

  def test_icepop_drops_what_is_outside_and_weighs_the_rest(self):
    log_ratio = np.log([[0.4, 0.6, 4.0, 6.0]])
    got = _of(_CONFIGS[1], log_ratio)
    np.testing.assert_allclose(got.weights, [[0, 0.6, 4.0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(got.mask, [[False, True, True, False]])
    self.assertEqual(float(got.metrics['rejected_token_bounds']), 0.5)
    np.testing.assert_allclose(
        got.metrics['tis_weight_mean'], 4.6 / 4, rtol=1e-6
    )

  def test_geometric_mean_rejects_by_length_product_does_not(self):
    # Ten thousandths a token: within 1.001 each, but not in the product.
    log_ratio = np.full((2, 4), 5e-4) * [[1], [4]]
    got = _of(_Config('none', sequence_bounds=(0.999, 1.001)), log_ratio)
    np.testing.assert_array_equal(got.weights, [[1] * 4, [0] * 4])
    self.assertEqual(float(got.metrics['rejected_sequence_bounds']), 0.5)
    product = _Config(
        'none', sequence_bounds=(0.999, 1.001), sequence_level='product'
    )
    got = _of(product, log_ratio)
    np.testing.assert_array_equal(got.weights, np.zeros((2, 4)))

  def test_veto_drops_the_sequence_of_one_token(self):
    log_ratio = np.log([[1.0, 1e-5, 1.0, 1.0], [1.0, 2e-4, 1.0, 1.0]])
    got = _of(_Config('none', veto=1e-4), log_ratio)
    np.testing.assert_array_equal(got.weights, [[0] * 4, [1] * 4])
    self.assertEqual(float(got.metrics['rejected_veto']), 0.5)

  def test_opsm_drops_bad_answers_that_the_learner_finds_unlikely(self):
    # Mean of sampler - learner .2, -.2, .2 and .05.
    log_ratio = -np.array([[0.2], [-0.2], [0.2], [0.05]]) * np.ones((4, 4))
    advantage = jnp.array([-1.0, -1.0, 1.0, -1.0])
    got = _of(_Config('none', opsm_delta=0.1), log_ratio, advantage)
    np.testing.assert_array_equal(got.weights[:, 0], [0, 1, 1, 1])
    self.assertEqual(float(got.metrics['rejected_opsm']), 0.25)
    each = np.broadcast_to(advantage[:, None], (4, 4))
    again = _of(_Config('none', opsm_delta=0.1), log_ratio, each)
    chex.assert_trees_all_equal(again, got)

  def test_normalized_weights_have_mean_one_before_masks(self):
    log_ratio = np.log([[0.5, 1.5, 4.0, 1.0]])
    config = _Config(cap=2.0, normalize=True, token_bounds=(0.6, 5.0))
    got = _of(config, log_ratio)
    want = np.array([[0.5, 1.5, 2.0, 1.0]]) / 1.25
    want[0, 0] = 0
    np.testing.assert_allclose(got.weights, want, rtol=1e-6)

  def test_report_13_missing_log_probs_are_neutral_and_counted(self):
    learner = np.zeros((6, 9), np.float32)
    sampler = learner.copy()
    sampler[0, :4] = np.nan, -np.log(2), -np.inf, 0.0
    mask = np.zeros((6, 9), bool)
    mask[0, :4] = True
    finite = mask & np.isfinite(sampler)
    for config in _CONFIGS:
      alone = _correct(config, learner, sampler, finite, np.ones(6))
      got = _correct(config, learner, sampler, mask, np.ones(6))
      self.assertEqual(int(got.metrics['missing_logprobs']), 2)
      for name in ('tis_weight_mean', 'tis_clipfrac', 'rejected_tokens'):
        self.assertEqual(got.metrics[name], alone.metrics[name])
      weights = np.asarray(got.weights)
      np.testing.assert_array_equal(weights[finite], alone.weights[finite])
      if config.sequence_bounds is None:  # Else it may go with its sequence.
        np.testing.assert_array_equal(weights[mask & ~finite], [1, 1])

  @parameterized.parameters(*_CONFIGS)
  def test_values_under_the_mask_change_no_bit(self, config):
    *batch, advantage, mask = numpy_oracle.ragged(1)
    batch = [np.where(mask, x, 0) for x in batch]
    want = _correct(config, *batch, mask, advantage)
    for argument in range(2):
      for bad in (np.nan, np.inf, -np.inf, 1e30):
        given = list(batch)
        given[argument] = np.where(mask, batch[argument], np.float32(bad))
        got = _correct(config, *given, mask, advantage)
        chex.assert_trees_all_equal(got, want)
    np.testing.assert_array_equal(want.weights[~mask], 1)

  def test_advantages_under_the_mask_change_no_bit(self):
    *batch, advantage, mask = numpy_oracle.ragged(1)
    advantage = np.broadcast_to(advantage[:, None], mask.shape)
    want = _correct(_CONFIGS[-1], *batch, mask, advantage)
    for bad in (np.nan, -np.inf):
      given = np.where(mask, advantage, np.float32(bad))
      got = _correct(_CONFIGS[-1], *batch, mask, given)
      chex.assert_trees_all_equal(got, want)

  @parameterized.parameters(*_CONFIGS)
  def test_extreme_ratios_and_empty_batches(self, config):
    new, mask = _extreme()
    got = _correct(config, new, 0 * new, mask, -np.ones(6))
    self.assertTrue(np.all(np.isfinite(got.weights)))
    if config.weights == 'token':
      self.assertEqual(int(got.metrics['ratio_clamped']), 4)
    empty = _correct(config, new, 0 * new, ~mask, -np.ones(6))
    np.testing.assert_array_equal(empty.weights, np.ones((6, 9)))
    for name, value in empty.metrics.items():
      self.assertEqual(float(value), 0, name)

  @parameterized.parameters(_CONFIGS[0], _CONFIGS[-1])
  def test_has_no_gradient(self, config):
    new, mask = _extreme()
    gradient = jax.jit(
        jax.grad(
            lambda x: jnp.sum(
                corrections.correct(config, x, 0 * new, mask, x[:, 0]).weights
            )
        )
    )(new)
    np.testing.assert_array_equal(gradient, np.zeros((6, 9)))

  @parameterized.parameters(
      ({'weights': 'tis'}, "'tis' is not one of .*sequence"),
      ({'sequence_level': 'mean'}, "'mean' is not one of .*geometric"),
      (
          {'weights': 'none', 'cap': 3.0},
          "cap 3.0 .* not used by weights 'none'",
      ),
      ({'weights': 'none', 'normalize': True}, 'normalize True'),
      ({'cap': None}, "weights 'token' need a cap or bounds"),
      ({'cap': 0.5}, 'cap 0.5 is below 1'),
      (
          {'weights': 'sequence', 'cap': None, 'token_bounds': (0.5, 2.0)},
          "weights 'sequence' need a cap",
      ),
      ({'sequence_level': 'product'}, "'product' needs sequence_bounds"),
      ({'token_bounds': (1.1, 2.0)}, 'do not enclose 1'),
      ({'sequence_bounds': (0.5, 0.9)}, 'do not enclose 1'),
      ({'veto': 1.5}, 'veto 1.5'),
      ({'opsm_delta': -0.1}, 'opsm_delta -0.1'),
  )
  def test_bad_configs_raise(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      _Config(**fields)

  def test_opsm_needs_advantages(self):
    with self.assertRaisesRegex(ValueError, 'needs advantages'):
      _of(_Config(opsm_delta=0.1), np.zeros((1, 4)))


def _extreme():
  new = np.zeros((6, 9), np.float32)
  new[0, :4] = 200, -200, 1e4, -1e4
  return new, np.ones((6, 9), bool)


def _of(config, log_ratio, advantages=None):
  log_ratio = jnp.asarray(log_ratio, jnp.float32)
  mask = np.ones(log_ratio.shape, bool)
  zeros = jnp.zeros_like(log_ratio)
  return _correct(config, log_ratio, zeros, mask, advantages)


@functools.partial(jax.jit, static_argnums=0)
def _correct(config, learner, sampler, mask, advantages=None):
  return corrections.correct(config, learner, sampler, mask, advantages)


def _weights(learner, sampler, mask, cap=10.0):
  return corrections.token_tis(
      jnp.asarray(learner, jnp.float32),
      jnp.asarray(sampler, jnp.float32),
      jnp.asarray(mask),
      cap=cap,
  )
