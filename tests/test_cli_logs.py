"""Log records on the terminal: warnings once, notes on demand, nothing left behind."""

import logging
from io import StringIO

import pytest
from rich.console import Console

from dflash_jax.cli import terminal
from dflash_jax.cli.logs import logs_on_terminal, notes_shown

LOG = logging.getLogger("dflash_jax.serving.batch")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    written = StringIO()
    monkeypatch.setattr(terminal, "STDERR", Console(file=written, width=20))
    return written


def test_a_warning_is_printed_once_whole_and_as_it_is(screen: StringIO):
    with logs_on_terminal(verbose=False):
        for _ in range(3):
            LOG.warning("served length %d [bold] :smile: of a long line", 64)
        LOG.warning("another")
        LOG.info("a note")
    assert screen.getvalue().splitlines() == [
        "warning: served length 64 [bold] :smile: of a long line",
        "warning: another",
    ]


def test_notes_are_printed_when_asked_for(screen: StringIO):
    with logs_on_terminal(verbose=True):
        LOG.info("one")
    with logs_on_terminal(verbose=False):
        with notes_shown():
            LOG.info("two")
        LOG.info("three")
    assert screen.getvalue().split() == ["info:", "one", "info:", "two"]


def test_nothing_is_left_behind(screen: StringIO):
    logger = logging.getLogger("dflash_jax")
    before = (list(logger.handlers), logger.level, logger.propagate)
    with pytest.raises(ValueError, match="stop"), logs_on_terminal(verbose=True):
        raise ValueError("stop")
    LOG.warning("afterwards")
    assert (list(logger.handlers), logger.level, logger.propagate) == before
    assert screen.getvalue() == ""


def test_a_handler_of_the_root_logger_does_not_say_it_again(
    screen: StringIO, caplog: pytest.LogCaptureFixture
):
    """Libraries that are imported on the way give the root logger one."""
    with logs_on_terminal(verbose=False):
        LOG.warning("once")
    assert screen.getvalue().split() == ["warning:", "once"]
    assert caplog.records == []
    LOG.warning("afterwards")
    assert [record.getMessage() for record in caplog.records] == ["afterwards"]
