"""The planner over many configurations: what must hold for each, whatever its numbers."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

import dflash_jax as dj
from dflash_jax.planning.account import largest
from dflash_jax.planning.footprint import Weights
from dflash_jax.planning.measured import Measured
from dflash_jax.planning.plan import make_plan
from planning_pairs import GIB, RESERVE, TINY, TINY_DRAFTER, inputs, resolved, row_state

quick = settings(max_examples=15, deadline=None, derandomize=True)


class Case(NamedTuple):
    """One configuration, and the memory it is planned for in tenths of its own need."""

    target: dj.TargetConfig
    drafter: dj.DrafterConfig | None
    serve: dj.ServeConfig
    weights: Weights
    shards: int
    tenths: int


POOL = {
    "context_store": st.sampled_from(["arena", "pool"]),
    "allocation_order": st.sampled_from(["arena_first", "pool_first"]),
    "kv_memory_fraction": st.sampled_from([0.1, 0.5, 0.9]),
    "kv_max_bytes": st.sampled_from([None, GIB]),
    "kv_max_tokens": st.sampled_from([None, None, 50_000]),
    "skip_context_budget_check": st.booleans(),
    "kv_layout": st.just("paged"),
}


def numbers(*, paged: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    """Numbers of a case; `case` makes it, for shape checks draw random numbers of their own."""
    pools = [st.just({}), st.fixed_dictionaries(POOL)] if paged else [st.just({})]
    serve = {
        "max_seq_len": st.integers(1, 16_000),
        "max_batch_size": st.integers(1, 64),
        "draft_attention": st.sampled_from(["xla", "pallas"]),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "headroom": st.sampled_from(["measured", "seed"]),
    }
    return st.fixed_dictionaries(
        {
            "serve": st.fixed_dictionaries(serve),
            "pool": st.one_of(pools),
            "heads": st.sampled_from([(1, 16), (2, 64), (8, 128), (8, 64)]),
            "depth": st.integers(4, 48),
            "draft_depth": st.integers(0, 6),
            "positions": st.sampled_from([100, 4096, 10**6]),
            "block_size": st.sampled_from([4, 8, 16]),
            "weights": st.tuples(st.integers(0, 2**34), st.integers(0, 2**31)),
            "shards": st.sampled_from([1, 2, 4]),
            "tenths": st.integers(1, 40),
        }
    )


def case(drawn: dict[str, Any]) -> Case:
    """A pair, its options and its memory; without layers there is no drafter."""
    kv_heads, head_dim = drawn["heads"]
    heads = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    target = dataclasses.replace(
        TINY, num_hidden_layers=drawn["depth"], max_position_embeddings=16_384, **heads
    )
    depth = drawn["draft_depth"]
    drafter = dataclasses.replace(
        TINY_DRAFTER,
        num_target_layers=drawn["depth"],
        num_hidden_layers=depth,
        max_position_embeddings=drawn["positions"],
        block_size=drawn["block_size"],
        windows=(None,) * depth,
        causal=(False,) * depth,
        **heads,
    )
    return Case(
        target=target,
        drafter=drafter if depth else None,
        serve=dj.ServeConfig(**drawn["serve"], **drawn["pool"]),
        weights=Weights(*drawn["weights"]),
        shards=drawn["shards"],
        tenths=drawn["tenths"],
    )


def planned(case: Case, free: int, **options: Any) -> dj.MemoryPlan:
    serve = dataclasses.replace(case.serve, **options)
    config = resolved(serve, case.target, case.drafter, "gpu")
    return make_plan(config, inputs(serve, free, case.weights, case.shards))


def oracle(case: Case, batch: int, seq: int) -> int:
    """Bytes of a contiguous configuration, put together independently of the package."""
    size = 4 if case.serve.dtype == "float32" else 2
    draft, target = case.drafter, case.target
    width = 1 if draft is None else draft.block_size
    heads = -(-target.num_key_value_heads // case.shards)
    position = 2 * heads * target.head_dim * size
    total = sum(case.weights) + batch * (seq + width) * target.num_hidden_layers * position
    rows = batch * width
    total += rows * target.vocab_size * 4 + batch * row_state(target.vocab_size, context=False)
    if draft is None:
        return total
    context = min(seq, draft.max_position_embeddings) + width
    if case.serve.draft_attention == "pallas":
        context = (context + 31) // 32 * 32
    total += batch * context * draft.num_hidden_layers * position
    tokens = max(min(seq, 8192, 2048), rows)
    return total + tokens * 2 * target.hidden_size * size + batch * 4 + 4


def free_of(case: Case) -> int:
    """Memory around what the case needs, so that verdicts of all kinds come up."""
    batch, seq = case.serve.max_batch_size, case.serve.max_seq_len
    assert batch is not None and seq is not None
    return (oracle(case, batch, seq) + RESERVE) * case.tenths // 10


@quick
@given(numbers(paged=False))
def test_the_need_is_the_sum_of_everything_and_of_the_rows(drawn):
    one = case(drawn)
    plan = planned(one, 10**15)
    assert one.serve.max_batch_size is not None and one.serve.max_seq_len is not None
    assert plan.needed == oracle(one, one.serve.max_batch_size, one.serve.max_seq_len)
    assert sum(plan.rows.values()) == plan.needed


@quick
@given(numbers())
def test_the_largest_batch_fits_and_one_more_does_not(drawn):
    one = case(drawn)
    plan = planned(one, free_of(one))
    step = plan.config.max_num_tokens // plan.config.verify_width
    assert_largest(one, "max_batch_size", plan.proven.batch_size, step, lambda v: v == "fits")
    assert_largest(one, "max_batch_size", plan.unproven.batch_size, step, lambda v: v != "refused")
    assert plan.largest_batch_size == plan.proven.batch_size


@quick
@given(numbers())
def test_the_largest_served_length_fits_and_one_more_does_not(drawn):
    one = case(drawn)
    plan = planned(one, free_of(one))
    most = one.target.max_position_embeddings
    assert_largest(one, "max_seq_len", plan.proven.seq_len, most, lambda v: v == "fits")
    assert_largest(one, "max_seq_len", plan.unproven.seq_len, most, lambda v: v != "refused")
    assert plan.largest_seq_len == plan.proven.seq_len


def assert_largest(
    one: Case, option: str, size: int, most: int, holds: Callable[[str], bool]
) -> None:
    """The verdict at `size` holds, and one more does not; 0 is none and `most` another rule's."""
    free = free_of(one)
    assert size == 0 or holds(planned(one, free, **{option: size}).verdict)
    assert size == most or not holds(planned(one, free, **{option: size + 1}).verdict)


