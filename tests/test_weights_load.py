"""The front door: which folder, which dtype, which reader, on one device and on a mesh."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.weights import hub, orbax
from dflash_jax.weights.load import load_drafter, load_target, resolve_dtype
from weight_files import (
    GOLDEN,
    PAIRS,
    SINGLE,
    copy_golden,
    golden_config,
    golden_tensors,
    run_python,
    write_sharded,
    write_single,
)

IDS = np.array([3, 1, 4, 1, 5], np.int32)


def test_four_layouts_give_equal_logits_and_an_untied_target_without_head_is_refused(tmp_path):
    """Fault 79."""
    tied, tensors = golden_config("llama-tiny", "target"), golden_tensors("llama-tiny", "target")
    untied = {**tied, "tie_word_embeddings": False}
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    folders = [
        write_single(tmp_path / "single-tied", tied, tensors),
        write_sharded(tmp_path / "sharded-tied", tied, tensors),
        write_single(tmp_path / "single-untied", untied, tensors | head),
        write_sharded(tmp_path / "sharded-untied", untied, tensors | head),
    ]
    logits = [np.asarray(load_target(folder).forward(jnp.asarray(IDS))[0]) for folder in folders]
    for other in logits[1:]:
        np.testing.assert_array_equal(other, logits[0])
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing .*tie_word_embeddings"):
        load_target(write_single(tmp_path / "headless", untied, tensors))


def test_padding_rows_change_no_logit_and_are_never_in_the_logits(tmp_path):
    """Fault 77."""
    config, tensors = golden_config("llama-tiny", "target"), golden_tensors("llama-tiny", "target")
    padded = tensors["model.embed_tokens.weight"].copy()
    padded[97:] = 1e4
    plain = {**tensors, "model.embed_tokens.weight": padded[:97].copy()}
    config["vocab_size"] = 97
    exact = load_target(write_single(tmp_path / "exact", config, plain))
    more = {**tensors, "model.embed_tokens.weight": padded}
    wide = load_target(write_single(tmp_path / "padded", config, more))
    ids = jnp.asarray(IDS)
    assert wide.embedding.shape == (256, 48)
    assert wide.forward(ids)[0].shape == (5, 97)
    # The head's matmul has another width, so its sums round differently.
    np.testing.assert_allclose(wide.forward(ids)[0], exact.forward(ids)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pair", PAIRS)
def test_auto_is_float32_on_a_cpu(pair):
    target, drafter = load_target(GOLDEN / pair / "target"), load_drafter(GOLDEN / pair / "drafter")
    assert target.embedding.dtype == jnp.float32
    assert drafter.fc.weight[...].dtype == jnp.float32
    expected = golden_tensors(pair, "drafter")["fc.weight"].T
    np.testing.assert_array_equal(np.asarray(drafter.fc.weight[...]), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_asked_dtype_holds_for_every_parameter(dtype):
    target = load_target(GOLDEN / "qwen3-tiny" / "target", dtype=dtype)
    embedding = golden_tensors("qwen3-tiny", "target")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(target.embedding), embedding.astype(jnp.dtype(dtype)))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(target))} == {jnp.dtype(dtype)}


def test_auto_is_bfloat16_off_the_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert resolve_dtype("auto") == jnp.bfloat16
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("tensor",))
    assert resolve_dtype("auto", mesh) == jnp.float32


def test_a_dtype_that_is_not_supported_is_refused_with_the_list():
    with pytest.raises(ConfigError, match="'int8' is not supported; supported: auto, float32"):
        load_target(GOLDEN / "qwen3-tiny" / "target", dtype="int8")


@pytest.mark.parametrize("load", [load_target, load_drafter])
def test_a_folder_without_config_is_refused_by_name(tmp_path, load):
    folder = copy_golden("llama-tiny", "target", tmp_path / "bare")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="bare has no config.json"):
        load(folder)


def test_a_drafter_of_another_width_is_refused_with_both_shapes(tmp_path):
    folder = copy_golden("llama-tiny", "drafter", tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [1, 2]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"fc.weight .* \[48, 144\].* \[48, 96\]"):
        load_drafter(folder)


def test_a_converted_folder_loads_like_its_source(tmp_path):
    source = GOLDEN / "qwen3-tiny" / "target"
    target = load_target(source)
    orbax.save(target, tmp_path / "converted", golden_config("qwen3-tiny", "target"))
    ids = jnp.asarray(IDS)
    again = load_target(tmp_path / "converted")
    np.testing.assert_array_equal(again.forward(ids)[0], target.forward(ids)[0])


def test_demo_stands_for_the_pair(monkeypatch):
    monkeypatch.setattr(hub, "demo_target", lambda: GOLDEN / "llama-tiny" / "target")
    monkeypatch.setattr(hub, "demo_drafter", lambda: GOLDEN / "llama-tiny" / "drafter")
    assert load_target("demo").config.hidden_size == 48
    assert load_drafter("demo").config.block_size == 4


BEFORE_BACKEND = """
import sys
from jax._src import xla_bridge
from dflash_jax.errors import DFlashError
from dflash_jax.weights.load import load_target

