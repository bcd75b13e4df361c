"""Who decodes where: requests wait, take the lowest free slot, advance round by round, and leave.

Host state only; the device work is `engine.py`'s. A row's answer depends on nothing but its own
prompt, parameters and seed.
"""

import collections
import dataclasses
import logging
from collections.abc import Collection

from dflash_jax.decoding.suffix import SuffixAutomaton
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.request import DecodeStats, FinishReason, SamplingParams
from dflash_jax.serving.stopping import end_ids, find_end

logger = logging.getLogger(__name__)

# What followed the one last token commits 1.5 tokens a round (SmolLM2, six prompts) and such a
# round costs up to 1.9 plain ones on a CPU; two tokens in a row commit 2.5.
LEAST_MATCH = 2


@dataclasses.dataclass(eq=False)
class Row:
    """One admitted or waiting request.

    Attributes:
        seed: what its draws are made from, whether the user gave it or not.
        ends: ids that end it.
        slot: where it decodes; None while waiting and after the end.
        suffixes: of its text, while it decodes with speculation "suffix".
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    ends: frozenset[int]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    slot: int | None = None
    suffixes: SuffixAutomaton | None = None
    stats: DecodeStats = dataclasses.field(default_factory=DecodeStats)
    stopped_drafting: bool = False


@dataclasses.dataclass(frozen=True)
class LastRound:
    """A slot's latest round, for tests and ablations; ids as the target and drafter chose them."""

    drafts: list[int]
    num_accepted_drafts: int
    chosen: list[int]


class Batch:
    """Slots of one engine and the queue before them; first come, first served."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.waiting: collections.deque[Row] = collections.deque()
        self.slots: list[Row | None] = [None] * engine.config.max_batch_size
        self.last_rounds: dict[int, LastRound] = {}

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        eos_token_ids: Collection[int],
    ) -> Row:
        """Queues a checked request."""
        row = Row(prompt, params, seed, end_ids(params, eos_token_ids))
        self.waiting.append(row)
        return row

    def step(self) -> None:
        """Admits what fits, then runs one round for everybody who decodes."""
        try:
            while self.waiting and None in self.slots:
                self._admit(self.waiting.popleft(), self.slots.index(None))
            if any(row is not None for row in self.slots):
                self._advance()
        except BaseException:
            # What was cut short may have moved the arenas without its report: nobody can go on.
            for row in filter(None, list(self.slots)):
                self._finish(row, "abort")
            raise

    def cancel(self, row: Row) -> None:
        """Takes a request out, wherever it is; its slot is free at once."""
        if row in self.waiting:
            self.waiting.remove(row)
        if row.finish_reason is None:
            self._finish(row, "abort")

    def _admit(self, row: Row, slot: int) -> None:
        row.slot, self.slots[slot] = slot, row
        self.last_rounds.pop(slot, None)
        if self.engine.config.speculation == "suffix":
            row.suffixes = SuffixAutomaton(row.prompt)
        first = self.engine.prefill(
            slot, row.prompt, temperature=row.params.temperature, seed=row.seed
        )
        self._deliver(row, [first])

    def _advance(self) -> None:
        active = [row is not None for row in self.slots]
        sampled = any(row is not None and row.params.temperature > 0 for row in self.slots)
        report = self.engine.round(active, sampled=sampled, drafts=self._host_drafts())
        for slot, row in enumerate(self.slots):
            if row is None:
                continue
            accepted, drafted = int(report.num_accepted_drafts[slot]), int(report.num_drafts[slot])
            chosen = report.chosen[slot].tolist()
            self.last_rounds[slot] = LastRound(
                report.drafts[slot, :drafted].tolist(), accepted, chosen
            )
            row.stats.drafts_per_round.append(drafted)
            row.stats.accepted_drafts_per_round.append(accepted)
            self._note_drafting(row, drafted)
            kept = self._deliver(row, chosen[: accepted + 1])
            row.stats.acceptance_lengths.append(kept)

    def _host_drafts(self) -> dict[int, list[int]]:
        """What the host proposes, by slot; nothing for a row whose end is new in its text."""
        width = self.engine.config.max_draft_len
        return {
            slot: row.suffixes.propose(width)
            for slot, row in enumerate(self.slots)
            if row is not None
            and row.suffixes is not None
            and row.suffixes.match_length >= LEAST_MATCH
        }

    def _note_drafting(self, row: Row, drafted: int) -> None:
        drafter = self.engine.config.drafter
        if drafter is None or drafted or row.stopped_drafting:
            return
        row.stopped_drafting = True
        logger.warning(
            "a request of %d prompt tokens has reached the end of the drafter's %d positions and "
            "goes on without drafting (the text is unchanged): choose a drafter with more "
            "positions or shorter requests",
            len(row.prompt),
            drafter.max_position_embeddings,
        )

    def _deliver(self, row: Row, new: list[int]) -> int:
        ending = find_end(new, len(row.token_ids), row.params.max_tokens, row.ends)
        row.token_ids += new[: ending.kept]
        if row.suffixes is not None:
            for token in new[: ending.kept]:
                row.suffixes.extend(token)
        if ending.reason is not None:
            self._finish(row, ending.reason)
        return ending.kept

    def _finish(self, row: Row, reason: FinishReason) -> None:
        row.finish_reason, row.suffixes = reason, None
        if row.slot is not None:
            self.slots[row.slot] = None
            row.slot = None
