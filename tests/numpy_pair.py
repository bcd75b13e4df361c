"""The oracle of engine tests: target and drafter context in NumPy float64, from the formulas.

Reads the tensors of a checkpoint with the safetensors library and knows only the plain case: rotary
type "default", no bias, no window. There is no cache, no drafter and no JAX in here.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file


class Pass(NamedTuple):
    """What a whole forward gives: logits [t, v], block outputs [l, t, e], keys and values.

    `keys` and `values` are lists over layers of [k, t, d]; keys are normed and rotated.
    """

    logits: np.ndarray
    outputs: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Half-split rotation of [heads, t, d]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Checkpoint:
    """Config and float64 tensors of a folder; `prefix` is what tensor names begin with."""

    def __init__(self, folder: Path, prefix: str):
        self.config = json.loads((folder / "config.json").read_text())
        files = load_file(folder / "model.safetensors")
        self.tensors = {k.removeprefix(prefix): v.astype(np.float64) for k, v in files.items()}

    def heads(self, name: str, x: np.ndarray) -> np.ndarray:
        """x W^T cut into heads [heads, t, d], normed where the checkpoint has a norm for it."""
        size = self.config["head_dim"]
        cut = (x @ self.tensors[f"{name}_proj.weight"].T).reshape(len(x), -1, size)
        norm = self.tensors.get(f"{name}_norm.weight")
        if norm is not None:
            cut = rms_norm(cut, norm, self.config["rms_norm_eps"])
        return cut.transpose(1, 0, 2)

    def key_values(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of tokens 0 … t - 1."""
        name = f"layers.{layer}.self_attn"
        keys = rotate(self.heads(f"{name}.k", x), np.arange(len(x)), self.config["rope_theta"])
        return keys, self.heads(f"{name}.v", x)


class NumpyTarget(Checkpoint):
    """Llama and Qwen3 targets."""

    def __init__(self, folder: Path):
        super().__init__(folder, "model.")
        tied = self.config["tie_word_embeddings"]
        table = self.tensors["embed_tokens.weight" if tied else "lm_head.weight"]
        self.head = table[: self.config["vocab_size"]]

    def forward(self, ids: Sequence[int]) -> Pass:
        eps, weights = self.config["rms_norm_eps"], self.tensors
        x = weights["embed_tokens.weight"][list(ids)]
        outputs, keys, values = [], [], []
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps)
            k, v = self.key_values(layer, normed)
            x = x + self._attention(layer, normed, k, v)
            normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
            x = x + self._mlp(f"{name}.mlp", normed)
            outputs.append(x)
            keys.append(k)
            values.append(v)
        logits = rms_norm(x, weights["norm.weight"], eps) @ self.head.T
        return Pass(logits, np.stack(outputs), keys, values)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """REF: a whole forward for every token."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(np.argmax(self.forward(ids).logits[-1])))
        return ids[len(prompt) :]

    def _attention(self, layer: int, x: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        name, theta = f"layers.{layer}.self_attn", self.config["rope_theta"]
        q = rotate(self.heads(f"{name}.q", x), np.arange(len(x)), theta)
        groups = len(q) // len(k)
        scores = q @ np.repeat(k, groups, axis=0).transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = weights / weights.sum(axis=-1, keepdims=True) @ np.repeat(v, groups, axis=0)
        flat = mixed.transpose(1, 0, 2).reshape(len(x), -1)
        return flat @ self.tensors[f"{name}.o_proj.weight"].T

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate = x @ self.tensors[f"{name}.gate_proj.weight"].T
        up = x @ self.tensors[f"{name}.up_proj.weight"].T
        return gate / (1 + np.exp(-gate)) * up @ self.tensors[f"{name}.down_proj.weight"].T


class NumpyContext(Checkpoint):
    """The context rows of a DFlash drafter, from the outputs of the target's blocks."""

    def __init__(self, folder: Path):
        super().__init__(folder, "")
        self.taps = self.config["dflash_config"]["target_layer_ids"]

    def rows(
        self, outputs: np.ndarray | Mapping[int, np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and values [k, t, d] of every drafter layer."""
        features = np.concatenate([outputs[tap] for tap in self.taps], axis=-1)
        h = rms_norm(
            features @ self.tensors["fc.weight"].T,
            self.tensors["hidden_norm.weight"],
            self.config["rms_norm_eps"],
        )
        return [self.key_values(i, h) for i in range(self.config["num_hidden_layers"])]
