"""`dflash-jax convert`: a checkpoint folder in another format or layout.

The work is `weights/convert.py`; here is which of target and drafter a folder holds, and what is
reported.
"""

import enum
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_jax.cli import options, output
from dflash_jax.cli.progress import Bars
from dflash_jax.cli.start import fetch_demo
from dflash_jax.errors import CheckpointError


class Layout(enum.StrEnum):
    """The two published layouts of a drafter."""

    ZLAB = "zlab"
    SPECULATORS = "speculators"


class Format(enum.StrEnum):
    """The two formats of a checkpoint."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"


def convert(
    source: Annotated[
        str, typer.Argument(help="A checkpoint folder, a hub id (owner/model) or demo.")
    ],
    destination: Annotated[Path, typer.Argument(help="The new folder.")],
    to: Annotated[
        Format | None,
        typer.Option(
            "--to", help="The format to write; default: the other one, safetensors with --layout."
        ),
    ] = None,
    layout: Annotated[
        Layout | None, typer.Option("--layout", help="The layout of a drafter to write.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="The drafter's target: its embedding and head are copied for speculators; for "
            "zlab, copies of them are dropped.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Convert a checkpoint between safetensors and Orbax, a drafter between layouts, bit for bit.

    The new folder holds config and tokenizer too and loads like the old one. Both formats
    restore straight onto several devices.
    """
    from dflash_jax.config import read_config
    from dflash_jax.weights.convert import convert as convert_folder
    from dflash_jax.weights.convert import other_format
    from dflash_jax.weights.hub import resolve_model

    with Bars() as bars:
        for name in filter(None, (source, target)):
            fetch_demo(name, bars)
    folder = resolve_model(source)
    kind = _kind(read_config(folder))
    other = other_format(folder, None)
    if layout is None and to is not None and to != other:
        raise CheckpointError(f"{folder} is {to} already: leave --to away or give --to {other}")
    written = to.value if to else other_format(folder, layout.value if layout else None)
    begun = time.perf_counter()
    made = convert_folder(
        folder,
        destination,
        kind,
        to=written,
        layout=layout.value if layout else None,
        target=target,
        overwrite=overwrite,
    )
    document = {
        "source": str(folder),
        "destination": str(made),
        "kind": kind,
        "format": written,
        "bytes": sum(path.stat().st_size for path in made.rglob("*") if path.is_file()),
        "seconds": time.perf_counter() - begun,
    }
    if json:
        output.print_json(document)
    else:
        size = f"{document['bytes'] / 1e6:.1f} MB"
        output.print_facts(
            {**document, "bytes": size, "seconds": f"{document['seconds']:.1f}"},
        )


def _kind(raw: Mapping[str, Any]) -> Any:
    """A DFlash config says of itself what it is; anything else is a target, or refused as one."""
    names = raw.get("architectures") or []
    signs = (
        "dflash_config" in raw,
        "block_size" in raw,
        "speculators_model_type" in raw,
        any("DFlash" in str(n) for n in names),
    )
    return "drafter" if any(signs) else "target"
