"""What one device holds: every formula of the package put together, and named row by row.

The formulas themselves stand beside what they size (`arena/sizes.py`, `models/sizes.py`,
`weights/sizes.py`); the engine allocates by the same ones. Bytes are of one device: heads and
vocabulary are divided by the shards that are really used.
"""

from typing import Any, NamedTuple

from dflash_jax.arena.sizes import (
    context_arena_bytes,
    drafter_capacity,
    kv_arena_bytes,
    kv_capacity,
    row_pages,
    token_state_bytes,
)
from dflash_jax.config import DrafterConfig, ResolvedConfig, TargetConfig
from dflash_jax.models.sizes import features_bytes, logits_bytes
from dflash_jax.planning.buckets import chunk_buckets

__all__ = [
    "DTYPE_BYTES",
    "Footprint",
    "Weights",
    "context_arena_bytes",
    "features_bytes",
    "footprint",
    "formulas",
    "kv_arena_bytes",
    "logits_bytes",
    "page_bytes",
    "token_state_bytes",
]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Weights(NamedTuple):
    """Bytes of both models' parameters on one device; 0 where there is no model."""

    target: int
    drafter: int


class Footprint(NamedTuple):
    """Bytes of one device by what they are for.

    Weights, arenas and token state last as long as the engine; features and logits are the least
    that its widest pass needs besides. A pool (`kv_layout="paged"`) is not in here: it takes what
    is left, see `pool.py`.
    """

    target_weights: int
    drafter_weights: int
    kv_arena: int
    context_arena: int
    features: int
    logits: int
    token_state: int

    @property
    def resident(self) -> int:
        """What stays allocated."""
        return self.total - self.buffers

    @property
    def buffers(self) -> int:
        """What a pass needs for itself, at the least."""
        return self.features + self.logits

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def footprint(config: ResolvedConfig, weights: Weights, *, shards: int = 1) -> Footprint:
    """The bytes of a configuration.

    Args:
        config: with a concrete dtype, "auto" counts as bfloat16 (what a GPU serves).
        shards: devices that KV heads are divided over.
    """
    size = dtype_bytes(config)
    taps = 0 if config.drafter is None else len(config.drafter.target_layer_ids)
    return Footprint(
        target_weights=weights.target,
        drafter_weights=weights.drafter,
        kv_arena=0 if config.kv_layout == "paged" else _kv_arena(config, shards),
        context_arena=_context_arena(config, shards),
        features=features_bytes(widest_pass(config), taps, config.target.hidden_size, size),
        logits=logits_bytes(logits_rows(config), config.target.vocab_size),
        token_state=token_state_bytes(
            config.max_batch_size,
            config.target.vocab_size,
            context=config.drafter is not None,
            row_pages=row_pages(config) if config.kv_layout == "paged" else 0,
        ),
    )


def dtype_bytes(config: ResolvedConfig) -> int:
    """Bytes of one number of weights and arenas."""
    return DTYPE_BYTES.get(config.dtype, 2)


def widest_pass(config: ResolvedConfig) -> int:
    """Tokens of the widest pass: a prefill chunk or a round of all rows that decode in a step."""
    chunk = chunk_buckets(config.max_seq_len, config.max_num_tokens)[-1]
    return max(chunk, logits_rows(config))


def logits_rows(config: ResolvedConfig) -> int:
    """Rows of the widest logits: every verified token of a round; a chunk asks for one."""
    return max(config.rows_per_step * config.verify_width, 1)


def page_bytes(config: ResolvedConfig, *, shards: int = 1) -> int:
    """Bytes of one page: target K/V, and the drafter's context where the pool holds that too."""
    one_page = {
        "max_batch_size": 1,
        "capacity": config.page_size,
        "dtype_bytes": dtype_bytes(config),
        "shards": shards,
    }
    target = kv_arena_bytes(**_heads(config.target), **one_page)
    if config.drafter is None or config.context_store != "pool":
        return target
    return target + kv_arena_bytes(**_heads(config.drafter), **one_page)


def formulas(config: ResolvedConfig, weights: Weights, *, shards: int = 1) -> dict[str, str]:
    """How each number of `footprint` comes about, by field."""
    size = dtype_bytes(config)
    target, drafter = config.target, config.drafter
    taps = 0 if drafter is None else len(drafter.target_layer_ids)
    text = {
        "target_weights": f"{weights.target // size:,} parameters x {size} B",
        "drafter_weights": "no drafter",
        "kv_arena": _arena_text(config, target, _kv_positions(config)),
        "context_arena": "no drafter",
        "features": f"{widest_pass(config):,} tokens x {taps} taps x {target.hidden_size} x "
        f"{size} B",
        "logits": f"{logits_rows(config):,} rows x {target.vocab_size:,} x 4 B",
        "token_state": f"{config.max_batch_size} rows, options and counts of "
        f"{target.vocab_size:,} ids",
    }
    if drafter is not None:
        text["drafter_weights"] = f"{weights.drafter // size:,} parameters x {size} B"
        text["context_arena"] = _arena_text(config, drafter, context_positions(config))
    if shards > 1:
        over = f" over {shards} devices"
        text |= {name: text[name] + over for name in ("kv_arena", "context_arena")}
    return text


def context_positions(config: ResolvedConfig) -> int:
    """Positions of one row of the private context arena, page-rounded where its layout is."""
    capacity = drafter_capacity(config)
    if config.draft_attention != "pallas":
        return capacity
    return -(-capacity // config.page_size) * config.page_size


def _kv_positions(config: ResolvedConfig) -> int:
    return kv_capacity(config.max_seq_len, config.verify_width)


def _kv_arena(config: ResolvedConfig, shards: int) -> int:
    return kv_arena_bytes(
        **_heads(config.target),
        max_batch_size=config.max_batch_size,
        capacity=_kv_positions(config),
        dtype_bytes=dtype_bytes(config),
        shards=shards,
    )


def _context_arena(config: ResolvedConfig, shards: int) -> int:
    if config.drafter is None or config.context_store == "pool":
        return 0
    return context_arena_bytes(
        **_heads(config.drafter),
        max_batch_size=config.max_batch_size,
        # The positions already hold the block and the rounding.
        max_context=context_positions(config),
        block_width=0,
        dtype_bytes=dtype_bytes(config),
        shards=shards,
        scratch_rows=0,
    )


def _heads(model: TargetConfig | DrafterConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_hidden_layers,
        "num_kv_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
    }


def _arena_text(config: ResolvedConfig, model: TargetConfig | DrafterConfig, capacity: int) -> str:
    return (
        f"{config.max_batch_size} rows x {capacity:,} positions x {model.num_hidden_layers} layers "
        f"x 2 x {model.num_key_value_heads} heads x {model.head_dim} x {dtype_bytes(config)} B"
    )
