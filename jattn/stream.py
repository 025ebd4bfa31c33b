"""Text of several requests on one stream, as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from jattn.models.tokenizer import TextStream, TextTokenizer


class OrderedPrinter:
    """Prints texts that grow at once, one after the other: the first unfinished one live, the rest as their turn comes."""

    def __init__(self, tokenizer: TextTokenizer, titles: Sequence[str], out: TextIO) -> None:
        """Print the first title.

        Args:
          tokenizer: decodes the tokens.
          titles: a line over each text; empty ones are not printed.
          out: where to print.
        """
        self._out, self._titles = out, titles
        self._streams = [TextStream(tokenizer) for _ in titles]
        self._held = [""] * len(titles)
        self._done = [False] * len(titles)
        self._current = 0
        self._title()

    def push(self, request: int, token: int) -> None:
        """A token of a request."""
        self._text(request, self._streams[request].push(token))

    def finish(self, request: int) -> None:
        """A request has ended."""
        self._text(request, self._streams[request].finish())
        self._done[request] = True
        while self._current < len(self._done) and self._done[self._current]:
            self._write("\n")
            self._current += 1
            if self._current < len(self._done):
                self._title()
                self._write(self._held[self._current])

    def _title(self) -> None:
        title = self._titles[self._current] if self._titles else ""
        if title:
            self._write(("\n" if self._current else "") + title + "\n")

    def _text(self, request: int, text: str) -> None:
        if request == self._current:
            self._write(text)
        else:
            self._held[request] += text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
