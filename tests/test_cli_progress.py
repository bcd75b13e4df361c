"""The bars: one a stage, in words of a user, silent outside their block."""

from io import StringIO

import pytest
from rich.console import Console

from dflash_jax.cli import progress


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    written = StringIO()
    monkeypatch.setattr(progress, "STDERR", Console(file=written, width=100))
    return written


def lines(screen: StringIO) -> list[str]:
    return [" ".join(line.replace("━", "").split()) for line in screen.getvalue().splitlines()]


def test_each_stage_has_one_line_with_how_far_it_came(screen: StringIO):
    with progress.Bars() as bars:
        bars("load", 1, 2)
        bars("load", 2, 2)
        bars("compile", 3, 8)
    loading, compiling = lines(screen)
    assert loading.startswith("✓ loading weights 2/2")
    assert "compiling" in compiling and "3/8" in compiling


def test_files_are_counted_in_megabytes_and_an_unknown_total_ends_with_the_next_stage(
    screen: StringIO,
):
    with progress.Bars() as bars:
        bars("download", 0, 0)
        bars("check", 46_000_000, 93_000_000)
    fetching, checking = lines(screen)
    assert fetching.startswith("✓ fetching the demo model 0:")
    assert "46/93 MB" in checking


def test_nothing_is_drawn_outside_the_block(screen: StringIO):
    bars = progress.Bars()
    bars("load", 1, 2)
    with bars:
        pass
    bars("load", 2, 2)
    assert "loading" not in screen.getvalue()


def test_in_the_background_a_line_a_minute_says_how_far_it_is(
    screen: StringIO, monkeypatch: pytest.MonkeyPatch
):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "note", lambda text: screen.write(text + "\n"))
    with progress.Bars() as bars:
        for done, clock[0] in ((1, 159.0), (2, 160.0), (3, 161.0), (4, 219.0), (5, 221.0)):
            bars("train", done, 9)
        clock[0] = 290.0
        bars("download", 3_000_000, 0)
        said = screen.getvalue().split("\n")
    assert said[:4] == ["training 2/9", "training 5/9", "fetching the demo model", ""]


def test_on_a_terminal_bars_are_enough(monkeypatch: pytest.MonkeyPatch):
    written = StringIO()
    terminal = Console(file=written, width=100, force_terminal=True)
    monkeypatch.setattr(progress, "STDERR", terminal)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(progress, "note", lambda text: pytest.fail(text))
    with progress.Bars() as bars:
        bars("train", 1, 9)
    assert "training" in written.getvalue()


def test_an_error_takes_unfinished_bars_away(screen: StringIO):
    with pytest.raises(ValueError, match="stop"), progress.Bars() as bars:
        bars("load", 0, 2)
        raise ValueError("stop")
    assert "loading" not in screen.getvalue()
