"""Three gates of a start: nothing is compiled or loaded before it has passed its gate.

(i) files and options, before a backend; (ii) the device's memory, before compiling and loading;
(iii) the compiled programs' memory, before loading and allocating.
"""

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.planning.device import DeviceMemory
from dflash_jax.planning.measured import Measured
from dflash_jax.serving import allocation, loading, planner
from dflash_jax.serving import llm as front

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return tiny.write_target(folder / "t"), tiny.write_drafter(folder / "d")


def never(name: str) -> Any:
    def fail(*args: object, **kwargs: object) -> None:
        pytest.fail(f"{name} was called before the gate")

    return fail


GATE_ONE = """
import sys
import dflash_jax as dj
from jax._src import xla_bridge

try:
    dj.LLM(sys.argv[1], sys.argv[2], max_seq_len=64, max_batch_size=9, max_num_tokens=32,
           device_memory="1KiB")
except dj.DFlashError as error:
    print(type(error).__name__, *str(error).splitlines(), sep="|")
plan = dj.plan_memory(sys.argv[1], sys.argv[2], device_memory="1GiB")
print(plan.verdict, xla_bridge.backends_are_initialized())
"""


def test_a_given_memory_is_checked_with_all_else_before_a_backend_starts(folders):
    """Gate (i): the token rule's and the total rule's findings come together."""
    run = subprocess.run(
        [sys.executable, "-c", GATE_ONE, *map(str, folders)],
        capture_output=True,
        text=True,
        # A platform that does not exist: whoever starts a backend ends with another error.
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "nowhere"},
    )
    assert run.returncode == 0, run.stderr
    refused, planned = run.stdout.splitlines()
    kind, rule, total = refused.split("|")
    assert kind == "ConfigError"
    assert "max_num_tokens >= 36" in rule and "max_batch_size <= 8" in rule
    assert "device_memory='1KiB'" in total and "KV arena" in total
    assert planned == "unproven False"


def test_only_the_memory_is_refused_as_a_memory_plan_error(folders):
    with pytest.raises(dj.MemoryPlanError, match="max_batch_size=2 at max_seq_len=64 needs"):
        dj.LLM(*folders, **SIZES, device_memory="100KB")


def test_what_the_device_has_is_checked_before_anything_is_compiled(folders, monkeypatch):
    """Gate (ii); the largest batch that the message names does start."""
    memory = DeviceMemory(2**20, 0, "bytes_limit of a fake device")
    monkeypatch.setattr(planner, "devices_memory", lambda devices: memory)
    for name in ("compile_engine", "load_target"):
        monkeypatch.setattr(loading, name, never(name))
    with pytest.raises(dj.MemoryPlanError) as refused:
        dj.LLM(*folders, max_seq_len=64, max_batch_size=16)
    message = str(refused.value)
    assert "bytes_limit of a fake device" in message
    assert "XLA_CLIENT_MEM_FRACTION" in message
    assert "set max_batch_size <=" in message and "max_seq_len" in message


def test_the_batch_that_a_refusal_names_starts_and_one_more_is_refused(folders):
    smallest = dj.plan_memory(
        *folders, max_seq_len=64, max_batch_size=3, dtype="float32", device_memory="1GiB"
    )
    room = smallest.needed
    with pytest.raises(dj.MemoryPlanError, match="set max_batch_size <= 3;"):
        tiny_engine.start(*folders, max_seq_len=64, max_batch_size=4, device_memory=room)
    started = tiny_engine.start(*folders, max_seq_len=64, max_batch_size=3, device_memory=room)
    assert started.plan.needed == room and started.plan.verdict == "unproven"
    with pytest.raises(dj.MemoryPlanError, match="set max_batch_size <= 2;"):
        tiny_engine.start(*folders, max_seq_len=64, max_batch_size=3, device_memory=room - 1)


def test_a_batch_left_open_is_lowered_to_what_fits_with_one_warning(folders, caplog):
    three = dj.plan_memory(
        *folders, max_seq_len=64, max_batch_size=3, dtype="float32", device_memory="1GiB"
    )
    llm = tiny_engine.start(*folders, max_seq_len=64, device_memory=three.needed)
    assert llm.config.max_batch_size == 3
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [text for text in said if "clamping" in text] == said[:1]
    assert "clamping max_batch_size to 3" in said[0]


