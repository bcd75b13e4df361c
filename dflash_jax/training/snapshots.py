"""Where a run can be taken up again: its state in Orbax checkpoints, its options beside them.

The newest two checkpoints are kept; one appears under its step when it is whole. What a step sees
is a function of the step (`batches.py`), so parameters, optimiser state and step are all there is
to keep. Nothing here trains.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dflash_jax.errors import ConfigError
from dflash_jax.training.options import TrainOptions
from dflash_jax.training.step import TrainState

_RECORD = "options.json"
_KEPT = 2


class Snapshots:
    """The checkpoints of one run's folder.

    Args:
        folder: made if it is not there.
        options: of the run.
        data: what names the documents (a hash) and the start; must be the same on resume.

    Raises:
        ConfigError: the folder was begun with other options or data; names every difference.
    """

    def __init__(self, folder: Path, options: TrainOptions, data: dict[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        _agree(folder / _RECORD, dataclasses.asdict(options) | data)
        self._manager = ocp.CheckpointManager(
            (folder / "steps").absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=_KEPT, enable_async_checkpointing=False, create=True
            ),
        )

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint of the state's step."""
        self._manager.save(int(state.step), args=ocp.args.StandardSave(_leaves(state)))
        self._manager.wait_until_finished()

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest whole checkpoint, bit for bit, or None if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, _leaves(like))
        found = self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
        return jax.tree.unflatten(jax.tree.structure(like), [found[key] for key in sorted(found)])

    def close(self) -> None:
        """Ends Orbax's own threads."""
        self._manager.close()


def _leaves(state: TrainState) -> dict[str, Any]:
    """The state's arrays by place in the tree: names of optimiser internals are not stored."""
    return {f"{index:05d}": leaf for index, leaf in enumerate(jax.tree.leaves(state))}


def _agree(path: Path, wanted: dict[str, Any]) -> None:
    wanted = json.loads(json.dumps(wanted))
    if not path.is_file():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
        return
    begun = json.loads(path.read_text(encoding="utf-8"))
    differences = [
        f"{key} was {begun.get(key)!r} and is {wanted.get(key)!r}"
        for key in sorted(begun.keys() | wanted.keys())
        if begun.get(key) != wanted.get(key)
    ]
    if differences:
        raise ConfigError(
            f"{path.parent} was begun with other options ({'; '.join(differences)}): resume with "
            "the same ones, or train into another folder"
        )
