"""From a model's name to its folder on this machine: local path, `demo`, or a hub id.

Only files that are read here are fetched, into the usual `huggingface_hub` cache; with the network
or the hub away the cached snapshot serves. Nothing here opens a weight file (`load.py`).
"""

import re
from pathlib import Path

from dflash_jax.errors import CheckpointError, DownloadError
from dflash_jax.weights.demo import demo_drafter, demo_target
from dflash_jax.weights.names import Kind

DEMO = "demo"
# Files that belong to a model and are not weights: config, tokenizer, template, licence.
SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md")
_FETCHED = (*SIDE_FILES, "*.safetensors")
# Nested files are other formats of the same weights; so is a consolidated file.
_NOT_FETCHED = ("*/*", "consolidated*")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def is_hub_id(name: str | Path) -> bool:
    """Whether a name has the form `owner/model` of a hub id (a folder of that name comes first)."""
    return isinstance(name, str) and _HUB_ID.fullmatch(name) is not None


def is_remote(name: str | Path) -> bool:
    """Whether `resolve_model` would have to ask the hub (or its cache) for this name."""
    return is_hub_id(name) and not Path(name).expanduser().exists()


def resolve_model(name: str | Path, *, revision: str | None = None, kind: Kind = "target") -> Path:
    """The folder of a model: a local folder itself, `demo`'s, or a hub id's snapshot.

    Args:
        revision: branch, tag or commit of a hub id.
        kind: which of the pair `demo` stands for.

    Raises:
        CheckpointError: a path that is not there, or a file.
        DownloadError: the hub id cannot be fetched and is not in the cache.
    """
    if name == DEMO:
        return demo_target() if kind == "target" else demo_drafter()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file: give the folder that holds config.json")
    if not is_hub_id(name):
        # "./owner/model" is never asked of the hub; without the "./" it would be.
        example = str(folder) if is_hub_id(str(folder)) else "owner/model"
        raise CheckpointError(
            f"there is no folder {name} ({folder.absolute()}): give a checkpoint folder, a hub id "
            f"({example}) or {DEMO!r}"
        )
    return _snapshot(str(name), revision)


def _snapshot(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and not for local folders

    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(_FETCHED),
            ignore_patterns=list(_NOT_FETCHED),
        )
    # The client's own, its HTTP library's and the system's errors have no base in common, and the
    # HTTP library differs between its releases.
    except Exception as error:
        raise DownloadError(_advice(repo, revision, error)) from error
    return Path(folder)


def _advice(repo: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    name = repo if revision is None else f"{repo} at revision {revision}"
    # A name that the hub did not own up to may as well be a path that is mistyped.
    missing = f"there is no folder {repo} here, and "
    if isinstance(error, errors.RevisionNotFoundError):
        todo = f"{repo} has no such revision: check the branch, tag or commit"
    elif isinstance(error, errors.GatedRepoError):
        todo = "it is gated: accept its terms on the hub, then log in with `hf auth login`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        todo = (
            f"{missing}on the hub it does not exist or is private: check the name or the path, or "
            "log in with `hf auth login`"
        )
    elif isinstance(error, (errors.LocalEntryNotFoundError, ConnectionError)):
        todo = (
            f"{missing}the hub cannot be reached (or HF_HUB_OFFLINE is set) and the cache does not "
            "hold the whole model: check the path, connect once, or place its files in a folder "
            "and give that path"
        )
    else:
        todo = f"{missing}the hub's client failed: {type(error).__name__}: {error}"
    return f"cannot fetch {name}: {todo}"
