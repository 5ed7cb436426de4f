"""The simulator's page: its numbers are Python's, and a browser shows them."""

import dataclasses
import functools
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from experiments import simulator as experiment
from experiments.simulator_page import document
from nvfp4_jax.rl import simulator
from nvfp4_jax.rl.simulator import constants
from nvfp4_jax.rl.simulator import drift_model
from nvfp4_jax.rl.simulator import event_engine

_SIMULATOR = pathlib.Path(document.__file__).with_name('simulator.js')
_STEPS, _GROUP_SIZE = 120, 8
_SYSTEM = simulator.SimulatorConfig(steps=_STEPS, group_size=_GROUP_SIZE)
# One compilation for all cases.
_SIZES = event_engine.Sizes(192, 256, 320, 17, True)
_SHORT = {'turns': 0, 'horizon': 256, 'samplers': 24}
_CASES = {
    'default': {},
    'synchronous': {'max_staleness': 0},
    'synchronous_uneven': {'max_staleness': 0, 'samplers': 24, 'batch': 40},
    'in_flight': {'in_flight_update': True, 'sync_latency': 7.5},
    'interval_3': {'sync_interval': 3, 'max_staleness': 7},
    'in_flight_interval_3': {
        'in_flight_update': True,
        'sync_interval': 3,
        'sync_latency': 20.0,
    },
    'tiny': {'samplers': 3, 'batch': 1, 'max_staleness': 2},
    'horizon_limited': {'horizon': 1024, 'length_cv': 1.5},
    'evicts': _SHORT | {'buffer_batches': 1.0, 'batch': 8},
    'stale': {'max_staleness': 3, 'trainer_speed': 90_000.0},
    'bf16': {'rollout': 'bf16', 'train': 'bf16'},
    'mxfp8': {'rollout': 'mxfp8', 'train': 'mxfp8'},
    'w4a16': {'rollout': 'nvfp4_w4a16', 'train': 'bf16'},
    'w4a8': {'rollout': 'nvfp4_w4a8', 'train': 'nvfp4_w4a16'},
    'dense': {'mismatch': 'minite_dense', 'kv_fp8': True},
    'batch_20': {'batch': 20},  # a twentieth of it is one group
    'shared': {'mismatch': 'smollm2', 'shared_quantizer': True},
    'clip': {'correction': 'clip', 'routing_replay': True},
    'tis': {'correction': 'tis', 'tis_cap': 3.0, 'hardware': 'rubin'},
    'stabilized': experiment.STABILIZERS | {'four_over_six': True},
}
_SEEDS = {name: 3 * i for i, name in enumerate(_CASES)}
_INTEGERS = ('look', 'end', 'finished', 'ready', 'take', 'done', 'resume')
_INTEGERS += ('pause', 'tokens', 'evicted', 'stale', 'lag_p95', 'lag_max')
_FLOATS = ('lag_mean', 'token_lag', 'sampler_utilization')
_FLOATS += ('trainer_utilization',)
_TOTALS = ('steps_per_hour', 'tokens_per_second', 'sampler_utilization')
_TOTALS += ('trainer_utilization', 'lag_mean', 'dropped_fraction')
_OUTCOME = ('quantization', 'stale', 'final_reward', 'margin', 'collapse')

_NODE = shutil.which('node')
_BROWSER = shutil.which('chromium') or shutil.which('google-chrome')
_BROWSER_FLAGS = (
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--disable-quic',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
    '--virtual-time-budget=20000',
)

# Runs simulator.js on what stdin has.
_DRIVER = """
const make = require(process.argv[1]);
const {numbers, cases, wrong} = JSON.parse(require('fs').readFileSync(0));
const simulator = make(numbers);
const refusal = (change) => {
  try {
    simulator.knobs({...numbers.defaults, ...change});
    return null;
  } catch (error) {
    return error.message;
  }
};
const plain = (_, x) => ArrayBuffer.isView(x) ? Array.from(x) : x;
const results = {};
for (const [name, {change, seed}] of Object.entries(cases)) {
  const cfg = {...numbers.defaults, ...change};
  results[name] = {
    ...simulator.simulate(cfg, seed), knobs: simulator.knobs(cfg),
  };
}
const refused = wrong.map(refusal);
console.log(JSON.stringify({results, refused}, plain));
"""


