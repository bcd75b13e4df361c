"""Tests of `training/run_log.py`: one row a step, and events where they were asked for."""

import csv
import sys
import types
from typing import Any

import numpy as np
import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.training.held_out import HeldOut
from dflash_jax.training.real_rounds import RealAcceptance
from dflash_jax.training.run_log import RunLog
from dflash_jax.training.step import StepReport

HELD = HeldOut(1.5, (0.5, 0.25), 12)
REAL = RealAcceptance(1.75, 1.25, 8, 20, 6)


def _report(loss: float) -> StepReport:
    numbers: Any = [np.float32(x) for x in (loss, 1.2, 0.7)]
    return StepReport(*numbers, np.bool_(True))  # type: ignore[arg-type]


def _rows(folder):
    with (folder / "log.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_resumed_log_has_one_row_a_step_and_reads_older_files(tmp_path, as_a_user):
    (tmp_path / "log.csv").write_text("step,loss,accepted\n10,3.0,1.1\n20,2.5,1.2\n")
    log = RunLog(tmp_path, 10)
    log.add(20, 1.0, _report(2.0), 4, HELD, None)
    log.add(30, 2.0, _report(1.0), 4, HELD, REAL)
    rows = _rows(tmp_path)
    assert [row["step"] for row in rows] == ["10", "20", "30"]
    assert [row["loss"] for row in rows] == ["3.0", "2.0000", "1.0000"]
    assert [row["held_out_accepted"] for row in rows] == ["", "1.5000", "1.5000"]
    assert [row["real_accepted"] for row in rows] == ["", "", "1.7500"]
    assert [row["real_without_loops"] for row in rows] == ["", "", "1.2500"]


def test_events_have_the_numbers_of_the_file(tmp_path, as_a_user, monkeypatch):
    """A stand-in for the optional package: what is checked is what it is told."""
    told: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int):
            told.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int):
            told.append((name, round(float(value), 4), step))

        def close(self):
            told.append("closed")

    module = types.ModuleType("tensorboardX")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    log = RunLog(tmp_path, 4, tensorboard=True)
    log.add(5, 1.0, _report(2.0), 4, None, REAL)
    log.close()
    assert told[0] == (str(tmp_path / "tensorboard"), 5)
    assert ("loss", 2.0, 5) in told and ("real_accepted", 1.75, 5) in told
    assert told[-1] == "closed" and not any(event[0] == "held_out_accepted" for event in told)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"tensorboardX: install dflash-jax\[train\]"):
        RunLog(tmp_path, 0, tensorboard=True)
