"""Results: one JSON document or the answers' text on stdout, tables on stderr.

The keys of the JSON documents are a promise to scripts; each command builds its own document from
the pieces here. What is shown while waiting is `progress.py`.
"""

import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from dflash_jax.cli.terminal import STDERR

if TYPE_CHECKING:
    from dflash_jax import Completion, DecodeStats


def print_json(document: Mapping[str, Any]) -> None:
    """The one document of a `--json` run; plain ASCII, so that any stdout can hold it."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    sys.stdout.flush()


def write_text(piece: str) -> None:
    """A piece of an answer, visible at once; what stdout cannot encode is replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(piece.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def drop_text(piece: str) -> None:
    """In place of `write_text` where the text goes into a JSON document."""


def follow(
    pieces: "Generator[str, None, Completion]", write: Callable[[str], None]
) -> "Completion":
    """Writes the pieces of a streamed answer as they come; its completion at the end."""
    while True:
        try:
            write(next(pieces))
        except StopIteration as end:
            return end.value


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    caption: str | None = None,
    total: Sequence[str] | None = None,
) -> None:
    """A table on stderr: the first column to the left, the others to the right."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row), end_section=total is not None and row is rows[-1])
    if total is not None:
        table.add_row(*map(Text, total), style="bold")
    STDERR.print(table)


def print_facts(facts: Mapping[str, str], *, title: str | None = None) -> None:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(name), Text(value))
    STDERR.print(table)


def completion_document(completion: "Completion") -> dict[str, Any]:
    """One answer as JSON."""
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_token_ids": completion.prompt_token_ids,
        "stats": stats_document(completion.stats),
        "error": completion.error,
    }


def stats_document(stats: "DecodeStats") -> dict[str, Any]:
    """The counts of one answer as JSON; `acceptance_length` is null before the first round."""
    return {
        "acceptance_length": stats.acceptance_length if stats.num_rounds else None,
        "acceptance_lengths": stats.acceptance_lengths,
        "num_rounds": stats.num_rounds,
        "num_drafts": stats.num_drafts,
        "num_accepted_drafts": stats.num_accepted_drafts,
        "unqualified": stats.unqualified,
    }
