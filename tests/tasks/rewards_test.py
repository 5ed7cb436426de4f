"""Tests of tasks.rewards."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from nvfp4_jax.tasks import addition
from nvfp4_jax.tasks import rewards
from nvfp4_jax.tasks import text
from tests.tasks import reward_cases

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LONG = 60.0  # seconds; a timeout that no test waits for
_SHORT = 0.5

_PROBLEM = text.TextProblem(text.ask('How many?'), '3', 'a/1')

# What a reward does, and the failure that it is.
_FAILURES = (
    ('raise oops', 'LookupError', 'LookupError: oops'),
    ('give_text x', 'ValueError', 'could not convert'),
    ('give_none', 'TypeError', 'float'),
    ('give nan', 'not_finite', 'the reward is nan'),
    ('give -inf', 'not_finite', 'the reward is -inf'),
)


def _items(*completions):
  return [(_PROBLEM, completion) for completion in completions]


class ScoreTest(parameterized.TestCase):

  def test_results_come_in_order(self):
    results = rewards.score(reward_cases.add, _items('1', '2', 'x', '4'))
    self.assertEqual([r.reward for r in results], [4.0, 5.0, None, 7.0])
    self.assertEqual([r.status for r in results], ['ok', 'ok', 'error', 'ok'])

  @parameterized.parameters(*_FAILURES)
  def test_a_failure_is_no_reward(self, completion, kind, reason):
    (result,) = rewards.score(reward_cases.obey, _items(completion))
    self.assertEqual((result.status, result.kind), ('error', kind))
    self.assertIsNone(result.reward)
    self.assertIn(reason, result.reason)

  def test_failures_are_counted_by_kind(self):
    results = rewards.score(
        reward_cases.obey,
        _items('give 1', 'raise a', 'give nan', 'raise b', 'give_none'),
    )
    self.assertEqual(
        rewards.failures(results),
        {'LookupError': 2, 'not_finite': 1, 'TypeError': 1},
    )

  def test_an_interrupt_is_no_failure(self):
    with self.assertRaises(KeyboardInterrupt):
      rewards.score(mock.Mock(side_effect=KeyboardInterrupt), _items('x'))


class PoolTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Two interpreters start once for all tests of what needs no timeout.
    cls.pool = rewards.Pool(reward_cases.obey, workers=2, timeout=_LONG)
    cls.addClassCleanup(cls.pool.close)

  def test_results_come_in_order(self):
    wants = [0.4, 0.0, 0.2, 0.1, 0.3, 0.0]
    completions = [f'sleep {want}' for want in wants[:3]]
    completions += [f'give {want}' for want in wants[3:]]
    results = self.pool.score(_items(*completions))
    self.assertEqual([r.reward for r in results], [1.0] * 3 + wants[3:])
    self.assertTrue(all(r.status == 'ok' for r in results))
    self.assertBetween(results[0].seconds, 0.4, 10.0)

  def test_workers_are_other_processes_and_stay(self):
    pids = set()
    for _ in range(3):
      results = self.pool.score(_items('pid', 'pid', 'pid'))
      pids |= {result.reward for result in results}
    self.assertLessEqual(len(pids), 2)
    self.assertNotIn(os.getpid(), pids)

  @parameterized.parameters(*_FAILURES, ('exit', 'SystemExit', '3'))
  def test_a_failure_is_no_reward(self, completion, kind, reason):
    results = self.pool.score(_items(completion, 'give 1'))
    self.assertEqual((results[0].status, results[0].kind), ('error', kind))
    self.assertIsNone(results[0].reward)
    self.assertIn(reason, results[0].reason)
    self.assertEqual(results[1].reward, 1.0)

  def test_a_reason_is_kept_short(self):
    (result,) = self.pool.score(_items('raise ' + 'x' * 1_000_000))
    self.assertLen(result.reason, 500)

  def test_a_worker_that_dies_is_replaced(self):
    results = self.pool.score(_items('die', 'give 1', 'die', 'give 2'))
    self.assertEqual([r.reward for r in results], [None, 1.0, None, 2.0])
    self.assertEqual(rewards.failures(results), {'died': 2})

  def test_a_long_completion_passes(self):
    (result,) = self.pool.score(_items('give_text ' + '1' * 3_000_000))
    self.assertEqual(result.kind, 'not_finite')

  def test_what_a_reward_prints_does_not_confuse_the_pool(self):
    (result,) = self.pool.score(_items('print a word'))
    self.assertEqual(result.reward, 1.0)

  def test_an_empty_batch_has_no_results(self):
    self.assertEqual(self.pool.score([]), [])

  def test_threads_take_turns(self):
    results = {}

    def score(i):
      results[i] = self.pool.score(_items(f'give {i}', f'give {i + 0.5}'))

    threads = [threading.Thread(target=score, args=(i,)) for i in range(5)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    for i in range(5):
      self.assertEqual([r.reward for r in results[i]], [i, i + 0.5])

  def test_a_method_of_a_task_is_a_reward(self):
    task = addition.ChatAddition()
    problem = task.problem('train', 0)
    with rewards.Pool(task.reward, workers=1, timeout=_LONG) as pool:
      results = pool.score([(problem, problem.answer), (problem, 'x')])
    self.assertEqual([r.reward for r in results], [1.0, 0.0])


class TimeoutTest(parameterized.TestCase):

  @parameterized.parameters(f'sleep {10 * _LONG}', 'spin')
  def test_a_hanging_reward_times_out_and_the_rest_goes_on(self, hang):
    start = time.monotonic()
    with rewards.Pool(reward_cases.obey, workers=2, timeout=_SHORT) as pool:
      results = pool.score(_items(hang, 'give 1', hang, 'give 2', 'give 3'))
      again = pool.score(_items('give 4'))
    self.assertLess(time.monotonic() - start, _LONG)
    self.assertEqual(
        [r.status for r in results], ['timeout', 'ok', 'timeout', 'ok', 'ok']
    )
    self.assertEqual([r.reward for r in results], [None, 1.0, None, 2.0, 3.0])
    self.assertEqual(rewards.failures(results), {'timeout': 2})
    self.assertEqual(again[0].reward, 4.0)

  def test_what_a_reward_started_ends_with_it(self):
    root = self.enterContext(tempfile.TemporaryDirectory())
    note = pathlib.Path(root) / 'pid'
    with rewards.Pool(reward_cases.obey, workers=1, timeout=_SHORT) as pool:
      (result,) = pool.score(_items(f'breed {note}'))
    self.assertEqual(result.status, 'timeout')
    self.assertTrue(_ends(int(note.read_text())))


class LifeTest(parameterized.TestCase):

  def test_close_ends_the_workers(self):
    pool = rewards.Pool(reward_cases.obey, workers=1, timeout=_LONG)
    (result,) = pool.score(_items('pid'))
    pool.close()
    pool.close()
    self.assertTrue(_ends(int(result.reward)))
    with self.assertRaisesRegex(RuntimeError, 'The pool is closed'):
      pool.score(_items('give 1'))

  def test_the_interpreter_exits_while_a_reward_hangs(self):
    code = (
        'import threading, time\n'
        'from nvfp4_jax.tasks import rewards\n'
        'from tests.tasks import reward_cases\n'
        'pool = rewards.Pool(reward_cases.obey, workers=1, timeout=600.0)\n'
        'print(int(pool.score([(None, "pid")])[0].reward), flush=True)\n'
        'hang = lambda: pool.score([(None, "sleep 600")])\n'
        'threading.Thread(target=hang, daemon=True).start()\n'
        'time.sleep(0.2)\n'
    )
    result = subprocess.run(
        [sys.executable, '-c', code],
        cwd=_ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=_LONG,
    )
    self.assertTrue(_ends(int(result.stdout)))

  @parameterized.parameters('idle', 'spin')
  def test_a_worker_does_not_outlive_a_killed_process(self, state):
    code = (
        'import os, signal, threading, time\n'
        'from nvfp4_jax.tasks import rewards\n'
        'from tests.tasks import reward_cases\n'
        'rewards._ORPHAN_GRACE = 0.5\n'
        'pool = rewards.Pool(reward_cases.obey, workers=1, timeout=1.0)\n'
        'print(int(pool.score([(None, "pid")])[0].reward), flush=True)\n'
        f'if {state == "spin"}:\n'
        '  spin = lambda: pool.score([(None, "spin")])\n'
        '  threading.Thread(target=spin, daemon=True).start()\n'
        '  time.sleep(0.2)\n'
        'os.kill(os.getpid(), signal.SIGKILL)\n'
    )
    result = subprocess.run(
        [sys.executable, '-c', code],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LONG,
    )
    self.assertTrue(_ends(int(result.stdout)))

  def test_a_worker_that_died_between_batches_is_replaced(self):
    with rewards.Pool(reward_cases.obey, workers=1, timeout=_LONG) as pool:
      pid = int(pool.score(_items('pid'))[0].reward)
      os.kill(pid, signal.SIGKILL)
      self.assertTrue(_ends(pid))
      (result,) = pool.score(_items('pid'))
    self.assertEqual(result.status, 'ok')
    self.assertNotEqual(result.reward, pid)

  def test_a_worker_that_was_not_needed_may_start_late(self):
    with rewards.Pool(reward_cases.obey, workers=1, timeout=_LONG) as pool:
      worker = rewards._Worker(_LONG)
      pool._workers.append(worker)
      self.assertTrue(worker.pool_end.poll(_LONG))
      worker.deadline = time.monotonic() - 1.0
      (result,) = pool.score(_items('give 1'))
    self.assertEqual(result.reward, 1.0)

  def test_workers_that_always_die_are_not_replaced_for_ever(self):
    pool = rewards.Pool(reward_cases.obey, workers=1, timeout=_LONG)
    self.addCleanup(pool.close)
    with (
        mock.patch.object(rewards, '_MAX_LOST', 1),
        mock.patch.object(rewards._Worker, 'send', return_value=False),
        self.assertRaisesRegex(RuntimeError, 'workers die while'),
    ):
      pool.score(_items('give 1'))

  def test_a_worker_runs_no_script_again(self):
    # So a script needs no guard, and a worker does not import what it does.
    code = (
        'from nvfp4_jax.tasks import rewards\n'
        'from tests.tasks import reward_cases\n'
        'print("once")\n'
        'with rewards.Pool(reward_cases.obey, timeout=60.0) as pool:\n'
        '  print(pool.score([(None, "give 1")])[0].reward)\n'
    )
    root = self.enterContext(tempfile.TemporaryDirectory())
    script = pathlib.Path(root) / 'script.py'
    script.write_text(f'import sys; sys.path.insert(0, {str(_ROOT)!r})\n{code}')
    output = subprocess.check_output(
        [sys.executable, script], text=True, timeout=_LONG
    )
    self.assertEqual(output, 'once\n1.0\n')


class ErrorsTest(parameterized.TestCase):

  def test_a_reward_that_cannot_be_pickled_raises(self):
    for reward in (reward_cases.Unpicklable(), lambda problem, text: 0.0):
      with self.assertRaisesRegex(ValueError, 'cannot be pickled'):
        rewards.Pool(reward)

  def test_a_reward_that_does_not_start_raises(self):
    reward = reward_cases.StartsNever()
    pool = rewards.Pool(reward, timeout=_LONG)
    self.addCleanup(pool.close)
    with self.assertRaisesRegex(RuntimeError, 'LookupError: no start'):
      pool.score(_items('x', 'y'))

  def test_a_problem_that_cannot_be_pickled_raises(self):
    problem = reward_cases.Unpicklable()
    with rewards.Pool(reward_cases.obey, workers=1, timeout=_LONG) as pool:
      with self.assertRaisesRegex(TypeError, 'no'):
        pool.score([(problem, 'give 1')])
      self.assertEqual(pool.score(_items('give 2'))[0].reward, 2.0)

  @parameterized.parameters(
      (dict(workers=0), 'workers 0 is below 1'),
      (dict(timeout=0.0), 'timeout 0.0 is not positive'),
      (dict(timeout=float('inf')), 'timeout inf is not'),
      (dict(timeout=float('nan')), 'timeout nan is not'),
  )
  def test_bad_arguments_raise(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      rewards.Pool(reward_cases.obey, **arguments)


def _ends(pid):
  """Returns whether a process ends within seconds."""
  for _ in range(200):
    try:
      state = pathlib.Path(f'/proc/{pid}/stat').read_text()
    except OSError:
      return True
    if state.rpartition(')')[2].split()[0] == 'Z':
      return True  # Dead; whoever adopted it has not noticed.
    time.sleep(0.05)
  return False


if __name__ == '__main__':
  absltest.main()
