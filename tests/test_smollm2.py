"""Invariants 1 and 2 on a real model: SmolLM2-135M in float32, fixed prompts, a ragged batch.

The oracle is the target without a cache, once over each finished text: an answer is greedy exactly
if every token is the argmax after what stands before it. Divergences are allowed only where the top
two logits are less than 1e-3 apart, at most one in 2,000 tokens, and are printed.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dflash_jax as dj
import tiny_engine
from dflash_jax.serving.batch import Batch, Row
from dflash_jax.serving.text import Tokenizer
from numpy_pair import NumpyContext
from tiny_engine import HostDrafter

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at 100 degrees Celsius because",
]
SHA256 = "db0e508c2b41e45e9381a45ef2305316bd499a576fa18414cfcf44b100adaee6"
SERVED, NEW, LARGEST_GAP = 112, 64, 1e-3
DRAFTER = Path(__file__).parent.parent / "checkpoints" / "smollm2-135m-dflash"


@pytest.fixture(scope="module")
def target(demo_folder: Path) -> dj.Target:
    return dj.load_target(demo_folder)


@pytest.fixture(scope="module", params=["own", "random"])
def served(
    request: pytest.FixtureRequest, engine: tiny_engine.Engine, host: HostDrafter, demo_folder: Path
) -> list[Row]:
    host.rule = None if request.param == "own" else random_drafts
    tokenizer = Tokenizer.from_folder(demo_folder)
    requests = [(tokenizer.encode(text), NEW - 9 * i) for i, text in enumerate(PROMPTS)]
    return tiny_engine.run(Batch(engine), *requests)


def random_drafts(anchors: np.ndarray, lengths: np.ndarray, own: np.ndarray) -> np.ndarray:
    return np.random.default_rng(int(lengths.sum())).integers(0, 49_152, own.shape)


@pytest.fixture(scope="module")
def host() -> HostDrafter:
    return HostDrafter()


@pytest.fixture(scope="module")
def engine(demo_folder: Path, host: HostDrafter) -> Iterator[tiny_engine.Engine]:
    yield tiny_engine.engine(
        demo_folder, DRAFTER, host, row_sizes=(4,), max_seq_len=SERVED, max_batch_size=4
    )


@pytest.fixture(scope="module")
def alone(target: dj.Target) -> Any:
    """(logits, features) of a whole text, padded to one length; later tokens reach no earlier.

    The weights are an argument: as constants of the program, half a GB is compiled and cached.
    """
    taps = json.loads((DRAFTER / "config.json").read_text())["dflash_config"]
    layers = tuple(taps["target_layer_ids"])
    graph, weights = nnx.split(target)
    forward = jax.jit(lambda state, ids: nnx.merge(graph, state).forward(ids, layers))

    def run(ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        padded = np.zeros((SERVED,), np.int32)
        padded[: len(ids)] = ids
        logits, features = forward(weights, jnp.asarray(padded))
        return np.asarray(logits)[: len(ids)], np.asarray(features)[: len(ids)]

    return run


def test_the_prompts_are_the_ones_that_were_chosen_before_any_result():
    assert hashlib.sha256("\0".join(PROMPTS).encode()).hexdigest() == SHA256


def diverging(row: Row, alone: Any) -> list[tuple[int, int, float]]:
    """(index, token, gap of the top two logits) of every token that is not the argmax."""
    logits, _ = alone([*row.prompt, *row.token_ids])
    found = []
    for index, token in enumerate(row.token_ids):
        here = logits[len(row.prompt) + index - 1]
        best = np.sort(here)[-2:]
        if token != int(np.argmax(here)):
            found.append((index, token, float(best[1] - best[0])))
    return found


def test_every_token_is_the_targets_greedy_choice(served: list[Row], alone, capsys):
    tokens = sum(len(row.token_ids) for row in served)
    divergences = [found for row in served for found in diverging(row, alone)]
    with capsys.disabled():
        print(f"\nSmolLM2: {len(divergences)} divergences in {tokens} tokens: {divergences}")
    assert tokens > 150
    assert all(gap < LARGEST_GAP for _, _, gap in divergences)
    assert len(divergences) <= max(1, tokens // 2000)


def test_the_context_is_a_fresh_prefill_of_the_committed_tokens(
    served: list[Row], engine: tiny_engine.Engine, alone
):
    """1e-3 of each row's rms; there is a slot for each request, which still holds its rows."""
    oracle, arena = NumpyContext(DRAFTER), engine.state.context
    assert arena is not None
    for slot, row in enumerate(served):
        ids = [*row.prompt, *row.token_ids][:-1]
        length = len(ids)
        assert int(arena.lengths[slot]) >= length
        features = alone(ids)[1]
        split = np.split(features, len(oracle.taps), axis=-1)
        wanted = oracle.rows(dict(zip(oracle.taps, split, strict=True)))
        for layer, (keys, values) in zip(arena.layers, wanted, strict=True):
            for ours, theirs in ((layer.keys, keys), (layer.values, values)):
                rms = np.sqrt(np.mean(theirs**2, axis=(0, 2), keepdims=True))
                error = np.abs(np.asarray(ours)[slot, :, :length] - theirs)
                worst = float(np.max(error / rms))
                assert worst <= 1e-3, f"slot {slot}"


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 4])
def test_narrow_blocks_of_the_shipped_drafter_leave_the_text_alone(demo_folder, alone, width: int):
    """Fault 1: K below the trained 7, the drafter's own proposals, one prompt."""
    options: dict[str, Any] = {"max_seq_len": 32, "max_batch_size": 1, "max_draft_len": width}
    batch = Batch(tiny_engine.engine(demo_folder, DRAFTER, **options))
    prompt = Tokenizer.from_folder(demo_folder).encode(PROMPTS[0])
    row = tiny_engine.run(batch, (prompt, 24))[0]
    assert len(row.token_ids) == 24
    assert set(row.stats.drafts_per_round) <= {0, width}
    assert row.stats.num_accepted_drafts > 0
    divergences = diverging(row, alone)
    assert len(divergences) <= 1 and all(gap < LARGEST_GAP for *_, gap in divergences)
