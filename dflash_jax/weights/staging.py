"""A folder that appears under its name only when it is whole.

Used wherever a checkpoint is written: a crash or a full disk leaves nothing that a later load could
mistake for a model. Nothing here knows what is written.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_jax.errors import CheckpointError


@contextmanager
def staged(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty folder beside `folder` and renames it to `folder` when the block ends well.

    Raises:
        CheckpointError: `folder` is there and `overwrite` is not set, or it is not a checkpoint.
    """
    folder = Path(folder).expanduser().absolute()
    if folder.exists() and not overwrite:
        raise CheckpointError(f"{folder} is there already: choose another, or overwrite it")
    if folder.exists() and not _is_replaceable(folder):
        raise CheckpointError(
            f"{folder} is there and has no config.json, so it is not a checkpoint: it is not "
            "overwritten; remove it or choose another"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private
        _replace(folder, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "config.json").is_file() or not any(folder.iterdir()))


def _replace(folder: Path, partial: Path) -> None:
    """Renames; what was there before is moved aside first and comes back if renaming fails."""
    if not folder.exists():
        os.rename(partial, folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old-", dir=folder.parent)) / "old"
    os.rename(folder, aside)
    try:
        os.rename(partial, folder)
    except OSError:
        os.rename(aside, folder)
        raise
    finally:
        shutil.rmtree(aside.parent, ignore_errors=True)
