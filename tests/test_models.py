"""The models alone: what a feature is, what every weight does, padding, tying, windows.

Targets and drafters are random or built by hand; expected numbers are written out. Parity with the
golden pairs and with other implementations is tested elsewhere.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import dflash_jax as dj
import tiny_engine
from dflash_jax.arena.rows import ArenaRows, KeyValues
from dflash_jax.models import DFlashDrafter, build_drafter, build_target
from tiny import (
    DRAFTER,
    ROWS,
    TARGET,
    VOCAB,
    known,
    reference,
    use_drafts,
    write_checkpoint,
    write_drafter,
    write_target,
)

SMALL: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": 32}
PROMPT = [5, 17, 3, 88, 40, 2]


def random_drafter(seed: int = 0, **changes: Any) -> DFlashDrafter:
    """Fixture T's drafter with weights of order 1, so that nothing is near zero."""
    config = dj.DrafterConfig.from_dict({**DRAFTER, **changes})
    drafter = build_drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, params = nnx.split(drafter)
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 1:
            return jnp.asarray(1 + 0.1 * rng.standard_normal(leaf.shape), jnp.float32)
        return jnp.asarray(rng.standard_normal(leaf.shape) * leaf.shape[0] ** -0.5, jnp.float32)

    return nnx.merge(graph, jax.tree.map(draw, params))


