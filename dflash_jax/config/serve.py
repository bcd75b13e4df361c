"""`ServeConfig`, what the user asked for, and `ResolvedConfig`, what the engine reads.

Deciding one from the other is `planning/resolve.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dflash_jax.config.drafter import DrafterConfig
from dflash_jax.config.target import TargetConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
Speculation = Literal["dflash", "suffix", "none"]


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """What the user asked for; `None` = not set. Never mutated: `resolve` makes what is read."""

    max_seq_len: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_draft_len: int | None = None
    speculation: Speculation | None = None
    adaptive: bool = False
    kv_layout: Literal["contiguous", "paged"] = "contiguous"
    context_store: Literal["arena", "pool"] = "arena"
    page_size: int = 32
    attention: Literal["auto", "xla", "pallas", "cudnn"] = "auto"
    draft_attention: Literal["auto", "xla", "pallas"] = "auto"
    allocation_order: Literal["arena_first", "pool_first"] = "arena_first"
    kv_memory_fraction: float = 0.9
    kv_max_tokens: int | None = None
    kv_max_bytes: int | None = None
    device_memory: int | str | None = None
    headroom: Literal["measured", "seed"] = "measured"
    skip_context_budget_check: bool = False
    allow_token_limited: bool = False
    allow_unqualified: bool = False
    prefix_reuse: bool = True
    rounds_per_step: int = 1
    dtype: str = "auto"
    mesh: Any = None
    rope_scaling: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """What the engine reads: every number decided, nothing left to a default.

    `max_draft_len` is K, `verify_width` K + 1 (1 without a drafter) and `block_width` W the slots
    that the drafter evaluates (0 without one). `read_piece` is how many positions of an arena row
    attention reads at a time: a loop over what is filled (CPU), or the whole row at once (None).
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    speculation: Speculation
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_draft_len: int
    block_width: int
    dtype: str
    attention: str
    draft_attention: str
    read_piece: int | None
    mesh: Any

    @property
    def verify_width(self) -> int:
        """Target tokens that one row feeds in a round: the anchor and its K drafts."""
        return self.max_draft_len + 1
