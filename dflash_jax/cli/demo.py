"""`dflash-jax demo`: one streamed answer, then plain decoding and DFlash side by side.

Both run the same engine on the same prompts, greedily; what is measured is defined in `speed.py`. A
slowdown is printed as a slowdown.
"""

import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dflash_jax.cli import options, output
from dflash_jax.cli.progress import Bars
from dflash_jax.cli.speed import (
    MEASURED,
    Measured,
    measure,
    median_rate,
    pooled_acceptance_length,
    verdict,
)
from dflash_jax.cli.start import fetch_demo, start_llm
from dflash_jax.cli.terminal import note

if TYPE_CHECKING:
    from dflash_jax import LLM

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "A shop sells pens at 3 dollars each. How much do 14 pens cost? Think step by step.",
    "Write a Python function that returns the factorial of a number.",
    "List five things to pack for a week at the sea.",
)
"""Fixed, and never chosen by their speed."""

SERVED_LENGTH = 1024
_WARM_UP_TOKENS = 8
_PROMPT_WIDTH = 26
# Of 7: the fastest on two CPU cores (benchmarks/RESULTS.md).
DEMO_DRAFT_LEN = 3


def demo(
    target: Annotated[
        str, typer.Option("--target", help="A checkpoint folder, a hub id or demo.")
    ] = "demo",
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="Its drafter: a folder, a hub id or demo.")
    ] = "demo",
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The question that is answered first.")
    ] = PROMPTS[0],
    max_tokens: options.MaxTokensOption = 96,
    max_seq_len: options.MaxSeqLenOption = None,
    max_draft_len: options.MaxDraftLenOption = None,
    json: options.JsonOption = False,
) -> None:
    """See it at work: stream one answer, then compare plain decoding with DFlash.

    On a fresh machine the demo model (93 MB) is fetched once; nothing else is needed.
    """
    from dflash_jax import SamplingParams

    begun = time.perf_counter()
    SamplingParams(max_tokens=max_tokens).check()
    with Bars() as bars:
        fetching = fetch_demo(target, bars)
        served = max_seq_len or _served_length(target)
        sizes = {"max_seq_len": served, "max_batch_size": 1}
        drafts = draft_len(max_draft_len, drafter)
        pair = start_llm(target, drafter, bars, max_draft_len=drafts, **sizes)
    first_token = _stream(pair, prompt, max_tokens, show=not json)
    with Bars() as bars:
        plain = start_llm(target, None, bars, **sizes)
    with Bars() as bars:
        asked = [prompt, *(other for other in PROMPTS if other != prompt)]
        results = _compare(plain, pair, asked, max_tokens, bars)
    document = _document(results) | {
        "target": target,
        "drafter": drafter,
        "max_draft_len": pair.config.max_draft_len,
        "seconds_to_fetch": fetching,
        "seconds_to_first_token": first_token - begun - fetching,
    }
    if json:
        output.print_json(document)
    else:
        _show(results, document, pair)


class Result(NamedTuple):
    """One prompt, decoded both ways."""

    prompt: str
    plain: Measured
    dflash: Measured

    @property
    def identical(self) -> bool:
        return self.plain.completion.token_ids == self.dflash.completion.token_ids


def draft_len(asked: int | None, drafter: str) -> int | None:
    """Drafts a round: as asked, else what serves the drafter best; None: all that it proposes."""
    from dflash_jax.weights.hub import DEMO

    return DEMO_DRAFT_LEN if asked is None and drafter == DEMO else asked


def _served_length(target: str) -> int:
    """What the demo needs and no more (a short start), within the target's positions."""
    from dflash_jax import TargetConfig
    from dflash_jax.weights.hub import resolve_model

    config = TargetConfig.from_folder(Path(resolve_model(target)))
    return min(SERVED_LENGTH, config.max_position_embeddings)


def _ids(llm: "LLM", prompt: str) -> list[int]:
    """The prompt as a user's turn; as bare text for a model without a chat template."""
    if llm.tokenizer is not None and not llm.tokenizer.has_chat_template:
        return llm.tokenizer.encode(prompt)
    return llm.chat_ids([{"role": "user", "content": prompt}])


