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
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else there.")
]
