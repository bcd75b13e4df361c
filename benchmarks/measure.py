"""What benchmarks measure with: streaming bandwidth, interleaved timing, and where an answer loops.

Plain functions that return numbers. What is compared is the scripts' business (`decode.py`,
`gpu_check.py`); nothing here knows about engines.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

MAX_PERIOD = 64
LOOP_RULE = (
    f"the looping part of an answer is its longest tail that repeats with a period of at most "
    f"{MAX_PERIOD} ids, at least three times and over at least 24 ids; the first period counts as "
    "text, and rounds that begin after it are left out"
)


def seconds_of(call: Callable[[], object]) -> float:
    """Wall time of one call that waits for its own result."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def race(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call, taken in turn, so that a change of load meets all of them alike.

    Each is called twice before, unmeasured.
    """
    for call in calls.values():
        call()
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            taken[name].append(seconds_of(call))
    return taken


def medians(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _sum_on_device(rows: int, size: int) -> Callable[[], object]:
    """A reduction over a matrix that lies on the device."""
    matrix = jnp.ones((rows, size), jnp.float32)
    program = jax.jit(jnp.sum)
    return lambda: jax.block_until_ready(program(matrix))


def _product_on_device(rows: int, size: int) -> Callable[[], object]:
    """A matrix times one vector: what a decoding step does with every weight."""
    matrix, vector = jnp.ones((rows, size), jnp.float32), jnp.ones((size,), jnp.float32)
    program = jax.jit(lambda matrix, vector: matrix @ vector)
    return lambda: jax.block_until_ready(program(matrix, vector))


def _sum_in_numpy(matrix: np.ndarray, threads: int) -> Callable[[], object]:
    pool = ThreadPoolExecutor(threads)
    parts = np.array_split(matrix, threads)
    return lambda: list(pool.map(np.sum, parts))


def streaming_bandwidth(
    *, megabytes: int, repeats: int, numpy_threads: Sequence[int] = ()
) -> dict[str, float]:
    """Bytes per second of reading one array once, the best of `repeats`, for several readers.

    Args:
        megabytes: of the array; more than the caches hold.
        numpy_threads: host readers to try too, by their number of threads.
    """
    size = 1024
    rows = megabytes * 1_000_000 // (4 * size)
    readers = {"JAX sum": _sum_on_device, "JAX matrix x vector": _product_on_device}
    best = {}
    for name, make in readers.items():
        best[name] = min(race({name: make(rows, size)}, repeats)[name])
    if numpy_threads:
        matrix, vector = np.ones((rows, size), np.float32), np.ones((size,), np.float32)
        calls = {
            f"numpy sum, {threads} thread{'s' if threads > 1 else ''}": _sum_in_numpy(
                matrix, threads
            )
            for threads in numpy_threads
        }
        calls["numpy matrix x vector"] = lambda: matrix @ vector
        best |= {name: min(taken) for name, taken in race(calls, repeats).items()}
    return {name: rows * size * 4 / seconds for name, seconds in best.items()}


async def total_of(
    ask: Callable[[str], Awaitable[int]], prompts: Sequence[str], clients: int
) -> int:
    """Sum of what `ask` answers to every prompt, so many of them at once."""
    queue, total = list(reversed(prompts)), 0

    async def work() -> None:
        nonlocal total
        while queue:
            # Awaited first: `total += await …` would read the sum before the others add theirs.
            answered = await ask(queue.pop())
            total += answered

    await asyncio.gather(*(work() for _ in range(clients)))
    return total


def loop_start(ids: Sequence[int]) -> int:
    """Index at which the looping part of an answer begins by `LOOP_RULE`; its length if none.

    Worked example: text of 10 ids, then [7, 8] twenty times -> the tail begins at 10, its first
    period is text, so 12.
    """
    first = len(ids)
    for period in range(1, MAX_PERIOD + 1):
        start = len(ids)
        while start > period and ids[start - 1] == ids[start - 1 - period]:
            start -= 1
        tail = len(ids) - start + period
        if start < len(ids) and tail >= max(3 * period, 24):
            first = min(first, start)
    return first


def rounds_before(lengths: Sequence[int], limit: int) -> list[int]:
    """Acceptance lengths of the rounds whose first token lies before index `limit` of the answer.

    Token 0 comes from the prompt's pass, so the first round begins at 1.
    """
    kept, begin = [], 1
    for length in lengths:
        if begin < limit:
            kept.append(length)
        begin += length
    return kept


def pooled_acceptance_length(lengths: Sequence[int]) -> float | None:
    """Tokens over rounds; None without a round."""
    return sum(lengths) / len(lengths) if lengths else None
