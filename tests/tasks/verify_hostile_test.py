"""Tests of tasks.verify: hostile texts, and the optional math-verify."""

import functools
import importlib.util
import sys
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from nvfp4_jax.tasks import dapo_math
from nvfp4_jax.tasks import rewards
from nvfp4_jax.tasks import text
from nvfp4_jax.tasks import verify

_SIZE = 300_000
_HAS_MATH_VERIFY = importlib.util.find_spec('math_verify') is not None


def _repeat(part):
  return part * (_SIZE // len(part))


# Each would take long if some pattern looked at parts of it again and again.
_HOSTILE = {
    'digits': _repeat('1'),
    'digits_glued': _repeat('1') + 'a',
    'numbers': _repeat('1 '),
    'glued': _repeat('a1 '),
    'groups': '1,' + _repeat('111,'),
    'groups_glued': '1,' + _repeat('111,') + '111a',
    'broken_groups': _repeat('1,1111,'),
    'decimals': _repeat('1.'),
    'points': _repeat('.5'),
    'minuses': _repeat('-'),
    'dollars': _repeat('\\$'),
    'spaces': _repeat(' '),
    'newlines': 'Answer:' + _repeat('\n'),
    'marks': _repeat('#### 1'),
    'answers': _repeat('Answer: '),
    'boxes': _repeat('\\boxed{'),
    'closed_boxes': _repeat('\\boxed{1}'),
    'braces': '\\boxed{' + _repeat('{'),
    'backslashes': '\\boxed{' + _repeat('\\'),
    'fractions': _repeat('\\frac'),
    'open_fractions': _repeat('\\frac{'),
    'short_fractions': _repeat('\\frac12'),
    'roots': _repeat('\\sqrt'),
    'texts': _repeat('\\text{'),
    'ratio': _repeat('1') + '/' + _repeat('2'),
    'equations': _repeat('='),
    'percents': _repeat('%'),
    'units': _repeat('units '),
    'degrees': _repeat('^\\circ'),
    'tags': _repeat('<answer>'),
    'closed_tags': _repeat('<answer></answer>'),
    'surrogates': _repeat('\ud800'),
}


class HostileTest(parameterized.TestCase):

  @parameterized.named_parameters(_HOSTILE.items())
  def test_takes_linear_time(self, text):
    for extract in (
        verify.last_number,
        verify.canonical_number,
        verify.gsm8k_answer,
        lambda text: verify.gsm8k_answer(text, strict=False),
        verify.gsm8k_truth,
        verify.minerva_answer,
        verify.last_boxed,
        verify.dapo_answer,
        verify.tagged_answer,
        lambda text: verify.normalize_math(text, units=verify.UNITS),
    ):
      start = time.process_time()
      extract(text)
      # About 0.1 s at most; quadratic time would be minutes and more.
      self.assertLess(time.process_time() - start, 2.0)


class MathVerifyTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if not _HAS_MATH_VERIFY:
      self.skipTest('math-verify is not installed (extra: tasks).')

  @parameterized.parameters(
      (r'\frac{1}{2}', '0.5', True),
      ('x + 1', '1 + x', True),
      (r'2\sqrt{2}', r'\sqrt{8}', True),
      (r'\boxed{3}', '3', True),
      (r'$\boxed{3}$', '3', True),
      ('(1,2)', '(1, 2)', True),
      ('3', '4', False),
      ('', '3', False),
      (r'\frac{', '3', False),
      ('1, 2, 3', '3', False),
      ('1 or 3', '3', False),
      # Two boxes would be two tries.
      (r'1} \boxed{3', '3', False),
      (r'\boxed{3} \boxed{1}', '3', False),
      ('a' * 5000, '3', False),
  )
  def test_works_in_any_thread(self, answer, truth, want):
    found = []

    def compare():
      found.append(verify.math_verify_equal(answer, truth))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    self.assertEqual(found, [want])
    self.assertEqual(verify.math_verify_equal(answer, truth), want)

  def test_what_takes_for_ever_times_out_in_a_pool(self):
    problem = text.TextProblem(text.ask('?'), '2x', 'dapo_math/1')
    score = functools.partial(dapo_math.score, scorer='math_verify')
    completions = ('Answer: x + x', 'Answer: 9^{9^{9^9}}', 'Answer: 3x')
    # The first reward imports the package, which takes more than a second.
    with rewards.Pool(score, workers=1, timeout=8.0) as pool:
      results = pool.score([(problem, text) for text in completions])
    self.assertEqual([r.status for r in results], ['ok', 'timeout', 'ok'])
    self.assertEqual([r.reward for r in results], [1.0, None, 0.0])


class MathVerifyMissingTest(absltest.TestCase):

  def test_the_error_names_the_extra(self):
    with (
        mock.patch.dict(sys.modules, {'math_verify': None}),
        self.assertRaisesRegex(ImportError, r'nvfp4-jax\[tasks\]'),
    ):
      verify.math_verify_equal('1', '1')


if __name__ == '__main__':
  absltest.main()
