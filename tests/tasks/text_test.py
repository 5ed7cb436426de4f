"""Tests of tasks.text, tasks.addition and the choice of a task by its name."""

import dataclasses
import pathlib
import pickle

from absl.testing import absltest
from absl.testing import parameterized

from nvfp4_jax import config
from nvfp4_jax import tasks
from nvfp4_jax.tasks import addition
from nvfp4_jax.tasks import arithmetic
from nvfp4_jax.tasks import dapo_math
from nvfp4_jax.tasks import text

_SPLITS = ('train', 'held_out')


class TextProblemTest(absltest.TestCase):

  def test_chat_is_what_a_template_takes(self):
    problem = text.TextProblem(text.ask('How many?', 'Be brief.'), '3', 'a/1')
    self.assertEqual(
        problem.chat(),
        [
            {'role': 'system', 'content': 'Be brief.'},
            {'role': 'user', 'content': 'How many?'},
        ],
    )

  def test_without_system_prompt_there_is_no_system_message(self):
    self.assertEqual([m.role for m in text.ask('How many?')], ['user'])

  def test_a_problem_can_be_hashed_and_pickled(self):
    problem = text.TextProblem(text.ask('How many?'), '3', 'a/1')
    self.assertLen({problem, pickle.loads(pickle.dumps(problem))}, 1)

  def test_an_unknown_role_raises_and_lists_all(self):
    with self.assertRaisesRegex(ValueError, "'tool' .*'system', 'user'"):
      text.Message('tool', 'x')

  def test_a_text_without_utf8_form_raises(self):
    with self.assertRaises(UnicodeEncodeError):
      text.Message('user', '\ud800')

  def test_normalize_keeps_what_matters_in_mathematics(self):
    self.assertEqual(text.normalize('  a\n\tb  '), 'a b')
    self.assertEqual(text.normalize('e\u0301'), '\u00e9')
    for other in ('x2', 'X\u00b2'):
      self.assertNotEqual(text.normalize('x\u00b2'), text.normalize(other))

  def test_digest_keeps_parts_apart(self):
    self.assertNotEqual(text.digest('a', 'b'), text.digest('ab'))
    self.assertNotEqual(text.digest('1'), text.digest(1))
    # The same on every machine, or a resumed run would see other problems.
    self.assertEqual(text.digest('a', 1).hex()[:8], '2657442b')

  def test_an_eighth_is_held_out(self):
    count = sum(text.is_held_out(f'a/{i}') for i in range(8000))
    self.assertBetween(count, 1000 - 4 * 30, 1000 + 4 * 30)  # four sigma


class ChatAdditionTest(parameterized.TestCase):

  @parameterized.product(digits=(1, 2, 3, 6), split=_SPLITS)
  def test_prompt_and_answer_are_right(self, digits, split):
    task = addition.ChatAddition(digits)
    for index in range(100):
      problem = task.problem(split, index)
      content = problem.messages[-1].content
      a, b = content.removeprefix('What is ').removesuffix('?').split(' + ')
      self.assertEqual((len(a), len(b)), (digits, digits))
      self.assertEqual(problem.answer, str(int(a) + int(b)))
      self.assertEqual(problem.uid, f'chat_addition/{a}+{b}')

  @parameterized.parameters(1, 2)
  def test_splits_share_no_sum_even_across_seeds(self, digits):
    def pairs(split, seed):
      task = addition.ChatAddition(digits, seed)
      uids = [task.problem(split, index).uid for index in range(1000)]
      return {frozenset(uid.split('/')[1].split('+')) for uid in uids}

    train, held_out = pairs('train', 0), pairs('held_out', 1)
    self.assertNotEmpty(held_out)
    self.assertEmpty(train & held_out)

  def test_a_problem_depends_on_seed_split_and_index_alone(self):
    first, second = addition.ChatAddition(3, 5), addition.ChatAddition(3, 5)
    want = [first.problem('train', i) for i in range(50)]
    for i in reversed(range(50)):
      self.assertEqual(second.problem('train', i), want[i])
    self.assertGreater(len(set(want)), 45)
    other = addition.ChatAddition(3, 6)
    self.assertNotEqual([other.problem('train', i) for i in range(50)], want)

  @parameterized.parameters(
      ('{}', 1.0),
      ('12 + 30 = {}.', 1.0),
      ('The sum is **{}**', 1.0),
      (r'\boxed{{{}}}', 1.0),
      ('{}. Check: 1 + 1 = 2', 0.0),
      ('', 0.0),
      ('I do not know.', 0.0),
      ('-{}', 0.0),
      ('x{}', 0.0),
      ('{}.5', 0.0),
  )
  def test_the_last_number_counts(self, completion, want):
    task = addition.ChatAddition(2)
    problem = task.problem('train', 0)
    reward = task.reward(problem, completion.format(problem.answer))
    self.assertEqual(reward, want)
    self.assertIs(type(reward), float)

  def test_system_prompt_comes_first_and_changes_no_problem(self):
    plain = addition.ChatAddition(2).problem('train', 3)
    given = addition.ChatAddition(2, system_prompt='Add.').problem('train', 3)
    self.assertEqual(given.messages[0], text.Message('system', 'Add.'))
    self.assertEqual(given.messages[1:], plain.messages)
    self.assertEqual(given.uid, plain.uid)

  def test_there_is_no_end(self):
    self.assertIsNone(addition.ChatAddition().size('train'))

  @parameterized.parameters(0, 7, -1)
  def test_digits_out_of_range_raise(self, digits):
    with self.assertRaisesRegex(ValueError, f'digits {digits} is not in 1'):
      addition.ChatAddition(digits)

  def test_a_bad_position_raises(self):
    task = addition.ChatAddition()
    with self.assertRaisesRegex(ValueError, "'test' is not one of"):
      task.problem('test', 0)
    with self.assertRaisesRegex(ValueError, 'Index -1 is below 0'):
      task.problem('train', -1)


