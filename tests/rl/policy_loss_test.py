"""Tests of the loss as a whole: its config, aggregation and penalties."""

import dataclasses
import functools

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax.rl import corrections
from nvfp4_jax.rl import losses
from nvfp4_jax.rl import ratios
from tests.rl import numpy_oracle

_MASK = np.array(  # of three completions, as the sampler makes them
    [
        [1, 1, 1, 0, 0],  # [5, 9, EOS] and fill
        [1, 1, 1, 1, 1],  # cut off by the length limit
        [1, 0, 0, 0, 0],  # EOS at once
    ],
    bool,
)


class LossConfigTest(chex.TestCase):

  @parameterized.parameters(
      ('ppo', 0.2, 0.28, None),
      ('gspo', 3e-4, 4e-4, None),
      ('cispo', None, 4.0, None),
      ('tbpo', 3e-4, 4e-4, 1 + 4e-4),
  )
  def test_bounds_have_the_defaults_of_the_kind(self, loss, low, high, dual):
    config = losses.LossConfig(loss)
    self.assertEqual(config.bounds, (low, high, dual))
    # So that a saved config says what ran, and can be read again.
    fields = dataclasses.asdict(config)
    self.assertEqual(losses.LossConfig(**fields), config)
    hash(config)

  @parameterized.parameters(
      ({'kind': 'grpo'}, "'grpo' is not one of .*ppo.*tbpo"),
      ({'aggregation': 'mean'}, "'mean' is not one of .*token_mean"),
      ({'kl': 'k4', 'kl_coef': 1.0}, "'k4' is not one of .*low_var_kl"),
      ({'kl_gradient': 'k3', 'kl_coef': 1.0}, "'k3' is not one of .*score"),
      ({'kind': 'cispo', 'clip_eps': 0.2}, 'clip_eps 0.2 is not used'),
      ({'kind': 'cispo', 'dual_clip': 3.0}, 'dual_clip 3.0 is not used'),
      ({'kind': 'gspo', 'dual_clip': 3.0}, 'dual_clip 3.0 is not used'),
      ({'kl': 'k1'}, "kl 'k1' is not used"),
      ({'kl_gradient': 'score'}, "kl_gradient 'score' is not used"),
      ({'norm_length': 8}, 'not use norm_length, 8'),
      ({'aggregation': 'seq_mean_token_sum_norm'}, 'needs a norm_length'),
      ({'clip_eps': -0.1}, 'clip_eps -0.1 is below 0'),
      ({'clip_eps_high': float('nan')}, 'clip_eps_high nan'),
      ({'dual_clip': 0.9}, 'dual_clip 0.9 is below 1'),
      ({'kl_coef': -1.0}, 'kl_coef -1.0 is below 0'),
      ({'entropy_coef': -1.0}, 'entropy_coef -1.0 is below 0'),
  )
  def test_bad_configs_raise(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      losses.LossConfig(**fields)


_NORMS = {'seq_mean_token_sum_norm': 7}
_AGGREGATIONS = (
    'token_mean',
    'seq_mean_token_mean',
    'seq_mean_token_sum',
    'seq_mean_token_sum_norm',
)


class AggregateTest(chex.TestCase):

  @parameterized.parameters(
      ('token_mean', (3 + 10 + 9) / 9),
      ('seq_mean_token_mean', (1 + 2 + 9) / 3),
      ('seq_mean_token_sum', (3 + 10 + 9) / 3),
      ('seq_mean_token_sum_norm', (3 + 10 + 9) / 3 / 7),
  )
  def test_by_hand(self, aggregation, want):
    values = np.array([[1.0] * 5, [2.0] * 5, [9.0] * 5, [4.0] * 5])
    mask = np.concatenate([_MASK, np.zeros((1, 5), bool)])  # not a sequence
    got = losses.aggregate(
        jnp.asarray(values),
        mask,
        aggregation,
        norm_length=_NORMS.get(aggregation),
    )
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, want, rtol=1e-6)

  @parameterized.parameters(*_AGGREGATIONS)
  def test_equals_the_oracle(self, aggregation):
    for seed in range(8):
      values, *_, mask = numpy_oracle.ragged(seed)
      got = _aggregate(values, mask, aggregation)
      want = numpy_oracle.aggregate(
          values, mask, aggregation, _NORMS.get(aggregation)
      )
      np.testing.assert_allclose(got, want, rtol=1e-5)

  @hypothesis.settings(
      max_examples=15, deadline=None, database=None, derandomize=True
  )
  @hypothesis.given(
      seed=st.integers(0, 2**32 - 1), order=st.permutations(range(6))
  )
  def test_micro_batches_add_up_to_the_batch(self, seed, order):
    values, *_, mask = numpy_oracle.ragged(seed)
    order = np.array(order).reshape(3, 2)
    for aggregation in _AGGREGATIONS:
      whole = losses.denominators(mask, aggregation)
      parts = [
          _aggregate(values[rows], mask[rows], aggregation, whole)
          for rows in order
      ]
      want = _aggregate(values, mask, aggregation)
      np.testing.assert_allclose(sum(parts), want, rtol=1e-5, atol=1e-6)

  @parameterized.parameters(*_AGGREGATIONS)
  def test_padding_changes_nothing(self, aggregation):
    values, *_, mask = numpy_oracle.ragged(0)
    pad = lambda x, value: np.pad(x, ((0, 2), (3, 0)), constant_values=value)
    got = _aggregate(pad(values, np.nan), pad(mask, False), aggregation)
    want = _aggregate(values, mask, aggregation)
    np.testing.assert_allclose(got, want, rtol=1e-6)

  @parameterized.parameters(*_AGGREGATIONS)
  def test_masked_values_and_empty_batches(self, aggregation):
    values, *_, mask = numpy_oracle.ragged(0)
    run = jax.value_and_grad(lambda x, m: _aggregate(x, m, aggregation))
    want = run(np.where(mask, values, 0), mask)
    chex.assert_trees_all_equal(run(values, mask), want)
    empty = run(values, np.zeros_like(mask))
    chex.assert_trees_all_equal(empty, (jnp.float32(0), np.zeros_like(values)))
    one = _aggregate(np.float32([[3.0]]), np.ones((1, 1), bool), aggregation)
    np.testing.assert_allclose(one, 3 / _NORMS.get(aggregation, 1), rtol=1e-6)

  def test_report_a11_truncated_rows_may_leave_numerator_and_denominator(self):
    dropped = _MASK & np.array([[True], [False], [True]])
    values = np.float32([[1.0] * 5, [2.0] * 5, [9.0] * 5])
    for mask, tokens, sequences in ((_MASK, 9, 3), (dropped, 4, 2)):
      self.assertEqual(int(losses.denominators(mask, 'token_mean')), tokens)
      self.assertEqual(
          int(losses.denominators(mask, 'seq_mean_token_sum')), sequences
      )
    got = _aggregate(values, dropped, 'token_mean')
    np.testing.assert_allclose(got, (3 * 1 + 9) / 4, rtol=1e-6)

  @parameterized.parameters(
      ('mean', None, "'mean' is not one of"),
      ('token_mean', 7, 'does not use norm_length, 7'),
      ('seq_mean_token_sum_norm', None, 'needs a norm_length'),
  )
  def test_bad_arguments_raise(self, aggregation, norm_length, message):
    with self.assertRaisesRegex(ValueError, message):
      losses.aggregate(
          jnp.zeros((3, 5)), _MASK, aggregation, norm_length=norm_length
      )


