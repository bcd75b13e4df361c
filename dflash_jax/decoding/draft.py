"""Drafting methods: the `Drafter` protocol, its `Proposal`, and DFlash itself.

A method lives inside the compiled round: it proposes from its own arena and takes in what the
round committed. Another method is another class with the same members (`given.py` has one).
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.arena.context import (
    ContextArena,
    append_context,
    can_draft,
    context_rows,
)
from dflash_jax.arena.paged import table_rows
from dflash_jax.arena.rows import slot_lengths
from dflash_jax.decoding.sampling import RowDraws, choose_drafts
from dflash_jax.models.drafter import DFlashDrafter
from dflash_jax.models.target import Target


class Proposal(NamedTuple):
    """Drafts of one round.

    Attributes:
        tokens: proposed ids [b, K]; from `count` on, filler that never matches.
        count: proposals of each row, 0 … K; 0 means "did not draft", not "drafted id 0".
        log_q: log-probabilities that drafts of sampled rows without a seed were drawn from, after
            the row's options [b, K, c]; None: every draft is accepted by equality with the
            target's own draw, as those of greedy and seeded rows always are.
        ids: the target's id of each entry of `log_q` [c]; None: the target's first ones.
    """

    tokens: Int[Array, "b K"]
    count: Int[Array, " b"]
    log_q: Float[Array, "b K c"] | None
    ids: Int[Array, " c"] | None = None


@runtime_checkable
class Drafter(Protocol):
    """A drafting method as the compiled round sees it. `layer_ids` are the taps it needs.

    `arena` is what the method keeps on the device between rounds, `EngineState.context`: a
    `ContextArena`, or None for a method that keeps nothing.
    """

    layer_ids: tuple[int, ...]
    draft_len: int

    def propose(
        self,
        arena: Any,
        slots: Int[Array, " b"],
        anchors: Int[Array, " b"],
        draw: RowDraws | None,
    ) -> Proposal:
        """Drafts for the given rows; rows that are dead or may not draft get count 0.

        `draw` says how sampled rows draw; None in the greedy variant of a round.
        """
        ...

    def absorb(
        self,
        arena: Any,
        slots: Int[Array, " b"],
        features: Float[Array, "b t ae"],
        counts: Int[Array, " b"],
    ) -> Any:
        """Takes in the features of the first `counts` tokens of a pass."""
        ...

    def follows(self, arena: Any, slots: Int[Array, " b"]) -> Bool[Array, " b"]:
        """Whether a row's rounds are still to be absorbed; once False it stays False."""
        ...


class BlockDrafter:
    """DFlash: one pass over [anchor, mask × (W - 1)] proposes all K tokens at once.

    Args:
        full_len: K that the block is made for, of which the first `draft_len` drafts are proposed;
            None: the same. The block, and with it where a row's drafting ends, is one for all
            rounds of an engine.
        piece: as in `ArenaRows`.
        table: pages of the slots, where the context lies in the target's pool.
    """

    def __init__(
        self,
        model: DFlashDrafter,
        target: Target,
        draft_len: int,
        piece: int | None,
        table: Int[Array, "n r"] | None = None,
        full_len: int | None = None,
    ):
        self.model = model
        self.target = target
        self.draft_len = draft_len
        self.piece = piece
        self.table = table
        self.layer_ids = model.config.target_layer_ids
        full_len = draft_len if full_len is None else full_len
        self.block_width = model.config.block_width(full_len)
        self.first = self.block_width - full_len

    def propose(
        self,
        arena: ContextArena,
        slots: Int[Array, " b"],
        anchors: Int[Array, " b"],
        draw: RowDraws | None,
    ) -> Proposal:
        config, width = self.model.config, self.block_width
        masks = jnp.full((anchors.shape[0], width - 1), config.mask_token_id, jnp.int32)
        ids = jnp.concatenate([anchors[:, None], masks], axis=1)
        lengths, pages = slot_lengths(arena.lengths, slots), None
        if self.table is not None:
            pages = table_rows(self.table, slots, arena.layers)
        embeddings = self.model.embed(ids, self.target.embedding)
        hidden = self.model.block_hidden_cached(
            embeddings, lengths, context_rows(arena, self.piece, pages=pages)
        )
        # Slot 0 is the anchor and predicts nothing, unless the drafter was trained to.
        drafted = hidden[:, self.first : self.first + self.draft_len]
        vocab_size = self.target.config.vocab_size
        logits = self.model.logits(drafted, self.target.head, vocab_size)
        # A reduced vocabulary narrows what is proposed; what is verified is the target's own.
        draft_ids = self.model.draft_ids
        tokens, log_q = choose_drafts(logits, draft_ids, vocab_size, draw)
        alive = (slots < arena.lengths.shape[0]) & self.follows(arena, slots)
        counts = jnp.where(alive, self.draft_len, 0).astype(jnp.int32)
        return Proposal(tokens, counts, log_q, draft_ids)

    def absorb(
        self,
        arena: ContextArena,
        slots: Int[Array, " b"],
        features: Float[Array, "b t ae"],
        counts: Int[Array, " b"],
    ) -> ContextArena:
        offsets = jnp.arange(features.shape[1], dtype=jnp.int32)[None, :]
        return append_context(
            arena,
            slots,
            lambda starts: self.model.context_kv(features, starts[:, None] + offsets),
            counts,
            table=self.table,
        )

    def follows(self, arena: ContextArena, slots: Int[Array, " b"]) -> Bool[Array, " b"]:
        # A row that stopped drafting keeps its context frozen.
        return can_draft(arena, slots, self.block_width)