def test_measured_temporaries_are_checked_before_anything_is_loaded(folders, monkeypatch):
    """Gate (iii): what the programs need counts in place of features and logits."""
    measured = Measured("round-2-greedy", 2**30, {"round-2-greedy": 2**30})
    monkeypatch.setattr(front, "measure", lambda programs: measured)
    monkeypatch.setattr(loading, "load_target", never("load_target"))
    with pytest.raises(dj.MemoryPlanError, match="temporaries 1.00 GiB"):
        tiny_engine.start(*folders, **SIZES, device_memory="500MiB")


def test_a_started_engine_has_its_measured_programs_in_the_plan(folders):
    """Whatever compiles: the real programs, their largest need, and a verdict without reserve."""
    llm = dj.LLM(*folders, max_seq_len=40, max_batch_size=1, device_memory="1GiB")
    measured = llm.plan.measured
    assert measured is not None and measured.programs.keys() == llm.programs.keys()
    assert measured.temporaries == max(measured.programs.values())
    assert llm.plan.verdict == "fits"
    assert "temporaries" in str(llm.plan) and measured.program in str(llm.plan)
    assert llm.generate([[1, 2, 3]], dj.SamplingParams(max_tokens=4))[0].finish_reason == "length"


def test_the_third_gate_can_be_skipped(folders, monkeypatch):
    monkeypatch.setenv("DFLASH_JAX_SKIP_KV_ESTIMATION", "1")
    monkeypatch.setattr(front, "measure", never("measure"))
    llm = tiny_engine.start(*folders, **SIZES, device_memory="500MiB")
    assert llm.plan.measured is None
    assert llm.plan.inputs.order == ("pool_first", "DFLASH_JAX_SKIP_KV_ESTIMATION=1")


def test_a_device_without_figures_asks_for_the_option(folders, monkeypatch):
    """Fault 99; with the option given the device is not asked."""
    mute = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_in_use": 5})
    monkeypatch.setattr(planner, "used_devices", lambda serve: [mute])
    monkeypatch.setattr(front, "used_devices", lambda serve: jax.devices()[:1])
    with pytest.raises(dj.MemoryPlanError, match="device_memory="):
        dj.LLM(*folders, **SIZES)
    tiny_engine.start(*folders, **SIZES, device_memory="500MiB")


def plan_of(folders: tuple[Path, Path]) -> dj.MemoryPlan:
    return dj.plan_memory(*folders, **SIZES, device_memory="500MiB")


@pytest.mark.parametrize(("free", "level"), [(0, logging.WARNING), (2**30, logging.INFO)])
def test_the_allocation_says_need_and_free_and_refuses_nothing(folders, caplog, free, level):
    caplog.set_level(logging.INFO, "dflash_jax")
    plan = plan_of(folders)
    need = plan.needed - sum(plan.inputs.weights)
    allocation.announce(plan, DeviceMemory(need + free, 0, "bytes_limit of a fake device"))
    (record,) = caplog.records
    assert record.levelno == level
    assert "is free" in record.getMessage() and "bytes_limit" in record.getMessage()
    assert ("can fail" in record.getMessage()) == (level == logging.WARNING)


def test_running_out_of_memory_says_where_how_much_and_what_to_lower(folders):
    """Fault 102."""
    plan = plan_of(folders)
    with pytest.raises(dj.EngineError, match=r"the arenas \(2.00 GiB.*max_batch_size") as refused:
        with allocation.explained("the arenas", 2 * 2**30, plan):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
    assert isinstance(refused.value.__cause__, jax.errors.JaxRuntimeError)


def test_another_failure_of_the_runtime_stays_what_it_is(folders):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        with allocation.explained("the arenas", 1, plan_of(folders)):
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")