def _stream(llm: "LLM", prompt: str, max_tokens: int, *, show: bool) -> float:
    """Streams the answer; returns when its first piece came, on `time.perf_counter`."""
    from dflash_jax import SamplingParams

    came: list[float] = []

    def write(piece: str) -> None:
        came.append(time.perf_counter())
        (output.write_text if show else output.drop_text)(piece)

    pieces = llm.stream(_ids(llm, prompt), SamplingParams(max_tokens=max_tokens))
    if show:
        note(f"\n> {prompt}\n", style="bold")
    output.follow(pieces, write)
    if show:
        output.write_text("\n")
    return came[0] if came else time.perf_counter()


def _compare(
    plain: "LLM", pair: "LLM", prompts: list[str], max_tokens: int, bars: Bars
) -> list[Result]:
    """Both engines on every prompt in turn, so that a change of the machine's load meets both."""
    results: list[Result] = []
    listed = [_ids(pair, prompt) for prompt in prompts]
    for llm in (plain, pair):
        measure(llm, listed[0], min(max_tokens, _WARM_UP_TOKENS))
    for prompt, ids in zip(prompts, listed, strict=True):
        bars("measure", len(results), len(prompts))
        runs = [measure(llm, ids, max_tokens) for llm in (plain, pair)]
        results.append(Result(prompt, *runs))
    bars("measure", len(prompts), len(prompts))
    return results


def _document(results: list[Result]) -> dict[str, Any]:
    plain = median_rate([result.plain for result in results])
    dflash = median_rate([result.dflash for result in results])
    return {
        "identical": all(result.identical for result in results),
        "plain": {"tokens_per_second": plain},
        "dflash": {
            "tokens_per_second": dflash,
            "acceptance_length": pooled_acceptance_length([result.dflash for result in results]),
        },
        "speedup": _ratio(dflash, plain),
        "measured": MEASURED,
        "prompts": [_row_document(result) for result in results],
    }


def _row_document(result: Result) -> dict[str, Any]:
    stats = result.dflash.completion.stats
    return {
        "prompt": result.prompt,
        "text": result.dflash.completion.text,
        "identical": result.identical,
        "num_tokens": len(result.dflash.completion.token_ids),
        "plain": {"tokens_per_second": result.plain.tokens_per_second},
        "dflash": {
            "tokens_per_second": result.dflash.tokens_per_second,
            "acceptance_length": stats.acceptance_length if stats.num_rounds else None,
        },
    }


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under is not None else None


def _show(results: list[Result], document: dict[str, Any], pair: "LLM") -> None:
    rows = [
        _cells(textwrap.shorten(row["prompt"], _PROMPT_WIDTH, placeholder=" …"), row)
        for row in document["prompts"]
    ]
    config = pair.config
    output.print_table(
        ["prompt", "plain", "DFlash", "speed-up", "acceptance\nlength", "same\ntext"],
        rows,
        title=f"plain decoding and DFlash ({config.max_draft_len} drafts a round, {config.dtype})",
        total=_cells("median; all rounds", document),
        caption=f"{MEASURED}. First token: {document['seconds_to_first_token']:.1f} s after the "
        "command began, download left out.",
    )
    note(verdict(document["speedup"]))
    if not document["identical"]:
        same = sum(result.identical for result in results)
        note(
            f"{same} of {len(results)} texts are the same: two ways to compute one logit may "
            "differ in their last bits, so that a near tie goes the other way",
            style="yellow",
        )


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    plain, dflash = row["plain"]["tokens_per_second"], row["dflash"]["tokens_per_second"]
    return [
        name,
        _number(plain, ".1f"),
        _number(dflash, ".1f"),
        _number(_ratio(dflash, plain), ".2f"),
        _number(row["dflash"]["acceptance_length"], ".2f"),
        "yes" if row["identical"] else "no",
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
