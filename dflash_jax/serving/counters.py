"""What an engine has done so far, as plain counts; who shows them is `metrics.py`'s business."""

from typing import NamedTuple


class Load(NamedTuple):
    """A moment's view of an engine; counts are since its start.

    Attributes:
        waiting, prefilling, decoding: requests now.
        slots, free_slots: arena rows now.
        prefix_hits, prefix_tokens: prompts that took over a prefix, and tokens not computed again.
        prefill_tokens: tokens of prompts that were computed.
        rounds, rounds_drafting: rounds of rows, and those that verified drafts.
        drafts, accepted: proposals verified, and those the target agreed with.
        accepted_at: rounds that accepted at least i + 1 drafts, for i = 0 … K - 1.
        finished: answers that came to their end.
        recoveries: times that the arenas were lost and everybody started again.
    """

    waiting: int
    prefilling: int
    decoding: int
    slots: int
    free_slots: int
    prefix_hits: int
    prefix_tokens: int
    prefill_tokens: int
    rounds: int
    rounds_drafting: int
    drafts: int
    accepted: int
    accepted_at: list[int]
    finished: int
    recoveries: int


class Counters:
    """Counts of one batch; `draft_len` is K."""

    def __init__(self, draft_len: int):
        self.prefilled = self.rounds = self.rounds_drafting = 0
        self.drafts = self.accepted = self.finished = self.recoveries = 0
        self.accepted_at = [0] * draft_len

    def round(self, drafted: int, accepted: int) -> None:
        """One row's round."""
        self.rounds += 1
        self.rounds_drafting += drafted > 0
        self.drafts += drafted
        self.accepted += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1

    def load(
        self,
        *,
        waiting: int,
        prefilling: int,
        decoding: int,
        slots: int,
        free_slots: int,
        prefix_hits: int,
        prefix_tokens: int,
    ) -> Load:
        """These counts beside what is true now."""
        return Load(
            waiting=waiting,
            prefilling=prefilling,
            decoding=decoding,
            slots=slots,
            free_slots=free_slots,
            prefix_hits=prefix_hits,
            prefix_tokens=prefix_tokens,
            prefill_tokens=self.prefilled,
            rounds=self.rounds,
            rounds_drafting=self.rounds_drafting,
            drafts=self.drafts,
            accepted=self.accepted,
            accepted_at=list(self.accepted_at),
            finished=self.finished,
            recoveries=self.recoveries,
        )
