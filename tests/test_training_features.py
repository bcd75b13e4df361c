"""Tests of `training/features.py`: the cached rows are the target's, and half a shard is none."""

import errno
import logging

import jax.numpy as jnp
import numpy as np
import pytest

import tiny_training as tiny
from dflash_jax.errors import CheckpointError
from dflash_jax.training import corpus, features
from dflash_jax.training.corpus import CorpusOptions
from dflash_jax.training.prompts import Prompt


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture
def made(tmp_path):
    """A corpus of two shards: three answers, then two."""
    rng = np.random.default_rng(0)

    def answer(group):
        return [
            (rng.integers(0, 60, 10 + 7 * p.ids[0]).tolist(), "stop" if p.ids[0] % 2 else "length")
            for p in group
        ]

    prompts = [Prompt([i, i + 1, i + 2], "test") for i in range(5)]
    corpus.write_corpus(tmp_path / "corpus", prompts, answer, CorpusOptions(shard_size=3))
    return tmp_path / "corpus"


def test_cached_features_are_the_targets_own(model, made, tmp_path):
    told: list[tuple[str, int, int]] = []
    features.cache_features(
        model, made, tmp_path / "f", tiny.TAPS, batch_size=2, progress=lambda *at: told.append(at)
    )
    documents = features.read_features(tmp_path / "f")
    sums = np.cumsum([len(document.ids) for document in documents]).tolist()
    assert told == [("features", done, sums[-1]) for done in sums]  # across both shards
    answers = [a for path in corpus.shard_paths(made) for a in corpus.read_shard(path)]
    assert len(documents) == len(answers) == 5
    for document, answer in zip(documents, answers, strict=True):
        assert document.ids.tolist() == answer.prompt_ids + answer.answer_ids
        assert document.answer_start == 3
        assert document.ended == (answer.finish_reason == "stop")
        expected = model.forward(jnp.asarray(document.ids), tiny.TAPS)[1]
        got = np.asarray(document.features, np.float32)
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-3)


def test_the_size_is_shown_before_it_is_written(model, made, tmp_path, caplog):
    tokens = sum(
        len(a.prompt_ids) + len(a.answer_ids)
        for p in corpus.shard_paths(made)
        for a in corpus.read_shard(p)
    )
    assert features.feature_bytes(tokens, 2, 16) == tokens * 2 * 16 * 2
    with caplog.at_level(logging.INFO, "dflash_jax.training.features"):
        features.cache_features(model, made, tmp_path / "f", tiny.TAPS)
    assert f"features of {tokens} tokens in 2 shards" in caplog.text
    on_disk = sum(path.stat().st_size for path in (tmp_path / "f").glob("*.bin"))
    assert on_disk == features.feature_bytes(tokens, 2, 16)


def test_a_half_written_shard_is_made_again_and_a_whole_one_is_not(model, made, tmp_path):
    folder = tmp_path / "f"
    features.cache_features(model, made, folder, tiny.TAPS)
    whole = (folder / "features-00000.bin").stat().st_mtime_ns
    wanted = (folder / "features-00001.bin").read_bytes()
    # What a kill leaves: rows without an index, and a partial file.
    (folder / "features-00001.npz").unlink()
    (folder / "features-00001.bin").write_bytes(wanted[:10])
    (folder / "features-00001.bin.partial").write_bytes(b"half")
    assert len(features.read_features(folder)) == 3
    features.cache_features(model, made, folder, tiny.TAPS)
    assert (folder / "features-00000.bin").stat().st_mtime_ns == whole
    assert (folder / "features-00001.bin").read_bytes() == wanted
    assert len(features.read_features(folder)) == 5


def test_rows_that_do_not_match_their_index_are_refused(model, made, tmp_path):
    features.cache_features(model, made, tmp_path / "f", tiny.TAPS)
    rows = tmp_path / "f" / "features-00000.bin"
    rows.write_bytes(rows.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match=r"features-00000.bin has \d+ bytes, its index says"):
        features.read_features(tmp_path / "f")


def test_other_layer_ids_make_every_shard_again(model, made, tmp_path):
    features.cache_features(model, made, tmp_path / "f", tiny.TAPS)
    features.cache_features(model, made, tmp_path / "f", (3,))
    assert {d.features.shape[1] for d in features.read_features(tmp_path / "f")} == {16}


def test_final_hidden_states_are_kept_when_asked_for_and_a_shard_without_them_is_made_again(
    model, made, tmp_path
):
    folder = tmp_path / "f"
    features.cache_features(model, made, folder, tiny.TAPS)
    plain = features.read_features(folder)
    assert all(d.final is None for d in plain)
    features.cache_features(model, made, folder, tiny.TAPS, keep_final=True)
    documents = features.read_features(folder)
    for document, before in zip(documents, plain, strict=True):
        np.testing.assert_array_equal(document.features, before.features)
        logits = model.forward(jnp.asarray(document.ids), tiny.TAPS)[0]
        got = np.asarray(document.final, np.float32) @ np.asarray(model.head).T
        np.testing.assert_allclose(got, logits, rtol=0.02, atol=0.02)
    tokens = sum(len(d.ids) for d in documents)
    on_disk = sum(path.stat().st_size for path in folder.glob("*.bin"))
    assert on_disk == features.feature_bytes(tokens, len(tiny.TAPS) + 1, 16)
    # A run that needs no final states reads the same shards.
    written = (folder / "features-00000.bin").stat().st_mtime_ns
    features.cache_features(model, made, folder, tiny.TAPS)
    assert (folder / "features-00000.bin").stat().st_mtime_ns == written


def test_a_full_disk_is_an_error_and_leaves_no_shard(model, made, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(features.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device.*free"):
        features.cache_features(model, made, tmp_path / "f", tiny.TAPS)
    monkeypatch.undo()
    assert not list((tmp_path / "f").iterdir())
    with pytest.raises(CheckpointError, match="cache the features first"):
        features.read_features(tmp_path / "f")
