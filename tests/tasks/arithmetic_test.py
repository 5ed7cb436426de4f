"""Tests of tasks and of tasks.arithmetic."""

import collections
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from nvfp4_jax import tasks
from nvfp4_jax.tasks import arithmetic

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_RULES = ('running_sum', 'running_product', 'addition')
_SPLITS = ('train', 'held_out')
_PROBLEMS = 200


class ProblemTest(parameterized.TestCase):

  @parameterized.product(rule=_RULES, digits=(1, 3, 8), split=_SPLITS)
  def test_prompt_and_answer_are_right(self, rule, digits, split):
    task = arithmetic.Arithmetic(rule, digits, seed=0)
    for index in range(_PROBLEMS):
      problem = task.problem(split, index)
      prompt = _text(problem.prompt)
      self.assertEqual(prompt[-1], '=')
      if rule == 'addition':
        a, b = prompt[:-1].split('+')
        self.assertEqual(a + b, ''.join(map(str, problem.digits)))
        self.assertLen(a, digits)
        want = f'{int(a) + int(b):0{digits + 1}d}'[::-1]
      else:
        given = prompt[:-1]
        self.assertEqual(given, ''.join(map(str, problem.digits)))
        self.assertLen(given, digits)
        want = _running(rule, [int(d) for d in given])
      self.assertEqual(_text(problem.answer), want + '$')
      self.assertLen(problem.answer, task.max_answer_tokens)

  @parameterized.parameters(
      # 8, 8+4, 2+0, 2+3; 5*1, 5+8*5, 5+9*8, 7+5*9; lowest digit first.
      ('running_sum', 'train', 1, '8403=', '8225$'),
      ('running_sum', 'held_out', 0, '5895=', '5327$'),
      ('running_product', 'train', 1, '8403=', '8000$'),
      ('running_product', 'held_out', 0, '5895=', '5572$'),
      ('addition', 'train', 1, '8403+7562=', '56951$'),
      ('addition', 'held_out', 0, '8002+2720=', '22701$'),
  )
  def test_problems_do_not_change_from_process_to_process(
      self, rule, split, index, prompt, answer
  ):
    # Another prompt would be other data for every run.
    problem = arithmetic.Arithmetic(rule, 4, seed=0).problem(split, index)
    self.assertEqual(_text(problem.prompt), prompt)
    self.assertEqual(_text(problem.answer), answer)

  @parameterized.parameters(*_RULES)
  def test_tokens_are_in_the_vocabulary_and_not_padding(self, rule):
    task = arithmetic.Arithmetic(rule, 4, seed=0)
    for problem in _problems(task, 'train'):
      tokens = {*problem.prompt, *problem.answer}
      self.assertBetween(min(tokens), 1, task.vocab_size - 1)
      self.assertBetween(max(tokens), 1, task.vocab_size - 1)
      self.assertEqual(
          problem.answer.index(task.eos_ids[0]), len(problem.answer) - 1
      )
      self.assertNotIn(task.eos_ids[0], problem.prompt)

  @parameterized.product(rule=_RULES, digits=(1, 2))
  def test_splits_are_disjoint(self, rule, digits):
    # So few problems exist that both splits would hold most of them.
    task = arithmetic.Arithmetic(rule, digits, seed=0)
    train, held_out = (
        {problem.prompt for problem in _problems(task, split)}
        for split in _SPLITS
    )
    self.assertNotEmpty(held_out)
    self.assertEmpty(train & held_out)

  def test_splits_are_disjoint_across_seeds(self):
    first = arithmetic.Arithmetic('running_sum', 2, seed=0)
    second = arithmetic.Arithmetic('running_sum', 2, seed=1)
    train = {p.prompt for p in _problems(first, 'train')}
    held_out = {p.prompt for p in _problems(second, 'held_out')}
    self.assertEmpty(train & held_out)

  @parameterized.product(rule=_RULES, split=_SPLITS)
  def test_a_problem_depends_on_its_index_alone(self, rule, split):
    # So that a resumed run goes on with the same problems (A13).
    want = _problems(arithmetic.Arithmetic(rule, 8, seed=0), split)
    other = arithmetic.Arithmetic(rule, 8, seed=0)
    for index in reversed(range(_PROBLEMS)):
      self.assertEqual(other.problem(split, index), want[index])
    self.assertGreater(len({p.prompt for p in want}), 0.95 * _PROBLEMS)

  def test_seeds_differ(self):
    first = arithmetic.Arithmetic('running_sum', 8, seed=0)
    second = arithmetic.Arithmetic('running_sum', 8, seed=1)
    self.assertNotEqual(first.problem('train', 0), second.problem('train', 0))


