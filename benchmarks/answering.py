"""How fast answers for training are made: this engine at several batches, and `transformers`.

The engine is the one that `dflash-jax train` answers with (no drafter, nothing reused between
prompts). Two measures: every answer of the same fixed length, greedy, in turn with `transformers`
on the same batch; and answers at temperature 1 that end by themselves, more of them than slots, as
a corpus is made. Loading, compiling and one batch before are not in the times. Run from the
repository:

    python benchmarks/answering.py --batches 8 32 128
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from decode import PROMPTS

from dflash_jax import LLM, SamplingParams
from dflash_jax.weights.hub import resolve_model


def token_prompts(llm: LLM, count: int) -> list[list[int]]:
    """The fixed prompts in turn, each repeat with a number in front, so that none is another."""
    texts = [f"({n // len(PROMPTS) + 1}) {PROMPTS[n % len(PROMPTS)]}" for n in range(count)]
    assert llm.tokenizer is not None
    return [llm.tokenizer.chat_ids([{"role": "user", "content": text}]) for text in texts]


def fixed_length(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> float:
    """Seconds of one batch in which nobody ends early."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    begun = time.perf_counter()
    given = llm.generate(list(prompts), params)
    seconds = time.perf_counter() - begun
    assert all(len(one.token_ids) == max_tokens for one in given)
    return seconds


def as_a_corpus(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> tuple[float, int]:
    """Seconds and tokens of answers that end by themselves or at `max_tokens`."""
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed)
        for seed in range(len(prompts))
    ]
    begun = time.perf_counter()
    given = llm.generate(list(prompts), params)
    return time.perf_counter() - begun, sum(len(one.token_ids) for one in given)


def torch_model(folder: Any) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def torch_fixed_length(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> float:
    """Seconds of `model.generate` for the same batch, prompts padded on the left."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + list(one) for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    begun = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - begun
    assert out.shape[1] == longest + max_tokens
    return seconds


def run(batch: int, folder: Any, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one batch; arms take turns."""
    llm = LLM(
        folder,
        max_seq_len=args.max_seq_len,
        max_batch_size=batch,
        prefix_reuse=False,
    )
    prompts = token_prompts(llm, args.rounds * batch)
    fixed_length(llm, prompts[:batch], 8)
    if model is not None:
        torch_fixed_length(model, prompts[:batch], 8)
    ours, theirs = [], []
    for repeat in range(args.repeats):
        ours.append(fixed_length(llm, prompts[:batch], args.max_tokens))
        if model is not None:
            theirs.append(torch_fixed_length(model, prompts[:batch], args.max_tokens))
        print(f"batch {batch}: repeat {repeat + 1} of {args.repeats}", file=sys.stderr, flush=True)
    mixed = random.Random(0).sample(prompts, len(prompts))
    seconds, tokens = as_a_corpus(llm, mixed, args.max_answer_tokens)
    found = {
        "batch": batch,
        "tokens_per_second": batch * args.max_tokens / statistics.median(ours),
        "corpus_tokens_per_second": tokens / seconds,
        "corpus_tokens": tokens,
        "corpus_answers": len(mixed),
    }
    if theirs:
        found["transformers_tokens_per_second"] = (
            batch * args.max_tokens / statistics.median(theirs)
        )
        found["ours_over_transformers"] = statistics.median(
            their / our for our, their in zip(ours, theirs, strict=True)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--target", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--max-tokens", type=int, default=64, help="of every fixed-length answer")
    parser.add_argument("--max-answer-tokens", type=int, default=256, help="of the others")
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2, help="corpus answers, in batches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-transformers", action="store_true", help="leave torch out")
    args = parser.parse_args()
    folder = resolve_model(args.target, kind="target")
    model = None if args.no_transformers else torch_model(folder)
    document = {
        "target": args.target,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "options": vars(args),
        "batches": [run(batch, folder, model, args) for batch in args.batches],
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
