"""The choice of a token against its formulas: every option alone, together and in company.

Draws are many positions of one row, so that a distribution can be told from its frequencies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.options import NO_ID, TOP_LOGPROBS, init_counts, init_options
from dflash_jax.decoding.sampling import (
    RowDraws,
    choose_drafts,
    choose_tokens,
    chosen_logprobs,
    healthy_tokens,
)
from sampling_oracle import Wish, adjusted, counts_of, options_of, probabilities

V = 12
DRAWS = 8000
# Upper 1e-4 quantiles of chi-square by degrees of freedom; the seeds are fixed.
CHI_SQUARE = [0, 15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88, 31.83, 33.72, 35.56, 37.37]

WISHES = {
    "greedy": Wish(),
    "temperature": Wish(temperature=0.7, seed=1),
    "hot": Wish(temperature=2.5, seed=2),
    "top_k": Wish(temperature=1.0, seed=3, top_k=4),
    "top_p": Wish(temperature=1.0, seed=4, top_p=0.7),
    "min_p": Wish(temperature=1.6, seed=5, min_p=0.2),
    "top_k and top_p": Wish(temperature=1.3, seed=6, top_k=5, top_p=0.8),
    "all filters": Wish(temperature=1.5, seed=7, top_k=6, top_p=0.9, min_p=0.08),
    "bias": Wish(temperature=1.0, seed=8, bias={2: 3.0, 5: -100.0, 11: 1.5}),
    "ends": Wish(temperature=1.0, seed=9, ends=(1, 7), min_position=10**6),
    "presence": Wish(temperature=1.0, seed=10, presence=1.5),
    "frequency": Wish(temperature=1.0, seed=11, frequency=-0.6),
    "repetition": Wish(temperature=1.0, seed=12, repetition=1.8),
    "repetition below 1": Wish(temperature=1.0, seed=13, repetition=0.6),
    "greedy with bias": Wish(bias={3: 2.5}, ends=(0, 3), min_position=5),
    "greedy with penalties": Wish(presence=0.5, frequency=0.4, repetition=1.3),
    "everything": Wish(
        temperature=1.2,
        seed=14,
        top_k=8,
        top_p=0.95,
        min_p=0.02,
        presence=0.4,
        frequency=0.3,
        repetition=1.2,
        bias={0: -1.0, 4: 2.0, 9: -100.0},
        ends=(2, 10),
        min_position=10**6,
    ),
}
NAMES = list(WISHES)
PROMPT, OUTPUT = (0, 3, 3, 8), (4, 4, 4, 8, 11)


def random_logits(*shape: int, seed: int = 0) -> jax.Array:
    """Positive and negative ones, no two alike."""
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1.5, shape).astype(np.float32))


def counts(rows: int, v: int = V):
    return counts_of([PROMPT] * rows, [OUTPUT] * rows, v)


def no_drafts(rows: int) -> jax.Array:
    return jnp.zeros((rows, 0), jnp.int32)


def draw(logits: jax.Array, wishes: Sequence[Wish], draws: int, counted=None) -> np.ndarray:
    """Ids [draws, rows] of one row of logits [v] a wish, at positions 0 … draws - 1."""
    rows, v = logits.shape
    counted = init_counts(rows, v) if counted is None else counted
    positions = jnp.arange(draws, dtype=jnp.int32)
    return np.asarray(_draw(logits, positions, options_of(wishes), counted))


@jax.jit
def _draw(logits: jax.Array, positions: jax.Array, *row_data: Any) -> jax.Array:
    rows = logits.shape[0]

    def at(position: jax.Array) -> jax.Array:
        place = jnp.broadcast_to(position, (rows, 1))
        return choose_tokens(logits[:, None], place, no_drafts(rows), *row_data)[:, 0]

    return jax.vmap(at)(positions)


_choose = jax.jit(choose_tokens)


def choose(logits: jax.Array, wishes: Sequence[Wish], counted=None, first: int = 0) -> np.ndarray:
    """Ids [b, t] where nothing was drafted: filler in the drafts' place."""
    b, t, v = logits.shape
    positions = jnp.broadcast_to(first + jnp.arange(t, dtype=jnp.int32), (b, t))
    drafts = jnp.full((b, t - 1), NO_ID, jnp.int32)
    counted = init_counts(b, v) if counted is None else counted
    return np.asarray(_choose(logits, positions, drafts, options_of(wishes), counted))


