"""Speculative sampling of rows without a seed: the target's distribution, and the drafts it keeps.

A small drafter and target with table logits, thousands of rows with a seed each, whole rounds of
drafting, judging and accepting. Three tokens are looked at together, so that later rounds, which
draw anew at positions whose first drafts were thrown away, are in the figures too.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding import rejection
from dflash_jax.decoding.options import init_counts
from dflash_jax.decoding.rejection import DrawnDrafts
from dflash_jax.decoding.sampling import UNSOUND, RowDraws, choose_drafts, judge_drafts
from dflash_jax.decoding.verify import num_accepted_drafts
from sampling_oracle import Wish, options_of, probabilities

V, K, ROWS, TOKENS = 5, 3, 20_000, 3

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
        ids = jnp.asarray([4, 1, 2], jnp.int32)
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


def first_round(pair: Pair, wish: Wish, *, seeded: bool) -> np.ndarray:
    """Drafts that the round after anchor 0 accepts in every row [b]."""
    rows, on = options(wish, ROWS, seeded=seeded), jnp.ones((ROWS,), bool)
    lengths = jnp.full((ROWS,), 5, jnp.int32)
    return np.asarray(play(pair, jnp.zeros((ROWS,), jnp.int32), lengths, rows, on)[1])


def tokens_of(pair: Pair, wish: Wish, drafting: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """The first tokens after anchor 0 of every row [b, TOKENS], and what its first round kept."""
    rows, on = options(wish, ROWS, seeded=False), jnp.full((ROWS,), drafting)
    text = np.zeros((ROWS, TOKENS + K + 1), np.int32)
    done, every = np.zeros(ROWS, np.int32), np.arange(ROWS)
    first = None
    for _ in range(TOKENS):
        anchors = np.where(done > 0, text[every, done - 1], 0)
        played = play(pair, jnp.asarray(anchors), jnp.asarray(5 + done), rows, on)
        chosen, accepted = (np.asarray(x) for x in played)
        first = accepted if first is None else first
        open_rows = done < TOKENS
        for slot in range(K + 1):
            taken = open_rows & (slot <= accepted)
            text[every[taken], done[taken] + slot] = chosen[taken, slot]
        done = np.where(open_rows, done + accepted + 1, done)
    assert first is not None
    return text[:, :TOKENS], first


def law(logits: jax.Array, wish: Wish) -> np.ndarray:
    """Probabilities [rows, v] of rows of logits."""
    return np.stack([probabilities(np.asarray(row, np.float64), wish) for row in logits])


def expected(target: jax.Array, wish: Wish) -> np.ndarray:
    """Probability of three tokens after anchor 0 [v, v, v]."""
    each = law(target, wish)
    return each[0][:, None, None] * each[:, :, None] * each[None, :, :]


def chi_square(found: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """Over the cells that have at least 5 expected, the rest in one; and degrees of freedom."""
    wide = ROWS * p >= 5
    cells = np.append(found[wide], found[~wide].sum())
    wanted = ROWS * np.append(p[wide], p[~wide].sum())
    wanted[-1] = max(wanted[-1], 1.0)
    return float(np.sum((cells - wanted) ** 2 / wanted)), int(wide.sum())


def highest_chi_square(degrees: int) -> float:
    """Upper 1e-4 quantile (Wilson and Hilferty, 1931); the seeds are fixed."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.719 * part**0.5) ** 3


@pytest.mark.parametrize("name", WISHES)
@pytest.mark.parametrize("kind", ["near", "far", "always wrong", "few ids", "the target", "broken"])
def test_three_tokens_are_drawn_as_often_as_plain_decoding_draws_them(kind: str, name: str):
    """Faults 9, 13, and noise that a round's decision hangs on being used by a later one."""
    made = pair(kind)
    tokens, _ = tokens_of(made, WISHES[name])
    p = expected(made.target, WISHES[name])
    found = np.zeros((V, V, V))
    np.add.at(found, tuple(tokens.T), 1)
    assert found[p == 0].sum() == 0
    value, degrees = chi_square(found, p)
    assert value < highest_chi_square(degrees)


