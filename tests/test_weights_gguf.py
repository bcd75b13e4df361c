"""The GGUF converter on small files: weights to the bit, rotary order, config, what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from dflash_jax.errors import CheckpointError
from dflash_jax.weights.gguf import convert_gguf, half_split_rows
from dflash_jax.weights.gguf_file import GgufFile
from tiny_gguf import EOT, TEMPLATE, TOKENS, TinyGguf, write_gguf

TINY = TinyGguf()


def converted(folder: Path, tiny: TinyGguf = TINY) -> tuple[Path, dict[str, np.ndarray]]:
    values = write_gguf(folder / "model.gguf", tiny)
    (folder / "hf").mkdir()
    convert_gguf(folder / "model.gguf", folder / "hf")
    return folder / "hf", values


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def rotate_pairs(x: np.ndarray, position: int) -> np.ndarray:
    """The rotary rule of GGUF: neighbours (2i, 2i + 1) turn together."""
    angle = position * 10000.0 ** (-np.arange(0, x.size, 2) / x.size)
    even, odd = x[0::2], x[1::2]
    turned = np.empty_like(x)
    turned[0::2] = even * np.cos(angle) - odd * np.sin(angle)
    turned[1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return turned


def rotate_halves(x: np.ndarray, position: int) -> np.ndarray:
    """The rotary rule of Hugging Face: (i, i + d/2) turn together."""
    angle = position * 10000.0 ** (-np.arange(0, x.size, 2) / x.size)
    first, second = np.split(x, 2)
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            first * np.sin(angle) + second * np.cos(angle),
        ]
    )


def test_attention_scores_are_the_same_before_and_after_the_change_of_row_order():
    random = np.random.default_rng(1)
    heads, head_dim, width = 3, 8, 12
    query = random.standard_normal((heads * head_dim, width))
    key = random.standard_normal((heads * head_dim, width))
    x, y = random.standard_normal((2, width))
    new_query = (half_split_rows(query, heads) @ x).reshape(heads, head_dim)
    new_key = (half_split_rows(key, heads) @ y).reshape(heads, head_dim)
    for head in range(heads):
        old_q = (query @ x).reshape(heads, head_dim)[head]
        old_k = (key @ y).reshape(heads, head_dim)[head]
        expected = rotate_pairs(old_q, 11) @ rotate_pairs(old_k, 4)
        found = rotate_halves(new_query[head], 11) @ rotate_halves(new_key[head], 4)
        assert found == pytest.approx(expected, abs=1e-9)
        if head == 0:  # and the change is needed: the old order under the new rule is wrong
            assert abs(rotate_halves(old_q, 11) @ rotate_halves(old_k, 4) - expected) > 0.1


def test_q4_1_blocks_are_read_by_the_formula_of_the_format(tmp_path):
    """A block of 32: float16 scale d and offset m, 16 bytes, low nibbles first; x = d q + m."""
    write_gguf(tmp_path / "model.gguf")
    source = GgufFile(tmp_path / "model.gguf")
    raw = np.asarray(source.tensors["blk.1.ffn_up.weight"].data).reshape(TINY.inner, -1, 20)
    scale = raw[..., 0:2].copy().view(np.float16).astype(np.float32)
    offset = raw[..., 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([raw[..., 4:] & 15, raw[..., 4:] >> 4], axis=-1).astype(np.float32)
    expected = (scale * nibbles + offset).reshape(TINY.inner, TINY.width)
    found = source.read("blk.1.ffn_up.weight")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "kind, error", [("F32", 0.0), ("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 3e-2)]
)
def test_every_tensor_arrives_under_its_name_in_its_row_order(tmp_path, kind, error):
    folder, values = converted(tmp_path, TINY.but(kind=kind, untied=True))
    found = load_file(folder / "model.safetensors")
    names = {
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for ours, theirs in names.items():
        np.testing.assert_allclose(found[ours], values[theirs], rtol=0, atol=error, err_msg=ours)
    for ours, theirs in (("q", "attn_q"), ("k", "attn_k")):
        rows = values[f"blk.1.{theirs}.weight"]
        heads = rows.shape[0] // TINY.head_dim
        half = TINY.head_dim // 2
        order = [
            head * TINY.head_dim + 2 * pair + partner
            for head in range(heads)
            for partner in range(2)
            for pair in range(half)
        ]
        name = f"model.layers.1.self_attn.{ours}_proj.weight"
        np.testing.assert_allclose(found[name], rows[order], rtol=0, atol=error, err_msg=name)
    assert len(found) == 3 + 9 * TINY.layers
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}


def test_every_number_of_the_config_comes_from_the_file(tmp_path):
    folder, _ = converted(tmp_path)
    config = read_json(folder / "config.json")
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "max_position_embeddings": 384,
        "rope_theta": 54321.0,
        "rms_norm_eps": 3e-6,
        "vocab_size": len(TOKENS),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    assert read_json(folder / "generation_config.json") == {"bos_token_id": 1, "eos_token_id": 2}
    assert read_json(folder / "tokenizer_config.json")["chat_template"] == TEMPLATE
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_an_explicit_key_length_is_the_head_dim(tmp_path):
    tiny = TINY.but(extra_metadata={"llama.attention.key_length": 16})
    folder, _ = converted(tmp_path, tiny)
    assert read_json(folder / "config.json")["head_dim"] == 16
    (tmp_path / "other").mkdir()
    tiny = TINY.but(extra_metadata={"llama.attention.key_length": 32})
    with pytest.raises(CheckpointError, match="rotates 16 of 32 head dimensions"):
        converted(tmp_path / "other", tiny)


def test_an_untied_head_is_kept_and_said(tmp_path):
    folder, values = converted(tmp_path, TINY.but(untied=True, kind="F32"))
    assert read_json(folder / "config.json")["tie_word_embeddings"] is False
    found = load_file(folder / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(found, values["output.weight"])


def test_the_end_of_turn_id_ends_an_answer_too(tmp_path):
    """Fault 28."""
    folder, _ = converted(tmp_path, TINY.but(extra_metadata={"tokenizer.ggml.eot_token_id": EOT}))
    assert read_json(folder / "generation_config.json")["eos_token_id"] == [2, EOT]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_start_token_is_added_only_where_the_file_asks_for_it(tmp_path, adds_bos):
    metadata = {"tokenizer.ggml.add_bos_token": adds_bos}
    folder, _ = converted(tmp_path, TINY.but(extra_metadata=metadata))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = [TOKENS.index(token) for token in ("hell", "o")]
    assert tokenizer.encode("hello").ids == [1] * adds_bos + expected
    assert tokenizer.encode("hello", add_special_tokens=False).ids == expected


def test_an_end_token_is_added_where_the_file_asks_for_it(tmp_path):
    metadata = {"tokenizer.ggml.add_eos_token": True}
    folder, _ = converted(tmp_path, TINY.but(extra_metadata=metadata))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("o").ids == [TOKENS.index("o"), 2]


@pytest.mark.parametrize(
    "pre, pieces",
    [("smollm", ["1", "2", "Ġ", "1"]), ("gpt-2", ["12", "Ġ1"])],
)
def test_digits_are_split_singly_by_smollm_and_not_by_gpt2(tmp_path, pre, pieces):
    folder, _ = converted(tmp_path, TINY.but(pre=pre))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("12 1").tokens == pieces


def test_control_tokens_are_hidden_and_user_defined_ones_shown(tmp_path):
    folder, _ = converted(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("o<tool>o<|im_end|>").ids
    o, tool = TOKENS.index("o"), TOKENS.index("<tool>")
    assert ids == [o, tool, o, 2]
    assert tokenizer.decode(ids) == "o<tool>o"


def test_progress_counts_up_to_the_bytes_of_the_weights(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "hf").mkdir()
    seen = []
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf", progress=lambda *step: seen.append(step))
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    total = sum(array.nbytes for array in weights.values())
    assert {stage for stage, _, _ in seen} == {"convert"}
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert seen[-1] == ("convert", total, total)
    assert len(seen) == len(weights)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architecture": "gemma"},
            "holds architecture 'gemma'; this converter reads 'llama' only",
        ),
        ({"extra_metadata": {"llama.rope.scaling.type": "yarn"}}, r"rotary frequencies \(yarn\)"),
        ({"add": "rope_freqs.weight"}, "scales its rotary frequencies"),
        ({"drop": "blk.1.ffn_up.weight"}, r"missing tensors \['blk.1.ffn_up.weight'\]"),
        ({"add": "blk.0.attn_q.bias"}, r"unknown tensors \['blk.0.attn_q.bias'\]"),
        ({"misshape": "blk.1.attn_k.weight"}, r"attn_k.weight is \(96, 32\).*promises \(48, 96\)"),
        ({"pre": "llama-bpe"}, r"pre-tokeniser 'llama-bpe'; only 'gpt2' with one of \['gpt-2'"),
    ],
)
def test_what_the_converter_does_not_understand_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path, TINY.but(**changes))
    assert not (tmp_path / "hf" / "config.json").exists()


def test_a_missing_metadata_key_is_named(tmp_path):
    tiny = TINY.but(architecture="llama")
    write_gguf(tmp_path / "model.gguf", tiny)
    with pytest.raises(CheckpointError, match="has no metadata key llama.nothing"):
        GgufFile(tmp_path / "model.gguf").require("llama.nothing")


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.9])
def test_a_truncated_file_is_refused(tmp_path, part):
    write_gguf(tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(CheckpointError, match="cut.gguf is not a complete GGUF file"):
        GgufFile(tmp_path / "cut.gguf")


def test_a_file_of_another_format_and_a_missing_one_are_refused(tmp_path):
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04" + b"\0" * 4096)
    for name in ("other.gguf", "nowhere.gguf"):
        with pytest.raises(CheckpointError, match=f"{name} is not a complete GGUF file"):
            GgufFile(tmp_path / name)


def test_importing_the_converter_does_not_import_gguf():
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "import dflash_jax.weights.gguf, dflash_jax.weights.demo, dflash_jax.serving.text\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
