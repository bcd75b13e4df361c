"""Tests of packed rows, blocks in chunks and windows: loss and gradient are those of every block
computed alone by the drafter's forward pass, which serving is held to."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_training as tiny
from dflash_jax.arena.context import init_context_arena
from dflash_jax.config import ServeConfig
from dflash_jax.decoding.draft import BlockDrafter
from dflash_jax.models import DFlashDrafter
from dflash_jax.planning.resolve import resolve
from dflash_jax.training import batches, blocks, features, objective, step
from dflash_jax.training.blocks import build_batch
from dflash_jax.training.options import drafter_config
from dflash_jax.training.packing import pack_batch, row_order
from dflash_jax.training.start import start_drafter

WIDTH, GAMMA = 4, 3.0
LENGTHS = (13, 22, 9, 17)
ANCHORS = [np.array(a, np.int32) for a in ([5, 7], [4, 11, 20], [6], [])]


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture(scope="module")
def drafter(model):
    """One causal layer under a window of 5 and one that sees everything."""
    config = drafter_config(model.config, tiny.options(block_size=WIDTH))
    config = dataclasses.replace(config, windows=(5, None), causal=(True, False))
    return start_drafter(config, model, init="random", seed=3)


@pytest.fixture(scope="module")
def compute(model):
    return features.compute_features(model, tiny.TAPS, keep_final=False, batch_size=4)


@pytest.fixture(scope="module")
def documents(compute):
    """Answers from 4 on; the second ended itself and its last block hangs over."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, tiny.MASK, n).astype(np.int32) for n in LENGTHS]
    bare = [
        blocks.Document(i, 4, n == 22, np.zeros((n, 0), jnp.bfloat16))
        for i, n in zip(ids, LENGTHS, strict=True)
    ]
    return compute(bare)


@pytest.fixture(scope="module")
def batch(documents):
    return build_batch(documents, ANCHORS, width=WIDTH, quota=3)


def _alone(model, drafter, documents):
    """Weighted mean cross-entropy and its gradient, one block after the other."""
    abstract = step.abstract_of(drafter)

    def loss(params):
        built, total, weight = step.with_params(abstract, params), jnp.float32(0), 0.0
        for document, chosen in zip(documents, ANCHORS, strict=True):
            for anchor in chosen.tolist():
                ids = jnp.asarray([document.ids[anchor]] + [tiny.MASK] * (WIDTH - 1), jnp.int32)
                logits = built.forward(
                    jnp.asarray(document.features[:anchor], jnp.float32),
                    ids,
                    anchor + jnp.arange(WIDTH, dtype=jnp.int32),
                    model.embedding,
                    model.head,
                )[1]
                for slot in range(1, min(WIDTH, len(document.ids) - anchor)):
                    by = float(np.exp(-(slot - 1) / GAMMA))
                    label = int(document.ids[anchor + slot])
                    total -= by * jax.nn.log_softmax(logits[slot])[label]
                    weight += by
        return total / weight

    return jax.jit(jax.value_and_grad(loss))(step.drafter_params(drafter))


@pytest.fixture(scope="module")
def reference(model, drafter, documents):
    return _alone(model, drafter, documents)


