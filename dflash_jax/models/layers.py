"""The small Flax NNX layers that target and drafter are composed of.

Linear, RMS norm, embedding table and gated MLP; attribute names mirror the published tensor names,
so that loading is a rename. Attention has its own file (`attention.py`), rotary embedding too.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, scale: float) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * jnp.float32(scale)).astype(dtype)


class Linear(nnx.Module):
    """y = x W + b with W stored [in, out].

    Computed as (W^T x^T)^T on flat rows: on a CPU this reads W at full speed for one row and for a
    block of rows alike (docs/log.md, 2026-12-02); with x left 3-D the product is 6 x slower.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool = False,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        weight = _normal(rngs.params(), (in_size, out_size), dtype, in_size**-0.5)
        self.weight = nnx.Param(weight)
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "b t i"]) -> Float[Array, "b t o"]:
        b, t, size = x.shape
        rows = x.reshape(b * t, size)
        y = jax.lax.dot_general(self.weight[...], rows, (((0,), (1,)), ((), ())))
        y = y.T.reshape(b, t, -1)
        return y if self.bias is None else y + self.bias[...][None, None, :]


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*axes e"]) -> Float[Array, "*axes e"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * scale).astype(x.dtype) * weight


class Embedding(nnx.Module):
    """A table [v, e], read by id; a tied head multiplies by the same array.

    The table may have more rows than the vocabulary (padding); ids never reach those.
    """

    def __init__(self, rows: int, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = nnx.Param(_normal(rngs.params(), (rows, size), dtype, 0.02))


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), the gated MLP of Llama and Qwen."""

    def __init__(
        self, size: int, inner: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.gate_proj = Linear(size, inner, bias=bias, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(size, inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(inner, size, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t e"]) -> Float[Array, "b t e"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def embed_ids(table: Float[Array, "v e"], ids: Int[Array, "b t"]) -> Float[Array, "b t e"]:
    """Rows of the table; the caller has checked the ids, so none is out of range."""
    return table.at[ids].get(mode="promise_in_bounds")


def unembed(
    hidden: Float[Array, "b t e"], head: Float[Array, "r e"], vocab_size: int
) -> Float[Array, "b t v"]:
    """Float32 logits of the `vocab_size` real rows; padding rows of the head are cut off."""
    b, t, size = hidden.shape
    rows = hidden.reshape(b * t, size)
    logits = jax.lax.dot_general(
        rows, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return logits[:, :vocab_size].reshape(b, t, vocab_size)
