"""One pre-norm transformer block, shared by targets and drafter.

attention(norm(x)) + x, then mlp(norm(x)) + x. What the queries see is handed in.
"""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dflash_jax.arena.rows import KeyValues
from dflash_jax.models.attention import Attention, CachedRows, Part, attend
from dflash_jax.models.layers import MLP, RMSNorm


class Block(nnx.Module):
    """A decoder block with the tensor names of Llama and Qwen."""

    def __init__(
        self,
        *,
        size: int,
        inner: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        mlp_bias: bool,
        qk_norm: bool,
        eps: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.self_attn = Attention(
            size=size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            eps=eps,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.mlp = MLP(size, inner, bias=mlp_bias, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t e"],
        cos: Float[Array, "b t d2"],
        sin: Float[Array, "b t d2"],
        cached: Part | CachedRows | None,
        mask: Array,
    ) -> tuple[Float[Array, "b t e"], KeyValues]:
        """The block's output and the new keys and values of this pass.

        `mask` [#b, t, t] says which tokens of the pass see each other.
        """
        normed = self.input_layernorm(x)
        new = self.self_attn.key_values(normed, cos, sin)
        q = self.self_attn.queries(normed, cos, sin)
        own = Part(new.keys, new.values, mask)
        x = x + self.self_attn.output(attend(q, own, cached))
        return x + self.mlp(self.post_attention_layernorm(x)), new