@pytest.mark.parametrize(("pack", "chunk"), [(1, 0), (2, 4), (4, 0)])
def test_loss_and_gradient_are_those_of_every_block_alone(
    model, drafter, batch, reference, pack, chunk
):
    """Fault 125, too: a document without an anchor, padding and unscored slots give no NaN."""
    abstract = step.abstract_of(drafter)
    options = tiny.options(block_size=WIDTH, gamma=GAMMA, anchor_chunk=chunk)

    def loss(params):
        built = step.with_params(abstract, params)
        return objective.block_sums(
            built,
            pack_batch(batch, pack),
            None,
            model.embedding,
            model.head,
            width=WIDTH,
            options=options,
        ).mean_loss

    value, gradient = jax.jit(jax.value_and_grad(loss))(step.drafter_params(drafter))
    assert float(value) == pytest.approx(float(reference[0]), abs=1e-5)
    for name, expected in reference[1].items():
        np.testing.assert_allclose(gradient[name], expected, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("windows", "pack", "chunk"), [((5, None), 2, 4), ((6, 6), 4, 2)], ids=["mixed", "ring"]
)
def test_training_gives_the_logits_of_the_decoding_round(
    model, drafter, documents, batch, monkeypatch, windows, pack, chunk
):
    """Train = serve, to 1e-5: packed and in chunks, against `absorb` and `propose` of a round.

    A drafter whose layers all slide keeps its context in a ring of 12 rows here.
    """
    config = dataclasses.replace(drafter.config, windows=windows, causal=(True, windows[1] == 6))
    drafter = start_drafter(config, model, init="random", seed=3)
    hidden = jax.jit(
        lambda b: blocks.hidden_of_blocks(drafter, b, model.embedding, WIDTH, chunk)[:, :, 1:]
    )(pack_batch(batch, pack))
    trained = np.asarray(hidden) @ np.asarray(model.head).T
    served = _served(model, drafter, documents, monkeypatch)
    packed = np.asarray(pack_batch(batch, pack).anchors)
    for anchor, logits in served.items():
        ((row, block),) = np.argwhere(packed == anchor)
        np.testing.assert_allclose(trained[row, block], logits, atol=1e-5, err_msg=str(anchor))


def _served(model, drafter, documents, monkeypatch):
    """Draft logits of a round at each anchor of ANCHORS, a slot each; no two anchors are equal."""
    pairs = [(d, int(a)) for d, each in zip(documents, ANCHORS, strict=True) for a in each]
    wanted = ServeConfig(max_seq_len=64, max_batch_size=len(pairs), dtype="float32")
    config = resolve(wanted, model.config, drafter.config)
    method, slots = BlockDrafter(drafter, model, WIDTH - 1, None), jnp.arange(len(pairs))
    seen = []
    inner = DFlashDrafter.logits

    def watching(*args):
        seen.append(inner(*args))
        return seen[-1]

    def logits(features, counts, anchors):
        arena = method.absorb(init_context_arena(config, jnp.float32), slots, features, counts)
        method.propose(arena, slots, anchors, None)
        return seen[-1]

    monkeypatch.setattr(DFlashDrafter, "logits", watching)
    features = np.zeros((len(pairs), 32, documents[0].features.shape[1]), np.float32)
    for slot, (document, anchor) in enumerate(pairs):
        features[slot, :anchor] = document.features[:anchor]
    counts = np.array([anchor for _, anchor in pairs], np.int32)
    ids = np.array([document.ids[anchor] for document, anchor in pairs], np.int32)
    found = np.asarray(jax.jit(logits)(features, counts, ids))
    return dict(zip(counts.tolist(), found, strict=True))


def test_tokens_after_an_anchor_reach_its_block_only_as_labels(model, drafter, documents, compute):
    """Fault 119: other tokens from 8 on, with the target's features of them; blocks at 5 and 7
    overlap them, the block at 9 comes after."""
    anchors = [np.array([5, 7, 9], np.int32)]
    other = documents[0].ids.copy()
    other[8:] = (other[8:] + 1) % tiny.MASK
    changed = compute([documents[0]._replace(ids=other)])
    run = jax.jit(lambda batch: blocks.hidden_of_blocks(drafter, batch, model.embedding, WIDTH))
    one, two = (build_batch(d, anchors, width=WIDTH, quota=3) for d in (documents[:1], changed))
    before, after = np.asarray(run(one)), np.asarray(run(two))
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert np.abs(before[:, 2] - after[:, 2]).max() > 1e-3
    same = np.asarray(one.labels) == np.asarray(two.labels)
    assert same.tolist() == [[[True, True, False], [False] * 3, [False] * 3]]


def test_a_packed_document_does_not_see_its_neighbour(model, drafter, batch):
    packed = pack_batch(batch, 4)
    firsts = np.asarray(packed.firsts)[0]
    row = int(firsts.max())  # the shortest document with an anchor comes after all others
    spoiled = np.asarray(packed.features).copy()
    spoiled[:, :row] = 100.0
    run = jax.jit(lambda batch: blocks.hidden_of_blocks(drafter, batch, model.embedding, WIDTH))
    before, after = run(packed), run(packed._replace(features=spoiled))
    own = firsts == row
    np.testing.assert_array_equal(np.asarray(before)[0, own], np.asarray(after)[0, own])
    assert not np.array_equal(np.asarray(before)[0, ~own], np.asarray(after)[0, ~own])


