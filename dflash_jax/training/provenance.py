"""What a file was made from: hashes of files, identity of a target's folder, versions.

Records for manifests; nothing here decides whether a difference matters.
"""

import hashlib
import importlib.metadata
from pathlib import Path

from dflash_jax.version import VERSION

_SAMPLES, _SAMPLE_BYTES = 64, 2**16
_WHOLE_BYTES = _SAMPLES * _SAMPLE_BYTES
_READ = (".json", ".jinja", ".model", ".txt")


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """Of what computes answers; this code's own, installed or not."""
    return {"dflash-jax": VERSION, "jax": importlib.metadata.version("jax")}


def target_identity(folder: Path) -> dict[str, str]:
    """Name and hash of a model's folder.

    Configs, template and tokenizer are hashed whole; so are weights up to 4 MiB. Of larger files,
    the size and 64 samples of 64 KiB at even distances: what was trained on differs everywhere, and
    hashing 100 GB at every start would take minutes. Hidden files and `.md` do not count.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        names = path.relative_to(folder).parts
        if path.suffix == ".md" or any(name.startswith(".") for name in names):
            continue
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()} {size}\n".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES or path.suffix in _READ:
                digest.update(file.read())
                continue
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return {"name": folder.name, "sha256": digest.hexdigest()}