@pytest.fixture(scope="module")
def mixed() -> tuple[jax.Array, np.ndarray]:
    """Logits [rows, v], and draws of all wishes in one batch, [draws, rows]."""
    logits = random_logits(len(NAMES), V)
    return logits, draw(logits, list(WISHES.values()), DRAWS, counts(len(NAMES)))


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_drawn_as_often_as_the_formulas_say(mixed, name: str):
    """Faults 13, 114, 117, rows of all kinds in one batch."""
    logits, drawn = mixed
    row, wish = NAMES.index(name), WISHES[name]
    mine = drawn[:, row]
    found = np.bincount(mine, minlength=V)
    if wish.temperature == 0:
        for position in range(2 * wish.min_position + 2):
            scores = adjusted(np.asarray(logits[row]), wish, position, PROMPT, OUTPUT)
            assert mine[position] == np.argmax(scores)
        assert len(set(mine[wish.min_position :])) == 1
        return
    p = probabilities(adjusted(np.asarray(logits[row]), wish, 0, PROMPT, OUTPUT), wish)
    allowed = p > 0
    assert found[~allowed].sum() == 0
    chi_square = np.sum((found - DRAWS * p)[allowed] ** 2 / (DRAWS * p[allowed]))
    assert 1 < allowed.sum() and chi_square < CHI_SQUARE[allowed.sum() - 1]
    # The options matter: without them the same test fails.
    if name not in ("temperature", "ends"):
        plain = probabilities(np.asarray(logits[row], np.float64), Wish(temperature=1.0))
        assert np.sum((found - DRAWS * plain) ** 2 / (DRAWS * plain)) > CHI_SQUARE[-1]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_in_company_draws_what_it_draws_alone(mixed, name: str):
    """Fault 20: greedy, seeded and filtered rows of one batch."""
    logits, drawn = mixed
    row = NAMES.index(name)
    alone = draw(logits[row : row + 1], [WISHES[name]], 500, counts(1))
    assert np.array_equal(alone[:, 0], drawn[:500, row])


def test_a_seed_draws_the_same_in_another_slot_and_at_another_place_of_the_block():
    logits = jnp.broadcast_to(random_logits(V), (3, 8, V))
    wishes = [Wish(temperature=1.0, seed=s) for s in (5, 6, 5)]
    ids = choose(logits, wishes)
    assert ids[0].tolist() == ids[2].tolist() != ids[1].tolist()
    assert np.array_equal(choose(logits[:, :4], wishes, first=4), ids[:, 4:])


def test_what_no_row_asks_for_is_not_computed():
    """Noise, bisection and scatters all stand behind conditions."""
    logits, options = random_logits(2, 3, V), init_options(2)
    arguments = (jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 2), jnp.int32), options)
    jaxpr = jax.make_jaxpr(choose_tokens)(logits, *arguments, init_counts(2, V))
    outside = {eqn.primitive.name for eqn in jaxpr.jaxpr.eqns}
    assert "cond" in outside
    costly = {"random_bits", "random_seed", "threefry2x32", "while", "scan", "scatter-add"}
    assert not outside & (costly | {"sort", "exp", "log", "argmax"})
    inside = str(jaxpr)
    assert all(word in inside for word in ("random_bits", "scatter-add", "exp", "argmax"))


