"""What every loader returns, and the progress that it shows."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jattn.models.decoder import DecoderConfig, Params, make_params, weight_shapes
from jattn.models.tokenizer import TextTokenizer


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model from disk."""

    name: str
    config: DecoderConfig
    params: Params
    tokenizer: TextTokenizer


class Progress:
    """A bar on stderr, if that is a terminal and loading takes longer than `delay` seconds; otherwise silent."""

    def __init__(self, label: str, delay: float = 2.0) -> None:
        """Nothing is shown before the `with` block."""
        self._label, self._delay = label, delay
        self._bar: Any = None

    def __enter__(self) -> Progress:
        """Start the clock."""
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TaskProgressColumn())
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._label, total=None)
            self._timer = threading.Timer(self._delay, self._bar.start)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._timer.cancel()
            self._timer.join()
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Say how far loading is."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)


def read_params(
    config: DecoderConfig,
    read: Callable[[str, int | None, tuple[int, ...]], np.ndarray],
    dtype: Any,
    progress: Progress,
) -> Params:
    """The parameter pytree, layer by layer into stacked arrays.

    Args:
      config: the model.
      read: from a weight's name (as in `weight_shapes`, without "layers."), its layer (None outside layers) and the
        shape expected, to the array; raises ValueError if the file has none of that shape.
      dtype: of the parameters.
      progress: is told after each weight.
    """
    total = sum(config.num_layers if name.startswith("layers.") else 1 for name in weight_shapes(config))
    done = 0

    def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
        nonlocal done
        where, _, leaf = name.rpartition(".")
        if not where:
            array = read(leaf, None, shape).astype(dtype, copy=False)
            done += 1
            progress.update(done, total)
            return array
        stacked = np.empty(shape, dtype)
        for i in range(config.num_layers):
            stacked[i] = read(leaf, i, shape[1:])
            done += 1
            progress.update(done, total)
        return stacked

    return make_params(config, weight, dtype)


def stop(path: Path | str, came: str, expected: str, then: str) -> ValueError:
    """A loader's error: the file, what came, what was expected, what to do next."""
    return ValueError(f"{path}: got {came}, expected {expected}; {then}")
