"""What a config asks for against what a folder has: each difference named, all of them at once."""

import logging

import numpy as np
import pytest

from dflash_jax.weights.load import abstract_target
from dflash_jax.weights.safetensors import load_parameters
from weight_files import SINGLE, golden_config, golden_tensors, write_single
from weight_loading import assert_same, load, message_of

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def llama(tmp_path):
    """A tied golden target as one file: (folder to write, config, tensors)."""
    return (
        tmp_path / "model",
        golden_config("llama-tiny", "target"),
        golden_tensors("llama-tiny", "target"),
    )


def test_a_parameter_of_another_dtype_is_refused(llama):
    folder, config, tensors = llama
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(np.int32)
    message = message_of(write_single(folder, config, tensors))
    assert f"tensor {Q_PROJ} in {SINGLE}: unsupported dtype I32; supported: F32, F16" in message


def test_a_missing_tensor_is_refused_by_name(llama):
    folder, config, tensors = llama
    del tensors[Q_PROJ]
    message = message_of(write_single(folder, config, tensors))
    assert "1 problem:" in message
    assert "tensor layers.0.self_attn.q_proj.weight of shape [48, 48] is missing from" in message
    assert SINGLE in message


def test_an_unexpected_tensor_is_refused_by_name(llama):
    folder, config, tensors = llama
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(8, np.float32)
    message = message_of(write_single(folder, config, tensors))
    assert f"model.layers.0.self_attn.q_norm.weight in {SINGLE} is unexpected" in message


def test_a_wrong_shape_is_refused_with_both_shapes_as_in_the_file(llama):
    folder, config, tensors = llama
    tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((95, 48), np.float32)
    message = message_of(write_single(folder, config, tensors))
    assert "model.layers.1.mlp.up_proj.weight" in message
    assert f"in {SINGLE} has shape [95, 48], the config asks for [96, 48]" in message


def test_a_layer_too_many_or_too_few_is_refused(llama):
    folder, config, tensors = llama
    write_single(folder, {**config, "num_hidden_layers": 4}, tensors)
    assert "model.layers.4.mlp.up_proj.weight" in message_of(folder)


def test_ten_findings_are_shown_and_the_rest_is_counted(llama):
    folder, config, tensors = llama
    kept = {name: values for name, values in tensors.items() if "layers.0." not in name}
    kept = {name: values for name, values in kept.items() if "layers.1.mlp" not in name}
    message = message_of(write_single(folder, config, kept))
    missing = len(tensors) - len(kept)
    assert missing == 12
    assert f"{missing} problems" in message
    assert message.count("\n  - ") == 10
    assert message.endswith("... and 2 more")


def test_one_tensor_under_two_names_is_refused(llama):
    folder, config, tensors = llama
    tensors["norm.weight"] = tensors["model.norm.weight"].copy()
    message = message_of(write_single(folder, config, tensors))
    assert "is there a second time as" in message


def test_rotary_buffers_are_ignored(llama):
    folder, config, tensors = llama
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert_same(load(write_single(folder, config, {**tensors, **extra})), tensors)


def test_rows_beyond_the_vocabulary_are_loaded(llama):
    """Fault 77."""
    folder, config, tensors = llama
    write_single(folder, {**config, "vocab_size": 250}, tensors)
    assert_same(load(folder), tensors)
    module = load_parameters(abstract_target(folder), folder, kind="target")
    assert module.embedding.shape == (256, 48)
    assert module.config.vocab_size == 250


@pytest.mark.parametrize("shape", [(255, 48), (256, 47)])
def test_a_table_that_is_too_small_is_refused(llama, shape):
    """Fault 77."""
    folder, config, tensors = llama
    tensors["model.embed_tokens.weight"] = np.ones(shape, np.float32)
    message = message_of(write_single(folder, config, tensors))
    assert f"has shape {list(shape)}, the config asks for [256, 48] (or more rows)" in message


def test_a_head_that_repeats_the_tied_embedding_is_ignored_with_a_notice(llama, caplog):
    """Fault 79."""
    folder, config, tensors = llama
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    write_single(folder, config, {**tensors, **head})
    with caplog.at_level(logging.INFO, "dflash_jax"):
        assert_same(load(folder), tensors)
    assert sum("ignored lm_head.weight" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("change", ["value", "shape", "dtype"])
def test_a_head_that_differs_from_the_tied_embedding_is_refused(llama, change):
    """Fault 79."""
    folder, config, tensors = llama
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += change == "value"
    head = head[:-1] if change == "shape" else head
    tensors["lm_head.weight"] = head.astype(np.float16) if change == "dtype" else head
    message = message_of(write_single(folder, config, tensors))
    assert f"lm_head.weight in {SINGLE} differs from model.embed_tokens.weight" in message
    assert "tie_word_embeddings=true" in message


def test_an_untied_target_without_a_head_is_refused_naming_tensor_and_flag(llama):
    """Fault 79."""
    folder, config, tensors = llama
    message = message_of(write_single(folder, {**config, "tie_word_embeddings": False}, tensors))
    assert "tensor lm_head.weight is missing" in message
    assert "tie_word_embeddings=false" in message


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "setting"),
    [
        ("d2t", (32,), np.int64, "draft_vocab_size"),
        ("lm_head.weight", (32, 48), np.float32, "has_lm_head=true"),
        ("embed_tokens.weight", (256, 48), np.float32, "has_embed_tokens=true"),
    ],
)
def test_a_table_of_the_drafters_own_is_never_left_aside(tmp_path, name, shape, dtype, setting):
    """Fault 78: a config that does not say so is refused; the target's is not taken instead."""
    tensors = golden_tensors("llama-tiny", "drafter") | {name: np.ones(shape, dtype)}
    config = golden_config("llama-tiny", "drafter")
    message = message_of(write_single(tmp_path / "drafter", config, tensors), "drafter")
    assert f"tensor {name} in {SINGLE} is unexpected" in message and setting in message
    assert "1 problem:" in message


def test_offsets_of_a_whole_vocabulary_say_nothing_and_are_left_out(tmp_path):
    """A published drafter of the whole vocabulary has offsets of 0 and every flag set."""
    plain = golden_tensors("llama-tiny", "drafter")
    size = golden_config("llama-tiny", "drafter")["vocab_size"]
    whole = {"d2t": np.zeros(size, np.int64), "t2d": np.ones(size, np.bool_)}
    config = golden_config("llama-tiny", "drafter")
    folder = write_single(tmp_path / "drafter", config, plain | whole)
    assert_same(load(folder, "drafter"), plain)
