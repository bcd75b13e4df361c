"""Writes small GGUF files of the llama architecture, with random weights, for tests to convert."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "1 2", "Ġ 1"]
TOKENS = [*SPECIALS, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
TYPES = [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS) - 1) + [4]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
EOT = len(SPECIALS) + 5  # any id that is not the end id


@dataclass(frozen=True)
class TinyGguf:
    """What goes into the file. No number is a usual default, so that each must be read."""

    width: int = 96
    inner: int = 160
    heads: int = 6
    kv_heads: int = 3
    layers: int = 2
    positions: int = 384
    rope_theta: float = 54321.0
    eps: float = 3e-6
    untied: bool = False
    kind: str = "Q4_1"
    architecture: str = "llama"
    pre: str = "smollm"
    extra_metadata: dict[str, Any] = field(default_factory=dict)
    drop: str = ""
    add: str = ""
    misshape: str = ""

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        kv = self.kv_heads * self.head_dim
        block = {
            "attn_norm": (self.width,),
            "attn_q": (self.width, self.width),
            "attn_k": (kv, self.width),
            "attn_v": (kv, self.width),
            "attn_output": (self.width, self.width),
            "ffn_norm": (self.width,),
            "ffn_gate": (self.inner, self.width),
            "ffn_up": (self.inner, self.width),
            "ffn_down": (self.width, self.inner),
        }
        table = (len(TOKENS), self.width)
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": table}
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for layer in range(self.layers)
            for name, shape in block.items()
        }
        shapes["output_norm.weight"] = (self.width,)
        if self.untied:
            shapes["output.weight"] = table
        if self.add:
            shapes[self.add] = (self.width,)
        if self.misshape:
            shapes[self.misshape] = (self.width, 32)
        return {name: shape for name, shape in shapes.items() if name != self.drop}

    def but(self, **changes: Any) -> "TinyGguf":
        return replace(self, **changes)


def write_gguf(path: Path, tiny: TinyGguf = TinyGguf(), seed: int = 0) -> dict[str, np.ndarray]:
    """Write the file; returns the random values as they were before quantising, by GGUF name."""
    writer = gguf.GGUFWriter(path, tiny.architecture)
    writer.add_context_length(tiny.positions)
    writer.add_embedding_length(tiny.width)
    writer.add_feed_forward_length(tiny.inner)
    writer.add_block_count(tiny.layers)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_rope_freq_base(tiny.rope_theta)
    writer.add_rope_dimension_count(tiny.head_dim)
    writer.add_layer_norm_rms_eps(tiny.eps)
    _write_tokenizer(writer, tiny)
    values = _write_tensors(writer, tiny, np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _write_tokenizer(writer: gguf.GGUFWriter, tiny: TinyGguf) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tiny.pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for key, value in tiny.extra_metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key, value)


def _write_tensors(
    writer: gguf.GGUFWriter, tiny: TinyGguf, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Matrices in the asked type, vectors in float32, as real files have them."""
    kind = gguf.GGMLQuantizationType[tiny.kind]
    values = {}
    for name, shape in tiny.shapes().items():
        values[name] = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values[name])
        else:
            writer.add_tensor(name, gguf.quants.quantize(values[name], kind), raw_dtype=kind)
    return values
