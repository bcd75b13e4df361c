"""A checkpoint folder in the other format: safetensors to Orbax, Orbax to safetensors.

Parameters keep the dtypes they have and come back bit for bit; the files beside them (config,
tokenizer, template, licence) are copied, so that the new folder loads like the old one. The formats
are `safetensors.py`, `save.py` and `orbax.py`.
"""

import shutil
from pathlib import Path

from dflash_jax.config import read_config
from dflash_jax.errors import CheckpointError
from dflash_jax.weights import orbax, safetensors
from dflash_jax.weights.hub import SIDE_FILES, resolve_model
from dflash_jax.weights.load import abstract_drafter, abstract_target
from dflash_jax.weights.names import Kind
from dflash_jax.weights.save import save_parameters
from dflash_jax.weights.staging import staged


def convert(
    source: str | Path, destination: str | Path, kind: Kind, *, overwrite: bool = False
) -> Path:
    """Writes `destination` in the format that `source` is not in; returns it.

    Args:
        source: a folder, a hub id or `"demo"`.
        destination: a folder that is not there yet, or a checkpoint to replace with `overwrite`.

    Raises:
        CheckpointError: as `load_target`; or the destination is there, or is the source.
    """
    folder, destination = resolve_model(source, kind=kind), Path(destination).expanduser()
    if destination.resolve() == folder.resolve():
        raise CheckpointError(f"{destination} is the source itself: choose another destination")
    abstract = abstract_target(folder) if kind == "target" else abstract_drafter(folder)
    raw = read_config(folder)
    with staged(destination, overwrite=overwrite) as partial:
        _copy_side_files(folder, partial)
        if orbax.is_checkpoint(folder):
            save_parameters(orbax.restore(abstract, folder, raw), partial, kind=kind)
        else:
            model = safetensors.load_parameters(abstract, folder, kind=kind)
            orbax.write(model, partial, raw)
    return destination


def _copy_side_files(source: Path, destination: Path) -> None:
    for pattern in SIDE_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.name != safetensors.INDEX:
                shutil.copyfile(path, destination / path.name)
