"""The package's log records on the terminal: warnings always, progress notes with `-v`, each once.

Only the package's own logger is touched, and only while a command runs.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_jax.cli.terminal import note

LOGGER = "dflash_jax"


class _Notes(logging.Handler):
    """Prints `warning: …`; a text that was printed before is not printed again."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        if text not in self._seen:
            self._seen.add(text)
            note(text, style="yellow" if record.levelno >= logging.WARNING else "dim")


@contextmanager
def logs_on_terminal(verbose: bool) -> Iterator[None]:
    """Shows warnings, and with `verbose` also what the library notes on its way."""
    logger, handler = logging.getLogger(LOGGER), _Notes()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    # A library that we import may give the root logger a handler, which would say all of it again.
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


@contextmanager
def notes_shown() -> Iterator[None]:
    """As with `-v`, for a command whose only progress is what the library notes."""
    logger = logging.getLogger(LOGGER)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
