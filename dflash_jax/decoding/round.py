"""One prefill chunk and one decoding round, as pure functions on arenas and token state.

A round drafts, verifies, accepts and commits for the leading rows of the arenas; plain decoding is
the same round with no drafter and one token a row. `programs.py` compiles these functions, the
engine calls what was compiled.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.arena.context import ContextArena
from dflash_jax.arena.kv import KVArena, append_kv, open_kv_slots
from dflash_jax.arena.rows import ArenaRows, live_slots, slot_lengths
from dflash_jax.decoding.draft import Drafter, Proposal
from dflash_jax.decoding.sampling import greedy_tokens, sampled_tokens
from dflash_jax.decoding.verify import num_accepted_drafts
from dflash_jax.models.target import Target


class TokenState(NamedTuple):
    """What a slot needs to go on, besides its arenas.

    Attributes:
        anchors: last committed token, without K/V or feature yet, int32 [n].
        temperatures: 0 is greedy, float32 [n].
        seeds: noise of sampled rows, uint32 [n].
    """

    anchors: Int[Array, " n"]
    temperatures: Float[Array, " n"]
    seeds: UInt32[Array, " n"]


class EngineState(NamedTuple):
    """All that compiled programs donate and hand back; `context` is None where none is kept."""

    kv: KVArena
    context: ContextArena | None
    tokens: TokenState


class RoundReport(NamedTuple):
    """What the host reads after a round, from one packed array.

    Attributes:
        num_drafts: proposals of each row [b], 0 … K.
        num_accepted_drafts: of which the target agreed [b]; the row commits one token more.
        drafts: proposed ids [b, K].
        chosen: the target's ids [b, K + 1]; the first num_accepted_drafts + 1 are committed.
    """

    num_drafts: np.ndarray
    num_accepted_drafts: np.ndarray
    drafts: np.ndarray
    chosen: np.ndarray

    @classmethod
    def unpack(cls, packed: np.ndarray) -> "RoundReport":
        """Splits [b, 2K + 3] as `decode_round` packs it."""
        draft_len = (packed.shape[1] - 3) // 2
        return cls(
            packed[:, 0], packed[:, 1], packed[:, 2 : 2 + draft_len], packed[:, 2 + draft_len :]
        )


class Prompt(NamedTuple):
    """One chunk of prompts for a prefill program, one row a slot.

    Attributes:
        slots: where each row goes, int32 [b].
        ids: tokens of the chunk, padded at the end, int32 [b, t].
        counts: how many of them are real, int32 [b].
        fresh: whether the slot starts over with this chunk, bool [b].
        temperatures, seeds: as in `TokenState`, [b].
    """

    slots: Int[Array, " b"]
    ids: Int[Array, "b t"]
    counts: Int[Array, " b"]
    fresh: Bool[Array, " b"]
    temperatures: Float[Array, " b"]
    seeds: UInt32[Array, " b"]


def prefill_chunk(
    target: Target,
    drafter: Drafter | None,
    state: EngineState,
    prompt: Prompt,
    *,
    piece: int | None,
) -> tuple[EngineState, Int[Array, " b"]]:
    """Runs one chunk, writes its K/V and context, and chooses the token after it.

    The chosen token becomes the anchor; it counts only after a prompt's last chunk. Rows must be
    consecutive slots (one row is what programs are compiled for). `piece` as in `ArenaRows`.
    """
    kv = open_kv_slots(state.kv, prompt.slots, prompt.fresh)
    starts = slot_lengths(kv.lengths, prompt.slots)
    layer_ids = drafter.layer_ids if drafter is not None else ()
    cache = ArenaRows(kv.layers, prompt.slots[0], piece)
    hidden, features, new = target.run(prompt.ids, starts, cache, layer_ids)
    last = jnp.take_along_axis(hidden, (prompt.counts - 1)[:, None, None], axis=1)
    positions = (starts + prompt.counts)[:, None]
    chosen = sampled_tokens(target.logits(last), positions, prompt.temperatures, prompt.seeds)[:, 0]
    counts = _after_pass(prompt.counts, chosen)
    kv = append_kv(kv, prompt.slots, new, counts)
    context = state.context
    if drafter is not None:
        context = drafter.open_slots(context, prompt.slots, prompt.fresh)
        context = drafter.absorb(context, prompt.slots, features, counts)
    tokens = TokenState(
        anchors=state.tokens.anchors.at[prompt.slots].set(chosen, mode="drop"),
        temperatures=state.tokens.temperatures.at[prompt.slots].set(
            prompt.temperatures, mode="drop"
        ),
        seeds=state.tokens.seeds.at[prompt.slots].set(prompt.seeds, mode="drop"),
    )
    return EngineState(kv, context, tokens), chosen


def decode_round(
    target: Target,
    drafter: Drafter | None,
    state: EngineState,
    active: Bool[Array, " b"],
    *,
    sampled: bool,
    piece: int | None,
) -> tuple[EngineState, Int[Array, "b r"]]:
    """Draft, verify, accept and commit for slots 0 … b - 1; dead rows change nothing.

    Args:
        active: which rows take part, bool [b].
        sampled: whether rows may have a temperature; False compiles the greedy variant.
        piece: as in `ArenaRows`.

    Returns:
        The new state and a packed report [b, 2K + 3], see `RoundReport`.
    """
    rows = active.shape[0]
    kv, context = state.kv, state.context
    slots = live_slots(active, kv.lengths.shape[0])
    anchors = state.tokens.anchors[:rows]
    if drafter is None:
        proposal = no_proposal(rows)
    else:
        proposal = drafter.propose(context, slots, anchors)
    ids = jnp.concatenate([anchors[:, None], proposal.tokens], axis=1)
    lengths = slot_lengths(kv.lengths, slots)
    layer_ids = drafter.layer_ids if drafter is not None else ()
    cache = ArenaRows(kv.layers, None, piece)
    hidden, features, new = target.run(ids, lengths, cache, layer_ids)
    chosen = _choose(target.logits(hidden), lengths, state.tokens, sampled)
    accepted = num_accepted_drafts(proposal.tokens, proposal.count, chosen)
    committed = _after_pass(jnp.where(active, accepted + 1, 0), chosen[:, 0])
    kv = append_kv(kv, slots, new, committed)
    if drafter is not None:
        # A row that stopped drafting keeps its context frozen.
        kept = jnp.where(proposal.count > 0, committed, 0)
        context = drafter.absorb(context, slots, features, kept)
    anchor = jnp.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
    tokens = state.tokens._replace(anchors=state.tokens.anchors.at[slots].set(anchor, mode="drop"))
    report = [proposal.count[:, None], accepted[:, None], proposal.tokens, chosen]
    return EngineState(kv, context, tokens), jnp.concatenate(report, axis=1)


def _after_pass(counts: Int[Array, " b"], chosen: Int[Array, " b"]) -> Int[Array, " b"]:
    """Makes a write depend on the pass that read the arena; chosen ids are never negative.

    Where a count does not follow from the pass (prefill, plain decoding), the compiler may order
    the write first and then copies the whole arena to keep what is still to be read.
    """
    return jnp.where(chosen >= 0, counts, 0)


def no_proposal(rows: int) -> Proposal:
    """Plain decoding: nothing is drafted and the block is the anchor alone."""
    return Proposal(jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows,), jnp.int32), None)


def _choose(
    logits: Float[Array, "b t v"],
    lengths: Int[Array, " b"],
    tokens: TokenState,
    sampled: bool,
) -> Int[Array, "b t"]:
    if not sampled:
        return greedy_tokens(logits)
    rows, width, _ = logits.shape
    # The choice after the anchor at position `length` is the token at position length + 1.
    positions = lengths[:, None] + 1 + jnp.arange(width, dtype=jnp.int32)[None, :]
    return sampled_tokens(logits, positions, tokens.temperatures[:rows], tokens.seeds[:rows])
