"""What the steps of one run are fed: documents with their features, blocks, rows of the head.

Constants of a run around the pure functions of `batches.py` and `head.py`; a step's data depends on
its number alone. What is done with it is `trainer.py`.
"""

from collections.abc import Sequence

import numpy as np

from dflash_jax.models import Target
from dflash_jax.training import batches
from dflash_jax.training.blocks import BlockBatch
from dflash_jax.training.documents import Document
from dflash_jax.training.features import COMPUTED_AT_A_TIME, compute_features
from dflash_jax.training.head import Candidates, choose_candidates, frequent_ids, whole_vocabulary
from dflash_jax.training.options import TrainOptions

_CANDIDATES = 3  # keeps the candidates' random stream apart from those of `batches`
HELD_OUT_QUOTA = 16
"""Anchors of one held-out document."""


class Feed:
    """The data of a run.

    Args:
        layer_ids: the drafter's taps, for features that are computed.

    Attributes:
        documents: what is trained on; indices of a step count these.
        held: what is measured on.
        proposed: how many ids the drafter can propose.
        allowed: those ids, sorted, of a reduced draft vocabulary; None: all.
    """

    def __init__(
        self,
        target: Target,
        documents: Sequence[Document],
        options: TrainOptions,
        layer_ids: Sequence[int],
    ):
        self.options, self.vocab_size = options, target.config.vocab_size
        self.documents, self.held = batches.split_held_out(documents, options.held_out)
        self.lengths = np.asarray([len(d.ids) for d in self.documents])
        counts = answer_counts(self.documents, self.vocab_size)
        self.proposed = options.draft_vocab or self.vocab_size
        self.frequent = frequent_ids(counts, min(options.frequent, self.proposed))
        self.allowed = None
        if self.proposed < self.vocab_size:
            self.allowed = np.sort(frequent_ids(counts, self.proposed))
        self.compute: batches.Compute = list
        if options.features == "computed":
            self.compute = compute_features(
                target,
                layer_ids,
                keep_final=options.keeps_final,
                batch_size=min(options.documents_per_step, COMPUTED_AT_A_TIME),
            )

    def batch(self, number: int) -> tuple[np.ndarray, BlockBatch]:
        """Indices of a step's documents, and its blocks."""
        options = self.options
        return batches.batch_at(
            self.documents,
            self.lengths,
            number,
            per_step=options.documents_per_step,
            quota=options.anchors_per_document,
            width=options.width_at(number),
            seed=options.seed,
            pack=options.pack,
            compute=self.compute,
        )

    def held_out(self, width: int) -> list[BlockBatch]:
        """Blocks of what is held out, the same every time; documents as in a part of a step."""
        return batches.held_out_batches(
            self.held,
            per_step=self.options.documents_per_step // self.options.accumulate,
            quota=HELD_OUT_QUOTA,
            width=width,
            seed=self.options.seed,
            compute=self.compute,
        )

    def candidates(self, batch: BlockBatch, number: int) -> Candidates | None:
        """The head's rows of a step; None: all of them."""
        options, labels = self.options, np.asarray(batch.labels)
        rows = options.frequent + options.extra
        if options.full_head_at(number) or rows >= self.proposed:
            if self.allowed is None:
                return None
            return whole_vocabulary(labels, self.allowed, self.vocab_size)
        rng = np.random.default_rng((options.seed, _CANDIDATES, number))
        return choose_candidates(
            labels, self.frequent, options.extra, self.vocab_size, rng, self.allowed
        )

    def spoiled(self, chosen: np.ndarray) -> list[int]:
        """Which of these documents have features or final states that are not finite.

        Looks at the documents and not at a batch, whose rows several of them may share.
        """
        group = self.compute([self.documents[index] for index in chosen])
        return [
            int(index)
            for index, document in zip(chosen, group, strict=True)
            if not (_finite(document.features) and _finite(document.final))
        ]


def answer_counts(documents: Sequence[Document], vocab_size: int) -> np.ndarray:
    """How often each id occurs in the answers, int64 [v]."""
    counts = np.zeros(vocab_size, np.int64)
    for document in documents:
        np.add.at(counts, document.ids[document.answer_start :], 1)
    return counts


def _finite(rows: np.ndarray | None) -> bool:
    return rows is None or bool(np.isfinite(np.asarray(rows, np.float32)).all())
