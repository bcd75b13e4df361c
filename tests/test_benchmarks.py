"""The benchmark scripts: the device check runs through on a CPU, and its measures are right."""

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("measure")


def check(*options: str, out: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Runs `gpu_check.py --tiny` as a lent machine would; compiled programs are kept for reruns."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "OUT": str(out),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--tiny", *options]
    root = BENCHMARKS.parent
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


def test_the_device_check_passes_every_row_on_a_cpu_and_writes_what_it_printed(
    tmp_path: Path, pytestconfig: pytest.Config
):
    assert pytestconfig.cache is not None
    done = check(out=tmp_path, cache=pytestconfig.cache.mkdir("jax-benchmarks"))
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {row["status"] for row in written.values()} == {"passed"}
    for title in ("device", "bandwidth", "golden", "invariant 1", "invariant 6", "tiny, batch 1"):
        assert any(name.startswith(title) for name in written), title
    table = (tmp_path / "gpu_check.md").read_text()
    assert table.strip() in done.stdout
    assert "projected at acceptance length 6.5 (random weights)" in table


@pytest.mark.slow
def test_the_planners_check_boots_its_largest_batch_and_is_refused_more(
    tmp_path: Path, pytestconfig: pytest.Config
):
    """On a CPU by a memory that is given; a device plans by its own figures."""
    assert pytestconfig.cache is not None
    done = check("--planner", out=tmp_path, cache=pytestconfig.cache.mkdir("jax-benchmarks"))
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads((tmp_path / "gpu_check.json").read_text())["planner: the largest batch boots"]
    assert row["status"] == "passed" and row["largest batch"] >= 1
    assert row["needed"] <= row["available"] and row["seconds to refuse"] < 1
    assert row["largest temporary"] > 0


def test_rows_behind_the_deadline_read_not_reached(tmp_path: Path, pytestconfig: pytest.Config):
    assert pytestconfig.cache is not None
    done = check("--deadline", "0", out=tmp_path, cache=tmp_path / "cache")
    assert done.returncode == 3
    last = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(last.values())[-1] == {"status": "not reached"}


def test_the_looping_part_begins_after_the_first_period_of_a_tail_that_repeats(measure):
    text = list(range(100, 110))
    assert measure.loop_start(text + [7, 8] * 20) == len(text) + 2
    assert measure.loop_start(text + [7] * 30) == len(text) + 1


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(list(range(200)), id="nothing repeats"),
        pytest.param([1, 2] * 11, id="22 ids are too few"),
        pytest.param(list(range(20)) * 2, id="twice is too seldom"),
        pytest.param([1, 2] * 40 + [9], id="the repetition is not the tail"),
        pytest.param([], id="empty"),
    ],
)
def test_what_does_not_repeat_long_enough_is_no_loop(measure, ids: list[int]):
    assert measure.loop_start(ids) == len(ids)


def test_rounds_that_begin_in_the_loop_are_left_out_of_the_acceptance_length(measure):
    # Rounds begin at tokens 1, 4, 6 and 10.
    assert measure.rounds_before([3, 2, 4, 8], 6) == [3, 2]
    assert measure.rounds_before([3, 2, 4, 8], 7) == [3, 2, 4]
    assert measure.pooled_acceptance_length([3, 2]) == 2.5
    assert measure.pooled_acceptance_length([]) is None


def test_every_contestant_takes_its_turn_in_every_repeat(measure):
    called: list[str] = []
    taken = measure.race({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, 3)
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]
    assert [len(seconds) for seconds in taken.values()] == [3, 3]


def test_tokens_of_clients_at_once_are_all_counted(measure):
    asked: list[str] = []

    async def ask(prompt: str) -> int:
        asked.append(prompt)
        await asyncio.sleep(0.01)
        return 3

    prompts = [str(number) for number in range(12)]
    assert asyncio.run(measure.total_of(ask, prompts, 4)) == 36
    assert asked == prompts
