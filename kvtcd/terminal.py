"""What commands show: text and tables that lose nothing, and progress that a log keeps too.

A terminal is as wide as it is, and cells that are wider go on in the next line. A pipe or file has no width:
lines are as long as what they say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from rich import table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import Progress, ProgressColumn, TaskID

T = TypeVar("T")
Columns = Sequence[tuple[str, Callable[[T], str]]]
"""Headings, and what stands below them for a row."""
_UNBOUNDED = 10_000
"""Characters of a line that nobody has to fit on a screen."""
_EVERY_S = 10.0
"""Seconds between two lines that only say how far something is."""


def console(*, stderr: bool = False) -> Console:
    """Return where a command prints."""
    made = Console(stderr=stderr)
    if not made.is_terminal:
        made.width = _UNBOUNDED
    return made


class Table(table.Table):
    """A table whose cells are folded where a terminal is too narrow, never cut."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out."""
        for column in self.columns:
            column.overflow, column.no_wrap = "fold", False
        yield from super().__rich_console__(console, options)

    def fill(self, columns: Columns[T], rows: Iterable[T], *, left: Collection[str] = ()) -> Table:
        """Add columns, those in `left` of words and all others of figures, and their rows; return itself."""
        for heading, _ in columns:
            self.add_column(heading, justify="left" if heading in left else "right")
        for row in rows:
            self.add_row(*(cell(row) for _, cell in columns))
        return self


def progress(shown: Console, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """Return the progress of a command that prints to `shown`.

    Bars on a terminal; where that is standard error alone, there; without any, lines on standard error: one
    as each piece of work begins, and one every ten seconds while its steps are done.

    Args:
        shown: where the command prints.
        columns: of the bars; rich's without.
        transient: whether the bars go when the work is done.
    """
    if shown.is_interactive:
        return Progress(*columns, console=shown, transient=transient)
    other = console(stderr=True)
    if other.is_interactive:
        return Progress(*columns, console=other, transient=transient, redirect_stdout=False)
    return _Lines(other)


def silent() -> Progress:
    """Return progress that is shown nowhere."""
    return Progress(console=Console(quiet=True), disable=True)


class _Lines(Progress):
    """Progress as lines of text."""

    def __init__(self, shown: Console) -> None:
        super().__init__(console=shown, auto_refresh=False, disable=True)
        self._said = 0.0

    def add_task(self, description: str, *args: Any, **more: Any) -> TaskID:  # noqa: ANN401 - as in Progress
        """Begin, and say so."""
        added = super().add_task(description, *args, **more)
        self._say(added)
        return added

    def update(self, task_id: TaskID, **more: Any) -> None:  # noqa: ANN401 - as in Progress
        """Go on, and say so if it is another thing now, or if it is time to."""
        before = self._tasks[task_id].description
        super().update(task_id, **more)
        self._say(task_id, now=self._tasks[task_id].description != before)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Go on, and say so if it is time to."""
        super().advance(task_id, advance)
        self._say(task_id, now=False)

    def _say(self, number: TaskID, *, now: bool = True) -> None:
        task, clock = self._tasks[number], time.monotonic()
        if not task.description or (not now and clock - self._said < _EVERY_S):
            return
        self._said = clock
        steps = "" if task.total is None else f" of {task.total:,.0f}"
        far = f": {task.completed:,.0f}{steps}, {task.elapsed or 0:.0f} s" if task.completed else ""
        self.console.print(task.description + far, markup=False, highlight=False)
