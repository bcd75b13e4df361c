"""An `LLM` of the tiny pair with text, and what three prompts give alone: the yardstick of others.

For tests of what a running engine refuses and survives; each of their files starts one.
"""

from pathlib import Path
from typing import Any

import dflash_jax as dj
from tiny_text import write_text_drafter, write_text_target

SERVED = 64
SMALL: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": SERVED}
PARAMS = dj.SamplingParams(max_tokens=12, ignore_eos=True)
FIRST, SECOND, THIRD = [5, 17, 3, 88], [40, 2], [7, 7, 9, 200, 11]


def start(folder: Path) -> dj.LLM:
    """Two slots of 64 positions."""
    pair = write_text_target(folder / "target"), write_text_drafter(folder / "drafter")
    return dj.LLM(*pair, **SMALL)


def alone(llm: dj.LLM) -> dict[tuple[int, ...], list[int]]:
    """What each prompt gives alone."""
    prompts = (FIRST, SECOND, THIRD)
    return {tuple(p): llm.generate([p], PARAMS)[0].token_ids for p in prompts}
