"""The training loop: batches, steps, held-out figures, a CSV log and checkpoints.

Resuming after a kill continues exactly: what a step sees depends on the step alone, and the state
is restored bit for bit. The arithmetic of a step is `step.py`; data to documents is `features.py`;
what is written for others to load is `export.py`.
"""

import csv
import hashlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.training import batches, step
from dflash_jax.training.blocks import BlockBatch
from dflash_jax.training.documents import Document, check_final
from dflash_jax.training.head import Candidates, choose_candidates, frequent_ids
from dflash_jax.training.objective import Measured
from dflash_jax.training.options import TrainingError, TrainOptions, drafter_config
from dflash_jax.training.snapshots import Snapshots
from dflash_jax.training.start import start_drafter

log = logging.getLogger(__name__)

COLUMNS = ("step", "seconds", "loss", "accepted", "gradient_norm", "width", "held_out_accepted")
_CANDIDATES = 3  # keeps the candidates' random stream apart from those of `batches`
_LOG_EVERY = 10
# Anchors of one held-out document.
_HELD_OUT_QUOTA = 16


class HeldOut(NamedTuple):
    """Teacher-forced figures on documents that are never trained on.

    `accepted`: mean over anchors of 1 + leading argmax matches, an estimate of the acceptance
    length of greedy rounds (which start where a round before ended, not anywhere). `by_slot`: share
    of matches of each slot alone.

    With final hidden states, at temperature 1, slots taken as independent: `accepted_sampled`, the
    run expected of drafts drawn from the drafter and kept with probability sum_v min(p, q), which
    is `sampled_by_slot`; `accepted_best`, the run of argmax drafts compared with the target's own
    draw, which is what this engine does.
    """

    accepted: float
    by_slot: tuple[float, ...]
    anchors: int
    accepted_sampled: float | None = None
    accepted_best: float | None = None
    sampled_by_slot: tuple[float, ...] | None = None


def figures_of(measured: Sequence[Measured]) -> HeldOut:
    """Means over all anchors of the batches that were measured."""
    total = jax.tree.map(lambda *parts: sum(np.asarray(part) for part in parts), *measured)
    anchors = max(float(total.anchors), 1.0)
    scored = np.maximum(total.scored, 1.0)
    found = HeldOut(float(total.runs) / anchors, _shares(total.matches, scored), int(total.anchors))
    if total.sampled is None:
        return found
    return found._replace(
        accepted_sampled=float(total.sampled.runs) / anchors,
        accepted_best=float(total.sampled.best_runs) / anchors,
        sampled_by_slot=_shares(total.sampled.by_slot, scored),
    )


def _shares(parts: np.ndarray, whole: np.ndarray) -> tuple[float, ...]:
    return tuple(map(float, parts / whole))


class Trained(NamedTuple):
    """A finished run."""

    drafter: DFlashDrafter
    held_out: HeldOut | None
    steps: int


def train(
    target: Target,
    documents: Sequence[Document],
    folder: Path,
    options: TrainOptions,
    *,
    begin_with: DFlashDrafter | None = None,
) -> Trained:
    """Trains a drafter, or goes on where a killed run of the same folder stopped.

    Args:
        documents: with features of the taps that `drafter_config(target.config, options)` names.
        folder: for checkpoints and `log.csv`.
        begin_with: a float32 drafter to go on from instead of `options.init`; its config holds.

    Raises:
        ConfigError: options that do not fit the target, or a resume with other options or data.
        TrainingError: a loss or gradient that is not finite; names step, documents and tensor.
    """
    if options.distils:
        check_final(documents)
    config = drafter_config(target.config, options) if begin_with is None else begin_with.config
    drafter = begin_with or start_drafter(config, target, init=options.init, seed=options.seed)
    data = {
        "documents_sha256": _documents_hash(documents),
        "begin_with": None if begin_with is None else _parameters_hash(begin_with),
    }
    snapshots = Snapshots(folder, options, data)
    try:
        return _Loop(target, documents, folder, options, drafter, snapshots).run()
    finally:
        snapshots.close()


