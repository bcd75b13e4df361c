"""Converted parameters: bit for bit, refused under another config, whole or not there at all."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.errors import CheckpointError
from dflash_jax.weights import orbax
from dflash_jax.weights.load import abstract_drafter, abstract_target, load_target
from dflash_jax.weights.match import parameters
from dflash_jax.weights.safetensors import load_parameters
from weight_files import GOLDEN, PAIRS, golden_config, golden_tensors, run_python, write_single

TARGET = GOLDEN / "llama-tiny" / "target"
CONFIG = golden_config("llama-tiny", "target")


def assert_bit_equal(module, expected):
    left, right = parameters(module), parameters(expected)
    assert set(left) == set(right)
    for path, array in right.items():
        assert left[path].dtype == array.dtype, path
        assert np.asarray(left[path]).tobytes() == np.asarray(array).tobytes(), path


def stored(name, dtype):
    """A golden target whose tensors were cast, loaded in the dtype of the file."""
    return load_parameters(abstract_target(name), name, kind="target", dtype=dtype)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_saved_parameters_come_back_bit_for_bit(tmp_path, pair, dtype):
    folder = GOLDEN / pair / "target"
    module = stored(folder, jnp.dtype(dtype))
    config = golden_config(pair, "target")
    orbax.save(module, tmp_path / "saved", config)
    assert_bit_equal(orbax.restore(abstract_target(folder), tmp_path / "saved", config), module)


def test_parameters_of_several_dtypes_with_every_bit_pattern_come_back(tmp_path):
    """NaN payloads, infinities, denormals: all 65,536 patterns of bfloat16."""
    patterns = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)

    class Two(nnx.Module):
        def __init__(self):
            self.norm = nnx.Dict(weight=nnx.Param(jnp.asarray(patterns)))
            self.other = nnx.Dict(weight=nnx.Param(jnp.ones((3,), jnp.float32)))

    orbax.save(Two(), tmp_path / "saved", {"a": 1})
    restored = parameters(orbax.restore(nnx.eval_shape(Two), tmp_path / "saved", {"a": 1}))
    values = np.asarray(restored["norm", "weight"])
    np.testing.assert_array_equal(values.view(np.uint16), patterns.view(np.uint16))
    assert restored["other", "weight"].dtype == jnp.float32


def test_a_restore_may_ask_for_another_dtype(tmp_path):
    module = stored(TARGET, jnp.dtype("float32"))
    orbax.save(module, tmp_path / "saved", CONFIG)
    abstract = abstract_target(TARGET)
    restored = orbax.restore(abstract, tmp_path / "saved", CONFIG, dtype=jnp.bfloat16)
    for path, array in parameters(restored).items():
        expected = np.asarray(parameters(module)[path]).astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(array), expected)


def test_another_config_is_refused_with_every_key_and_both_values(tmp_path):
    orbax.save(load_target(TARGET), tmp_path / "saved", CONFIG)
    other = {**CONFIG, "rope_theta": 5e5, "new_key": [1]}
    del other["vocab_size"]
    with pytest.raises(CheckpointError) as refused:
        orbax.restore(abstract_target(TARGET), tmp_path / "saved", other)
    message = str(refused.value)
    assert "3 problems" in message
    assert "'rope_theta'" in message and "500000.0 now" in message
    assert "'new_key' was absent when the parameters were converted and is [1] now" in message
    assert "'vocab_size' was 256 when the parameters were converted and is absent now" in message


def test_an_edited_config_file_is_refused_at_load(tmp_path):
    folder = tmp_path / "saved"
    orbax.save(load_target(TARGET), folder, CONFIG)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 0.1}))
    with pytest.raises(CheckpointError, match="'rms_norm_eps' was .* and is 0.1 now"):
        load_target(folder)


def test_bookkeeping_keys_may_differ(tmp_path):
    orbax.save(load_target(TARGET), tmp_path / "saved", CONFIG)
    other = {**CONFIG, "_name_or_path": "elsewhere", "transformers_version": "9"}
    orbax.restore(abstract_target(TARGET), tmp_path / "saved", other)


def test_padding_rows_are_restored(tmp_path):
    """Fault 77."""
    config = {**CONFIG, "vocab_size": 97}
    source = write_single(tmp_path / "source", config, golden_tensors("llama-tiny", "target"))
    target = load_target(source)
    orbax.save(target, tmp_path / "saved", config)
    restored = load_target(tmp_path / "saved")
    assert restored.embedding.shape == (256, 48)
    assert_bit_equal(restored, target)


def test_parameters_that_do_not_fit_the_module_are_refused_by_name(tmp_path):
    orbax.save(load_target(TARGET), tmp_path / "saved", CONFIG)
    abstract = abstract_drafter(GOLDEN / "llama-tiny" / "drafter")
    with pytest.raises(CheckpointError) as refused:
        orbax.restore(abstract, tmp_path / "saved", CONFIG)
    assert "tensor fc.weight of shape [144, 48] is missing from params" in str(refused.value)
    # Missing: fc, hidden_norm, 3 x (q_norm, k_norm); unexpected: embedding, 2 layers of 9 tensors.
    assert f"{2 + 3 * 2 + 1 + 2 * 9} problems" in str(refused.value)


def test_a_folder_that_is_there_is_not_overwritten_unless_asked(tmp_path):
    folder = tmp_path / "saved"
    orbax.save(load_target(TARGET), folder, CONFIG)
    with pytest.raises(CheckpointError, match="saved is there already"):
        orbax.save(load_target(TARGET, dtype="bfloat16"), folder, CONFIG)
    assert load_target(folder).embedding.dtype == jnp.float32
    module = stored(TARGET, jnp.bfloat16)
    orbax.save(module, folder, CONFIG, overwrite=True)
    assert_bit_equal(orbax.restore(abstract_target(TARGET), folder, CONFIG), module)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "saved"

    def fail(self, *args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(orbax.ocp.Checkpointer, "save", fail)
    with pytest.raises(OSError, match="no space"):
        orbax.save(load_target(TARGET), folder, CONFIG)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["record", "all"])
def test_parameters_without_a_record_are_refused_by_name(tmp_path, damage):
    folder = tmp_path / "saved"
    orbax.save(load_target(TARGET), folder, CONFIG)
    if damage == "record":
        (folder / "params" / "_METADATA").write_text("{")
    else:
        shutil.rmtree(folder / "params")
    with pytest.raises(CheckpointError, match="saved/params holds no readable converted"):
        orbax.restore(abstract_target(TARGET), folder, CONFIG)


RESTORE = """
import sys
from dflash_jax.errors import CheckpointError
from dflash_jax.weights.load import load_target

