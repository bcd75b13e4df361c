"""The options that several commands share: one name, one meaning, one help text each.

An option that only one command has stands in that command's file. `None` is "not given": the
library's own default holds.
"""

from typing import Annotated

import typer

TargetArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="A checkpoint folder, a hub id (owner/model) or demo."),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        "-d",
        help="Its DFlash drafter: a folder, a hub id or demo. Without it: plain decoding.",
    ),
]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", "-n", help="The longest answer, in tokens.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy decoding.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Fixes the draws of a temperature above 0.")
]
MaxSeqLenOption = Annotated[
    int | None,
    typer.Option("--max-seq-len", help="Served length: prompt and answer together, in tokens."),
]
MaxBatchSizeOption = Annotated[
    int | None, typer.Option("--max-batch-size", help="How many prompts are decoded at a time.")
]
MaxDraftLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-draft-len", "-k", help="Tokens drafted per round, up to the trained width."
    ),
]
SpeculationOption = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        help="dflash, suffix (drafts from the text itself, no drafter) or none. Without it: dflash "
        "where a drafter is given.",
    ),
]
MaxNumTokensOption = Annotated[
    int | None, typer.Option("--max-num-tokens", help="Tokens of one pass over all rows.")
]
KVLayoutOption = Annotated[
    str | None,
    typer.Option(
        "--kv-layout",
        help="contiguous: one arena row a request; paged: pages of a pool, which requests share.",
    ),
]
ContextStoreOption = Annotated[
    str | None,
    typer.Option(
        "--context-store",
        help="arena: the drafter's context has one of its own; pool: it lies in the paged pool.",
    ),
]
PageSizeOption = Annotated[int | None, typer.Option("--page-size", help="Tokens of a page.")]
KVMemoryFractionOption = Annotated[
    float | None,
    typer.Option("--kv-memory-fraction", help="The paged pool's share of the free memory."),
]
KVMaxTokensOption = Annotated[
    int | None, typer.Option("--kv-max-tokens", help="Tokens of the paged pool, in place of that.")
]
KVMaxBytesOption = Annotated[
    int | None, typer.Option("--kv-max-bytes", help="Most bytes of the paged pool.")
]
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        metavar="SIZE",
        help="What XLA may allocate, such as 60GiB or 60GB. Without it the device is asked.",
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")
]
HeadroomOption = Annotated[
    str | None, typer.Option("--headroom", help="measured, or seed: the reserve kept strictly.")
]
AllowTokenLimitedOption = Annotated[
    bool, typer.Option("--allow-token-limited", help="Rows may take turns.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else there.")
]


def bytes_or_text(size: str | None) -> int | str | None:
    """A size of `--device-memory`: a bare number is bytes, the rest is for the library to read."""
    return int(size) if size is not None and size.isdecimal() else size