class _Loop:
    """One run's constants; the state is a local of `run`."""

    def __init__(
        self,
        target: Target,
        documents: Sequence[Document],
        folder: Path,
        options: TrainOptions,
        drafter: DFlashDrafter,
        snapshots: Snapshots,
    ):
        self.target, self.options, self.snapshots = target, options, snapshots
        self.documents, held = batches.split_held_out(documents, options.held_out)
        self.lengths = np.asarray([len(d.ids) for d in self.documents])
        self.frequent = _frequent(self.documents, target.config.vocab_size, options.frequent)
        self.abstract = step.abstract_of(drafter)
        self.start = step.initial_state(drafter, options)
        self.step, self.measure = (
            step.compile_step(self.abstract, options),
            step.compile_measure(self.abstract),
        )
        self.held_batches = batches.held_out_batches(
            held,
            per_step=options.documents_per_step,
            quota=_HELD_OUT_QUOTA,
            width=drafter.config.block_size,
            seed=options.seed,
        )
        self.block_size = drafter.config.block_size
        self.log = _CsvLog(folder / "log.csv")

    def run(self) -> Trained:
        state = self.snapshots.restore(self.start) or self.start
        begun = int(state.step)
        self.log.rewind(begun)
        log.info("training from step %d of %d", begun, self.options.steps)
        clock = time.monotonic()
        figures = None
        for number in range(begun, self.options.steps):
            state, report, width = self._one(state, number)
            done = number + 1
            last = done == self.options.steps
            measured = last or done % self.options.evaluate_every == 0
            figures = self._held_out(state.params) if measured else None
            if measured or done % _LOG_EVERY == 0:
                self.log.add(done, time.monotonic() - clock, report, width, figures)
            if last or done % self.options.save_every == 0:
                self.snapshots.save(state)
        drafter = step.with_params(self.abstract, state.params)
        return Trained(drafter, figures or self._held_out(state.params), int(state.step))

    def _one(self, state: step.TrainState, number: int):
        options = self.options
        width = options.width_at(number)
        chosen, batch = batches.batch_at(
            self.documents,
            self.lengths,
            number,
            per_step=options.documents_per_step,
            quota=options.anchors_per_document,
            width=width,
            seed=options.seed,
        )
        candidates = self._candidates(batch, number)
        head, embed = self.target.head, self.target.embedding
        state, report = self.step(state, batch, candidates, embed, head, width=width)
        if not bool(report.finite):
            raise TrainingError(self._not_finite(number, chosen, batch, state))
        return state, report, width

    def _candidates(self, batch: BlockBatch, number: int) -> Candidates | None:
        options = self.options
        rows = options.frequent + options.extra
        if options.full_head_at(number) or rows >= self.target.config.vocab_size:
            return None
        rng = np.random.default_rng((options.seed, _CANDIDATES, number))
        return choose_candidates(
            np.asarray(batch.labels),
            self.frequent,
            options.extra,
            self.target.config.vocab_size,
            rng,
        )

    def _held_out(self, params: step.Params) -> HeldOut | None:
        if not self.held_batches:
            return None
        head, embed = self.target.head, self.target.embedding
        return figures_of(
            [
                self.measure(params, batch, embed, head, width=self.block_size)
                for batch in self.held_batches
            ]
        )

    def _not_finite(
        self, number: int, chosen: np.ndarray, batch: BlockBatch, state: step.TrainState
    ) -> str:
        bad = [
            int(index)
            for row, index in enumerate(chosen)
            if not np.isfinite(np.asarray(batch.features[row], np.float32)).all()  # type: ignore
        ]
        weights = [k for k, v in state.params.items() if not np.isfinite(np.asarray(v)).all()]
        where = (
            f"the features of document {', '.join(map(str, bad))} are not finite: cache them again"
            if bad
            else f"parameters {', '.join(weights)} are not finite"
            if weights
            else "its data is finite: lower learning_rate"
        )
        return (
            f"step {number}: the loss or its gradient is not finite (documents "
            f"{', '.join(map(str, chosen))}); {where}. Nothing of this step was applied"
        )


class _CsvLog:
    """`log.csv`: one row every ten steps and at every measurement."""

    def __init__(self, path: Path):
        self.path = path

    def rewind(self, begun: int) -> None:
        """Drops rows of steps that a killed run took after its last checkpoint."""
        rows: list[Any] = []
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if int(row["step"]) <= begun]
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)

    def add(
        self,
        done: int,
        seconds: float,
        report: step.StepReport,
        width: int,
        figures: HeldOut | None,
    ) -> None:
        held = "" if figures is None else f"{figures.accepted:.4f}"
        numbers = (float(report.loss), float(report.accepted), float(report.gradient_norm))
        row = (done, f"{seconds:.1f}", *(f"{n:.4f}" for n in numbers), width, held)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)
        if figures is not None:
            slots = " ".join(f"{share:.3f}" for share in figures.by_slot)
            log.info(
                "step %d: loss %s, held-out accepted run %s, by slot %s", done, row[2], held, slots
            )


def _frequent(documents: Sequence[Document], vocab_size: int, size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for document in documents:
        np.add.at(counts, document.ids[document.answer_start :], 1)
    return frequent_ids(counts, size)


def _documents_hash(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(np.array([len(document.ids), document.answer_start], np.int64).tobytes())
        digest.update(np.ascontiguousarray(document.ids, np.int32).tobytes())
    return digest.hexdigest()


def _parameters_hash(drafter: DFlashDrafter) -> str:
    digest = hashlib.sha256()
    parameters: dict[str, Any] = step.drafter_params(drafter)
    for name in sorted(parameters):
        digest.update(name.encode() + np.asarray(parameters[name]).tobytes())
    return digest.hexdigest()
