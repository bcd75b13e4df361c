"""Which values the options of a request may have: taken as Python's own, then checked one by one.

Plain values in, values and sentences out. What an option means is in `request.py`, how it is
carried out in `decoding/`; what depends on the model is checked in `intake.py`.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from numbers import Real
from typing import Any, NamedTuple

from dflash_jax.arena.sizes import MAX_BIAS

MAX_SEED = 2**32 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
_MAX_INT32 = 2**31 - 1


def findings(options: Mapping[str, Any]) -> list[str]:
    """What is wrong with the fields of a `SamplingParams`, one sentence each."""
    found = [
        f"{rule.name}={_shown(options[rule.name])}: {rule.needed} is needed"
        for rule in _RULES
        if not rule.holds(options[rule.name])
    ]
    least, most = options["min_tokens"], options["max_tokens"]
    if _is_whole(least, 0) and _is_whole(most, 1) and least > most:
        found.append(
            f"min_tokens={least} is beyond max_tokens={most}: lower the one or raise the other"
        )
    return found


def _shown(value: Any) -> str:
    """A value as a message can bear it."""
    text = repr(value)
    if len(text) <= 80:
        return text
    return f"{text[:77]}..." + (f" ({len(value)} of them)" if isinstance(value, Sized) else "")


def _whole(value: Any) -> Any:
    """A whole number of any library as an int; anything else as it is, for `check` to refuse."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _real(value: Any) -> Any:
    """A real number of any library as a float; anything else as it is."""
    value = _whole(value)
    if not isinstance(value, Real) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _count(value: Any) -> Any:
    """`top_k`: -1 says the same as 0, all of them."""
    return 0 if _is_whole(value := _whole(value), -1, -1) else value


def _ids(value: Any) -> Any:
    """Any list of ids as a tuple; anything else as it is."""
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
        return value
    try:
        return tuple(map(_whole, value))
    except TypeError:  # an array without axes
        return value


def _texts(value: Any) -> Any:
    """One text or a list of them as a tuple, none as an empty one; anything else as it is."""
    if isinstance(value, str):
        return (value,)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) else value


def _biases(value: Any) -> Any:
    """Ids as numbers where they are digits, an empty mapping as None; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    pairs = ((_digits(key), _real(bias)) for key, bias in value.items())
    return dict(pairs) or None


def _digits(key: Any) -> Any:
    is_number = isinstance(key, str) and key.isascii() and key.isdigit()
    return int(key) if is_number and len(key) <= len(str(_MAX_INT32)) else _whole(key)


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "seed", "n", "logprobs"), _whole),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _real),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), _real),
    "top_k": _count,
    "stop_token_ids": _ids,
    "stop": _texts,
    "logit_bias": _biases,
}
"""How each option is made a value of Python's own; what cannot be is left for `findings`."""


def _is_whole(value: object, low: int, high: int | None = None) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value >= low and (high is None or value <= high)


def _is_within(value: object, low: float, high: float) -> bool:
    return isinstance(value, float) and low <= value <= high


def _are_stops(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) > MAX_STOPS:
        return False
    return all(isinstance(text, str) and text for text in value)


def _are_ids(value: object) -> bool:
    # The highest int32 stands for "no id" on the device.
    return isinstance(value, tuple) and all(_is_whole(id_, 0, _MAX_INT32 - 1) for id_ in value)


def _are_biases(value: object) -> bool:
    return value is None or (
        isinstance(value, Mapping)
        and len(value) <= MAX_BIAS
        and all(
            _is_whole(id_, 0) and _is_within(bias, -100.0, 100.0) for id_, bias in value.items()
        )
    )


class _Rule(NamedTuple):
    name: str
    holds: Callable[[Any], bool]
    needed: str


_RULES = (
    _Rule(
        "temperature",
        lambda x: _is_within(x, 0.0, 1e4) and x < 1e4,
        "a number >= 0 and below 10000",
    ),
    _Rule("top_p", lambda x: _is_within(x, 0.0, 1.0) and x > 0, "a number above 0, up to 1,"),
    _Rule(
        "top_k", lambda x: _is_whole(x, 0, _MAX_INT32), f"a whole number from -1 to {_MAX_INT32}"
    ),
    _Rule("min_p", lambda x: _is_within(x, 0.0, 1.0), "a number from 0 to 1"),
    _Rule("max_tokens", lambda x: _is_whole(x, 1), "a whole number >= 1"),
    _Rule("min_tokens", lambda x: _is_whole(x, 0), "a whole number >= 0"),
    _Rule("stop", _are_stops, f"a text, or a list of up to {MAX_STOPS}, none of them empty,"),
    _Rule("stop_token_ids", _are_ids, f"a list of ids from 0 to {_MAX_INT32 - 1}"),
    _Rule("ignore_eos", lambda x: isinstance(x, bool), "True or False"),
    _Rule(
        "seed",
        lambda x: x is None or _is_whole(x, 0, MAX_SEED),
        f"a whole number from 0 to {MAX_SEED}",
    ),
    _Rule("n", lambda x: _is_whole(x, 1, MAX_CHOICES), f"a whole number from 1 to {MAX_CHOICES}"),
    _Rule(
        "logprobs",
        lambda x: x is None or _is_whole(x, 0, MAX_LOGPROBS),
        f"None or a whole number from 0 to {MAX_LOGPROBS}",
    ),
    _Rule("presence_penalty", lambda x: _is_within(x, -2.0, 2.0), "a number from -2 to 2"),
    _Rule("frequency_penalty", lambda x: _is_within(x, -2.0, 2.0), "a number from -2 to 2"),
    # Logits are divided by it in float32: far below, they would overflow.
    _Rule(
        "repetition_penalty", lambda x: _is_within(x, 1e-4, 1e4), "a number from 0.0001 to 10000"
    ),
    _Rule(
        "logit_bias",
        _are_biases,
        f"a mapping of up to {MAX_BIAS} token ids to numbers from -100 to 100",
    ),
    _Rule("speculate", lambda x: isinstance(x, bool), "True or False"),
)
