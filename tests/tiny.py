"""Tiny pairs for engine tests: random ones, a scripted target, and scripted drafters.

Checkpoints are written with the safetensors library in the published layout; scripted drafters
replace `BlockDrafter` in the compiled round, so that they pass through the same code.
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import dflash_jax as dj
from dflash_jax.decoding import programs
from dflash_jax.decoding.draft import BlockDrafter, Proposal

GOLDEN = Path(__file__).parent / "data" / "golden"
PAIRS = ("qwen3-tiny", "llama-tiny")
VOCAB, ROWS, MASK = 97, 128, 96

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
}


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """config.json and model.safetensors in a new folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def layer_shapes(config: dict[str, Any], *, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of one decoder layer, as a file holds them ([out, in])."""
    e, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    h, k = config["num_attention_heads"], config["num_key_value_heads"]
    norms = {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)} if qk_norm else {}
    return {
        "input_layernorm.weight": (e,),
        "post_attention_layernorm.weight": (e,),
        "self_attn.q_proj.weight": (h * d, e),
        "self_attn.k_proj.weight": (k * d, e),
        "self_attn.v_proj.weight": (k * d, e),
        "self_attn.o_proj.weight": (e, h * d),
        "mlp.gate_proj.weight": (f, e),
        "mlp.up_proj.weight": (f, e),
        "mlp.down_proj.weight": (e, f),
        **norms,
    }


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Normal weights wide enough that greedy text varies; norms near 1."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
        return (rng.standard_normal(shape) * 1.5 * shape[1] ** -0.5).astype(np.float32)

    return {name: draw(shape) for name, shape in shapes.items()}


def write_target(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Fixture T: a random target, 128 rows for 97 ids; `changes` go into its config."""
    config = {**TARGET, **changes}
    shapes = {
        "model.embed_tokens.weight": (ROWS, config["hidden_size"]),
        "model.norm.weight": (config["hidden_size"],),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (ROWS, config["hidden_size"])
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config, qk_norm=config["model_type"] == "qwen3").items():
            shapes[f"model.layers.{i}.{name}"] = shape
    return write_checkpoint(folder, config, random_tensors(shapes, seed))


def write_drafter(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Fixture T's drafter with random weights; `changes` go into its config."""
    config = {**DRAFTER, **changes}
    e = config["hidden_size"]
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (e, taps * e), "hidden_norm.weight": (e,), "norm.weight": (e,)}
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config, qk_norm=True).items():
            shapes[f"layers.{i}.{name}"] = shape
    return write_checkpoint(folder, config, random_tensors(shapes, seed))


def write_two_layers(folder: Path) -> tuple[Path, Path]:
    """A pair of two layers, so that a whole arena is more than the rows of one layer."""
    changes = {"num_hidden_layers": 2, "max_position_embeddings": 8192}
    taps = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    return (
        write_target(folder / "target", **changes),
        write_drafter(folder / "drafter", num_target_layers=2, dflash_config=taps, **changes),
    )


def follows(token: int) -> int:
    """The scripted target's next id, unless a table overrides it."""
    return (3 * token + 1) % VOCAB


def script_next(table: dict[int, int] | None = None) -> list[int]:
    """Next id of every id."""
    return [(table or {}).get(token, follows(token)) for token in range(VOCAB)]


def script(first: int, count: int, table: dict[int, int] | None = None) -> list[int]:
    """The scripted continuation of a prompt whose last id is `first`."""
    rule, ids = script_next(table), []
    for _ in range(count):
        first = rule[first]
        ids.append(first)
    return ids


def write_script_target(
    folder: Path,
    table: dict[int, int] | None = None,
    *,
    logits: np.ndarray | None = None,
    **changes: Any,
) -> Path:
    """Fixture S: logit 5 on the scripted next id of the last token, 0 elsewhere.

    One-hot embeddings pass through zeroed layers; the final norm scales them by sqrt(e), which the
    head takes back. `logits` [97, 97] gives the logits after every id instead.
    """
    e = ROWS
    config = {**TARGET, "hidden_size": e, "intermediate_size": 16, **changes}
    wanted = np.zeros((VOCAB, VOCAB), np.float32)
    if logits is None:
        wanted[np.arange(VOCAB), script_next(table)] = 5.0
    else:
        wanted[: logits.shape[0], : logits.shape[1]] = logits
    head = np.zeros((ROWS, e), np.float32)
    head[:VOCAB, :VOCAB] = wanted.T * e**-0.5
    tensors = {
        "model.embed_tokens.weight": np.eye(ROWS, e, dtype=np.float32),
        "model.norm.weight": np.ones(e, np.float32),
        "lm_head.weight": head,
    }
    rng = np.random.default_rng(0)
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config, qk_norm=False).items():
            silent = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            value = np.zeros(shape) if silent else rng.standard_normal(shape) * 0.1
            tensors[f"model.layers.{i}.{name}"] = value.astype(np.float32)
    return write_checkpoint(folder, config, tensors)


