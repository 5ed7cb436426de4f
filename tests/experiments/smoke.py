"""Smoke runs of the benchmarks."""

import dataclasses
import pathlib
import tempfile
import types
from typing import Any

from experiments import run


def rows(module: types.ModuleType, **flags: Any) -> list[dict[str, Any]]:
  """Returns what the preset `smoke` of a benchmark logs, some flags changed."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / 'run'
    cfg = module.PRESETS['smoke'][1]
    cfg = dataclasses.replace(cfg, workdir=workdir, **flags)
    module.main(cfg, run.Log(workdir))
    return run.read_rows(workdir / 'metrics.jsonl')
