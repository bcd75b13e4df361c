"""A tiny target with random weights and documents whose features are its own.

Everything is made in memory in well under a second; nothing is trained here.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.config import TargetConfig
from dflash_jax.models import DFlashDrafter, Target, build_target
from dflash_jax.training import step
from dflash_jax.training.documents import Document
from dflash_jax.training.options import TrainOptions

VOCAB, MASK, TAPS = 61, 60, (1, 3)
RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
OPTIONS: dict[str, Any] = {
    "mask_token_id": MASK,
    "num_layers": 2,
    "num_taps": 2,
    "block_size": 4,
    "steps": 10,
    "documents_per_step": 2,
    "anchors_per_document": 3,
    "learning_rate": 1e-2,
    "frequent": 24,
    "extra": 32,  # more than the labels of a step: one shape, one compile
    "full_head_from": 0.8,
    "narrow_until": 0.4,
    "narrow_width": 3,
    "held_out": 0.0,
    "evaluate_every": 5,
    "save_every": 5,
    "accept_every": 0,  # rounds are compiled by the tests that are about them
}


def options(**changes: Any) -> TrainOptions:
    """A run of seconds; `changes` override."""
    return TrainOptions(**(OPTIONS | changes))


def by_heart(documents: int, *, steps: int, **changes: Any) -> TrainOptions:
    """A run that learns so many documents until it knows them."""
    return options(
        steps=steps,
        documents_per_step=documents,
        anchors_per_document=12,
        narrow_until=0.0,
        full_head_from=0.0,
        evaluate_every=steps,
        save_every=steps,
        learning_rate=2e-2,
        **changes,
    )


def target(**changes: Any) -> Target:
    """A random target in float32."""
    config = TargetConfig.from_dict(RAW | changes)
    return build_target(config, dtype=jnp.float32, rngs=nnx.Rngs(7))


@nnx.jit
def _pass(model: Target, ids: jax.Array):
    hidden, features, _ = model.run(ids[None], jnp.zeros(1, jnp.int32), None, TAPS)
    return (*model.forward(ids, TAPS), hidden[0])


def _forward(model: Target, ids: np.ndarray) -> list[np.ndarray]:
    """Logits, features, final states of a text; padding behind it, unseen, saves compiles."""
    padded = np.zeros(RAW["max_position_embeddings"], np.int32)
    padded[: len(ids)] = ids
    return [np.asarray(x)[: len(ids)] for x in _pass(model, jnp.asarray(padded))]


def document(
    model: Target,
    length: int,
    answer_start: int,
    *,
    seed: int = 0,
    ended: bool = True,
    final: bool = False,
) -> Document:
    """Random tokens with the model's features of them (and final states), rounded to bfloat16."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, MASK, length).astype(np.int32)
    _, features, hidden = _forward(model, ids)
    last = hidden.astype(jnp.bfloat16) if final else None
    return Document(ids, answer_start, ended, features.astype(jnp.bfloat16), last)


def answered(model: Target, *, prompt: int, tokens: int, seed: int) -> Document:
    """A random prompt with the model's own greedy answer, cut at `tokens`."""
    rng = np.random.default_rng(seed)
    ids = np.zeros(prompt + tokens, np.int32)
    ids[:prompt] = rng.integers(0, MASK, prompt)
    for length in range(prompt, len(ids)):
        ids[length] = _forward(model, ids)[0][length - 1].argmax()
    features = _forward(model, ids)[1].astype(jnp.bfloat16)
    return Document(ids, prompt, False, features)


def documents(model: Target, count: int = 7, *, final: bool = False) -> list[Document]:
    """Documents of different lengths."""
    return [
        document(model, 14 + 3 * i, 5, seed=i, ended=i % 2 == 0, final=final) for i in range(count)
    ]


def params(drafter: DFlashDrafter) -> dict[str, np.ndarray]:
    """The drafter's parameters by name, on the host."""
    return {name: np.asarray(value) for name, value in step.drafter_params(drafter).items()}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Equal names, and equal arrays bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