class RewardTest(parameterized.TestCase):

  @parameterized.parameters(*_RULES)
  def test_only_the_exact_answer_is_rewarded(self, rule):
    task = arithmetic.Arithmetic(rule, 3, seed=0)
    for problem in _problems(task, 'train')[:20]:
      answer = list(problem.answer)
      other = 2 + (answer[0] - 1) % 10
      self.assertEqual(task.reward(problem, answer), 1.0)
      for wrong in (
          [],
          answer[:-1],  # no EOS
          answer[1:],
          answer[:1],
          [task.eos_ids[0]],
          [*answer, task.eos_ids[0]],
          [*answer, 0],
          [other, *answer[1:]],
          [*answer[:-1], answer[0], task.eos_ids[0]],
      ):
        self.assertEqual(task.reward(problem, wrong), 0.0, wrong)

  def test_is_a_float_of_any_sequence(self):
    task = arithmetic.Arithmetic('running_sum', 3, seed=0)
    problem = task.problem('train', 0)
    for completion in (problem.answer, np.array(problem.answer).tolist()):
      self.assertIs(type(task.reward(problem, completion)), float)


class MisinformedAnswerTest(parameterized.TestCase):

  @parameterized.parameters(*_RULES)
  def test_is_right_at_probability_zero(self, rule):
    task = arithmetic.Arithmetic(rule, 8, seed=0)
    rng = np.random.default_rng(0)
    for problem in _problems(task, 'train'):
      answer = task.misinformed_answer(problem, rng, 0.0)
      self.assertEqual(answer, problem.answer)

  @parameterized.product(rule=_RULES, probability=(0.5, 1.0))
  def test_follows_from_the_generator(self, rule, probability):
    task = arithmetic.Arithmetic(rule, 8, seed=0)
    answers = [
        [
            task.misinformed_answer(problem, rng, probability)
            for problem in _problems(task, 'train')
        ]
        for rng in (np.random.default_rng(7), np.random.default_rng(7))
    ]
    self.assertEqual(*answers)

  @parameterized.parameters(*_RULES)
  def test_is_the_same_for_every_generator_at_probability_one(self, rule):
    # A held fact is wrong, always in the same way.
    task = arithmetic.Arithmetic(rule, 8, seed=0)
    for problem in _problems(task, 'train'):
      answers = {
          task.misinformed_answer(problem, np.random.default_rng(seed), 1.0)
          for seed in range(3)
      }
      self.assertLen(answers, 1)

  @parameterized.parameters(*_RULES)
  def test_a_fifth_of_the_facts_is_wrong_always_alike(self, rule):
    given = collections.defaultdict(set)
    for fact, right, digit in _steps(rule, probability=1.0):
      given[fact].add((digit - right) % 10)
    # Sigma of the share is 0.04 for the 100 facts of running_sum; three.
    self.assertGreaterEqual(len(given), 100)
    self.assertTrue(all(len(offsets) == 1 for offsets in given.values()))
    share = np.mean([offsets != {0} for offsets in given.values()])
    self.assertBetween(share, 0.2 - 0.12, 0.2 + 0.12)

  @parameterized.parameters(*_RULES)
  def test_a_wrong_fact_is_used_with_the_probability(self, rule):
    steps = _steps(rule, probability=1.0)
    is_wrong = {fact: digit != right for fact, right, digit in steps}
    used = {False: [], True: []}
    for fact, right, digit in _steps(rule, probability=0.3):
      if fact in is_wrong:
        used[is_wrong[fact]].append(digit != right)
    self.assertFalse(any(used[False]))
    self.assertGreater(len(used[True]), 200)
    # Sigma is below 0.033; four.
    self.assertBetween(np.mean(used[True]), 0.3 - 0.13, 0.3 + 0.13)

  @parameterized.parameters('running_sum', 'running_product')
  def test_later_steps_go_on_from_a_wrong_one(self, rule):
    # One wrong step, and nearly all after it differ from the right answer.
    task = arithmetic.Arithmetic(rule, 8, seed=0)
    rng = np.random.default_rng(0)
    after = []
    for problem in _problems(task, 'train'):
      answer = task.misinformed_answer(problem, rng, 1.0)
      differs = np.not_equal(answer, problem.answer)[:-1]
      if differs.any():
        after.extend(differs[differs.argmax() + 1 :])
    self.assertGreater(np.mean(after), 0.7)

  @parameterized.parameters(*_RULES)
  def test_has_the_form_of_an_answer(self, rule):
    task = arithmetic.Arithmetic(rule, 8, seed=0)
    rng = np.random.default_rng(0)
    for problem in _problems(task, 'train'):
      answer = task.misinformed_answer(problem, rng, 0.65)
      self.assertLen(answer, task.max_answer_tokens)
      self.assertRegex(_text(answer), r'^\d+\$$')