def inputs(
    context: int, width: int, rows: int = 1, seed: int = 1
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Features, block ids, positions, embedding and head, batched."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((rows, context, 64)).astype(np.float32)
    ids = rng.integers(0, VOCAB, (rows, width)).astype(np.int32)
    positions = context + np.tile(np.arange(width, dtype=np.int32), (rows, 1))
    tables = rng.standard_normal((2, ROWS, 32)).astype(np.float32)
    return tuple(jnp.asarray(array) for array in (features, ids, positions, *tables))  # type: ignore[return-value]


def test_a_feature_is_the_residual_stream_after_its_block():
    """Fault 86: block i adds 10^i to channel 0, so block 0 gives 1 and block 2 gives 1 + 10 + 100.

    A tap named by a block's *input* would give 0 and 11; one after the final norm neither.
    """
    config = dataclasses.replace(dj.TargetConfig.from_dict(TARGET), mlp_bias=True)
    target = build_target(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    for index, layer in enumerate(target.layers):
        attention_out, mlp_out = layer.self_attn.o_proj, layer.mlp.down_proj
        attention_out.weight[...] = jnp.zeros_like(attention_out.weight[...])
        mlp_out.weight[...] = jnp.zeros_like(mlp_out.weight[...])
        assert mlp_out.bias is not None
        mlp_out.bias[...] = jnp.zeros((32,), jnp.float32).at[0].set(10.0**index)
    embedded = np.asarray(target.embedding)[np.asarray(PROMPT)]
    features = np.asarray(target.forward(jnp.asarray(PROMPT, jnp.int32), [0, 2])[1])
    assert features.shape == (len(PROMPT), 2 * 32)
    for tap, added in enumerate((1.0, 111.0)):
        increments = features[:, 32 * tap : 32 * (tap + 1)] - embedded
        np.testing.assert_allclose(increments[:, 0], added, rtol=1e-5)
        np.testing.assert_allclose(increments[:, 1:], 0.0, atol=1e-6)


def test_features_are_concatenated_in_the_order_asked_for(tmp_path):
    target = dj.load_target(write_target(tmp_path / "t"))
    ids = jnp.asarray(PROMPT, jnp.int32)
    every = np.asarray(target.forward(ids)[1])
    assert every.shape == (len(PROMPT), 4 * 32)
    turned = np.asarray(target.forward(ids, [2, 0])[1])
    np.testing.assert_array_equal(turned, np.concatenate([every[:, 64:96], every[:, :32]], axis=1))


@pytest.mark.parametrize("layer_ids", [[4], [-1], [0, 9]])
def test_a_tap_that_the_target_does_not_have_is_refused(tmp_path, layer_ids):
    target = dj.load_target(write_target(tmp_path / "t"))
    with pytest.raises(dj.ConfigError, match="blocks are 0 to 3"):
        target.forward(jnp.asarray(PROMPT, jnp.int32), layer_ids)


def test_a_batch_of_prompts_gives_what_each_gives_alone(tmp_path):
    target = dj.load_target(write_target(tmp_path / "t"))
    ids = jnp.asarray([PROMPT, PROMPT[::-1]], jnp.int32)
    logits, features = target.forward(ids)
    assert logits.shape == (2, len(PROMPT), VOCAB) and logits.dtype == jnp.float32
    for row in range(2):
        alone = target.forward(ids[row])
        np.testing.assert_allclose(logits[row], alone[0], atol=2e-5)
        np.testing.assert_allclose(features[row], alone[1], atol=2e-5)


def test_a_tied_head_is_the_embedding_itself(tmp_path):
    """Fault 80: the same array, not a copy and not a random one."""
    tied = dj.load_target(write_target(tmp_path / "tied", tie_word_embeddings=True))
    assert tied.head is tied.embedding
    assert not hasattr(tied, "lm_head")
    untied = dj.load_target(write_target(tmp_path / "untied"))
    assert untied.head is untied.lm_head.weight[...]
    assert not np.array_equal(untied.head, untied.embedding)


def test_every_tensor_of_a_drafter_changes_its_logits():
    """Fault 88: noise on each of them in turn."""
    graph, params = nnx.split(random_drafter())
    leaves, tree = jax.tree.flatten_with_path(params)
    arguments = inputs(context=5, width=4)

    @jax.jit
    def logits(flat: list[jax.Array]) -> jax.Array:
        return nnx.merge(graph, jax.tree.unflatten(tree, flat)).forward(*arguments)[1]

    arrays = [leaf for _, leaf in leaves]
    before = np.asarray(logits(arrays))
    rng = np.random.default_rng(2)
    assert len(arrays) == 3 + 2 * 11, "fc, two norms, eleven tensors a layer"
    for index, (path, leaf) in enumerate(leaves):
        noise = jnp.asarray(rng.standard_normal(leaf.shape) * 0.5, jnp.float32)
        changed = logits([*arrays[:index], leaf + noise, *arrays[index + 1 :]])
        assert np.abs(np.asarray(changed) - before).max() > 1e-3, jax.tree_util.keystr(path)


def test_a_batch_of_blocks_gives_what_each_gives_alone():
    drafter = random_drafter()
    features, ids, positions, embed, head = inputs(context=7, width=4, rows=3)
    hidden, logits = drafter.forward(features, ids, positions, embed, head)
    assert hidden.shape == (3, 4, 32) and logits.shape == (3, 4, VOCAB)
    for row in range(3):
        alone = drafter.forward(features[row], ids[row], positions[row], embed, head)
        np.testing.assert_allclose(hidden[row], alone[0], atol=2e-5)
        np.testing.assert_allclose(logits[row], alone[1], atol=2e-5)


def test_a_block_depends_on_distances_and_not_on_where_it_stands():
    """Rotations cancel but for the difference, so a context may start anywhere."""
    drafter = random_drafter()
    features, ids, positions, embed, head = inputs(context=7, width=4)
    hidden, _ = drafter.forward(features, ids, positions, embed, head)
    moved, _ = drafter.forward(features, ids, positions + 100, embed, head)
    np.testing.assert_allclose(moved, hidden, atol=2e-4)


WINDOW = 4
CONTEXT = 12


def windowed(types: Sequence[str], **changes: Any) -> DFlashDrafter:
    return random_drafter(
        num_hidden_layers=len(types),
        layer_types=[f"{kind}_attention" for kind in types],
        use_sliding_window=True,
        sliding_window=WINDOW,
        **changes,
    )


def hidden_after_change_of(drafter: DFlashDrafter, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states of a block before and after one context row is perturbed."""
    features, ids, positions, embed, head = inputs(context=CONTEXT, width=4)
    before, _ = drafter.forward(features, ids, positions, embed, head)
    after, _ = drafter.forward(features.at[0, row].add(1.0), ids, positions, embed, head)
    return np.asarray(before[0]), np.asarray(after[0])


def test_a_sliding_layer_does_not_see_a_context_row_behind_its_window():
    """Fault 51: window 4, context 12, row 0 perturbed; a full layer sees it."""
    before, after = hidden_after_change_of(windowed(["sliding"]), row=0)
    np.testing.assert_array_equal(after, before)
    before, after = hidden_after_change_of(windowed(["full"]), row=0)
    assert (np.abs(after - before).max(axis=-1) > 1e-3).all()


def test_in_a_mixed_drafter_only_the_full_layer_sees_the_row():
    """Fault 51, both orders: the sliding layer alone hides nothing of what the full one sees."""
    for types in (["sliding", "full"], ["full", "sliding"]):
        before, after = hidden_after_change_of(windowed(types), row=0)
        assert np.abs(after - before).max() > 1e-3


def test_a_window_counts_the_querys_own_position():
    """Slot 0 stands at 12 and sees 9, 10, 11 and itself; slot 1 no longer sees 9."""
    drafter = windowed(["sliding"])
    before, after = hidden_after_change_of(drafter, row=8)
    np.testing.assert_array_equal(after, before)
    before, after = hidden_after_change_of(drafter, row=9)
    changed = np.abs(after - before).max(axis=-1) > 1e-4
    np.testing.assert_array_equal(changed, [True, False, False, False])


def test_a_window_that_the_config_does_not_enable_is_not_used():
    """Fault 51."""
    config = {"layer_types": ["sliding_attention"], "use_sliding_window": False}
    drafter = random_drafter(num_hidden_layers=1, sliding_window=WINDOW, **config)
    before, after = hidden_after_change_of(drafter, row=0)
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.parametrize("piece", [None, 5])
def test_a_block_over_an_arena_is_the_block_over_loose_context(piece):
    """Fault 51, the served path: windows hold where rows are read from the arena too."""
    drafter = windowed(["sliding", "full"])
    features, ids, positions, embed, head = inputs(context=CONTEXT, width=4)
    expected, _ = drafter.forward(features, ids, positions, embed, head)
    spots = jnp.arange(CONTEXT, dtype=jnp.int32)[None, :]
    layers = tuple(
        KeyValues(*(jnp.pad(array, ((0, 1), (0, 0), (0, 8), (0, 0)), constant_values=1e4)
                    for array in rows))
        for rows in drafter.context_kv(features, spots)
    )  # fmt: skip
    embeddings = embed[ids[0]][None]
    lengths = jnp.asarray([CONTEXT], jnp.int32)
    cached = drafter.block_hidden_cached(embeddings, lengths, ArenaRows(layers, None, piece))
    np.testing.assert_allclose(cached, expected, atol=2e-5)


def padded_and_cut(folder: Path) -> tuple[Path, Path]:
    """One target twice: 128 rows whose padding would win every argmax, and the 97 real rows."""
    tensors = load_file(write_target(folder / "plain") / "model.safetensors")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    # Along and against every row that a hidden state may resemble: one of them always wins.
    loud = {name: tensors[name].copy() for name in names}
    loud["lm_head.weight"][VOCAB : VOCAB + 15] = 100 * tensors["lm_head.weight"][:15]
    loud["lm_head.weight"][VOCAB + 15 : VOCAB + 30] = -100 * tensors["lm_head.weight"][:15]
    cut = {name: tensors[name][:VOCAB] for name in names}
    return (
        write_checkpoint(folder / "padded", TARGET, {**tensors, **loud}),
        write_checkpoint(folder / "cut", TARGET, {**tensors, **cut}),
    )


def test_padding_of_the_vocabulary_changes_nothing_and_is_never_chosen(tmp_path, monkeypatch):
    """Fault 77: 128 rows for 97 ids, then 97 rows: one accept trace, and no id beyond 96.

    The first draft of a block is put right, so that the trace is one of acceptance; the others are
    the drafter's own.
    """
    drafter = write_drafter(tmp_path / "d")
    folders = padded_and_cut(tmp_path)
    answer = reference(dj.load_target(folders[1]), PROMPT, 24)
    right = known([*PROMPT, *answer])

    def first_right(anchors, lengths, own):
        return own.at[:, 0].set(right(anchors, lengths, own)[:, 0])

    use_drafts(monkeypatch, first_right)
    params = [
        dj.SamplingParams(max_tokens=24),
        dj.SamplingParams(temperature=2.0, seed=3, max_tokens=24),
    ]
    traces = []
    for folder in folders:
        llm, trace = tiny_engine.start(folder, drafter, **SMALL), []
        for one in params:
            done = llm.generate([PROMPT], one)[0]
            last = llm.last_round(0)
            assert last is not None and max(last.drafts + done.token_ids) < VOCAB
            trace.append((done.token_ids, done.stats, last.drafts))
        traces.append(trace)
    assert traces[0] == traces[1]
    (ids, stats, _), _ = traces[0]
    assert ids == answer and max(stats.acceptance_lengths) >= 2
