"""The reference's validator of the context arena: same order, same numbers, same None semantics.

Low-level rules on plain numbers; `resolve.py` applies them to a configuration. In the reference's
order: no batch, nothing is checked; token budget; trained width; no served length, no budget or no
drafter, no fit; fit. Which drafter owns an arena: "xla" a contiguous one, "pallas" a page-rounded
one; a context in the pool owns none and can only be warned about.
"""

from typing import NamedTuple

from dflash_jax.arena.sizes import context_arena_bytes, drafter_context
from dflash_jax.config import DrafterConfig
from dflash_jax.planning import rules
from dflash_jax.planning.budget import Order
from dflash_jax.planning.report import gib

DEFAULT_BATCH_SIZE = 2048
DEFAULT_NUM_TOKENS = 8192


class Findings(NamedTuple):
    """What refuses and what only warns, in the order of the rules."""

    errors: list[str]
    warnings: list[str]


class ArenaFit(NamedTuple):
    """Whether a private context arena is within its budget.

    Attributes:
        required: bytes of max_batch_size + scratch rows.
        per_row: bytes of one row.
        fitting: rows that the budget holds besides the scratch rows; may be 0.
        formula: how `required` comes about, with the numbers.
    """

    required: int
    budget: int
    per_row: int
    fitting: int
    formula: str

    @property
    def fits(self) -> bool:
        """Equality fits."""
        return self.required <= self.budget


def clamped_batch_size(max_num_tokens: int, max_draft_len: int, default: int) -> int:
    """A batch that nobody set: the default, or what the token budget holds."""
    return min(default, max_num_tokens // (1 + max_draft_len))


def arena_fit(
    drafter: DrafterConfig,
    *,
    budget: int,
    max_batch_size: int,
    max_seq_len: int,
    max_draft_len: int,
    paged: bool = False,
    page_size: int = 32,
    dtype_bytes: int = 2,
    shards: int = 1,
    scratch_rows: int = 1,
) -> ArenaFit:
    """Sizes a private context arena by min(served length, drafter positions) and compares."""
    context = drafter_context(drafter, max_seq_len)
    width = drafter.block_width(max_draft_len)
    rows = max_batch_size + scratch_rows
    required = context_arena_bytes(
        max_batch_size=max_batch_size,
        max_context=context,
        block_width=width,
        num_layers=drafter.num_hidden_layers,
        num_kv_heads=drafter.num_key_value_heads,
        head_dim=drafter.head_dim,
        dtype_bytes=dtype_bytes,
        paged=paged,
        page_size=page_size,
        shards=shards,
        scratch_rows=scratch_rows,
    )
    scratch = f" + {scratch_rows}" if scratch_rows else ""
    heads = -(-drafter.num_key_value_heads // shards)
    formula = (
        f"(max_batch_size{scratch}) rows x K and V x layers x (context + block) x KV heads x "
        f"head_dim x bytes = {rows} x 2 x {drafter.num_hidden_layers} x ({context} + {width}) x "
        f"{heads} x {drafter.head_dim} x {dtype_bytes}"
    )
    formula += f", rounded up to pages of {page_size}" if paged else ""
    per_row = required // rows
    return ArenaFit(required, budget, per_row, budget // per_row - scratch_rows, formula)


def over_budget(fit: ArenaFit) -> str:
    """The two numbers of an arena that is over its budget, and how the first comes about."""
    return (
        f"the context arena needs {gib(fit.required)} and its budget is {gib(fit.budget)} "
        f"({fit.formula})"
    )


def budget_lever(fit: ArenaFit, order: Order) -> str:
    """What makes the arena smaller or its budget larger in this allocation order."""
    if order == "pool_first":
        return "the pool is allocated before it: lower kv_memory_fraction"
    smaller = "max_batch_size or max_seq_len" if fit.fitting >= 1 else "max_seq_len"
    return (
        "it is allocated before the pool is sized, which takes kv_memory_fraction of the "
        f"remainder: lower {smaller}"
    )


def fit_finding(fit: ArenaFit, order: Order) -> str:
    """Why an arena is over its budget and what helps in this allocation order."""
    if fit.fitting >= 1:
        remedy = f"max_batch_size <= {fit.fitting} fits (an estimate: warm-up shares this headroom)"
    else:
        remedy = "no max_batch_size fits: lower max_seq_len or use a smaller drafter"
    return f"{over_budget(fit)}; {remedy}; {budget_lever(fit, order)}"


def pool_finding(fit: ArenaFit, max_seq_len: int) -> str:
    """The context lies in a pool that cannot hold the context of one row."""
    return (
        f"context_store='pool': one row of {max_seq_len} tokens takes {gib(fit.per_row)} of the "
        f"pool and {gib(fit.budget)} is what it may take: no max_batch_size fits, lower "
        "max_seq_len or use a smaller drafter"
    )


def pool_warning(fit: ArenaFit, max_seq_len: int) -> str:
    """The context lies in the pool: what it would need alone, and that requests will queue."""
    rows = fit.budget // fit.per_row
    return (
        f"context_store='pool': the context of all rows would take {gib(fit.required)} of the pool "
        f"and {gib(fit.budget)} is what it may take; it holds {rows} rows of {max_seq_len} tokens, "
        "and if requests are that long, admission queues"
    )


def context_findings(
    *,
    max_batch_size: int | None,
    max_num_tokens: int | None,
    max_seq_len: int | None,
    max_draft_len: int,
    drafter: DrafterConfig | None,
    budget: int | None,
    order: Order = "arena_first",
    context_store: str = "arena",
    draft_attention: str = "xla",
    page_size: int = 32,
    dtype_bytes: int = 2,
    shards: int = 1,
    scratch_rows: int = 1,
    skip_fit: bool = False,
    allow_token_limited: bool = False,
) -> Findings:
    """Runs the reference's checks; None switches off what it would be needed for."""
    found = Findings([], [])
    if max_batch_size is None:
        return found
    if max_num_tokens is not None and not allow_token_limited:
        finding = rules.token_budget(max_batch_size, max_draft_len, max_num_tokens)
        if finding is not None:
            # The later checks would speak of a batch that cannot be.
            found.errors.append(finding)
            return found
    if drafter is not None:
        narrow = rules.draft_len_below_trained(max_draft_len, drafter)
        found.warnings.extend([narrow] if narrow else [])
    if max_seq_len is None or budget is None or drafter is None or skip_fit:
        return found
    fit = arena_fit(
        drafter,
        budget=budget,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        paged=draft_attention == "pallas" or context_store == "pool",
        page_size=page_size,
        dtype_bytes=dtype_bytes,
        shards=shards,
        scratch_rows=scratch_rows,
    )
    if fit.fits:
        return found
    if context_store != "pool":
        found.errors.append(fit_finding(fit, order))
    elif fit.budget < fit.per_row:
        found.errors.append(pool_finding(fit, max_seq_len))
    else:
        found.warnings.append(pool_warning(fit, max_seq_len))
    return found
