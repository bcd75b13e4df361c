"""What a run writes for people: `log.csv`, and the same numbers for TensorBoard where asked.

A resumed run drops the rows of steps that were lost, so that a step has one row. Nothing here
measures.
"""

import csv
import logging
from pathlib import Path
from typing import Any, NamedTuple

from dflash_jax.errors import ConfigError
from dflash_jax.training.held_out import HeldOut
from dflash_jax.training.real_rounds import RealAcceptance
from dflash_jax.training.step import StepReport

log = logging.getLogger(__name__)


class Row(NamedTuple):
    """One row: a step's own figures, and what was measured after it (None: not measured).

    Attributes:
        seconds: of this process, since its first step.
        loss, accepted: of the step's documents; `accepted` among the head's candidates.
        width: slots of its blocks.
        held_out_accepted: teacher-forced.
        real_accepted, real_without_loops: by the decoding round.
    """

    step: int
    seconds: float
    loss: float
    accepted: float
    gradient_norm: float
    width: int
    held_out_accepted: float | None
    real_accepted: float | None
    real_without_loops: float | None


class RunLog:
    """The logs of one run's folder.

    Args:
        begun: steps that the run has taken already.
        tensorboard: whether to write events to `tensorboard/` too.

    Raises:
        ConfigError: TensorBoard was asked for and its writer is not installed.
    """

    def __init__(self, folder: Path, begun: int, *, tensorboard: bool = False):
        self._path = folder / "log.csv"
        self._events = _event_writer(folder / "tensorboard", begun) if tensorboard else None
        self._rewind(begun)

    def add(
        self,
        step: int,
        seconds: float,
        report: StepReport,
        width: int,
        held: HeldOut | None,
        real: RealAcceptance | None,
    ) -> None:
        """Writes one row, and says it where something was measured."""
        row = Row(
            step,
            seconds,
            float(report.loss),
            float(report.accepted),
            float(report.gradient_norm),
            width,
            None if held is None else held.accepted,
            None if real is None else real.accepted,
            None if real is None else real.without_loops,
        )
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(_cells(row))
        for name, value in row._asdict().items():
            if self._events is not None and name != "step" and value is not None:
                self._events.add_scalar(name, value, step)
        if held is not None or real is not None:
            log.info("step %d: loss %.4f%s%s", step, row.loss, _held(held), _real(real))

    def close(self) -> None:
        """Writes events that are still held back."""
        if self._events is not None:
            self._events.close()

    def _rewind(self, begun: int) -> None:
        """Drops rows of steps that a killed run took after its last checkpoint."""
        rows: list[Any] = []
        if self._path.is_file():
            with self._path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if int(row["step"]) <= begun]
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, Row._fields, restval="")
            writer.writeheader()
            writer.writerows(rows)


def _cells(row: Row) -> list[str]:
    return [
        f"{row.seconds:.1f}"
        if name == "seconds"
        else ""
        if value is None
        else f"{value:.4f}"
        if isinstance(value, float)
        else str(value)
        for name, value in row._asdict().items()
    ]


def _held(held: HeldOut | None) -> str:
    if held is None:
        return ""
    slots = " ".join(f"{share:.3f}" for share in held.by_slot)
    return f", held-out accepted run {held.accepted:.4f}, by slot {slots}"


def _real(real: RealAcceptance | None) -> str:
    if real is None:
        return ""
    return (
        f", real rounds commit {real.accepted:.4f} tokens, {real.without_loops:.4f} without loops "
        f"({real.rounds} rounds, {real.looping_tokens} of {real.tokens} tokens in loops)"
    )


def _event_writer(folder: Path, begun: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "TensorBoard events need the package tensorboardX: install dflash-jax[train], or read "
            "log.csv, which has the same numbers"
        ) from error
    # Events of steps that a killed run lost are hidden.
    return SummaryWriter(str(folder), purge_step=begun + 1)
