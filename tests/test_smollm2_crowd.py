"""A crowd on a real model: 16 mixed requests of SmolLM2 at once, each against itself alone.

Alone means plain decoding, one row, nothing reused. Float32 sums of several rows differ in their
last bits from those of one, so a greedy text may part where the top two logits are less than 1e-3
apart, and a sampled one where the draw lies on a border: at most one in 2,000 tokens, as in
`test_smollm2.py`.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
import tiny_engine
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.row import Row
from dflash_jax.serving.text import Tokenizer
from test_smollm2 import DRAFTER, LARGEST_GAP, PROMPTS

SERVED, NEW = 112, 48


def crowd(demo_folder: Path) -> list[tuple[list[int], dj.SamplingParams]]:
    """Four prompts and their halves: beginnings are shared; every second one is sampled."""
    tokenizer = Tokenizer.from_folder(demo_folder)
    texts = [text[: len(text) // part] for part in (1, 2) for text in PROMPTS] * 2
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"repetition_penalty": 1.2},
        {"temperature": 0.7, "top_k": 40},
    ]
    return [
        (
            tokenizer.encode(text),
            dj.SamplingParams(
                max_tokens=NEW - index, seed=index, **options[(index + index // 8) % 4]
            ),
        )
        for index, text in enumerate(texts)
    ]


@pytest.mark.slow
def test_sixteen_mixed_requests_at_once_are_what_each_is_alone(demo_folder: Path, capsys):
    """Faults 7, 55. Four slots, chunks of 16, prefixes reused, the shipped drafter's own drafts."""
    asked = crowd(demo_folder)
    sizes: dict[str, Any] = {"max_seq_len": SERVED}
    engine = tiny_engine.engine(
        demo_folder, DRAFTER, max_batch_size=4, max_num_tokens=32, row_sizes=(4,), **sizes
    )
    batch = Batch(engine)
    rows = tiny_engine.serve(batch, [tiny_engine.request(*one) for one in asked])
    assert batch.load().prefix_hits > 0
    del engine, batch
    single = Batch(tiny_engine.engine(demo_folder, None, max_batch_size=1, **sizes), reuse=False)
    alone = [tiny_engine.serve(single, [tiny_engine.request(*one)])[0] for one in asked]
    parted = [
        i for i, (a, b) in enumerate(zip(rows, alone, strict=True)) if a.token_ids != b.token_ids
    ]
    tokens = sum(len(row.token_ids) for row in rows)
    with capsys.disabled():
        print(f"\nSmolLM2, a crowd: {len(parted)} of {len(rows)} texts part, {tokens} tokens")
    assert tokens > 400 and sum(row.stats.num_accepted_drafts for row in rows) > 50
    assert len(parted) <= max(1, tokens // 2000)
    target = dj.load_target(demo_folder)
    for index in parted:
        if rows[index].greedy:
            assert _gap(target, rows[index], alone[index]) < LARGEST_GAP


def _gap(target: dj.Target, row: Row, other: Row) -> float:
    """Distance of the top two logits where two greedy texts part."""
    pairs = zip(row.token_ids, other.token_ids, strict=False)
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    ids = jnp.asarray([*row.prompt, *row.token_ids[:at]], jnp.int32)
    logits, _ = jax.jit(lambda ids: target.forward(ids, ()))(ids)
    best = np.sort(np.asarray(logits)[-1])[-2:]
    return float(best[1] - best[0])