try:
    load_target(sys.argv[1])
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("which", ["largest", "all"])
def test_truncated_parameters_are_refused_in_one_line(tmp_path, which):
    """In a process of its own: reads that were in flight end after Orbax closed their loop."""
    folder = tmp_path / "saved"
    orbax.save(load_target(TARGET), folder, CONFIG)
    files = sorted((folder / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    for path in files if which == "all" else files[-1:]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message = run_python(RESTORE, str(folder))
    assert message.startswith(f"{folder}/params holds no readable converted parameters: ")
    assert message.endswith("; convert the model again\n")
    assert message.count("\n") == 1
    assert ("embed_tokens.weight" in message) is (which == "largest")


def test_a_safetensors_folder_is_not_taken_for_a_converted_one():
    assert not orbax.is_checkpoint(TARGET)


PEAK = """
import pathlib, sys
import jax, jax.numpy as jnp
from flax import nnx
from dflash_jax.weights import orbax

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

class Model(nnx.Module):
    def __init__(self, count):
        for i in range(count):
            setattr(self, f"w{i}_proj", nnx.Dict(weight=nnx.Param(jnp.ones((1024, 2048)))))

if sys.argv[2] == "save":
    orbax.save(Model(32), sys.argv[1] + "/large", {})
    orbax.save(Model(1), sys.argv[1] + "/small", {})
else:
    orbax._IN_FLIGHT_BYTES = 2**24
    orbax.restore(nnx.eval_shape(lambda: Model(1)), sys.argv[1] + "/small", {})
    before = peak()
    module = orbax.restore(nnx.eval_shape(lambda: Model(32)), sys.argv[1] + "/large", {})
    print((peak() - before) / (32 * 1024 * 2048 * 4))
"""


def test_restoring_never_holds_two_copies_of_a_model(tmp_path):
    """Peak resident memory over 256 MiB of parameters.

    With 16 MiB in flight the overhead was 65 to 115 MiB whatever the model's size (100 MiB of it
    may be the storage layer's cache); with everything in flight it was the model's size or more.
    """
    run_python(PEAK, str(tmp_path), "save")
    assert float(run_python(PEAK, str(tmp_path), "restore")) < 1.7