def test_packed_rows_restart_positions_and_keep_each_documents_blocks():
    """Fault 122: the quota is still a document's. Features equal to 10 x document + position."""
    made = [
        blocks.Document(
            np.arange(n, dtype=np.int32) + 10 * i,
            0,
            True,
            (np.arange(n)[:, None] + 10 * i).astype(jnp.bfloat16),
        )
        for i, n in enumerate((6, 4, 7, 9))
    ]
    anchors = [np.array(a, np.int32) for a in ([1, 3], [2], [4], [])]
    packed = pack_batch(build_batch(made, anchors, width=3, quota=2, multiple=1), 2, multiple=1)
    assert row_order(np.array([9, 7, 5, 4, 2, 1]), 2).tolist() == [[0, 5], [1, 4], [2, 3]]
    # Rows needed: 3, 2, 4, 0: documents 2 and 3 share a row, 0 and 1 the other.
    assert np.asarray(packed.features, np.float32)[..., 0].tolist() == [
        [20, 21, 22, 23, 0],
        [0, 1, 2, 10, 11],
    ]
    assert np.asarray(packed.positions).tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]
    assert np.asarray(packed.firsts).tolist() == [[0, 0, 4, 4], [0, 0, 3, 3]]
    assert np.asarray(packed.anchors).tolist() == [[4, 0, 0, 0], [1, 3, 2, 0]]
    assert np.asarray(packed.labels)[1].tolist() == [[2, 3], [4, 5], [13, 0], [0, 0]]
    assert np.asarray(packed.scored)[1].tolist() == [
        [True, True],
        [True, True],
        [True, False],
        [False, False],
    ]
    config = drafter_config(tiny.target().config, tiny.options())
    arrays = (jnp.asarray(packed.anchors), 5, 3, jnp.asarray(packed.firsts))
    seen = np.asarray(blocks.context_masks(config, *arrays)[0])[1, ::3].astype(int)
    assert seen.tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0] * 5]


def _largest(jaxpr):
    """Elements of the largest array that a program names, inner programs included."""
    sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars if hasattr(v.aval, "size")]
    inner = []
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for sub in value if isinstance(value, tuple | list) else [value]:
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    inner.append(_largest(sub))
    return max(sizes + inner, default=0)


def test_with_chunks_no_array_is_as_long_as_all_slots_squared(model, drafter):
    quota = 96
    long = blocks.Document(np.zeros(110, np.int32), 0, True, np.zeros((110, 32), jnp.bfloat16))
    made = build_batch([long], [np.arange(quota, dtype=np.int32)], width=WIDTH, quota=quota)
    abstract = step.abstract_of(drafter)

    def largest(chunk):
        def total(params):
            built = step.with_params(abstract, params)
            return jnp.sum(blocks.hidden_of_blocks(built, made, model.embedding, WIDTH, chunk))

        return _largest(jax.make_jaxpr(jax.grad(total))(step.drafter_params(drafter)).jaxpr)

    squared = (quota * WIDTH) ** 2
    assert largest(0) >= squared
    assert largest(8) < squared / 4


def test_computed_features_give_the_batches_of_cached_ones(model, documents, compute):
    bare = [d._replace(features=np.zeros((len(d.ids), 0), jnp.bfloat16)) for d in documents]
    lengths = np.asarray(LENGTHS)
    settings: dict[str, Any] = {"per_step": 4, "quota": 2, "width": WIDTH, "seed": 0, "pack": 2}
    chosen, cached = batches.batch_at(documents, lengths, 1, **settings)
    again, computed = batches.batch_at(bare, lengths, 1, compute=compute, **settings)
    np.testing.assert_array_equal(chosen, again)
    for one, other in zip(cached, computed, strict=True):
        np.testing.assert_array_equal(one, other)
    expected = model.forward(jnp.asarray(documents[2].ids), tiny.TAPS)[1]
    np.testing.assert_allclose(
        np.asarray(documents[2].features, np.float32), expected, rtol=2**-7, atol=1e-3
    )
