"""Rollouts: which groups are kept, what is trained, what is counted."""

import dataclasses
from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import sampler
from nvfp4_jax.rl import evaluation
from nvfp4_jax.rl import loop
from nvfp4_jax.rl import rollouts

_CONFIG = rollouts.RolloutConfig(prompts_per_step=2, group_size=3)


@dataclasses.dataclass(frozen=True)
class _Problem:
  index: int
  prompt: tuple[int, ...] = (1, 2)


class _Task:
  """Rewards by the table `rewards[problem][i-th answer]`; None fails."""

  vocab_size, eos_ids, max_answer_tokens = 16, (5,), 4

  def __init__(self, table):
    self._table = table

  def problem(self, split, index):
    return _Problem(index if split == 'train' else 100 + index)

  def reward(self, problem, completion):
    value = self._table[problem.index][completion[0]]
    if value is None:
      raise RuntimeError('no reward')
    return value


def _complete(model, cfg, task, quantizer, params, problems, key, temperature):
  """Answer i of a problem is the token i, then EOS, but for the last of 3."""
  del model, cfg, quantizer, params, key, temperature
  rows = len(problems)
  answer = np.arange(rows) % 3
  length = 2 + task.max_answer_tokens
  tokens = np.zeros((rows, length), np.int32)
  tokens[:, :2], tokens[:, 2] = (1, 2), answer
  mask = np.zeros((rows, length), bool)
  mask[:, 2:4] = True
  mask[answer == 2, 2:] = True
  return sampler.Completions(
      tokens=jnp.asarray(tokens),
      mask=jnp.asarray(mask),
      logprobs=jnp.zeros((rows, length)),
      truncated=jnp.asarray(answer == 2),
      expert_ids=None,
  )


def _collect(table, complete=_complete, **changes):
  cfg = dataclasses.replace(_CONFIG, **changes)
  with mock.patch.object(rollouts, 'complete', complete):
    return rollouts.collect(
        None,
        cfg,
        _Task(table),
        None,
        None,
        cursor=0,
        version=7,
        step=0,
        seed=0,
    )