def test_a_row_that_does_not_draft_draws_from_the_target_too():
    made = pair("near")
    tokens, accepted = tokens_of(made, WISHES["temperature"], drafting=False)
    assert not accepted.any()
    found = np.bincount(tokens[:, 0], minlength=V)
    value, degrees = chi_square(found, law(made.target, WISHES["temperature"])[0])
    assert value < highest_chi_square(degrees)


@pytest.mark.parametrize("name", WISHES)
@pytest.mark.parametrize("kind", ["near", "far", "few ids", "always wrong", "the target"])
def test_drafts_are_kept_as_often_as_the_rule_says(kind: str, name: str):
    """The first with chance 1 - d, k of them with the mean of w(k); no rule keeps more.

    Draft by draft, min(1, p / q) keeps fewer, and so does equality of draws with one noise.
    """
    made, wish = pair(kind), WISHES[name]
    p = law(made.target, wish)
    ids = np.arange(V) if made.ids is None else np.asarray(made.ids)
    q = np.zeros((K, V))
    q[:, ids] = law(made.drafter[0], wish)
    by_block, by_token = np.zeros(K), np.zeros(K)
    for block in itertools.product(range(V), repeat=K):
        chance, weight, kept = 1.0, 1.0, 1.0
        for slot, (last, token) in enumerate(zip((0, *block), block, strict=False)):
            if q[slot, token] == 0:
                chance = 0.0
                break
            chance *= q[slot, token]
            ratio = p[last, token] / q[slot, token]
            weight, kept = min(1.0, weight * ratio), kept * min(1.0, ratio)
            rest = 1 / V ** (K - 1 - slot)  # every block is visited once for each that goes on
            by_block[slot] += chance * weight * rest
            by_token[slot] += chance * kept * rest
    accepted = first_round(made, wish, seeded=False)
    found = np.array([np.mean(accepted > slot) for slot in range(K)])
    assert np.all(np.abs(found - by_block) < 4 * (0.25 / ROWS) ** 0.5)
    assert abs(by_block[0] - np.minimum(p[0], q[0]).sum()) < 1e-9
    assert np.all(by_block > by_token - 1e-9)
    assert found.sum() > float(np.mean(first_round(made, wish, seeded=True))) - 0.02


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


@pytest.mark.parametrize("coin", [0.0, 1 - 2.0**-24], ids=["lowest coin", "highest coin"])
def test_no_coin_keeps_a_forbidden_draft_or_loses_a_certain_one(
    monkeypatch: pytest.MonkeyPatch, coin: float
):
    """Strictly less: a draft that the target forbids is not kept by a coin of 0."""
    monkeypatch.setattr(rejection, "coins", lambda starts, seeds, count: jnp.full((2, 1), coin))
    forbidden, certain = [[0.0, -jnp.inf], [0.0, 0.0]], [[-jnp.inf, 0.0], [0.0, 0.0]]
    drawn = DrawnDrafts(jnp.log(jnp.full((2, 1, 2), 0.5)), None, jnp.asarray([1, 1]))
    tokens, kept = rejection.judge_block(
        jnp.asarray([forbidden, certain]),
        jnp.asarray([[1, 2]] * 2, jnp.int32),
        jnp.asarray([[1]] * 2, jnp.int32),
        drawn,
        jnp.zeros((2,), jnp.uint32),
    )
    assert kept.tolist() == [0, 1]
    assert tokens[:, 0].tolist() == [0, 1]


def test_a_drafter_that_fails_at_one_id_proposes_nothing_there_and_harms_nothing():
    rows = 4000
    log_q = jnp.log(jnp.full((rows, 1, 2), 0.5)).at[:, :, 1].set(jnp.nan)
    log_p = jnp.broadcast_to(jnp.log(jnp.asarray([[0.3, 0.7], [0.5, 0.5]])), (rows, 2, 2))
    tokens, kept = rejection.judge_block(
        log_p,
        jnp.broadcast_to(jnp.asarray([[1, 2]], jnp.int32), (rows, 2)),
        jnp.ones((rows, 1), jnp.int32),
        DrawnDrafts(log_q, None, jnp.ones((rows,), jnp.int32)),
        jnp.arange(rows, dtype=jnp.uint32),
    )
    assert not kept.any()
    assert set(np.asarray(tokens[:, 0]).tolist()) <= {0, 1}
