r"""Answers out of completions, and whether two answers are one.

Extractors take any text and return an answer or None. All of them take linear
time: a completion of 1 MB costs a fraction of a second. `math_verify_equal`
alone does not: it hands what it gets to a computer algebra system.

Conventions, and how they differ from the programs that set them:

* last number: of the whole completion (`last_number`).
* GSM8K: `#### N` in the last 300 characters, the last one if there are more;
  or else, as 'flexible' scoring, the last number there.
* DAPO: a line `Answer: ...` in the last 300 characters, the last one, as in
  Minerva; without any, the last `\boxed{...}` there.

The originals compare text with text. Here, numbers are equal by value: 12, 12.0
and 012 are one answer, and so are 1/2 and 0.5.
"""

import collections
from collections.abc import Iterable
import fractions
import importlib
import re
from typing import Any

# What the DAPO scorer takes off the end of an answer.
UNITS = (
    'square units',
    'units',
    'degrees',
    'dollars',
    'cents',
    'points',
    'miles',
    'km',
    'cm',
    'mm',
    'kg',
    'meters',
    'metres',
    'inches',
    'feet',
    'hours',
    'minutes',
    'seconds',
    'days',
    'ways',
    'percent',
)

_TAIL = 300  # characters; both conventions look no further back
_MAX_BOXED = 10_000  # characters; no answer is longer
_MAX_EXACT = 1_000  # characters; longer ones are compared as text only

_MINUS = dict.fromkeys(map(ord, '\u2212\u2013\ufe63\uff0d'), '-')

# What glues a digit to a word: letters of alphabets that put spaces between
# words, other numerals, and the Chinese powers of ten. Not glue are the signs
# for times and divided by, which stand among the letters.
_GLUE = (
    r'0-9A-Za-z_\u00aa\u00b2\u00b3\u00b5\u00b9\u00ba\u00bc-\u00be'
    r'\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0370-\u052f\u1e00-\u1fff'
    r'\u2070-\u209c\u2150-\u218b\u5341\u767e\u5343\u4e07\u842c\u4ebf\u5104'
)
_DECIMAL = (
    rf'(?:(?<![{_GLUE}])(?<![0-9]\.)'  # not the 3 of 1.2.3
    r'(?!(?<=[0-9],)[0-9]{3}(?![0-9]))'  # not the 234 of 1,234
    r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]++)(?:\.[0-9]++)?'
    rf'|(?<![{_GLUE}.])\.[0-9]++)'
)
# A minus after a term is between two terms.
_NUMBER = re.compile(
    rf'((?<![{_GLUE})\]}}-])[-+])?(?:\\?\$)?({_DECIMAL})'
    rf'(?![{_GLUE}]|\.[0-9]|,[0-9]{{3}}(?![0-9]))'
)
_WHOLE_NUMBER = re.compile(
    rf'(?:\\?\$)?([-+]?)(?:\\?\$)?({_DECIMAL})\.?(?:\\?%)?'
)
_RATIO = re.compile(r'([-+]?)([-+]?[0-9]+)/([-+]?[0-9]+)')
_FRAC = re.compile(r'([-+]?)\\frac\{([-+]?[0-9]+)\}\{([-+]?[0-9]+)\}')

_GSM8K = re.compile(r'#### (-?[0-9.,]+)')
_MINERVA = re.compile(r'(?i)Answer\s*:\s*([^\n]+)')
_BOXED = re.compile(r'\\(?:boxed|fbox)\s*\{')
_BRACES = re.compile(r'\\.|[{}]', re.DOTALL)

_LATEX_TEXT = re.compile(
    r'\\(?:text(?:bf|it|rm)?|math(?:bf|rm)|mbox) ?\{([^{}]*)\}'
)
_LATEX_NOISE = re.compile(
    r'\\(?:left|right)(?![a-z])|\\[!,;:()\[\]]|\\?\$|\*\*'
)
_LATEX_FRAC = re.compile(
    r'\\[dtc]?frac(?:\{([^{}]*)\}|([0-9a-z]))(?:\{([^{}]*)\}|([0-9a-z]))'
)
_LATEX_ROOT = re.compile(r'\\sqrt([0-9a-z])')
_DEGREES = re.compile(r'\^\{?\\circ\}?|°')


