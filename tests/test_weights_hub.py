"""Names to folders: local paths, `demo`, and hub ids against a hub on this machine.

The hub's client reads its settings when it is imported, so each fetch runs in a process of its own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_jax.errors import CheckpointError, DownloadError
from dflash_jax.weights import hub
from dflash_jax.weights.hub import is_hub_id, resolve_model
from hub_server import REPO, Hub
from weight_files import GOLDEN, SINGLE, run_python

TARGET = GOLDEN / "llama-tiny" / "target"
FILES = {
    "config.json": (TARGET / "config.json").read_bytes(),
    SINGLE: (TARGET / SINGLE).read_bytes(),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"card",
    "pytorch_model.bin": b"other format",
    "consolidated.safetensors": b"the same weights again",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"other format",
}
OLDER = {**FILES, "tokenizer.json": b'{"older": true}'}
WANTED = {"config.json", SINGLE, "tokenizer.json", "chat_template.jinja", "README.md"}

RESOLVE = """
import sys
from dflash_jax.errors import DFlashError
from dflash_jax.weights.hub import resolve_model

try:
    print(resolve_model(sys.argv[1], revision=sys.argv[2] if len(sys.argv) > 2 else None))
except DFlashError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub({"main": FILES, "v1": OLDER}) as hub_server:
        yield hub_server


@pytest.fixture
def resolve(server, tmp_path):
    """Runs `resolve_model` with a cache of this test's own; online unless told otherwise."""

    def run(*args: str, offline: bool = False, endpoint: str = "") -> str:
        server.requests.clear()
        return run_python(
            RESOLVE,
            *args,
            HF_ENDPOINT=endpoint or server.url,
            HF_HOME=str(tmp_path / "cache"),
            HF_HUB_OFFLINE="1" if offline else "0",
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_TOKEN="",
            NO_PROXY="127.0.0.1",
        ).strip()

    return run


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("Qwen/Qwen3-8B", True),
        ("z-lab/Qwen3-8B-DFlash-b16", True),
        ("gpt2", False),
        ("a/b/c", False),
        ("./a/b", False),
        ("./model", False),
        ("../model", False),
        ("/abs", False),
        ("~/model", False),
        ("owner/", False),
        ("owner/a b", False),
        (Path("owner/model"), False),
    ],
)
def test_a_hub_id_is_two_plain_names_and_one_slash(name, is_id):
    assert is_hub_id(name) is is_id


def test_a_folder_is_itself():
    assert resolve_model(TARGET) == TARGET
    assert resolve_model(str(TARGET)) == TARGET


def test_a_folder_named_like_a_hub_id_is_the_folder(tmp_path, monkeypatch):
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/tiny") == Path("owner/tiny")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/x", "~/nowhere", "nowhere", "a/b/nowhere"])
def test_a_path_that_is_not_there_is_no_hub_id(name):
    with pytest.raises(CheckpointError, match="there is no folder .*nowhere"):
        resolve_model(name)


def test_a_path_that_begins_with_a_dot_is_never_asked_of_the_hub(resolve, server):
    """Not even where the hub has that model; the message says how it is asked for."""
    said = resolve(f"./{REPO}")
    assert said.startswith(f"CheckpointError: there is no folder ./{REPO} ({Path.cwd() / REPO})")
    assert f"a hub id ({REPO})" in said
    assert server.requests == []


def test_a_file_is_not_a_folder():
    with pytest.raises(CheckpointError, match=r"model.safetensors is a file: give the folder"):
        resolve_model(TARGET / SINGLE)


def test_demo_is_the_embedded_pair(monkeypatch):
    monkeypatch.setattr(hub, "demo_target", lambda: Path("the target"))
    monkeypatch.setattr(hub, "demo_drafter", lambda: Path("the drafter"))
    assert resolve_model("demo") == Path("the target")
    assert resolve_model("demo", kind="drafter") == Path("the drafter")


def test_a_snapshot_has_what_is_read_and_a_second_run_needs_no_network(resolve, server):
    folder = Path(resolve(REPO))
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == WANTED
    assert (folder / SINGLE).read_bytes() == FILES[SINGLE]
    assert not any("consolidated" in request or ".bin" in request for request in server.requests)
    assert Path(resolve(REPO, offline=True)) == folder
    assert server.requests == []
    nobody = "http://127.0.0.1:9"
    assert Path(resolve(REPO, endpoint=nobody)) == folder


def test_a_revision_has_its_own_snapshot(resolve, server):
    main, older = Path(resolve(REPO)), Path(resolve(REPO, "v1"))
    assert (older / "tokenizer.json").read_bytes() == OLDER["tokenizer.json"]
    assert (main / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]
    assert Path(resolve(REPO, server.commits["v1"])) == older
    assert Path(resolve(REPO, "v1", offline=True)) == older


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((REPO, "v9"), f"cannot fetch {REPO} at revision v9: {REPO} has no such revision"),
        (
            ("owner/other",),
            "cannot fetch owner/other: there is no folder owner/other here, and on the hub it does "
            "not exist or is private: check the name or the path",
        ),
        (("owner/gated",), "accept its terms on the hub, then log in with `hf auth login`"),
    ],
)
def test_what_the_hub_refuses_is_an_error_that_says_what_to_do(resolve, args, message):
    said = resolve(*args)
    assert said.startswith("DownloadError: ")
    assert message in said


@pytest.mark.parametrize("how", ["offline", "unreachable"])
def test_nothing_cached_and_no_hub_is_an_error_that_says_what_to_place(resolve, how):
    unreachable = {"offline": {"offline": True}, "unreachable": {"endpoint": "http://127.0.0.1:9"}}
    said = resolve(REPO, **unreachable[how])
    assert said.startswith(
        f"DownloadError: cannot fetch {REPO}: there is no folder {REPO} here, and the hub cannot "
        "be reached"
    )
    assert "place its files in a folder and give that path" in said


def test_any_other_failure_of_the_client_is_a_download_error(monkeypatch):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        DownloadError,
        match="no folder owner/full here, and .* OSError: no space left on device",
    ):
        resolve_model("owner/full")
