"""`ServeConfig`, what the user asked for, and `ResolvedConfig`, what the engine reads.

Each option says what it does in its `help`, from which `docs/options.md` is made. Deciding one
record from the other is `planning/resolve.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dflash_jax.config.drafter import DrafterConfig
from dflash_jax.config.target import TargetConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
Speculation = Literal["dflash", "suffix", "none"]
Attention = Literal["auto", "xla", "pallas", "cudnn"]
DraftAttention = Literal["auto", "xla", "pallas"]


def _option(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """What the user asked for; `None` = not set. Never mutated: `resolve` makes what is read."""

    max_seq_len: int | None = _option(
        None,
        "Served length: prompt and answer of one request, in tokens. Both arenas are sized by it. "
        "Not set: the target's positions, at most 4096.",
    )
    max_batch_size: int | None = _option(
        None,
        "Requests that decode at the same time: rows of the arenas. Not set: at most 16, as many "
        "as the token budget and the device's memory hold.",
    )
    max_num_tokens: int | None = _option(
        None,
        "Tokens that one pass of the target takes, over all rows. A decoding row feeds 1 + K. Not "
        "set: 8192.",
    )
    max_draft_len: int | None = _option(
        None,
        "K, the draft tokens of a round. Not set: the width the drafter was trained for, or 7 for "
        "suffix.",
    )
    speculation: Speculation | None = _option(
        None,
        "Drafting method. Not set: dflash with a drafter, else none. suffix needs no drafter.",
    )
    adaptive: bool = _option(
        False,
        "Verify all drafts of a round, the first half of them or none, whichever measures cheapest "
        "per token at the number of rows that decode; said in the log and in the stats.",
    )
    kv_layout: Literal["contiguous", "paged"] = _option(
        "contiguous", "One arena row a request, or pages of a pool."
    )
    context_store: Literal["arena", "pool"] = _option(
        "arena",
        "Where the drafter's context lies: an arena of its own, or the target's paged pool "
        "(needs kv_layout='paged').",
    )
    page_size: int = _option(32, "Tokens of a page, where a layout has pages.")
    attention: Attention = _option("auto", "Attention of the target. auto is xla.")
    draft_attention: DraftAttention = _option("auto", "Attention of the drafter. auto is xla.")
    allocation_order: Literal["arena_first", "pool_first"] = _option(
        "arena_first",
        "With kv_layout='paged': whether the context arena or the pool is allocated first.",
    )
    kv_memory_fraction: float = _option(
        0.9, "With kv_layout='paged': share of the free memory that the pool takes."
    )
    kv_max_tokens: int | None = _option(
        None, "With kv_layout='paged': tokens of the pool; no budget is derived then."
    )
    kv_max_bytes: int | None = _option(
        None, "With kv_layout='paged': most bytes of the pool; the smaller of it and the share."
    )
    device_memory: int | str | None = _option(
        None,
        "Bytes that XLA may allocate on one device, as a number or like '80GiB' or '80GB'. Not "
        "set: asked of the device.",
    )
    headroom: Literal["measured", "seed"] = _option(
        "measured",
        "measured: a plan without the reserve is decided by the compiled programs. seed: overhead "
        "4 GiB and reserve 6 GiB (or factor 0.70) are kept strictly.",
    )
    skip_context_budget_check: bool = _option(
        False, "Leave out the context budget's rule; the total rule and the token rule stay."
    )
    allow_token_limited: bool = _option(
        False,
        "Accept more rows than max_num_tokens lets decode in one step; they take turns.",
    )
    allow_unqualified: bool = _option(
        False, "Admit a combination that is not qualified, with a warning."
    )
    prefix_reuse: bool = _option(
        True, "Take over the longest prefix that a slot still holds, the drafter's context with it."
    )
    rounds_per_step: int = _option(
        1,
        "Rounds of one dispatch: fewer trips to the host, and requests are admitted and tokens "
        "handed out less often.",
    )
    dtype: str = _option(
        "auto", "Of weights and arenas. auto: float32 on a CPU, bfloat16 elsewhere."
    )
    mesh: Any = _option(
        None, "A `jax.sharding.Mesh` with an axis 'tensor' to divide the model over."
    )
    rope_scaling: Mapping[str, Any] | None = _option(
        None, "Replaces the target's rope scaling, to serve beyond its positions."
    )


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """What the engine reads: every number decided, nothing left to a default.

    `max_draft_len` is K, `verify_width` K + 1 (1 without drafting) and `block_width` W the slots
    that the drafter evaluates (0 without one). `read_piece` is how many positions of an arena row
    attention reads at a time: a loop over what is filled (CPU), or the whole row at once (None).
    `unqualified` says why the combination is not qualified where it was admitted all the same.
    `num_pages` is the size of the pool, 0 where there is none; the memory plan decides it.
    `adaptive`, `prefix_reuse` and `rounds_per_step` are as the user asked.
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
    kv_layout: Literal["contiguous", "paged"]
    context_store: Literal["arena", "pool"]
    page_size: int
    num_pages: int
    unqualified: str | None
    adaptive: bool
    prefix_reuse: bool
    rounds_per_step: int
    attention: str
    draft_attention: str
    read_piece: int | None
    mesh: Any

    @property
    def verify_width(self) -> int:
        """Target tokens that one row feeds in a round: the anchor and its K drafts."""
        return self.max_draft_len + 1

    @property
    def narrow_draft_len(self) -> int:
        """Drafts that a narrow round verifies: half of K with `adaptive`; 0: there is none."""
        return self.max_draft_len // 2 if self.adaptive else 0

    @property
    def rows_per_step(self) -> int:
        """Rows that decode in one step: all, or as many as the token budget holds."""
        return min(self.max_batch_size, self.max_num_tokens // self.verify_width)

    def with_pages(self, num_pages: int) -> "ResolvedConfig":
        """The same with another size of the pool."""
        return dataclasses.replace(self, num_pages=num_pages)

    def with_batch_size(self, max_batch_size: int) -> "ResolvedConfig":
        """The same for another number of rows."""
        return dataclasses.replace(self, max_batch_size=max_batch_size)

    def with_seq_len(self, max_seq_len: int) -> "ResolvedConfig":
        """The same for another served length."""
        return dataclasses.replace(self, max_seq_len=max_seq_len)
