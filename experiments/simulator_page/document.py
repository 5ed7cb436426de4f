"""Writes the simulator's page: one file, which asks the network for nothing.

The scripts are next to this module. Every number of the model comes from the
Python simulator, as JSON inside the page.
"""

from collections.abc import Mapping
import dataclasses
import html
import importlib.resources
import inspect
import json
import pathlib
import re
from typing import Any, get_args

from nvfp4_jax import files
from nvfp4_jax.rl.simulator import constants
from nvfp4_jax.rl.simulator import drift_model
from nvfp4_jax.rl.simulator import event_engine
from nvfp4_jax.rl.simulator import settings

# In the order in which one needs the other.
_SCRIPTS = ('simulator.js', 'draw.js', 'charts.js', 'plane.js', 'page.js')

_Changes = Mapping[str, Mapping[str, Any]]


def model_numbers(system: settings.SimulatorConfig) -> dict[str, Any]:
  """Returns the numbers that simulator.js stands on, as JSON has them.

  Args:
    system: its fields are the defaults.
  """
  fields = dataclasses.fields(system)
  defaults = dataclasses.asdict(system)
  return {
      'defaults': defaults,
      'integers': [k for k, v in defaults.items() if type(v) is int],
      'choices': {
          field.name: get_args(field.type)
          for field in fields
          if isinstance(defaults[field.name], str)
      },
      'positive': settings.POSITIVE,
      'not_negative': settings.NOT_NEGATIVE,
      'precisions': constants.PRECISIONS,
      'mismatch': constants.MISMATCH,
      'last_layers': constants.LAST_LAYERS,
      'four_over_six': constants.FOUR_OVER_SIX,
      'kv_fp8': constants.KV_FP8,
      'backward_noise': constants.BACKWARD_NOISE,
      'pflops': constants.PFLOPS,
      'multiplies': constants.MULTIPLIES,
      'rollout_overhead': constants.ROLLOUT_OVERHEAD,
      'train_overhead': constants.TRAIN_OVERHEAD,
      'correction': constants.CORRECTION,
      'routing_replay': constants.ROUTING_REPLAY,
      'clip_eps': drift_model.CLIP_EPS,
      'drift_limit': drift_model.DRIFT_LIMIT,
      'ticks_per_second': event_engine.TICKS_PER_SECOND,
      'quantiles': event_engine.quantiles().tolist(),
  }


def field_help() -> dict[str, str]:
  """Returns what the docstring of SimulatorConfig says of each field."""
  doc = inspect.getdoc(settings.SimulatorConfig) or ''
  text = doc.partition('Attributes:\n')[2]
  found = {}
  for names, body in re.findall(
      r'^  ([a-z]\w*(?:, \w+)*): (.*(?:\n    .*)*)', text, re.MULTILINE
  ):
    found |= dict.fromkeys(names.split(', '), ' '.join(body.split()))
  return found


def render(
    system: settings.SimulatorConfig,
    presets: _Changes,
    families: _Changes,
) -> str:
  """Returns the page.

  Args:
    system: what the page starts with and presets change.
    presets: changes of `system`, by the name on a button.
    families: changes that the points of the plane are made of.
  """
  data = {
      'numbers': model_numbers(system),
      'help': field_help(),
      'presets': presets,
      'families': families,
  }
  parts = {
      'style': _read('page.css'),
      # A text of JSON may hold "</script>" only escaped.
      'data': json.dumps(data, separators=(',', ':')).replace('<', '\\u003c'),
      'scripts': '\n'.join(
          f'<script>\n{_read(name)}</script>' for name in _SCRIPTS
      ),
      'equations': html.escape(inspect.getdoc(drift_model) or ''),
      'sources': html.escape(inspect.getsource(constants)),
  }
  return re.sub(
      r'\{\{(\w+)\}\}', lambda match: parts[match[1]], _read('page.html')
  )


def write(path: pathlib.Path, page: str) -> pathlib.Path:
  """Writes the page and returns its path."""
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_atomically(path, page)
  return path


def _read(name):
  return importlib.resources.files(__package__).joinpath(name).read_text()
