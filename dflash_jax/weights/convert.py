"""A checkpoint folder in another format or layout: safetensors or Orbax, z-lab or speculators.

Parameters keep the dtypes they have and come back bit for bit; the files beside them (config,
tokenizer, template, licence) are copied, so that the new folder loads like the old one. The formats
are `safetensors.py`, `save.py` and `orbax.py`, a drafter's layouts `layouts.py`.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dflash_jax.config import Verifier, read_config
from dflash_jax.errors import CheckpointError
from dflash_jax.models import DFlashDrafter
from dflash_jax.weights import orbax, safetensors
from dflash_jax.weights.hub import SIDE_FILES, resolve_model
from dflash_jax.weights.layouts import (
    Layout,
    buffers_of,
    config_in_layout,
    in_layout,
    layout_of,
    read_tables,
)
from dflash_jax.weights.load import abstract_drafter, abstract_target
from dflash_jax.weights.names import Kind
from dflash_jax.weights.save import save_parameters
from dflash_jax.weights.staging import staged
from dflash_jax.weights.vocabulary import check_offsets

Format = Literal["safetensors", "orbax"]


def convert(
    source: str | Path,
    destination: str | Path,
    kind: Kind,
    *,
    to: Format | None = None,
    layout: Layout | None = None,
    target: str | Path | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes `destination` in another format or layout; returns it.

    Args:
        source: a folder, a hub id or `"demo"`.
        destination: a folder that is not there yet, or a checkpoint to replace with `overwrite`.
        to: the format; None: the other one, or safetensors where a layout is given.
        layout: of a drafter; None: the one it has.
        target: of a drafter: what a layout borrows or copies, see `layouts.in_layout`.

    Raises:
        CheckpointError: as `load_target`; or the destination is there, or is the source; or a
            layout for a target, one that the source has already, or the tables that it needs are
            not given.
    """
    folder, destination = resolve_model(source, kind=kind), Path(destination).expanduser()
    if destination.resolve() == folder.resolve():
        raise CheckpointError(f"{destination} is the source itself: choose another destination")
    if kind == "target" and layout is not None:
        raise CheckpointError(f"{folder} is a target: --layout is for drafters, leave it away")
    to = to or other_format(folder, layout)
    raw = read_config(folder)
    model: Any = _load(folder, raw, kind)
    buffers = []
    if kind == "drafter":
        made, raw = _laid_out(model, raw, layout, target)
        if made is model and layout == layout_of(read_config(folder)) and to == format_of(folder):
            raise CheckpointError(f"{folder} is {layout} in {to} already: there is nothing to do")
        model, buffers = made, buffers_of(made, layout_of(raw))
    with staged(destination, overwrite=overwrite) as partial:
        _copy_side_files(folder, partial)
        if to == "orbax":
            orbax.write(model, partial, raw)
        else:
            text = json.dumps(raw, indent=2) + "\n"
            (partial / "config.json").write_text(text, encoding="utf-8")
            save_parameters(model, partial, kind=kind, buffers=buffers)
    return destination


def format_of(folder: Path) -> Format:
    """The format that a folder is in."""
    return "orbax" if orbax.is_checkpoint(folder) else "safetensors"


def other_format(folder: Path, layout: Layout | None) -> Format:
    """What a folder is converted to when nobody says it."""
    return "safetensors" if layout is not None or format_of(folder) == "orbax" else "orbax"


def _load(folder: Path, raw: Mapping[str, Any], kind: Kind) -> Any:
    abstract: Any = abstract_target(folder) if kind == "target" else abstract_drafter(folder)
    if orbax.is_checkpoint(folder):
        model = orbax.restore(abstract, folder, raw)
    else:
        model = safetensors.load_parameters(abstract, folder, kind=kind)
    if kind == "drafter":
        check_offsets(folder, model)
    return model


def _laid_out(
    drafter: DFlashDrafter,
    raw: dict[str, Any],
    layout: Layout | None,
    target: str | Path | None,
) -> tuple[DFlashDrafter, dict[str, Any]]:
    """The drafter and its raw config in a layout; in the one that it has, the config as it is."""
    if layout is None:
        return drafter, raw
    tables = None
    if target is not None:
        tables = read_tables(resolve_model(target, kind="target"), str(target))
    made = in_layout(drafter, layout, tables)
    if layout == layout_of(raw) and made is drafter:
        return drafter, raw
    verifier = Verifier() if tables is None else tables.verifier
    dtype = str(made.fc.weight[...].dtype)
    return made, config_in_layout(made.config, layout, dtype, verifier)


def _copy_side_files(source: Path, destination: Path) -> None:
    for pattern in SIDE_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.name != safetensors.INDEX:
                shutil.copyfile(path, destination / path.name)