def last_number(text: str) -> str | None:
  """Returns the last number of a text as `canonical_number` writes it.

  Commas must group thousands. A dot that ends a sentence is not part of a
  number, nor is a minus that stands behind a term. Not taken for numbers are
  digits that are glued to a word (x2, 3rd, 5cm) and such as 1.2.3 and 1e5.
  """
  found = _NUMBER.finditer(text.translate(_MINUS))
  for match in collections.deque(found, maxlen=1):
    return _canonical(*match.groups())
  return None


def canonical_number(text: str) -> str | None:
  """Returns a number without commas, $, %, plus and zeros that add nothing.

  12, +12, 012, 12.0, $12, 12% and 12. are all '12'; -0 is '0'. None if the text
  is not one number.
  """
  match = _WHOLE_NUMBER.fullmatch(text.translate(_MINUS).strip())
  return match and _canonical(*match.groups())


def gsm8k_answer(text: str, *, strict: bool = True) -> str | None:
  """Returns GSM8K's answer in the last 300 characters, as a canonical number.

  Args:
    text: the completion.
    strict: only after `####` and one space; else the last number anywhere.
  """
  tail = text[-_TAIL:]
  if not strict:
    return last_number(tail)
  found = _GSM8K.findall(tail)
  return canonical_number(found[-1].rstrip('.,')) if found else None


def gsm8k_truth(answer: str) -> str | None:
  """Returns the number behind the last `####` of a solution in the data."""
  _, mark, number = answer.rpartition('####')
  return canonical_number(number) if mark else None


def minerva_answer(text: str) -> str | None:
  """Returns what follows the last `Answer:` of the last 300 characters."""
  found = _MINERVA.findall(text[-_TAIL:])
  return found[-1].strip() if found else None


def last_boxed(text: str) -> str | None:
  r"""Returns the content of the last `\boxed{...}` or `\fbox{...}`.

  Braces within must match; `\{` and `\}` are characters. None if there is no
  box or the last one is never closed, or not within 10,000 characters.
  """
  start = max(text.rfind(r'\boxed'), text.rfind(r'\fbox'))
  head = _BOXED.match(text, start) if start >= 0 else None
  if head is None:
    return None
  depth = 1
  for match in _BRACES.finditer(text, head.end(), head.end() + _MAX_BOXED):
    depth += {'{': 1, '}': -1}.get(match[0], 0)
    if depth == 0:
      return text[head.end() : match.start()].strip()
  return None


def dapo_answer(text: str) -> str | None:
  """Returns the answer by DAPO's convention: Minerva's, or else the box."""
  tail = text[-_TAIL:]
  answer = minerva_answer(tail)
  return last_boxed(tail) if answer is None else answer


def tagged_answer(text: str, tag: str = 'answer') -> str | None:
  """Returns what stands between the last `<tag>` that is closed and its end."""
  end = text.rfind(f'</{tag}>')
  start = text.rfind(f'<{tag}>', 0, max(end, 0))
  return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def normalize_math(answer: str, *, units: Iterable[str] = ()) -> str:
  r"""Returns an answer in one of the ways it can be written.

  Of a box, its content is taken, and of an equation its right side. Dropped are
  spaces (but between two digits), $, **, a percent sign and a dot at the end,
  LaTeX's spaces, \left, \right and the \text around a text. Numbers and
  fractions of integers come out canonical: as an integer or a ratio in lowest
  terms.

  Args:
    answer: the answer alone.
    units: dropped at the end, and with any of them degree signs; by default
      none.
  """
  text = answer.translate(_MINUS)
  boxed = last_boxed(text)
  text = _LATEX_TEXT.sub(r'\1', text if boxed is None else boxed)
  text = _LATEX_NOISE.sub('', text.replace('{,}', ',').replace('\\ ', ' '))
  head, equals, right = text.rpartition('=')
  if equals and head[-1:] not in tuple('<>!:'):
    text = right
  text = _drop_units(text.strip().rstrip('.').rstrip(), tuple(units))
  text = text.removesuffix('%').removesuffix('\\')
  text = re.sub(r'(?<![0-9]) | (?![0-9])', '', ' '.join(text.split()))
  text = _LATEX_FRAC.sub(_full_fraction, text)
  text = _LATEX_ROOT.sub(r'\\sqrt{\1}', text)
  return _exact(text)


