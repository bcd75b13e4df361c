"""`dflash-jax serve` in a process of its own, as a user starts it, with the tiny pair.

Compiled programs come from pytest's cache folder where an earlier run left them.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from tiny_text import write_text_drafter, write_text_target

ROOT = Path(__file__).resolve().parents[1]
SERVE = "from dflash_jax.cli.main import main; main()"
START_UP = 300  # seconds, on a busy machine


class ServerProcess(NamedTuple):
    """A process that listens at `address`; its stderr is in a file."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def serving(folder: Path, *words: object, **environment: str) -> Iterator[ServerProcess]:
    """Serves the tiny pair as the model `target` on a free port."""
    target = write_text_target(folder / "target")
    drafter = write_text_drafter(folder / "drafter")
    with started(folder, target, "-d", drafter, *words, **environment) as server:
        yield server


@contextlib.contextmanager
def started(folder: Path, *words: object, **environment: str) -> Iterator[ServerProcess]:
    """`dflash-jax serve` with these words on a free port, from when it listens on."""
    command = [sys.executable, "-c", SERVE, "serve", *words, "--port", 0]
    cache = jax.config.values["jax_compilation_cache_dir"]
    settings = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        **({"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    log = folder / "stderr.txt"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | settings | environment,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield ServerProcess(process, _address(process, log), log)
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_UP
    while not (found := re.search(r"listening on (\S+)", log.read_text())):
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    return found[1]
