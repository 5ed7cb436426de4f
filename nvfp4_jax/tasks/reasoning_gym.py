"""Any generated data set of the optional package reasoning-gym.

A problem is the item of a data set of size 1 whose seed is drawn from (seed,
split, index); by default all other settings are the package's own. Its reward
is the data set's own score, 0 to 1, of the answer in the completion.
"""

import dataclasses
import difflib
import functools
import importlib
import sys
from typing import Any

from nvfp4_jax.tasks import text
from nvfp4_jax.tasks import verify

SCORERS = ('tag', 'last_number')

_MAX_DRAWS = 1000
_REQUEST = 'Give the final answer between <answer> and </answer>.'

# Found by making up to 30 items of every data set of version 0.1.25 in several
# processes, under equal and under different hash seeds. These draw from a
# generator that is not theirs, or run code that does:
_UNSEEDED = ('codeio', 'list_functions')
# These walk through sets, whose order Python draws when it starts:
_HASH_DEPENDENT = (
    'intermediate_integration',
    'isomorphic_strings',
    'knight_swap',
    'polynomial_multiplication',
    'ransom_note',
    'word_ladder',
)


@dataclasses.dataclass(frozen=True)
class Problem(text.TextProblem):
  """One problem.

  Attributes:
    item: seed of the data set whose one item this is.
  """

  item: int


@dataclasses.dataclass(frozen=True)
class ReasoningGym:
  """A task of `text.TextTask`; static.

  Attributes:
    dataset: its name in the package, such as 'chain_sum'.
    seed: of the problems.
    scorer: the answer is what stands between the last tags <answer>, which the
      prompt then asks for, or the completion's last number.
    system_prompt: what the chat starts with; empty for none.

  Raises:
    ImportError: the package is not installed.
    ValueError: it has no such data set, or one that cannot be used as it is.
  """

  dataset: str
  seed: int = 0
  scorer: str = 'tag'
  system_prompt: str = ''

  name = 'reasoning_gym'
  fingerprint = None

  def __post_init__(self):
    if self.scorer not in SCORERS:
      raise ValueError(f'Scorer {self.scorer!r} is not one of {SCORERS}.')
    _check(self.dataset)

  def size(self, split: text.Split) -> None:
    """Returns None: problems are drawn without end, and may repeat."""
    text.check_position(split, 0)

  def problem(self, split: text.Split, index: int) -> Problem:
    """Returns the index-th problem of a split.

    Its `answer` is empty where a data set has no single right one.

    Raises:
      ValueError: in 1000 draws none belonged to the split.
    """
    text.check_position(split, index)
    for attempt in range(_MAX_DRAWS):
      drawn = text.digest(self.dataset, self.seed, split, index, attempt)
      item = int.from_bytes(drawn[:4])
      _, entry = _item(self.dataset, item)
      asked = text.digest(text.normalize(entry['question']))
      uid = f'{self.name}/{self.dataset}/{asked[:16].hex()}'
      if text.is_held_out(uid) == (split == 'held_out'):
        answer = entry['answer']
        return Problem(
            messages=self._messages(entry),
            answer='' if answer is None else str(answer),
            uid=uid,
            item=item,
        )
    raise ValueError(
        f'None of {_MAX_DRAWS} problems of {self.dataset!r} is in {split!r}:'
        ' the data set has too few.'
    )

  def reward(self, problem: text.TextProblem, completion: str) -> float:
    """Returns the data set's score of the answer; 0.0 if there is none.

    Raises:
      ValueError: the problem is not this task's, or the package has made
        another one of its seed.
    """
    if not isinstance(problem, Problem):
      raise ValueError(f'{problem.uid!r} is not a problem of reasoning-gym.')
    data, entry = _item(self.dataset, problem.item)
    if problem.messages[-1] != self._messages(entry)[-1]:
      raise ValueError(
          f'Item {problem.item} of {self.dataset!r} is not {problem.uid!r}:'
          ' it is of another task, process or version of the package.'
      )
    if self.scorer == 'tag':
      answer = verify.tagged_answer(completion)
    else:
      answer = verify.last_number(completion)
      if answer and answer == verify.canonical_number(problem.answer):
        return 1.0
    if answer is None:
      return 0.0  # Some data sets give points for that.
    return float(data.score_answer(answer, entry))

  def _messages(self, entry):
    question = entry['question']
    if self.scorer == 'tag':
      question = f'{question}\n\n{_REQUEST}'
    return text.ask(question, self.system_prompt)


def _check(dataset):
  """Raises unless problems of the data set can be made."""
  names = sorted(_package('factory').DATASETS)
  if dataset not in names:
    near = difflib.get_close_matches(dataset, names)
    raise ValueError(
        f'{dataset!r} is not a data set of reasoning-gym, which has'
        f' {"near it " if near else ""}{near or names}.'
    )
  if dataset in _UNSEEDED:
    raise ValueError(f'The items of {dataset!r} do not follow from its seed.')
  if dataset in _HASH_DEPENDENT and sys.flags.hash_randomization:
    raise ValueError(
        f'The items of {dataset!r} depend on the order of sets. Start Python'
        ' with PYTHONHASHSEED=0 to fix that.'
    )
  try:
    _item(dataset, 0)
  except Exception as error:  # Whatever a data set raises.
    raise ValueError(
        f'The data set {dataset!r} makes no problem: {error}'
    ) from error


@functools.lru_cache(maxsize=512)
def _item(dataset, seed) -> tuple[Any, dict[str, Any]]:
  """Returns a data set of size 1 and its item; kept, since some take seconds.

  A group of completions asks for one item many times.
  """
  data = _package().create_dataset(dataset, seed=seed, size=1)
  return data, data[0]


def _package(module: str = '') -> Any:
  try:
    package = importlib.import_module('reasoning_gym')
  except ImportError as error:
    raise ImportError(
        'The task reasoning_gym needs the package reasoning-gym: pip install'
        " 'nvfp4-jax[tasks]'."
    ) from error
  return getattr(package, module) if module else package
