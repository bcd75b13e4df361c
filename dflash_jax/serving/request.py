"""What a user asks for and gets back: `SamplingParams`, `Completion`, `DecodeStats`.

Plain records with their own checks; nothing here knows about slots or devices. What depends on the
model (is there a text, such an id, room for so many tokens?) is checked in `intake.py`; the ranges
of the options are in `option_rules.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from dflash_jax.errors import RequestError
from dflash_jax.serving.option_rules import CONVERSIONS, MAX_SEED, findings

FinishReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one answer is decoded. What cannot be honoured is refused, never ignored.

    Numbers of NumPy are taken as Python's, lists as tuples.

    Attributes:
        temperature: 0 is greedy: the most likely token, always.
        top_p: draws from the smallest set of tokens that holds this share; 1 = all.
        top_k: draws from this many most likely tokens; 0 (or -1) = all.
        min_p: draws from tokens with at least this share of the most likely one's; 0 = all.
        max_tokens: most ids of an answer.
        min_tokens: least ids of an answer: before them no id and no stop string ends it.
        stop: texts that end the answer and are not part of it.
        stop_token_ids: ids that end the answer, beside the model's own, and are part of it.
        ignore_eos: goes on past the model's end ids, not past `stop_token_ids`.
        seed: fixes the draws of a sampled request wherever it runs, with a drafter and without;
            None: other draws in every run, by a rule that keeps more drafts (`rejection.py`).
        n: answers; each has a seed of its own (`sample_seed`), so with temperature 0 all are equal.
        logprobs: log-probabilities of the answer's ids, and of this many best ones beside each;
            None = not reported.
        presence_penalty: lowers the logit of each token that the answer holds already.
        frequency_penalty: the same for each time that it holds it.
        repetition_penalty: divides (or multiplies, below 0) the logits of tokens that the prompt
            or the answer holds; 1 = off.
        logit_bias: from token id (a number, or its digits as JSON has them) to what its logit is
            raised by.
        speculate: False decodes this request without drafts; a greedy or seeded text stays the
            same, any other its distribution.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        for name, convert in CONVERSIONS.items():
            object.__setattr__(self, name, convert(getattr(self, name)))

    def check(self) -> None:
        """Refuses values that are out of range.

        Raises:
            RequestError: all findings at once.
        """
        found = findings(vars(self))
        if found:
            raise RequestError("; ".join(found))


def sample_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request with n > 1, from 0 to 2^32 - 1.

    Answer 0 has the request's own, so that n = 1 and the first of many are the same text. The
    others have mix(seed + index x 0x9E3779B9 mod 2^32): the steps of SplitMix (Steele, Lea and
    Flood, 2014) in 32 bits, with the finaliser of MurmurHash3 (A. Appleby) as mix. It is bijective,
    so no two of them are equal.
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B9) & MAX_SEED
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & MAX_SEED
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & MAX_SEED
    return mixed ^ (mixed >> 16)


class TokenLogprob(NamedTuple):
    """Log-probability of one id of an answer, under the target's own logits before any option.

    Attributes:
        top: (token id, log-probability) of the best ones, best first; empty when only the chosen
            one was asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass
class DecodeStats:
    """What decoding one answer took; a round is one draft + verify + accept.

    Attributes:
        acceptance_lengths: tokens *delivered* by each round, bonus included; what a stop or
            max_tokens cut off is not counted.
        drafts_per_round: proposals of each round, 0 where the row did not draft.
        accepted_drafts_per_round: proposals that the target agreed with, delivered or not.
        unqualified: why the engine's combination is not qualified, where `allow_unqualified`
            admitted it; None: it is.
        reused_prompt_tokens: first tokens of the prompt that were not computed, for a slot or page
            held their keys and values.
        context_reused_tokens: of those, how many the drafter's context was taken over for too; of
            the rest the drafter knows nothing.
        recoveries: times that it was prefilled again after a failed execution.
        speculation: what it was decoded with: "dflash", "suffix" or "none".
        stopped_drafting_at: tokens of prompt and answer when it stopped drafting for good, at the
            end of the drafter's positions; None: it did not.
        notes: sentences on what else was decided on the way (drafting narrowed by load).
    """

    acceptance_lengths: list[int] = dataclasses.field(default_factory=list)
    drafts_per_round: list[int] = dataclasses.field(default_factory=list)
    accepted_drafts_per_round: list[int] = dataclasses.field(default_factory=list)
    unqualified: str | None = None
    reused_prompt_tokens: int = 0
    context_reused_tokens: int = 0
    recoveries: int = 0
    speculation: str = "none"
    stopped_drafting_at: int | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def trim(self, tokens: int) -> None:
        """Takes the last `tokens` off the rounds that delivered them, for a stop string cut them.

        No round goes below 0 and none is dropped; what is left over was the prefill's one token.
        """
        for index in reversed(range(len(self.acceptance_lengths))):
            taken = min(tokens, self.acceptance_lengths[index])
            self.acceptance_lengths[index] -= taken
            tokens -= taken

    @property
    def num_rounds(self) -> int:
        return len(self.acceptance_lengths)

    @property
    def num_drafts(self) -> int:
        return sum(self.drafts_per_round)

    @property
    def num_accepted_drafts(self) -> int:
        return sum(self.accepted_drafts_per_round)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens delivered by a round (pooled); 0.0 before the first."""
        return sum(self.acceptance_lengths) / self.num_rounds if self.num_rounds else 0.0


@dataclasses.dataclass
class Completion:
    """The answer to one request.

    Attributes:
        finish_reason: "stop" (an end id or a stop string), "length" (max_tokens), or "abort"
            (refused, cancelled or failed; see `error`).
        token_ids: delivered ids, the end id included; they end with the text (`output.py`).
        logprobs: one for each of the ids; None where the request did not ask for them.
        choices: all n answers, this one first.
        error: why it was aborted, None otherwise.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    choices: list["Completion"] = dataclasses.field(default_factory=list)
    stats: DecodeStats = dataclasses.field(default_factory=DecodeStats)
    error: str | None = None
