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
from dflash_jax.config import DrafterConfig, ResolvedConfig, ServeConfig, TargetConfig
from dflash_jax.decoding import programs
from dflash_jax.decoding.round import EngineState, RoundReport
from dflash_jax.planning.resolve import on_platform, resolve
from dflash_jax.serving import engine as engine_module
from dflash_jax.serving.batch import Batch, Row
from dflash_jax.serving.engine import Engine

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
def _on_demand(drafts: tiny.Draft | None, row_sizes: tuple[int, ...] | None) -> Iterator[None]:
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
    target: Path, drafter: Path | None, drafts: tiny.Draft | None = None, **options: Any
) -> dj.LLM:
    """An LLM whose programs compile on demand."""
    with _on_demand(drafts, None):
        return dj.LLM(target, drafter, **options)


def resolved(
    target: Path, drafter: Path | None, *, read_piece: int | None = 256, **options: Any
) -> ResolvedConfig:
    """What the engine reads, for a CPU in float32."""
    import dataclasses

    serve = ServeConfig(**options)
    drafter_config = None if drafter is None else DrafterConfig.from_folder(drafter)
    config = resolve(serve, TargetConfig.from_folder(target), drafter_config)
    return dataclasses.replace(on_platform(config, serve, "cpu"), read_piece=read_piece)


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
    with _on_demand(drafts, row_sizes):
        return Engine(config, *models)


def run(batch: Batch, *requests: tuple[Sequence[int], int]) -> list[Row]:
    """Serves (prompt, max_tokens) requests to their end, greedily."""
    rows = [
        batch.submit(list(prompt), dj.SamplingParams(max_tokens=count), 0, ())
        for prompt, count in requests
    ]
    while any(row.finish_reason is None for row in rows):
        batch.step()
    return rows


def snapshot(state: EngineState) -> EngineState:
    """The state on the host, before a call donates it."""
    return jax.tree.map(np.array, state)


class Watched(Engine):
    """An engine for `Batch` that hands every call to another one and checks what it wrote.

    After each call the rows [old length, new length) of the slots that took part may have changed
    and nothing else, to the bit; lengths of all other slots stand still. `after` is called with
    the state, for further checks.
    """

    def __init__(self, inner: Engine, after: Callable[[EngineState], None] = lambda state: None):
        # A stand-in for the inner engine: nothing of its own is built.
        self.inner, self.config, self.after = inner, inner.config, after
        self.reports: list[RoundReport] = []
        self.actives: list[list[bool]] = []

    @property
    def state(self) -> EngineState:  # type: ignore[override]
        return self.inner.state

    def prefill(self, slot: int, ids: Sequence[int], *, temperature: float, seed: int) -> int:
        old = snapshot(self.inner.state)
        first = self.inner.prefill(slot, ids, temperature=temperature, seed=seed)
        live = np.arange(self.config.max_batch_size) == slot
        self._check(old, live, fresh=True, growth=np.where(live, len(ids), 0))
        return first

    def round(self, active: Sequence[bool], **options: Any) -> RoundReport:
        old = snapshot(self.inner.state)
        report = self.inner.round(active, **options)
        self.reports.append(report)
        self.actives.append(list(active))
        live = np.array(active, bool)
        accepted = np.zeros(len(live), np.int64)
        rows = min(len(live), len(report.num_accepted_drafts))
        accepted[:rows] = report.num_accepted_drafts[:rows]
        self._check(old, live, fresh=False, growth=np.where(live, accepted + 1, 0))
        return report

    def _check(self, old: EngineState, live: np.ndarray, *, fresh: bool, growth: np.ndarray):
        new = snapshot(self.inner.state)
        limits = [None] + ([int(new.context.limit)] if new.context is not None else [])
        arenas: list[Any] = [(old.kv, new.kv)]
        arenas += [(old.context, new.context)] if new.context is not None else []
        for (before, after), limit in zip(arenas, limits, strict=True):
            starts = np.where(live & fresh, 0, before.lengths)
            ends = starts + growth
            if limit is not None:
                ends = self._context_ends(starts, ends, limit, fresh)
            assert after.lengths.tolist() == ends.tolist()
            places = np.arange(after.layers[0].keys.shape[2])
            may = live[:, None] & (places >= starts[:, None]) & (places < ends[:, None])
            for mine, theirs in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
                if theirs.ndim == 4:
                    same = np.all(mine == theirs, axis=(1, 3))
                    assert np.all(same | may), "a row was written that nobody committed"
        self.after(new)

    def _context_ends(
        self, starts: np.ndarray, ends: np.ndarray, limit: int, fresh: bool
    ) -> np.ndarray:
        """A row that cannot draft another block is frozen; a prompt stops at the limit."""
        drafts = fresh | (starts + self.config.block_width <= limit)
        return np.where(drafts, np.minimum(ends, limit), starts)