class TaskConfigTest(parameterized.TestCase):

  def test_defaults_of_digits(self):
    self.assertEqual(tasks.TaskConfig().make().digits, 8)
    task = tasks.TaskConfig('chat_addition').make_text()
    self.assertEqual(task, addition.ChatAddition(2))

  @parameterized.parameters(
      (dict(name='chat_addition', digits=3, seed=2, system_prompt='Add.'),),
      (dict(name='dapo_math', scorer='normalized'),),
      (dict(name='gsm8k', scorer='flexible', system_prompt='Think.'),),
  )
  def test_makes_every_text_task(self, fields):
    task_config = tasks.TaskConfig(**fields)
    self.assertTrue(task_config.is_text)
    task = task_config.make_text()
    self.assertEqual(task.name, fields['name'])
    problem = task.problem('train', 0)
    self.assertEqual(task.problem('train', 0), problem)
    prompts = [m.content for m in problem.messages if m.role == 'system']
    self.assertEqual(prompts, [fields[k] for k in fields if k[:3] == 'sys'])

  def test_path_reaches_the_reader(self):
    task = tasks.TaskConfig('dapo_math', path=dapo_math.SAMPLE).make_text()
    self.assertEqual(task.table.path, dapo_math.SAMPLE)

  @parameterized.parameters(
      (dict(name='running_sum', dataset='chain_sum'), "'dataset'"),
      (dict(name='addition', path=pathlib.Path('x')), "'path'"),
      (dict(name='chat_addition', scorer='strict'), "'scorer'"),
      (dict(name='gsm8k', digits=3, dataset='x'), "'dataset', 'digits'"),
      (dict(name='gsm8k', digits=8), "'digits'"),
      (dict(name='dapo_math', system_prompt='x'), "'system_prompt'"),
      (dict(name='reasoning_gym', path=pathlib.Path('x')), "'path'"),
  )
  def test_an_unused_field_raises_and_is_named(self, fields, named):
    task_config = tasks.TaskConfig(**fields)
    with self.assertRaisesRegex(ValueError, rf'does not take \[{named}\]'):
      task_config.make_text() if task_config.is_text else task_config.make()

  @parameterized.parameters('make', 'make_text')
  def test_an_unknown_name_raises_and_lists_all(self, method):
    for name in (*tasks.TASKS, *tasks.TEXT_TASKS):
      with self.assertRaisesRegex(ValueError, f"Task 'sum' .*'{name}'"):
        getattr(tasks.TaskConfig('sum'), method)()

  def test_the_two_kinds_are_not_mixed_up(self):
    self.assertEmpty(set(tasks.TASKS) & set(tasks.TEXT_TASKS))
    with self.assertRaisesRegex(ValueError, 'speaks text'):
      tasks.TaskConfig('gsm8k').make()
    with self.assertRaisesRegex(ValueError, 'speaks tokens'):
      tasks.TaskConfig('addition').make_text()

  @parameterized.parameters('gsm8k', 'dapo_math')
  def test_an_unknown_scorer_raises_and_lists_all(self, name):
    with self.assertRaisesRegex(ValueError, "'best' is not one of .*',"):
      tasks.TaskConfig(name, scorer='best').make_text()

  def test_reasoning_gym_needs_a_data_set(self):
    with self.assertRaisesRegex(ValueError, 'needs a `dataset`'):
      tasks.TaskConfig('reasoning_gym').make_text()

  def test_a_config_saved_before_there_were_texts_is_read(self):
    saved = {'name': 'running_sum', 'digits': 8, 'seed': 0}
    task = config.from_json(tasks.TaskConfig, saved).make()
    self.assertEqual(task, arithmetic.Arithmetic('running_sum', 8, 0))

  def test_every_field_goes_through_json(self):
    given = tasks.TaskConfig('gsm8k', 3, 1, pathlib.Path('a'), 'b', 'c', 'd')
    default = tasks.TaskConfig()
    for field in dataclasses.fields(given):
      name = field.name
      self.assertNotEqual(getattr(given, name), getattr(default, name))
    saved = config.to_json(given)
    self.assertEqual(config.from_json(tasks.TaskConfig, saved), given)


if __name__ == '__main__':
  absltest.main()