@functools.cache
def _python() -> dict[str, simulator.Result]:
  """Returns Python's result of each case."""

  @jax.jit
  def run(engine, model, key):
    events = simulator.run_engine(
        engine, key, _SIZES, steps=_STEPS, group_size=_GROUP_SIZE
    )
    return simulator.Result(
        events, simulator.run_drift(model, events.token_lag)
    )

  results = {}
  for name, change in _CASES.items():
    knobs = simulator.knobs(dataclasses.replace(_SYSTEM, **change))
    engine = jax.tree.map(np.int32, knobs.engine)
    model = jax.tree.map(np.float32, knobs.drift)
    results[name] = run(engine, model, jax.random.key(_SEEDS[name]))
  return jax.tree.map(np.asarray, results)


def _wrong() -> list[dict[str, float]]:
  """Returns changes of one number, of which some are refused."""
  changes = [{'sync_interval': 18}, {'max_staleness': 3, 'sync_interval': 4}]
  for name, default in dataclasses.asdict(_SYSTEM).items():
    if isinstance(default, bool | str):
      continue
    values = [-1, 0, 1, 2, 2**17, 2**17 + 1, 10**9]
    values += [] if isinstance(default, int) else [-0.5, 0.5, 1.5]
    changes += [{name: type(default)(value)} for value in values]
  return changes


def _refusal(change):
  try:
    simulator.knobs(dataclasses.replace(_SYSTEM, **change))
  except ValueError as error:
    return str(error)
  return None


@functools.cache
def _javascript() -> dict:
  cases = {
      name: {'change': change, 'seed': _SEEDS[name]}
      for name, change in _CASES.items()
  }
  numbers = document.model_numbers(_SYSTEM)
  given = {'numbers': numbers, 'cases': cases, 'wrong': _wrong()}
  done = subprocess.run(
      [_NODE, '-e', _DRIVER, str(_SIMULATOR)],
      input=json.dumps(given),
      check=True,
      capture_output=True,
      text=True,
  )
  return json.loads(done.stdout)


def _assert_close(got, want, name):
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6, err_msg=name)


@functools.cache
def _page() -> str:
  return document.render(_SYSTEM, experiment.SYSTEMS, experiment.PRECISIONS)


