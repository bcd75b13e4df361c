"""`MemoryPlan`, and how one is made, fitted, decided by measurement and refused.

`make_plan` is pure and raises nothing; `refuse_unfit` raises what it found. Reading checkpoints and
asking devices is the caller's business (`serving/planner.py`).
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from dflash_jax.config import ResolvedConfig
from dflash_jax.errors import MemoryPlanError
from dflash_jax.planning import budget, words
from dflash_jax.planning.account import Inputs, arena_over_budget, limits, sized, within
from dflash_jax.planning.measured import Measured
from dflash_jax.planning.pool import Pool
from dflash_jax.planning.report import gib
from dflash_jax.planning.verdict import Sizing

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class MemoryPlan(Sizing):
    """Every byte of a configuration and the verdict on it; `print` shows the table.

    `largest_batch_size` and `largest_seq_len` keep the reserve; `unproven` has what is possible
    without it, which is where a refusal begins.
    """

    def __str__(self) -> str:
        return "\n".join(words.lines(self))

    def to_dict(self) -> dict[str, Any]:
        """The plan as one JSON document."""
        return words.document(self)

    def refusal(self) -> str:
        """Why it does not fit and what would."""
        return words.refusal(self)

    def with_warnings(self, warnings: Sequence[str]) -> "MemoryPlan":
        """The same plan with more to say."""
        return dataclasses.replace(self, warnings=(*self.warnings, *warnings))

    def with_measured(self, measured: Measured | None) -> "MemoryPlan":
        """The same plan decided by compiled programs; unchanged where they say nothing.

        Limits then take the measured temporaries as given, which a smaller configuration does not
        exceed. A pool may have to shrink; it does not grow over what the programs are for.
        """
        if measured is None:
            return self
        reserve = self.reserve if self.strict else 0
        _, pool = sized(self.config, self.inputs, reserve=reserve, measured=measured)
        if pool is not None and self.pool is not None:
            pool = pool._replace(pages=min(pool.pages, self.pool.pages))
        found = limits(self.config, self.inputs, reserve=reserve, measured=measured)
        before = _pool_warnings(self.config, self.pool)
        others = [warning for warning in self.warnings if warning not in before]
        return dataclasses.replace(
            self,
            config=_with_pool(self.config, pool),
            measured=measured,
            pool=pool,
            proven=found,
            unproven=found,
            warnings=(*others, *_pool_warnings(self.config, pool)),
        )


def make_plan(config: ResolvedConfig, inputs: Inputs) -> MemoryPlan:
    """Sizes a configuration and decides."""
    strict = inputs.serve.headroom == "seed"
    if strict:
        inputs = inputs._replace(memory=inputs.memory._replace(overhead=budget.OVERHEAD))
    keeps = strict or within(config, inputs, reserve=budget.RESERVE)
    held, pool = sized(config, inputs, reserve=budget.RESERVE if keeps else 0)
    proven = limits(config, inputs, reserve=budget.RESERVE)
    return MemoryPlan(
        config=_with_pool(config, pool),
        inputs=inputs,
        footprint=held,
        pool=pool,
        reserve=budget.RESERVE,
        proven=proven,
        unproven=proven if strict else limits(config, inputs, reserve=0),
        warnings=tuple(_pool_warnings(config, pool)),
        over_budget=arena_over_budget(config, inputs),
    )


def fit_batch(config: ResolvedConfig, inputs: Inputs) -> MemoryPlan:
    """The plan; a batch that the user left open is lowered to what fits, with one warning."""
    plan = make_plan(config, inputs)
    if inputs.serve.max_batch_size is not None:
        return plan
    # Where nothing fits with the reserve, what fits without it can still be proven.
    batch = plan.proven.batch_size or plan.unproven.batch_size
    if not 0 < batch < config.max_batch_size:
        return plan
    logger.warning(
        "clamping max_batch_size to %d: %s of memory hold no more rows of %d tokens (%s)",
        batch,
        gib(plan.available),
        config.max_seq_len,
        inputs.memory.source,
    )
    return make_plan(config.with_batch_size(batch), inputs)


def findings(plan: MemoryPlan) -> list[str]:
    """What refuses a plan, every reason in one finding; empty where nothing does."""
    return [plan.refusal()] if plan.verdict == "refused" else []


def refuse_unfit(plan: MemoryPlan) -> None:
    """Raises what a plan refuses.

    Raises:
        MemoryPlanError: with the numbers and the remedies.
    """
    if found := findings(plan):
        raise MemoryPlanError("\n".join(found))


def _with_pool(config: ResolvedConfig, pool: Pool | None) -> ResolvedConfig:
    """The configuration with the size of its pool, which the engine allocates."""
    return config if pool is None else config.with_pages(pool.pages)


def _pool_warnings(config: ResolvedConfig, pool: Pool | None) -> list[str]:
    if pool is None or not 0 < pool.rows < config.max_batch_size:
        return []
    return [
        f"the pool holds {pool.rows} rows of {config.max_seq_len} tokens and max_batch_size is "
        f"{config.max_batch_size}: if requests are that long, admission queues"
    ]
