"""What a user asks for and gets back: `SamplingParams`, `Completion`, `DecodeStats`.

Plain records with their own checks; nothing here knows about slots or devices.
"""

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence, Sized
from numbers import Real
from typing import Any, Literal

from dflash_jax.errors import RequestError

FinishReason = Literal["stop", "length", "abort"]
MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. What this build cannot honour is refused, never ignored.

    `temperature` 0 is greedy. `seed` fixes the draws of a sampled request wherever it runs; None
    draws one. `ignore_eos` goes on past the model's end ids, not past `stop_token_ids`. Numbers of
    NumPy are taken as Python's.
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
        for name in _WHOLE:
            object.__setattr__(self, name, _whole(getattr(self, name)))
        for name in _REAL:
            object.__setattr__(self, name, _real(getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", _ids(self.stop_token_ids))

    def check(self) -> None:
        """Refuses values that are out of range or that this build has no code for.

        Raises:
            RequestError: all findings at once.
        """
        findings = self._unsupported()
        if not (_is_number(self.temperature) and 0 <= self.temperature < 1e4):
            findings.append(f"temperature={self.temperature!r}: a number >= 0 is needed")
        if not _is_whole(self.max_tokens, 1):
            findings.append(f"max_tokens={self.max_tokens!r}: a whole number >= 1 is needed")
        if self.seed is not None and not _is_whole(self.seed, 0, MAX_SEED):
            findings.append(f"seed={self.seed!r}: a whole number from 0 to {MAX_SEED} is needed")
        ids = self.stop_token_ids
        if not (isinstance(ids, tuple) and all(_is_whole(token, 0) for token in ids)):
            findings.append(f"stop_token_ids={self.stop_token_ids!r}: a list of ids is needed")
        if findings:
            raise RequestError("; ".join(findings))

    def _unsupported(self) -> list[str]:
        defaults = SamplingParams.__dataclass_fields__
        return [
            f"{name}={getattr(self, name)!r} is not supported by this build: leave it at "
            f"{defaults[name].default!r}"
            for name in _UNSUPPORTED
            if getattr(self, name) != defaults[name].default
            # An empty list of stops or biases wishes for nothing.
            and not (isinstance(getattr(self, name), Sized) and not len(getattr(self, name)))
        ]


_WHOLE = ("top_k", "max_tokens", "min_tokens", "seed", "n", "logprobs")
_REAL = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_UNSUPPORTED = (
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "stop",
    "n",
    "logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "speculate",
)


def _whole(value: Any) -> Any:
    """A whole number of any library as an int; anything else as it is, for `check` to refuse."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _real(value: Any) -> Any:
    """A real number of any library as a float (an int stays one); anything else as it is."""
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value


def _ids(value: Any) -> Any:
    """Any list of ids as a tuple; anything else as it is."""
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
        return value
    try:
        return tuple(map(_whole, value))
    except TypeError:  # an array without axes
        return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object, low: int, high: int | None = None) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value >= low and (high is None or value <= high)


@dataclasses.dataclass
class DecodeStats:
    """What decoding one request took; a round is one draft + verify + accept.

    Attributes:
        acceptance_lengths: tokens *delivered* by each round, bonus included; what a stop or
            max_tokens cut off is not counted.
        drafts_per_round: proposals of each round, 0 where the row did not draft.
        accepted_drafts_per_round: proposals that the target agreed with, delivered or not.
        unqualified: why the engine's combination is not qualified, where `allow_unqualified`
            admitted it; None: it is.
    """

    acceptance_lengths: list[int] = dataclasses.field(default_factory=list)
    drafts_per_round: list[int] = dataclasses.field(default_factory=list)
    accepted_drafts_per_round: list[int] = dataclasses.field(default_factory=list)
    unqualified: str | None = None

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
        finish_reason: "stop" (an end id), "length" (max_tokens), or "abort" (refused; see `error`).
        token_ids: delivered ids, the end id included.
        error: why the request was refused, None otherwise.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    logprobs: Any = None
    choices: list["Completion"] = dataclasses.field(default_factory=list)
    stats: DecodeStats = dataclasses.field(default_factory=DecodeStats)
    error: str | None = None
