"""Batch-1 decoding of fixed prompts: this engine, its drafter, `transformers`, and the floor.

All arms answer the same prompts in the same run, in turn. The floor is the time to read every
weight once at the best streaming rate measured on this machine. Run from the repository:

    python benchmarks/decode.py
    python benchmarks/decode.py --breakdown --json > decode.json
"""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
from arms import Answer, Arm, EngineArm, Pair, torch_arms
from measure import (
    LOOP_RULE,
    loop_start,
    pooled_acceptance_length,
    rounds_before,
    streaming_bandwidth,
)
from pieces import breakdown
from report import show

from dflash_jax import load_drafter, load_target
from dflash_jax.config import TargetConfig
from dflash_jax.models import Target
from dflash_jax.serving.compiles import CompileCounter
from dflash_jax.serving.text import Tokenizer
from dflash_jax.weights.hub import resolve_model

PROMPTS = (
    "Explain in a few sentences why leaves turn red in autumn.",
    "A train travels 180 km in 2 hours and 15 minutes. What is its average speed? Show each step.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Give me a short recipe for vegetable soup.",
    "What is the difference between a list and a tuple in Python?",
    "Write a polite email asking a colleague to move a meeting to Thursday.",
    "Tell a short story about a lighthouse keeper and a gull.",
    "List the planets of the solar system and one fact about each.",
)
"""Fixed, and never chosen by their speed."""

LEFT_OUT = (
    "loading, compiling, one unmeasured answer of every arm, and of every answer the prompt's pass "
    "and the first step or round after it"
)


def prompts_sha256() -> str:
    """Of the prompts as JSON."""
    return hashlib.sha256(json.dumps(PROMPTS, ensure_ascii=False).encode()).hexdigest()


def read_bytes(target: Target) -> int:
    """Weight bytes that one plain step reads: everything, the input table only where it is tied."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(_params(target)))
    return total if target.config.tie_word_embeddings else total - target.embedding.nbytes


def _params(target: Target) -> Any:
    from flax import nnx

    return nnx.state(target, nnx.Param)


def bandwidth_now() -> dict[str, float]:
    return streaming_bandwidth(megabytes=512, repeats=9, numpy_threads=(1, 2))


def load(args: argparse.Namespace) -> tuple[Pair, list[list[int]]]:
    """The weights once, and the prompts' ids through the chat template."""
    folder = resolve_model(args.target, kind="target")
    drafter = None if args.no_drafter else resolve_model(args.drafter, kind="drafter")
    tokenizer = Tokenizer.from_folder(folder)
    ends = {*TargetConfig.from_folder(folder).eos_token_ids, *tokenizer.eos_token_ids}
    model = None if drafter is None else load_drafter(drafter)
    ids = [tokenizer.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS]
    return Pair(load_target(folder), model, folder, drafter, ends), ids[: args.prompts]


def widths(args: argparse.Namespace, pair: Pair) -> list[int]:
    """Asked draft lengths up to the trained one, which is always there."""
    if pair.drafter is None:
        return []
    trained = pair.drafter.config.trained_draft_len
    return sorted({width for width in args.widths if width < trained} | {trained})


def race_arms(
    arms: Sequence[Arm], prompts: Sequence[list[int]], max_tokens: int, repeats: int
) -> dict[str, list[list[Answer]]]:
    """Answers by arm, prompt and repeat; arms take turns at every prompt, in a rotating order."""
    for arm in arms:
        arm.answer(prompts[0], min(max_tokens, 16))
    answers: dict[str, list[list[Answer]]] = {arm.name: [[] for _ in prompts] for arm in arms}
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            turn = (repeat + index) % len(arms)
            for arm in (*arms[turn:], *arms[:turn]):
                answers[arm.name][index].append(arm.answer(prompt, max_tokens))
        print(f"repeat {repeat + 1} of {repeats} done", file=sys.stderr, flush=True)
    return answers


