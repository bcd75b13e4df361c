"""A folder of numbered JSONL files with a manifest, that a killed run goes on with.

A shard is written beside its place, synced and renamed; then the manifest takes it up with its
hash, counts and the versions that made it. A file that the manifest does not know is made again, so
nothing half-written is ever taken for whole. What the lines mean is `corpus.py` and `made_up.py`.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.training.provenance import file_hash, versions
from dflash_jax.training.records import differences, recorded, with_defaults

MANIFEST = "manifest.json"


class Shards:
    """The shards of one folder; only one process writes them.

    Args:
        folder: made if it is not there.
        stem: shards are `STEM-00000.jsonl` and so on.
        options: a dataclass; with `made_from`, everything that decides what is in them.
        made_from: JSON values.

    Raises:
        ConfigError: the folder was begun with something else; names every difference.
        CheckpointError: the manifest cannot be read or written.
    """

    def __init__(self, folder: Path, stem: str, options: Any, made_from: Mapping[str, Any]):
        self._folder, self._stem = folder, stem
        self._manifest = folder / MANIFEST
        wanted = {"options": recorded(options)} | json.loads(json.dumps(made_from))
        self._record: dict[str, Any] = {"made_from": wanted, "shards": {}}
        if self._manifest.is_file():
            begun = self._read()
            if begun["shards"]:  # before the first one, nothing is lost by beginning anew
                then = begun["made_from"]
                options_then = with_defaults(then.get("options", {}), type(options))
                _agree(folder, then | {"options": options_then}, wanted)
                self._record = begun
                return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be made ({error.strerror})") from error
        self._save()

    def path(self, index: int) -> Path:
        """Where a shard is or will be."""
        return self._folder / f"{self._stem}-{index:05d}.jsonl"

    def is_whole(self, index: int) -> bool:
        """Whether a shard was finished.

        Raises:
            CheckpointError: it was, and is not what it was then.
        """
        path = self.path(index)
        entry = self._record["shards"].get(path.name)
        if entry is None or not path.is_file():
            return False
        found = file_hash(path)
        if found != entry["sha256"]:
            raise CheckpointError(
                f"{path} was changed: its SHA-256 is {found}, {self._manifest.name} says "
                f"{entry['sha256']}; remove the file, and it is made again"
            )
        return True

    def write(self, index: int, lines: Sequence[Mapping[str, Any]], counts: Counter[str]) -> None:
        """Writes a shard and takes it up in the manifest.

        Raises:
            CheckpointError: the disk is full; what was written of the shard is removed.
        """
        path = self.path(index)
        _write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._record["shards"][path.name] = {
            "sha256": file_hash(path),
            "lines": len(lines),
            "counts": dict(sorted(counts.items())),
            "versions": versions(),
        }
        self._save()

    @property
    def counts(self) -> Counter[str]:
        """Counts of all whole shards together."""
        total: Counter[str] = Counter()
        for entry in self._record["shards"].values():
            total.update(entry["counts"])
        return total

    def _read(self) -> dict[str, Any]:
        try:
            record = json.loads(self._manifest.read_text(encoding="utf-8"))
            return {"made_from": record["made_from"], "shards": dict(record["shards"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._manifest} is no manifest of this version ({error!r}): use another folder"
            ) from error

    def _save(self) -> None:
        _write_text(self._manifest, json.dumps(self._record, indent=2) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of one shard."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _agree(folder: Path, begun: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = differences(begun, wanted)
    if different:
        raise ConfigError(
            f"{folder} was begun with something else ({'; '.join(different.values())}): use the "
            "same prompts, target and options, or another folder"
        )


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} could not be written ({error.strerror}): it needs "
            f"{len(text.encode()) / 1e6:.3f} MB; free some space and start again, or use another "
            "work folder"
        ) from error
