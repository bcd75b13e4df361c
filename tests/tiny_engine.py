"""Engines for tests: started without compiling ahead, drafted by host code, watched at every write.

The functions under test are the library's own; what is replaced here is *when* programs compile
(at their first call, so that a test pays for those it uses) and what the drafter proposes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
import tiny
from dflash_jax.arena.context import ContextPool
from dflash_jax.config import DrafterConfig, ResolvedConfig, ServeConfig, TargetConfig
from dflash_jax.decoding import programs
from dflash_jax.decoding.report import NOT_RUN, RoundReport
from dflash_jax.decoding.state import EngineState, Opening
from dflash_jax.planning.resolve import on_platform, resolve
from dflash_jax.serving import engine as engine_module
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.opening import Answer, make_opening
from dflash_jax.serving.output import Output
from dflash_jax.serving.row import Row
from dflash_jax.serving.stopping import end_ids

Drafts = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class HostDrafter:
    """Proposes what `rule(anchors [b], context lengths [b], DFlash's own [b, K])` returns.

    The rule runs on the host and may be exchanged between calls, so that one compiled program
    serves every drafter; None keeps DFlash's own tokens.
    """

    def __init__(self) -> None:
        self.rule: Drafts | None = None

    def __call__(self, anchors: jax.Array, lengths: jax.Array, own: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(own.shape, jnp.int32)
        return jax.pure_callback(self._draft, shape, anchors, lengths, own)

    def _draft(self, anchors: Any, lengths: Any, own: Any) -> np.ndarray:
        arrays = [np.asarray(array) for array in (anchors, lengths, own)]
        return arrays[2] if self.rule is None else self.rule(*arrays).astype(np.int32)


def among(texts: Sequence[Sequence[int]], *, wrong: Callable[[int], int | None]) -> Drafts:
    """Proposes the going-on of whichever known text has this anchor at this place.

    Args:
        texts: prompt + answer of every request.
        wrong: from the context length to the block slot that is proposed wrongly (None: none).
    """

    def drafts(anchors: np.ndarray, lengths: np.ndarray, own: np.ndarray) -> np.ndarray:
        out = np.zeros_like(own)
        for row, (anchor, length) in enumerate(zip(anchors, lengths, strict=True)):
            fitting = [t for t in texts if len(t) > length and t[length] == anchor]
            after = list(fitting[0][length + 1 :] if fitting else [])[: own.shape[1]]
            out[row, : len(after)] = after
            place = wrong(int(length))
            if place is not None and place < own.shape[1]:
                out[row, place] = (out[row, place] + 1) % tiny.VOCAB
        return out

    return drafts


def random_drafts(seed: int) -> Drafts:
    rng = np.random.default_rng(seed)
    return lambda anchors, lengths, own: rng.integers(0, tiny.VOCAB, own.shape)


class _OnDemand(jax.stages.Compiled):
    """A program that compiles when it is first called, under the drafter it was made with.

    A stand-in: nothing of what it is a subclass of is built.
    """

    def __init__(self, program: programs.Program, drafts: tiny.Draft | None):
        self.program, self.drafts = program, drafts
        self.compiled: jax.stages.Compiled | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self.compiled is None:
            with pytest.MonkeyPatch.context() as patch:
                if self.drafts is not None:
                    tiny.use_drafts(patch, self.drafts)
                self.compiled = programs.compile_program(self.program)
        return self.compiled(*arguments)

    def memory_analysis(self) -> None:
        """Unknown until it is compiled; a plan without measurements stands as it is."""


@contextlib.contextmanager
def on_demand(
    drafts: tiny.Draft | None = None, row_sizes: tuple[int, ...] | None = None
) -> Iterator[None]:
    """Every engine that is started here compiles a program when it is first called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine_module,
            "_compile_all",
            lambda listed, progress: [(p.name, _OnDemand(p, drafts)) for p in listed],
        )
        patch.setattr(Engine, "_warm_up", lambda self: None)
        if row_sizes is not None:
            for module in (engine_module, programs):
                patch.setattr(module, "row_buckets", lambda size: row_sizes)
        yield