Draft = Callable[[Any, Any, Any], Any]


def use_drafts(monkeypatch: pytest.MonkeyPatch, drafts: Draft) -> None:
    """Replaces what DFlash proposes; its context, counts and everything else stay real.

    Args:
        drafts: (anchors [b], lengths [b] of the context, DFlash's own tokens [b, K]) -> [b, K].
    """

    class Scripted(BlockDrafter):
        def propose(self, arena, slots, anchors, draw):
            own = super().propose(arena, slots, anchors, draw)
            lengths = arena.lengths.at[slots].get(mode="fill", fill_value=0)
            return Proposal(drafts(anchors, lengths, own.tokens), own.count, None)

    monkeypatch.setattr(programs, "BlockDrafter", Scripted)


def perfect(table: dict[int, int] | None = None) -> Draft:
    """Proposes what the scripted target will say."""
    rule = script_next(table)

    def drafts(anchors, lengths, own):
        after = jnp.asarray(rule, jnp.int32)
        columns, last = [], anchors
        for _ in range(own.shape[1]):
            last = after.at[last].get(mode="promise_in_bounds")
            columns.append(last)
        return jnp.stack(columns, axis=1)

    return drafts


def known(text: Sequence[int], *, wrong_at: Sequence[int] = ()) -> Draft:
    """Proposes a known sequence (prompt + answer) by position, wrong at the given block slots."""

    def drafts(anchors, lengths, own):
        padded = jnp.asarray([*text, *[0] * (own.shape[1] + 2)], jnp.int32)
        offsets = jnp.arange(own.shape[1], dtype=jnp.int32)
        at = jnp.clip(lengths[:, None] + 1 + offsets[None, :], 0, len(padded) - 1)
        tokens = padded.at[at].get(mode="promise_in_bounds")
        wrong = jnp.isin(offsets, jnp.asarray(list(wrong_at) or [-1], jnp.int32))
        return jnp.where(wrong[None, :], (tokens + 1) % VOCAB, tokens)

    return drafts


def known_among(texts: Sequence[Sequence[int]], period: int) -> Draft:
    """Proposes the going-on of the first text with this anchor at this place, wrong at one slot.

    That slot is (7 x length) mod `period`: it depends on the place alone, so that a text's trace
    does not depend on its company. Unlike a drafter on the host, such programs are cached.
    """
    longest = max(map(len, texts))
    padded = np.zeros((len(texts), longest + 64), np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text

    def drafts(anchors, lengths, own):
        known = jnp.asarray(padded)
        at = jnp.minimum(lengths, longest)
        first = jnp.argmax(known[:, at] == anchors[None, :], axis=0)
        offsets = jnp.arange(own.shape[1], dtype=jnp.int32)[None, :]
        tokens = known[first[:, None], at[:, None] + 1 + offsets]
        wrong = offsets == (7 * lengths[:, None]) % period
        return jnp.where(wrong, (tokens + 1) % VOCAB, tokens)

    return drafts


def never(table: dict[int, int] | None = None) -> Draft:
    """Proposes only what the scripted target will not say."""
    right = perfect(table)

    def drafts(anchors, lengths, own):
        return (right(anchors, lengths, own) + 1) % VOCAB

    return drafts


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph: Any, weights: Any, ids: jax.Array) -> jax.Array:
    """Of a whole text; targets of one shape share the program."""
    return nnx.merge(graph, weights).forward(ids, ())[0]


def reference(target: dj.Target, prompt: Sequence[int], count: int) -> list[int]:
    """REF: greedy decoding with no cache and no drafter, a whole forward for each token.

    Runs at one padded length, so that it compiles once; later tokens do not reach earlier rows.
    """
    graph, weights = nnx.split(target)
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros((len(prompt) + count,), np.int32)
        padded[: len(ids)] = ids
        ids.append(
            int(np.argmax(np.asarray(_logits(graph, weights, jnp.asarray(padded))[len(ids) - 1])))
        )
    return ids[len(prompt) :]
