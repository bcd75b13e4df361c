"""Suffix drafting against plain decoding, batch 1, on texts that repeat themselves more and less.

Both arms answer the same prompts in the same run, in turn. Run from the repository:

    python benchmarks/suffix.py
"""

import argparse
import json
import statistics
import sys
from typing import Any

from arms import Answer, Arm, EngineArm, Pair
from measure import pooled_acceptance_length

from dflash_jax import load_target
from dflash_jax.config import TargetConfig
from dflash_jax.serving.text import Tokenizer
from dflash_jax.weights.hub import resolve_model

_CODE = '''def area(width, height):
    """Area of a rectangle."""
    return width * height

def perimeter(width, height):
    """Perimeter of a rectangle."""
    return 2 * (width + height)

def describe(width, height):
    a = area(width, height)
    p = perimeter(width, height)
    print(f"The area is {a} and the perimeter is {p}.")
'''
_STORY = (
    "The old lighthouse stood at the end of the long stone pier. Every evening the keeper, a quiet "
    "woman named Marta, climbed the ninety-three steps to light the lamp. Ships from the north "
    "came by at dusk, heavy with timber and salt, and their captains raised a hand to the light. "
    "One winter the storm broke the great lens, and Marta had to carry lanterns up the stairs for "
    "eleven nights in a row."
)
PROMPTS = {
    "repeat a text": f"Repeat the following text exactly, word by word:\n\n{_STORY}",
    "edit code": "Rewrite this Python code with the name `width` changed to `w` and `height` "
    f"changed to `h`:\n\n```python\n{_CODE}```",
    "explain": "Explain why the sky is blue.",
    "list of tips": "Write a list of ten tips for saving money, one sentence each.",
    "summary": f"Summarize the following text in two sentences:\n\n{_STORY}",
    "story": "Write a short story about a fox and a crow.",
}
"""Fixed, and never chosen by their speed."""


def race(arms: list[Arm], ids: list[int], max_tokens: int, repeats: int) -> list[list[Answer]]:
    """Answers by arm; arms take turns."""
    answers: list[list[Answer]] = [[] for _ in arms]
    for repeat in range(repeats):
        order = range(len(arms)) if repeat % 2 else reversed(range(len(arms)))
        for index in order:
            answers[index].append(arms[index].answer(list(ids), max_tokens))
    return answers


def figures(plain: list[Answer], suffix: list[Answer]) -> dict[str, Any]:
    """Medians over repeats."""
    each = [
        1e3 * statistics.median(one.seconds for one in runs) / max(runs[0].timed_tokens, 1)
        for runs in (plain, suffix)
    ]
    return {
        "tokens": len(plain[0].token_ids),
        "acceptance_length": pooled_acceptance_length(suffix[0].acceptance_lengths),
        "plain_ms_per_token": each[0],
        "suffix_ms_per_token": each[1],
        "speedup": each[0] / each[1],
        "identical": all(one.token_ids == plain[0].token_ids for one in (*plain, *suffix)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Suffix drafting against plain decoding.")
    parser.add_argument("--target", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--max-draft-len", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    folder = resolve_model(args.target, kind="target")
    tokenizer = Tokenizer.from_folder(folder)
    ends = {*TargetConfig.from_folder(folder).eos_token_ids, *tokenizer.eos_token_ids}
    pair = Pair(load_target(folder), None, folder, None, ends)
    arms: list[Arm] = [
        EngineArm(pair, 0, 1024),
        EngineArm(pair, args.max_draft_len, 1024, suffix=True),
    ]
    for arm in arms:
        arm.answer(tokenizer.encode("Hello"), 16)
    document = {}
    for name, text in PROMPTS.items():
        ids = tokenizer.chat_ids([{"role": "user", "content": text}])
        document[name] = figures(*race(arms, ids, args.max_tokens, args.repeats))
        print(name, document[name], file=sys.stderr, flush=True)
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
