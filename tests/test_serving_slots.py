"""Which slot a request gets, what it takes over, and when a row moves; plain Python."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.serving.slots import LEAST_COPY, Place, Slots

LONG = list(range(100, 100 + 2 * LEAST_COPY))


def table(size: int = 8, *, reuse: bool = True, limit: int | None = 10**6) -> Slots:
    buckets = [1 << i for i in range(size.bit_length()) if 1 << i < size]
    return Slots((*buckets, size), reuse=reuse, context_limit=limit)


def taken(slots: Slots, tokens: list[int]) -> Place:
    place = slots.take(tokens)
    assert place is not None
    return place


def serve(slots: Slots, tokens: list[int], more: int = 0) -> int:
    """One request that comes, decodes `more` tokens and leaves."""
    slot = taken(slots, tokens).slot
    slots.hold(slot, [*tokens, *range(1000, 1000 + more)])
    slots.release(slot)
    return slot


def test_one_request_after_another_stays_in_the_smallest_bucket():
    slots = table()
    assert [serve(slots, [i, i, i]) for i in range(5)] == [0] * 5


def test_requests_at_once_stay_together_at_the_front():
    slots = table(6)
    got = [taken(slots, [i]).slot for i in range(6)]
    assert [set(got[:size]) <= set(range(bound)) for size, bound in ((1, 1), (2, 2), (4, 4))] == [
        True
    ] * 3
    assert sorted(got) == list(range(6))
    assert slots.take([9]) is None and slots.num_free == 0


def test_a_prefix_is_taken_over_where_it_is_when_its_slot_is_free():
    slots = table()
    serve(slots, [1, 2, 3, 4])
    assert taken(slots, [1, 2, 3, 9]) == Place(slot=0, source=0, kv_kept=3, context_kept=3)
    assert (slots.hits, slots.hit_tokens) == (1, 3)


def test_one_token_of_the_prompt_is_always_left_to_compute():
    """Fault 50: a prompt that is there in full, and one that is shorter than what is there."""
    slots = table()
    serve(slots, LONG)
    assert taken(slots, LONG).kv_kept == len(LONG) - 1
    slots.release(0)
    assert taken(slots, LONG[:5]).kv_kept == 4


def test_a_running_requests_prefix_is_copied_and_a_short_one_is_computed():
    slots = table()
    running = taken(slots, LONG).slot
    slots.hold(running, LONG)
    copied = taken(slots, [*LONG, 7])
    assert copied == Place(1, running, len(LONG), len(LONG))
    short = taken(slots, [*LONG[: LEAST_COPY - 1], 7])
    assert (short.source, short.kv_kept) == (short.slot, 0)


def test_the_least_recently_used_of_the_free_slots_is_given_up():
    slots = table(4)
    for i in range(4):
        slots.hold(taken(slots, [i] * 20).slot, [i] * 20)
    for slot in (2, 0, 3, 1):
        slots.release(slot)
    slots.index.touch(2)
    first = taken(slots, [50, 51])
    second = taken(slots, [60, 61])
    assert first.slot == 0  # the smallest bucket decides first
    assert second.slot == 1
    assert taken(slots, [70]).slot == 3
    assert taken(slots, [2] * 20) == Place(2, 2, 19, 19)


def test_without_reuse_nothing_is_taken_over():
    slots = table(reuse=False)
    serve(slots, LONG)
    assert taken(slots, LONG).kv_kept == 0 and slots.hits == 0


def test_what_is_wrong_is_not_taken_over():
    slots = table()
    slot = taken(slots, LONG).slot
    slots.hold(slot, LONG)
    assert slots.discard(slot) == [] and slots.num_free == 8
    assert taken(slots, LONG).kv_kept == 0


def test_a_row_moves_when_a_smaller_bucket_would_do():
    slots = table(8)
    for i in range(5):
        slots.hold(taken(slots, [i]).slot, [i])
    assert slots.hole() is None
    slots.release(1)
    source, target = slots.hole() or (-1, -1)
    assert (source, target) == (4, 1)
    slots.move(source, target)
    assert slots.hole() is None
    # Three of four rows need the bucket of four as they are.
    slots.release(0)
    assert slots.hole() is None
    slots.release(2)
    assert slots.hole() is not None


def test_a_slot_that_a_row_left_by_moving_still_offers_what_it_holds():
    slots = table(2)
    first, second = taken(slots, [1, 1]).slot, taken(slots, LONG).slot
    slots.hold(second, LONG)
    slots.release(first)
    hole = slots.hole()
    if hole is not None:
        slots.move(*hole)
    assert slots.index.longest(LONG)[1] == len(LONG)


@pytest.mark.parametrize(("limit", "context"), [(None, 0), (0, 0), (19, 0), (20, 20), (99, 20)])
def test_context_is_taken_over_only_where_it_is_whole(limit, context):
    """No drafter; a ring; a prefix beyond, at and below the length where context is frozen."""
    slots = table(limit=limit)
    serve(slots, LONG)
    place = taken(slots, [*LONG[:20], 7])
    assert (place.kv_kept, place.context_kept) == (20, context)


def test_context_that_began_later_is_taken_over_from_there():
    slots = table(limit=12)
    serve(slots, LONG)
    first = taken(slots, [*LONG[:20], 7])
    assert (first.kv_kept, first.context_kept) == (20, 0)
    slots.hold(first.slot, [*LONG[:20], *range(7, 17)])
    slots.release(first.slot)
    again = taken(slots, [*LONG[:20], *range(7, 15), 99])
    # 28 tokens of K/V, and context of the last 8 of them.
    assert (again.kv_kept, again.context_kept) == (28, 8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_slots_are_never_shared_and_prefixes_are_really_there(data):
    """Random traffic beside a plain record of what each slot holds."""
    size = data.draw(st.integers(1, 6))
    slots, held, busy = table(size), {}, {}
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(("take", "release", "move")))
        if kind == "take":
            tokens = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
            place = slots.take(tokens)
            assert (place is None) == (len(busy) == size)
            if place is None:
                continue
            assert place.slot not in busy
            assert place.kv_kept < len(tokens)
            assert held.get(place.source, [])[: place.kv_kept] == tokens[: place.kv_kept]
            busy[place.slot] = held[place.slot] = tokens
            slots.hold(place.slot, tokens)
        elif kind == "release" and busy:
            slot = data.draw(st.sampled_from(sorted(busy)))
            grown = [*busy.pop(slot), *data.draw(st.lists(st.integers(0, 2), max_size=5))]
            held[slot] = grown
            slots.hold(slot, grown)
            slots.release(slot)
        elif kind == "move":
            while (hole := slots.hole()) is not None:
                source, target = hole
                assert source in busy and target not in busy and target < source
                slots.move(source, target)
                busy[target] = busy.pop(source)
                held[target] = list(held[source])
            enough = next(b for b in slots._buckets if b >= len(busy)) if busy else 0
            assert all(slot < enough for slot in busy)