@quick
@given(numbers())
def test_the_verdict_agrees_with_the_largest_sizes(drawn):
    one = case(drawn)
    plan = planned(one, free_of(one))
    batch, length = plan.config.max_batch_size, plan.config.max_seq_len
    fits = batch <= plan.largest_batch_size
    assert plan.fits == fits == (length <= plan.largest_seq_len)
    possible = batch <= plan.unproven.batch_size
    assert (plan.verdict != "refused") == possible == (length <= plan.unproven.seq_len)


@quick
@given(numbers(paged=False))
def test_equality_passes_and_a_byte_less_does_not(drawn):
    one = case(drawn)
    need = planned(one, 10**15).needed
    kept = RESERVE + (4 * GIB if one.serve.headroom == "seed" else 0)
    assert planned(one, need + kept).verdict == "fits"
    assert planned(one, need + kept - 1).verdict != "fits"
    least = need + (kept if one.serve.headroom == "seed" else 0)
    assert planned(one, least).verdict != "refused"
    assert planned(one, least - 1).verdict == "refused"


@quick
@given(numbers(paged=False), st.integers(1, 400))
def test_more_of_anything_never_needs_less(drawn, more):
    one = case(drawn)
    serve, free = one.serve, 10**15
    need = planned(one, free).needed
    assert serve.max_batch_size is not None and serve.max_seq_len is not None
    # 8,192 tokens a step hold 512 rows of the widest blocks.
    rows = min(serve.max_batch_size + more, 512)
    assert planned(one, free, max_batch_size=rows).needed > need
    longer = min(serve.max_seq_len + more, 16_384)
    assert planned(one, free, max_seq_len=longer).needed > need
    weights = Weights(one.weights.target + more, one.weights.drafter)
    assert planned(one._replace(weights=weights), free).needed == need + more
    deeper = dataclasses.replace(one.target, num_hidden_layers=one.target.num_hidden_layers + 1)
    none = one._replace(drafter=None)
    assert planned(none._replace(target=deeper), free).needed > planned(none, free).needed
    assert planned(none, free).needed <= need
    assert planned(one._replace(shards=one.shards * 2), free).needed <= need


@quick
@given(numbers(), st.integers(0, 2**36))
def test_more_memory_never_makes_anything_smaller(drawn, more):
    one = case(drawn)
    free = free_of(one)
    less, more_of_it = planned(one, free), planned(one, free + more)
    order = ("refused", "unproven", "fits")
    # A pool that comes first takes its share of more memory, which an arena never gains whole.
    assert order.index(more_of_it.verdict) >= order.index(less.verdict)
    assert more_of_it.largest_batch_size >= less.largest_batch_size
    assert more_of_it.largest_seq_len >= less.largest_seq_len


@quick
@given(numbers(), st.integers(0, 2**35))
def test_a_measured_plan_is_within_memory_or_refused_and_never_unproven(drawn, temporaries):
    one = case(drawn)
    free = free_of(one)
    plan = planned(one, free).with_measured(Measured("round", temporaries, {"round": temporaries}))
    assert plan.verdict in ("fits", "refused")
    assert plan.needed <= plan.available or plan.verdict == "refused"
    assert sum(plan.rows.values()) == plan.needed >= plan.footprint.total
    batch = plan.config.max_batch_size
    assert plan.fits == (batch <= plan.largest_batch_size)


@quick
@given(numbers())
def test_every_plan_can_be_printed_and_written(drawn):
    one = case(drawn)
    plan = planned(one, free_of(one))
    text = str(plan)
    assert all(name in text for name in plan.rows)
    read = json.loads(json.dumps(plan.to_dict()))
    assert (read["refusal"] is not None) == (plan.verdict == "refused")
    assert "<= 0" not in plan.refusal()


@quick
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_the_search_finds_the_largest_that_fits(limit, most):
    asked = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    assert largest(fits, most) == min(limit, most)
    assert len(asked) <= 11 and all(1 <= size <= most for size in asked)
