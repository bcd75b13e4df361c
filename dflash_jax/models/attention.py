"""Grouped-query attention over keys that come in parts, and the masks of every pass.

One function, `attend`, serves prefill, plain decoding, verify and the drafter's block: queries see
a cached part (arena rows) and the new part (their own pass), which are never concatenated, so the
arena is read where it lies and block keys are never stored. Writing rows is `arena/`'s business.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.arena.paged import read_pages
from dflash_jax.arena.rows import KeyValues, ring_positions
from dflash_jax.models.layers import Linear, RMSNorm
from dflash_jax.models.rotary import rotate


class Part(NamedTuple):
    """Keys, values and which of them each query sees; a mask axis of 1 broadcasts."""

    keys: Float[Array, "b k s d"]
    values: Float[Array, "b k s d"]
    mask: Bool[Array, "#b #t s"]


class CachedRows(NamedTuple):
    """Rows of an arena, read in place: b consecutive slots, `lengths` positions of each.

    Attributes:
        keys, values: the whole arrays of one layer [n, k, s, d].
        lengths: positions that count, int32 [b].
        positions: of the queries, int32 [b, t]; read only under a window.
        slot: first of the b slots, int32 []; None = 0.
        window: keys at most this far back, the query's own position counted; None = all.
        piece: positions read at a time; None = the whole row at once.
        ring: position p lies in row p mod s; only the last s positions are there.
        pages: of each row, int32 [b, r], where keys and values are a pool [p, k, s, d]; then there
            is no `slot` and no ring.
    """

    keys: Float[Array, "n k s d"]
    values: Float[Array, "n k s d"]
    lengths: Int[Array, " b"]
    positions: Int[Array, "b t"]
    slot: Int[Array, ""] | None
    window: int | None
    piece: int | None
    ring: bool = False
    pages: Int[Array, "b r"] | None = None


def prefix_mask(
    lengths: Int[Array, " b"], capacity: int, positions: Int[Array, "b t"], window: int | None
) -> Bool[Array, "#b #t s"]:
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


class Softmax(NamedTuple):
    """A softmax-weighted sum in progress: running maximum, total weight and weighted values."""

    top: Float[Array, "b k q 1"]
    total: Float[Array, "b k q 1"]
    mixed: Float[Array, "b k q d"]


def attend(
    q: Float[Array, "b t h d"], own: Part, cached: Part | CachedRows | None
) -> Float[Array, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v over a pass's own keys and the cached ones; float32 inside.

    Every query must see at least one key of its own pass (itself), so that no row is empty.
    """
    b, t, h, d = q.shape
    kv_heads = own.keys.shape[1]
    grouped = q.reshape(b, t, kv_heads, h // kv_heads, d).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(b, kv_heads, -1, d)
    scores = _scores(grouped, own.keys, own.mask)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    state = Softmax(top, jnp.sum(weights, axis=-1, keepdims=True), _mix(weights, own.values))
    if isinstance(cached, CachedRows):
        fold = _fold_rows if cached.pages is None else _fold_pages
        state = fold(state, grouped, cached)
    elif cached is not None:
        state = _fold(state, grouped, cached.keys, cached.values, cached.mask)
    out = (state.mixed / state.total).reshape(b, kv_heads, h // kv_heads, t, d)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, d).astype(q.dtype)


def _fold_rows(state: Softmax, grouped: Float[Array, "b k q d"], cached: CachedRows) -> Softmax:
    """Reads as many pieces of the arena as the longest row needs, each where it lies.

    Worked example: capacity 10, piece 4, length 9 -> pieces start at 0, 4 and min(8, 10 - 4) = 6;
    the last masks rows below 8, which the second has counted.
    """
    capacity = cached.keys.shape[2]
    piece = min(cached.piece or capacity, capacity)

    def step(index: Array, state: Softmax) -> Softmax:
        first = jnp.minimum(index * piece, capacity - piece)
        rows = first + jnp.arange(piece, dtype=jnp.int32)
        mask = (rows >= index * piece)[None, None, :] & _seen(cached, rows)
        keys, values = (_read(array, cached, first, piece) for array in cached[:2])
        return _fold(state, grouped, keys, values, mask)

    if piece == capacity:
        return step(jnp.int32(0), state)
    filled = jnp.max(cached.lengths)
    if cached.ring:
        filled = jnp.minimum(filled, capacity)
    return jax.lax.fori_loop(0, (filled + piece - 1) // piece, step, state)


def _fold_pages(state: Softmax, grouped: Float[Array, "b k q d"], cached: CachedRows) -> Softmax:
    """Gathers as many pages as the longest row needs, some at a time; never one beyond the table.

    Worked example: 5 pages of 4, piece 8, length 9 -> pages 0, 1 and then 2, 3; with length 17 also
    4 and the page beyond the pool, which is zeros and masked.
    """
    assert cached.pages is not None
    # Pages are known before the pass: without a tie to this layer the compiler gathers those of
    # all layers at the start and keeps them all (a total is never below 0; a barrier is dropped).
    table = cached.pages + (state.total[0, 0, 0, 0] < 0).astype(jnp.int32)
    num_pages, _, page_size, _ = cached.keys.shape
    listed = table.shape[1]
    count = listed if cached.piece is None else min(max(cached.piece // page_size, 1), listed)
    piece = count * page_size

    def step(index: Array, state: Softmax) -> Softmax:
        first = index * count + jnp.arange(count, dtype=jnp.int32)
        pages = table.at[:, first].get(mode="fill", fill_value=num_pages)
        rows = index * piece + jnp.arange(piece, dtype=jnp.int32)
        keys, values = (read_pages(array, pages) for array in cached[:2])
        return _fold(state, grouped, keys, values, _seen(cached, rows))

    if count == listed:
        return step(jnp.int32(0), state)
    pieces = (jnp.max(cached.lengths) + piece - 1) // piece
    return jax.lax.fori_loop(0, pieces, step, state)


def _seen(cached: CachedRows, rows: Int[Array, " p"]) -> Bool[Array, "#b #t p"]:
    """Which rows each query sees: those that count and, under a window, are near enough."""
    if cached.ring:
        places = ring_positions(rows, cached.lengths, cached.keys.shape[2])[:, None, :]
        valid = places >= 0
    else:
        places = rows[None, None, :]
        valid = places < cached.lengths[:, None, None]
    if cached.window is None:
        return valid
    return valid & (cached.positions[:, :, None] - places < cached.window)


def _read(
    array: Float[Array, "n k s d"], cached: CachedRows, first: Int[Array, ""], piece: int
) -> Float[Array, "b k p d"]:
    _, kv_heads, capacity, d = array.shape
    rows = cached.lengths.shape[0]
    if piece == capacity and cached.slot is None:
        return array[:rows]
    slot = jnp.int32(0) if cached.slot is None else cached.slot
    zero = jnp.int32(0)
    return jax.lax.dynamic_slice(array, (slot, zero, first, zero), (rows, kv_heads, piece, d))


def _fold(
    state: Softmax,
    grouped: Float[Array, "b k q d"],
    keys: Float[Array, "b k s d"],
    values: Float[Array, "b k s d"],
    mask: Bool[Array, "#b #t s"],
) -> Softmax:
    """Adds more keys; a wholly masked piece adds weight 0 exactly."""
    scores = _scores(grouped, keys, mask)
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1, keepdims=True))
    kept, weights = jnp.exp(state.top - top), jnp.exp(scores - top)
    total = state.total * kept + jnp.sum(weights, axis=-1, keepdims=True)
    return Softmax(top, total, state.mixed * kept + _mix(weights, values))


def _mix(
    weights: Float[Array, "b k q s"], values: Float[Array, "b k s d"]
) -> Float[Array, "b k q d"]:
    return jnp.einsum(
        "b k q s, b k s d -> b k q d",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )


def _scores(
    grouped: Float[Array, "b k q d"],
    keys: Float[Array, "b k s d"],
    mask: Bool[Array, "#b #t s"],
) -> Float[Array, "b k q s"]:
    """Scaled scores, -inf where masked; queries are t tokens of each of the group's heads."""
    b, k, q, d = grouped.shape
    scores = jnp.einsum(
        "b k q d, b k s d -> b k q s", grouped, keys, preferred_element_type=jnp.float32
    ) * jnp.float32(d**-0.5)
    # A mask axis of 1 broadcasts: then any split of q gives the same result.
    width = mask.shape[1]
    per_query = scores.reshape(b, k, q // width, width, -1)
    return jnp.where(mask[:, None, None], per_query, -jnp.inf).reshape(b, k, q, -1)


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
