"""Tests of text_tasks: chats in, token ids out, and never encoded again."""

import dataclasses
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

from nvfp4_jax import sampler
from nvfp4_jax import tokenizer
from nvfp4_jax.rl import rollouts
from nvfp4_jax.rl import text_tasks
from nvfp4_jax.tasks import text

_EOS = 1
_TEMPLATE = '{% for m in messages %}{{ m.content }}{% endfor %}<|ask|>'


def _words():
  """Returns a byte-level BPE with the merges th and the."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  special = ('<|pad|>', '<|end|>', '<|ask|>')
  vocabulary = [*special, *alphabet, 'th', 'the']
  backend = tokenizers.Tokenizer(
      models.BPE(
          {token: i for i, token in enumerate(vocabulary)},
          [('t', 'h'), ('th', 'e')],
      )
  )
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(list(special))
  return tokenizer.Tokenizer(backend, _TEMPLATE, {}, (_EOS,))


_WORDS = _words()
_encode = lambda value: tokenizer.encode(_WORDS, value)
_THE = _encode('the')
_SPELLED = [*_encode('t'), *_encode('h'), *_encode('e')]


class _Echo:
  """Rewards the text of a problem, and keeps what it was given."""

  fingerprint = None

  def __init__(self):
    self.answers = []

  def problem(self, split, index):
    del split
    return text.TextProblem(text.ask('the'), 'the', f'echo/{index}')

  def reward(self, problem, completion):
    self.answers.append(completion)
    return float(completion == problem.answer)


def _task(**changes):
  task = text_tasks.TokenTask(
      task=_Echo(),
      words=_WORDS,
      vocab_size=300,  # the tokenizer has 261
      max_answer_tokens=4,
  )
  return dataclasses.replace(task, **changes)


class TokenTaskTest(parameterized.TestCase):

  def test_prompt_is_the_chat_as_it_is_rendered(self):
    problem = _task().problem('train', 3)
    self.assertEqual(problem.prompt, (*_THE, *_encode('<|ask|>')))
    self.assertEqual(problem.text.uid, 'echo/3')

  @parameterized.parameters(
      (_THE, 'the'),
      (_SPELLED, 'the'),
      ([*_THE, _EOS], 'the'),
      ([*_THE, 261, 299, _EOS], 'the'),  # the model's alone
      ([_EOS], ''),
  )
  def test_reward_is_of_the_text_without_special_tokens(self, ids, answer):
    task = _task()
    problem = task.problem('train', 0)
    self.assertEqual(task.reward(problem, ids), float(answer == 'the'))
    self.assertEqual(task.task.answers, [answer])

  def test_report_12_what_is_trained_are_the_ids_that_were_sampled(self):
    # Encoded again, the second completion would be the first.
    self.assertLen(_SPELLED, 3)
    self.assertEqual(_encode(tokenizer.decode(_WORDS, _SPELLED)), _THE)
    sampled = ([*_THE, _EOS], [*_SPELLED, _EOS])
    task = _task()
    prompt = task.problem('train', 0).prompt
    start, length = len(prompt), len(prompt) + task.max_answer_tokens
    tokens = np.zeros((2, length), np.int32)
    mask = np.zeros((2, length), bool)
    for i, ids in enumerate(sampled):
      tokens[i, : start + len(ids)] = (*prompt, *ids)
      mask[i, start : start + len(ids)] = True
    completions = sampler.Completions(
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(mask),
        logprobs=jnp.zeros((2, length)),
        truncated=jnp.zeros(2, bool),
        expert_ids=None,
    )
    with mock.patch.object(rollouts, 'complete', lambda *args: completions):
      rollout = rollouts.collect(
          None,
          rollouts.RolloutConfig(prompts_per_step=1, group_size=2),
          task,
          None,
          None,
          cursor=0,
          version=0,
          step=0,
          seed=0,
      ).rollout
    np.testing.assert_array_equal(rollout.tokens, tokens)
    np.testing.assert_array_equal(rollout.completion_mask, mask)
    self.assertEqual(task.task.answers, ['the', 'the'])
    np.testing.assert_array_equal(rollout.rewards, [1, 1])

  def test_bad_settings_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'max_answer_tokens 0'):
      _task(max_answer_tokens=0)
    with self.assertRaisesRegex(ValueError, 'no token that ends'):
      _task(words=dataclasses.replace(_WORDS, eos_ids=()))


if __name__ == '__main__':
  absltest.main()
