"""Tests of training under a reduced draft vocabulary: what is learnt is what is proposed.

The oracles are NumPy formulas over distributions of plain forward passes, renormalised over the ids
that can be proposed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_training as tiny
from block_truth import dpace_weights, drafted_of, teacher_of, two_documents, untrained
from dflash_jax.errors import ConfigError
from dflash_jax.training import head, objective, step
from dflash_jax.training.feed import Feed
from dflash_jax.training.real_rounds import RealRounds
from dflash_jax.training.trainer import train
from dflash_jax.weights.vocabulary import draft_ids, with_whole_vocabulary

WIDTH = tiny.OPTIONS["block_size"]
# About half of the random labels are outside.
ALLOWED = np.arange(1, tiny.VOCAB, 2)


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture(scope="module")
def drafter(model):
    return untrained(model, WIDTH)


@pytest.fixture(scope="module")
def pair(model):
    return two_documents(model, WIDTH)


def _label(pair, place):
    (documents, anchors, _), (row, block, slot) = pair, place
    return int(documents[row].ids[anchors[row][block] + slot + 1])


def _among(p):
    """A distribution renormalised over the ids that can be proposed."""
    return p[ALLOWED] / p[ALLOWED].sum()


def _loss(drafter, model, batch, options, candidates=None):
    if candidates is None:
        candidates = head.whole_vocabulary(np.asarray(batch.labels), ALLOWED, tiny.VOCAB)
    return objective.block_sums(
        drafter, batch, candidates, model.embedding, model.head, width=WIDTH, options=options
    )


def test_candidates_are_of_the_vocabulary_alone_and_labels_outside_it_are_marked():
    frequent, labels = np.array([3, 1], np.int32), np.array([[[3, 9, 4], [7, 1, 60]]], np.int32)
    rng = np.random.default_rng(0)
    got = head.choose_candidates(labels, frequent, 6, tiny.VOCAB, rng, ALLOWED)
    ids = np.asarray(got.ids)
    assert len(ids) == 8 == len(set(ids.tolist())) and np.isin(ids, ALLOWED).all()
    places = np.asarray(got.labels)
    np.testing.assert_array_equal(places >= 0, [[[True, True, False], [True, True, False]]])
    np.testing.assert_array_equal(ids[places[places >= 0]], labels[places >= 0])
    # 30 ids that can be proposed, 4 of them listed, 4 sampled.
    np.testing.assert_allclose(np.asarray(got.offsets)[4:], np.log(26 / 4), rtol=1e-6)
    whole = head.whole_vocabulary(labels, ALLOWED, tiny.VOCAB)
    np.testing.assert_array_equal(whole.ids, ALLOWED)
    assert not np.asarray(whole.offsets).any()
    np.testing.assert_array_equal(whole.labels, [[[1, 4, -1], [3, 0, -1]]])


@pytest.mark.parametrize("loss", ["decayed", "dpace", "distill", "distill_dpace"])
def test_the_loss_is_that_of_slots_whose_label_can_be_proposed(model, drafter, pair, loss):
    (documents, anchors, batch), share = pair, 0.7
    options = tiny.options(loss=loss, distill_weight=share, gamma=2.0, draft_vocab=len(ALLOWED))
    p = teacher_of(model, documents, anchors, WIDTH)
    q = drafted_of(model, drafter, documents, anchors, WIDTH)
    shape = np.asarray(batch.scored).shape
    right, each, learnt = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
    for place in q:
        label, drafted, teacher = _label(pair, place), _among(q[place]), _among(p[place])
        if label not in ALLOWED:
            continue  # an id that is never right: probability 0
        learnt[place] = True
        right[place] = drafted[ALLOWED.tolist().index(label)]
        soft = (teacher * np.log(teacher / drafted)).sum() if options.distils else 0.0
        weight = share if options.distils else 0.0
        each[place] = -(1 - weight) * np.log(right[place]) + weight * soft
    assert 0 < learnt.sum() < len(q)
    weights = np.broadcast_to(np.exp(-np.arange(WIDTH - 1) / 2.0), shape)
    if options.weighs_by_run:
        # D-PACE: a slot behind one that is never accepted is worth alpha of what it was.
        weights = dpace_weights(right, np.asarray(batch.scored))
    expected = (weights * each)[learnt].sum() / weights[learnt].sum()
    found = _loss(drafter, model, batch, options)
    # The teacher's hidden states are bfloat16 on disk.
    assert float(found.mean_loss) == pytest.approx(expected, rel=2e-3)
    assert float(found.weight) == pytest.approx(weights[learnt].sum(), rel=1e-4)


@pytest.mark.parametrize("loss", ["dpace", "distill_dpace"])
def test_no_gradient_comes_from_labels_that_cannot_be_proposed(model, drafter, pair, loss):
    """Fault 125: a weight of exp(-infinity) meets a gradient."""
    options = tiny.options(loss=loss, draft_vocab=1)
    only = np.array([tiny.MASK])  # no text holds it
    abstract = step.abstract_of(drafter)

    def loss_of(params):
        listed = head.whole_vocabulary(np.asarray(pair[2].labels), only, tiny.VOCAB)
        tried = step.with_params(abstract, params)
        return _loss(tried, model, pair[2], options, listed).loss

    value, gradients = jax.value_and_grad(loss_of)(step.drafter_params(drafter))
    assert float(value) == 0.0
    assert not any(np.asarray(gradient).any() for gradient in gradients.values())


def test_held_out_figures_are_of_what_is_proposed_against_the_targets_whole_distribution(
    model, drafter, pair
):
    documents, anchors, batch = pair
    p = teacher_of(model, documents, anchors, WIDTH)
    q = drafted_of(model, drafter, documents, anchors, WIDTH)
    shape = np.asarray(batch.scored).shape
    right, kept, best = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for place in q:
        drafted = np.zeros(tiny.VOCAB)
        drafted[ALLOWED] = _among(q[place])
        right[place] = _label(pair, place) == drafted.argmax()
        kept[place] = np.minimum(p[place], drafted).sum()
        best[place] = p[place][drafted.argmax()]
    found = objective.measure(
        drafter,
        batch,
        model.embedding,
        model.head,
        width=WIDTH,
        allowed=jnp.asarray(ALLOWED, jnp.int32),
    )
    assert found.sampled is not None and float(found.anchors) == 5
    np.testing.assert_array_equal(found.matches, right.sum((0, 1)))
    np.testing.assert_array_equal(found.scored, np.asarray(batch.scored).sum((0, 1)))
    np.testing.assert_allclose(found.sampled.by_slot, kept.sum((0, 1)), rtol=2e-3)
    for got, rates in (
        (found.runs, right),
        (found.sampled.runs, kept),
        (found.sampled.best_runs, best),
    ):
        assert float(got) == pytest.approx(5 + np.cumprod(rates, -1).sum(), rel=2e-3)


def test_the_vocabulary_is_what_the_answers_trained_on_use_most(model):
    """Not the prompts, and nothing that is held out: its figure would be too good."""
    documents = tiny.documents(model)
    options = tiny.options(draft_vocab=9, held_out=0.5)
    feed = Feed(model, documents, options, tiny.TAPS)
    counts = np.zeros(tiny.VOCAB, int)
    for document in feed.documents:
        np.add.at(counts, document.ids[document.answer_start :], 1)
    most = sorted(range(tiny.VOCAB), key=lambda i: (-counts[i], i))[:9]
    assert feed.held and feed.allowed is not None and feed.allowed.tolist() == sorted(most)
    _, batch = feed.batch(0)
    for number in (0, options.steps - 1):  # more candidates asked for than ids, and the full head
        listed = feed.candidates(batch, number)
        assert listed is not None and sorted(np.asarray(listed.ids).tolist()) == sorted(most)


def _rounds(model, trained, texts, tokens, ids=None):
    """What the engine's programs answer with a drafter as it was exported, or with other ids."""
    whole = with_whole_vocabulary(trained)
    ids = draft_ids(np.asarray(trained.d2t[...])) if ids is None else ids
    rounds = RealRounds(model, step.abstract_of(whole), texts, tokens, ids)
    return rounds, step.drafter_params(whole)


