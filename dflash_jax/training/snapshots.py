"""Where a run can be taken up again: its state in Orbax checkpoints, its options beside them.

The last two checkpoints are kept, and the one with the best held-out figure. They are written in
the background; one appears under its step when it is whole. What a step sees is a function of the
step (`batches.py`), so parameters, optimiser state, step and how the held-out figure stands are all
there is to keep. Nothing here trains.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dflash_jax.errors import ConfigError
from dflash_jax.training.options import TrainOptions
from dflash_jax.training.records import differences, recorded, with_defaults
from dflash_jax.training.step import TrainState

log = logging.getLogger(__name__)

_RECORD = "options.json"
_KEPT = 2


class Standing(NamedTuple):
    """How the held-out figure stands.

    Attributes:
        best: the highest so far; 0 before the first evaluation.
        best_step: steps taken then.
        since: evaluations after it.
    """

    best: float = 0.0
    best_step: int = 0
    since: int = 0

    def after(self, figure: float, step: int) -> "Standing":
        """The standing with one more evaluation; of equal figures the earlier is the best."""
        better = figure > self.best
        return Standing(figure, step, 0) if better else self._replace(since=self.since + 1)


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
        self._manager = ocp.CheckpointManager(
            (folder / "steps").absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_BestAndLast(),
                best_fn=lambda standing: standing["best"],  # or no standing is stored
                enable_async_checkpointing=True,
                create=True,
            ),
        )
        try:
            _agree(folder / _RECORD, options, data, self._manager.latest_step())
        except ConfigError:
            self.close()
            raise

    def save(self, state: TrainState, standing: Standing) -> None:
        """Begins to write a checkpoint of the state's step, unless there is one.

        Writing goes on while the run does. It reads copies: the next step donates the state.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        leaves = {name: jnp.copy(leaf) for name, leaf in _leaves(state).items()}
        args = ocp.args.StandardSave(leaves)
        self._manager.save(step, args=args, metrics=standing._asdict(), force=True)

    def restore(self, like: TrainState) -> tuple[TrainState, Standing] | None:
        """The newest whole checkpoint, bit for bit, or None if there is none."""
        step = self._manager.latest_step()
        return None if step is None else self.restore_step(step, like)

    def restore_step(self, step: int, like: TrainState) -> tuple[TrainState, Standing]:
        """The checkpoint of a step, once it is whole, on the devices where `like` is."""
        self.wait()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, _leaves(like))
        found = self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
        leaves = [found[key] for key in sorted(found)]
        numbers = self._manager.metrics(step) or {}
        standing = Standing(
            float(numbers.get("best", 0.0)),
            int(numbers.get("best_step", 0)),
            int(numbers.get("since", 0)),
        )
        return jax.tree.unflatten(jax.tree.structure(like), leaves), standing

    def wait(self) -> None:
        """Returns when everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Writes what is left and ends Orbax's own threads."""
        self._manager.close()


@dataclasses.dataclass
class _BestAndLast:
    """Orbax's preservation policy of a run: the last ones, and the best that the newest names."""

    def should_preserve(
        self,
        checkpoints: Sequence[Any],
        *,
        context: Any,
    ) -> Sequence[bool]:
        newest = (checkpoints[-1].metrics or {}) if checkpoints else {}
        best = newest.get("best_step")
        first = len(checkpoints) - _KEPT
        return [i >= first or info.step == best for i, info in enumerate(checkpoints)]


def _leaves(state: TrainState) -> dict[str, Any]:
    """The state's arrays by place in the tree: names of optimiser internals are not stored."""
    return {f"{index:05d}": leaf for index, leaf in enumerate(jax.tree.leaves(state))}


def _agree(path: Path, options: TrainOptions, data: dict[str, Any], at: int | None) -> None:
    """Compares with the record of the folder, or begins it. `at`: steps of the last checkpoint."""
    wanted = recorded(options) | data
    if not path.is_file():
        _write(path, wanted)
        return
    begun = with_defaults(json.loads(path.read_text(encoding="utf-8")), TrainOptions)
    different = differences(begun, wanted)
    if different.keys() == {"steps"} and at is not None:
        before = dataclasses.replace(options, steps=begun["steps"])
        if before.is_stable_at(at) and options.is_stable_at(at):
            log.info("%d steps in place of %d, from step %d", options.steps, before.steps, at)
            _write(path, wanted)
            return
    if different:
        raise ConfigError(
            f"{path.parent} was begun with other options ({'; '.join(different.values())}): resume "
            "with the same ones, or train into another folder (steps alone may change, under "
            "schedule 'wsd' between warm-up and decay)"
        )


def _write(path: Path, record: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
