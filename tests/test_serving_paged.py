"""The paged layout on the real engine: the crowd, prefix hits, shared pages, and pages given back.

Every call is watched (`tiny_engine.Watched`): of all pages only the rows behind what a request had
may change, so a write into somebody else's page or a shared one is seen to the bit.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from crowd import (
    PAIR,
    WIDE,
    Request,
    alone_plainly,
    check,
    golden_requests,
    known_drafts,
    run,
    traces_alone,
)
from dflash_jax.decoding import programs
from dflash_jax.decoding.state import EngineState
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.places import PagedSlots
from dflash_jax.serving.row import Row
from test_context_exact import Exact
from tiny_engine import Watched

POOL: dict[str, Any] = {"kv_layout": "paged", "context_store": "pool"}
ARENA: dict[str, Any] = {"kv_layout": "paged", "context_store": "arena"}
STEM = np.random.default_rng(1).integers(0, 90, 40).tolist()
OTHER = np.random.default_rng(2).integers(0, 90, 50).tolist()
TAILS: list[list[int]] = [[], [7], [8, 9], [3] * 20]
PARAMS = dj.SamplingParams(max_tokens=16)


def pages_of(batch: Batch) -> PagedSlots:
    places = batch._slots
    assert isinstance(places, PagedSlots)
    return places


class Own:
    """After every call: what a running request may still write lies in pages of nobody else."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.waited = 0

    def __call__(self, state: EngineState) -> None:
        assert self.batch is not None and state.kv.pages is not None
        free_slots = self.batch.load().free_slots
        self.waited += bool(self.batch.scheduler.waiting) and free_slots > 0
        num_pages, size = state.kv.layers[0].keys.shape[0], state.kv.layers[0].keys.shape[2]
        running = [slot for slot, row in enumerate(self.batch.slots) if row is not None]
        for slot in running:
            line = state.kv.pages[slot]
            own = line[state.kv.lengths[slot] // size :]
            own = own[own < num_pages]
            others = [state.kv.pages[other] for other in running if other != slot]
            assert not np.isin(own, others).any()


def watched(engine: Engine, after: Any = None) -> Batch:
    after = after or Own()
    batch = after.batch = Batch(Watched(engine, after))
    return batch


def all_given_back(batch: Batch) -> bool:
    """No request holds a page or a slot."""
    load, pool = batch.load(), pages_of(batch).pool
    return load.free_slots == load.slots and pool.used == 0 and not pages_of(batch)._leases


# The crowd


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return golden_requests()


@pytest.fixture(scope="module")
def alone(asked: list[Request]) -> list[Row]:
    return alone_plainly(asked)


@pytest.fixture(scope="module")
def drafts(asked: list[Request], alone: list[Row]) -> tiny.Draft:
    return known_drafts(asked, alone)


@pytest.fixture(scope="module")
def traces(asked: list[Request], drafts: tiny.Draft) -> list[list[int]]:
    return traces_alone(asked, drafts)


@pytest.mark.parametrize(
    ("layout", "pages"),
    [
        (POOL | {"page_size": 8}, 30),
        (ARENA | {"page_size": 32}, 9),
        pytest.param(
            POOL | {"page_size": 32, "rounds_per_step": 4, "max_num_tokens": 64},
            9,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["pool", "arena", "pool, four rounds a dispatch"],
)
def test_every_request_of_a_crowd_is_what_it_is_alone_in_pages_too(
    layout: dict[str, Any], pages: int, asked, alone, drafts, traces
):
    """Faults 46, 58, 60, 65, 66: admission waits for pages and cached ones are evicted."""
    engine = tiny_engine.engine(
        PAIR / "target", PAIR / "drafter", drafts, num_pages=pages, **WIDE, **layout
    )
    own = Own()
    batch = watched(engine, own)
    rows = run(batch, asked)
    # Whose context is gone drafts from the tail, and the scripted drafter goes by positions.
    tails = [row.stats.context_reused_tokens < row.stats.reused_prompt_tokens for row in rows]
    assert layout["context_store"] == "arena" or not any(tails)
    expected = [
        row.stats.accepted_drafts_per_round if tail else trace
        for row, tail, trace in zip(rows, tails, traces, strict=True)
    ]
    check(rows, alone, expected)
    assert all_given_back(batch)
    assert batch.load().prefix_hits > 5 and pages_of(batch).pool.evictions > 5
    assert own.waited > 5 and sum(tails) < 32


# Prefix hits


@pytest.fixture(scope="module", params=[POOL, ARENA], ids=["pool", "arena"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return tiny_engine.engine(
        PAIR / "target",
        PAIR / "drafter",
        row_sizes=(1, 4),
        num_pages=60,
        page_size=8,
        max_seq_len=96,
        max_batch_size=4,
        max_num_tokens=32,
        **request.param,
    )


@pytest.fixture(scope="module")
def cold() -> dict[tuple[int, ...], Row]:
    """What prompts give in the contiguous layout, with nothing taken over."""
    engine = tiny_engine.engine(
        PAIR / "target",
        PAIR / "drafter",
        row_sizes=(1, 4),
        max_seq_len=96,
        max_batch_size=4,
        max_num_tokens=32,
    )
    batch = Batch(engine, reuse=False)
    prompts = [*(STEM + tail for tail in TAILS), OTHER]
    return {tuple(p): serve(batch, p) for p in prompts}


def serve(batch: Batch, prompt: list[int]) -> Row:
    return tiny_engine.serve(batch, [tiny_engine.request(prompt, PARAMS)])[0]


def assert_cold(row: Row, cold: dict[tuple[int, ...], Row]) -> None:
    other = cold[tuple(row.prompt)]
    assert row.token_ids == other.token_ids
    assert row.stats.accepted_drafts_per_round == other.stats.accepted_drafts_per_round
    assert row.stats.drafts_per_round == other.stats.drafts_per_round


class ExactPages(Exact):
    """`Exact` for rows that lie in pages."""

    def __call__(self, state: EngineState) -> None:
        super().__call__(tiny_engine.unpaged(state))


def test_a_hit_computes_nothing_again_and_drafts_as_a_cold_run_from_the_same_rows(engine, cold):
    """Fault 45: the pages had another owner before, and the second prompt goes on differently."""
    exact = ExactPages(PAIR / "target", PAIR / "drafter")
    batch = watched(engine, exact)
    assert_cold(serve(batch, OTHER), cold)
    assert_cold(serve(batch, [*STEM, 7]), cold)
    computed = batch.engine.computed  # type: ignore[attr-defined]
    computed.clear()
    row = serve(batch, [*STEM, 8, 9])
    assert_cold(row, cold)
    assert sum(computed) == 2
    assert (row.stats.reused_prompt_tokens, row.stats.context_reused_tokens) == (40, 40)
    assert batch.load().prefix_tokens == 40 and exact.rounds > 5
    assert all_given_back(batch)


def bits(state: EngineState, pages: list[int]) -> list[np.ndarray]:
    """What lies in the given pages of both pools."""
    host = tiny_engine.snapshot(state)
    pools = [host.kv, host.context] if host.kv.layers[0].keys.shape[0] else []
    layers = [pool.layers for pool in pools if pool is not None and len(pool.layers[0].keys) > 4]
    return [array[pages] for array in jax.tree.leaves(layers)]


def test_newcomers_on_a_running_requests_prefix_never_write_into_its_pages(engine, cold):
    """Fault 46: B, C, D are admitted on A's prefix while A decodes."""
    batch = watched(engine)
    first = tiny_engine.request(STEM, PARAMS)
    batch.submit(first)
    while len(first.generated) < 4:
        batch.step()
    assert first.slot is not None
    shared = pages_of(batch)._leases[first.slot].pages[: len(STEM) // 8]
    before = bits(engine.state, shared)
    others = [tiny_engine.request(STEM + tail, PARAMS) for tail in TAILS[1:]]
    for row in others:
        batch.submit(row)
    together = 0
    while any(row.finish_reason is None for row in (first, *others)):
        batch.step()
        leases = pages_of(batch)._leases.values()
        together = max(together, sum(lease.pages[:5] == shared for lease in leases))
    for row in (first, *others):
        assert_cold(row, cold)
    assert together == 4
    assert [row.stats.reused_prompt_tokens for row in others] == [40, 40, 40]
    for mine, theirs in zip(before, bits(engine.state, shared), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_poison_in_free_pages_and_in_other_requests_pages_changes_no_bit(engine, cold):
    """Faults 5, 58. 1e4 and NaN lie in all pages that the request does not list."""
    batch = Batch(engine)
    row = tiny_engine.request([*STEM, 7], PARAMS)
    batch.submit(row)
    batch = tiny_engine.one_at_a_time(batch)
    poison = [1e4, np.nan]
    while row.finish_reason is None:
        batch.step()
        if row.slot is None:
            break
        listed = np.asarray(pages_of(batch)._leases[row.slot].pages)
        strangers = np.setdiff1d(np.arange(60), listed)
        value = np.float32(poison[len(row.generated) % 2])
        engine.state = poisoned(engine.state, strangers, value)
    assert_cold(row, cold)
    engine.reset()


def poisoned(state: EngineState, pages: np.ndarray, value: np.float32) -> EngineState:
    def fill(arena: Any) -> Any:
        if arena is None or len(arena.layers[0].keys) != 60:
            return arena
        return arena._replace(
            layers=jax.tree.map(lambda x: x.at[jnp.asarray(pages)].set(value), arena.layers)
        )

    return state._replace(kv=fill(state.kv), context=fill(state.context))


def test_every_page_comes_back_after_many_short_requests_with_stops_and_cancels(engine):
    """Fault 65: what was reserved ahead and never written is given back too."""
    rng = np.random.default_rng(0)
    batch = watched(engine)
    for turn in range(5):
        rows = []
        for index in range(8):
            stops = tuple(rng.integers(0, 90, 12).tolist()) if index % 2 else ()
            params = dj.SamplingParams(max_tokens=int(rng.integers(1, 9)), stop_token_ids=stops)
            prompt = rng.integers(0, 90, int(rng.integers(1, 30))).tolist()
            rows.append(tiny_engine.request(prompt, params))
            batch.submit(rows[-1])
        for row in rows[turn::4]:
            batch.step()
            batch.cancel(row)
        while any(row.finish_reason is None for row in rows):
            batch.step()
        pool = pages_of(batch).pool
        assert all_given_back(batch) and pool.free + pool.cached == 60


def test_a_row_that_became_nan_is_wiped_from_its_own_pages_and_nobody_else_is_harmed(engine, cold):
    """What it wrote is known to nobody any more; what it shared stays what it was."""
    batch = tiny_engine.one_at_a_time(Batch(engine))
    first = tiny_engine.request(STEM, PARAMS)
    batch.submit(first)
    while len(first.generated) < 2:
        batch.step()
    broken = tiny_engine.request([*STEM, *[3] * 20], PARAMS)
    batch.submit(broken)
    while len(broken.generated) < 2:
        batch.step()
    assert broken.slot is not None
    pages = list(pages_of(batch)._leases[broken.slot].pages)
    engine.state = engine.state._replace(kv=spoilt(engine.state.kv, pages[6]))
    while first.finish_reason is None or broken.finish_reason is None:
        batch.step()
    assert broken.finish_reason == "abort" and "NaN" in (broken.error or "")
    assert_cold(first, cold)
    assert all(np.all(array == 0) for array in bits(engine.state, [pages[6]]))
    again = serve(batch, [*STEM, *[3] * 20])
    assert_cold(again, cold)
    assert again.stats.reused_prompt_tokens == 40
    assert all_given_back(batch)


def spoilt(arena: Any, page: int) -> Any:
    layer = arena.layers[0]
    bad = layer._replace(values=layer.values.at[page].set(jnp.nan))
    return arena._replace(layers=(bad, *arena.layers[1:]))


def test_a_context_that_no_slot_holds_any_more_is_drafted_from_the_tail(cold):
    """Only with a context arena of its own: the pages are there, the slot had another request."""
    engine = tiny_engine.engine(
        PAIR / "target",
        PAIR / "drafter",
        num_pages=60,
        page_size=8,
        max_seq_len=96,
        max_batch_size=1,
        **ARENA,
    )
    batch = watched(engine)
    serve(batch, [*STEM, 7])
    serve(batch, OTHER)
    row = serve(batch, [*STEM, 8, 9])
    assert row.token_ids == cold[tuple(row.prompt)].token_ids
    assert (row.stats.reused_prompt_tokens, row.stats.context_reused_tokens) == (40, 0)
    assert row.stats.num_drafts > 0


def test_pages_behind_the_drafters_positions_are_reused_only_with_their_context(tmp_path: Path):
    """A drafter of 40 positions: no more than the pages whose context is whole are shared."""
    target = tiny.write_target(tmp_path / "target")
    drafter = tiny.write_drafter(tmp_path / "drafter", max_position_embeddings=40)
    engine = tiny_engine.engine(
        target, drafter, num_pages=30, page_size=8, max_seq_len=96, max_batch_size=1, **POOL
    )
    batch = watched(engine)
    prompt = np.random.default_rng(5).integers(0, 97, 60).tolist()
    first, again = serve(batch, prompt), serve(batch, prompt)
    assert again.token_ids == first.token_ids
    assert again.stats.reused_prompt_tokens == again.stats.context_reused_tokens == 32
    assert again.stats.drafts_per_round == first.stats.drafts_per_round


def test_a_pool_without_room_for_one_row_is_refused():
    with pytest.raises(ValueError, match="12 pages for rows of 13"):
        watched(
            tiny_engine.engine(
                PAIR / "target", None, num_pages=12, page_size=8, max_seq_len=96, **ARENA
            )
        )


# Invariants of the compiled programs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny.write_two_layers(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(
    ("store", "read_piece"),
    [
        pytest.param(POOL, 256, id="pool-256"),
        pytest.param(ARENA, 256, id="arena-256", marks=pytest.mark.slow),
        pytest.param(POOL, None, id="pool-whole", marks=pytest.mark.slow),
        pytest.param(ARENA, None, id="arena-whole"),
    ],
)
def test_pools_are_updated_in_place_and_temporaries_grow_with_the_rows_read(
    folders, store: dict[str, Any], read_piece: int | None
):
    """Invariant 6: alias bytes and temporaries(4C) - temporaries(C), as for contiguous arenas."""
    models = (
        programs.split_model(dj.load_target(folders[0])),
        programs.split_model(dj.load_drafter(folders[1])),
    )
    found: dict[tuple[str, int], Any] = {}
    for length in (512, 2048):
        config = tiny_engine.resolved(
            *folders,
            read_piece=read_piece,
            num_pages=4 * (length + 32) // 32,
            max_seq_len=length,
            max_batch_size=4,
            max_num_tokens=64,
            **store,
        )
        state = jax.eval_shape(lambda config=config: programs.init_state(config))
        arrays = jax.tree.leaves((state.kv.layers, state.context and state.context.layers))
        size = sum(array.size * array.dtype.itemsize for array in arrays)
        listed = {program.name: program for program in programs.list_programs(config, *models)}
        for name in ("prefill-64", "round-4-greedy", "copy", "copy-page", "clean", "open"):
            if length == 512 or name in ("prefill-64", "round-4-greedy"):
                memory: Any = programs.compile_program(listed[name]).memory_analysis()
                assert memory.alias_size_in_bytes >= size, name
                found[name, length] = memory.temp_size_in_bytes
    for name, rows, width in (("prefill-64", 1, 64), ("round-4-greedy", 4, 4)):
        growth = found[name, 2048] - found[name, 512]
        target, extra = config.target, 2048 - 512
        scores = rows * target.num_attention_heads * width * extra * 4
        read = 2 * rows * target.num_key_value_heads * target.head_dim * extra * 4
        assert growth <= 1.2 * (scores + read), (name, growth, scores, read)
        if read_piece is not None:
            assert growth <= 0.1 * (scores + read)


def test_a_default_configuration_of_pages_has_at_most_24_programs(folders):
    models = (
        programs.split_model(dj.load_target(folders[0])),
        programs.split_model(dj.load_drafter(folders[1])),
    )
    config = tiny_engine.resolved(*folders, num_pages=2000, **POOL)
    names = [program.name for program in programs.list_programs(config, *models)]
    assert len(names) == len(set(names)) <= 24 and "copy-page" in names


def test_an_engine_of_pages_starts_plans_serves_and_compiles_nothing_more(folders):
    """Invariants 5, 7, 8: as a user starts it."""
    llm = dj.LLM(*folders, max_seq_len=64, max_batch_size=2, page_size=16, **POOL)
    pool = llm.plan.pool
    assert pool is not None and pool.pages == llm.config.num_pages == 2 * 5

    def layers(tree: Any) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(tree))

    arenas = llm.arenas
    assert arenas.context is not None
    assert layers(arenas.kv.layers) + layers(arenas.context.layers) == pool.nbytes
    assert arenas.kv.lengths.tolist() == arenas.context.lengths.tolist() == [0, 0]
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(arenas.kv.layers))
    prompts = [[1, 2, 3] * 12, [1, 2, 3] * 12 + [4], [5]]
    params = dj.SamplingParams(max_tokens=9)
    plain = tiny_engine.start(folders[0], None, max_seq_len=64, max_batch_size=2)
    before = llm.compiles_in_service
    done = llm.generate(prompts, params) + llm.generate(prompts[::-1], params)
    assert llm.compiles_in_service == before
    wanted = plain.generate(prompts, params) + plain.generate(prompts[::-1], params)
    assert [one.token_ids for one in done] == [one.token_ids for one in wanted]
    assert llm.load().prefix_tokens > 0
