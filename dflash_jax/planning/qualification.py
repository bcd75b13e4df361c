"""Which combinations may run: not what they could do, but what has been shown of them.

The counterpart of the reference's gate for FlashInfer target attention. Three standings:
`qualified` (evidence is named), `reference` (xla: what the others are held to; admitted everywhere,
and said to be unmeasured where it is) and `unqualified` (refused with the grounds; admitted by
`allow_unqualified=True` with one warning). Grounds state what is missing, never a defect that
nobody has seen.
"""

from typing import Literal, NamedTuple

Name = Literal["qualified", "reference", "unqualified"]

# Kernels of their own, whose long contexts and reuse nobody has measured here.
_KERNELS = ("pallas", "cudnn")


class Combination(NamedTuple):
    """The key of the table."""

    platform: str
    attention: str
    kv_layout: str
    speculation: str


class Standing(NamedTuple):
    """What is known of a combination: evidence where qualified, grounds where not."""

    name: Name
    grounds: str


class Mode(NamedTuple):
    """A drafting method as the gate sees it.

    Attributes:
        name: as users write it.
        in_engine: whether it drafts inside the compiled engine, beside the target's attention.
        draft_kv: whether it has K/V of its own; the target's, shared, and none at all do not count.
    """

    name: str
    in_engine: bool
    draft_kv: bool


class Admission(NamedTuple):
    """Both None: admitted in silence."""

    finding: str | None
    warning: str | None


NO_DRAFTING = Mode("none", in_engine=False, draft_kv=False)
SUFFIX = Mode("suffix", in_engine=True, draft_kv=False)
DFLASH = Mode("dflash", in_engine=True, draft_kv=True)
MODES = {mode.name: mode for mode in (NO_DRAFTING, SUFFIX, DFLASH)}

_TESTED = "tests, benchmarks/RESULTS.md"
_EVIDENCE: dict[Combination, str] = {
    Combination("cpu", "xla", "contiguous", "none"): _TESTED,
    Combination("cpu", "xla", "contiguous", "dflash"): _TESTED,
    Combination("cpu", "xla", "contiguous", "suffix"): _TESTED,
}


def needs_separate_draft_kv(mode: Mode, *, context_store: str = "arena") -> bool:
    """Whether a mode needs draft K/V from the manager that the target's K/V comes from.

    A mode without K/V of its own, or outside the engine, needs none; a private arena is the
    drafter's own business.
    """
    return mode.in_engine and mode.draft_kv and context_store == "pool"


def supported(attention: str, mode: Mode) -> bool:
    """The gate alone: a kernel of its own is shown for modes without draft K/V only.

    DFlash is not, whatever the drafter's attention and wherever its context lies.
    """
    return attention not in _KERNELS or not mode.in_engine or not mode.draft_kv


def standing(combination: Combination) -> Standing:
    """What is known of a combination."""
    evidence = _EVIDENCE.get(combination)
    if evidence is not None:
        return Standing("qualified", evidence)
    mode = MODES[combination.speculation]
    if combination.attention == "xla":
        return Standing("reference", "not measured")
    if supported(combination.attention, mode):
        return Standing("reference", "no draft K/V; not measured")
    return Standing(
        "unqualified",
        "long contexts, reuse under pressure and accuracy: not measured",
    )


def admit(
    combination: Combination, *, allow_unqualified: bool, mode: Mode | None = None
) -> Admission:
    """Whether a combination may run, with the words for the user.

    Args:
        mode: a drafting method that is not in the table.
    """
    mode = MODES[combination.speculation] if mode is None else mode
    if supported(combination.attention, mode):
        return Admission(None, None)
    grounds = _grounds(combination, mode)
    if allow_unqualified:
        return Admission(None, f"{grounds}; admitted by allow_unqualified=True")
    return Admission(
        f"{grounds}: use attention='xla', or admit it with allow_unqualified=True to measure it",
        None,
    )


def _grounds(combination: Combination, mode: Mode) -> str:
    if mode != DFLASH:
        return (
            f"speculation={mode.name!r} needs draft K/V apart from the target's, which is not "
            f"supported with attention={combination.attention!r}"
        )
    return (
        f"speculation='dflash' is not qualified with attention={combination.attention!r}, whatever "
        f"the drafter's attention and context store: {standing(combination).grounds}"
    )


def table(platforms: tuple[str, ...] = ("cpu", "gpu")) -> list[tuple[Combination, Standing]]:
    """Every combination of what there is, for people."""
    return [
        (combination, standing(combination))
        for platform in platforms
        for attention in ("xla", *_KERNELS)
        for layout in ("contiguous", "paged")
        for speculation in MODES
        for combination in (Combination(platform, attention, layout, speculation),)
        if not (platform == "cpu" and attention == "cudnn")
    ]
