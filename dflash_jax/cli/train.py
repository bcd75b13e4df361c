"""`dflash-jax train`: a drafter for a target, from a file of prompts to a folder that loads.

The stages and what they keep are `training/run.py`; here an `LLM` is lent to them to answer the
prompts. A killed run goes on where it stopped when it is started again with the same options.
"""

import dataclasses
import enum
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_jax.cli import options, output
from dflash_jax.cli.logs import notes_shown
from dflash_jax.cli.progress import Bars
from dflash_jax.cli.start import fetch_demo, start_llm

if TYPE_CHECKING:
    from dflash_jax import LLM
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
    DISTILL = "distill"
    DISTILL_DPACE = "distill_dpace"


def train(
    target: options.TargetArgument,
    prompts: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help='JSONL, each line {"turns": ["user turn"]}.'
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
    distill_weight: Annotated[
        float, typer.Option("--distill-weight", help="Share of the target's distribution, 0 to 1.")
    ] = 0.5,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.")] = 0,
    json: options.JsonOption = False,
) -> None:
    """Train a drafter: the target answers prompts, the drafter learns its answers.

    The same command goes on where a killed one stopped; its work folder may be removed when it is
    done.
    """
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
        distill_weight=distill_weight,
        seed=seed,
    )
    work = work or drafter.with_name(drafter.name + ".work")
    begun = time.perf_counter()
    with notes_shown():
        trained = _train(
            target, prompts, drafter, work, asked, made_up, max_answer_tokens, max_batch_size
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
    made_up: int,
    max_answer_tokens: int,
    max_batch_size: int | None,
) -> "Trained":
    """Checks what files and options can tell, starts the engine that answers, and trains."""
    from dflash_jax.config import TargetConfig
    from dflash_jax.training.corpus import CorpusOptions
    from dflash_jax.training.options import drafter_config
    from dflash_jax.training.run import PromptOptions, train_drafter
    from dflash_jax.weights.hub import resolve_model

    corpus = CorpusOptions(max_answer_tokens=max_answer_tokens)
    with Bars() as bars:
        fetch_demo(target, bars)
        folder = resolve_model(target)
        config = TargetConfig.from_folder(folder)
        drafter_config(config, asked)
        if config.vocab_size <= asked.frequent + asked.extra:
            asked = dataclasses.replace(asked, frequent=0)  # no rows are left to sample from
        longest = max(corpus.max_prompt_tokens, max_answer_tokens) if made_up else max_answer_tokens
        served = corpus.max_prompt_tokens + longest
        llm = start_llm(target, None, bars, max_seq_len=served, max_batch_size=max_batch_size)
    return train_drafter(
        folder,
        prompts,
        drafter,
        asked,
        engine=Answers(llm),
        work_folder=work,
        prompts=PromptOptions(made_up=made_up, seed=asked.seed),
        corpus=corpus,
    )


class Answers:
    """An `LLM` as the trainer's `AnswerEngine`; request i draws with seed + i."""

    def __init__(self, llm: "LLM"):
        self._llm = llm

    @property
    def tokenizer(self) -> Any:
        """The target's."""
        return self._llm.tokenizer

    def answers(
        self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[tuple[list[int], str]]:
        """Token ids and finish reason of each prompt, in order."""
        from dflash_jax import SamplingParams

        params = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + number)
            for number in range(len(prompts))
        ]
        given = self._llm.generate([list(ids) for ids in prompts], params)
        return [(one.token_ids, one.finish_reason) for one in given]


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
