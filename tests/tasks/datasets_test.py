"""Tests of tasks.dapo_math and tasks.gsm8k, the readers and their scorers."""

import json
import pickle
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from nvfp4_jax.tasks import dapo_math
from nvfp4_jax.tasks import gsm8k
from nvfp4_jax.tasks import records
from nvfp4_jax.tasks import text
from tests.tasks import file_cases

_MODULES = {'dapo_math': dapo_math, 'gsm8k': gsm8k}
_SPLITS = ('train', 'held_out')
_ASKED = [{'content': 'What is 2 + 3? End with "Answer: N".', 'role': 'user'}]


class DapoTest(file_cases.FileTestCase):

  @parameterized.named_parameters(
      (
          'original',
          {
              'data_source': 'math_dapo',
              'prompt': _ASKED,
              'ability': 'MATH',
              'reward_model': {'ground_truth': '5', 'style': 'rule-lighteval'},
              'extra_info': {'index': 'a-b-c'},
          },
      ),
      ('slime', {'prompt': _ASKED, 'label': '5'}),
      ('open_r1', {'prompt': _ASKED[0]['content'], 'solution': '5'}),
      (
          'open_r1_with_the_original_fields',
          {
              'prompt': _ASKED[0]['content'],
              'solution': '5',
              'source_prompt': _ASKED,
              'reward_model': {'ground_truth': '5', 'style': 'rule'},
          },
      ),
  )
  def test_reads_the_variants_alike(self, row):
    table = dapo_math.make(self.file(row)).table
    (problem,) = table.train + table.held_out
    self.assertEqual(problem.chat(), _ASKED)
    self.assertEqual(problem.answer, '5')
    again = dapo_math.make(self.file(file_cases.dapo_row(_ASKED))).table
    self.assertIn(problem, again.train + again.held_out)

  @parameterized.parameters(
      ('What is 2 + 3?', True),
      ('What is 2 + 3? Give "Answer: N".', False),
      (r'What is 2 + 3? Put it in \boxed{}.', False),
  )
  def test_a_bare_problem_is_followed_by_a_request(self, prompt, is_bare):
    table = dapo_math.make(self.file(file_cases.dapo_row(prompt))).table
    (problem,) = table.train + table.held_out
    content = problem.messages[-1].content
    self.assertEqual(content != prompt, is_bare)
    self.assertStartsWith(content, prompt)
    self.assertRegex(content, r'Answer:|\\boxed')

  def test_other_messages_are_kept(self):
    chat = [
        {'role': 'system', 'content': 'Write "Answer: N".'},
        {'role': 'user', 'content': '1 + 1?'},
        {'role': 'assistant', 'content': 'Answer: 2'},
        {'role': 'user', 'content': '2 + 3?'},
    ]
    table = dapo_math.make(self.file(file_cases.dapo_row(chat))).table
    (problem,) = table.train + table.held_out
    self.assertEqual(problem.chat(), chat)

  @parameterized.parameters(
      ('Answer: 5', 1.0),
      ('Answer: $5$.', 1.0),
      (r'Answer: \boxed{5}', 1.0),
      (r'It is \boxed{5}.', 1.0),
      ('Answer: 5 inches', 1.0),
      ('Answer: 05.0', 1.0),
      ('Answer: 10/2', 1.0),
      ('Answer: 6', 0.0),
      (r'\boxed{5} Answer: 6', 0.0),
      ('5', 0.0),
      ('', 0.0),
      ('Answer: 5' + '\n' * 300, 0.0),
  )
  def test_reward(self, completion, want):
    task = dapo_math.make(self.file(file_cases.dapo_row()))
    problem = text.TextProblem(text.ask('2 + 3?'), '5', 'dapo_math/1')
    self.assertEqual(task.reward(problem, completion), want)

  def test_math_verify_is_asked_last(self):
    problem = text.TextProblem(text.ask('?'), '2x', 'dapo_math/1')
    equal = mock.Mock(return_value=True)
    with mock.patch.object(dapo_math.verify, 'math_verify_equal', equal):
      task = dapo_math.make(scorer='math_verify')
      equal.reset_mock()
      self.assertEqual(task.reward(problem, 'Answer: 2x'), 1.0)
      self.assertEqual(task.reward(problem, 'none'), 0.0)
      equal.assert_not_called()
      self.assertEqual(task.reward(problem, 'Answer: x + x'), 1.0)
      equal.assert_called_once_with('x + x', '2x')

  def test_a_missing_math_verify_is_named_at_once(self):
    with (
        mock.patch.dict(sys.modules, {'math_verify': None}),
        self.assertRaisesRegex(ImportError, 'math-verify'),
    ):
      dapo_math.make(scorer='math_verify')

  @parameterized.parameters(
      ({'prompt': 'x'}, r"none of the fields \['reward_model', 'label', "),
      ({'label': '5'}, "the field 'prompt' is missing"),
      ({'prompt': 'x', 'label': 5}, "'label' is not a text but 5"),
      ({'prompt': 'x', 'label': None}, "'label' is not a text but None"),
      ({'prompt': 'x', 'label': ' '}, "'label' is empty"),
      ({'prompt': 'x', 'reward_model': '5'}, "'reward_model' is not an object"),
      (
          {'prompt': 'x', 'reward_model': {'style': 'rule'}},
          "field 'reward_model.ground_truth' is missing",
      ),
      (
          {'prompt': 'x', 'reward_model': {'ground_truth': ['5']}},
          "'reward_model.ground_truth' is not a text",
      ),
      ({'prompt': 7, 'label': '5'}, "'prompt' is not a text but 7"),
      ({'prompt': '', 'label': '5'}, "'prompt' is empty"),
      ({'prompt': [], 'label': '5'}, "'prompt' does not end with a message of"),
      ({'prompt': ['x'], 'label': '5'}, "'prompt' has as item 0 no object"),
      (
          {'prompt': [{'role': 'user'}], 'label': '5'},
          "field 'content' is missing",
      ),
      (
          {'prompt': [{'role': 'tool', 'content': 'x'}], 'label': '5'},
          "Role 'tool' is not one of",
      ),
      (
          {'prompt': [{'role': 'assistant', 'content': 'x'}], 'label': '5'},
          'does not end with a message of the user',
      ),
      ({'prompt': '\ud800', 'label': '5'}, 'surrogates not allowed'),
      ({'prompt': 'x', 'label': '\ud800'}, 'surrogates not allowed'),
  )
  def test_a_bad_row_raises_and_is_named(self, row, message):
    path = self.file(file_cases.dapo_row(), row)
    with self.assertRaisesRegex(records.DataError, message) as caught:
      dapo_math.make(path)
    self.assertStartsWith(str(caught.exception), f'{path}:2: ')


