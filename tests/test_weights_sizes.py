"""Bytes of weights before they are loaded: of a folder, of headers, of a config alone."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import few_ids
import tiny
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.errors import CheckpointError
from dflash_jax.models.sizes import drafter_shapes, features_bytes, logits_bytes, target_shapes
from dflash_jax.weights import sizes
from dflash_jax.weights.load import abstract_drafter, abstract_target, load_drafter, load_target
from dflash_jax.weights.match import parameters, wanted_shapes
from dflash_jax.weights.sizes import checkpoint_bytes, weight_bytes
from dflash_jax.weights.vocabulary import for_target
from planning_pairs import QWEN3_8B, QWEN3_8B_DRAFTER
from weight_files import INDEX, write_sharded

GIB = 1024**3


def write_files(folder: Path, files: dict[str, int]) -> Path:
    """Files of so many bytes."""
    for name, size in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" * size)
    return folder


@pytest.mark.parametrize(
    "files, expected",
    [
        (
            {
                "model-1.safetensors": 100,
                "model-2.safetensors": 50,
                "pytorch_model.bin": 7,
                "config.json": 3,
                "model.safetensors.index.json": 11,
            },
            150,
        ),
        ({"a.bin": 40, "b.bin": 20, "config.json": 3}, 60),
        ({"weights/deep/model.safetensors": 80, "config.json": 3}, 80),
        ({"weights/a.safetensors": 80, "b.safetensors": 1}, 81),
        ({"config.json": 3}, None),
        ({}, None),
        ({"model.safetensors": 0, "pytorch_model.bin": 7}, 7),
        ({"model.safetensors": 0, "pytorch_model.bin": 0}, None),
        ({"model.gguf": 9, "model.pt": 9, "safetensors": 9}, None),
    ],
)
def test_a_folders_weight_files_are_added_up_as_in_the_reference(tmp_path, files, expected):
    assert checkpoint_bytes(write_files(tmp_path, files)) == expected
    assert checkpoint_bytes(str(tmp_path)) == expected


def test_what_is_no_folder_is_unknown_and_not_zero(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\0" * 5)
    for path in (None, "", "hf-org/hf-model", tmp_path / "absent", file):
        assert checkpoint_bytes(path) is None


def test_files_of_200_gib_are_added_up_without_being_there(tmp_path, monkeypatch):
    write_files(tmp_path, {f"model-{i}.safetensors": 1 for i in range(4)})
    monkeypatch.setattr(sizes.os.path, "getsize", lambda path: 50 * GIB)
    assert checkpoint_bytes(tmp_path) == 200 * GIB


def test_a_folder_that_cannot_be_read_is_unknown(tmp_path, monkeypatch):
    write_files(tmp_path, {"model.safetensors": 10})

    def refuses(path: Any) -> int:
        raise PermissionError(path)

    monkeypatch.setattr(sizes.os.path, "getsize", refuses)
    assert checkpoint_bytes(tmp_path) is None


def test_a_subfolder_that_cannot_be_listed_makes_the_sum_unknown(tmp_path, monkeypatch):
    write_files(tmp_path, {"model.safetensors": 10, "more/model.safetensors": 10})
    real = os.scandir

    def refuses(path: Any) -> Any:
        if str(path).endswith("more"):
            raise PermissionError(path)
        return real(path)

    assert checkpoint_bytes(tmp_path) == 20
    monkeypatch.setattr(os, "scandir", refuses)
    assert checkpoint_bytes(tmp_path) is None


def test_a_link_that_leads_nowhere_makes_the_sum_unknown(tmp_path):
    write_files(tmp_path, {"model.safetensors": 10})
    (tmp_path / "lost.safetensors").symlink_to(tmp_path / "absent")
    assert checkpoint_bytes(tmp_path) is None


TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2 with its biases": {"model_type": "qwen2"},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 with biases": {"model_type": "qwen3", "attention_bias": True},
    "one KV head": {"num_key_value_heads": 1, "num_hidden_layers": 1},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "two taps": {},
    "three taps": {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 1, 2]}},
    "with biases": {"attention_bias": True},
    "a wider target": {"target_hidden_size": 48},
    "one layer": {"num_hidden_layers": 1, "num_key_value_heads": 4},
    "few ids": {"draft_vocab_size": 40},
    "few ids and own tables": {
        "draft_vocab_size": 40,
        "has_embed_tokens": True,
        "has_lm_head": True,
    },
    "own tables": {"has_embed_tokens": True, "has_lm_head": True},
}


def write_config(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("changes", TARGETS.values(), ids=TARGETS)
def test_shapes_of_a_target_are_those_of_its_module(tmp_path, changes):
    folder = write_config(tmp_path, {**tiny.TARGET, **changes})
    built = wanted_shapes(abstract_target(folder))
    assert target_shapes(TargetConfig.from_folder(folder)) == built


@pytest.mark.parametrize("changes", DRAFTERS.values(), ids=DRAFTERS)
def test_shapes_of_a_drafter_are_those_of_its_module(tmp_path, changes):
    folder = write_config(tmp_path, {**tiny.DRAFTER, **changes})
    built = wanted_shapes(abstract_drafter(folder))
    assert drafter_shapes(DrafterConfig.from_folder(folder)) == built


def test_the_parameters_of_qwen3_8b_are_counted_from_its_config():
    """Two tables of 151,936 x 4096; per layer q, o 4096², k, v 4096 x 1024, three of 4096 x
    12,288, norms 2 x 4096 + 2 x 128; the drafter 5 layers and a projection of 5 x 4096 widths."""
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12_288 + 2 * 4096 + 2 * 128
    target = 2 * 151_936 * 4096 + 36 * layer + 4096
    drafter = 5 * layer + 5 * 4096 * 4096 + 2 * 4096
    assert (target, drafter) == (8_190_735_360, 1_048_626_432)
    assert weight_bytes(QWEN3_8B, None, dtype_bytes=2) == 2 * target
    assert weight_bytes(QWEN3_8B_DRAFTER, None, dtype_bytes=2) == 2 * drafter
    tied = dataclasses.replace(QWEN3_8B, tie_word_embeddings=True)
    assert weight_bytes(tied, None, dtype_bytes=4) == 4 * (target - 151_936 * 4096)


def test_a_folder_with_only_a_config_is_sized_by_the_config(tmp_path):
    """97 rows of 32, twice, as the config says; there is no file to say 128."""
    folder = write_config(tmp_path, tiny.TARGET)
    config = TargetConfig.from_folder(folder)
    expected = weight_bytes(config, None, dtype_bytes=4)
    assert weight_bytes(config, folder, dtype_bytes=4) == expected
    padded = tiny.write_target(tmp_path / "padded")
    assert weight_bytes(config, padded, dtype_bytes=4) == expected + 2 * 31 * 32 * 4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_the_bytes_of_a_target_are_those_that_loading_allocates(tmp_path, tied, dtype, size):
    """Invariant 5, with a table of 128 rows for 97 ids."""
    folder = tiny.write_target(tmp_path / "target", tie_word_embeddings=tied)
    config = TargetConfig.from_folder(folder)
    loaded = parameters(load_target(folder, dtype=dtype))
    assert loaded[("embed_tokens", "weight")].shape == (128, 32)
    found = weight_bytes(config, folder, dtype_bytes=size)
    assert found == sum(array.nbytes for array in loaded.values())


def test_the_bytes_of_a_drafter_are_those_that_loading_allocates(tmp_path):
    folder = tiny.write_drafter(tmp_path / "drafter")
    loaded = parameters(load_drafter(folder, dtype="float32"))
    found = weight_bytes(DrafterConfig.from_folder(folder), folder, dtype_bytes=4)
    assert found == sum(array.nbytes for array in loaded.values())


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("write", [few_ids.write_zlab, few_ids.write_speculators])
def test_the_bytes_of_few_draft_ids_are_those_held_with_the_target(tmp_path, write, dtype, size):
    """Invariant 5: a gathered head counts, and offsets take 4 bytes in either dtype."""
    target = load_target(tiny.write_target(tmp_path / "target"), dtype=dtype)
    folder = write(tmp_path / "few", tiny.write_drafter(tmp_path / "whole"), few_ids.EVEN)
    loaded = parameters(for_target(load_drafter(folder, dtype=dtype), target))
    found = weight_bytes(DrafterConfig.from_folder(folder), folder, dtype_bytes=size)
    assert found == sum(array.nbytes for array in loaded.values())
    assert loaded[("lm_head", "weight")].nbytes == 49 * 32 * size
    assert loaded[("d2t",)].nbytes == 49 * 4


def test_shards_of_a_checkpoint_are_read_through_their_index(tmp_path):
    single = tiny.write_target(tmp_path / "single")
    tensors = load_file(single / "model.safetensors")
    sharded = write_sharded(tmp_path / "sharded", tiny.TARGET, tensors)
    config = TargetConfig.from_folder(single)
    expected = weight_bytes(config, single, dtype_bytes=4)
    assert weight_bytes(config, sharded, dtype_bytes=4) == expected
    # What is stored is what is loaded here: nothing is left out and nothing counted twice.
    assert expected == sum(tensor.nbytes for tensor in tensors.values())


def test_a_head_that_a_tied_target_does_not_load_is_not_counted(tmp_path):
    untied = tiny.write_target(tmp_path / "untied")
    config = TargetConfig.from_folder(untied)
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    head = 128 * 32 * 4
    both = weight_bytes(config, untied, dtype_bytes=4)
    assert weight_bytes(tied, untied, dtype_bytes=4) == both - head


def test_a_table_in_another_folder_layout_is_found_without_its_prefix(tmp_path):
    folder = tmp_path / "bare"
    tensors = load_file(tiny.write_target(tmp_path / "target") / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    tiny.write_checkpoint(folder, tiny.TARGET, bare)
    config = TargetConfig.from_folder(folder)
    found = weight_bytes(config, folder, dtype_bytes=4)
    assert found == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("shards", [2, 4])
def test_a_mesh_divides_heads_width_and_vocabulary_and_repeats_the_rest(tmp_path, shards):
    """Norms and the drafter's projection stay whole on each device."""
    folder = tiny.write_target(tmp_path / "target", num_key_value_heads=4)
    config = TargetConfig.from_folder(folder)
    whole = weight_bytes(config, folder, dtype_bytes=4)
    norms = (4 * 2 + 1) * 32 * 4
    found = weight_bytes(config, folder, dtype_bytes=4, shards=shards)
    assert found == norms + (whole - norms) // shards

    drafter = DrafterConfig.from_dict({**tiny.DRAFTER, "num_key_value_heads": 4})
    whole = weight_bytes(drafter, None, dtype_bytes=4)
    kept = (2 * (2 * 32 + 2 * 16) + 2 * 32 + 2 * 32 * 32) * 4
    found = weight_bytes(drafter, None, dtype_bytes=4, shards=shards)
    assert found == kept + (whole - kept) // shards


