"""Speculative sampling of rows without a seed: the target's distribution, and the drafts it keeps.

A small drafter and target with table logits, thousands of rows with a seed each, whole rounds of
drafting, judging and accepting. Two tokens are looked at together, so that a second round, which
draws anew at positions whose first drafts were thrown away, is in the figures too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.options import init_counts
from dflash_jax.decoding.rejection import DrawnDrafts
from dflash_jax.decoding.sampling import UNSOUND, RowDraws, choose_drafts, judge_drafts
from dflash_jax.decoding.verify import num_accepted_drafts
from sampling_oracle import Wish, options_of, probabilities

V, K, ROWS = 6, 2, 20_000

WISHES = {
    "temperature": Wish(temperature=0.8),
    "hot": Wish(temperature=2.0),
    "top_k": Wish(temperature=1.0, top_k=3),
    "top_p": Wish(temperature=1.0, top_p=0.8),
    "all filters": Wish(temperature=1.4, top_k=5, top_p=0.9, min_p=0.05),
}


class Pair(NamedTuple):
    """Logits of the next token by the last one: target [v, v]; drafter [v, K, c] over `ids`."""

    target: jax.Array
    drafter: jax.Array
    ids: jax.Array | None = None


def pair(kind: str) -> Pair:
    rng = np.random.default_rng(5)
    target = jnp.asarray(rng.normal(0, 1.2, (V, V)), jnp.float32)
    noise = jnp.asarray(rng.normal(0, 1.5, (V, K, V)), jnp.float32)
    near = target[:, None] + 0.3 * noise
    if kind == "near":
        return Pair(target, near)
    if kind == "the target":
        return Pair(target, jnp.broadcast_to(target[:, None], (V, K, V)))
    if kind == "far":
        return Pair(target, noise)
    if kind == "always wrong":
        # It draws the id that the target never does.
        never = jnp.full((V, V), 0.0).at[:, 3].set(-jnp.inf)
        certain = jnp.full((V, K, V), -50.0).at[:, :, 3].set(50.0)
        return Pair(target + never, certain)
    if kind == "few ids":
        ids = jnp.asarray([4, 1, 3], jnp.int32)
        return Pair(target, near[:, :, ids], ids)
    assert kind == "broken"
    return Pair(target, jnp.full((V, K, V), jnp.nan))


def options(wish: Wish, rows: int, *, seeded: bool):
    one = options_of([wish])
    many = jax.tree.map(lambda field: jnp.repeat(jnp.asarray(field), rows, axis=0), one)
    seeds = jnp.arange(rows, dtype=jnp.uint32) + 17
    return many._replace(seeds=seeds, seeded=jnp.full((rows,), seeded))


@jax.jit
def play(pair: Pair, anchors: jax.Array, lengths: jax.Array, options, drafting: jax.Array):
    """One round: ids of the block [b, K + 1] and drafts accepted [b]."""
    draw = RowDraws(options, lengths)
    drafts, log_q = choose_drafts(pair.drafter[anchors], pair.ids, V, draw)
    assert log_q is not None
    num_drafts = jnp.where(drafting, K, 0)
    logits = pair.target[jnp.concatenate([anchors[:, None], drafts], axis=1)]
    chosen, limit = judge_drafts(
        logits,
        draw.positions(K + 1),
        drafts,
        options,
        init_counts(anchors.shape[0], V),
        DrawnDrafts(log_q, pair.ids, num_drafts),
    )
    return chosen, num_accepted_drafts(drafts, jnp.minimum(num_drafts, limit), chosen)


def two_tokens(pair: Pair, wish: Wish, drafting: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """The two tokens after anchor 0 of every row [b, 2], and drafts its first round accepted."""
    rows = options(wish, ROWS, seeded=False)
    lengths = jnp.full((ROWS,), 5, jnp.int32)
    on = jnp.full((ROWS,), drafting)
    first, accepted = play(pair, jnp.zeros((ROWS,), jnp.int32), lengths, rows, on)
    second, _ = play(pair, first[:, 0], lengths + 1, rows, on)
    behind = np.where(np.asarray(accepted) > 0, np.asarray(first)[:, 1], np.asarray(second)[:, 0])
    return np.stack([np.asarray(first)[:, 0], behind], axis=1), np.asarray(accepted)


def expected(target: jax.Array, wish: Wish) -> np.ndarray:
    """Probability of two tokens after anchor 0 [v, v]."""
    each = np.stack([probabilities(np.asarray(row, np.float64), wish) for row in target])
    return each[0][:, None] * each


def highest_chi_square(degrees: int) -> float:
    """Upper 1e-4 quantile (Wilson and Hilferty, 1931); the seeds are fixed."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.719 * part**0.5) ** 3


