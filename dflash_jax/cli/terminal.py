"""What people read goes to stderr, through the one console here: bars, tables, notes and errors.

stdout is left to answers and JSON (`output.py`). Nothing here decides what is shown or when.
"""

from rich.console import Console
from rich.text import Text

STDERR = Console(stderr=True)
"""Looks `sys.stderr` up at every write; shared, so that a note does not tear a live bar."""


def note(text: str, style: str | None = None) -> None:
    """One line as it is: no markup, no emoji, not broken at the terminal's width."""
    STDERR.print(Text(text, style=style or ""), soft_wrap=True)


def complain(error: Exception) -> None:
    """`error: …`, a line for each finding of the message."""
    for line in str(error).splitlines() or [type(error).__name__]:
        note(f"error: {line}", style="red")