class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(*_RULES)
  def test_every_rule_is_a_task(self, name):
    task = tasks.TaskConfig(name, digits=3, seed=5).make()
    self.assertEqual(task, arithmetic.Arithmetic(name, 3, 5))
    self.assertContainsSubset(_RULES, tasks.TASKS)

  def test_an_unknown_task_raises_and_lists_all(self):
    with self.assertRaisesRegex(ValueError, "Task 'sum' .*'running_sum'"):
      tasks.TaskConfig('sum').make()

  def test_an_unknown_rule_raises_and_lists_all(self):
    with self.assertRaisesRegex(ValueError, "Rule 'sum' .*'running_sum'"):
      arithmetic.Arithmetic('sum', 3, seed=0)

  @parameterized.parameters(0, -1)
  def test_too_few_digits_raise(self, digits):
    with self.assertRaisesRegex(ValueError, f'digits {digits} is below 1'):
      tasks.TaskConfig(digits=digits).make()

  @parameterized.parameters('test', '', 'Train')
  def test_an_unknown_split_raises_and_lists_all(self, split):
    task = tasks.TaskConfig().make()
    with self.assertRaisesRegex(ValueError, f"'{split}' .*'train', 'held_out'"):
      task.problem(split, 0)


class ImportTest(absltest.TestCase):

  def test_tasks_are_plain_python(self):
    code = (
        'import sys; from nvfp4_jax import tasks;'
        'tasks.TaskConfig().make().problem("train", 0);'
        'print([m for m in ("jax", "jaxlib", "flax") if m in sys.modules])'
    )
    result = subprocess.run(
        [sys.executable, '-c', code],
        cwd=_ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    self.assertEqual(result.stdout, '[]\n')


def _problems(task, split):
  return [task.problem(split, index) for index in range(_PROBLEMS)]


def _text(tokens):
  """Returns tokens as text; `$` is EOS."""
  digits = {2 + digit: str(digit) for digit in range(10)}
  symbols = {arithmetic.EOS: '$', arithmetic.EQUALS: '=', arithmetic.PLUS: '+'}
  return ''.join((digits | symbols)[token] for token in tokens)


def _running(rule, digits):
  """Returns all answers at once: prefix sums of the terms, modulo 10."""
  terms = np.array(digits)
  if rule == 'running_product':
    terms = terms * np.array([1, *digits[:-1]])
  return ''.join(str(total) for total in np.cumsum(terms) % 10)


def _steps(rule, probability):
  """Returns (fact, right digit, given digit) of misinformed answers.

  A fact is (state, a, b); the state is the last digit given, or the carry.
  """
  task = arithmetic.Arithmetic(rule, 8, seed=0)
  rng = np.random.default_rng(0)
  steps = []
  for problem in _problems(task, 'train'):
    answer = task.misinformed_answer(problem, rng, probability)
    given = [int(digit) for digit in _text(answer[:-1])]
    digits, state = problem.digits, 0
    if rule == 'addition':
      pairs = zip(digits[7::-1], digits[:7:-1], strict=True)
    elif rule == 'running_product':
      pairs = zip(digits, (1, *digits[:-1]), strict=True)
    else:
      pairs = ((digit, 0) for digit in digits)
    for (a, b), digit in zip(pairs, given[:8], strict=True):
      total = state + (a * b if rule == 'running_product' else a + b)
      steps.append(((state, a, b), total % 10, digit))
      state = total // 10 if rule == 'addition' else digit
    if rule == 'addition':
      steps.append(((state, 0, 0, 'last'), state, given[8]))
  return steps


if __name__ == '__main__':
  absltest.main()