class Gsm8kTest(file_cases.FileTestCase):

  def test_reads_a_row(self):
    row = {'question': 'What is 2 + 3?', 'answer': 'Add.\n#### 1,005'}
    table = gsm8k.make(self.file(row), system_prompt='Think.').table
    (problem,) = table.train + table.held_out
    self.assertEqual(problem.answer, '1005')
    self.assertEqual(problem.messages[0], text.Message('system', 'Think.'))
    content = problem.messages[1].content
    self.assertStartsWith(content, 'What is 2 + 3? ')
    self.assertIn('after "####"', content)

  @parameterized.parameters(
      ('#### 5', 1.0, 1.0),
      ('#### 5.0', 1.0, 1.0),
      ('It is 5.', 0.0, 1.0),
      ('#### 6', 0.0, 0.0),
      ('', 0.0, 0.0),
  )
  def test_reward(self, completion, strict, flexible):
    problem = text.TextProblem(text.ask('2 + 3?'), '5', 'gsm8k/1')
    self.assertEqual(gsm8k.make().reward(problem, completion), strict)
    task = gsm8k.make(scorer='flexible')
    self.assertEqual(task.reward(problem, completion), flexible)

  @parameterized.parameters(
      ({'answer': '#### 5'}, "the field 'question' is missing"),
      ({'question': 'x'}, "the field 'answer' is missing"),
      ({'question': 'x', 'answer': 5}, "'answer' is not a text but 5"),
      ({'question': 'x', 'answer': '5'}, "'answer' does not end with '#### '"),
      ({'question': 'x', 'answer': '#### five'}, 'does not end with'),
  )
  def test_a_bad_row_raises_and_is_named(self, row, message):
    path = self.file({'question': 'y', 'answer': '#### 1'}, row)
    with self.assertRaisesRegex(records.DataError, message) as caught:
      gsm8k.make(path)
    self.assertStartsWith(str(caught.exception), f'{path}:2: ')

  def test_a_system_prompt_moves_no_problem(self):
    plain, given = gsm8k.make(), gsm8k.make(system_prompt='Think.')
    for split in _SPLITS:
      for index in range(20):
        uids = {task.problem(split, index).uid for task in (plain, given)}
        self.assertLen(uids, 1)


class SampleTest(parameterized.TestCase):

  @parameterized.parameters(*_MODULES)
  def test_the_sample_is_small_and_in_both_splits(self, name):
    task = _MODULES[name].make()
    counts = task.table.counts
    self.assertBetween(counts.problems, 10, 20)
    self.assertEqual(counts.rows, counts.problems)
    self.assertEqual(task.name, name)
    for split in _SPLITS:
      self.assertGreater(task.size(split), 1)
      problem = task.problem(split, 0)
      self.assertStartsWith(problem.uid, f'{name}/')
      right = f'#### {problem.answer}\nAnswer: {problem.answer}'
      self.assertEqual(task.reward(problem, right), 1.0)

  def test_the_sums_in_the_solutions_are_right(self):
    for line in gsm8k.SAMPLE.read_text().splitlines():
      answer = json.loads(line)['answer']
      for step in answer.split('<<')[1:]:
        expression, value = step.partition('>>')[0].split('=')
        self.assertEqual(eval(expression), int(value), line)
      self.assertEqual(int(answer.split()[-1].replace(',', '')), int(value))

  @parameterized.parameters(*_MODULES)
  def test_the_score_is_pickled_without_the_table(self, name):
    task = _MODULES[name].make()
    self.assertLess(len(pickle.dumps(task.score)), 500)


if __name__ == '__main__':
  absltest.main()
