"""The target model: Llama, Qwen2 and Qwen3 as one stack of `Block`s.

The three families differ in four switches that `TargetConfig` reads (biases, head norms, tied
head), so they share one class. `run` is the pass that programs compile; `forward` is the model
alone, without an engine. A feature of block id k is the residual stream *after* block k.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dflash_jax.arena.rows import ArenaRows, KeyValues
from dflash_jax.config import TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.models.attention import CachedRows, pass_mask
from dflash_jax.models.block import Block
from dflash_jax.models.layers import Embedding, RMSNorm, embed_ids, unembed
from dflash_jax.models.rotary import rotations


class Target(nnx.Module):
    """A decoder-only language model that also hands out its tapped features."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            Block(
                size=config.hidden_size,
                inner=config.intermediate_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                qkv_bias=config.qkv_bias,
                o_bias=config.o_bias,
                mlp_bias=config.mlp_bias,
                qk_norm=config.qk_norm,
                eps=config.rms_norm_eps,
                dtype=dtype,
                rngs=rngs,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)

    @property
    def embedding(self) -> Float[Array, "r e"]:
        """The input table, as stored (padding rows included)."""
        return self.embed_tokens.weight[...]

    @property
    def head(self) -> Float[Array, "r e"]:
        """The output table; the same array as `embedding` when tied."""
        tied = self.config.tie_word_embeddings
        return self.embedding if tied else self.lm_head.weight[...]

    def run(
        self,
        ids: Int[Array, "b t"],
        lengths: Int[Array, " b"],
        cache: ArenaRows | None,
        layer_ids: Sequence[int],
    ) -> tuple[Float[Array, "b t e"], Float[Array, "b t ae"], tuple[KeyValues, ...]]:
        """One causal pass of t tokens that follow `lengths` cached ones (none without a cache).

        Returns the hidden states after the final norm, the features of `layer_ids` concatenated
        in that order, and the new keys and values of every layer. Nothing is written.
        """
        width = ids.shape[1]
        positions = lengths[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        cos, sin = rotations(self.config.rope, self.config.head_dim, positions)
        x = embed_ids(self.embedding, ids)
        taps, new = {}, []
        for index, (layer, window) in enumerate(zip(self.layers, self.config.windows, strict=True)):
            cached = None
            if cache is not None:
                keys, values = cache.layers[index]
                cached = CachedRows(
                    keys,
                    values,
                    lengths,
                    positions,
                    cache.slot,
                    window,
                    cache.piece,
                    pages=cache.pages,
                )
            x, rows = layer(x, cos, sin, cached, pass_mask(width, causal=True, window=window))
            new.append(rows)
            if index in layer_ids:
                taps[index] = x
        features = (
            jnp.concatenate([taps[i] for i in layer_ids], axis=-1) if layer_ids else x[:, :, :0]
        )
        return self.norm(x), features, tuple(new)

    def logits(self, hidden: Float[Array, "b t e"]) -> Float[Array, "b t v"]:
        """Float32 logits of normed hidden states over the real vocabulary."""
        return unembed(hidden, self.head, self.config.vocab_size)

    def forward(
        self, ids: Int[Array, "*b t"], layer_ids: Sequence[int] | None = None
    ) -> tuple[Float[Array, "*b t v"], Float[Array, "*b t ae"]]:
        """Logits and features of a whole sequence (or a batch of equal length), no cache.

        Args:
            ids: int32 [t] or [b, t].
            layer_ids: tapped blocks, in the order of concatenation; every block when None.

        Raises:
            ConfigError: a layer id that the target does not have.
        """
        depth = self.config.num_hidden_layers
        taps = tuple(range(depth)) if layer_ids is None else tuple(layer_ids)
        if any(not 0 <= tap < depth for tap in taps):
            raise ConfigError(f"layer_ids {list(taps)}: this target's blocks are 0 to {depth - 1}")
        batch = jnp.asarray(ids, jnp.int32).reshape(-1, ids.shape[-1])
        lengths = jnp.zeros((batch.shape[0],), jnp.int32)
        hidden, features, _ = self.run(batch, lengths, None, taps)
        logits = self.logits(hidden)
        return (logits, features) if ids.ndim == 2 else (logits[0], features[0])


def build_target(config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Target:
    """A target with random weights; under `nnx.eval_shape` only its shapes."""
    return Target(config, dtype=dtype, rngs=rngs)
