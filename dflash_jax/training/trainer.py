"""The training loop: batches, steps, held-out figures, logs and checkpoints.

Resuming after a kill continues exactly: what a step sees depends on the step alone, and the state
is restored bit for bit. The arithmetic of a step is `step.py`; data to documents is `features.py`;
what is written for others to load is `export.py`.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from dflash_jax.errors import ConfigError
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.progress import Progress
from dflash_jax.training import step
from dflash_jax.training.blocks import BlockBatch
from dflash_jax.training.checks import checked_run
from dflash_jax.training.documents import Document, check_features, check_final
from dflash_jax.training.feed import Feed
from dflash_jax.training.head import Candidates
from dflash_jax.training.held_out import HeldOut, held_out_figures
from dflash_jax.training.identity import documents_hash, parameters_hash
from dflash_jax.training.options import TrainingError, TrainOptions
from dflash_jax.training.real_rounds import RealAcceptance, RealRounds, chosen_prompts
from dflash_jax.training.run_log import RunLog
from dflash_jax.training.snapshots import Snapshots, Standing
from dflash_jax.training.start import start_drafter
from dflash_jax.weights.vocabulary import with_draft_vocabulary

log = logging.getLogger(__name__)

_LOG_EVERY = 10


class Trained(NamedTuple):
    """A finished run.

    Attributes:
        drafter: of the best held-out figure; of the last step where nothing is held out.
        held_out, real: its figures.
        steps: taken in all.
        best_step: at which the drafter was.
    """

    drafter: DFlashDrafter
    held_out: HeldOut | None
    real: RealAcceptance | None
    steps: int
    best_step: int


def train(
    target: Target,
    documents: Sequence[Document],
    folder: Path,
    options: TrainOptions,
    *,
    begin_with: DFlashDrafter | None = None,
    mesh: Mesh | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
) -> Trained:
    """Trains a drafter, or goes on where a killed run of the same folder stopped.

    Args:
        documents: with features of the taps that `drafter_config(target.config, options)` names, or
            without any where `options.features` is "computed".
        folder: for checkpoints and `log.csv`.
        begin_with: a float32 drafter to go on from instead of `options.init`; its config holds,
            whatever the options say of the drafter's shape.
        mesh: has an axis "data" that the documents of a step are divided over; it may be another
            one when a run is resumed (sums are rounded in another order then).
        tensorboard: write events beside `log.csv`.
        progress: called as (stage, done, total).

    Raises:
        ConfigError: options that do not fit the target or each other, or a resume with other
            options or data; a draft vocabulary that the target cannot fill; or a drafter to begin
            with that has a vocabulary or tables of its own.
        TrainingError: a loss or gradient that is not finite; names step, documents and tensor.
    """
    config, options = checked_run(
        target.config,
        options,
        begin_with=None if begin_with is None else begin_with.config,
        devices=step.devices_of(mesh),
    )
    shardings = None if mesh is None else step.shardings_of(mesh)
    drafter = begin_with or start_drafter(config, target, init=options.init, seed=options.seed)
    if options.features == "cached":
        taps = len(drafter.config.target_layer_ids)
        check_features(documents, taps, target.config.hidden_size)
        if options.distils:
            check_final(documents)
    data = {
        "documents_sha256": documents_hash(documents),
        "begin_with": None if begin_with is None else parameters_hash(begin_with),
    }
    snapshots = Snapshots(folder, options, data)
    try:
        loop = _Loop(target, documents, options, drafter, snapshots, shardings)
        return loop.run(folder, tensorboard, progress)
    finally:
        snapshots.close()


class _Loop:
    """One run's constants; the state is a local of `run`."""

    def __init__(
        self,
        target: Target,
        documents: Sequence[Document],
        options: TrainOptions,
        drafter: DFlashDrafter,
        snapshots: Snapshots,
        shardings: step.Shardings | None,
    ):
        self.options, self.snapshots, self.shardings = options, snapshots, shardings
        self.block_size = drafter.config.block_size
        self.feed = Feed(target, documents, options, drafter.config.target_layer_ids)
        self.abstract = step.abstract_of(drafter)
        self.start = self._whole(step.initial_state(drafter, options))
        self.head, self.embed = self._tables(target)
        self.step = step.compile_step(self.abstract, options, shardings)
        self.measure = step.compile_measure(self.abstract, options, self.feed.allowed)
        self.held_batches = self.feed.held_out(self.block_size)
        self.rounds = _real_rounds(target, self.abstract, self.feed, options)

    def run(self, folder: Path, tensorboard: bool, progress: Progress | None) -> Trained:
        options = self.options
        state, standing = self.snapshots.restore(self.start) or (self.start, Standing())
        begun = int(state.step)
        run_log = RunLog(folder, begun, tensorboard=tensorboard)
        log.info("training from step %d of %d", begun, options.steps)
        clock = time.monotonic()
        for number in range(begun, options.steps):
            if self._gave_up(standing):
                break
            state, report, width = self._one(state, number)
            done = number + 1
            held, real = self._measured(state, done)
            if held is not None:
                standing = standing.after(held.accepted, done)
            if held is not None or real is not None or done % _LOG_EVERY == 0:
                run_log.add(done, time.monotonic() - clock, report, width, held, real)
            best = held is not None and standing.best_step == done
            if best or done % options.save_every == 0:
                self.snapshots.save(state, standing)
            if progress is not None:
                progress("train", done, options.steps)
        run_log.close()
        self.snapshots.save(state, standing)
        return self._finished(state, standing)

    def _gave_up(self, standing: Standing) -> bool:
        """Whether the held-out figure has not been better for too long; said once."""
        over = 0 < self.options.patience <= standing.since
        if over:
            log.info(
                "stopped early: no better held-out figure than %.4f (step %d) in %d evaluations",
                standing.best,
                standing.best_step,
                standing.since,
            )
        return over

    def _finished(self, state: step.TrainState, standing: Standing) -> Trained:
        """The best parameters and their figures."""
        steps, best = int(state.step), standing.best_step or int(state.step)
        if best != steps:
            state, _ = self.snapshots.restore_step(best, self.start)
        # On one device again, as a drafter that was loaded.
        params = jax.device_put(state.params, jax.devices()[0])
        held = self._held_out(state.params)
        real = self.rounds.measure(params) if self.rounds is not None else None
        drafter = step.with_params(self.abstract, params)
        if self.feed.allowed is not None:
            drafter = with_draft_vocabulary(drafter, self.feed.allowed)
        return Trained(drafter, held, real, steps, best)

    def _measured(
        self, state: step.TrainState, done: int
    ) -> tuple[HeldOut | None, RealAcceptance | None]:
        """What is due after this many steps."""
        options, held, real = self.options, None, None
        if done == options.steps or done % options.evaluate_every == 0:
            held = self._held_out(state.params)
        if self.rounds is not None and done % options.accept_every == 0:
            real = self.rounds.measure(state.params)
        return held, real

    def _one(self, state: step.TrainState, number: int):
        width = self.options.width_at(number)
        chosen, batch = self.feed.batch(number)
        placed, listed = self._divided(batch, self.feed.candidates(batch, number))
        state, report = self.step(state, placed, listed, self.embed, self.head, width=width)
        if not bool(report.finite):
            raise TrainingError(_not_finite(number, chosen, self.feed, state))
        return state, report, width

    def _held_out(self, params: step.Params) -> HeldOut | None:
        tables = (self.embed, self.head)
        return held_out_figures(self.measure, params, self.held_batches, *tables, self.block_size)

    def _tables(self, target: Target) -> tuple[jax.Array, jax.Array]:
        """Head and embedding in the dtype of the passes; one array where the target ties them."""
        head, embed = (
            self._whole(table.astype(self.options.compute_dtype))
            for table in (target.head, target.embedding)
        )
        return head, head if target.config.tie_word_embeddings else embed

    def _whole(self, tree: Any) -> Any:
        return tree if self.shardings is None else jax.device_put(tree, self.shardings.whole)

    def _divided(
        self, batch: BlockBatch, candidates: Candidates | None
    ) -> tuple[BlockBatch, Candidates | None]:
        """Documents on the devices that compute them."""
        if self.shardings is None:
            return batch, candidates
        batch = jax.device_put(batch, self.shardings.documents)
        if candidates is None:
            return batch, None
        labels = jax.device_put(candidates.labels, self.shardings.documents)
        return batch, self._whole(candidates._replace(labels=None))._replace(labels=labels)