@pytest.mark.parametrize("name", WISHES)
@pytest.mark.parametrize("kind", ["near", "far", "always wrong", "few ids", "the target", "broken"])
def test_two_tokens_are_drawn_as_often_as_plain_decoding_draws_them(kind: str, name: str):
    made = pair(kind)
    tokens, _ = two_tokens(made, WISHES[name])
    p = expected(made.target, WISHES[name])
    found = np.zeros((V, V))
    np.add.at(found, (tokens[:, 0], tokens[:, 1]), 1)
    allowed = p > 0
    assert found[~allowed].sum() == 0
    chi_square = np.sum((found - ROWS * p)[allowed] ** 2 / (ROWS * p[allowed]))
    assert chi_square < highest_chi_square(int(allowed.sum()) - 1)


def test_a_row_that_does_not_draft_draws_from_the_target_too():
    made = pair("near")
    tokens, accepted = two_tokens(made, WISHES["temperature"], drafting=False)
    assert not accepted.any()
    p = expected(made.target, WISHES["temperature"]).sum(1)
    found = np.bincount(tokens[:, 0], minlength=V)
    assert np.sum((found - ROWS * p) ** 2 / (ROWS * p)) < highest_chi_square(V - 1)


@pytest.mark.parametrize("name", WISHES)
@pytest.mark.parametrize("kind", ["near", "far", "few ids", "always wrong", "the target"])
def test_a_draft_is_kept_as_often_as_both_distributions_agree(kind: str, name: str):
    """1 - d of the two, which no rule exceeds; equality of draws with one noise keeps fewer."""
    made, wish = pair(kind), WISHES[name]
    p = probabilities(np.asarray(made.target[0], np.float64), wish)
    q = np.zeros(V)
    ids = np.arange(V) if made.ids is None else np.asarray(made.ids)
    q[ids] = probabilities(np.asarray(made.drafter[0, 0], np.float64), wish)
    agreed = np.minimum(p, q).sum()
    _, accepted = two_tokens(made, wish)
    kept = float(np.mean(accepted > 0))
    assert abs(kept - agreed) < 4 * (0.25 / ROWS) ** 0.5
    rows = options(wish, ROWS, seeded=True)
    on, lengths = jnp.ones((ROWS,), bool), jnp.full((ROWS,), 5, jnp.int32)
    _, equal = play(made, jnp.zeros((ROWS,), jnp.int32), lengths, rows, on)
    assert kept > float(np.mean(np.asarray(equal) > 0)) - 0.012


def test_seeded_and_greedy_rows_are_as_they_were_beside_rows_without_a_seed():
    """Faults 18 and 20: the same ids, and the same drafts accepted, in mixed company."""
    made = pair("near")
    hot, greedy = (
        options(Wish(temperature=1.0), 300, seeded=True),
        options(Wish(), 300, seeded=True),
    )
    others = options(Wish(temperature=1.0), 300, seeded=False)
    joined = jax.tree.map(lambda *fields: jnp.concatenate(fields), hot, others, greedy)
    anchors, lengths = jnp.arange(900) % V, jnp.full((900,), 9, jnp.int32)
    chosen, accepted = play(made, anchors, lengths, joined, jnp.ones((900,), bool))
    for rows, alone in ((slice(0, 300), hot), (slice(600, 900), greedy), (slice(300, 600), others)):
        mine = play(made, anchors[rows], lengths[rows], alone, jnp.ones((300,), bool))
        assert np.array_equal(accepted[rows], mine[1])
        # Behind what is committed, rows without a seed have filler.
        committed = np.arange(K + 1)[None] <= np.asarray(mine[1])[:, None]
        assert np.array_equal(np.where(committed, chosen[rows], 0), np.where(committed, mine[0], 0))


def test_a_nan_of_the_target_ends_the_run_where_it_stands():
    made = pair("the target")
    spoiled = made._replace(target=made.target.at[2].set(jnp.nan))
    rows = options(Wish(temperature=1.0), 2000, seeded=False)
    lengths = jnp.full((2000,), 5, jnp.int32)
    on = jnp.ones((2000,), bool)
    chosen, accepted = (
        np.asarray(x) for x in play(spoiled, jnp.zeros((2000,), jnp.int32), lengths, rows, on)
    )
    after_two = (chosen[:, 0] == 2) & (accepted > 0)
    assert after_two.sum() > 20
    assert (chosen[after_two, 1] == UNSOUND).all() and (accepted[after_two] == 1).all()
    assert (chosen[~after_two, 0] >= 0).all()


def test_a_coin_of_zero_keeps_no_draft_that_the_target_forbids(monkeypatch: pytest.MonkeyPatch):
    """Strictly less: an impossible draft is rejected by every coin, 0 included."""
    from dflash_jax.decoding import rejection

    monkeypatch.setattr(rejection, "coins", lambda positions, *_: jnp.zeros(positions.shape))
    log_p = jnp.asarray([[[0.0, -jnp.inf], [0.0, 0.0]]])
    drawn = DrawnDrafts(jnp.log(jnp.asarray([[[0.5, 0.5]]])), None, jnp.asarray([1]))
    tokens, kept = rejection.reject_drafts(
        log_p,
        jnp.asarray([[1, 2]], jnp.int32),
        jnp.asarray([[1]], jnp.int32),
        drawn,
        jnp.zeros((1,), jnp.uint32),
    )
    assert (int(kept[0]), int(tokens[0, 0])) == (0, 0)
