"""Options over a block of drafts: what a round commits is what plain decoding would have chosen.

The target is a table of logits by the last token, decoded here in a few lines with the library's
own choice, acceptance and counting; no model and no engine.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.options import TokenCounts, count_outputs
from dflash_jax.decoding.sampling import choose_tokens
from dflash_jax.decoding.verify import num_accepted_drafts
from sampling_oracle import Wish, adjusted, counts_of, options_of

V, K, LENGTH = 9, 3, 30
TABLE = np.random.default_rng(7).normal(0, 1.2, (V, V)).astype(np.float32)
PROMPT = (4, 1, 4)
# Drafts [b, K] of a round: (committed ids of each row, round) -> ids.
Drafts = Callable[[Sequence[Sequence[int]], int], np.ndarray]

WISHES = [
    Wish(),
    Wish(temperature=1.0, seed=3),
    Wish(temperature=1.4, seed=4, top_k=4, top_p=0.8),
    Wish(presence=1.0, frequency=0.7),
    Wish(frequency=-0.4, repetition=1.3),
    Wish(temperature=0.8, seed=5, presence=-0.5, repetition=0.8, min_p=0.05),
    Wish(bias={int(i): -100.0 for i in np.argsort(TABLE[4])[-2:]}),
    Wish(temperature=1.1, seed=6, ends=(0, 2, 5), min_position=len(PROMPT) + 11),
    Wish(ends=tuple(range(5)), min_position=len(PROMPT) + 7, frequency=0.9, bias={8: 1.0}),
]


class Decoded(NamedTuple):
    """Answers [b][LENGTH or a little more], counts at the end, and what each round committed."""

    answers: list[list[int]]
    counts: TokenCounts
    rounds: list[list[list[int]]]


@jax.jit
def one_round(table, anchors, drafts, counts_of_drafts, lengths, options, counts):
    ids = jnp.concatenate([anchors[:, None], drafts], axis=1)
    offsets = jnp.arange(1, ids.shape[1] + 1, dtype=jnp.int32)
    positions = lengths[:, None] + offsets[None, :]
    chosen = choose_tokens(table[ids], positions, drafts, options, counts)
    accepted = num_accepted_drafts(drafts, counts_of_drafts, chosen)
    slots = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return chosen, accepted, count_outputs(counts, slots, chosen, accepted + 1)


def decode(wishes: Sequence[Wish], drafts: Drafts | None, table: np.ndarray = TABLE) -> Decoded:
    rows, v = len(wishes), table.shape[0]
    answers: list[list[int]] = [[] for _ in wishes]
    counts = counts_of([PROMPT] * rows, answers, v)
    rounds: list[list[list[int]]] = []
    while min(map(len, answers)) < LENGTH:
        texts = [[*PROMPT, *answer] for answer in answers]
        proposed = np.zeros((rows, 0)) if drafts is None else drafts(answers, len(rounds))
        chosen, accepted, counts = one_round(
            jnp.asarray(table),
            jnp.asarray([text[-1] for text in texts], jnp.int32),
            jnp.asarray(proposed, jnp.int32),
            jnp.full((rows,), proposed.shape[1], jnp.int32),
            jnp.asarray([len(text) - 1 for text in texts], jnp.int32),
            options_of(wishes),
            counts,
        )
        taken = [np.asarray(chosen)[i, : int(n) + 1].tolist() for i, n in enumerate(accepted)]
        rounds.append(taken)
        for answer, new in zip(answers, taken, strict=True):
            answer += new
    return Decoded(answers, counts, rounds)


def cut(decoded: Decoded) -> list[list[int]]:
    return [answer[:LENGTH] for answer in decoded.answers]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return cut(decode(WISHES, None))


def perfect(texts: Sequence[Sequence[int]]) -> Drafts:
    """The answers themselves, filled up with id 0 at their end."""

    def drafts(answers: Sequence[Sequence[int]], _: int) -> np.ndarray:
        padded = [[*text, *[0] * (2 * K)] for text in texts]
        return np.array(
            [
                text[min(len(answer), LENGTH) :][:K]
                for text, answer in zip(padded, answers, strict=True)
            ]
        )

    return drafts


def never(texts: Sequence[Sequence[int]]) -> Drafts:
    return lambda answers, n: (perfect(texts)(answers, n) + 1) % V


def wrong_at(place: int) -> Callable[[Sequence[Sequence[int]]], Drafts]:
    """Right before the given slot of every block, wrong from it on."""

    def made(texts: Sequence[Sequence[int]]) -> Drafts:
        wrong = (np.arange(K) >= place).astype(int)
        return lambda answers, n: (perfect(texts)(answers, n) + wrong) % V

    return made


def by_chance(texts: Sequence[Sequence[int]]) -> Drafts:
    rng = np.random.default_rng(1)
    return lambda answers, n: rng.integers(0, V, (len(answers), K))


def test_plain_decoding_of_greedy_rows_is_what_the_formulas_say(plain):
    """Fault 114, token by token in float64."""
    for answer, wish in zip(plain, WISHES, strict=True):
        if wish.temperature == 0:
            for i, token in enumerate(answer):
                before = answer[:i]
                logits = TABLE[[*PROMPT, *before][-1]]
                scores = adjusted(logits, wish, len(PROMPT) + i, PROMPT, before)
                assert token == np.argmax(scores)


@pytest.mark.parametrize("drafter", [perfect, never, wrong_at(1), wrong_at(2), by_chance])
def test_drafts_change_no_token_and_no_count(plain, drafter):
    """Faults 114, 116, 117: the text of every row; counts hold committed ids alone."""
    done = decode(WISHES, drafter(plain))
    assert cut(done) == plain
    for row, answer in enumerate(done.answers):
        expected = np.bincount(answer, minlength=V)
        assert np.array_equal(done.counts.output_counts[row], expected)
    seen = np.isin(np.arange(V), PROMPT)
    assert all(np.array_equal(row, seen) for row in done.counts.prompt_seen)
    if drafter is never:
        assert all(len(new) == 1 for taken in done.rounds for new in taken)
    if drafter is perfect:
        assert all(len(new) == K + 1 for taken in done.rounds[:-2] for new in taken)


def test_the_wishes_make_different_texts(plain):
    assert len({tuple(answer) for answer in plain}) == len(WISHES)


def test_opposite_penalties_give_opposite_texts():
    """Fault 114: logits 5.0 and 4.8, frequency penalty 2 and -2, drafted and not."""
    table = np.zeros((5, 5), np.float32)
    table[:, 0], table[:, 1] = 5.0, 4.8
    wishes = [Wish(frequency=2.0), Wish(frequency=-2.0), Wish()]
    texts = cut(decode(wishes, None, table))
    assert texts[1] == texts[2] == [0] * LENGTH
    assert texts[0][:4] == [0, 1, 0, 1] and 2 in texts[0]
    for guess in (0, 1):
        drafted = decode(wishes, lambda answers, n, g=guess: np.full((3, K), g), table)
        assert cut(drafted) == texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_biased_id_never_appears_at_any_slot_of_a_block(temperature: float):
    """Fault 117: bias -100 on the best id of every row; it is drafted at each slot in turn."""
    table = np.array(TABLE)
    table[:, 6] = TABLE.max() + 1.0
    wish = Wish(temperature=temperature, seed=1, bias={6: -100.0})
    expected = cut(decode([wish], None, table))

    def drafts(answers: Sequence[Sequence[int]], n: int) -> np.ndarray:
        block = perfect(expected)(answers, n)
        block[:, n % K] = 6
        return block

    done = decode([wish], drafts, table)
    assert cut(done) == expected and 6 not in done.answers[0]
    assert 6 in decode([Wish(temperature=temperature, seed=1)], None, table).answers[0]
    # Every slot of a block had its turn, and those before it were accepted.
    assert {len(new) for taken in done.rounds[:-2] for new in taken} == {1, 2, 3}


def test_forbidden_ends_are_forbidden_to_the_position_inside_a_block(plain):
    """The last wish: ids 0 … 4 from the eighth token on, whichever slot of a block that is."""
    wish, answer = WISHES[-1], plain[-1]
    first = wish.min_position - len(PROMPT)
    assert min(answer[:first]) > max(wish.ends)
    assert set(answer[first:]) & set(wish.ends)


@pytest.mark.parametrize("guess", ["greedy", "any"])
def test_filters_hold_at_accepted_correction_and_bonus_tokens(guess: str):
    """Faults 9, 13: the coin of the fault list; top_p 0.6 allows ids 0 and 1 alone.

    20,000 rounds of two drafts, each at positions of its own.
    """
    rounds = 20_000
    coin = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05], jnp.float32))
    options = options_of([Wish(temperature=1.0, seed=2, top_p=0.6)])
    shape = (rounds, 2)
    drafts = np.random.default_rng(3).integers(0, 4, shape) if guess == "any" else np.zeros(shape)

    def play(first: jax.Array, drafts: jax.Array, options, counts) -> tuple[jax.Array, jax.Array]:
        positions = first + jnp.arange(3, dtype=jnp.int32)[None, :]
        logits = jnp.broadcast_to(coin, (1, 3, 4))
        chosen = choose_tokens(logits, positions, drafts[None], options, counts)
        two = jnp.full((1,), 2, jnp.int32)
        return chosen[0], num_accepted_drafts(drafts[None], two, chosen)[0]

    first = jnp.arange(rounds, dtype=jnp.int32) * 3
    chosen, accepted = (
        np.asarray(x)
        for x in jax.jit(jax.vmap(play, in_axes=(0, 0, None, None)))(
            first, jnp.asarray(drafts, jnp.int32), options, counts_of([()], [()], 4)
        )
    )
    kinds = {
        "accepted": np.concatenate([chosen[accepted >= i + 1, i] for i in range(2)]),
        "correction": np.concatenate([chosen[accepted == i, i] for i in range(2)]),
        "bonus": chosen[accepted == 2, 2],
    }
    for kind, ids in kinds.items():
        assert len(ids) > 500 and set(np.unique(ids)) <= {0, 1}, kind
    for ids in (kinds["bonus"], chosen[:, 0], chosen[accepted >= 1, 1]):
        assert abs(np.mean(ids == 0) - 0.625) < 4 * np.sqrt(0.625 * 0.375 / len(ids))
    pairs = chosen[accepted >= 1, :2]
    if guess == "greedy":
        assert np.all(pairs[:, 0] == 0)
    plain = np.bincount(chosen[:, 0] * 2 + chosen[:, 1], minlength=4) / rounds
    assert np.allclose(plain, np.outer([0.625, 0.375], [0.625, 0.375]).ravel(), atol=0.01)
