"""The engine: compiled programs, the state they donate, and the two calls that move it on.

`prefill` runs a prompt into a slot, chunk by chunk; `round` advances the leading slots by one
round with a single device-to-host read. Who is in which slot is `batch.py`'s business. All programs
are compiled at start; compiles after that are counted.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.config import ResolvedConfig
from dflash_jax.decoding.given import pack_drafts
from dflash_jax.decoding.programs import (
    Program,
    compile_program,
    init_state,
    list_programs,
    split_model,
    state_shardings,
)
from dflash_jax.decoding.round import EngineState, Prompt, RoundReport
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.planning.buckets import chunk_buckets, row_buckets
from dflash_jax.serving.compiles import CompileCounter

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


class Engine:
    """Target, drafter and arenas behind two calls; not safe for use by two threads at once.

    Args:
        compiled: what `compile_engine` made of the same configuration and shapes; None: made here.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        target: Target,
        drafter: DFlashDrafter | None,
        *,
        compiled: Mapping[str, jax.stages.Compiled] | None = None,
        progress: Progress | None = None,
    ):
        self.config = config
        if compiled is None:
            compiled = compile_engine(config, target, drafter, progress)
        self.programs: Mapping[str, jax.stages.Compiled] = compiled
        self._target, self._drafter = split_model(target), split_model(drafter)
        # Zero-filled by a compiled program like all others, so that start-up compiles end here.
        shardings = None if config.mesh is None else state_shardings(config)
        self._empty_state = jax.jit(lambda: init_state(config), out_shardings=shardings)
        self.state: EngineState = self._empty_state()
        self._place = None if config.mesh is None else NamedSharding(config.mesh, PartitionSpec())
        self._chunks = chunk_buckets(config.max_seq_len, config.max_num_tokens)
        self._rows = row_buckets(config.max_batch_size)
        self._warm_up()
        self.compiles = CompileCounter()

    def prefill(self, slot: int, ids: Sequence[int], *, temperature: float, seed: int) -> int:
        """Runs a prompt into a fresh slot and returns the token after it, which is the anchor."""
        chosen = None
        for start, chunk, size in _chunks(ids, self._chunks):
            fields = _prompt(slot, chunk, size, start == 0, temperature, seed)
            chosen = self._call(f"prefill-{size}", Prompt(*jax.device_put(fields, self._place)))
        return int(np.asarray(chosen)[0])

    def round(
        self,
        active: Sequence[bool],
        *,
        sampled: bool,
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> RoundReport:
        """Advances the active ones of the leading slots; rows beyond the last one are not run.

        Args:
            drafts: what the host proposes for a slot (speculation "suffix"), 1 … K tokens; slots
                without any verify their anchor alone, and a round without any is plain decoding.
        """
        last = max(index for index, row in enumerate(active) if row) + 1
        rows = next(size for size in self._rows if size >= last)
        mask = np.zeros((rows,), bool)
        mask[:last] = active[:last]
        name = f"{rows}-{'sampled' if sampled else 'greedy'}"
        if drafts:
            given = pack_drafts(drafts, rows, self.config.max_draft_len)
            packed = self._call(f"given-{name}", mask, given)
        else:
            packed = self._call(f"round-{name}", mask)
        return RoundReport.unpack(np.asarray(packed))

    def _call(self, name: str, *arguments: Prompt | np.ndarray) -> jax.Array:
        program = self.programs[name]
        leaves = (self._target.leaves, self._drafter.leaves)
        try:
            self.state, out = program(*leaves, self.state, *arguments)
        except BaseException:
            # Donated and not handed back: what the rows held is lost, the engine is not.
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
                self.state = self._empty_state()
            raise
        return out

    def _warm_up(self) -> None:
        """Calls every program once (first-call costs are not in compilation), then empties all."""
        self.prefill(0, [0], temperature=0.0, seed=0)
        for rows in self._rows:
            idle = np.zeros((rows,), bool)
            for variant in ("greedy", "sampled"):
                jax.block_until_ready(self._call(f"round-{rows}-{variant}", idle))
                if self.config.speculation == "suffix":
                    given = pack_drafts({}, rows, self.config.max_draft_len)
                    jax.block_until_ready(self._call(f"given-{rows}-{variant}", idle, given))
        kv, context = self.state.kv, self.state.context
        kv = kv._replace(lengths=_emptied(kv.lengths))
        if context is not None:
            context = context._replace(lengths=_emptied(context.lengths))
        self.state = self.state._replace(kv=kv, context=context)


def compile_engine(
    config: ResolvedConfig,
    target: Target,
    drafter: DFlashDrafter | None,
    progress: Progress | None = None,
) -> dict[str, jax.stages.Compiled]:
    """Every program of an engine by name; the models may be shapes alone."""
    programs = list_programs(config, split_model(target), split_model(drafter))
    return dict(_compile_all(list(programs), progress))


def _emptied(lengths: jax.Array) -> jax.Array:
    return jax.device_put(np.zeros(lengths.shape, lengths.dtype), lengths.sharding)


def _prompt(
    slot: int, chunk: Sequence[int], size: int, fresh: bool, temperature: float, seed: int
) -> tuple[np.ndarray, ...]:
    """The fields of a one-row `Prompt`."""
    ids = np.zeros((1, size), np.int32)
    ids[0, : len(chunk)] = chunk
    return (
        np.array([slot], np.int32),
        ids,
        np.array([len(chunk)], np.int32),
        np.array([fresh]),
        np.array([temperature], np.float32),
        np.array([seed], np.uint32),
    )


def _compile_all(
    programs: Sequence[Program], progress: Progress | None
) -> Iterator[tuple[str, jax.stages.Compiled]]:
    """Lowers and compiles on as many threads as help; the compiler itself runs outside the lock."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = {program.name: pool.submit(compile_program, program) for program in programs}
        for done, (name, future) in enumerate(futures.items(), start=1):
            compiled = future.result()
            if progress is not None:
                progress("compile", done, len(programs))
            yield name, compiled


def _chunks(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, Sequence[int], int]]:
    """(start, tokens, padded length) of every chunk; never an empty one."""
    longest = sizes[-1]
    for start in range(0, len(ids), longest):
        chunk = ids[start : start + longest]
        yield start, chunk, next(size for size in sizes if size >= len(chunk))
