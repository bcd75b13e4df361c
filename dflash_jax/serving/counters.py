"""What an engine has done so far, as plain counts; who shows them is `metrics.py`'s business."""

import dataclasses
from typing import Any

from dflash_jax.serving.places import Places
from dflash_jax.serving.scheduler import Scheduler


@dataclasses.dataclass(kw_only=True)
class Counters:
    """Counts of one batch since its start.

    Attributes:
        prefill_tokens: tokens of prompts that were computed.
        rounds, rounds_drafting: rounds of rows, and those that verified drafts.
        drafts, accepted: proposals verified, and those the target agreed with.
        accepted_at: rounds that accepted at least i + 1 drafts, for i = 0 … K - 1.
        finished: answers that came to their end.
        recoveries: times that the arenas were lost and everybody started again.
    """

    accepted_at: list[int]
    prefill_tokens: int = 0
    rounds: int = 0
    rounds_drafting: int = 0
    drafts: int = 0
    accepted: int = 0
    finished: int = 0
    recoveries: int = 0

    def round(self, drafted: int, accepted: int) -> None:
        """One row's round."""
        self.rounds += 1
        self.rounds_drafting += drafted > 0
        self.drafts += drafted
        self.accepted += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1


@dataclasses.dataclass(kw_only=True)
class Load(Counters):
    """A moment's view of an engine.

    Attributes:
        waiting, prefilling, decoding: requests now.
        slots, free_slots: arena rows now.
        prefix_hits, prefix_tokens: prompts that took over a prefix, and tokens not computed again.
    """

    waiting: int
    prefilling: int
    decoding: int
    slots: int
    free_slots: int
    prefix_hits: int
    prefix_tokens: int

    @classmethod
    def now(
        cls, counters: Counters, scheduler: Scheduler[Any], places: Places, slots: int
    ) -> "Load":
        """What was counted so far, and who waits and runs at this moment."""
        decoding = sum(entry.decodes for entry in scheduler.running)
        return cls(
            **dataclasses.asdict(counters),
            waiting=len(scheduler.waiting),
            prefilling=len(scheduler.running) - decoding,
            decoding=decoding,
            slots=slots,
            free_slots=places.num_free,
            prefix_hits=places.hits,
            prefix_tokens=places.hit_tokens,
        )