def start(
    target: Path,
    drafter: Path | None,
    drafts: tiny.Draft | None = None,
    *,
    row_sizes: tuple[int, ...] | None = None,
    **options: Any,
) -> dj.LLM:
    """An LLM whose programs compile on demand.

    Args:
        row_sizes: row counts of rounds; the product's own when None.
    """
    with on_demand(drafts, row_sizes):
        return dj.LLM(target, drafter, **options)


def resolved(
    target: Path,
    drafter: Path | None,
    *,
    read_piece: int | None = 256,
    num_pages: int = 0,
    **options: Any,
) -> ResolvedConfig:
    """What the engine reads, for a CPU in float32; the pool's pages are not planned but given."""
    import dataclasses

    serve = ServeConfig(**options)
    drafter_config = None if drafter is None else DrafterConfig.from_folder(drafter)
    config = resolve(serve, TargetConfig.from_folder(target), drafter_config)
    config = on_platform(config, serve, "cpu").with_pages(num_pages)
    return dataclasses.replace(config, read_piece=read_piece)


def engine(
    target: Path,
    drafter: Path | None,
    drafts: tiny.Draft | None = None,
    *,
    row_sizes: tuple[int, ...] | None = None,
    read_piece: int | None = 256,
    **options: Any,
) -> Engine:
    """An engine whose programs compile on demand.

    Args:
        row_sizes: row counts of rounds; the product's own when None.
    """
    config = resolved(target, drafter, read_piece=read_piece, **options)
    models = dj.load_target(target), None if drafter is None else dj.load_drafter(drafter)
    with on_demand(drafts, row_sizes):
        return Engine(config, *models)


def request(
    prompt: Sequence[int],
    params: dj.SamplingParams,
    *,
    seed: int | None = None,
    eos: Sequence[int] = (),
) -> Row:
    """A checked request without text, ready for `Batch.submit`."""
    ends = end_ids(params, eos)
    return Row(
        0,
        prompt=list(prompt),
        params=params,
        seed=(params.seed or 0) if seed is None else seed,
        ends=ends,
        output=Output(None, params, ends),
    )


def one_at_a_time(batch: Batch) -> Batch:
    """The batch, reading every round before the next is dispatched: its state is what it says."""
    batch._may_fly = lambda: False  # type: ignore[method-assign]
    return batch


def serve(batch: Batch, rows: Sequence[Row]) -> list[Row]:
    """Runs requests to their end."""
    for row in rows:
        batch.submit(row)
    while any(row.finish_reason is None for row in rows):
        batch.step()
    return list(rows)


def run(batch: Batch, *requests: tuple[Sequence[int], int]) -> list[Row]:
    """Serves (prompt, max_tokens) requests to their end, greedily."""
    params = (dj.SamplingParams(max_tokens=count) for _, count in requests)
    rows = [request(ids, one) for (ids, _), one in zip(requests, params, strict=True)]
    return serve(batch, rows)


ENDLESS = dj.SamplingParams(max_tokens=10**6)


def prefill(
    engine: Engine,
    slot: int,
    ids: Sequence[int],
    *,
    params: dj.SamplingParams = ENDLESS,
    kv_kept: int = 0,
    context_kept: int = 0,
) -> int:
    """Opens a slot, runs the rest of a prompt into it in the longest chunks; the token after it."""
    answer = Answer(params, params.seed or 0, (), ids)
    vocab_size = engine.config.target.vocab_size
    engine.open(make_opening(slot, answer, vocab_size, kv_kept=kv_kept, context_kept=context_kept))
    longest, packed = engine.chunk_sizes[-1], None
    for start in range(kv_kept, len(ids), longest):
        chunk = ids[start : start + longest]
        packed = engine.prefill(slot, chunk, last=start + len(chunk) == len(ids))
    assert packed is not None
    return int(engine.read_prefill(packed).chosen[0, 0])


def play(engine: Engine, active: Sequence[bool], **options: Any) -> RoundReport:
    """One round, dispatched and read."""
    plain = options.get("plain", False)
    packed = engine.start_round(active, general=options.pop("general", False), **options)
    return engine.read_round(packed, plain=plain)[-1]


