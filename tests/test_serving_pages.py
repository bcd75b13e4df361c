"""The page pool beside a simulated memory: whatever is reused is really there, nothing is lost.

The memory is a list of (token, has context) a page, written as the device would be: copies when a
request writes for the first time, garbage wherever a round may write, committed tokens over it.
What a lease claims is compared with what can be read there through its page list.
"""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dflash_jax.serving.pages import Lease, PagePool

GARBAGE = (-1, False)
Entry = tuple[int, bool]


class Memory:
    """What the pages of a pool hold, and requests that read and write through their leases."""

    def __init__(self, pool: PagePool, num_pages: int):
        self.pool = pool
        self.pages: list[list[Entry]] = [[GARBAGE] * pool.page_size for _ in range(num_pages)]

    def read(self, lease: Lease, length: int) -> list[Entry]:
        size = self.pool.page_size
        return [self.pages[lease.pages[p // size]][p % size] for p in range(length)]

    def write(self, lease: Lease, position: int, entry: Entry) -> None:
        size = self.pool.page_size
        self.pages[lease.pages[position // size]][position % size] = entry

    def run(self, lease: Lease, tokens: Sequence[int], *, with_context: bool = False) -> None:
        """Computes what is missing up to `tokens`, with rejected drafts behind, and commits it."""
        for source, own in lease.copies:
            self.pages[own] = list(self.pages[source])
        start = lease.committed
        for position in range(start, len(lease.pages) * self.pool.page_size):
            self.write(lease, position, GARBAGE)
        for position in range(start, len(tokens)):
            self.write(lease, position, (tokens[position], with_context))
        self.pool.commit(lease, tokens, with_context=with_context)


def served(
    memory: Memory, tokens: Sequence[int], *, reserve: int = 0, with_context: bool = False
) -> Lease:
    """A request that is admitted and computes its prompt."""
    lease = memory.pool.admit(tokens, reserve)
    assert lease is not None
    memory.run(lease, tokens, with_context=with_context)
    return lease


def state(pool: PagePool) -> tuple[object, ...]:
    pages = [(p.references, p.content, p.has_context) for p in pool._pages]
    counters = (pool.hits, pool.hit_tokens, pool.evictions)
    return pages, list(pool._free), list(pool._cached), counters


def small(num_pages: int = 8, page_size: int = 4, *, reuse: bool = True) -> Memory:
    return Memory(PagePool(num_pages, page_size, reuse=reuse), num_pages)


def test_full_pages_of_a_known_prefix_are_shared_and_the_rest_is_the_requests_own():
    memory = small()
    first = served(memory, range(10))
    assert (first.reused, first.copies, len(first.pages)) == (0, [], 3)
    second = memory.pool.admit([*range(8), 50, 51, 52], 3)
    assert second is not None
    assert (second.reused, second.copies, len(second.pages)) == (8, [], 4)
    assert second.pages[:2] == first.pages[:2]
    assert not set(second.pages[2:]) & set(first.pages)
    assert (memory.pool.hits, memory.pool.hit_tokens) == (1, 8)


def test_a_page_that_is_shared_in_part_is_copied():
    memory = small()
    first = served(memory, range(12), with_context=True)
    second = memory.pool.admit([*range(10), 50, 51], 0)
    assert second is not None
    assert second.reused == second.context_reused == 10
    assert second.copies == [(first.pages[2], second.pages[2])]
    memory.run(second, [*range(10), 50, 51])
    assert second.copies == []
    assert [token for token, _ in memory.read(second, 12)] == [*range(10), 50, 51]
    assert [token for token, _ in memory.read(first, 12)] == [*range(12)]


def test_of_pages_that_start_alike_the_one_that_shares_most_is_copied():
    memory = small()
    served(memory, [1, 2, 9, 9])
    closest = served(memory, [1, 2, 3, 9])
    lease = memory.pool.admit([1, 2, 3, 4, 5], 0)
    assert lease is not None
    assert (lease.reused, lease.copies) == (3, [(closest.pages[0], lease.pages[0])])


@pytest.mark.parametrize("length", (1, 4, 5, 8))
def test_one_token_of_a_prompt_that_is_all_known_is_left_to_compute(length: int):
    memory = small()
    memory.pool.release(served(memory, range(8)))
    lease = memory.pool.admit(range(length), 0)
    assert lease is not None
    assert lease.reused == length - 1
    assert len(lease.copies) == (lease.reused % 4 > 0)


def test_tokens_beyond_the_last_full_page_are_not_known_to_others():
    memory = small()
    memory.pool.release(served(memory, range(7)))
    lease = memory.pool.admit(range(8), 0)
    assert lease is not None and lease.reused == 4


def test_a_running_requests_pages_are_shared_as_soon_as_they_are_full():
    """Chunk by chunk and round by round; what is not committed yet is shared with nobody."""
    memory = small()
    running = memory.pool.admit(range(6), 10)
    assert running is not None
    for length, known in ((3, 0), (4, 4), (7, 4), (9, 8)):
        memory.run(running, range(length))
        other = memory.pool.admit([*range(12), 50], 0)
        assert other is not None and other.reused == known
        memory.pool.release(other)


def test_tokens_that_differ_are_not_taken_for_each_other_where_their_hashes_are_equal():
    """2^61 - 1 is the modulus of Python's number hash; both pages of the chain have a twin."""
    twin = sys.hash_info.modulus
    tokens, others = (5, 0, 5, 5), (5, twin, 5, 5)
    assert hash(tokens) == hash(others)
    memory = small()
    served(memory, [*tokens, 1, 1, 1, 1, 1])
    served(memory, [*others, 2, 2, 2, 2, 2])
    for prompt, known in (
        ([*tokens, 1, 1, 1, 1, 7], 8),
        ([*others, 2, 2, 2, 2, 7], 8),
        ([*others, 1, 1, 1, 1, 7], 4),
        ([*tokens, 2, 2, 2, 2, 7], 4),
        ([5, twin, 7], 2),
    ):
        lease = memory.pool.admit(prompt, 0)
        assert lease is not None and lease.reused == known
        memory.run(lease, prompt)
        assert [token for token, _ in memory.read(lease, len(prompt))] == prompt
        memory.pool.release(lease)


def test_context_is_reused_up_to_the_first_page_without():
    memory = small(16)
    first = memory.pool.admit(range(16), 0)
    assert first is not None
    memory.run(first, range(4), with_context=True)
    memory.run(first, range(9), with_context=True)
    memory.run(first, range(12), with_context=False)
    memory.run(first, range(16), with_context=True)
    for length, reused, context in ((8, 7, 7), (9, 8, 8), (11, 10, 8), (13, 12, 8), (17, 16, 8)):
        lease = memory.pool.admit(range(length), 0)
        assert lease is not None
        assert (lease.reused, lease.context_reused) == (reused, context)
        memory.pool.release(lease)


def test_a_page_that_began_with_copied_tokens_without_context_has_none():
    memory = small()
    served(memory, range(4), with_context=False)
    second = served(memory, [0, 1, 50, 51], with_context=True)
    assert second.reused == 2
    third = memory.pool.admit([0, 1, 50, 51, 52], 0)
    assert third is not None
    assert (third.reused, third.context_reused) == (4, 0)


@pytest.mark.parametrize("order", ((0, 1), (1, 0)))
def test_of_two_pages_with_the_same_tokens_the_one_with_context_is_shared_and_kept(order):
    """Two requests compute one prompt side by side, one of them without drafting."""
    memory = small()
    leases = [memory.pool.admit(range(5), 0) for _ in range(2)]
    for lease, with_context in zip(leases, (False, True), strict=True):
        assert lease is not None
        memory.run(lease, range(5), with_context=with_context)
    for index in order:
        third = memory.pool.admit(range(5), 0)
        assert third is not None
        assert (third.reused, third.context_reused) == (4, 4)
        memory.pool.release(third)
        memory.pool.release(leases[index])
    assert (memory.pool.free, memory.pool.cached, memory.pool.used) == (7, 1, 0)
    last = memory.pool.admit(range(5), 0)
    assert last is not None
    assert (last.reused, last.context_reused) == (4, 4)


def test_the_least_recently_used_pages_are_evicted_and_the_ends_of_prefixes_first():
    memory = small(num_pages=6)
    for start in (0, 100, 200):
        memory.pool.release(served(memory, range(start, start + 8)))
    memory.pool.release(served(memory, range(9), reserve=3))  # used again: now the latest
    assert (memory.pool.free, memory.pool.cached, memory.pool.evictions) == (1, 5, 1)
    for start, known in ((0, 8), (200, 8), (100, 4)):
        lease = memory.pool.admit([*range(start, start + 8), 50], 0)
        assert lease is not None and lease.reused == known
        memory.pool.release(lease)


def test_a_page_is_not_evicted_before_what_continues_it_though_its_twin_was_left_long_ago():
    """Two requests compute the same page side by side; the one that goes on leaves last."""
    memory = small(num_pages=4)
    first, second = (memory.pool.admit(range(4), reserve) for reserve in (0, 4))
    assert first is not None and second is not None
    memory.run(first, range(4))
    memory.run(second, range(4))
    memory.pool.release(first)
    memory.run(second, range(8))
    memory.pool.release(second)
    assert (memory.pool.free, memory.pool.cached) == (2, 2)
    memory.pool.release(served(memory, range(50, 62)))
    assert memory.pool.evictions == 1
    lease = memory.pool.admit(range(9), 0)
    assert lease is not None and lease.reused == 4


def test_admission_waits_without_a_trace_until_pages_are_given_back():
    memory = small(num_pages=4)
    running = served(memory, range(8), reserve=2)
    before = state(memory.pool)
    assert memory.pool.admit(range(50, 55), 0) is None
    assert memory.pool.admit([*range(8), 50, 51, 52, 53, 54], 0) is None
    assert state(memory.pool) == before and len(running.pages) == 3
    memory.pool.release(running)
    assert memory.pool.admit(range(50, 55), 11) is not None
    assert memory.pool.evictions == 2


def test_a_request_that_fills_the_pool_does_without_the_copy_it_has_no_page_for():
    memory = small(num_pages=3)
    memory.pool.release(served(memory, range(8)))
    lease = memory.pool.admit([*range(6), *range(50, 56)], 0)
    assert lease is not None
    assert (lease.reused, lease.copies, memory.pool.used) == (4, [], 3)


def test_the_source_of_a_copy_stays_intact_until_the_copy_is_done():
    """Admissions before the copy may evict anything else, but not that page."""
    memory = small(num_pages=4)
    memory.pool.release(served(memory, range(4)))
    waiting = memory.pool.admit([0, 1, 2, 50], 0)
    assert waiting is not None and len(waiting.copies) == 1
    served(memory, range(60, 68))
    assert memory.pool.admit([70], 0) is None
    memory.run(waiting, [0, 1, 2, 50])
    assert [token for token, _ in memory.read(waiting, 4)] == [0, 1, 2, 50]
    assert memory.pool.admit([70], 0) is not None and memory.pool.evictions == 1


def test_a_request_cancelled_before_its_copy_gives_the_source_back():
    memory = small()
    memory.pool.release(served(memory, range(4)))
    lease = memory.pool.admit(range(4), 0)
    assert lease is not None and memory.pool.used == 2
    memory.pool.release(lease)
    before = state(memory.pool)
    memory.pool.release(lease)
    assert state(memory.pool) == before
    assert (memory.pool.free, memory.pool.cached, memory.pool.used) == (7, 1, 0)


def test_without_reuse_nothing_is_shared_or_kept():
    memory = small(reuse=False)
    first = served(memory, range(8))
    second = served(memory, range(8))
    assert second.reused == 0 and not set(first.pages) & set(second.pages)
    memory.pool.release(first)
    memory.pool.release(second)
    assert (memory.pool.free, memory.pool.cached, memory.pool.hits) == (8, 0, 0)


def test_drafts_of_newcomers_never_write_into_the_prefix_they_share():
    """Fault 46. A decodes on its prefix while B, C and D are admitted on it and draft."""
    memory = small(num_pages=40)
    prompt = list(range(16))
    running = served(memory, prompt, reserve=3 + 5)
    others: list[tuple[Lease, list[int]]] = []
    for newcomer in range(3):
        prompt = [*prompt, 100 + newcomer]
        memory.run(running, prompt)
        tokens = [*range(16), 200 + newcomer]
        lease = memory.pool.admit(tokens, 3 + 5)
        assert lease is not None and lease.reused == 16
        assert lease.pages[:4] == running.pages[:4] and len(lease.pages) * 4 >= 17 + 3 + 5
        others.append((lease, tokens))
        for lease, tokens in others:
            memory.run(lease, tokens)
            tokens.append(300 + newcomer)
        assert [token for token, _ in memory.read(running, len(prompt))] == prompt
    for lease, tokens in others:
        memory.run(lease, tokens)
        assert [token for token, _ in memory.read(lease, len(tokens))] == tokens


def test_what_can_never_fit_is_known_and_costs_the_others_nothing():
    """Fault 64. One request larger than the pool, then three small ones."""
    pool = PagePool(4, 4)
    before = state(pool)
    for _ in range(10):
        assert pool.admit(range(14), 3) is None
    assert state(pool) == before
    leases = [pool.admit([start], 2) for start in range(3)]
    for lease in leases:
        assert lease is not None
        pool.release(lease)
    assert pool.free == 4
    assert pool.admit(range(14), 2) is not None


def test_reserved_positions_come_back_with_the_request():
    """Fault 65. 200 short requests over 4 slots, stopping anywhere, all they may write reserved."""
    draw = random.Random(0)
    memory = small(num_pages=48)
    running: list[tuple[Lease, list[int], int]] = []
    for number in range(200):
        if len(running) == 4:
            lease, _, _ = running.pop(draw.randrange(4))
            memory.pool.release(lease)
        prompt = [number, *range(draw.randrange(12))]
        running.append(
            (served(memory, prompt, reserve=48 - len(prompt)), prompt, draw.randrange(1, 12))
        )
        for lease, tokens, rounds in running:
            for _ in range(draw.randrange(rounds)):
                tokens += range(draw.randrange(1, 10))
                memory.run(lease, tokens[: min(len(tokens), 39)])
    for lease, _, _ in running:
        memory.pool.release(lease)
    assert memory.pool.used == 0 and memory.pool.free + memory.pool.cached == 48


def brute_force(known: Sequence[Sequence[int]], prompt: Sequence[int], size: int) -> int:
    """Tokens to reuse where every full page that was ever committed is still there."""
    best = 0
    for tokens in known:
        kept = list(tokens[: len(tokens) // size * size])
        limit = min(len(kept), len(prompt) - 1)
        best = max(best, *(n for n in range(limit + 1) if kept[:n] == list(prompt[:n])))
    return best


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=8),
    size=st.integers(1, 4),
)
def test_in_a_large_pool_the_longest_prefix_of_all_is_reused(prompts, size):
    memory = small(num_pages=200, page_size=size)
    for number, prompt in enumerate(prompts):
        lease = memory.pool.admit(prompt, 1)
        assert lease is not None
        assert lease.reused == brute_force(prompts[:number], prompt, size)
        memory.run(lease, prompt)
        if number % 2:
            memory.pool.release(lease)


PAGES, SIZE = 9, 3
# Mostly zeros, so that requests often share their starts.
texts = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=13)


class AnyOrder(RuleBasedStateMachine):
    """Requests come, compute, grow and leave in any order in a pool that is too small for them."""

    def __init__(self):
        super().__init__()
        self.memory = small(PAGES, SIZE)
        self.pool = self.memory.pool
        self.running: list[tuple[Lease, list[int]]] = []
        self.known: list[list[int]] = []

    def pick(self, number: int) -> tuple[Lease, list[int]]:
        return self.running[number % len(self.running)]

    @rule(prompt=texts, reserve=st.integers(0, 8))
    def admit(self, prompt: list[int], reserve: int) -> None:
        before, free, cached = state(self.pool), self.pool.free, self.pool.cached
        lease = self.pool.admit(prompt, reserve)
        if lease is None:
            assert state(self.pool) == before
            assert -(-(len(prompt) + reserve) // SIZE) > free + cached - self.shared(prompt)
            return
        assert lease.reused <= brute_force(self.known, prompt, SIZE)
        assert lease.context_reused <= lease.reused < len(prompt)
        assert len(lease.pages) == -(-(len(prompt) + reserve) // SIZE)
        self.running.append((lease, prompt))

    def shared(self, prompt: list[int]) -> int:
        """Most full pages that others hold and the prompt could share."""
        held = [tokens[: lease.committed] for lease, tokens in self.running]
        return brute_force(held, prompt, SIZE) // SIZE

    @rule(number=st.integers(0, 50), count=st.integers(1, 6), with_context=st.booleans())
    def compute(self, number: int, count: int, with_context: bool) -> None:
        """A chunk of the prompt."""
        if not self.running:
            return
        lease, tokens = self.pick(number)
        self.memory.run(lease, tokens[: lease.committed + count], with_context=with_context)
        self.known.append(tokens[: lease.committed])

    @rule(number=st.integers(0, 50), new=texts, with_context=st.booleans())
    def decode(self, number: int, new: list[int], with_context: bool) -> None:
        """A round, within what was reserved."""
        if not self.running:
            return
        lease, tokens = self.pick(number)
        tokens += new[: len(lease.pages) * SIZE - len(tokens)]
        self.memory.run(lease, tokens, with_context=with_context)
        self.known.append(list(tokens))

    @rule(number=st.integers(0, 50))
    def release(self, number: int) -> None:
        if not self.running:
            return
        lease, _ = self.running.pop(number % len(self.running))
        self.pool.release(lease)

    @invariant()
    def a_page_is_free_or_cached_or_used_by_those_who_list_it(self) -> None:
        holders = Counter(page for lease, _ in self.running for page in lease.pages)
        holders.update(source for lease, _ in self.running for source, _ in lease.copies)
        assert [page.references for page in self.pool._pages] == [holders[p] for p in range(PAGES)]
        assert sorted([*holders, *self.pool._free, *self.pool._cached]) == list(range(PAGES))
        assert self.pool.used == len(holders)
        assert self.pool.free + self.pool.cached + self.pool.used == PAGES

    @invariant()
    def what_can_be_written_is_not_shared(self) -> None:
        for lease, _ in self.running:
            for page in lease.pages[lease.committed // SIZE :]:
                assert self.pool._pages[page].references == 1

    @invariant()
    def what_a_lease_claims_is_what_its_pages_hold(self) -> None:
        for lease, tokens in self.running:
            pages = dict(enumerate(lease.pages))
            for source, own in lease.copies:
                pages[lease.pages.index(own)] = source
            entries = [
                self.memory.pages[pages[p // SIZE]][p % SIZE] for p in range(lease.committed)
            ]
            assert [token for token, _ in entries] == tokens[: lease.committed]
            assert all(context for _, context in entries[: lease.context_reused])

    @invariant()
    def every_page_that_keeps_tokens_can_be_found_by_them(self) -> None:
        """And each holds just those: the index is no larger than the pool."""
        found, contents = [], [self.pool._index.root]
        for content in contents:
            assert content.pages or content is self.pool._index.root
            found += content.pages
            contents += content.children.values()
            for tokens, child in content.children.items():
                assert (child.tokens, child.parent) == (tokens, content)
                for page in child.pages:
                    assert tuple(token for token, _ in self.memory.pages[page]) == tokens
        kept = [page for page in range(PAGES) if self.pool._pages[page].content is not None]
        assert sorted(found) == kept and set(self.pool._cached) <= set(kept)

    def teardown(self) -> None:
        for lease, _ in self.running:
            self.pool.release(lease)
        assert self.pool.used == 0 and self.pool.free + self.pool.cached == PAGES
        whole = self.pool.admit([7] * PAGES * SIZE, 0)
        assert whole is not None and sorted(whole.pages) == list(range(PAGES))


AnyOrder.TestCase.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=40, derandomize=True
)
test_requests_in_any_order_share_what_is_there_and_lose_no_page = AnyOrder.TestCase


@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_walk_of_requests_holds_the_same(seed: int):
    """Longer than what hypothesis draws, so that pages are evicted and duplicated many times."""
    draw, machine = random.Random(seed), AnyOrder()

    def text() -> list[int]:
        return draw.choices([0, 0, 0, 1], k=draw.randrange(1, 14))

    for _ in range(1500):
        number, with_context = draw.randrange(50), draw.random() < 0.7
        step = draw.choice("admit compute compute decode decode release".split())
        if step == "admit":
            machine.admit(text(), draw.randrange(9))
        elif step == "compute":
            machine.compute(number, draw.randrange(1, 7), with_context)
        elif step == "decode":
            machine.decode(number, text()[:4], with_context)
        else:
            machine.release(number)
        machine.a_page_is_free_or_cached_or_used_by_those_who_list_it()
        machine.what_can_be_written_is_not_shared()
        machine.what_a_lease_claims_is_what_its_pages_hold()
        machine.every_page_that_keeps_tokens_can_be_found_by_them()
    assert machine.pool.hits > 100 and machine.pool.evictions > 100
    machine.teardown()


def test_the_pool_imports_no_jax():
    code = "import sys, dflash_jax.serving.pages; sys.exit('jax' in sys.modules)"
    root = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
