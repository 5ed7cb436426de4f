"""Tests of learner.

Compiling a step takes most of the time, so that all tests share two programs of
`train_step`, one of `supervised_step` and two of `logprobs`.
"""

import dataclasses
import functools
import math
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import checkpoint
from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import advantages
from nvfp4_jax.rl import corrections
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import losses
from nvfp4_jax.rl import types

# GrpoTest has the bits of optimized updates.
pytestmark = pytest.mark.quick_compile

_MODEL = model_config.ModelConfig(
    vocab_size=16,
    num_layers=1,
    embed_dim=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_dim=32,
    qk_norm=False,
    attention_block=16,
)
_ROWS, _LENGTH, _PROMPT = 16, 8, 3
_BF16 = policy.Quantizer(policy.BF16)
_NVFP4 = policy.Quantizer(recipes.get('nvfp4_dequantized').learner)

_OPTIMIZER = learner.OptimizerConfig(learning_rate=3e-3)
_GRPO = learner.GRPOConfig()
# The second program: bfloat16, with old and reference log-probs, no correction.
_GRPO_KL = learner.GRPOConfig(
    loss=losses.LossConfig(kl_coef=0.5),
    correction=corrections.CorrectionConfig(weights='none'),
)
_group_relative = jax.jit(advantages.group_relative)

_METRICS = {
    'grad_norm',
    'entropy',
    'mismatch_abs_logprob',
    'mismatch_kl',
    'clip_fraction',
    'tis_weight_mean',
}


class LogprobsTest(parameterized.TestCase):

  def test_position_zero_is_exactly_zero(self):
    for quantizer in (_BF16, _NVFP4):
      got = _logprobs(_tokens(), quantizer)
      chex.assert_shape(got, (_ROWS, _LENGTH))
      chex.assert_type(got, jnp.float32)
      np.testing.assert_array_equal(got[:, 0], np.zeros(_ROWS))
      self.assertLess(np.max(got[:, 1:]), 0)

  def test_is_a_distribution_over_the_next_token(self):
    # One ulp of the sum and of each of 16 exponentials.
    got = _logprobs(_all_continuations())[:, -1]
    np.testing.assert_allclose(np.sum(np.exp(got)), 1, atol=2e-6)

  @parameterized.parameters(0.5, 1.0, 1.7)
  def test_is_log_softmax_of_logits_over_temperature(self, temperature):
    # At temperature 1 it equals the logits but for a constant.
    tokens = _all_continuations()
    logits = _logprobs(tokens)[:, -1]
    got = _logprobs(tokens, temperature=temperature)[:, -1]
    want = jax.nn.log_softmax(jnp.asarray(logits) / temperature)
    np.testing.assert_allclose(got, want, atol=1e-5)

  def test_does_not_depend_on_later_tokens(self):
    got = _logprobs(_all_continuations())[:, :-1]
    np.testing.assert_array_equal(got, np.tile(got[:1], (_ROWS, 1)))

  def test_does_not_depend_on_the_other_rows(self):
    tokens = _tokens()
    got = _logprobs(tokens[::-1], _NVFP4)[::-1]
    np.testing.assert_array_equal(got, _logprobs(tokens, _NVFP4))

  def test_formats_differ(self):
    gap = _logprobs(_tokens(), _NVFP4) - _logprobs(_tokens(), _BF16)
    self.assertBetween(np.mean(np.abs(gap[:, 1:])), 1e-4, 0.5)

  def test_another_temperature_is_the_same_program(self):
    _logprobs(_tokens(), temperature=1.0)
    before = learner.logprobs._cache_size()
    _logprobs(_tokens(), temperature=0.9)
    self.assertEqual(learner.logprobs._cache_size(), before)


