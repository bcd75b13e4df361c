"""The DFlash drafter: a small stack of blocks whose keys and values include the target's features.

Context keys and values are per-layer projections of hidden_norm(fc(features)); the block (anchor +
masks) attends to context and to itself, both ways, and nothing of it is ever stored. Embedding and
head are borrowed from the target, unless the checkpoint brings its own; a reduced draft vocabulary
(`d2t`) has a head of few rows. Source: DFlash (2602.06036) and its published checkpoints.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.arena.rows import ArenaRows, KeyValues
from dflash_jax.config import DrafterConfig
from dflash_jax.models.attention import CachedRows, Part, pass_mask, prefix_mask
from dflash_jax.models.block import Block
from dflash_jax.models.layers import Embedding, Linear, RMSNorm, embed_ids, unembed
from dflash_jax.models.rotary import rotations


class DFlashDrafter(nnx.Module):
    """A block-diffusion drafter with the tensor names of the published layouts.

    `d2t` int32 [c] is there with a reduced vocabulary: offsets, draft id i stands for the target's
    id i + d2t[i]. `embed_tokens` [v, e] and `lm_head` [c or v, e] are there where they are its own.
    """

    def __init__(self, config: DrafterConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        taps = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = Linear(taps, config.hidden_size, dtype=dtype, rngs=rngs)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List(
            Block(
                size=config.hidden_size,
                inner=config.intermediate_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                qkv_bias=config.attention_bias,
                o_bias=config.attention_bias,
                mlp_bias=False,
                qk_norm=True,
                eps=config.rms_norm_eps,
                dtype=dtype,
                rngs=rngs,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        size, rows = config.hidden_size, config.draft_vocab_size
        if config.has_embed_tokens:
            self.embed_tokens = Embedding(config.vocab_size, size, dtype=dtype, rngs=rngs)
        if config.has_lm_head:
            self.lm_head = Embedding(rows or config.vocab_size, size, dtype=dtype, rngs=rngs)
        if rows is not None:
            self.d2t = nnx.Variable(jnp.zeros((rows,), jnp.int32))

    def embed(self, ids: Int[Array, "b w"], borrowed: Float[Array, "r e"]) -> Float[Array, "b w e"]:
        """Embeddings of a block by its own table, or by the target's."""
        if not self.config.has_embed_tokens:
            return embed_ids(borrowed, ids)
        # The target may have padded ids beyond this table; what is drafted after one is no matter.
        return self.embed_tokens.weight[...].at[ids].get(mode="clip")

    def logits(
        self, hidden: Float[Array, "b t e"], borrowed: Float[Array, "r e"], vocab_size: int
    ) -> Float[Array, "b t c"]:
        """Float32 logits over the draft vocabulary: c of its ids, or the target's `vocab_size`.

        Args:
            borrowed: the target's head; not read where the drafter has its own.
        """
        ids = self.draft_ids
        if self.config.has_lm_head:
            rows = min(vocab_size, self.config.vocab_size) if ids is None else ids.shape[0]
            return unembed(hidden, self.lm_head.weight[...], rows)
        if ids is None:
            return unembed(hidden, borrowed, vocab_size)
        # `weights/vocabulary.py` gathers these rows once; without it they are gathered each time.
        few = borrowed.at[ids].get(mode="promise_in_bounds")
        return unembed(hidden, few, ids.shape[0])

    @property
    def draft_ids(self) -> Int[Array, " c"] | None:
        """The target's id of each draft id; None: they are the same, the vocabulary is not reduced.

        Worked example: d2t [0, 1, 1, 5] stands for the ids [0, 2, 3, 8].
        """
        if self.config.draft_vocab_size is None:
            return None
        offsets = self.d2t[...]
        return offsets + jnp.arange(offsets.shape[0], dtype=jnp.int32)

    def context_kv(
        self, features: Float[Array, "b t ae"], positions: Int[Array, "b t"]
    ) -> tuple[KeyValues, ...]:
        """Context keys and values of every layer for tokens at slot-local `positions`.

        K and V are projections of hidden_norm(fc(features)) by this layer's own k/v weights; keys
        are normed and rotated; no input norm is applied (dflash-v1 convention).
        """
        h = self.hidden_norm(self.fc(features))
        cos, sin = rotations(self.config.rope, self.config.head_dim, positions)
        return tuple(layer.self_attn.key_values(h, cos, sin) for layer in self.layers)

    def block_hidden(
        self,
        embeddings: Float[Array, "b w e"],
        positions: Int[Array, "b w"],
        context: Sequence[KeyValues],
        context_masks: Sequence[Bool[Array, "#b #w s"]],
        block_masks: Sequence[Bool[Array, "#b w w"]],
    ) -> Float[Array, "b w e"]:
        """Hidden states of block slots after the final norm; masks are one a layer."""
        parts = [
            Part(rows.keys, rows.values, seen)
            for rows, seen in zip(context, context_masks, strict=True)
        ]
        return self._stack(embeddings, positions, parts, block_masks)

    def block_hidden_cached(
        self,
        embeddings: Float[Array, "b w e"],
        lengths: Int[Array, " b"],
        context: ArenaRows,
    ) -> Float[Array, "b w e"]:
        """Hidden states of blocks that follow `lengths` rows of a context arena, read in place."""
        width = embeddings.shape[1]
        positions = lengths[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        parts = [
            CachedRows(
                rows.keys,
                rows.values,
                lengths,
                positions,
                context.slot,
                window,
                context.piece,
                context.ring,
                context.pages,
            )
            for rows, window in zip(context.layers, self.config.windows, strict=True)
        ]
        return self._stack(embeddings, positions, parts, self.block_masks(width))

    def _stack(
        self,
        x: Float[Array, "b w e"],
        positions: Int[Array, "b w"],
        context: Sequence[Part | CachedRows],
        block_masks: Sequence[Bool[Array, "#b w w"]],
    ) -> Float[Array, "b w e"]:
        cos, sin = rotations(self.config.rope, self.config.head_dim, positions)
        for layer, part, among in zip(self.layers, context, block_masks, strict=True):
            x, _ = layer(x, cos, sin, part, among)
        return self.norm(x)

    def block_masks(self, width: int) -> list[Bool[Array, "1 w w"]]:
        """Which slots of a block see each other, for every layer."""
        rules = zip(self.config.causal, self.config.windows, strict=True)
        return [pass_mask(width, causal=causal, window=window) for causal, window in rules]

    def forward(
        self,
        features: Float[Array, "*b s ae"],
        block_ids: Int[Array, "*b w"],
        positions: Int[Array, "*b w"],
        embed: Float[Array, "r e"],
        head: Float[Array, "r e"],
    ) -> tuple[Float[Array, "*b w e"], Float[Array, "*b w c"]]:
        """Hidden states and logits over the draft vocabulary of one block after s tokens.

        Args:
            features: tapped target features of the s tokens right before the block.
            block_ids: anchor and masks.
            positions: positions of the block's slots; the context sits right before the first.
            embed, head: the target's tables [v, e]; not read where the drafter has its own.

        Slot 0 is the anchor: its logits are unused unless the drafter predicts from the anchor.
        """
        single = features.ndim == 2
        rows = features[None] if single else features
        ids = jnp.asarray(block_ids, jnp.int32).reshape(rows.shape[0], -1)
        slots = jnp.asarray(positions, jnp.int32).reshape(rows.shape[0], -1)
        size = rows.shape[1]
        context_positions = slots[:, :1] - size + jnp.arange(size, dtype=jnp.int32)[None, :]
        # Masks count from the context's first row, whatever its absolute position.
        lengths = jnp.full((rows.shape[0],), size, jnp.int32)
        local = slots - slots[:, :1] + size
        seen = [prefix_mask(lengths, size, local, window) for window in self.config.windows]
        among = self.block_masks(slots.shape[1])
        context = self.context_kv(rows, context_positions)
        hidden = self.block_hidden(self.embed(ids, embed), slots, context, seen, among)
        logits = self.logits(hidden, head, self.config.vocab_size)
        return (hidden[0], logits[0]) if single else (hidden, logits)


def build_drafter(config: DrafterConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> DFlashDrafter:
    """A drafter with random weights; under `nnx.eval_shape` only its shapes."""
    return DFlashDrafter(config, dtype=dtype, rngs=rngs)
