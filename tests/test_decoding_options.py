"""What a slot asks for is data: its filler, its bytes, and what is counted of an answer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.arena import sizes
from dflash_jax.decoding.options import NO_ID, count_outputs, init_counts, init_options
from dflash_jax.decoding.state import init_state
from planning_pairs import TINY, TINY_DRAFTER, resolved


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("n", "v"), [(1, 97), (5, 4), (16, 1000)])
def test_options_and_counts_have_the_bytes_of_the_formulas(n: int, v: int):
    """Invariant 5. 2,566 bytes a slot, and 5 for every id."""
    assert nbytes(init_options(n)) == sizes.options_bytes(n) == 2566 * n
    assert nbytes(init_counts(n, v)) == sizes.counts_bytes(n, v) == 5 * n * v


@pytest.mark.parametrize("drafted", [True, False])
def test_token_state_has_the_bytes_of_the_formula(drafted: bool):
    """Invariant 5: everything of the state that is not a row of an arena."""
    serve = dj.ServeConfig(max_seq_len=50, max_batch_size=3, dtype="float32")
    config = resolved(serve, TINY, TINY_DRAFTER if drafted else None)
    state = init_state(config)
    rows = nbytes(state.kv.layers) + (nbytes(state.context.layers) if state.context else 0)
    held = nbytes(state) - rows
    assert held == sizes.token_state_bytes(3, TINY.vocab_size, context=drafted)


def test_a_slot_starts_greedy_with_everything_else_off():
    options = init_options(2)
    neutral = dict.fromkeys(options._fields, 0) | {"top_p": 1, "repetition": 1, "seeded": True}
    neutral |= {"bias_ids": NO_ID, "ban_ids": NO_ID}
    for name, array in options._asdict().items():
        assert array.shape[0] == 2 and np.all(np.asarray(array) == neutral[name]), name


def test_the_filler_is_beyond_every_vocabulary_and_does_not_wrap():
    assert NO_ID == np.iinfo(np.int32).max
    scattered = jnp.zeros((4,)).at[jnp.array([NO_ID, 2])].add(1.0, mode="drop")
    assert scattered.tolist() == [0, 0, 1, 0]


def test_no_two_arrays_are_one_so_that_the_state_can_be_donated():
    leaves = jax.tree.leaves((init_options(3), init_counts(3, 5)))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_only_the_kept_tokens_of_live_rows_are_counted():
    """Fault 116. Slot 2 keeps two of three, slot 0 all, one row is dead, one keeps nothing."""
    counts = init_counts(3, 5)
    counts = counts._replace(prompt_seen=counts.prompt_seen.at[2, 4].set(True))
    slots = jnp.array([2, 3, 0, 1], jnp.int32)
    tokens = jnp.array([[1, 3, 4], [0, 1, 2], [4, 4, 0], [-1, -1, -1]], jnp.int32)
    after = jax.jit(count_outputs)(counts, slots, tokens, jnp.array([2, 3, 3, 0], jnp.int32))
    assert after.output_counts.tolist() == [[1, 0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]]
    assert np.array_equal(after.prompt_seen, counts.prompt_seen)
    again = count_outputs(after, slots, tokens, jnp.array([1, 0, 0, 0], jnp.int32))
    assert (again.output_counts - after.output_counts).tolist() == [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
    ]
