"""The engine: compiled programs, the state they donate, and the calls that move it on.

One method a program: `open`, `copy`, `copy_page` and `clean` change a slot, `prefill` runs a chunk
of a prompt into it, `start_round` dispatches a round of the leading slots and `read_round` waits
for it: one device-to-host copy. Who is in which slot is `batch.py`'s business. All programs are
compiled at start; compiles after that are counted.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.arena.context import ContextArena
from dflash_jax.arena.kv import KVArena
from dflash_jax.arena.sizes import row_pages
from dflash_jax.config import ResolvedConfig
from dflash_jax.decoding.given import pack_drafts
from dflash_jax.decoding.programs import (
    Program,
    compile_program,
    list_programs,
    split_model,
    state_shardings,
)
from dflash_jax.decoding.report import RoundReport
from dflash_jax.decoding.round import padded_chunk
from dflash_jax.decoding.state import (
    Cleaning,
    EngineState,
    Opening,
    PageCopy,
    Transfer,
    init_state,
)
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.planning.buckets import chunk_buckets, row_buckets
from dflash_jax.progress import Progress
from dflash_jax.serving.compiles import CompileCounter
from dflash_jax.serving.opening import Answer, make_opening
from dflash_jax.serving.request import SamplingParams

logger = logging.getLogger(__name__)


class Arenas(NamedTuple):
    """The arenas as they are now; `context` is None without a drafter."""

    kv: KVArena
    context: ContextArena | None


class Engine:
    """Target, drafter and arenas behind a few calls; not safe for use by two threads at once.

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
        self._leaves = (split_model(target).leaves, split_model(drafter).leaves)
        # Zero-filled by a compiled program like all others, so that start-up compiles end here.
        shardings = None if config.mesh is None else state_shardings(config)
        self._empty_state = jax.jit(lambda: init_state(config), out_shardings=shardings)
        self.state: EngineState = self._empty_state()
        self._place = None if config.mesh is None else NamedSharding(config.mesh, PartitionSpec())
        self.chunk_sizes = chunk_buckets(config.max_seq_len, config.max_num_tokens)
        self.row_sizes = row_buckets(config.max_batch_size)
        # The page table's row of a slot without pages; None where there is no pool.
        paged = config.kv_layout == "paged"
        self._no_pages = [config.num_pages] * row_pages(config) if paged else None
        self._warm_up()
        self.compiles = CompileCounter()

    @property
    def arenas(self) -> Arenas:
        """As the latest program left them; donated by the next call."""
        return Arenas(self.state.kv, self.state.context)

    def open(self, opening: Opening) -> None:
        """Starts a request in a slot."""
        self._change("open", opening)

    def copy(self, source: int, target: int, *, kv_count: int, context_count: int) -> None:
        """Copies the leading rows of a slot to another, which is opened then."""
        numbers = (np.int32(n) for n in (source, target, kv_count, context_count))
        self._change("copy", Transfer(*numbers, np.bool_(False)))  # type: ignore[arg-type]

    def move(self, source: int, target: int) -> None:
        """Moves a request to another slot with all that it has."""
        numbers = (np.int32(n) for n in (source, target, 0, 0))
        self._change("copy", Transfer(*numbers, np.bool_(True)))  # type: ignore[arg-type]

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page of the pool."""
        self._change("copy-page", PageCopy(np.int32(source), np.int32(target)))  # type: ignore[arg-type]

    def clean(self, slot: int, pages: Sequence[int] = ()) -> None:
        """Zeroes what a slot holds.

        Args:
            pages: those that it had alone, filled up to a row of the page table, in a pool.
        """
        own = np.array(pages, np.int32) if self._no_pages else None
        self._change("clean", Cleaning(np.int32(slot), own))  # type: ignore[arg-type]

    def prefill(
        self, slot: int, ids: Sequence[int], *, last: bool = True, anchor: int | None = None
    ) -> jax.Array:
        """Dispatches one chunk of a prompt, which follows what the slot holds.

        Args:
            ids: at most the longest of `chunk_sizes`.
            last: whether the prompt ends here.
            anchor: the token after the prompt where it is known.

        Returns:
            The packed report; its chosen token counts where the chunk is the last.
        """
        prompt = padded_chunk(slot, ids, self.chunk_sizes, last=last, anchor=anchor)
        return self._pass(f"prefill-{prompt.ids.shape[1]}", prompt)

    def read_prefill(self, packed: jax.Array) -> RoundReport:
        """Waits for a chunk."""
        return RoundReport.unpack(np.asarray(packed), 0)

    def start_round(
        self,
        active: Sequence[bool],
        *,
        general: bool,
        plain: bool = False,
        narrow: bool = False,
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> jax.Array:
        """Dispatches a round of the active ones of the leading slots; the rest is not run.

        Args:
            general: whether a row asks for more than the best token.
            plain: without drafting.
            narrow: with the first `narrow_draft_len` drafts alone.
            drafts: what the host proposes for a slot (speculation "suffix"), 1 … K tokens; slots
                without any verify their anchor alone.
        """
        last = max(index for index, row in enumerate(active) if row) + 1
        rows = next(size for size in self.row_sizes if size >= last)
        mask = np.zeros((rows,), bool)
        mask[:last] = active[:last]
        if plain and self.config.speculation != "none":
            return self._pass(f"plain-{rows}", mask)
        arguments: tuple[Any, ...] = (mask,)
        if self.config.speculation == "suffix":
            width = self._draft_len(narrow=narrow)
            cut = {slot: tokens[:width] for slot, tokens in (drafts or {}).items()}
            arguments += (pack_drafts(cut, rows, width),)
        if narrow:
            return self._pass(f"narrow-{rows}", *arguments)
        return self._pass(f"round-{rows}-{'general' if general else 'greedy'}", *arguments)

    def read_round(
        self, packed: jax.Array, *, plain: bool = False, narrow: bool = False
    ) -> list[RoundReport]:
        """Waits for a dispatch; one report a round of it."""
        draft_len = 0 if plain else self._draft_len(narrow=narrow)
        return [RoundReport.unpack(rows, draft_len) for rows in np.asarray(packed)]

    def reset(self) -> None:
        """New, empty arenas, after an execution failed and took the donated ones with it."""
        # What is left of the old ones goes first: there is no room for both.
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()
        self.state = self._empty_state()

    def _draft_len(self, *, narrow: bool) -> int:
        return self.config.narrow_draft_len if narrow else self.config.max_draft_len

    def _change(self, name: str, argument: Any) -> None:
        self.state = self._run(name, self.state, jax.device_put(argument, self._place))

    def _pass(self, name: str, *arguments: Any) -> jax.Array:
        placed = jax.device_put(arguments, self._place)
        self.state, packed = self._run(name, *self._leaves, self.state, *placed)
        return packed

    def _run(self, name: str, *arguments: Any) -> Any:
        return self.programs[name](*arguments)

    def _warm_up(self) -> None:
        """Calls every program once (first-call costs are not in compilation), then empties all."""
        answer = Answer(SamplingParams(), 0, (), ())
        self.open(make_opening(0, answer, self.config.target.vocab_size, pages=self._no_pages))
        # On a CPU a first call costs nothing, and a chunk of thousands of tokens seconds.
        cpu = jax.devices()[0].platform == "cpu"
        for size in self.chunk_sizes[:1] if cpu else self.chunk_sizes:
            self.prefill(0, [0] * size, last=False)
        for rows in self.row_sizes:
            idle = [False] * (rows - 1) + [True]
            for general in (False, True):
                self.start_round(idle, general=general)
            if self.config.speculation != "none":
                self.start_round(idle, general=True, plain=True)
            if self.config.narrow_draft_len:
                self.start_round(idle, general=True, narrow=True)
        self.copy(0, self.config.max_batch_size - 1, kv_count=0, context_count=0)
        if self._no_pages:
            self.copy_page(0, 0)
        self.clean(0, self._no_pages or ())
        jax.block_until_ready(self.state)


def compile_engine(
    config: ResolvedConfig,
    target: Target,
    drafter: DFlashDrafter | None,
    progress: Progress | None = None,
) -> dict[str, jax.stages.Compiled]:
    """Every program of an engine by name; the models may be shapes alone."""
    programs = list_programs(config, split_model(target), split_model(drafter))
    return dict(_compile_all(list(programs), progress))


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
