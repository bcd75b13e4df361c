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


def test_an_error_takes_unfinished_bars_away(screen: StringIO):
    with pytest.raises(ValueError, match="stop"), progress.Bars() as bars:
        bars("load", 0, 2)
        raise ValueError("stop")
    assert "loading" not in screen.getvalue()