class CollectTest(parameterized.TestCase):

  def test_rows_of_a_problem_are_a_group(self):
    collected = _collect([(0, 1, 0), (1, 1, 0)])
    rollout = collected.rollout
    np.testing.assert_array_equal(rollout.rewards, [0, 1, 0, 1, 1, 0])
    np.testing.assert_array_equal(rollout.group, [0, 0, 0, 1, 1, 1])
    self.assertEqual(collected.cursor, 2)
    self.assertEqual(collected.counts['reward'], 0.5)
    self.assertTrue(np.all(rollout.version == 7))

  def test_groups_without_information_are_replaced(self):
    table = [(1, 1, 1), (0, 1, 0), (0, 0, 0), (1, 0, 0)]
    collected = _collect(table, max_tries=3)
    np.testing.assert_array_equal(collected.rollout.rewards, [0, 1, 0, 1, 0, 0])
    self.assertEqual(collected.cursor, 4)
    counts = collected.counts
    self.assertEqual((counts['tries'], counts['groups_replaced']), (2, 2))
    # Of all that were sampled.
    self.assertAlmostEqual(counts['reward'], 5 / 12, places=6)

  def test_report_25_experts_stay_with_the_tokens_they_were_chosen_for(self):
    # The kept groups come from two tries; in the second, rows are longer.
    table = [(1, 1, 1), (0, 1, 0), (0, 0, 0), (1, 0, 0)]

    def complete(model, cfg, task, quantizer, params, problems, *rest):
      completions = _complete(
          model, cfg, task, quantizer, params, problems, *rest
      )
      first = problems[0].index
      tokens = np.pad(completions.tokens, ((0, 0), (0, first)))
      tokens[:, 0] = [problem.index for problem in problems]
      pad = lambda x: jnp.pad(x, ((0, 0), (0, first)))
      return dataclasses.replace(
          completions,
          tokens=jnp.asarray(tokens),
          mask=pad(completions.mask),
          logprobs=pad(completions.logprobs),
          expert_ids=jnp.asarray(tokens)[..., None, None] + np.arange(2),
      )

    rollout = _collect(table, complete, max_tries=3).rollout
    np.testing.assert_array_equal(rollout.tokens[:, 0], [1, 1, 1, 3, 3, 3])
    self.assertEqual(rollout.expert_ids.shape, (*rollout.tokens.shape, 1, 2))
    shorter = np.s_[:3, 6:]  # padding, for which there are no experts
    for i in range(2):
      want = np.asarray(rollout.tokens) + i
      want[shorter] = 0
      np.testing.assert_array_equal(rollout.expert_ids[..., 0, i], want)

  def test_after_the_last_try_they_fill_up(self):
    table = [(1, 1, 1), (0, 1, 0), (0, 0, 0), (1, 1, 1)]
    collected = _collect(table, max_tries=2)
    np.testing.assert_array_equal(collected.rollout.rewards, [0, 1, 0, 1, 1, 1])
    self.assertEqual(collected.counts['groups_replaced'], 2)

  def test_what_is_left_over_is_counted(self):
    table = [(1, 1, 1), (0, 1, 0), (0, 1, 0), (1, 0, 1)]
    collected = _collect(table, max_tries=2)
    self.assertEqual(collected.counts['groups_surplus'], 1)
    self.assertEqual(collected.rollout.rewards.shape, (6,))

  def test_a_failed_reward_leaves_its_group(self):
    collected = _collect([(0, 1, None), (1, 1, 0)])
    rollout = collected.rollout
    np.testing.assert_array_equal(rollout.valid, [1, 1, 0, 1, 1, 1])
    self.assertFalse(np.any(np.asarray(rollout.completion_mask)[2]))
    self.assertEqual(collected.counts['reward_failures'], 1)
    self.assertAlmostEqual(collected.counts['reward'], 3 / 5, places=6)

  def test_truncated_completions_may_be_masked(self):
    rollout = _collect([(0, 1, 0), (1, 1, 0)], mask_truncated=True).rollout
    trained = np.asarray(rollout.completion_mask).any(axis=1)
    np.testing.assert_array_equal(trained, [1, 1, 0, 1, 1, 0])

  def test_overlong_completions_cost(self):
    rollout = _collect([(0, 1, 0), (1, 1, 0)], overlong_tokens=4).rollout
    # Lengths 2, 2, 4 of at most 4: half, half and all of the punishment.
    np.testing.assert_allclose(
        rollout.rewards, [-0.5, 0.5, -1, 0.5, 0.5, -1], rtol=1e-6
    )

  def test_groups_of_two_versions_are_trained_together(self):
    """Of 3 and 5, sampled apart; at update 6 tokens are 3 and 1 updates old."""
    task = _Task([(0, 1, 0), (1, 1, 0)])
    with mock.patch.object(rollouts, 'complete', _complete):
      groups = rollouts.sample_groups(
          None, _CONFIG, task, None, None, 0, jax.random.key(0)
      )
    rollout, _ = rollouts.stack_groups(_CONFIG, task, groups, [3, 5])
    np.testing.assert_array_equal(rollout.version[:3], 3)
    np.testing.assert_array_equal(rollout.version[3:], 5)
    np.testing.assert_array_equal(rollout.rewards, [0, 1, 0, 1, 1, 0])
    tokens = rollout.completion_mask.sum(axis=1)
    want = (3 * tokens[:3].sum() + tokens[3:].sum()) / tokens.sum()
    self.assertAlmostEqual(loop._staleness(6, rollout), float(want), places=6)

  def test_a_try_has_randomness_of_its_own(self):
    keys = [
        jax.random.key_data(rollouts._try_key(0, step, tries))
        for step in range(3)
        for tries in range(3)
    ]
    self.assertLen({tuple(np.asarray(key)) for key in keys}, 9)

  @parameterized.parameters(
      dict(prompts_per_step=0),
      dict(group_size=0),
      dict(max_tries=0),
      dict(overlong_tokens=-1),
      dict(temperature=0.0),
  )
  def test_bad_settings_are_refused(self, **changes):
    with self.assertRaisesRegex(ValueError, next(iter(changes))):
      dataclasses.replace(_CONFIG, **changes)


class EvaluationTest(parameterized.TestCase):

  def test_samples_give_pass_and_average(self):
    table = {100 + i: (i % 2, 0, 0) for i in range(6)}

    def complete(
        model, cfg, task, quantizer, params, problems, key, temperature
    ):
      completions = _complete(
          model, cfg, task, quantizer, params, problems, key, temperature
      )
      # Every completion is answer 0, which is right for every second problem.
      return dataclasses.replace(
          completions, tokens=completions.tokens.at[:, 2].set(0)
      )

    with mock.patch.object(rollouts, 'complete', complete):
      row = evaluation.evaluate(
          None,
          _CONFIG,
          evaluation.EvalConfig(problems=4, samples=3),
          _Task(table),
          None,
          None,
          seed=0,
      )
    self.assertEqual(row['pass_at_1'], 0.5)
    self.assertEqual(row['pass_at_3'], 0.5)
    self.assertEqual(row['avg_at_3'], 0.5)
    self.assertEqual(row['greedy_accuracy'], 0.5)
    self.assertEqual(row['eval_failures'], 0)