class _Dom(html.parser.HTMLParser):
  """Keeps the attributes of elements, and the text of those with an id."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.texts, self._id = [], {}, None
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    attributes = dict(attrs)
    self.tags.append((tag, attributes))
    self._id = attributes.get('id', self._id)

  def handle_data(self, data):
    if self._id:
      self.texts[self._id] = self.texts.get(self._id, '') + data


class FileTest(absltest.TestCase):

  def test_is_one_file_that_asks_for_nothing(self):
    page = _page()
    self.assertNotRegex(
        page, r'(?i)https?:|\bfetch\(|XMLHttp|WebSocket|@import'
    )
    self.assertNotRegex(page, r'\{\{\w+\}\}')
    for _, attributes in _Dom(page).tags:
      self.assertNotIn('src', attributes)
      self.assertIn(attributes.get('href', '#')[:5], ('#', '#abou', 'data:'))

  def test_has_the_numbers_of_python(self):
    text = re.search(r'<script id="data"[^>]*>(.*?)</script>', _page())[1]
    data = json.loads(text)
    numbers = data['numbers']
    self.assertEqual(numbers['defaults'], dataclasses.asdict(_SYSTEM))
    self.assertEqual(
        numbers['mismatch']['minite_dense'],
        [list(row) for row in constants.MISMATCH['minite_dense']],
    )
    self.assertEqual(numbers['correction'], constants.CORRECTION)
    self.assertEqual(numbers['clip_eps'], drift_model.CLIP_EPS)
    self.assertEqual(data['presets'], experiment.SYSTEMS)
    fields = [field.name for field in dataclasses.fields(_SYSTEM)]
    self.assertCountEqual(data['help'], fields)

  def test_every_field_has_a_knob(self):
    page = _SIMULATOR.with_name('page.js').read_text()
    names = re.findall(r"^      \['(\w+)', '", page, re.MULTILINE)
    fields = [field.name for field in dataclasses.fields(_SYSTEM)]
    self.assertCountEqual(names, [*fields, 'seed'])

  def test_a_preset_writes_it(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    _, cfg = experiment.PRESETS['page']
    experiment.main(dataclasses.replace(cfg, workdir=folder), None)
    self.assertIn('</html>', (folder / 'simulator.html').read_text())


@absltest.skipIf(_NODE is None, 'needs node')
class NodeTest(parameterized.TestCase):

  @parameterized.parameters(*_CASES)
  def test_agrees_with_python(self, name):
    want, got = _python()[name], _javascript()['results'][name]
    steps, curves = got['events']['steps'], got['outcome']['curves']
    self.assertFalse(want.events.truncated)
    for field in _INTEGERS:
      np.testing.assert_array_equal(
          steps[field], getattr(want.events.steps, field), field
      )
    for field in _FLOATS:
      _assert_close(steps[field], getattr(want.events.steps, field), field)
    for field in _TOTALS:
      _assert_close(got['events'][field], getattr(want.events, field), field)
    self.assertEqual(got['outcome']['collapse'], want.outcome.collapse)
    # Past a collapse every difference has grown.
    end = got['outcome']['collapse']
    end = _STEPS if end < 0 else end
    for field in drift_model.Curves._fields:
      theirs = getattr(want.outcome.curves, field)
      _assert_close(curves[field][:end], theirs[:end], field)
    if end == _STEPS:
      for field in _OUTCOME:
        theirs = getattr(want.outcome, field)
        _assert_close(got['outcome'][field], theirs, field)

  @parameterized.parameters(*_CASES)
  def test_reads_knobs_like_python(self, name):
    want = simulator.knobs(dataclasses.replace(_SYSTEM, **_CASES[name]))
    got = _javascript()['results'][name]['knobs']
    self.assertEqual(got['engine'], want.engine._asdict())
    self.assertSequenceEqual(list(got['drift']), want.drift._fields)
    np.testing.assert_allclose(
        list(got['drift'].values()), want.drift, rtol=1e-12
    )

  def test_cases_are_what_they_are_called(self):
    results = _python()
    self.assertGreaterEqual(results['default'].outcome.collapse, 0)
    self.assertLess(results['stabilized'].outcome.collapse, 0)
    self.assertGreater(results['evicts'].events.steps.evicted.sum(), 0)
    self.assertGreater(results['stale'].events.steps.stale.sum(), 0)

  def test_refuses_what_python_refuses(self):
    subject = lambda text: text and text.split()[0]
    got = _javascript()['refused']
    for change, text in zip(_wrong(), got, strict=True):
      self.assertEqual(subject(text), subject(_refusal(change)), change)
    self.assertIn(None, got)


@absltest.skipIf(_BROWSER is None, 'needs chromium')
class BrowserTest(absltest.TestCase):

  def _open(self, cfg_hash):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    path = document.write(folder / 'page.html', _page())
    done = subprocess.run(
        [
            _BROWSER,
            *_BROWSER_FLAGS,
            f'--user-data-dir={folder}/profile',
            '--dump-dom',
            f'{path.as_uri()}#{cfg_hash}',
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    dom = _Dom(done.stdout)
    root = next(attributes for tag, attributes in dom.tags if tag == 'html')
    self.assertNotIn('data-error', root)
    self.assertEqual(root['data-cloud'], 'done')
    return dom

  def _check(self, dom, name):
    want = _python()[name]
    shown = {
        attributes['data-name']: float(attributes['data-value'])
        for tag, attributes in dom.tags
        if tag == 'dd'
    }
    theirs = {field: getattr(want.outcome, field) for field in _OUTCOME}
    theirs |= {field: getattr(want.events, field) for field in _TOTALS}
    for field, value in theirs.items():
      _assert_close(shown[field], value, field)

  def test_shows_the_numbers_of_the_default_preset(self):
    dom = self._open('')
    self._check(dom, 'default')
    collapse = _python()['default'].outcome.collapse
    self.assertEqual(
        dom.texts['verdict-text'].strip(), f'Collapses at update {collapse}.'
    )
    pressed = [a for _, a in dom.tags if a.get('aria-pressed') == 'true']
    self.assertLen(pressed, 1)
    self.assertIn('systems', dom.texts['cloud-progress'])

  def test_reads_a_setting_from_the_address(self):
    change = _CASES['stabilized'] | {'seed': _SEEDS['stabilized']}
    text = lambda x: str(x).lower() if isinstance(x, bool) else str(x)
    dom = self._open('&'.join(f'{k}={text(v)}' for k, v in change.items()))
    self._check(dom, 'stabilized')
    self.assertIn('Stable', dom.texts['verdict-text'])

  def test_refuses_a_setting_and_names_the_knob(self):
    dom = self._open('sync_interval=40')
    self.assertStartsWith(dom.texts['refused'], 'sync_interval 40 is above')


if __name__ == '__main__':
  absltest.main()
