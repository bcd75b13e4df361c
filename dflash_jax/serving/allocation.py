"""The moment of allocation: what is needed and free is logged, and a failure is explained.

Here nothing is refused any more: the device's own allocator is the authority.
"""

import contextlib
import logging
from collections.abc import Iterator

import jax

from dflash_jax.errors import EngineError
from dflash_jax.planning.device import DeviceMemory
from dflash_jax.planning.plan import MemoryPlan
from dflash_jax.planning.report import gib

logger = logging.getLogger(__name__)

_EXHAUSTED = "RESOURCE_EXHAUSTED"


def announce(plan: MemoryPlan, memory: DeviceMemory) -> None:
    """Logs the arenas' need and what is free; a need that is not below it is a warning."""
    need = plan.needed - sum(plan.inputs.weights)
    level = logging.WARNING if need >= memory.free else logging.INFO
    logger.log(
        level,
        "allocating %s of arenas, token state and temporaries; %s is free (%s)%s",
        gib(need),
        gib(memory.free),
        memory.source,
        "; this allocation can fail" if need >= memory.free else "",
    )


@contextlib.contextmanager
def explained(what: str, nbytes: int, plan: MemoryPlan) -> Iterator[None]:
    """Says which allocation ran out of memory, how large it is and what to lower.

    Raises:
        EngineError: in place of the runtime's own out-of-memory error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _EXHAUSTED not in str(error):
            raise
        raise EngineError(
            f"out of memory while allocating {what} ({gib(nbytes)} of {gib(plan.needed)} in all; "
            f"the plan counted on {gib(plan.available)}, {plan.inputs.memory.source}): lower "
            f"max_batch_size or max_seq_len, or {plan.inputs.memory.lever}"
        ) from error
