"""Tests of tasks.verify: extraction and equality, case by case."""

from absl.testing import absltest
from absl.testing import parameterized

from nvfp4_jax.tasks import verify


class NumberTest(parameterized.TestCase):

  @parameterized.parameters(
      ('12', '12'),
      ('12.', '12'),
      ('12...', '12'),
      ('**12**', '12'),
      ('*12*', '12'),
      ('`12`', '12'),
      ('(12)', '12'),
      ('"12"', '12'),
      ('7 + 5 = 12', '12'),
      ('7+5=12', '12'),
      ('It is 12, not 13.', '13'),
      ('12\n', '12'),
      (r'\boxed{12}', '12'),
      ('$12$', '12'),
      ('$12', '12'),
      (r'\$12', '12'),
      ('12%', '12'),
      ('12 apples', '12'),
      ('<b>12</b>', '12'),
      ('12!', '12'),
      ('#12', '12'),
      ('12:30', '30'),
      ('12/5', '5'),
      # Signs.
      ('-5', '-5'),
      ('+5', '5'),
      ('x = -5', '-5'),
      ('x=-5', '-5'),
      ('(-5)', '-5'),
      ('-$5', '-5'),
      ('\u22125', '-5'),
      ('7 - 5', '5'),
      ('7-5', '5'),
      ('x-5', '5'),
      ('(a)-5', '5'),
      ('5\u20137', '7'),
      ('-0', '0'),
      # Commas and dots.
      ('1,234', '1234'),
      ('1,234,567.', '1234567'),
      ('12,345.60', '12345.6'),
      ('1,2,3', '3'),
      ('1, 200', '200'),
      ('1,2345', '2345'),
      ('1,', '1'),
      ('3.50', '3.5'),
      ('3.0', '3'),
      ('.5', '0.5'),
      ('-.5', '-0.5'),
      ('007', '7'),
      ('3...5', '5'),
      ('No.5', '5'),
      ('1.2.3', None),
      ('1.234.567', None),
      ('1,234,567kg', None),
      # Glued into a word.
      ('x2', None),
      ('3rd', None),
      ('5cm', None),
      ('a_1', None),
      ('1_000', None),
      ('1e5', None),
      ('H2O', None),
      ('\u00e912', None),
      ('12\u043a', None),
      ('5\u00b2', None),
      ('2\u00bd', None),
      ('12 or x2', '12'),
      ('3\u00d74', '4'),
      ('8\u00f72', '2'),
      # Chinese sets no spaces; its powers of ten are part of a number.
      ('\u517112\u4e2a', '12'),
      ('12\u4e07', None),
      ('', None),
      ('none', None),
      ('\u0661\u0662', None),
      ('...', None),
      ('-', None),
  )
  def test_last_number(self, text, want):
    self.assertEqual(verify.last_number(text), want)

  @parameterized.parameters(
      ('12', '12'),
      (' 12 ', '12'),
      ('+12', '12'),
      ('0012.00', '12'),
      ('12.', '12'),
      ('12%', '12'),
      (r'12\%', '12'),
      ('$12', '12'),
      ('-$12', '-12'),
      ('$-12', '-12'),
      ('\u221212', '-12'),
      ('1,234.50', '1234.5'),
      ('-0.0', '0'),
      ('.5', '0.5'),
      ('9' * 5000, '9' * 5000),  # Python refuses to make an int of it.
      ('1,23', None),
      ('1234,567', None),
      ('12 13', None),
      ('12a', None),
      ('--12', None),
      ('1/2', None),
      ('', None),
      ('-', None),
      ('.', None),
  )
  def test_canonical_number(self, text, want):
    self.assertEqual(verify.canonical_number(text), want)