for dtype in ("auto", "int8"):
    try:
        load_target(sys.argv[1], dtype=dtype)
    except DFlashError as error:
        print(type(error).__name__)
print(xla_bridge.backends_are_initialized())
"""


def test_damaged_files_and_wrong_options_are_refused_before_a_backend_starts(tmp_path):
    folder = copy_golden("qwen3-tiny", "target", tmp_path / "damaged")
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:-8])
    assert run_python(BEFORE_BACKEND, str(folder)).split() == [
        "CheckpointError",
        "ConfigError",
        "False",
    ]


ON_MESH = """
import json, sys
import jax, numpy as np
from flax import nnx
from dflash_jax.errors import ConfigError
from dflash_jax.weights import orbax
from dflash_jax.weights.load import load_drafter, load_target

source, converted, drafter, uneven = sys.argv[1:]
assert len(jax.devices()) == 2
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
plain = nnx.to_flat_state(nnx.state(load_target(source)))
report = {}
for name, folder in (("safetensors", source), ("orbax", converted)):
    divided = dict(nnx.to_flat_state(nnx.state(load_target(folder, mesh=mesh))))
    for path, leaf in plain:
        array, expected = divided[path].get_value(), np.asarray(leaf.get_value())
        assert np.array_equal(np.asarray(array), expected), path
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), expected[shard.index]), path
    q = divided[("layers", 0, "self_attn", "q_proj", "weight")].get_value()
    report[name] = [list(q.addressable_shards[0].data.shape),
                    list(divided[("norm", "weight")].get_value().addressable_shards[0].data.shape),
                    len(divided[("norm", "weight")].get_value().sharding.device_set)]
fc = load_drafter(drafter, mesh=mesh).fc.weight[...]
report["fc"] = [len(fc.sharding.device_set), fc.sharding.is_fully_replicated]
try:
    load_target(uneven, mesh=mesh)
except ConfigError as error:
    report["uneven"] = str(error)
print(json.dumps(report))
"""


def test_two_devices_hold_half_of_each_divided_parameter(tmp_path):
    source = GOLDEN / "qwen3-tiny" / "target"
    orbax.save(load_target(source), tmp_path / "converted", golden_config("qwen3-tiny", "target"))
    report = json.loads(
        run_python(
            ON_MESH,
            str(source),
            str(tmp_path / "converted"),
            str(GOLDEN / "qwen3-tiny" / "drafter"),
            str(GOLDEN / "llama-tiny" / "target"),
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
        )
    )
    assert report["safetensors"] == [[64, 64], [64], 2]
    assert report["orbax"] == report["safetensors"]
    assert report["fc"] == [2, True]
    assert "num_key_value_heads=3 over the 2 devices of mesh axis 'tensor'" in report["uneven"]
