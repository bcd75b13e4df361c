"""What compiled programs need besides their arguments: gate (iii), before anything is allocated.

`memory_analysis()` is a cross-check from outside: fields are absent or 0 on some versions and
devices, so the plan's own floor stays where it says less.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """The most that one program needs for itself.

    Attributes:
        program: its name.
        temporaries: bytes of its temporaries and of what it returns in fresh memory.
        programs: the same of every program.
    """

    program: str
    temporaries: int
    programs: Mapping[str, int]


def measure(programs: Mapping[str, Any]) -> Measured | None:
    """The largest need among compiled programs; None where none of them says or all say 0.

    Programs run one after another from one pool, so the largest counts, not the sum.
    """
    needs = {name: _need(program.memory_analysis()) for name, program in programs.items()}
    known = {name: need for name, need in needs.items() if need is not None}
    if not any(known.values()):
        return None
    largest = max(known, key=lambda name: known[name])
    return Measured(largest, known[largest], known)


def _need(analysis: Any) -> int | None:
    temporaries = getattr(analysis, "temp_size_in_bytes", None)
    if temporaries is None or temporaries < 0:
        return None
    output = getattr(analysis, "output_size_in_bytes", 0) or 0
    alias = getattr(analysis, "alias_size_in_bytes", 0) or 0
    return temporaries + max(0, output - alias)
