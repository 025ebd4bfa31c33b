"""A bar with a note on a terminal; lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_EVERY = 30.0  # seconds between lines


class Bar:
    """Progress of one part of a training, on stderr."""

    def __init__(self, label: str) -> None:
        """Nothing is shown before the `with` block."""
        self._label, self._last = label, time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Bar:
        """Start."""
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            parts = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn())
            text = progress.TextColumn("{task.description}")
            self._bar = progress.Progress(text, *parts, console=Console(stderr=True))
            self._task = self._bar.add_task(self._label, total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int, note: str = "") -> None:
        """Say how far it is."""
        label = f"{self._label}: {note}" if note else self._label
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=label)
        elif time.monotonic() - self._last > _EVERY or done == total:
            self._last = time.monotonic()
            print(f"{label}, {done} of {total}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)