def summary(answers: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Figures of one arm: the median over repeats for every prompt, then sums over prompts."""
    seconds = sum(statistics.median(one.seconds for one in runs) for runs in answers)
    tokens = sum(runs[0].timed_tokens for runs in answers)
    rounds = sum(runs[0].timed_rounds for runs in answers)
    return {
        "ms_per_token": 1e3 * seconds / tokens if tokens else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "ms_per_round": 1e3 * seconds / rounds if rounds else None,
        "timed_tokens": tokens,
    }


def acceptance(answers: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Pooled acceptance lengths, with and without the looping part of answers."""
    every, before, looping, total = [], [], 0, 0
    for first, *_ in answers:
        start = loop_start(first.token_ids)
        every += first.acceptance_lengths
        before += rounds_before(first.acceptance_lengths, start)
        looping += len(first.token_ids) - start
        total += len(first.token_ids)
    return {
        "acceptance_length": pooled_acceptance_length(every),
        "acceptance_length_without_loops": pooled_acceptance_length(before),
        "looping_tokens": looping,
        "tokens": total,
    }


def same_ids(first: Sequence[Sequence[Answer]], second: Sequence[Sequence[Answer]]) -> int:
    """Prompts whose ids are the same in all repeats of both."""
    pairs = zip(first, second, strict=True)
    return sum(len({tuple(one.token_ids) for one in (*a, *b)}) == 1 for a, b in pairs)


def first_difference(first: Sequence[Answer], second: Sequence[Answer]) -> int | None:
    """Index of the first id that differs between two answers; None if they are the same."""
    ours, theirs = first[0].token_ids, second[0].token_ids
    both = min(len(ours), len(theirs))
    differing = [index for index in range(both) if ours[index] != theirs[index]]
    return differing[0] if differing else (None if len(ours) == len(theirs) else both)


def engine_figures(
    answers: dict[str, list[list[Answer]]], floor_seconds: float, drafts: Sequence[int]
) -> dict[str, Any]:
    """The stable keys: plain, every width, and the trained width as `dflash`."""
    plain = summary(answers["plain"])
    plain["floor_ratio"] = _ratio(plain["ms_per_token"], 1e3 * floor_seconds)
    found: dict[str, Any] = {"plain": plain, "widths": {}}
    same = [same_ids(answers["plain"], answers["plain"])]
    for width in drafts:
        arm = answers[f"DFlash K={width}"]
        figures = summary(arm) | acceptance(arm)
        figures["round_ratio"] = _ratio(figures["ms_per_round"], plain["ms_per_token"])
        figures["speedup"] = _ratio(plain["ms_per_token"], figures["ms_per_token"])
        figures["same_answers"] = same_ids(answers["plain"], arm)
        same.append(figures["same_answers"])
        found["widths"][str(width)] = figures
    found["identical"] = min(same) == len(answers["plain"])
    if drafts:
        found["dflash"] = found["widths"][str(drafts[-1])]
        found["speedup"] = found["dflash"]["speedup"]
    return found


def torch_figures(answers: dict[str, list[list[Answer]]], plain: dict[str, Any]) -> dict[str, Any]:
    """Speed of every torch arm, ours over it, and how far its ids are ours."""
    found = {}
    for name in answers:
        if not name.startswith("transformers"):
            continue
        figures = summary(answers[name])
        figures["plain_speed_over_this"] = _ratio(figures["ms_per_token"], plain["ms_per_token"])
        figures["same_answers"] = same_ids(answers["plain"], answers[name])
        pairs = zip(answers["plain"], answers[name], strict=True)
        figures["first_differences"] = [first_difference(*pair) for pair in pairs]
        found[name] = figures
    return found


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one document."""
    before = bandwidth_now()
    pair, prompts = load(args)
    drafts = widths(args, pair)
    longest = max(map(len, prompts)) + args.max_tokens
    arms: list[Arm] = [EngineArm(pair, width, longest) for width in (0, *drafts)]
    if not args.no_transformers:
        arms += torch_arms(pair.target_folder, pair.ends)
    compiles = CompileCounter()
    answers = race_arms(arms, prompts, args.max_tokens, args.repeats)
    counted = compiles.count
    # Before and after, so that a load which came or went does not make the floor too high.
    bandwidth = {name: max(rate, before[name]) for name, rate in bandwidth_now().items()}
    nbytes, best = read_bytes(pair.target), max(bandwidth.values())
    document = {
        "target": args.target,
        "drafter": None if args.no_drafter else args.drafter,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "prompts_sha256": prompts_sha256(),
        "num_prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "left_out": LEFT_OUT,
        "loop_rule": LOOP_RULE,
        "bandwidth_gb_per_s": {name: rate / 1e9 for name, rate in bandwidth.items()},
        "weight_bytes": nbytes,
        "floor_ms": 1e3 * nbytes / best,
        "compiles_in_service": counted,
    }
    document |= engine_figures(answers, nbytes / best, drafts)
    document["transformers"] = torch_figures(answers, document["plain"])
    if args.breakdown:
        configs = [arm.config for arm in arms if isinstance(arm, EngineArm)]
        document["breakdown"] = breakdown(pair, configs, repeats=args.breakdown_repeats)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--target", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--drafter", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--no-drafter", action="store_true", help="plain decoding only")
    parser.add_argument("--widths", type=int, nargs="*", default=[3, 5], help="K besides trained")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="only the first ones")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-transformers", action="store_true", help="leave torch out")
    parser.add_argument("--breakdown", action="store_true", help="time the parts of a round too")
    parser.add_argument("--breakdown-repeats", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="the document on stdout")
    args = parser.parse_args()
    document = run(args)
    show(document)
    if args.json:
        print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