def test_a_part_that_is_not_even_counts_as_the_larger(tmp_path):
    """97 rows over two devices: 49 on one of them, twice."""
    tables = 2 * (97 * 32)
    one, two = (
        weight_bytes(TargetConfig.from_dict(tiny.TARGET), None, dtype_bytes=1, shards=n)
        for n in (1, 2)
    )
    norms = 9 * 32
    assert two == 2 * (49 * 32) + (one - tables - norms) // 2 + norms


def test_damaged_weight_files_are_said_to_be_so(tmp_path):
    folder = tiny.write_target(tmp_path / "target")
    (folder / "model.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        weight_bytes(TargetConfig.from_folder(folder), folder, dtype_bytes=4)


def test_a_missing_shard_is_said_to_be_missing(tmp_path):
    tensors = load_file(tiny.write_target(tmp_path / "single") / "model.safetensors")
    folder = write_sharded(tmp_path / "sharded", tiny.TARGET, tensors)
    read = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / sorted(set(read.values()))[0]).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        weight_bytes(TargetConfig.from_folder(folder), folder, dtype_bytes=4)


def test_a_converted_folder_is_sized_by_what_it_stores(tmp_path):
    from dflash_jax.weights import orbax

    folder = tiny.write_target(tmp_path / "target")
    model = load_target(folder, dtype="float32")
    raw = json.loads((folder / "config.json").read_text())
    orbax.save(model, tmp_path / "converted", raw)
    config = TargetConfig.from_folder(folder)
    expected = weight_bytes(config, folder, dtype_bytes=2)
    assert weight_bytes(config, tmp_path / "converted", dtype_bytes=2) == expected


def test_features_and_logits_are_the_arrays_of_a_pass():
    assert features_bytes(2048, 5, 4096, 2) == np.empty((2048, 5, 4096), np.float16).nbytes
    assert logits_bytes(3, 97) == np.empty((3, 97), np.float32).nbytes
