"""One prefill chunk and one decoding round, as pure functions on arenas and token state.

A round drafts, verifies, accepts and commits for the leading rows of the arenas; plain decoding is
the same round with one token a row. `programs.py` compiles these functions, the engine calls what
was compiled; `state.py` is what they work on and `report.py` what they tell the host.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.arena.kv import append_kv, kv_rows
from dflash_jax.arena.rows import live_slots, slot_lengths
from dflash_jax.decoding.draft import Drafter, Proposal
from dflash_jax.decoding.options import (
    SlotOptions,
    count_outputs,
    init_options,
)
from dflash_jax.decoding.rejection import DrawnDrafts
from dflash_jax.decoding.report import NOT_RUN, Logprobs, pack
from dflash_jax.decoding.sampling import (
    RowDraws,
    choose_tokens,
    chosen_logprobs,
    healthy_tokens,
    judge_drafts,
)
from dflash_jax.decoding.state import EngineState, TokenState
from dflash_jax.decoding.verify import num_accepted_drafts
from dflash_jax.models.target import Target


class Prompt(NamedTuple):
    """One chunk of prompts for a prefill program, one row a slot; it follows what the slot holds.

    Attributes:
        slots: where each row goes, int32 [b].
        ids: tokens of the chunk, padded at the end, int32 [b, t].
        counts: how many of them are real, int32 [b].
        last: whether the prompt ends with this chunk, bool [b].
        anchors: the token after the prompt where it is known (a request that is prefilled again),
            int32 [b]; -1 = choose it.
    """

    slots: Int[Array, " b"]
    ids: Int[Array, "b t"]
    counts: Int[Array, " b"]
    last: Bool[Array, " b"]
    anchors: Int[Array, " b"]


def padded_chunk(
    slot: int, ids: Sequence[int], sizes: Sequence[int], *, last: bool, anchor: int | None = None
) -> Prompt:
    """One chunk for one slot, padded to the smallest of `sizes` (ascending) that holds it."""
    padded = np.zeros((1, next(size for size in sizes if size >= len(ids))), np.int32)
    padded[0, : len(ids)] = ids
    fields: tuple[Any, ...] = (
        np.array([slot], np.int32),
        padded,
        np.array([len(ids)], np.int32),
        np.array([last]),
        np.array([-1 if anchor is None else anchor], np.int32),
    )
    return Prompt(*fields)


def prefill_chunk(
    target: Target,
    drafter: Drafter | None,
    state: EngineState,
    prompt: Prompt,
    *,
    piece: int | None,
) -> tuple[EngineState, Int[Array, "b r"]]:
    """Runs one chunk, writes its K/V and context, and chooses the token after it.

    The chosen token becomes the anchor; it counts only after a prompt's last chunk. Rows must be
    consecutive slots (one row is what programs are compiled for). `piece` as in `ArenaRows`.
    """
    slots, counts = prompt.slots, prompt.counts
    starts = slot_lengths(state.kv.lengths, slots)
    layer_ids = drafter.layer_ids if drafter is not None else ()
    cache = kv_rows(state.kv, slots, piece, first=slots[0])
    hidden, features, new = target.run(prompt.ids, starts, cache, layer_ids)
    logits = target.logits(jnp.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1))
    options, history = jax.tree.map(
        lambda array: array[slots], (state.tokens.options, state.tokens.counts)
    )
    none = jnp.zeros((slots.shape[0], 0), jnp.int32)
    chosen = choose_tokens(logits, (starts + counts)[:, None], none, options, history)
    kept = _after_pass(counts, chosen[:, 0])
    kv = append_kv(state.kv, slots, new, kept)
    context = state.context
    if drafter is not None:
        context = drafter.absorb(context, slots, features, kept)
    known = prompt.anchors[:, None] >= 0
    anchor = jnp.where(known, prompt.anchors[:, None], chosen)
    committed = jnp.where(prompt.last & ~known[:, 0] & (chosen[:, 0] >= 0), 1, 0)
    tokens = _commit(state.tokens, slots, anchor, committed, general=True)
    tokens = tokens._replace(anchors=tokens.anchors.at[slots].set(anchor[:, 0], mode="drop"))
    zeros = jnp.zeros_like(counts)
    report = pack(zeros, zeros, none, chosen, _logprobs(logits, chosen, options))
    return EngineState(kv, context, tokens), report


def decode_round(
    target: Target,
    drafter: Drafter | None,
    state: EngineState,
    active: Bool[Array, " b"],
    *,
    general: bool,
    piece: int | None,
    plain: bool = False,
) -> tuple[EngineState, Int[Array, "b r"]]:
    """Draft, verify, accept and commit for slots 0 … b - 1; dead rows change nothing.

    Args:
        active: which rows take part, bool [b]; those whose answer has ended do not.
        general: whether rows may ask for more than the best token; False compiles the greedy
            variant, which neither counts tokens nor reports log-probabilities.
        piece: as in `ArenaRows`.
        plain: one token a row; the drafter takes it in but proposes nothing.

    Returns:
        The new state and a packed report, see `RoundReport`.
    """
    rows = active.shape[0]
    kv, context, tokens = state
    alive = active & (tokens.remaining[:rows] > 0)
    slots = live_slots(alive, kv.lengths.shape[0])
    anchors = tokens.anchors[:rows]
    lengths = slot_lengths(kv.lengths, slots)
    draw = RowDraws(_asked(tokens, alive), lengths) if general else None
    proposal = no_proposal(rows)
    if drafter is not None and not plain:
        proposal = drafter.propose(context, slots, anchors, draw)
    num_drafts = jnp.where(tokens.drafting[:rows], proposal.count, 0)
    ids = jnp.concatenate([anchors[:, None], proposal.tokens], axis=1)
    layer_ids = drafter.layer_ids if drafter is not None else ()
    cache = kv_rows(kv, slots, piece, first=None)
    hidden, features, new = target.run(ids, lengths, cache, layer_ids)
    logits = target.logits(hidden)
    if draw is None:
        chosen, num_kept, logprobs = healthy_tokens(logits), num_drafts, None
    else:
        history = jax.tree.map(lambda array: array[:rows], tokens.counts)
        positions = draw.positions(ids.shape[1])
        drawn = None
        if proposal.log_q is not None:
            drawn = DrawnDrafts(proposal.log_q, proposal.ids, num_drafts)
        chosen, limit = judge_drafts(
            logits, positions, proposal.tokens, draw.options, history, drawn
        )
        num_kept = jnp.minimum(num_drafts, limit)
        logprobs = _logprobs(logits, chosen, draw.options)
    accepted = num_accepted_drafts(proposal.tokens, num_kept, chosen)
    committed = _after_pass(jnp.where(alive, accepted + 1, 0), _lowest(chosen, accepted))
    kv = append_kv(kv, slots, new, committed)
    if drafter is not None:
        kept = jnp.where(drafter.follows(context, slots), committed, 0)
        context = drafter.absorb(context, slots, features, kept)
    tokens = _commit(tokens, slots, chosen, committed, general=general)
    ran = jnp.where(alive, accepted, NOT_RUN)
    return EngineState(kv, context, tokens), pack(
        num_drafts, ran, proposal.tokens, chosen, logprobs
    )


def decode_rounds(
    target: Target,
    drafter: Drafter | None,
    state: EngineState,
    active: Bool[Array, " b"],
    *,
    rounds: int,
    general: bool,
    piece: int | None,
    plain: bool = False,
) -> tuple[EngineState, Int[Array, "c b r"]]:
    """Up to `rounds` rounds in one dispatch, fewer when every active row has ended.

    Returns:
        The new state and the packed reports of the rounds; `NOT_RUN` in all rows of one that did
        not take place.
    """
    rows = active.shape[0]

    def one(state: EngineState) -> tuple[EngineState, Int[Array, "b r"]]:
        return decode_round(
            target, drafter, state, active, general=general, piece=piece, plain=plain
        )

    if rounds == 1:
        state, packed = one(state)
        return state, packed[None]
    shape = (rounds, *jax.eval_shape(one, state)[1].shape)

    def goes_on(carry: tuple[Array, EngineState, Array]) -> Bool[Array, ""]:
        done, state, _ = carry
        return (done < rounds) & jnp.any(active & (state.tokens.remaining[:rows] > 0))

    def step(carry: tuple[Array, EngineState, Array]) -> tuple[Array, EngineState, Array]:
        done, state, reports = carry
        state, packed = one(state)
        return done + 1, state, reports.at[done].set(packed)

    carry = (jnp.int32(0), state, jnp.full(shape, NOT_RUN, jnp.int32))
    _, state, reports = jax.lax.while_loop(goes_on, step, carry)
    return state, reports


def no_proposal(rows: int) -> Proposal:
    """Plain decoding: nothing is drafted and the block is the anchor alone."""
    return Proposal(jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows,), jnp.int32), None)


def _asked(tokens: TokenState, alive: Bool[Array, " b"]) -> SlotOptions:
    """Options of the leading rows; a row without a request asks for nothing."""
    rows = alive.shape[0]

    def asked(array: Array, nothing: Array) -> Array:
        mask = alive.reshape(rows, *[1] * (array.ndim - 1))
        return jnp.where(mask, array[:rows], nothing)

    return jax.tree.map(asked, tokens.options, init_options(rows))


def _after_pass(counts: Int[Array, " b"], chosen: Int[Array, " b"]) -> Int[Array, " b"]:
    """0 where the choice went wrong (NaN); and makes a write depend on the pass that read the rows.

    Where a count does not follow from the pass (prefill, plain decoding), the compiler may order
    the write first and then copies the whole arena to keep what is still to be read.
    """
    return jnp.where(chosen >= 0, counts, 0)


def _lowest(chosen: Int[Array, "b t"], accepted: Int[Array, " b"]) -> Int[Array, " b"]:
    """The lowest id among those to be committed: -1 if one of them is no id."""
    places = jnp.arange(chosen.shape[1], dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(places <= accepted[:, None], chosen, 0), axis=1)


def _commit(
    tokens: TokenState,
    slots: Int[Array, " b"],
    chosen: Int[Array, "b t"],
    committed: Int[Array, " b"],
    *,
    general: bool,
) -> TokenState:
    """Anchor, what is left of the answer, and counts, after `committed` of the chosen ids.

    An end id among them ends the answer here too, so that a round which is already dispatched
    leaves the row alone; what the user gets is cut on the host.
    """
    last = jnp.maximum(committed - 1, 0)[:, None]
    anchor = jnp.take_along_axis(chosen, last, axis=1)[:, 0]
    taken = jnp.arange(chosen.shape[1], dtype=jnp.int32)[None, :] < committed[:, None]
    ends = tokens.options.ban_ids.at[slots].get(mode="clip")
    ended = jnp.any((chosen[:, :, None] == ends[:, None, :]) & taken[:, :, None], axis=(1, 2))
    left = jnp.maximum(slot_lengths(tokens.remaining, slots) - committed, 0)
    wrote = committed > 0
    live = jnp.where(wrote, slots, tokens.anchors.shape[0])
    counts = tokens.counts
    if general:
        counts = count_outputs(counts, slots, chosen, committed)
    return tokens._replace(
        anchors=tokens.anchors.at[live].set(anchor, mode="drop"),
        remaining=tokens.remaining.at[live].set(jnp.where(ended, 0, left), mode="drop"),
        counts=counts,
    )


def _logprobs(
    logits: Float[Array, "b t v"], chosen: Int[Array, "b t"], options: SlotOptions
) -> Logprobs:
    """Those of the chosen ids where a row asks for them, else zeros that nobody reads."""

    def report() -> Logprobs:
        return Logprobs(*chosen_logprobs(logits, chosen))

    empty = jax.eval_shape(report)
    return jax.lax.cond(
        jnp.any(options.logprobs),
        report,
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty),
    )
