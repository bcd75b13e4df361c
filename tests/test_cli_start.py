"""Starting for a command: where compiled programs are kept, and who decides it."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import dflash_jax
from dflash_jax.cli import start
from dflash_jax.cli.progress import Bars

ROOT = Path(__file__).resolve().parents[1]
FOLDER, LEAST = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
# A cache entry is named after the program: "jit_<function>-<hash>-cache".
COMPILE = """
import sys
import jax
from dflash_jax.cli import start
start.LEAST_COMPILE_SECONDS = 0.0
sys.argv[1] == "start" and start.keep_programs()
def kept(x):
    return x * 3
jax.jit(kept).lower(1.0).compile()
"""


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """JAX without a cache folder, as for a user who set none; the folder that commands choose."""
    before = {name: getattr(jax.config, name) for name in (FOLDER, LEAST)}
    jax.config.update(FOLDER, None)
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dflash_jax, "LLM", lambda *args, **options: "an engine", raising=False)
    yield tmp_path / "cache" / "xla"
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_command_keeps_its_programs_in_the_cache_folder(unset: Path):
    with Bars() as bars:
        assert start.start_llm("some/model", None, bars) == "an engine"
    assert getattr(jax.config, FOLDER) == str(unset) and not list(unset.iterdir())
    assert unset.stat().st_mode & 0o077 == 0
    assert getattr(jax.config, LEAST) == start.LEAST_COMPILE_SECONDS


def test_a_folder_that_the_user_chose_stands(unset: Path, tmp_path: Path):
    jax.config.update(FOLDER, str(tmp_path))
    start.keep_programs()
    assert getattr(jax.config, FOLDER) == str(tmp_path) and not unset.exists()


def test_jaxs_own_switch_turns_it_off(unset: Path):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        start.keep_programs()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert getattr(jax.config, FOLDER) is None and not unset.exists()


def test_a_folder_that_cannot_be_written_is_a_warning(
    unset: Path, caplog: pytest.LogCaptureFixture
):
    unset.parent.write_text("a file, where the folder should be")
    with caplog.at_level(logging.WARNING):
        start.keep_programs()
    assert getattr(jax.config, FOLDER) is None
    assert str(unset) in caplog.text and "JAX_COMPILATION_CACHE_DIR" in caplog.text


def test_programs_are_found_there_and_importing_alone_keeps_none(tmp_path: Path):
    hidden = {"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PYTHONPATH": str(ROOT), "DFLASH_JAX_CACHE": str(tmp_path)}
    kept = []
    for word in ("import", "start"):
        subprocess.run(
            [sys.executable, "-c", COMPILE, word], env=environment, check=True, timeout=100
        )
        kept.append([path.name for path in tmp_path.glob("xla/*-cache")])
    assert kept[0] == [] and [name[:8] for name in kept[1]] == ["jit_kept"]