_FULL = losses.LossConfig(
    'ppo',
    dual_clip=3.0,
    aggregation='seq_mean_token_mean',
    kl_coef=0.1,
    kl='low_var_kl',
    kl_gradient='k2',
    entropy_coef=0.01,
)


class PolicyLossTest(chex.TestCase):

  def test_default_is_the_loss_of_its_parts_bit_for_bit(self):
    new, old, advantage, mask = _batch(0)
    advantage, sampler = advantage[:, 0], old + 0.1

    def by_hand(new):
      got = losses.clipped_surrogate(
          new,
          old,
          jnp.broadcast_to(advantage[:, None], mask.shape),
          mask,
          clip_eps=0.2,
          clip_eps_high=0.28,
      )
      weights = corrections.token_tis(old, sampler, mask, cap=2.0)
      return losses.token_mean(weights * got.loss, mask)

    def ours(new):
      config = corrections.CorrectionConfig()
      weights = corrections.correct(config, old, sampler, mask).weights
      return losses.policy_loss(
          losses.LossConfig(), new, old, advantage, mask, weights=weights
      )[0]

    chex.assert_trees_all_equal(
        jax.jit(jax.value_and_grad(ours))(new),
        jax.jit(jax.value_and_grad(by_hand))(new),
    )

  def test_is_the_sum_of_its_terms(self):
    new, old, advantage, mask = _batch(1)
    weights, ref, entropies = _extras(1)
    got, metrics = _run(
        _FULL, new, old, advantage, mask, weights, ref, entropies
    )
    parts = losses.surrogate(_FULL, new, old, advantage, mask)
    total = lambda x: numpy_oracle.aggregate(x, mask, _FULL.aggregation)
    kl = ratios.kl_penalty(new, ref, mask, kl='low_var_kl').values
    want = {
        'pg_loss': total(np.asarray(parts.loss) * weights),
        'kl_loss': total(np.asarray(kl)),
        'entropy': total(entropies),
        'ppo_kl': np.mean((old - new)[mask]),
        'pg_clipfrac': np.mean(np.asarray(parts.clipped)[mask]),
        'pg_clipfrac_low': np.mean(np.asarray(parts.clipped_low)[mask]),
        'pg_clipfrac_high': np.mean(np.asarray(parts.clipped_high)[mask]),
        'pg_clipfrac_dual': np.mean(np.asarray(parts.clipped_dual)[mask]),
        'ratio_clamped': 0,
        'kl_ratio_clamped': 0,
    }
    self.assertEqual(metrics.keys(), want.keys())
    for name, value in want.items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    loss = want['pg_loss'] + 0.1 * want['kl_loss'] - 0.01 * want['entropy']
    np.testing.assert_allclose(got, loss, rtol=1e-5)

  @parameterized.parameters(0, 1, 4, 5, 6)
  def test_values_under_the_mask_change_no_bit(self, argument):
    new, old, advantage, mask = _batch(2)
    batch = [new, old, advantage, mask, *_extras(2)]
    grad = jax.grad(lambda new, *rest: _run(_FULL, new, *rest)[0])
    want = _run(_FULL, *batch), grad(*batch)
    for bad in (np.nan, np.inf, -np.inf, 1e30):
      given = list(batch)
      given[argument] = np.where(mask, batch[argument], np.float32(bad))
      got = _run(_FULL, *given), grad(*given)
      chex.assert_trees_all_equal(got, want)
    np.testing.assert_array_equal(got[1][~mask], 0)

  def test_micro_batches_add_up_in_loss_and_gradient(self):
    new, old, advantage, mask = _batch(3)
    batch = (new, old, advantage, mask, *_extras(3))
    whole = losses.denominators(mask, _FULL.aggregation)
    fn = lambda new, *rest: _run(_FULL, new, *rest)[0]
    run = jax.value_and_grad(fn)
    parts = [
        run(*(x[rows] for x in batch), whole)
        for rows in (slice(0, 3), slice(3, 6))
    ]
    value, gradient = run(*batch)
    np.testing.assert_allclose(sum(v for v, _ in parts), value, rtol=1e-5)
    together = np.concatenate([g for _, g in parts])
    np.testing.assert_allclose(together, gradient, rtol=1e-5, atol=1e-8)

  def test_dropped_tokens_leave_the_numerator_only(self):
    # Ratios 1, so that a token's loss is minus its advantage.
    logprobs, mask = jnp.zeros((1, 4)), np.ones((1, 4), bool)
    sampler = jnp.float32([[0.0, 0.0, 0.0, 9.0]])
    config = corrections.CorrectionConfig(cap=None, token_bounds=(0.5, 5.0))
    weights = corrections.correct(config, logprobs, sampler, mask).weights
    got, _ = losses.policy_loss(
        losses.LossConfig(),
        logprobs,
        logprobs,
        jnp.ones(1),
        mask,
        weights=weights,
    )
    self.assertEqual(float(got), -3 / 4)

  def test_nothing_trained_gives_zero(self):
    new, old, advantage, mask = _batch(4)
    fn = lambda new: _run(
        _FULL, new, old, advantage, np.zeros_like(mask), *_extras(4)
    )
    (value, metrics), gradient = jax.value_and_grad(fn, has_aux=True)(new)
    for leaf in (value, *metrics.values()):
      self.assertEqual(float(leaf), 0)
    np.testing.assert_array_equal(gradient, np.zeros_like(new))

  def test_a_coefficient_of_zero_keeps_an_infinite_kl_out(self):
    # 0 * inf: the reference is only looked at.
    new, old, advantage, mask = _batch(5)
    ref = np.where(mask, -np.inf, 0)
    got, metrics = losses.policy_loss(
        losses.LossConfig(), new, old, advantage, mask, ref_logprobs=ref
    )
    self.assertTrue(np.isfinite(got))
    self.assertIn('kl_loss', metrics)

  @parameterized.parameters(
      ({'kl_coef': 0.1}, 'kl_coef 0.1 needs ref_logprobs'),
      ({'entropy_coef': 0.1}, 'entropy_coef 0.1 needs entropies'),
  )
  def test_a_penalty_without_its_input_raises(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      losses.policy_loss(losses.LossConfig(**fields), *_batch(0))


def _batch(seed):
  new, old, advantage, mask = numpy_oracle.ragged(seed)
  new, old = (np.where(mask, x, 0.0) for x in (new, old))
  return new, old, np.broadcast_to(advantage[:, None], mask.shape), mask


def _extras(seed):
  rng = np.random.default_rng(seed)
  weights, entropies = rng.uniform(0, 2, (2, 6, 9))
  ref = -rng.exponential(size=(6, 9))
  return tuple(np.float32(x) for x in (weights, ref, entropies))


@functools.partial(jax.jit, static_argnums=0)
def _run(
    config, new, old, advantage, mask, weights, ref, entropies, whole=None
):
  return losses.policy_loss(
      config,
      new,
      old,
      advantage,
      mask,
      weights=weights,
      ref_logprobs=ref,
      entropies=entropies,
      denominator=whole,
  )


@functools.partial(jax.jit, static_argnums=2)
def _aggregate(values, mask, aggregation, denominator=None):
  return losses.aggregate(
      values,
      mask,
      aggregation,
      norm_length=_NORMS.get(aggregation),
      denominator=denominator,
  )