class Counted:
    """Counts the calls of a function and passes them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str):
        self.calls, self.inner = 0, getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


def test_a_local_pair_is_checked_once(folders, monkeypatch):
    before = Counted(monkeypatch, planner, "refuse_before_files")
    rules = Counted(monkeypatch, planner, "resolve")
    tiny_engine.start(*folders, **SIZES)
    assert (before.calls, rules.calls) == (0, 1)


def test_a_hub_pair_is_checked_before_the_download_and_once_after_it(folders, monkeypatch):
    """Row 19: what options alone can say comes first; the rest when the files are there."""
    target, drafter = folders
    fetched: list[str] = []

    def download(name: str | Path, *, kind: str) -> Path:
        fetched.append(str(name))
        return drafter if name == "owner/drafter" else Path(name)

    monkeypatch.setattr(planner, "resolve_model", download)
    before = Counted(monkeypatch, planner, "refuse_before_files")
    rules = Counted(monkeypatch, planner, "resolve")
    with pytest.raises(dj.ConfigError, match="max_num_tokens >= 128"):
        dj.LLM(target, "owner/drafter", max_batch_size=32, max_num_tokens=100, max_draft_len=3)
    assert (fetched, before.calls, rules.calls) == ([], 1, 0)
    with pytest.raises(dj.ConfigError, match="max_draft_len <= 3"):
        dj.LLM(target, "owner/drafter", max_batch_size=2, max_draft_len=5)
    assert (before.calls, rules.calls) == (2, 1)
    assert fetched == [str(target), "owner/drafter"]
    with pytest.raises(dj.MemoryPlanError, match="needs"):
        dj.LLM(target, "owner/drafter", **SIZES, device_memory="100KB")
    assert (before.calls, rules.calls) == (3, 2)


def test_a_plan_says_what_this_build_does_not_serve(folders):
    plan = dj.plan_memory(*folders, draft_attention="pallas", device_memory="40GiB")
    assert any("draft_attention='pallas' is not" in warning for warning in plan.warnings)


def test_rows_that_take_turns_are_said(folders):
    """32 rows of 1 + 3 tokens at 64 tokens a step: 16 at a time."""
    options: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 32, "max_num_tokens": 64}
    with pytest.raises(dj.ConfigError, match="max_num_tokens >= 128"):
        dj.plan_memory(*folders, **options, device_memory="40GiB")
    plan = dj.plan_memory(*folders, **options, device_memory="40GiB", allow_token_limited=True)
    assert plan.rows_per_step == 16 and "decode in one step: 16" in str(plan)


def test_two_ways_to_say_the_memory_are_refused(folders):
    with pytest.raises(dj.ConfigError, match="two ways"):
        dj.plan_memory(*folders, device_memory="40GiB", card="80GiB")


def test_a_plan_without_a_given_memory_asks_the_device(folders):
    plan = dj.plan_memory(*folders, **SIZES)
    assert plan.config.dtype == "float32" and "host memory" in plan.inputs.memory.source


def test_a_combination_that_was_admitted_unqualified_says_so_in_every_answers_stats(
    folders, monkeypatch
):
    """The kernel itself is not built: an engine that runs stands in for one."""
    inner = planner.resolve
    grounds = "speculation='dflash' is not qualified with attention='pallas'"

    def admitted(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(inner(*args, **kwargs), unqualified=grounds)

    monkeypatch.setattr(planner, "resolve", admitted)
    llm = tiny_engine.start(*folders, **SIZES)
    (answer,) = llm.generate([[1, 2]], dj.SamplingParams(max_tokens=2))
    assert answer.stats.unqualified == grounds


def test_the_plan_of_a_combination_admitted_unqualified_records_the_grounds(folders):
    options: dict[str, Any] = {**SIZES, "device_memory": "1GiB", "attention": "pallas"}
    with pytest.raises(dj.ConfigError, match="not qualified"):
        dj.plan_memory(*folders, **options)
    plan = dj.plan_memory(*folders, **options, allow_unqualified=True)
    assert "not qualified" in (plan.config.unqualified or "")
    assert dj.plan_memory(*folders, **SIZES, device_memory="1GiB").config.unqualified is None


def test_a_file_that_is_left_aside_is_noticed_once_however_often_headers_are_read(tmp_path, caplog):
    """Fault 82: the plan, the check of the files and the compiler all look before the load does."""
    target = tiny.write_target(tmp_path / "t")
    (target / "other.safetensors").write_bytes((target / "model.safetensors").read_bytes())
    tiny_engine.start(target, None, **SIZES, device_memory="500MiB")
    notices = [r.getMessage() for r in caplog.records if "other.safetensors" in r.getMessage()]
    assert len(notices) == 1 and "only model.safetensors is read" in notices[0]