FILTERS_OFF_OR_ALL = {
    "top_k of everything": Wish(temperature=1.0, seed=3, top_k=V),
    "huge top_k": Wish(temperature=1.0, seed=3, top_k=2**31 - 1),
    "top_p 1": Wish(temperature=1.0, seed=3, top_p=1.0),
    "min_p 0": Wish(temperature=1.0, seed=3, min_p=0.0),
}
ONLY_THE_BEST = {
    "top_k 1": Wish(temperature=1.0, seed=3, top_k=1),
    "tiny top_p": Wish(temperature=1.0, seed=3, top_p=1e-6),
    "top_p 0": Wish(temperature=1.0, seed=3, top_p=0.0),
    "min_p 1": Wish(temperature=1.0, seed=3, min_p=1.0),
    "tiny temperature": Wish(temperature=1e-6, seed=3),
    "denormal temperature": Wish(temperature=1e-40, seed=3),
    "all of them": Wish(temperature=1e-30, seed=3, top_k=1, top_p=1e-9, min_p=1.0),
}


@pytest.mark.parametrize("name", FILTERS_OFF_OR_ALL)
def test_a_filter_that_allows_everything_changes_no_draw(name: str):
    """Beside a row that does filter, so that the filters run."""
    logits = random_logits(2, 400, V)
    filtering = Wish(temperature=1.0, seed=1, top_k=2, top_p=0.5, min_p=0.1)
    ids = choose(logits, [FILTERS_OFF_OR_ALL[name], filtering])
    assert np.array_equal(ids[:1], choose(logits[:1], [Wish(temperature=1.0, seed=3)]))


@pytest.mark.parametrize("name", ONLY_THE_BEST)
def test_a_filter_that_allows_only_the_best_id_is_greedy(name: str):
    """Fault 11: nothing else, however the noise falls."""
    logits = random_logits(1, 2000, V, seed=1)
    assert np.array_equal(choose(logits, [ONLY_THE_BEST[name]]), np.argmax(logits, axis=-1))


def test_no_temperature_overflows():
    logits = jnp.array([[[1e38, 3e38, -3e38]]] * 3, jnp.float32)
    wishes = [Wish(temperature=t, seed=2) for t in (1e-40, 1e-3, 1.0)]
    assert choose(logits, wishes).ravel().tolist() == [1, 1, 1]


def test_an_impossible_id_is_never_drawn():
    """Fault 11: 200,000 draws, the impossible ids being the likely ones."""
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1], jnp.float32))[None]
    forbidden = {0: -jnp.inf, 1: -100.0}
    wish = Wish(temperature=1.0, seed=4, bias=forbidden)
    assert set(np.unique(draw(logits, [wish], 200_000))) == {2, 3}


def test_ids_that_tie_at_a_threshold_are_all_kept():
    logits = jnp.array([[3.0, 1.0, 1.0, 1.0, 0.0]] * 3, jnp.float32)
    wishes = [
        Wish(temperature=3.0, top_k=2),
        Wish(temperature=3.0, top_p=0.5),
        Wish(temperature=3.0, top_k=1),
    ]
    ids = draw(logits, wishes, 500)
    assert [sorted(set(ids[:, row])) for row in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 3], [0]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_thin_tails_are_drawn_as_often_as_they_should_be(dtype):
    """Fault 16: t = 0.002 within 4 sigma in 200,000 draws, whatever the model's dtype."""
    draws = 200_000
    logits = jnp.log(jnp.array([0.998, 0.002], jnp.float32)).astype(dtype)
    weights = np.exp(np.asarray(logits, np.float64))
    t = weights[1] / weights.sum()
    ids = draw(logits[None], [Wish(temperature=1.0, seed=11)], draws)
    assert abs(int(ids.sum()) - draws * t) < 4 * np.sqrt(draws * t * (1 - t))


