"""`Sizing`: a configuration's bytes against a device's, and the verdict.

Numbers only; the words are `words.py`'s, and what users hold is `plan.py`'s `MemoryPlan`.
"""

import dataclasses
from typing import Literal

from dflash_jax.config import ResolvedConfig
from dflash_jax.planning.account import Inputs, Limits, needed
from dflash_jax.planning.context_rules import ArenaFit
from dflash_jax.planning.footprint import Footprint
from dflash_jax.planning.measured import Measured
from dflash_jax.planning.pool import Pool

Verdict = Literal["refused", "unproven", "fits"]

POOL = "KV pool"
LABELS = {
    "target_weights": "target weights",
    "drafter_weights": "drafter weights",
    "kv_arena": "KV arena",
    "context_arena": "context arena",
    "features": "features",
    "logits": "logits",
    "token_state": "token state",
}


@dataclasses.dataclass(frozen=True)
class Sizing:
    """Every byte of a configuration.

    Attributes:
        reserve: for temporaries that nobody has measured yet.
        proven: the largest sizes with the reserve (or as measured).
        unproven: the largest sizes without it: beyond them it is refused.
        over_budget: a private context arena that is over the budget which a pool leaves it.
        measured: what the compiled programs need; None before they exist.
    """

    config: ResolvedConfig
    inputs: Inputs
    footprint: Footprint
    pool: Pool | None
    reserve: int
    proven: Limits
    unproven: Limits
    warnings: tuple[str, ...] = ()
    over_budget: ArenaFit | None = None
    measured: Measured | None = None

    @property
    def needed(self) -> int:
        """Bytes on one device; measured temporaries in place of features and logits."""
        return needed(self.footprint, self.pool, self.measured)

    @property
    def available(self) -> int:
        """Bytes that all of it may take."""
        return self.inputs.memory.free

    @property
    def rowless(self) -> bool:
        """Whether there is a pool that holds not one row of the served length."""
        return self.pool is not None and self.pool.rows < 1

    @property
    def strict(self) -> bool:
        """Whether a plan without the reserve is refused."""
        return self.inputs.serve.headroom == "seed"

    @property
    def kept(self) -> int:
        """The reserve that still counts: none once the programs are measured."""
        return self.reserve if self.measured is None or self.strict else 0

    @property
    def verdict(self) -> Verdict:
        """refused: more than there is; unproven: not with the reserve; equality passes."""
        if self.needed > self.available or self.over_budget or self.rowless:
            return "refused"
        if self.needed + self.kept <= self.available:
            return "fits"
        return "refused" if self.strict else "unproven"

    @property
    def fits(self) -> bool:
        """Whether it fits with the reserve (or as measured)."""
        return self.verdict == "fits"

    @property
    def largest_batch_size(self) -> int:
        """Rows that fit at this served length, reserve kept; 0: none."""
        return self.proven.batch_size

    @property
    def largest_seq_len(self) -> int:
        """Served length that fits at this batch, reserve kept; 0: none."""
        return self.proven.seq_len

    @property
    def rows_per_step(self) -> int:
        """Rows that decode in one step; fewer than the batch where they take turns."""
        return self.config.rows_per_step

    @property
    def rows(self) -> dict[str, int]:
        """Bytes by name, in the order of the table; they and nothing else make `needed`.

        Measured temporaries replace features and logits where they are more.
        """
        named = {LABELS[name]: size for name, size in self.footprint._asdict().items()}
        if self.pool is not None:
            named = {POOL if n == "KV arena" else n: s for n, s in named.items()}
            named[POOL] = self.pool.nbytes
        if self.measured is not None and self.measured.temporaries > self.footprint.buffers:
            named = {n: s for n, s in named.items() if n not in ("features", "logits")}
            named["temporaries"] = self.measured.temporaries
        return named
