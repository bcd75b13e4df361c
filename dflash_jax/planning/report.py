"""Text of a plan: sizes, a table, a bar of the device's memory. Pure strings, no colours.

What the rows mean is decided in `plan.py`.
"""

from collections.abc import Sequence

from dflash_jax.planning.budget import GIB

_BAR = 60
# What is shown of a plan beyond the device, however far beyond it is.
_MOST_CELLS = 2 * _BAR + 1


def gib(size: int) -> str:
    """`12.34 GiB`; MiB or bytes where that says more."""
    if abs(size) >= GIB // 10:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / 2**20:.2f} MiB" if abs(size) >= 2**14 else f"{size:,} B"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first and the last to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1

    def cell(column: int, text: str) -> str:
        if column == last:
            return text
        return text.rjust(widths[column]) if column else text.ljust(widths[column])

    return ["  ".join(cell(i, text) for i, text in enumerate(row)).rstrip() for row in rows]


def bar(parts: Sequence[tuple[str, int]], total: int) -> list[str]:
    """One line of letters, one letter a part, `.` for what is free, and the legend.

    What passes the device's end is shown behind `]`.
    """
    scale = _BAR / max(total, 1)
    cells, filled, legend = "", 0, []
    for letter, (name, size) in zip("ABCDEFGHIJ", parts, strict=False):
        if not size:
            continue
        end = filled + size
        # At least one cell, so that a part that matters is seen.
        width = max(min(round(end * scale), _MOST_CELLS) - len(cells), 1)
        cells, filled = cells + letter * width, end
        legend.append(f"{letter} {name}")
    inside, beyond = cells[:_BAR], cells[_BAR:]
    shown = f"[{inside.ljust(_BAR, '.')}]"
    if filled > total:
        shown += f"{beyond[:_BAR]}{'…' if len(beyond) > _BAR else ''}  beyond the device"
    return [shown, ", ".join(legend)]
