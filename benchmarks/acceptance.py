"""How good a drafter is: acceptance length by set and slot, and speed over plain decoding.

Prompts are the first ones of every JSONL file of a folder (lines with `turns`; the first turn is
asked). Acceptance is measured in batches, greedy and at temperature 1; speed with `--speed`, one
prompt at a time, plain and drafted in turn. Sampled requests have no seed, as most users' have
none, so drafts are judged by speculative sampling; `--seeded` gives each its own. Run from the
repository:

    python benchmarks/acceptance.py EVAL_FOLDER
    python benchmarks/acceptance.py EVAL_FOLDER --temperatures 1 --seeded
    python benchmarks/acceptance.py EVAL_FOLDER --speed --widths 2 3 4
    python benchmarks/acceptance.py EVAL_FOLDER --temperatures --speed --speed-temperature 1
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from arms import Answer, EngineArm, Pair
from decode import read_bytes
from measure import LOOP_RULE, loop_start, pooled_acceptance_length, rounds_before

from dflash_jax import LLM, SamplingParams, load_drafter, load_target
from dflash_jax.config import TargetConfig
from dflash_jax.serving.text import Tokenizer
from dflash_jax.weights.hub import resolve_model

RESAMPLES = 10_000


def read_prompts(folder: Path, count: int) -> dict[str, list[str]]:
    """First user turns of the first `count` lines of every file, by the file's stem."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()[:count]
        found[path.stem] = [json.loads(line)["turns"][0] for line in lines]
    if not found:
        raise SystemExit(f"{folder} has no .jsonl file")
    return found


def pooled(answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Any]:
    """Figures of (token ids, acceptance lengths) of some answers; loops by `LOOP_RULE`.

    `by_slot[i]` is the share of rounds, loops left out, that accepted more than i drafts.
    """
    every = [length for _, lengths in answers for length in lengths]
    before, looping = [], 0
    for ids, lengths in answers:
        start = loop_start(ids)
        before += rounds_before(lengths, start)
        looping += len(ids) - start
    longest = max(before, default=1)
    return {
        "acceptance_length": pooled_acceptance_length(every),
        "without_loops": pooled_acceptance_length(before),
        "by_slot": [float(np.mean(np.asarray(before) > slot)) for slot in range(1, longest)],
        "rounds": len(every),
        "tokens": sum(len(ids) for ids, _ in answers),
        "looping_tokens": looping,
    }


def acceptance(
    args: argparse.Namespace, prompts: dict[str, list[str]], temperature: float
) -> dict[str, Any]:
    """Pooled figures of every set and of all, through the engine in batches."""
    longest = args.max_prompt_tokens + args.max_tokens
    llm = LLM(
        args.target, drafter=args.drafter, max_seq_len=longest, max_batch_size=args.batch_size
    )
    texts = [text for group in prompts.values() for text in group]
    tokenizer = Tokenizer.from_folder(resolve_model(args.target, kind="target"))
    ids = [tokenizer.chat_ids([{"role": "user", "content": text}]) for text in texts]
    params = [
        SamplingParams(
            max_tokens=args.max_tokens,
            temperature=temperature,
            seed=number if args.seeded else None,
        )
        for number in range(len(texts))
    ]
    done = llm.generate([list(one) for one in ids], params)
    answers = [(one.token_ids, one.stats.acceptance_lengths) for one in done]
    figures, begin = {}, 0
    for name, group in prompts.items():
        figures[name] = pooled(answers[begin : begin + len(group)])
        begin += len(group)
    return figures | {"all": pooled(answers)}


def interval(plain: np.ndarray, drafted: np.ndarray) -> dict[str, float]:
    """Speed-up of sums of seconds a token over prompts, with a 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(plain), (RESAMPLES, len(plain)))
    ratios = plain[drawn].sum(1) / drafted[drawn].sum(1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return {"speedup": float(plain.sum() / drafted.sum()), "low": float(low), "high": float(high)}


def speed(args: argparse.Namespace, prompts: dict[str, list[str]]) -> dict[str, Any]:
    """Batch-1 decoding of every `--speed-every`th prompt: plain and each width, in turn."""
    folder, drafter = (
        resolve_model(args.target, kind="target"),
        resolve_model(args.drafter, kind="drafter"),
    )
    tokenizer = Tokenizer.from_folder(folder)
    ends = {*TargetConfig.from_folder(folder).eos_token_ids, *tokenizer.eos_token_ids}
    pair = Pair(load_target(folder), load_drafter(drafter), folder, drafter, ends)
    longest = args.max_prompt_tokens + args.max_tokens
    arms = [EngineArm(pair, width, longest) for width in (0, *args.widths)]
    texts = [text for group in prompts.values() for text in group][:: args.speed_every]
    asked = {"temperature": args.speed_temperature, "seeded": args.seeded}
    found: dict[str, list[Answer]] = {arm.name: [] for arm in arms}
    for number, text in enumerate(texts):
        ids = list(tokenizer.chat_ids([{"role": "user", "content": text}]))
        if number == 0:
            for arm in arms:
                arm.answer(ids, 16, **asked)
        turn = number % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            found[arm.name].append(arm.answer(ids, args.max_tokens, seed=number, **asked))
        if number % 8 == 7:
            print(f"speed: {number + 1} of {len(texts)} prompts", file=sys.stderr, flush=True)
    timed = [i for i in range(len(texts)) if all(a[i].timed_tokens for a in found.values())]
    plain = found["plain"]
    result: dict[str, Any] = {"weight_bytes": read_bytes(pair.target), "prompts": len(timed)}
    for arm in arms[1:]:
        drafted = found[arm.name]
        # Prompt by prompt, as if both had as many tokens; greedy and seeded answers are the same.
        per_token = [
            np.array([a[i].seconds / a[i].timed_tokens * plain[i].timed_tokens for i in timed])
            for a in (plain, drafted)
        ]
        same = sum(plain[i].token_ids == drafted[i].token_ids for i in range(len(texts)))
        lengths = [n for one in drafted for n in one.acceptance_lengths]
        result[arm.name] = interval(*per_token) | {
            "same_answers": same,
            "acceptance_length": pooled_acceptance_length(lengths),
            "round_ratio": float(
                np.median([a.seconds / max(a.timed_rounds, 1) for a in drafted])
                / np.median([a.seconds / max(a.timed_tokens, 1) for a in plain])
            ),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("data", type=Path, help="folder of JSONL files")
    parser.add_argument("--target", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--drafter", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--prompts", type=int, default=24, help="of every set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-prompt-tokens", type=int, default=896)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--seeded", action="store_true", help="a seed for every sampled request")
    parser.add_argument("--speed", action="store_true", help="time batch 1 too")
    parser.add_argument("--speed-temperature", type=float, default=0.0, help="of what is timed")
    parser.add_argument("--speed-every", type=int, default=4, help="every n-th prompt is timed")
    parser.add_argument("--widths", type=int, nargs="*", default=[2, 3, 4, 7], help="K to time")
    args = parser.parse_args()
    prompts = read_prompts(args.data, args.prompts)
    document: dict[str, Any] = {"loop_rule": LOOP_RULE}
    for temperature in args.temperatures:
        document[f"temperature {temperature:g}"] = acceptance(args, prompts, temperature)
        print(json.dumps(document, indent=2), file=sys.stderr, flush=True)
    if args.speed:
        document["speed"] = speed(args, prompts)
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
