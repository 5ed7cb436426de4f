"""Tests of tasks.reasoning_gym; most need the optional package."""

import importlib.util
import os
import pathlib
import pickle
import subprocess
import sys
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from nvfp4_jax import tasks
from nvfp4_jax.tasks import reasoning_gym
from nvfp4_jax.tasks import rewards
from nvfp4_jax.tasks import text

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_HAS_PACKAGE = importlib.util.find_spec('reasoning_gym') is not None
_SPLITS = ('train', 'held_out')


class MissingTest(absltest.TestCase):

  def test_the_error_names_the_extra(self):
    with (
        mock.patch.dict(sys.modules, {'reasoning_gym': None}),
        self.assertRaisesRegex(ImportError, r'nvfp4-jax\[tasks\]'),
    ):
      tasks.TaskConfig('reasoning_gym', dataset='chain_sum').make_text()

  def test_an_unknown_scorer_raises_and_lists_all(self):
    with self.assertRaisesRegex(ValueError, "'best' .*'tag', 'last_number'"):
      reasoning_gym.ReasoningGym('chain_sum', scorer='best')


class FakePackageTest(absltest.TestCase):
  """What needs no data set in particular, without the package."""

  def setUp(self):
    super().setUp()
    reasoning_gym._item.cache_clear()
    self.addCleanup(reasoning_gym._item.cache_clear)
    self.enterContext(
        mock.patch.dict(sys.modules, {'reasoning_gym': _fake_package()})
    )

  def test_problems_and_rewards(self):
    task = tasks.TaskConfig('reasoning_gym', dataset='double').make_text()
    seen = {}
    for split in _SPLITS:
      problems = [task.problem(split, i) for i in range(100)]
      seen[split] = {problem.uid for problem in problems}
      for problem in problems:
        right = f'<answer>{problem.answer}</answer>'
        self.assertEqual(task.reward(problem, right), 1.0)
        self.assertEqual(task.reward(problem, '<answer>x</answer>'), 0.25)
        self.assertEqual(task.reward(problem, problem.answer), 0.0)
    self.assertEmpty(seen['train'] & seen['held_out'])

  def test_another_spelling_of_the_number_counts(self):
    task = reasoning_gym.ReasoningGym('double', scorer='last_number')
    problem = task.problem('train', 0)
    self.assertEqual(task.reward(problem, f'{problem.answer}.00!'), 1.0)
    self.assertEqual(task.reward(problem, '0'), 0.25)
    self.assertEqual(task.reward(problem, 'none'), 0.0)

  def test_a_data_set_of_one_problem_has_but_one_split(self):
    task = reasoning_gym.ReasoningGym('same')
    self.assertEqual(task.problem('train', 0).answer, '')
    with self.assertRaisesRegex(ValueError, "of 'same' is in 'held_out': the"):
      task.problem('held_out', 0)

  def test_an_unknown_data_set_raises_and_names_near_ones(self):
    with self.assertRaisesRegex(ValueError, r"near it \['double'\]"):
      reasoning_gym.ReasoningGym('doubles')


class ReasoningGymTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if not _HAS_PACKAGE:
      self.skipTest('reasoning-gym is not installed (extra: tasks).')

  @parameterized.product(
      dataset=('chain_sum', 'gsm_symbolic', 'countdown', 'basic_arithmetic'),
      scorer=reasoning_gym.SCORERS,
  )
  def test_the_right_answer_is_rewarded(self, dataset, scorer):
    if (dataset, scorer) == ('countdown', 'last_number'):
      self.skipTest('The answer is an expression.')
    task = reasoning_gym.ReasoningGym(dataset, seed=1, scorer=scorer)
    self.assertIsNone(task.size('train'))
    for index in range(5):
      problem = task.problem('train', index)
      answer = problem.answer
      right = f'So <answer>1</answer> is {answer}: <answer>{answer}</answer>'
      self.assertEqual(task.reward(problem, right), 1.0)
      for wrong in ('', 'no idea', f'<answer>{answer}'):
        want = float(scorer == 'last_number' and answer in wrong)
        self.assertEqual(task.reward(problem, wrong), want)
      wrong = '<answer>123456789</answer>'
      self.assertLess(task.reward(problem, wrong), 0.5)

  @parameterized.parameters('chain_sum', 'gsm_symbolic')
  def test_a_problem_depends_on_seed_split_and_index_alone(self, dataset):
    first = reasoning_gym.ReasoningGym(dataset, seed=3)
    second = reasoning_gym.ReasoningGym(dataset, seed=3)
    want = [first.problem('train', i) for i in range(20)]
    reasoning_gym._item.cache_clear()
    for i in reversed(range(20)):
      self.assertEqual(second.problem('train', i), want[i])
    other = reasoning_gym.ReasoningGym(dataset, seed=4)
    self.assertNotEqual([other.problem('train', i) for i in range(20)], want)

  def test_splits_are_disjoint_across_seeds(self):
    seen = [
        {task.problem(split, i).uid for i in range(300)}
        for split, task in zip(
            _SPLITS,
            (
                reasoning_gym.ReasoningGym('coin_flip', seed=0),
                reasoning_gym.ReasoningGym('coin_flip', seed=1),
            ),
            strict=True,
        )
    ]
    self.assertEmpty(seen[0] & seen[1])

  def test_the_scorers_ask_for_what_they_look_for(self):
    tag, number = (
        reasoning_gym.ReasoningGym('chain_sum', scorer=scorer).problem(
            'train', 0
        )
        for scorer in reasoning_gym.SCORERS
    )
    self.assertEqual(tag.uid, number.uid)
    question = number.messages[-1].content
    self.assertNotIn('<answer>', question)
    self.assertStartsWith(tag.messages[-1].content, question)
    self.assertIn('<answer>', tag.messages[-1].content)

  def test_system_prompt_comes_first(self):
    task = reasoning_gym.ReasoningGym('chain_sum', system_prompt='Think.')
    message = task.problem('train', 0).messages[0]
    self.assertEqual(message, text.Message('system', 'Think.'))

  def test_no_answer_is_worth_nothing(self):
    # The package gives 0.01 for it.
    task = reasoning_gym.ReasoningGym('countdown')
    self.assertEqual(task.reward(task.problem('train', 0), 'none'), 0.0)

  def test_works_in_a_pool(self):
    task = reasoning_gym.ReasoningGym('chain_sum')
    self.assertEqual(pickle.loads(pickle.dumps(task)), task)
    problem = task.problem('train', 0)
    with rewards.Pool(task.reward, workers=1, timeout=60.0) as pool:
      results = pool.score(
          [
              (problem, f'<answer>{problem.answer}</answer>'),
              (problem, '<answer>x</answer>'),
          ]
      )
    self.assertEqual([result.reward for result in results], [1.0, 0.0])

  def test_problems_of_other_tasks_are_refused(self):
    task = reasoning_gym.ReasoningGym('chain_sum')
    with self.assertRaisesRegex(ValueError, 'not a problem of reasoning-gym'):
      task.reward(text.TextProblem(text.ask('x'), '1', 'a/1'), '1')
    other = reasoning_gym.ReasoningGym('basic_arithmetic').problem('train', 0)
    with self.assertRaisesRegex(ValueError, 'is of another task'):
      task.reward(other, '1')

  def test_an_unknown_data_set_raises_and_names_near_ones(self):
    with self.assertRaisesRegex(ValueError, "near it .*'chain_sum'"):
      reasoning_gym.ReasoningGym('chain_sums')
    with self.assertRaisesRegex(ValueError, "which has .*'chain_sum'.*'zebra_"):
      reasoning_gym.ReasoningGym('????')

  def test_a_data_set_that_needs_settings_raises(self):
    with self.assertRaisesRegex(ValueError, "'composite' makes no problem"):
      reasoning_gym.ReasoningGym('composite')

  @parameterized.parameters('codeio', 'list_functions')
  def test_a_data_set_that_ignores_its_seed_raises(self, dataset):
    with self.assertRaisesRegex(ValueError, 'do not follow from its seed'):
      reasoning_gym.ReasoningGym(dataset)

  @parameterized.parameters('0', '1')
  def test_a_data_set_that_depends_on_hashes_needs_them_fixed(self, seed):
    code = (
        'from nvfp4_jax.tasks import reasoning_gym\n'
        'try:\n'
        '  task = reasoning_gym.ReasoningGym("word_ladder")\n'
        '  print(task.problem("train", 0).uid)\n'
        'except ValueError as error:\n'
        '  print(error)\n'
    )
    output = subprocess.check_output(
        [sys.executable, '-c', code],
        cwd=_ROOT,
        env={**os.environ, 'PYTHONHASHSEED': seed},
        text=True,
    )
    want = 'reasoning_gym/word_ladder/' if seed == '0' else 'PYTHONHASHSEED=0'
    self.assertIn(want, output)


def _fake_package():
  """Returns a module with two data sets; a wrong answer gets a quarter."""
  package = types.ModuleType('reasoning_gym')
  package.factory = types.SimpleNamespace(DATASETS={'double': (), 'same': ()})

  class Data(list):

    def score_answer(self, answer, entry):
      return 1.0 if answer == entry['answer'] else 0.25

  def create_dataset(name, seed, size):
    del size
    if name == 'same':
      return Data([{'question': 'Why?', 'answer': None}])
    return Data([{'question': f'2 * {seed}?', 'answer': str(2 * seed)}])

  package.create_dataset = create_dataset
  return package


if __name__ == '__main__':
  absltest.main()