def snapshot(state: EngineState) -> EngineState:
    """The state on the host, before a call donates it."""
    return jax.tree.map(np.array, state)


def unpaged(state: EngineState) -> EngineState:
    """A state on the host whose pools are laid out as rows of slots, [n, k, s, d]."""
    table = state.kv.pages
    assert table is not None

    def rows(arena: Any) -> Any:
        def row(array: np.ndarray) -> np.ndarray:
            # The page beyond the pool is of no request: any will do.
            found = array[np.minimum(table, len(array) - 1)]
            n, r, heads, size, d = found.shape
            return found.transpose(0, 2, 1, 3, 4).reshape(n, heads, r * size, d)

        return arena._replace(layers=jax.tree.map(row, arena.layers))

    context = state.context
    if isinstance(context, ContextPool):
        context = rows(context)
    return state._replace(kv=rows(state.kv), context=context)


def assert_same(before: Any, after: Any) -> None:
    """No bit of two trees of arrays differs."""
    for mine, theirs in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.array_equal(mine, theirs)


def may_write(arena: Any, ends: np.ndarray, pages: np.ndarray | None) -> np.ndarray:
    """Rows [n, s] (pages [p, s] of a pool) that lie between what slots held and their new ends."""
    if pages is None:
        places = np.arange(arena.layers[0].keys.shape[2])
        return (places >= arena.lengths[:, None]) & (places < ends[:, None])
    num_pages, _, size, _ = arena.layers[0].keys.shape
    may = np.zeros((num_pages, size), bool)
    for row, start, end in zip(pages, arena.lengths, ends, strict=True):
        for position in range(start, end):
            may[row[position // size], position % size] = True
    return may


def _pools(old: EngineState, new: EngineState) -> list[tuple[Any, Any]]:
    """What lies in pages, before and after."""
    pools: list[tuple[Any, Any]] = [(old.kv, new.kv)] if new.kv.pages is not None else []
    return pools + ([(old.context, new.context)] if isinstance(new.context, ContextPool) else [])


class Watched(Engine):
    """An engine for `Batch` that hands every call to another one and checks what it wrote.

    After each call the rows [old length, new length) of the slots that took part may have changed
    and nothing else, to the bit; lengths of all other slots stand still. `after` is called with
    the state, for further checks. Every dispatch is waited for.
    """

    def __init__(self, inner: Engine, after: Callable[[EngineState], None] = lambda state: None):
        # A stand-in for the inner engine: nothing of its own is built.
        self.inner, self.config, self.after = inner, inner.config, after
        self.chunk_sizes, self.row_sizes = inner.chunk_sizes, inner.row_sizes
        self.reports: list[RoundReport] = []
        self.actives: list[list[bool]] = []
        self.computed: list[int] = []

    @property
    def state(self) -> EngineState:  # type: ignore[override]
        return self.inner.state

    def open(self, opening: Opening) -> None:
        old = snapshot(self.inner.state)
        self.inner.open(opening)
        slot = int(opening.slot)
        lengths, contexts = old.kv.lengths.copy(), None
        # Of a pool a request takes over what others computed, whatever its slot held.
        assert opening.pages is not None or int(opening.kv_kept) <= lengths[slot]
        lengths[slot] = opening.kv_kept
        if old.context is not None:
            contexts = old.context.lengths.copy()
            pooled = isinstance(old.context, ContextPool)
            assert pooled or int(opening.context_kept) <= contexts[slot]
            contexts[slot] = opening.context_kept
        self._check(old, lengths, contexts)

    def copy(self, source: int, target: int, **counts: Any) -> None:
        old = snapshot(self.inner.state)
        self.inner.copy(source, target, **counts)
        self._check_copy(old, source, target, counts["kv_count"], counts["context_count"])

    def move(self, source: int, target: int) -> None:
        old = snapshot(self.inner.state)
        self.inner.move(source, target)
        context = None if old.context is None else old.context.lengths[source]
        self._check_copy(old, source, target, old.kv.lengths[source], context)

    def _check_copy(
        self, old: EngineState, source: int, target: int, kv_count: Any, context_count: Any
    ) -> None:
        new = snapshot(self.inner.state)
        pairs: list[Any] = [(old.kv, new.kv, kv_count)]
        if old.context is not None and new.context is not None:
            pairs.append((old.context, new.context, context_count))
        for before, after, count in pairs:
            assert after.lengths[target] == count
            if isinstance(after, ContextPool) or getattr(after, "pages", None) is not None:
                assert_same(before.layers, after.layers)
                continue
            for mine, theirs in zip(
                jax.tree.leaves(before.layers), jax.tree.leaves(after.layers), strict=True
            ):
                assert np.array_equal(theirs[target, :, :count], mine[source, :, :count])
                others = np.arange(len(mine)) != target
                assert np.array_equal(theirs[others], mine[others])

    def copy_page(self, source: int, target: int) -> None:
        old = snapshot(self.inner.state)
        self.inner.copy_page(source, target)
        new = snapshot(self.inner.state)
        for before, after in _pools(old, new):
            for mine, theirs in zip(
                jax.tree.leaves(before.layers), jax.tree.leaves(after.layers), strict=True
            ):
                mine[target] = mine[source]
                assert np.array_equal(mine, theirs)

    def clean(self, slot: int, pages: Sequence[int] = ()) -> None:
        old = snapshot(self.inner.state)
        self.inner.clean(slot, pages)
        others = np.setdiff1d(np.arange(self.config.num_pages), pages)
        for before, after in _pools(old, snapshot(self.inner.state)):
            assert_same(
                jax.tree.map(lambda x: x[others], before.layers),
                jax.tree.map(lambda x: x[others], after.layers),
            )

    def reset(self) -> None:
        self.inner.reset()

    def prefill(self, slot: int, ids: Sequence[int], **options: Any) -> jax.Array:
        old = snapshot(self.inner.state)
        packed = self.inner.prefill(slot, ids, **options)
        self.computed.append(len(ids))
        live = np.arange(self.config.max_batch_size) == slot
        self._check_growth(old, np.where(live, len(ids), 0), freezes=False)
        return packed

    def read_prefill(self, packed: jax.Array) -> RoundReport:
        return self.inner.read_prefill(packed)

    def start_round(self, active: Sequence[bool], **options: Any) -> jax.Array:
        old = snapshot(self.inner.state)
        packed = self.inner.start_round(active, **options)
        width = {name: options.get(name, False) for name in ("plain", "narrow")}
        reports = self.inner.read_round(packed, **width)
        self.reports += reports
        self.actives.append(list(active))
        growth = np.zeros(self.config.max_batch_size, np.int64)
        for report in reports:
            rows = len(report.num_accepted_drafts)
            ran = report.num_accepted_drafts != NOT_RUN
            growth[:rows] += np.where(ran, report.num_accepted_drafts + 1, 0)
        self._check_growth(old, growth, freezes=True)
        return packed

    def read_round(self, packed: jax.Array, **width: bool) -> list[RoundReport]:
        return self.inner.read_round(packed, **width)

    def _check_growth(self, old: EngineState, growth: np.ndarray, *, freezes: bool) -> None:
        contexts = None
        if old.context is not None:
            starts, limit = old.context.lengths, int(old.context.limit)
            # A row that cannot draft another block is frozen; a prompt stops at the limit.
            grows = (starts + self.config.block_width <= limit) | (not freezes)
            contexts = np.where(grows, np.minimum(starts + growth, limit), starts)
        self._check(old, old.kv.lengths + growth, contexts)

    def _check(self, old: EngineState, lengths: Any, contexts: Any) -> None:
        new = snapshot(self.inner.state)
        arenas: list[Any] = [(old.kv, new.kv, lengths)]
        arenas += [(old.context, new.context, contexts)] if contexts is not None else []
        table: Any = new.kv.pages
        for before, after, ends in arenas:
            assert after.lengths.tolist() == ends.tolist()
            pooled = after is new.kv or isinstance(after, ContextPool)
            may = may_write(before, ends, table if pooled else None)
            for mine, theirs in zip(
                jax.tree.leaves(before.layers), jax.tree.leaves(after.layers), strict=True
            ):
                same = np.all(mine == theirs, axis=(1, 3))
                assert np.all(same | may), "a row was written that nobody committed"
        self.after(new)