def _real_rounds(
    target: Target, abstract: DFlashDrafter, feed: Feed, options: TrainOptions
) -> RealRounds | None:
    """The measure by real rounds, None where it is off or nothing is held out.

    Raises:
        ConfigError: nothing is held out and early stopping needs it.
    """
    held = feed.held
    if not held and options.patience:
        raise ConfigError(
            f"patience {options.patience} needs held-out documents, and held_out "
            f"{options.held_out} leaves none: raise held_out, give more prompts, or set patience 0"
        )
    if not held or not options.accept_every:
        return None
    chosen = chosen_prompts(held, options.accept_prompts)
    return RealRounds(target, abstract, chosen, options.accept_tokens, feed.allowed)


def _not_finite(number: int, chosen: np.ndarray, feed: Feed, state: step.TrainState) -> str:
    bad = feed.spoiled(chosen)
    cached = feed.options.features == "cached"
    remedy = "cache them again" if cached else "the target gives them: leave out such prompts"
    weights = [k for k, v in state.params.items() if not np.isfinite(np.asarray(v)).all()]
    where = (
        f"the features of document {', '.join(map(str, bad))} are not finite: {remedy}"
        if bad
        else f"parameters {', '.join(weights)} are not finite"
        if weights
        else "its data is finite: lower learning_rate"
    )
    return (
        f"step {number}: the loss or its gradient is not finite (documents "
        f"{', '.join(map(str, chosen))}); {where}. Nothing of this step was applied"
    )
