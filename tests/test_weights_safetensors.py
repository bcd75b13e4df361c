"""Folders of safetensors files: what loads, bit for bit, and how index and shards may disagree.

Folders are written with the safetensors library or by hand (`weight_files.py`); expected values are
the library's arrays, transposed with NumPy where the module stores [in, out].
"""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.weights.safetensors import Checkpoint
from weight_files import (
    GOLDEN,
    INDEX,
    PAIRS,
    SINGLE,
    copy_golden,
    golden_config,
    golden_tensors,
    read_index,
    run_python,
    shard_name,
    write_bytes,
    write_header,
    write_index,
    write_sharded,
    write_single,
)
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


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_every_golden_parameter_is_the_file_s_tensor(pair, kind):
    assert_same(load(GOLDEN / pair / kind, kind), golden_tensors(pair, kind))


@pytest.mark.parametrize("pair", PAIRS)
def test_shards_load_like_the_single_file(tmp_path, pair):
    """Fault 79."""
    tensors = golden_tensors(pair, "target")
    folder = write_sharded(tmp_path / "sharded", golden_config(pair, "target"), tensors)
    assert_same(load(folder), tensors)


def test_a_drafter_with_the_model_prefix_loads_like_one_without(tmp_path):
    tensors = golden_tensors("llama-tiny", "drafter")
    prefixed = {f"model.{name}": values for name, values in tensors.items()}
    config = golden_config("llama-tiny", "drafter")
    folder = write_single(tmp_path / "prefixed", config, prefixed)
    assert_same(load(folder, "drafter"), tensors)


@pytest.mark.parametrize("wanted", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        ("F32", jnp.float32),
        ("F16", jnp.float16),
        ("BF16", jnp.bfloat16),
        ("F8_E4M3", jnp.float8_e4m3fn),
        ("F8_E5M2", jnp.float8_e5m2),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_every_dtype_loads_to_the_asked_dtype(tmp_path, code, dtype, wanted, sharded):
    """Fault 83."""
    stored = {
        name: values.astype(jnp.dtype(dtype))
        for name, values in golden_tensors("llama-tiny", "drafter").items()
    }
    folder = copy_golden("llama-tiny", "drafter", tmp_path / "drafter")
    raw = {n: (code, list(v.shape), v.tobytes()) for n, v in stored.items()}
    if sharded:
        (folder / SINGLE).unlink()
        halves = {"a.safetensors": sorted(raw)[::2], "b.safetensors": sorted(raw)[1::2]}
        for file, part in halves.items():
            write_bytes(folder / file, {name: raw[name] for name in part})
        write_index(folder, {name: file for file, part in halves.items() for name in part})
    else:
        write_bytes(folder / SINGLE, raw)
    target = jnp.dtype(dtype if wanted is None else wanted)
    assert_same(load(folder, "drafter", wanted), {n: v.astype(target) for n, v in stored.items()})


def test_loaded_parameters_do_not_change_with_the_file(llama):
    """A CPU device adopts an aligned host array as it is, so a map of the file would live on."""
    folder, config, tensors = llama
    write_single(folder, config, tensors)
    header = (folder / SINGLE).read_bytes()
    size = int.from_bytes(header[:8], "little")
    text, data = header[8 : 8 + size], header[8 + size :]
    write_header(folder / SINGLE, text, data, pad=b" " * (-(8 + size) % 4096))
    loaded = load(folder)
    with (folder / SINGLE).open("r+b") as file:
        file.seek(-len(data), 2)
        file.write(b"\0" * len(data))
    assert_same(loaded, tensors)


def test_a_missing_shard_is_refused_by_name(llama):
    """Fault 81."""
    folder = write_sharded(*llama)
    (folder / shard_name(1)).unlink()
    message = message_of(folder)
    first = next(name for name, file in read_index(folder).items() if file == shard_name(1))
    assert f"shard {shard_name(1)} is missing" in message
    assert first in message


def test_a_shard_cut_in_half_is_refused_by_name(llama):
    """Fault 81."""
    folder = write_sharded(*llama)
    path = folder / shard_name(1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message = message_of(folder)
    assert f"shard {shard_name(1)}" in message
    assert "is truncated: tensor" in message


def test_all_damaged_shards_are_named_at_once(llama):
    """Fault 81."""
    folder = write_sharded(*llama)
    (folder / shard_name(0)).unlink()
    (folder / shard_name(2)).write_bytes(b"no weights")
    message = message_of(folder)
    assert "2 problems" in message
    assert shard_name(0) in message
    assert shard_name(2) in message


def test_a_tensor_in_a_shard_but_not_in_the_index_is_refused(llama):
    """Fault 82."""
    folder = write_sharded(*llama)
    weight_map = read_index(folder)
    owner = weight_map.pop(Q_PROJ)
    write_index(folder, weight_map)
    assert f"tensor {Q_PROJ} is in {owner} but not in {INDEX}" in message_of(folder)


def test_a_tensor_in_the_index_but_not_in_its_shard_is_refused(llama):
    """Fault 82."""
    folder = write_sharded(*llama)
    write_index(folder, {**read_index(folder), "model.extra.weight": shard_name(0)})
    expected = f"tensor model.extra.weight is in {INDEX} under {shard_name(0)}, but not in that"
    assert expected in message_of(folder)


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(llama):
    """Fault 82."""
    folder = write_sharded(*llama)
    owner = read_index(folder)[Q_PROJ]
    wrong = next(shard_name(i) for i in range(3) if shard_name(i) != owner)
    write_index(folder, {**read_index(folder), Q_PROJ: wrong})
    message = message_of(folder)
    assert f"tensor {Q_PROJ} is in {owner}, but {INDEX} places it in {wrong}" in message


def test_a_stray_file_beside_the_shards_is_ignored_with_one_notice(llama, caplog):
    """Fault 82."""
    folder, config, tensors = llama
    write_sharded(folder, config, tensors)
    save_file({name: values + 1 for name, values in tensors.items()}, folder / SINGLE)
    with caplog.at_level(logging.INFO, "dflash_jax"):
        assert_same(load(folder), tensors)
    notices = [r.getMessage() for r in caplog.records if SINGLE in r.getMessage()]
    assert len(notices) == 1
    assert f"ignored {SINGLE}" in notices[0]


def test_a_clean_folder_gives_no_notice(llama, caplog):
    with caplog.at_level(logging.INFO, "dflash_jax"):
        load(write_sharded(*llama))
    assert [r for r in caplog.records if r.name.startswith("dflash_jax")] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no index"),
        ("[]", "is no index"),
        ('{"weight_map": []}', "must map tensors"),
        ('{"weight_map": {"a": 3}}', "must map tensors"),
        ('{"weight_map": {"a": "../other/x.safetensors"}}', "is not a file name in this folder"),
    ],
)
def test_a_malformed_index_is_refused(llama, text, message):
    folder = write_sharded(*llama)
    (folder / INDEX).write_text(text)
    assert message in message_of(folder)


