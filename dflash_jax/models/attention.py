"""Grouped-query attention over keys that come in parts, and the masks of every pass.

One function, `attend`, serves prefill, plain decoding, verify and the drafter's block: queries see
a cached part (arena rows) and the new part (their own pass), which are never concatenated, so the
arena is read where it lies and block keys are never stored. Writing rows is `arena/`'s business.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.layers import Linear, RMSNorm
from dflash_jax.models.rotary import rotate


class KeyValues(NamedTuple):
    """Keys and values of one layer, [b, k, s, d] each; keys are normed and rotated."""

    keys: Float[Array, "b k s d"]
    values: Float[Array, "b k s d"]


class Part(NamedTuple):
    """Keys, values and which of them each query sees; a mask axis of 1 broadcasts."""

    keys: Float[Array, "b k s d"]
    values: Float[Array, "b k s d"]
    mask: Bool[Array, "#b #t s"]


def prefix_mask(
    lengths: Int[Array, " b"], capacity: int, positions: Int[Array, "b t"], window: int | None
) -> Bool[Array, "b #t s"]:
    """Cached rows 0 … length - 1; under a window W only those with q - j < W (self counted)."""
    rows = jnp.arange(capacity, dtype=jnp.int32)[None, None, :]
    valid = rows < lengths[:, None, None]
    if window is None:
        return valid
    return valid & (positions[:, :, None] - rows < window)


def pass_mask(width: int, *, causal: bool, window: int | None) -> Bool[Array, "1 t t"]:
    """Tokens of one pass among themselves: itself and earlier (causal), or both ways."""
    query = jnp.arange(width, dtype=jnp.int32)[:, None]
    key = jnp.arange(width, dtype=jnp.int32)[None, :]
    mask = key <= query if causal else jnp.ones((width, width), bool)
    if window is not None:
        mask = mask & (query - key < window) & (key - query < window)
    return mask[None]


def attend(q: Float[Array, "b t h d"], parts: Sequence[Part]) -> Float[Array, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v over all parts together; scores and softmax in float32.

    Every query must see at least one key (a pass always sees itself), so that no row is empty.
    """
    b, t, h, d = q.shape
    kv_heads = parts[0].keys.shape[1]
    grouped = q.reshape(b, t, kv_heads, h // kv_heads, d).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(b, kv_heads, -1, d)
    scores = [_scores(grouped, part, t) for part in parts]
    top = jnp.max(jnp.stack([jnp.max(s, axis=-1) for s in scores]), axis=0)[..., None]
    weights = [jnp.exp(s - top) for s in scores]
    total = sum(jnp.sum(w, axis=-1) for w in weights)
    mixed = sum(
        jnp.einsum(
            "b k q s, b k s d -> b k q d",
            w.astype(part.values.dtype),
            part.values,
            preferred_element_type=jnp.float32,
        )
        for w, part in zip(weights, parts, strict=True)
    )
    out = (mixed / total[..., None]).reshape(b, kv_heads, h // kv_heads, t, d)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, d).astype(q.dtype)


def _scores(
    grouped: Float[Array, "b k q d"], part: Part, width: int
) -> Float[Array, "b k q s"]:
    b, k, q, d = grouped.shape
    scores = jnp.einsum(
        "b k q d, b k s d -> b k q s", grouped, part.keys, preferred_element_type=jnp.float32
    ) * jnp.float32(d**-0.5)
    per_query = scores.reshape(b, k, q // width, width, -1)
    masked = jnp.where(part.mask[:, None, None], per_query, -jnp.inf)
    return masked.reshape(b, k, q, -1)


class Attention(nnx.Module):
    """Projections of one layer; `q_norm`/`k_norm` (per head, before rotation) where asked for."""

    def __init__(
        self,
        *,
        size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
        eps: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        def linear(n_in: int, n_out: int, bias: bool) -> Linear:
            return Linear(n_in, n_out, bias=bias, dtype=dtype, rngs=rngs)

        self.q_proj = linear(size, heads * head_dim, qkv_bias)
        self.k_proj = linear(size, kv_heads * head_dim, qkv_bias)
        self.v_proj = linear(size, kv_heads * head_dim, qkv_bias)
        self.o_proj = linear(heads * head_dim, size, o_bias)
        self.q_norm = RMSNorm(head_dim, eps, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, dtype=dtype) if qk_norm else None
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def queries(
        self, x: Float[Array, "b t e"], cos: Float[Array, "b t d2"], sin: Float[Array, "b t d2"]
    ) -> Float[Array, "b t h d"]:
        """Normed and rotated queries."""
        q = self.q_proj(x).reshape(*x.shape[:2], self.heads, self.head_dim)
        return rotate(q if self.q_norm is None else self.q_norm(q), cos, sin)

    def key_values(
        self, x: Float[Array, "b t e"], cos: Float[Array, "b t d2"], sin: Float[Array, "b t d2"]
    ) -> KeyValues:
        """Normed and rotated keys, plain values, in arena layout [b, k, t, d]."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        k, v = self.k_proj(x).reshape(shape), self.v_proj(x).reshape(shape)
        k = rotate(k if self.k_norm is None else self.k_norm(k), cos, sin)
        return KeyValues(jax.numpy.swapaxes(k, 1, 2), jax.numpy.swapaxes(v, 1, 2))

    def output(self, mixed: Float[Array, "b t h d"]) -> Float[Array, "b t e"]:
        """Joins the heads."""
        return self.o_proj(mixed.reshape(*mixed.shape[:2], -1))
