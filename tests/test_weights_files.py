"""The safetensors reader against the safetensors library, and against files that are damaged."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_jax.errors import CheckpointError
from dflash_jax.weights.files import read_header
from weight_files import GOLDEN, PAIRS, SINGLE, golden_tensors, write_bytes, write_header

ONES = np.ones((2, 3), np.float32).tobytes()
TWO = {"a": ("F32", [2, 3], ONES), "b": ("F32", [3], ONES[:12])}


def spec(begin: int, end: int, shape=(2, 3), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("part", ["target", "drafter"])
def test_every_golden_tensor_reads_as_the_library_reads_it(pair, part):
    entries = read_header(GOLDEN / pair / part / SINGLE)
    expected = golden_tensors(pair, part)
    assert set(entries) == set(expected)
    for name, entry in entries.items():
        np.testing.assert_array_equal(entry.open(), expected[name])
        assert entry.open().dtype == expected[name].dtype


@pytest.mark.parametrize("pad", [b"", b" ", b"  ", b"   "])
def test_data_that_does_not_start_aligned_reads_right(tmp_path, pad):
    """Headers of four lengths; at least three start the data off a multiple of 4."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = write_header(tmp_path / "x.safetensors", {"a": spec(0, 24)}, values.tobytes(), pad)
    np.testing.assert_array_equal(read_header(path)["a"].open(), values)


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
def test_each_floating_dtype_reads_bit_for_bit(tmp_path, code, dtype):
    """Fault 83."""
    values = np.array([[0.5, -1.5], [2.0, 0.0]], np.float32).astype(jnp.dtype(dtype))
    path = write_bytes(tmp_path / "x.safetensors", {"a": (code, [2, 2], values.tobytes())})
    read = read_header(path)["a"].open()
    assert read.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(read.view(np.uint8), values.view(np.uint8))


def test_an_empty_tensor_and_a_scalar_read(tmp_path):
    path = write_bytes(
        tmp_path / "x.safetensors", {"a": ("F32", [0, 3], b""), "b": ("F32", [], ONES[:4])}
    )
    entries = read_header(path)
    assert entries["a"].open().shape == (0, 3)
    assert float(entries["b"].open()) == 1.0


def test_a_dtype_that_is_no_parameter_is_listed_but_not_opened(tmp_path):
    path = write_bytes(tmp_path / "x.safetensors", {"d2t": ("I64", [1], b"12345678")})
    entry = read_header(path)["d2t"]
    with pytest.raises(CheckpointError, match=r"x.safetensors: tensor d2t: .* I64; supported: F32"):
        entry.open()


DAMAGED = {
    "empty": (b"", "has 0 bytes"),
    "seven bytes": (b"1234567", "has 7 bytes"),
    "another format": (b"\x80\x02}q\x00(X" + b"\xff" * 90, "it is not a safetensors file"),
    "absurd header": ((10**12).to_bytes(8, "little") + b"{}", "header of 1000000000000 bytes"),
    "header beyond the file": ((500).to_bytes(8, "little") + b"{}", "500 bytes but has only 2"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "git lfs pull",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_is_no_safetensors_file_is_refused_by_name(tmp_path, case):
    content, message = DAMAGED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        read_header(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)


HEADERS = {
    "no JSON": (b"{nonsense", b"", "not a safetensors file"),
    "no UTF-8": (b'{"\xff": 1}', b"", "not a safetensors file"),
    "an array": ([1, 2], b"", "no JSON object"),
    "a name twice": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}',
        b"1234",
        "'a' is there twice",
    ),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "tensor a has a malformed"),
    "shape is text": ({"a": {**spec(0, 4), "shape": "x"}}, b"1234", "tensor a has a malformed"),
    "no object": ({"a": 3}, b"", "tensor a has a malformed"),
    "end before begin": ({"a": spec(8, 4)}, ONES, "tensor a has a negative size"),
    "negative shape": ({"a": spec(0, 24, (-2, -3))}, ONES, "tensor a has a negative size"),
    "size and shape differ": ({"a": spec(0, 20)}, ONES[:20], "needs 24 bytes, its offsets [0, 20]"),
    "beyond the file": ({"a": spec(0, 24)}, ONES[:20], "truncated: tensor a ends at byte"),
    "overlap": ({"a": spec(0, 24), "b": spec(20, 44)}, ONES * 2, "tensor b overlaps tensor a"),
    "gap": ({"a": spec(0, 24), "b": spec(28, 52)}, ONES * 3, "tensor b leaves a gap after tensor"),
    "trailing bytes": ({"a": spec(0, 24)}, ONES + b"12345", "has 5 bytes after its last tensor"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_header_is_refused_with_file_and_tensor(tmp_path, case):
    header, data, message = HEADERS[case]
    path = write_header(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError) as refused:
        read_header(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere.safetensors is not there"):
        read_header(tmp_path / "nowhere.safetensors")


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_refused(tmp_path, data):
    """Fault 81."""
    path = write_bytes(tmp_path / "x.safetensors", TWO)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CheckpointError, match="x.safetensors"):
        read_header(path)


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_header_byte_is_refused_or_keeps_every_tensor_inside_the_file(tmp_path, data):
    path = write_bytes(tmp_path / "x.safetensors", TWO)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - len(ONES) - 13))
    whole[at] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        entries = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    spans = sorted((e.offset, e.offset + e.nbytes) for e in entries.values())
    assert all(end <= len(whole) for _, end in spans)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_metadata_is_not_a_tensor(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "a": spec(0, 24)}
    path = write_header(tmp_path / "x.safetensors", json.dumps(header).encode(), ONES)
    assert list(read_header(path)) == ["a"]
