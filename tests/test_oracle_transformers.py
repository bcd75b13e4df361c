"""Targets against transformers, which also writes the folders that are loaded here.

Random tiny models of every family, with the switches that their configs have: biases, grouped
heads, every rope rule, tied and untied heads, a head_dim that is not width / heads. All in float32.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj

pytestmark = pytest.mark.oracle

COMMON: dict[str, Any] = {
    "vocab_size": 113,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-bias-all-heads": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "llama-llama3-tied-head-dim": (
        "Llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-linear-one-kv-head": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 1}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3-head-dim": ("Qwen3", {"head_dim": 16}),
    "qwen3-bias-tied": (
        "Qwen3",
        {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-llama3": ("Qwen3", {"head_dim": 16, "rope_parameters": LLAMA3}),
}
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 113, 40)]
NEW = 64


def make_model(case: str) -> Any:
    """A random model of transformers; norms and biases too, which it would leave at 1 and 0."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for name, value in model.named_parameters():
        if value.ndim == 1:
            noise = 0.2 * torch.randn_like(value)
            value.data = noise if name.endswith("bias") else 1.0 + noise
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> tuple[Any, Path]:
    """The model of transformers and the folder that it saved itself to."""
    model = make_model(request.param)
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder, safe_serialization=True)
    return model, folder


@pytest.fixture(scope="module")
def outputs(pair) -> tuple[np.ndarray, list[np.ndarray], np.ndarray, np.ndarray]:
    """Logits and hidden states of transformers (entry 0 the embedding), our logits and features."""
    import torch

    model, folder = pair
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPT]), output_hidden_states=True)
    target = dj.load_target(folder)
    logits, features = jax.jit(lambda ids: target.forward(ids))(jnp.asarray(PROMPT, jnp.int32))
    states = [state[0].numpy() for state in theirs.hidden_states]
    return theirs.logits[0].numpy(), states, np.asarray(logits), np.asarray(features)


def test_prefill_logits_are_those_of_transformers(outputs):
    expected, _, logits, _ = outputs
    assert np.abs(expected).max() > 1.0, "logits that could differ"
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_feature_of_a_block_is_the_hidden_state_one_further(outputs):
    """Fault 86: entry 0 of hidden_states is the embedding; the last one has gone through the norm.

    So blocks 0 … n - 2 can be compared with entries 1 … n - 1.
    """
    _, states, _, features = outputs
    blocks = np.split(features, COMMON["num_hidden_layers"], axis=-1)
    assert len(states) == len(blocks) + 1
    for block in range(len(blocks) - 1):
        np.testing.assert_allclose(blocks[block], states[block + 1], rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_those_of_transformers(pair):
    import torch

    model, folder = pair
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones((1, len(PROMPT)), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
        )
    expected = ids[0, len(PROMPT) :].tolist()
    llm = dj.LLM(folder, max_batch_size=1, max_seq_len=128, max_num_tokens=32)
    answer = llm.generate([PROMPT], dj.SamplingParams(max_tokens=NEW, ignore_eos=True))[0]
    assert answer.token_ids == expected
    assert len(set(expected)) > 5, "a text that could differ"