class ConventionTest(parameterized.TestCase):

  @parameterized.parameters(
      ('So it is 12.\n#### 12', '12', '12'),
      ('#### 1,234', '1234', '1234'),
      ('#### -7', '-7', '-7'),
      ('#### 12.', '12', '12'),
      ('#### 12.50', '12.5', '12.5'),
      ('#### 1 and #### 2', '2', '2'),
      ('#### 12 apples, 3 left', '12', '3'),
      ('####12', None, '12'),
      ('### 12', None, '12'),
      ('#### $12', None, '12'),
      ('#### ...', None, None),
      ('#### 1.2.3', None, None),
      ('The answer is 12.', None, '12'),
      ('no number', None, None),
      ('', None, None),
      ('#### 12' + ' ' * 293, '12', '12'),
      ('#### 12' + ' ' * 294, None, '12'),
      ('#### 12' + ' ' * 300, None, None),
  )
  def test_gsm8k(self, text, strict, flexible):
    self.assertEqual(verify.gsm8k_answer(text), strict)
    self.assertEqual(verify.gsm8k_answer(text, strict=False), flexible)

  @parameterized.parameters(
      ('It is 4.\n#### 4', '4'),
      ('#### 1,000', '1000'),
      ('#### -3', '-3'),
      ('#### 1\n#### 2', '2'),
      ('4', None),
      ('#### four', None),
      ('', None),
  )
  def test_gsm8k_truth(self, answer, want):
    self.assertEqual(verify.gsm8k_truth(answer), want)

  @parameterized.parameters(
      ('Answer: 12', '12'),
      ('answer : 12', '12'),
      ('ANSWER:12', '12'),
      ('The final answer: x = 3', 'x = 3'),
      ('Answer: 1\nAnswer: 2', '2'),
      ('Answer:\n12', '12'),
      ('Answer: 12\nMore words', '12'),
      (r'Answer: \boxed{12}', r'\boxed{12}'),
      ('Answer 12', None),
      ('Answer:', None),
      ('', None),
      ('Answer: 12' + '\n' * 290, '12'),
      ('Answer: 12' + '\n' * 291, None),
  )
  def test_minerva(self, text, want):
    self.assertEqual(verify.minerva_answer(text), want)

  @parameterized.parameters(
      (r'\boxed{12}', '12'),
      (r'so $\boxed{ 12 }$.', '12'),
      (r'\boxed{\frac{1}{2}}', r'\frac{1}{2}'),
      (r'\boxed{1} then \boxed{2}', '2'),
      (r'\boxed{\boxed{3}}', '3'),
      (r'\fbox{4}', '4'),
      (r'\boxed {5}', '5'),
      (r'\boxed{\{1, 2\}}', r'\{1, 2\}'),
      (r'\boxed{a\\}', r'a\\'),
      (r'\boxed{}', ''),
      (r'\boxed{1} then \boxed{2', None),
      (r'\boxed{{1}', None),
      (r'\boxed{1\}', None),
      (r'\boxed 5', None),
      (r'\boxed', None),
      ('boxed{1}', None),
      ('', None),
      (r'\boxed{' + 'a' * 9_999 + '}', 'a' * 9_999),
      (r'\boxed{' + 'a' * 10_000 + '}', None),
  )
  def test_last_boxed(self, text, want):
    self.assertEqual(verify.last_boxed(text), want)

  @parameterized.parameters(
      (r'\boxed{1} Answer: 2', '2'),  # Minerva first.
      (r'Answer: 2 \boxed{1}', r'2 \boxed{1}'),
      (r'It is \boxed{1}.', '1'),
      (r'Answer 2, \boxed{1}', '1'),
      ('It is 1.', None),
      (r'\boxed{1}' + '.' * 291, '1'),
      (r'\boxed{1}' + '.' * 292, None),
  )
  def test_dapo(self, text, want):
    self.assertEqual(verify.dapo_answer(text), want)

  @parameterized.parameters(
      ('<answer>12</answer>', '12'),
      ('<answer> 1\n2 </answer> so', '1\n2'),
      ('<answer>1</answer><answer>2</answer>', '2'),
      ('<answer>1</answer><answer>2', '1'),
      ('<answer>1<answer>2</answer>', '2'),
      ('<answer></answer>', ''),
      ('</answer>1<answer>', None),
      ('<answer>1', None),
      ('1</answer>', None),
      ('', None),
  )
  def test_tagged_answer(self, text, want):
    self.assertEqual(verify.tagged_answer(text), want)


class EqualityTest(parameterized.TestCase):

  @parameterized.parameters(
      ('12', '12'),
      ('12.', '12'),
      ('$12$', '12'),
      ('**12**', '12'),
      ('012.0', '12'),
      ('1,234', '1234'),
      ('1{,}234', '1234'),
      (r'1\,234', '1234'),
      (r'12\%', '12'),
      ('\u22123', '-3'),
      ('x = 5', '5'),
      ('a + b = 5', '5'),
      (r'\boxed{5}', '5'),
      (r'$\boxed{5}$.', '5'),
      (r'\(5\)', '5'),
      (r'\text{5}', '5'),
      (r'\textbf{(A)}', '(A)'),
      ('1/2', '0.5'),
      ('2/4', '1/2'),
      ('-1/2', '1/-2'),
      ('4/2', '2'),
      (r'\frac{1}{2}', '1/2'),
      (r'\frac12', '1/2'),
      (r'\dfrac{2}{4}', r'\tfrac{1}{2}'),
      (r'-\frac{1}{2}', r'\frac{-1}{2}'),
      (r'\frac{a}{2}', r'\frac a2'),
      (r'\sqrt3', r'\sqrt{3}'),
      (r'\left( 1, 2 \right)', '(1,2)'),
      ('9' * 5000, '9' * 5000),
      ('1/' + '9' * 5000, '1/' + '9' * 5000),
  )
  def test_equal(self, answer, truth):
    self.assertTrue(verify.answers_equal(answer, truth))
    self.assertTrue(verify.answers_equal(truth, answer))

  @parameterized.parameters(
      ('12', '13'),
      ('12', '-12'),
      ('1 1/2', '11/2'),  # A space between digits stays.
      ('1 2', '12'),
      ('0.33', '1/3'),
      ('1/0', '2/0'),
      ('x >= 5', '5'),
      ('12 inches', '12'),  # Units are dropped on request only.
      (r'\leftarrow', 'arrow'),
      ('a', 'A'),
      ('9' * 5000, '9' * 4999),
      ('', ''),
      ('$', '$'),
      ('.', ''),
  )
  def test_not_equal(self, answer, truth):
    self.assertFalse(verify.answers_equal(answer, truth))

  @parameterized.parameters(
      '12 inches',
      '12 square cm',
      '12 Dollars.',
      r'12\text{ cm}',
      r'12^\circ',
      r'12^{\circ}',
      '12\u00b0',
      '12 degrees',
      '12 percent',
      '12cm',
  )
  def test_units_are_dropped_where_stated(self, answer):
    self.assertTrue(
        verify.answers_equal(answer, '12', units=(*verify.UNITS, 'square'))
    )
    self.assertFalse(verify.answers_equal(answer, '12'))

  def test_a_unit_within_a_word_stays(self):
    normal = verify.normalize_math('always', units=verify.UNITS)
    self.assertEqual(normal, 'always')


if __name__ == '__main__':
  absltest.main()
