"""Drafts of the host on their way into a round: what is packed is what is proposed."""

import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.draft import Drafter
from dflash_jax.decoding.given import GivenDrafter, pack_drafts


def given(drafts: dict[int, list[int]], active: list[bool], draft_len: int) -> GivenDrafter:
    packed = pack_drafts(drafts, len(active), draft_len)
    return GivenDrafter(jnp.asarray(packed), jnp.asarray(active))


def test_drafts_are_packed_as_their_number_their_tokens_and_filler():
    packed = pack_drafts({0: [5, 6, 7], 2: [8]}, 4, 3)
    assert packed.dtype == np.int32
    assert packed.tolist() == [[3, 5, 6, 7], [0, 0, 0, 0], [1, 8, 0, 0], [0, 0, 0, 0]]


def test_what_is_packed_is_proposed_and_nothing_for_rows_that_are_not_active():
    method = given({0: [5, 6], 1: [7], 3: [8, 9]}, [True, True, True, False], 2)
    assert isinstance(method, Drafter)
    assert (method.draft_len, method.layer_ids) == (2, ())
    slots = jnp.arange(4, dtype=jnp.int32)
    proposal = method.propose(None, slots, slots, None)
    assert proposal.count.tolist() == [2, 1, 0, 0]
    assert proposal.tokens[0].tolist() == [5, 6] and proposal.tokens[1, 0] == 7
    assert proposal.log_q is None


def test_nothing_is_kept_between_rounds():
    method = given({}, [True], 2)
    slots, features = jnp.zeros((1,), jnp.int32), jnp.zeros((1, 3, 0), jnp.float32)
    assert method.absorb(None, slots, features, slots) is None
    assert method.follows(None, slots).tolist() == [True]
