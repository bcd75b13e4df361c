"""From one format to the other and back: the same tensors, the same files beside them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.errors import CheckpointError
from dflash_jax.weights import convert as module
from dflash_jax.weights import orbax
from dflash_jax.weights.convert import convert
from dflash_jax.weights.load import load_target
from dflash_jax.weights.save import save_parameters
from weight_files import GOLDEN, INDEX, PAIRS, SINGLE, copy_golden, golden_tensors, write_sharded


def mixed(tensors):
    """Norms in float32, the rest in bfloat16 and float16, as some releases are."""
    kinds = (jnp.bfloat16, jnp.float16)
    return {
        name: values if "norm" in name else values.astype(kinds[i % 2])
        for i, (name, values) in enumerate(tensors.items())
    }


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_there_and_back_gives_every_tensor_bit_for_bit(tmp_path, pair, kind):
    source = copy_golden(pair, kind, tmp_path / "source")
    tensors = mixed(golden_tensors(pair, kind))
    save_file(tensors, source / SINGLE)
    there = convert(source, tmp_path / "there", kind)
    assert orbax.is_checkpoint(there)
    back = convert(there, tmp_path / "back", kind)
    again = load_file(back / SINGLE)
    assert set(again) == set(tensors)
    for name, values in tensors.items():
        assert again[name].dtype == values.dtype
        assert again[name].tobytes() == values.tobytes()


def test_shards_become_one_folder_without_index(tmp_path):
    pair, tensors = "llama-tiny", golden_tensors("llama-tiny", "target")
    config = json.loads((GOLDEN / pair / "target" / "config.json").read_text())
    source = write_sharded(tmp_path / "source", config, tensors)
    there = convert(source, tmp_path / "there", "target")
    assert sorted(path.name for path in there.iterdir()) == ["config.json", "params"]


def test_tokenizer_template_and_licence_come_along_and_weights_do_not(tmp_path):
    source = copy_golden("llama-tiny", "target", tmp_path / "source")
    beside = (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "merges.txt",
        "tokenizer.model",
        "LICENSE",
        "README.md",
    )
    for name in beside:
        (source / name).write_text(name)
    (source / "generation_config.json").write_text('{"eos_token_id": [7]}')
    (source / "pytorch_model.bin").write_text("weights")
    there = convert(source, tmp_path / "there", "target")
    expected = {"config.json", "params", *beside}
    assert {path.name for path in there.iterdir()} == expected
    assert (there / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert 7 in load_target(there).config.eos_token_ids


def test_a_destination_that_is_there_is_refused_unless_overwritten(tmp_path):
    source = GOLDEN / "llama-tiny" / "target"
    there = convert(source, tmp_path / "there", "target")
    with pytest.raises(CheckpointError, match="there is there already"):
        convert(source, there, "target")
    convert(source, there, "target", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_folder_that_is_no_checkpoint_is_never_overwritten(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="notes is there and has no config.json"):
        convert(GOLDEN / "llama-tiny" / "target", tmp_path / "notes", "target", overwrite=True)
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "years of work"


def test_a_source_is_not_converted_onto_itself(tmp_path):
    source = copy_golden("llama-tiny", "target", tmp_path / "source")
    with pytest.raises(CheckpointError, match="is the source itself"):
        convert(source, tmp_path / "." / "source", "target", overwrite=True)
    assert (source / SINGLE).is_file()


def test_a_conversion_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch):
    source = GOLDEN / "llama-tiny" / "target"
    there = convert(source, tmp_path / "there", "target")

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(module.orbax, "write", fail)
    with pytest.raises(OSError, match="no space"):
        convert(source, there, "target", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    load_target(there)


def test_parameters_above_the_limit_are_written_as_shards_that_load(tmp_path):
    target = load_target(GOLDEN / "qwen3-tiny" / "target")
    folder = copy_golden("qwen3-tiny", "target", tmp_path / "sharded")
    (folder / SINGLE).unlink()
    save_parameters(target, folder, kind="target", max_shard_bytes=200_000)
    shards = sorted(folder.glob("model-*.safetensors"))
    tensors = {}
    for shard in shards:
        assert shard.stat().st_size < 220_000
        tensors |= load_file(shard)
    expected = golden_tensors("qwen3-tiny", "target")
    assert set(tensors) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], values)
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in expected.values())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    np.testing.assert_array_equal(load_target(folder).embedding, target.embedding)


def test_a_whole_file_replaces_an_older_index(tmp_path):
    source = GOLDEN / "qwen3-tiny" / "target"
    folder = copy_golden("qwen3-tiny", "target", tmp_path / "again")
    (folder / INDEX).write_text("old")
    save_parameters(load_target(source), folder, kind="target", dtype=jnp.bfloat16)
    assert not (folder / INDEX).exists()
    values = load_file(folder / SINGLE)["lm_head.weight"]
    expected = golden_tensors("qwen3-tiny", "target")["lm_head.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(values, expected)
