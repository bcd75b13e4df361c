"""Runs `dflash-jax` in the test process, stdout and stderr apart; fails on any traceback.

Engines compile what a command calls, not all that they could be asked for. Whole starts are in
`test_llm_start.py`; the program in a process of its own is what `test_cli_main.py` starts.
"""

import json
from typing import Any, NamedTuple

from typer.testing import CliRunner

import tiny_engine


class Ran(NamedTuple):
    """What a run left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """All of stdout as the one JSON document that it has to be."""
        return json.loads(self.stdout)


def run(*words: object, stdin: str | None = None) -> Ran:
    """One command; an exception that the program does not turn into an exit code is raised."""
    from dflash_jax.cli.main import app

    with tiny_engine.on_demand():
        result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)
