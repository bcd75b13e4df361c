"""`dflash-jax generate`: answers to one prompt or many, as text or as one JSON document.

One prompt is streamed; many run as a batch under a progress bar and are printed in their order.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_jax.cli import options, output
from dflash_jax.cli.progress import Bars
from dflash_jax.cli.prompts import Messages, Prompt, prompts_from_file, prompts_from_words
from dflash_jax.cli.start import start_llm
from dflash_jax.cli.terminal import note

if TYPE_CHECKING:
    from dflash_jax import LLM, Completion, SamplingParams

LARGEST_BATCH = 16


def generate(
    target: options.TargetArgument,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to go on from.")
    ] = None,
    drafter: options.DrafterOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            exists=True,
            dir_okay=False,
            metavar="FILE.jsonl",
            help="More prompts, one JSON value a line: text, ids, or an object with prompt, turns "
            "or messages (the latter two through the chat template).",
        ),
    ] = None,
    max_tokens: options.MaxTokensOption = 256,
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = None,
    max_seq_len: options.MaxSeqLenOption = None,
    max_batch_size: options.MaxBatchSizeOption = None,
    max_draft_len: options.MaxDraftLenOption = None,
    speculation: options.SpeculationOption = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end tokens.")
    ] = False,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help='Each PROMPT holds token ids, as in "1 5 9".')
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Continue prompts: text, token ids, or a file of them.

    A text is continued as it stands; chat lays out a conversation. Exit code 1: some requests of a
    batch were refused, the others are done.
    """
    from dflash_jax import SamplingParams

    asked = prompts_from_words(prompt or [], token_ids=token_ids)
    asked += [] if prompts is None else prompts_from_file(prompts)
    if not asked:
        raise typer.BadParameter("give at least one PROMPT, or --prompts FILE.jsonl")
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos
    )
    params.check()
    with Bars() as bars:
        llm = start_llm(
            target,
            drafter,
            bars,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size or min(LARGEST_BATCH, len(asked)),
            max_draft_len=max_draft_len,
            speculation=speculation,
        )
        listed = [_engine_prompt(llm, one) for one in asked]
        begun = time.perf_counter()
        streams = len(listed) == 1 and not json and llm.tokenizer is not None
        completions = [] if streams else llm.generate(listed, params)
    if streams:
        completions = [_streamed(llm, listed[0], params)]
    seconds = time.perf_counter() - begun
    if json:
        output.print_json(_document(target, drafter, completions, seconds))
    else:
        _show(completions, seconds, printed=streams)
    if any(completion.error for completion in completions):
        raise typer.Exit(1)


def _engine_prompt(llm: "LLM", prompt: Prompt) -> str | list[int]:
    return llm.chat_ids(prompt) if isinstance(prompt, Messages) else prompt


def _streamed(llm: "LLM", prompt: str | list[int], params: "SamplingParams") -> "Completion":
    completion = output.follow(llm.stream(prompt, params), output.write_text)
    output.write_text("\n")
    return completion


def _document(
    target: str, drafter: str | None, completions: "Sequence[Completion]", seconds: float
) -> dict:
    return {
        "target": target,
        "drafter": drafter,
        "completions": [output.completion_document(one) for one in completions],
        "seconds": seconds,
    }


def _show(completions: "Sequence[Completion]", seconds: float, *, printed: bool) -> None:
    """Answers on stdout unless they stand there already, then a table of what they took."""
    rows = []
    for number, one in enumerate(completions, 1):
        if not printed:
            if len(completions) > 1:
                note(f"── answer {number} of {len(completions)}", style="dim")
            output.write_text(_readable(one) + "\n")
        drafted = f"{one.stats.acceptance_length:.2f}" if one.stats.num_drafts else "–"
        tokens = (len(one.prompt_token_ids), len(one.token_ids), one.stats.num_rounds)
        rows.append([str(number), *map(str, tokens), drafted, one.error or one.finish_reason])
    made = sum(len(one.token_ids) for one in completions)
    rate = f"{made / seconds:.1f} a second"
    output.print_table(
        ["answer", "prompt tokens", "tokens", "rounds", "acceptance length", "end"],
        rows,
        caption=f"{made} tokens in {seconds:.2f} s, prompts included: {rate}",
    )


def _readable(completion: "Completion") -> str:
    """The text; the ids where the model has no tokenizer."""
    return completion.text or " ".join(map(str, completion.token_ids))
