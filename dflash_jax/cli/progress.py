"""Progress bars on stderr, fed by the library's `progress(stage, done, total)` callbacks.

One bar a stage, in the order in which the stages report; where stderr is no terminal, as in the
background, a line a minute in their place. The library names stages, this file says what they are
called; nothing here measures anything.
"""

import time
from types import TracebackType

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from dflash_jax.cli.terminal import STDERR, note

LABELS = {
    "download": "fetching the demo model",
    "check": "checking its hash",
    "convert": "converting it",
    "load": "loading weights",
    "compile": "compiling",
    "generate": "generating",
    "measure": "measuring",
    "features": "tokens with features",
    "train": "training",
}
SECONDS_BETWEEN_LINES = 60
IN_BYTES = ("download", "check", "convert")


class Bars:
    """A callback for `progress=`; draws while its `with` block runs and is silent outside it.

    with Bars() as bars:
        llm = LLM(target, progress=bars)
    """

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            _Amount(),
            TimeElapsedColumn(),
            console=STDERR,
        )
        self._tasks: dict[str, TaskID] = {}
        self._live = False
        self._said = time.monotonic()

    def __enter__(self) -> "Bars":
        self._progress.start()
        self._live, self._said = True, time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live = False
        self._progress.live.transient = error is not None  # half a bar says nothing
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Moves the bar of `stage`; a total of 0 means unknown."""
        if not self._live:
            return
        if stage not in self._tasks:
            self._finish_unknown()
            label = LABELS.get(stage, stage)
            self._tasks[stage] = self._progress.add_task(
                label, total=total or None, in_bytes=stage in IN_BYTES
            )
        self._progress.update(self._tasks[stage], completed=done, total=total or None)
        if not STDERR.is_terminal and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            task = next(task for task in self._progress.tasks if task.id == self._tasks[stage])
            note(f"{task.description} {_Amount().render(task)}".rstrip())

    def _finish_unknown(self) -> None:
        """A stage whose total was never known ends when the next one begins."""
        for task in self._progress.tasks:
            if task.total is None:
                self._progress.update(task.id, total=1, completed=1)


class _Amount(ProgressColumn):
    """`3/8`, or megabytes for files; nothing while the total is not known."""

    def render(self, task: Task) -> Text:
        if task.total is None or (task.fields["in_bytes"] and task.total == 1):
            return Text("")
        if task.fields["in_bytes"]:
            return Text(f"{task.completed / 1e6:.0f}/{task.total / 1e6:.0f} MB")
        return Text(f"{int(task.completed)}/{int(task.total)}")
