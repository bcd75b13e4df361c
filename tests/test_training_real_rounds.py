"""Tests of `training/real_rounds.py`: what the decoding round commits while a drafter is trained.

The oracle of a trained drafter is the text itself: it has learnt what the target answers.
"""

import csv

import jax
import numpy as np
import pytest

import tiny_training as tiny
from dflash_jax.training import batches, step
from dflash_jax.training.blocks import build_batch, hidden_of_blocks
from dflash_jax.training.options import drafter_config
from dflash_jax.training.real_rounds import Answered, RealRounds, chosen_prompts, pooled
from dflash_jax.training.start import start_drafter
from dflash_jax.training.trainer import train

WIDTH, ROUNDS = tiny.OPTIONS["block_size"], 4
# The prefill gives the first token, whole rounds the others: none is cut by the limit.
TOKENS = 1 + WIDTH * ROUNDS


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture(scope="module")
def texts(model):
    """Eight prompts with the target's own greedy answers, a little longer than what is asked."""
    return [tiny.answered(model, prompt=4, tokens=TOKENS + WIDTH, seed=i) for i in range(8)]


@pytest.fixture(scope="module")
def rounds(model, texts):
    config = drafter_config(model.config, tiny.options())
    drafter = start_drafter(config, model, init="random", seed=0)
    return RealRounds(model, step.abstract_of(drafter), texts, TOKENS), drafter


def test_answers_are_the_targets_own_and_every_token_is_of_a_round_or_the_prefill(rounds, texts):
    """With an untrained drafter, so nearly every draft is rejected."""
    measured, drafter = rounds
    answers = measured.answers(step.drafter_params(drafter))
    for answer, text in zip(answers, texts, strict=True):
        assert answer.ids == text.ids[text.answer_start :][:TOKENS].tolist()
        assert 1 + sum(answer.lengths) == TOKENS
    figures = measured.measure(step.drafter_params(drafter))
    lengths = [n for answer in answers for n in answer.lengths]
    assert (figures.accepted, figures.rounds) == (np.mean(lengths), len(lengths))
    assert figures.accepted < 2.0


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_drafter_that_learnt_eight_texts_by_heart_fills_its_rounds(
    model, texts, rounds, tmp_path, optimizer
):
    """Acceptance length of at least 0.9 x W by the real round."""
    options = tiny.by_heart(len(texts), steps=250, optimizer=optimizer)
    drafter = train(model, texts, tmp_path, options).drafter
    figures = rounds[0].measure(step.drafter_params(drafter))
    assert figures.accepted >= 0.9 * WIDTH
    assert figures.tokens == 8 * TOKENS


def test_a_run_measures_real_rounds_as_often_as_it_is_asked(model, texts, tmp_path):
    """Rounds inside a whole run, of a drafter with a window: those replayed over the texts.

    At a rate of 0 every measurement is of the drafter that the run began with.
    """
    options = tiny.options(
        init="random",
        sliding_window=6,
        held_out=0.6,
        accept_every=5,
        accept_prompts=8,
        accept_tokens=TOKENS,
        learning_rate=0.0,
        narrow_until=0.0,
        full_head_from=0.0,
    )
    trained = train(model, texts, tmp_path, options)
    with (tmp_path / "log.csv").open() as file:
        rows = {row["step"]: row["real_accepted"] for row in csv.DictReader(file)}
    _, held = batches.split_held_out(texts, 0.6)
    assert trained.real is not None and trained.real.tokens == len(held) * TOKENS
    lengths = [n for text in held for n in _replayed(model, trained.drafter, text)]
    assert trained.real.accepted == pytest.approx(np.mean(lengths))
    assert rows == dict.fromkeys(("5", "10"), f"{np.mean(lengths):.4f}")


def _replayed(model, drafter, text):
    """What rounds commit to a text that the target wrote: a block at each place where one ends."""
    anchors = np.arange(text.answer_start, text.answer_start + TOKENS - 1, dtype=np.int32)
    batch = build_batch([text], [anchors], width=WIDTH, quota=len(anchors))
    hidden = jax.jit(hidden_of_blocks, static_argnums=3)(drafter, batch, model.embedding, WIDTH)
    drafts = (np.asarray(hidden)[0, :, 1:] @ np.asarray(model.head).T).argmax(-1)
    lengths, place = [], 0
    while place < TOKENS - 1:
        answer = text.ids[anchors[place] + 1 :]
        same = [d == a for d, a in zip(drafts[place], answer, strict=False)] + [False]
        lengths.append(min(same.index(False) + 1, TOKENS - 1 - place))
        place += lengths[-1]
    return lengths


def test_an_end_id_ends_an_answer_inside_a_round(model, rounds, texts):
    measured, drafter = rounds
    text = texts[0].ids[texts[0].answer_start :]
    place = next(i for i in range(2, TOKENS - 1) if text[i] not in text[:i])
    ended = texts[0]._replace(ids=texts[0].ids[: texts[0].answer_start + place + 1], ended=True)
    one = RealRounds(model, measured.abstract, [ended] * len(texts), TOKENS)
    one.programs, one.compiled = measured.programs, measured.compiled
    (answer, *_) = one.answers(step.drafter_params(drafter))
    assert answer.ids == text[: place + 1].tolist()
    assert 1 + sum(answer.lengths) == len(answer.ids)


def test_the_looping_part_of_an_answer_is_reported_apart():
    """Fault 75: rounds of a text that repeats itself commit much and say nothing."""
    varied, loop = list(range(10)), [7] * 30
    answer = Answered([*varied, *loop], [1] * 9 + [5] * 6)
    # 24 repeated ids are a loop: it is found at index 34, in the round that begins at 30.
    figures = pooled([answer])
    assert figures.accepted == pytest.approx(39 / 15)
    assert figures.without_loops == pytest.approx((9 * 1 + 5 * 5) / 14)
    assert (figures.tokens, figures.looping_tokens, figures.rounds) == (40, 6, 15)
    plain = pooled([Answered(varied, [3, 3, 3])])
    assert (plain.accepted, plain.without_loops, plain.looping_tokens) == (3.0, 3.0, 0)


def test_prompts_are_taken_evenly_from_all_that_is_held_out(texts):
    held = [texts[0]._replace(answer_start=place) for place in range(20)]
    assert [d.answer_start for d in chosen_prompts(held, 4)] == [0, 5, 10, 15]
    assert [d.answer_start for d in chosen_prompts(held[:2], 4)] == [0, 1]
