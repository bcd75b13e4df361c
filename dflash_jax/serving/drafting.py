"""What the host does for a round's drafts: proposals from a row's own text, and a drafter's end."""

import logging
from collections.abc import Iterable

from dflash_jax.config import DrafterConfig
from dflash_jax.serving.row import Row

logger = logging.getLogger(__name__)

# What followed the one last token commits 1.5 tokens a round (SmolLM2, six prompts) and such a
# round costs up to 1.9 plain ones on a CPU; two tokens in a row commit 2.5.
LEAST_MATCH = 2


def host_drafts(rows: Iterable[Row], width: int) -> dict[int, list[int]]:
    """What the host proposes, by slot; nothing for a row whose end is new in its text."""
    return {
        row.slot: row.suffixes.propose(width)
        for row in rows
        if row.slot is not None
        and row.suffixes is not None
        and row.suffixes.match_length >= LEAST_MATCH
    }


def note_drafting(row: Row, drafted: int, drafter: DrafterConfig | None) -> None:
    """Notes, once, that a row which asks for drafts got none: it is beyond the drafter's end."""
    stats = row.stats
    if drafter is None or drafted or not row.params.speculate:
        return
    if stats.stopped_drafting_at is not None:
        return
    stats.stopped_drafting_at = len(row.prompt) + len(row.generated)
    logger.warning(
        "a request of %d prompt tokens has reached the end of the drafter's %d positions and "
        "goes on without drafting (the text is unchanged): choose a drafter with more "
        "positions or shorter requests",
        len(row.prompt),
        drafter.max_position_embeddings,
    )