def answers_equal(
    answer: str, truth: str, *, units: Iterable[str] = ()
) -> bool:
  """Returns whether two answers are one after `normalize_math`.

  An answer of which nothing is left equals none.
  """
  units = tuple(units)
  text = normalize_math(answer, units=units)
  return bool(text) and text == normalize_math(truth, units=units)


def math_verify_equal(answer: str, truth: str) -> bool:
  r"""Returns whether math-verify takes an answer for the truth.

  Works in any thread, since the package's own timeouts, which need the main
  one, are off. An answer such as 9^{9^{9^9}} may then take for ever: have
  strangers' answers compared in a `rewards.Pool`.

  Args:
    answer: in LaTeX or plain; with a box, that box's content. It equals nothing
      if its braces do not match or it has more than 1,000 characters.
    truth: likewise. The order matters: the truth may say less.

  Raises:
    ImportError: math-verify is not installed.
  """
  package = _math_verify()
  parsed = []
  for text in (truth, answer):
    boxed = last_boxed(text)
    text = text.strip() if boxed is None else boxed
    box = rf'\boxed{{{text}}}'
    # `1} \boxed{2` would be two answers, of which any may be right.
    if len(text) > _MAX_EXACT or last_boxed(box) != text:
      return False
    parsed.append(package.parse(box, parsing_timeout=None))
  gold, given = parsed
  return bool(package.verify(gold, given, timeout_seconds=None))


def _math_verify() -> Any:
  try:
    return importlib.import_module('math_verify')
  except ImportError as error:
    raise ImportError(
        'Comparing answers by value needs math-verify: pip install'
        " 'nvfp4-jax[tasks]'."
    ) from error


def _canonical(sign, digits):
  whole, _, decimals = digits.replace(',', '').partition('.')
  whole, decimals = whole.lstrip('0') or '0', decimals.rstrip('0')
  number = f'{whole}.{decimals}' if decimals else whole
  return f'-{number}' if sign == '-' and number != '0' else number


def _exact(text):
  """Returns a number or ratio in its one form, any other text as it is."""
  number = canonical_number(text)
  if number is not None:
    if len(number) > _MAX_EXACT:
      return number
    return str(fractions.Fraction(number))
  match = _RATIO.fullmatch(text) or _FRAC.fullmatch(text)
  if match is None or len(text) > _MAX_EXACT:
    return text
  sign, numerator, denominator = match.groups()
  if not int(denominator):
    return text
  value = fractions.Fraction(int(numerator), int(denominator))
  return str(-value if sign == '-' else value)


def _full_fraction(match):
  a, a_digit, b, b_digit = match.groups()
  a, b = a_digit if a is None else a, b_digit if b is None else b
  return rf'\frac{{{a}}}{{{b}}}'


def _drop_units(text, units):
  """Drops units at the end, such as those of `3 square cm`."""
  if units:
    text = _DEGREES.sub('', text).rstrip()
  for _ in range(2):
    lower = text[-64:].lower()
    for unit in units:
      if lower.endswith(unit) and not lower[: -len(unit)][-1:].isalpha():
        text = text[: -len(unit)].rstrip()
        break
  return text
