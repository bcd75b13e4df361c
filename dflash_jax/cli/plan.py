"""`dflash-jax plan`: what a configuration needs of a device's memory, before anything is loaded.

Works for folders that hold only config files, and with a given memory starts no backend.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_jax.cli import options, output
from dflash_jax.cli.terminal import STDERR, complain
from dflash_jax.errors import MemoryPlanError

if TYPE_CHECKING:
    from dflash_jax import MemoryPlan

REFUSED = 2
_FIRST_LENGTH = 1024


def plan(
    target: options.TargetArgument,
    drafter: options.DrafterOption = None,
    max_seq_len: options.MaxSeqLenOption = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option("--max-batch-size", "-b", help="Requests that decode at the same time."),
    ] = None,
    max_num_tokens: options.MaxNumTokensOption = None,
    max_draft_len: options.MaxDraftLenOption = None,
    speculation: options.SpeculationOption = None,
    device_memory: options.DeviceMemoryOption = None,
    card: Annotated[
        str | None,
        typer.Option("--card", metavar="SIZE", help="The memory of a whole card."),
    ] = None,
    mem_fraction: Annotated[
        float | None,
        typer.Option(
            "--mem-fraction",
            help="The share of the card that XLA may allocate (XLA_CLIENT_MEM_FRACTION).",
        ),
    ] = None,
    dtype: options.DtypeOption = None,
    shards: Annotated[
        int, typer.Option("--shards", min=1, help="Devices to divide the model over.")
    ] = 1,
    headroom: options.HeadroomOption = None,
    kv_layout: options.KVLayoutOption = None,
    context_store: options.ContextStoreOption = None,
    page_size: options.PageSizeOption = None,
    kv_memory_fraction: options.KVMemoryFractionOption = None,
    kv_max_tokens: options.KVMaxTokensOption = None,
    kv_max_bytes: options.KVMaxBytesOption = None,
    allow_token_limited: options.AllowTokenLimitedOption = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Print the largest batch against served lengths.")
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Plan the memory of a configuration: a table, the verdict, and what would fit.

    Exit code 2: it is refused.
    """
    from dflash_jax import plan_memory

    given: dict[str, Any] = {
        "max_seq_len": max_seq_len,
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_draft_len": max_draft_len,
        "speculation": speculation,
        "device_memory": options.bytes_or_text(device_memory),
        "card": options.bytes_or_text(card),
        "mem_fraction": mem_fraction,
        "dtype": dtype,
        "shards": shards,
        "headroom": headroom,
        "kv_layout": kv_layout,
        "context_store": context_store,
        "page_size": page_size,
        "kv_memory_fraction": kv_memory_fraction,
        "kv_max_tokens": kv_max_tokens,
        "kv_max_bytes": kv_max_bytes,
        "allow_token_limited": allow_token_limited,
    }
    made = plan_memory(
        target, drafter, **{name: value for name, value in given.items() if value is not None}
    )
    rows = _sweep(made) if sweep else []
    if json:
        output.print_json(made.to_dict() | ({"sweep": rows} if sweep else {}))
    elif sweep:
        _show_sweep(made, rows)
    else:
        STDERR.print(str(made), markup=False, highlight=False, soft_wrap=True)
    if made.verdict == "refused" and not sweep:
        complain(MemoryPlanError(made.refusal()))
        raise typer.Exit(REFUSED)


def _sweep(made: "MemoryPlan") -> list[dict[str, int]]:
    """Largest batches at served lengths 1,024, 2,048, … and the target's positions."""
    from dflash_jax.planning.plan import make_plan

    most = made.config.target.max_position_embeddings
    lengths, length = [], _FIRST_LENGTH
    while length < most:
        lengths.append(length)
        length *= 2
    rows = []
    for length in (*lengths, most):
        one = make_plan(made.config.with_seq_len(length), made.inputs)
        rows.append(
            {
                "max_seq_len": length,
                "largest_batch_size": one.largest_batch_size,
                "largest_unproven_batch_size": one.unproven.batch_size,
            }
        )
    return rows


def _show_sweep(made: "MemoryPlan", rows: list[dict[str, int]]) -> None:
    output.print_table(
        ["served length", "largest batch", "without the reserve"],
        [[f"{value:,}" for value in row.values()] for row in rows],
        title=f"largest batch by served length, {made.inputs.memory.source}",
    )
