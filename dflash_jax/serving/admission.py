"""A request's way into its slot: what is copied there, what the slot is told, who waits instead."""

from collections.abc import Iterable

from dflash_jax.arena.context import ContextRing
from dflash_jax.decoding.suffix import SuffixAutomaton
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.opening import make_opening
from dflash_jax.serving.places import Places, make_places
from dflash_jax.serving.prefix import shared_length
from dflash_jax.serving.row import Row
from dflash_jax.serving.slots import LEAST_COPY, Place


def make_slots(engine: Engine, *, reuse: bool) -> Places:
    """The places of an engine whose arenas are empty."""
    config, state = engine.config, engine.state
    limit = None
    if state.context is not None and config.drafter is not None:
        # Up to here no row's context is frozen; a ring keeps no beginning.
        ring = isinstance(state.context, ContextRing)
        limit = 0 if ring else config.drafter.max_position_embeddings - config.block_width
    return make_places(config, engine.row_sizes, reuse=reuse, context_limit=limit)


def shares_a_prompt_in_work(row: Row, running: Iterable[Row]) -> bool:
    """Whether to wait for a prompt that is being computed: its tokens are not computed twice.

    The n answers of one request, and a burst of requests with one system prompt.
    """
    wanted = row.held[:-1]
    return any(
        # What the other one took over is there for this one too.
        shared_length(wanted, other.held) - other.stats.reused_prompt_tokens >= LEAST_COPY
        for other in running
        if not other.decodes
    )


def enter(row: Row, place: Place, engine: Engine) -> None:
    """Puts a row into its place: copies what it takes over, opens the slot, notes what was reused.

    Mutates the row and the engine's arenas.
    """
    row.slot, row.computed, row.length = place.slot, place.kv_kept, len(row.held)
    _take_over(place, engine)
    engine.open(
        make_opening(
            place.slot,
            row.answer,
            engine.config.target.vocab_size,
            kv_kept=place.kv_kept,
            context_kept=place.context_kept,
            pages=place.pages,
        )
    )
    row.stats.reused_prompt_tokens = min(place.kv_kept, len(row.prompt))
    row.stats.context_reused_tokens = place.context_kept
    if engine.config.speculation == "suffix" and row.params.speculate:
        row.suffixes = SuffixAutomaton([*row.prompt, *row.generated])


def _take_over(place: Place, engine: Engine) -> None:
    for source, target in place.page_copies:
        engine.copy_page(source, target)
    if place.source != place.slot:
        engine.copy(
            place.source,
            place.slot,
            kv_count=place.kv_kept,
            context_count=place.context_kept,
        )