def test_a_folder_without_weights_is_refused_and_other_formats_are_named(llama):
    folder = write_single(*llama)
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    message = message_of(folder)
    assert f"has neither {SINGLE} nor {INDEX}; it has pytorch_model.bin" in message


def test_the_checkpoint_s_bytes_are_the_tensors_bytes():
    expected = sum(v.nbytes for v in golden_tensors("qwen3-tiny", "target").values())
    assert Checkpoint.from_folder(GOLDEN / "qwen3-tiny" / "target").nbytes == expected


PEAK = """
import pathlib, sys
import jax, jax.numpy as jnp
from flax import nnx
from dflash_jax.weights.safetensors import load_parameters

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

class Model(nnx.Module):
    def __init__(self):
        for i in range(16):
            setattr(self, f"w{i}_proj", nnx.Dict(weight=nnx.Param(jnp.zeros((1024, 2048)))))

warm = jax.device_put(jnp.ones(8))
module = nnx.eval_shape(Model)
before = peak()
loaded = load_parameters(module, sys.argv[1], kind="target", dtype=jnp.float32)
print((peak() - before) / (16 * 1024 * 2048 * 4))
"""


@pytest.mark.parametrize("code", ["F32", "BF16"])
def test_loading_never_holds_two_copies_of_a_model(tmp_path, code):
    """Peak resident memory over the model's bytes: 16 equal tensors, so one extra is 1/16."""
    item = {"F32": 4, "BF16": 2}[code]
    content = np.random.default_rng(0).bytes(1024 * 2048 * item)
    content = (np.frombuffer(content, np.uint8) & 0x3F).tobytes()  # finite numbers
    write_bytes(
        tmp_path / SINGLE,
        {f"model.w{i}_proj.weight": (code, [2048, 1024], content) for i in range(16)},
    )
    assert float(run_python(PEAK, str(tmp_path))) < 1.3