HARD = {
    "one id has it all": [0.0, -1e30, -1e30, -1e30],
    "nothing else is possible": [0.0, -np.inf, -np.inf, -np.inf],
    "all alike": [0.0, 0.0, 0.0, 0.0],
    "huge": [3e38, -3e38, 1e38, 0.0],
    "tiny": [1e-40, -1e-40, 0.0, -0.0],
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("jitted", [True, False])
def test_no_step_makes_a_nan(name: str, jitted: bool):
    """Fault 12, with JAX's own check of every result; greedy and sampled rows side by side."""
    wishes = [
        Wish(),
        Wish(temperature=1.0),
        Wish(temperature=1e-3, top_k=2, top_p=0.5, min_p=0.5),
        Wish(temperature=1e4, bias={3: -100.0}, ends=(3,), min_position=9, repetition=2.0),
        Wish(presence=1.0, frequency=1.0, repetition=0.5),
    ]
    logits = jnp.broadcast_to(jnp.array(HARD[name], jnp.float32), (len(wishes), 2, 4))
    positions = jnp.zeros((len(wishes), 2), jnp.int32)
    drafts = jnp.zeros((len(wishes), 1), jnp.int32)
    with jax.debug_nans(True):
        chooser: Callable = jax.jit(choose_tokens) if jitted else choose_tokens
        ids = chooser(logits, positions, drafts, options_of(wishes), init_counts(len(wishes), 4))
    assert np.all((np.asarray(ids) >= 0) & (np.asarray(ids) < 4))
    assert np.asarray(ids)[0].tolist() == [0, 0]


@pytest.mark.parametrize("place", [0, 5, V - 1])
def test_a_nan_logit_spoils_its_own_token_and_no_other(place: int):
    wishes = list(WISHES.values())
    logits = random_logits(len(wishes), 3, V)
    whole = choose(logits, wishes, counts(len(wishes)))
    assert whole.min() >= 0
    broken = choose(logits.at[:, 1, place].set(jnp.nan), wishes, counts(len(wishes)))
    for row, wish in enumerate(wishes):
        spoilt = place not in wish.ends or wish.min_position <= 1
        assert broken[row].tolist() == [
            whole[row, 0],
            -1 if spoilt else whole[row, 1],
            whole[row, 2],
        ]
    greedy = healthy_tokens(logits.at[2, 1, place].set(jnp.nan))
    best = np.array(jnp.argmax(logits, axis=-1))
    best[2, 1] = -1
    assert np.array_equal(greedy, best)


@pytest.mark.parametrize("shape", [(1, 1, 40), (40, 3, 300), (4, 8, 49152)], ids=str)
@pytest.mark.parametrize("name", ["greedy", "temperature", "all filters", "presence"])
def test_a_nan_logit_is_found_in_logits_of_every_size(name: str, shape: tuple[int, int, int]):
    """XLA's maximum loses a NaN in large arrays on CPU, wherever in its row it stands."""
    rows, width, v = shape
    logits = np.array(random_logits(*shape))
    rng = np.random.default_rng(3)
    spoilt = rng.random((rows, width)) < 0.5
    for row, slot in zip(*np.nonzero(spoilt), strict=True):
        logits[row, slot, rng.integers(v)] = np.nan
    logits[-1, -1], spoilt[-1, -1] = np.nan, True
    chosen = choose(jnp.asarray(logits), [WISHES[name]] * rows)
    assert np.array_equal(chosen == -1, spoilt)
    assert np.array_equal(np.asarray(healthy_tokens(jnp.asarray(logits))) == -1, spoilt)


def test_without_options_the_choice_is_that_of_the_greedy_program():
    logits = random_logits(4, 6, 97).at[:2, 2, :].set(0.5)
    plain = choose(logits, [Wish()] * 4)
    assert np.array_equal(plain, healthy_tokens(logits))
    assert plain[1, 2] == 0  # a tie goes to the lowest id, and no noise breaks it
    beside = choose(
        logits, [Wish(), Wish(temperature=1.0), Wish(bias={1: 2.0}), Wish(presence=1.0)]
    )
    assert np.array_equal(beside[0], plain[0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logprobs_are_the_log_softmax_of_the_targets_own_logits(dtype):
    """Fault 113: one for every token of the block, whichever of them is committed."""
    logits = random_logits(2, 5, 60).astype(dtype)
    chosen = jnp.asarray(np.random.default_rng(1).integers(0, 60, (2, 5)), jnp.int32)
    logprob, ids, top = (np.asarray(x) for x in jax.jit(chosen_logprobs)(logits, chosen))
    exact = np.asarray(logits, np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    own = np.take_along_axis(exact, np.asarray(chosen)[..., None], -1)[..., 0]
    assert np.allclose(logprob, own, atol=1e-5)
    assert ids.shape == top.shape == (2, 5, TOP_LOGPROBS)
    assert np.allclose(top, -np.sort(-exact, axis=-1)[..., :TOP_LOGPROBS], atol=1e-5)
    assert np.allclose(top, np.take_along_axis(exact, ids, -1), atol=1e-5)
    assert np.all(logprob < 0) and np.all(np.diff(top) <= 0)
    assert all(len(set(row)) == TOP_LOGPROBS for row in ids.reshape(-1, TOP_LOGPROBS))


def test_a_vocabulary_of_fewer_than_twenty_ids_is_filled_up():
    logits = random_logits(1, 2, 4)
    _, ids, top = chosen_logprobs(logits, jnp.array([[1, -1]], jnp.int32))
    assert ids.shape == top.shape == (1, 2, TOP_LOGPROBS)
    assert np.array_equal(ids[..., :4], np.argsort(-np.asarray(logits), axis=-1))
    assert np.all(np.asarray(ids)[..., 4:] == -1) and np.all(np.isneginf(top[..., 4:]))
    assert np.allclose(np.exp(np.asarray(top)).sum(-1), 1, atol=1e-6)


FILTERED = ["greedy", "temperature", "hot", "top_k", "top_p", "min_p", "all filters"]


@pytest.mark.parametrize("name", FILTERED)
@pytest.mark.parametrize("reduced", [False, True])
def test_a_drafter_that_is_the_target_drafts_what_the_target_draws(name: str, reduced: bool):
    """Fault 14: drafts are drawn with the target's noise, so the block fits what will be drawn."""
    block, length = 400, 37
    options = options_of([WISHES[name]])
    draw = RowDraws(options, jnp.asarray([length], jnp.int32))
    logits = random_logits(1, block, V, seed=4)
    drafts, _ = choose_drafts(logits, None, V, draw)
    if reduced:
        order = jnp.asarray(np.random.default_rng(0).permutation(V), jnp.int32)
        drafts, _ = choose_drafts(logits[:, :, order], order, V, draw)
    positions = jnp.arange(length + 1, length + 1 + block, dtype=jnp.int32)[None]
    chosen = choose_tokens(logits, positions, drafts[:, 1:], options, init_counts(1, V))
    np.testing.assert_array_equal(np.asarray(drafts), np.asarray(chosen))


def test_two_draws_with_one_noise_agree_as_often_as_their_bound_says():
    """Fault 14: more often than a draft drawn with noise of its own, and than the best draft."""
    block = 6000
    draw = RowDraws(options_of([WISHES["temperature"]]), jnp.asarray([0], jnp.int32))
    ours, theirs = random_logits(2, 1, 1, V, seed=6)
    drafts, chosen = (
        np.asarray(choose_drafts(jnp.broadcast_to(one, (1, block, V)), None, V, draw)[0])
        for one in (ours, theirs)
    )
    p, q = (np.asarray(jax.nn.softmax(one[0, 0] / 0.7)) for one in (theirs, ours))
    apart = float(np.abs(p - q).sum()) / 2
    agreed = float(np.mean(drafts == chosen))
    least, most = (1 - apart) / (1 + apart), 1 - apart
    assert least - 0.02 <= agreed <= most + 0.02
    # The best draft alone, which needs no noise, is drawn less often here.
    assert agreed > p[q.argmax()] + 0.02
    assert agreed > float(p @ q) + 0.02


def test_drafts_of_greedy_rows_are_the_best_ids_in_mixed_company():
    options = options_of([WISHES["greedy"], WISHES["hot"]])
    logits = random_logits(2, 5, V, seed=7)
    mixed, _ = choose_drafts(logits, None, V, RowDraws(options, jnp.zeros((2,), jnp.int32)))
    best, _ = choose_drafts(logits, None, V, None)
    np.testing.assert_array_equal(np.asarray(mixed[0]), np.asarray(best[0]))
    np.testing.assert_array_equal(np.asarray(best), np.asarray(logits).argmax(-1))
