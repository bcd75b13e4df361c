"""A llama-architecture GGUF file becomes a Hugging Face folder: config, weights, tokenizer files.

Everything is read from the file: sizes from its metadata, weights from its tensors, dequantised one
at a time into a float32 safetensors file, because the products of a quantised format are exact in
no smaller type. What the file says and this converter does not understand (another architecture,
scaled rotary frequencies, an unknown tensor) is refused, never skipped. Nothing here knows where a
file comes from (`demo.py`), nor how weights reach the device (`load.py`). The tokenizer is the
subject of `gguf_tokenizer.py`. The `gguf` package is imported only when a file is opened.
"""

import json
import logging
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dflash_jax.errors import CheckpointError
from dflash_jax.progress import Progress
from dflash_jax.weights.gguf_file import GgufFile
from dflash_jax.weights.gguf_tokenizer import tokenizer_config, tokenizer_json

logger = logging.getLogger(__name__)

CONVERTER_VERSION = 1
"""Raised whenever the same GGUF would give other files; caches compare it."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(path: str | Path, folder: str | Path, *, progress: Progress | None = None) -> None:
    """Write a GGUF of the llama architecture as a Hugging Face folder into the existing `folder`.

    Files: config.json, generation_config.json, model.safetensors (float32), tokenizer.json,
    tokenizer_config.json (with the chat template). At no time is more than one tensor in memory.

    Raises `CheckpointError` for what the converter does not understand; `folder` then holds no
    config.json, which is written last.
    """
    source, folder = GgufFile(path), Path(folder)
    config = model_config(source)
    names = tensor_names(source, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    _check_shapes(source, config)
    (folder / "tokenizer.json").write_text(tokenizer_json(source), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer_config(source))
    _write_safetensors(folder / "model.safetensors", source, names, heads, progress)
    _write_json(folder / "generation_config.json", _generation_config(source, config))
    _write_json(folder / "config.json", config)


def model_config(source: GgufFile) -> dict[str, Any]:
    """The Hugging Face `config.json` of a llama-architecture GGUF, every number from the file."""
    architecture = source.require("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{source.path} holds architecture {architecture!r}; this converter reads 'llama' only"
        )
    _refuse_scaled_rope(source)
    heads = source.require("llama.attention.head_count")
    width = source.require("llama.embedding_length")
    head_dim = source.get("llama.attention.key_length", width // heads)
    rotated = source.get("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(
            f"{source.path} rotates {rotated} of {head_dim} head dimensions; only all are supported"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": source.require("llama.feed_forward_length"),
        "max_position_embeddings": source.require("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": source.require("llama.block_count"),
        "num_key_value_heads": source.get("llama.attention.head_count_kv", heads),
        "rms_norm_eps": _decimal(source.require("llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        # 10000 is what the GGUF format prescribes for files that leave the key out.
        "rope_theta": _decimal(source.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "torch_dtype": "float32",
        "vocab_size": len(source.require("tokenizer.ggml.tokens")),
    }


def tensor_names(source: GgufFile, num_layers: int) -> dict[str, str]:
    """GGUF tensor name -> Hugging Face name, for all tensors; missing or unknown ones raise."""
    expected = dict(_GLOBAL_NAMES)
    for layer in range(num_layers):
        for theirs, ours in _BLOCK_NAMES.items():
            expected[f"blk.{layer}.{theirs}"] = f"model.layers.{layer}.{ours}"
    if "output.weight" not in source.tensors:
        del expected["output.weight"]
    missing = sorted(expected.keys() - source.tensors.keys())
    unknown = sorted(source.tensors.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{source.path} is not a plain llama model of {num_layers} layers: "
            f"missing tensors {missing[:3] or 'none'}, unknown tensors {unknown[:3] or 'none'}"
        )
    return expected


def half_split_rows(weight: Float[np.ndarray, "o i"], heads: int) -> Float[np.ndarray, "o i"]:
    """Rows of a q or k projection from GGUF order to the half-split order of Hugging Face.

    GGUF stores the two partners of a rotation side by side; Hugging Face keeps all first partners
    of a head, then all second ones. Worked example, one head of 6 rows:

        GGUF          a0 b0 a1 b1 a2 b2
        Hugging Face  a0 a1 a2 b0 b1 b2
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _refuse_scaled_rope(source: GgufFile) -> None:
    kind = source.get("llama.rope.scaling.type", "none")
    if kind != "none" or "rope_freqs.weight" in source.tensors:
        raise CheckpointError(
            f"{source.path} scales its rotary frequencies ({kind}), which this converter does not "
            "read; load the model from its Hugging Face folder instead"
        )


def _check_shapes(source: GgufFile, config: dict[str, Any]) -> None:
    """Every tensor has the shape that the metadata promises."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    table = (config["vocab_size"], width)
    promised = {
        "token_embd": table,
        "output": table,
        "output_norm": (width,),
        "attn_norm": (width,),
        "ffn_norm": (width,),
        "attn_q": (query, width),
        "attn_k": (key, width),
        "attn_v": (key, width),
        "attn_output": (width, query),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    for name in source.tensors:
        shape, expected = source.shape(name), promised[_kind(name)]
        if shape != expected:
            raise CheckpointError(
                f"{source.path}: tensor {name} is {shape}, the metadata promises {expected}"
            )


def _write_safetensors(
    path: Path,
    source: GgufFile,
    names: dict[str, str],
    heads: dict[str, int],
    progress: Progress | None,
) -> None:
    """Header first, then one dequantised tensor after the other, in the order of the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for theirs, ours in names.items():
        shape = source.shape(theirs)
        end = offset + 4 * int(np.prod(shape))
        header[ours] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned to eight bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for theirs, ours in names.items():
            values = source.read(theirs)
            if _kind(theirs) in heads:
                values = half_split_rows(values, heads[_kind(theirs)])
            file.write(np.ascontiguousarray(values, "<f4").data)
            if progress is not None:
                progress("convert", header[ours]["data_offsets"][1], offset)
    logger.info("wrote %d tensors, %d bytes, to %s", len(names), offset, path)


def _generation_config(source: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The special ids; an answer also ends at the end-of-turn id, which only GGUF keeps apart."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    content = {key: config[key] for key in keys if config[key] is not None}
    end_of_turn = source.get("tokenizer.ggml.eot_token_id", config["eos_token_id"])
    if end_of_turn != config["eos_token_id"]:
        content["eos_token_id"] = [config["eos_token_id"], end_of_turn]
    return content


def _kind(name: str) -> str:
    return re.sub(r"^blk\.\d+\.|\.weight$", "", name)


def _decimal(value: float) -> float:
    """The shortest decimal with the same float32 value: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