def test_a_drafter_trained_for_few_ids_fills_its_rounds_with_them(model, tmp_path):
    """Six texts by heart whose ids fit; the rounds measured in the run are those of the export."""
    tokens = 1 + 3 * WIDTH
    texts = [tiny.answered(model, prompt=4, tokens=tokens + WIDTH, seed=i) for i in range(6)]
    used = {int(token) for text in texts for token in text.ids[text.answer_start :]}
    options = tiny.by_heart(len(texts), steps=220, draft_vocab=len(used))
    trained = train(model, texts, tmp_path, options).drafter
    assert set(draft_ids(np.asarray(trained.d2t[...])).tolist()) == used
    rounds, params = _rounds(model, trained, texts, tokens)
    answers = rounds.answers(params)
    for answer, text in zip(answers, texts, strict=True):
        assert answer.ids == text.ids[text.answer_start :][:tokens].tolist()
    assert np.mean([n for answer in answers for n in answer.lengths]) >= 0.9 * WIDTH
    # With half of the ids no draft of another is kept, and the text stays.
    half = np.array(sorted(used)[::2])
    rounds, params = _rounds(model, trained, texts, tokens, half)
    kept = []
    for answer, text in zip(rounds.answers(params), texts, strict=True):
        assert answer.ids == text.ids[text.answer_start :][:tokens].tolist()
        ends = np.cumsum([1, *answer.lengths])
        for begin, end in zip(ends[:-1], ends[1:], strict=True):
            kept += answer.ids[begin : end - 1]
    assert kept and np.isin(kept, half).all()