class TrainStepTest(parameterized.TestCase):

  def test_traces_once(self):
    state, _, _ = _step(_state(), _batch())
    before = learner.train_step._cache_size()
    for seed in range(3):
      state, _, _ = _step(state, _batch(seed))
    self.assertEqual(learner.train_step._cache_size(), before)
    self.assertEqual(state.step, 4)

  def test_state_is_donated_and_keeps_its_structure(self):
    state = _state()
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    after, _, _ = _step(state, _batch())
    for leaf in jax.tree.leaves(state):
      self.assertTrue(leaf.is_deleted())
    chex.assert_trees_all_equal(
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after), shapes
    )
    self.assertEqual(after.step, 1)

  def test_metrics_are_float32_scalars_of_known_names(self):
    _, _, metrics = _step(_state(), _batch())
    self.assertContainsSubset(_METRICS | {'skipped', 'ess_ratio'}, metrics)
    self.assertNotIn('ref_kl', metrics)
    chex.assert_shape(list(metrics.values()), ())
    chex.assert_type(list(metrics.values()), jnp.float32)
    _, _, metrics = _kl_step(_state(), _batch())
    self.assertContainsSubset(_METRICS | {'ref_kl', 'ref_kl_median'}, metrics)
    chex.assert_shape(list(metrics.values()), ())
    chex.assert_type(list(metrics.values()), jnp.float32)

  def test_returns_the_log_probs_at_the_old_weights(self):
    # Bit for bit, though here the quantized weights are given, and there
    # computed from the masters.
    state, got, _ = _step(_state(), _batch())
    np.testing.assert_array_equal(got, _logprobs(_tokens(), _NVFP4))
    want = _logprobs(_tokens(), _NVFP4, state.params)
    self.assertGreater(np.max(np.abs(got - want)), 0)
    _, got, _ = _step(state, _batch())
    np.testing.assert_array_equal(got, want)

  def test_learns_at_the_temperature_of_the_rollout(self):
    batch = _with_rollout(_batch(), temperature=jnp.float32(0.5))
    _, got, _ = _step(_state(), batch)
    want = _logprobs(_tokens(), _NVFP4, temperature=0.5)
    np.testing.assert_array_equal(got, want)

  def test_rewarded_rows_become_likelier_and_others_less(self):
    batch = _batch()
    state, before, _ = _step(_state(), batch)
    for _ in range(4):
      state, after, _ = _step(state, batch)
    change = np.sum(np.where(_mask(), after - before, 0), axis=1)
    sign = np.sign(batch.advantages)
    self.assertGreater(np.mean(change[sign > 0]), 0.1)
    self.assertLess(np.mean(change[sign < 0]), -0.1)

  def test_equal_rewards_change_no_bit(self):
    rewards, group = jnp.full(_ROWS, 0.35), jnp.arange(_ROWS) // 8
    batch = dataclasses.replace(
        _batch(), advantages=_group_relative(rewards, group)
    )
    state, _, metrics = _step(_state(), batch)
    self.assertEqual(metrics['grad_norm'], 0)
    chex.assert_trees_all_equal(state.params, _params())

  def test_an_empty_mask_changes_no_bit(self):
    batch = _with_rollout(
        _batch(), completion_mask=jnp.zeros((_ROWS, _LENGTH), bool)
    )
    state, _, metrics = _step(_state(), batch)
    for name in _METRICS:
      self.assertEqual(metrics[name], 0, name)
    chex.assert_trees_all_equal(state.params, _params())

  def test_what_is_masked_changes_no_bit(self):
    # Whatever fills a row after its completion, in every array.
    batch = _batch()
    want = _step(_state(), batch)
    rollout, padding = batch.rollout, ~_mask()
    padding[:, :_PROMPT] = False
    changed = _with_rollout(
        batch,
        tokens=jnp.where(padding, 1 + rollout.tokens % 15, rollout.tokens),
        sampler_logprobs=jnp.where(_mask(), rollout.sampler_logprobs, jnp.nan),
    )
    got = _step(_state(), changed)
    chex.assert_trees_all_equal(got[0].params, want[0].params)
    chex.assert_trees_all_equal(got[2], want[2])

  def test_the_first_update_never_clips(self):
    state, batch = _state(), _batch()
    for _ in range(3):
      state, _, metrics = _step(state, batch)
      self.assertEqual(metrics['clip_fraction'], 0)

  def test_later_updates_on_a_rollout_move_the_ratio_and_clip(self):
    batch = _with_sampler(_batch(), 0.0, _BF16)
    state, old, metrics = _kl_step(_state(), batch)
    self.assertEqual(metrics['clip_fraction'], 0)
    fractions, gaps = [], []
    for _ in range(4):
      state, new, metrics = _kl_step(state, batch)
      fractions.append(float(metrics['clip_fraction']))
      gaps.append(np.max(np.abs(np.where(_mask(), new - old, 0))))
      # The mismatch is of equal weights: it does not grow with the updates.
      self.assertEqual(metrics['mismatch_abs_logprob'], 0)
    self.assertGreater(gaps[0], 0)
    self.assertGreater(max(fractions), 0.1)

  def test_a_restored_state_goes_on_with_the_same_bits(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    folder = pathlib.Path(folder) / 'checkpoints'
    state, _, _ = _step(_state(), _batch(1))
    arrays = transformer.map_params(transformer.unstack, state)
    checkpoint.save(folder, 1, arrays, {})
    want = _step(state, _batch(2))
    like = transformer.map_params(transformer.unstack, _state())
    arrays, _ = checkpoint.restore(folder, like)
    # Orbax commits arrays to a device, for which all would be compiled again.
    arrays = jax.tree.map(np.asarray, arrays)
    stack = lambda tree: transformer.stack(tree, (_MODEL.num_layers,))
    got = _step(transformer.map_params(stack, arrays), _batch(2))
    chex.assert_trees_all_equal(got, want)


class CorrectionTest(parameterized.TestCase):

  @parameterized.parameters((0.5, 1.64872), (-1.0, 0.36788), (3.0, 2.0))
  def test_a_gap_to_the_sampler_weighs_the_loss(self, gap, weight):
    _, _, plain = _step(_state(), _with_sampler(_batch(), 0.0))
    _, _, metrics = _step(_state(), _with_sampler(_batch(), gap))
    self.assertEqual(plain['tis_weight_mean'], 1)
    self.assertEqual(plain['mismatch_abs_logprob'], 0)
    self.assertEqual(plain['mismatch_kl'], 0)
    np.testing.assert_allclose(metrics['tis_weight_mean'], weight, rtol=1e-5)
    np.testing.assert_allclose(
        metrics['mismatch_abs_logprob'], abs(gap), rtol=1e-5
    )
    np.testing.assert_allclose(
        metrics['mismatch_kl'], np.expm1(gap) - gap, rtol=1e-5
    )
    # The gradient is scaled before it is rounded to bfloat16.
    np.testing.assert_allclose(
        metrics['grad_norm'], weight * plain['grad_norm'], rtol=1e-2
    )

  def test_a_token_without_sampler_log_prob_has_weight_one(self):
    batch = _with_sampler(_batch(), 0.0)
    sampler = jnp.full_like(batch.rollout.sampler_logprobs, -jnp.inf)
    got = _step(_state(), _with_rollout(batch, sampler_logprobs=sampler))
    want = _step(_state(), batch)
    chex.assert_trees_all_equal(got[0], want[0])

  def test_none_turns_it_off(self):
    _, _, metrics = _kl_step(_state(), _with_sampler(_batch(), 3.0, _BF16))
    self.assertEqual(metrics['tis_weight_mean'], 1)
    np.testing.assert_allclose(metrics['mismatch_abs_logprob'], 3, rtol=1e-5)


class KlTest(parameterized.TestCase):

  def test_is_zero_at_the_reference(self):
    state, _, metrics = _kl_step(_state(), _zero_advantages(_batch()))
    self.assertEqual(metrics['ref_kl'], 0)
    self.assertEqual(metrics['grad_norm'], 0)
    chex.assert_trees_all_equal(state.params, _params())

  def test_pulls_to_the_reference(self):
    # Without rewards nothing else moves the policy.
    reference = _logprobs(_tokens(), params=_other_params())
    batch = _zero_advantages(_batch())
    state, history = _state(), []
    for _ in range(20):
      state, _, metrics = _kl_step(state, batch, reference)
      history.append(float(metrics['ref_kl']))
      self.assertGreater(metrics['grad_norm'], 0)
    self.assertGreater(history[0], 0.1)
    self.assertLess(history[-1], 0.5 * history[0])

  def test_is_k3_of_reference_and_policy(self):
    log_ratio = 0.5
    reference = _logprobs(_tokens()) + np.float32(log_ratio)
    _, _, metrics = _kl_step(_state(), _batch(), reference)
    np.testing.assert_allclose(
        metrics['ref_kl'], np.expm1(log_ratio) - log_ratio, rtol=1e-5
    )


class SupervisedStepTest(parameterized.TestCase):

  def test_starts_at_the_bfloat16_loss_and_lowers_it(self):
    want = -np.mean(_logprobs(_tokens())[_mask()])
    state, history = _state(), []
    for _ in range(10):
      state, metrics = _supervised_step(state)
      self.assertEqual(set(metrics), {'loss', 'grad_norm'})
      history.append(float(metrics['loss']))
    np.testing.assert_allclose(history[0], want, rtol=1e-5)
    self.assertLess(history[-1], 0.8 * history[0])
    self.assertEqual(state.step, 10)

  def test_state_is_donated(self):
    state = _state()
    _supervised_step(state)
    self.assertTrue(all(leaf.is_deleted() for leaf in jax.tree.leaves(state)))

  def test_traces_once(self):
    state, _ = _supervised_step(_state())
    before = learner.supervised_step._cache_size()
    for _ in range(3):
      state, _ = _supervised_step(state)
    self.assertEqual(learner.supervised_step._cache_size(), before)

  def test_learning_rate_and_clipping_compile_nothing(self):
    _supervised_step(_state())
    before = learner.supervised_step._cache_size()
    results = [
        _supervised_step(
            _state(), learner.OptimizerConfig(rate, grad_clip=clip)
        )
        for rate, clip in ((3e-3, 1.0), (0.0, 1.0), (1e-3, math.inf))
    ]
    self.assertEqual(learner.supervised_step._cache_size(), before)
    first, frozen, _ = (state.params for state, _ in results)
    chex.assert_trees_all_equal(frozen, _params())
    self.assertTrue((first['norm'] != _params()['norm']).any())


class OptimizerTest(parameterized.TestCase):

  def test_weight_decay_is_decoupled(self):
    config = learner.OptimizerConfig(learning_rate=0.5, weight_decay=0.25)
    updates = _first_updates(config, gradient=0.0)
    np.testing.assert_allclose(updates, [-0.5 * 0.25 * 3.0], rtol=1e-6)

  @parameterized.parameters(1e-3, 1.0, 1e3)
  def test_the_first_update_is_the_learning_rate(self, gradient):
    # Adam divides by |gradient| + 1e-8.
    config = learner.OptimizerConfig(learning_rate=0.5, weight_decay=0.0)
    updates = _first_updates(config, gradient)
    np.testing.assert_allclose(updates, [-0.5], rtol=1e-4)

  def test_the_norm_of_all_gradients_is_clipped(self):
    optimizer = learner.make_optimizer(
        learner.OptimizerConfig(grad_clip=2.0, b1=0.5)
    )
    params = {'a': jnp.zeros(1), 'b': jnp.zeros(1)}
    gradients = {'a': jnp.array([30.0]), 'b': jnp.array([40.0])}
    _, state = optimizer.update(gradients, optimizer.init(params), params)
    # The first moment is (1 - b1) times the clipped gradient.
    mu = state[1][0].mu
    np.testing.assert_allclose([mu['a'], mu['b']], [[0.6], [0.8]], rtol=1e-6)


@functools.cache
def _params():
  params = transformer.init_params(jax.random.key(0), _MODEL)
  return transformer.stack(params, (_MODEL.num_layers,))


def _other_params():
  def shift(leaf):
    wave = jnp.sin(jnp.arange(float(leaf.size))).reshape(leaf.shape)
    return leaf + 0.1 * wave

  return jax.tree.map(shift, _params())


def _state():
  return learner.init_state(jax.tree.map(jnp.copy, _params()), _OPTIMIZER)


def _tokens():
  rng = np.random.default_rng(0)
  return rng.integers(2, 16, (_ROWS, _LENGTH)).astype(np.int32)


def _all_continuations():
  """Returns one row of tokens again and again, with every last token."""
  tokens = np.tile(_tokens()[:1], (_ROWS, 1))
  tokens[:, -1] = np.arange(_ROWS)
  return tokens


def _mask():
  """Returns a prompt, a completion of 1 to 5 tokens, and padding."""
  at = np.arange(_LENGTH)
  ends = _PROMPT + 1 + np.arange(_ROWS)[:, None] % 5
  return (at >= _PROMPT) & (at < ends)


def _logprobs(tokens, quantizer=_BF16, params=None, temperature=1.0):
  params = _params() if params is None else params
  return np.asarray(
      learner.logprobs(_MODEL, params, quantizer, None, tokens, temperature)
  )


def _batch(seed=0):
  """Returns a batch with advantages of both signs, on policy."""
  rng = np.random.default_rng(seed)
  rewards = jnp.asarray(rng.permutation([0.0, 1.0] * 8), jnp.float32)
  group = jnp.arange(_ROWS, dtype=jnp.int32) // 8
  rollout = types.Rollout(
      tokens=jnp.asarray(_tokens()),
      completion_mask=jnp.asarray(_mask()),
      sampler_logprobs=jnp.asarray(
          np.where(_mask(), _logprobs(_tokens(), _NVFP4), 0)
      ),
      temperature=jnp.float32(1),
      rewards=rewards,
      group=group,
      version=jnp.zeros((_ROWS, _LENGTH), jnp.int32),
  )
  return types.Batch(
      rollout=rollout,
      advantages=_group_relative(rewards, group),
      old_logprobs=None,
      ref_logprobs=None,
  )


def _with_rollout(batch, **changes):
  return dataclasses.replace(
      batch, rollout=dataclasses.replace(batch.rollout, **changes)
  )


def _with_sampler(batch, gap, quantizer=_NVFP4):
  """Returns the batch with sampler log-probs that are lower by `gap`."""
  sampler = jnp.asarray(_logprobs(_tokens(), quantizer) - np.float32(gap))
  return _with_rollout(batch, sampler_logprobs=sampler)


def _zero_advantages(batch):
  return dataclasses.replace(batch, advantages=jnp.zeros(_ROWS))


def _step(state, batch, grpo=_GRPO, quantizer=_NVFP4):
  """Returns the new state, the log-probs at the old one, and the metrics."""
  quantized = policy.quantize_params(quantizer, state.params)
  rollout = batch.rollout
  logprobs = learner.logprobs(
      _MODEL,
      state.params,
      quantizer,
      quantized,
      rollout.tokens,
      rollout.temperature,
  )
  state, metrics = learner.train_step(
      _MODEL, _OPTIMIZER, grpo, state, quantizer, quantized, batch
  )
  return state, logprobs, metrics


def _kl_step(state, batch, reference=None):
  """Makes a later update on a rollout of `_params`; the reference is it too."""
  old = jnp.asarray(_logprobs(_tokens()))
  batch = dataclasses.replace(
      batch,
      old_logprobs=old,
      ref_logprobs=old if reference is None else jnp.asarray(reference),
  )
  return _step(state, batch, _GRPO_KL, _BF16)


def _supervised_step(state, optimizer=_OPTIMIZER):
  return learner.supervised_step(
      _MODEL, optimizer, state, jnp.asarray(_tokens()), jnp.asarray(_mask())
  )


def _first_updates(config, gradient):
  optimizer = learner.make_optimizer(config)
  params = jnp.array([3.0])
  updates, _ = optimizer.update(
      jnp.array([gradient]), optimizer.init(params), params
  )
  return updates


if __name__ == '__main__':
  absltest.main()
