"""The golden pairs: what the reference implementation computes, through our public front doors.

Vectors and their meaning: `tests/data/golden/README.md`. Nothing here is an oracle of our own.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax as dj
import tiny
import tiny_engine

NEW_TOKENS = 48
TOLERANCE = 2e-4


class Golden:
    """One pair: its folders, its vectors, and answers through `LLM`."""

    def __init__(self, name: str):
        self.folder = tiny.GOLDEN / name
        self.vectors = load_file(self.folder / "golden.safetensors")
        self.prompts = [self.vectors[f"prompt{i}"].tolist() for i in range(3)]

    def lengths(self, index: int) -> list[int]:
        return self.vectors[f"acceptance_lengths{index}"].tolist()

    def answer(self, index: int) -> list[int]:
        prompt = len(self.prompts[index])
        return self.vectors[f"output_ids{index}"][prompt : prompt + NEW_TOKENS].tolist()


@pytest.fixture(scope="module", params=tiny.PAIRS)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.fixture(scope="module")
def llm(golden: Golden) -> Iterator[dj.LLM]:
    # Two slots for three prompts: one of them follows another in its slot.
    folders = golden.folder / "target", golden.folder / "drafter"
    yield tiny_engine.start(*folders, max_seq_len=96, max_batch_size=2)


def test_logits_features_and_draft_hidden_states_are_those_of_the_reference(golden: Golden):
    target = dj.load_target(golden.folder / "target")
    drafter = dj.load_drafter(golden.folder / "drafter")
    config = drafter.config
    forward = jax.jit(lambda ids: target.forward(ids, config.target_layer_ids))
    draft = jax.jit(
        lambda features, ids, places: drafter.forward(
            features, ids, places, target.embedding, target.head
        )
    )
    for i, prompt in enumerate(golden.prompts):
        wanted = {k[:-1]: v for k, v in golden.vectors.items() if k.endswith(str(i))}
        logits, features = forward(jnp.asarray(prompt, jnp.int32))
        block = np.full((config.block_size,), config.mask_token_id, np.int32)
        block[0] = golden.answer(i)[0]
        places = len(prompt) + np.arange(config.block_size, dtype=np.int32)
        hidden, draft_logits = draft(features, jnp.asarray(block), jnp.asarray(places))
        ours = {
            "target_logits": logits,
            "context_features": features,
            "draft_hidden": hidden,
            "draft_logits": draft_logits,
        }
        for name, value in ours.items():
            assert value.shape == wanted[name].shape, name
            np.testing.assert_allclose(
                np.asarray(value), wanted[name], rtol=0, atol=TOLERANCE, err_msg=f"{name}{i}"
            )


def _check(golden: Golden, index: int, done: Any) -> None:
    assert done.token_ids == golden.answer(index)
    assert done.prompt_token_ids == golden.prompts[index]
    assert done.finish_reason == "length"
    # Our last round is cut at the 48th token; the reference's is not.
    ours, wanted = done.stats.acceptance_lengths, golden.lengths(index)
    assert ours[:-1] == wanted[: len(ours) - 1]
    assert len(wanted) - len(ours) in (0, 1)
    assert 1 <= ours[-1] <= wanted[len(ours) - 1]
    assert 1 + sum(ours) == NEW_TOKENS


def test_ids_and_acceptance_lengths_of_a_batch_are_those_of_the_reference(golden, llm):
    params = dj.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for index, done in enumerate(llm.generate(golden.prompts, params)):
        _check(golden, index, done)


def test_ids_and_acceptance_lengths_of_each_prompt_alone_are_those_of_the_reference(golden, llm):
    params = dj.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(golden.prompts):
        _check(golden, index, llm.generate(prompt, params)[0])


def test_the_reference_accepts_more_than_the_bonus_so_that_the_trace_says_something(golden):
    for index in range(3):
        assert sum(golden.lengths(index)) > len(golden.lengths(index))