def test_a_run_measures_rounds_with_the_drafter_that_it_gives(model, tmp_path):
    """Ids that are too few for the text: every draft is one of them, and the text stays."""
    texts = [tiny.answered(model, prompt=4, tokens=20, seed=i) for i in range(8)]
    options = tiny.options(
        steps=3, held_out=0.5, accept_every=3, accept_tokens=9, draft_vocab=2, narrow_until=0.0
    )
    found = train(model, texts, tmp_path, options)
    assert found.real is not None and found.held_out is not None
    assert found.drafter.config.draft_vocab_size == 2
    held = [t for t in texts if not any(t is d for d in _documents(model, texts, options))]
    rounds, params = _rounds(model, found.drafter, held, 9)
    assert rounds.measure(params) == found.real
    for answer, text in zip(rounds.answers(params), held, strict=True):
        assert answer.ids == text.ids[text.answer_start :][:9].tolist()


def _documents(model, texts, options):
    return Feed(model, texts, options, tiny.TAPS).documents


@pytest.mark.parametrize("size", [0, tiny.VOCAB + 1])
def test_a_size_that_the_target_cannot_fill_is_refused(model, tmp_path, size):
    with pytest.raises(ConfigError, match=f"of {size} ids: .* give 1 to {tiny.VOCAB}"):
        train(model, tiny.documents(model), tmp_path, tiny.options(draft_vocab=size))
    assert not any(tmp_path.iterdir())


def test_every_id_as_the_vocabulary_is_the_run_without_one(model, tmp_path):
    runs = [
        train(
            model,
            tiny.documents(model),
            tmp_path / str(size),
            tiny.options(steps=4, narrow_until=0.0, full_head_from=0.0, draft_vocab=size),
        ).drafter
        for size in (None, tiny.VOCAB)
    ]
    assert runs[0].config == runs[1].config
    one, other = map(tiny.params, runs)
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
