"""Options of `dflash-jax train` on prompts and answers: fields of `training/corpus.py`.

The training run's own are `train_options.py`.
"""

from typing import Annotated

import typer

MadeUp = Annotated[int, typer.Option("--made-up", help="Prompts that the target makes up besides.")]
MadeUpFrom = Annotated[
    list[str] | None,
    typer.Option(
        "--made-up-from", help="How a made-up prompt begins; repeat it for several, taken in turn."
    ),
]
MaxAnswerTokens = Annotated[int, typer.Option("--max-answer-tokens", help="Answers are cut there.")]
MinAnswerTokens = Annotated[
    int, typer.Option("--min-answer-tokens", help="Shorter answers are left out, and counted.")
]
MaxPromptTokens = Annotated[
    int, typer.Option("--max-prompt-tokens", help="Longer prompts are left out, and counted.")
]
AnswerTemperature = Annotated[
    float, typer.Option("--answer-temperature", help="Of the target's answers; 0 = greedy.")
]
GreedyShare = Annotated[
    float,
    typer.Option("--greedy-share", help="Share of the prompts answered greedily all the same."),
]
WholeAnswers = Annotated[
    bool, typer.Option("--whole-answers", help="Leave out answers cut by length or as a loop.")
]
ShardPrompts = Annotated[
    int,
    typer.Option(
        "--shard-prompts",
        help="Prompts between two files of the corpus: a kill while answering loses at most so "
        "many; fewer leave the batch half empty more often.",
    ),
]
