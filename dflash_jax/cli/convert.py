"""`dflash-jax convert`: a checkpoint folder in the other format, safetensors or Orbax.

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
        Format | None, typer.Option("--to", help="The format to write; default: the other one.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Convert a target or a drafter between safetensors and Orbax, bit for bit.

    The new folder holds config and tokenizer too and loads like the old one. Both restore
    straight onto several devices.
    """
    from dflash_jax.config import read_config
    from dflash_jax.weights import orbax
    from dflash_jax.weights.convert import convert as convert_folder
    from dflash_jax.weights.hub import resolve_model

    with Bars() as bars:
        fetch_demo(source, bars)
    folder = resolve_model(source)
    kind = _kind(read_config(folder))
    written = Format.SAFETENSORS if orbax.is_checkpoint(folder) else Format.ORBAX
    if to is not None and to != written:
        raise CheckpointError(f"{folder} is {to} already: leave --to away or give --to {written}")
    begun = time.perf_counter()
    made = convert_folder(folder, destination, kind, overwrite=overwrite)
    document = {
        "source": str(folder),
        "destination": str(made),
        "kind": kind,
        "format": written.value,
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
    signs = ("dflash_config" in raw, "block_size" in raw, any("DFlash" in str(n) for n in names))
    return "drafter" if any(signs) else "target"
