"""`dflash-jax train`: a drafter for a target, from a file of prompts to a folder that loads.

The stages and what they keep are `training/run.py`; the engine that answers the prompts is
`answers.py`. A killed run goes on where it stopped when it is started again with the same options.
"""

import dataclasses
import enum
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_jax.cli import options, output
from dflash_jax.cli.logs import notes_shown
from dflash_jax.cli.progress import Bars
from dflash_jax.cli.start import fetch_demo, start_llm

if TYPE_CHECKING:
    from dflash_jax import LLM
    from dflash_jax.training.corpus import CorpusOptions
    from dflash_jax.training.made_up import PromptOptions
    from dflash_jax.training.options import TrainOptions
    from dflash_jax.training.trainer import Trained


class Optimizer(enum.StrEnum):
    """As `TrainOptions.optimizer`."""

    ADAMW = "adamw"
    MUON = "muon"


class Loss(enum.StrEnum):
    """As `TrainOptions.loss`."""

    DECAYED = "decayed"
    DPACE = "dpace"


def train(
    target: options.TargetArgument,
    prompts: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help='JSONL, each line {"turns": ["user turn", ...]} or {"messages": [...]}.',
        ),
    ],
    drafter: Annotated[Path, typer.Argument(help="The folder to write the drafter to.")],
    mask_token_id: Annotated[
        int, typer.Option("--mask-token-id", help="A reserved id that text never holds.")
    ],
    work: Annotated[
        Path | None,
        typer.Option("--work", help="Corpus, features, checkpoints; default: DRAFTER.work."),
    ] = None,
    made_up: Annotated[
        int, typer.Option("--made-up", help="Prompts that the target makes up besides.")
    ] = 0,
    max_answer_tokens: Annotated[
        int, typer.Option("--max-answer-tokens", help="Answers are cut there.")
    ] = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", help="Longer prompts are left out, and counted.")
    ] = 256,
    answer_temperature: Annotated[
        float, typer.Option("--answer-temperature", help="Of the target's answers; 0 = greedy.")
    ] = 0.0,
    whole_answers: Annotated[
        bool, typer.Option("--whole-answers", help="Leave out answers cut by length or as a loop.")
    ] = False,
    max_batch_size: options.MaxBatchSizeOption = None,
    layers: Annotated[int, typer.Option("--layers", help="Layers of the drafter.")] = 3,
    taps: Annotated[int, typer.Option("--taps", help="Target layers that it reads.")] = 5,
    block_size: Annotated[
        int, typer.Option("--block-size", help="Slots of a block; one less is drafted.")
    ] = 8,
    intermediate_size: Annotated[
        int | None, typer.Option("--intermediate-size", help="MLP width; default: the target's.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Optimiser steps.")] = 2000,
    documents: Annotated[int, typer.Option("--documents", help="Answers of a step.")] = 8,
    anchors: Annotated[int, typer.Option("--anchors", help="Blocks of an answer a step.")] = 32,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="At its peak.")] = 1e-3,
    optimizer: Annotated[Optimizer, typer.Option("--optimizer")] = Optimizer.ADAMW,
    loss: Annotated[Loss, typer.Option("--loss", help="How slots are weighted.")] = Loss.DECAYED,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.")] = 0,
    json: options.JsonOption = False,
) -> None:
    """Train a drafter: the target answers prompts, the drafter learns its answers.

    The same command goes on where a killed one stopped; its work folder may be removed when it is
    done.
    """
    from dflash_jax.training.corpus import CorpusOptions
    from dflash_jax.training.made_up import PromptOptions
    from dflash_jax.training.options import TrainOptions

    asked = TrainOptions(
        mask_token_id=mask_token_id,
        num_layers=layers,
        num_taps=taps,
        block_size=block_size,
        intermediate_size=intermediate_size,
        steps=steps,
        documents_per_step=documents,
        anchors_per_document=anchors,
        learning_rate=learning_rate,
        optimizer=optimizer.value,
        loss=loss.value,
        seed=seed,
    )
    corpus = CorpusOptions(
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_answer_tokens,
        keep_cut=not whole_answers,
        answer_temperature=answer_temperature,
        seed=seed,
    )
    made = PromptOptions(made_up=made_up, seed=seed)
    work = work or drafter.with_name(drafter.name + ".work")
    begun = time.perf_counter()
    with notes_shown():
        trained = _train(
            target, prompts, drafter, work, asked, corpus, made, max_batch_size=max_batch_size
        )
    document = _document(drafter, trained, time.perf_counter() - begun)
    if json:
        output.print_json(document)
    else:
        _show(document)


def _train(
    target: str,
    prompts: Path,
    drafter: Path,
    work: Path,
    asked: "TrainOptions",
    corpus: "CorpusOptions",
    made: "PromptOptions",
    *,
    max_batch_size: int | None,
) -> "Trained":
    """Checks what files and options can tell, and trains; the engine starts when it is needed."""
    from dflash_jax.cli.answers import Answers
    from dflash_jax.config import TargetConfig
    from dflash_jax.serving.text import Tokenizer
    from dflash_jax.training.options import drafter_config
    from dflash_jax.training.run import train_drafter
    from dflash_jax.weights.hub import resolve_model

    with Bars() as bars:
        fetch_demo(target, bars)
    folder = resolve_model(target)
    config = TargetConfig.from_folder(folder)
    drafter_config(config, asked)
    if config.vocab_size <= asked.frequent + asked.extra:
        asked = dataclasses.replace(asked, frequent=0)  # no rows are left to sample from

    def start() -> "LLM":
        longest = max(corpus.max_answer_tokens, corpus.max_prompt_tokens if made.made_up else 0)
        with Bars() as bars:
            return start_llm(
                target,
                None,
                bars,
                max_seq_len=corpus.max_prompt_tokens + longest,
                max_batch_size=max_batch_size,
                prefix_reuse=False,
            )

    has_tokenizer = (folder / "tokenizer.json").is_file()
    return train_drafter(
        folder,
        prompts,
        drafter,
        asked,
        engine=Answers(Tokenizer.from_folder(folder) if has_tokenizer else None, start),
        work_folder=work,
        prompts=made,
        corpus=corpus,
    )


def _document(drafter: Path, trained: "Trained", seconds: float) -> dict[str, Any]:
    held = trained.held_out
    return {
        "drafter": str(drafter),
        "steps": trained.steps,
        "held_out": None if held is None else held._asdict(),
        "seconds": seconds,
    }


def _show(document: dict[str, Any]) -> None:
    held = document["held_out"]
    facts = {
        "drafter": document["drafter"],
        "steps": str(document["steps"]),
        "seconds": f"{document['seconds']:.0f}",
    }
    if held is not None:
        facts["held-out accepted run"] = f"{held['accepted']:.2f} tokens, teacher-forced"
    output.print_facts(facts)
