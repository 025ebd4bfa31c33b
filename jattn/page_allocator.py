"""Which sequence owns which page: a small allocator on the host."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from pallas_kernels.request import expect


class OutOfPages(ValueError):
    """The pool has too few free pages; nothing was allocated."""


class PageAllocator:
    """Hands out pages of a pool, never one page to two owners unless they share a prefix through `fork`.

    A shared page is read-only: a sequence that would write into one gets its own (see `extend`). Page 0 may be kept back,
    as engines do that let padding point there.
    """

    def __init__(self, num_pages: int, page_size: int, *, reserve_first: bool = False) -> None:
        """Start with every page free.

        Args:
          num_pages: P.
          page_size: tokens a page.
          reserve_first: never hand out page 0.

        Raises:
          ValueError: a size is not positive.
        """
        expect(num_pages > 0, "num_pages", num_pages, "a positive number of pages")
        expect(page_size > 0, "page_size", page_size, "a positive number of tokens")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, int(reserve_first) - 1, -1))
        self._pages: dict[Hashable, list[int]] = {}
        self._lens: dict[Hashable, int] = {}
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def pages(self, owner: Hashable) -> tuple[int, ...]:
        """Pages of a sequence, in order."""
        return tuple(self._known(owner))

    def length(self, owner: Hashable) -> int:
        """Tokens that a sequence has room reserved for."""
        self._known(owner)
        return self._lens[owner]

    def allocate(self, owner: Hashable, num_tokens: int = 0) -> tuple[int, ...]:
        """Open a sequence with room for `num_tokens`; its pages.

        Raises:
          ValueError: the owner exists already.
          OutOfPages: too few pages are free; the owner does not exist then.
        """
        expect(owner not in self._pages, "owner", repr(owner), "a sequence that is not open yet")
        _check_count(num_tokens)
        self._pages[owner], self._lens[owner] = [], 0
        try:
            self.extend(owner, num_tokens)
        except ValueError:
            del self._pages[owner], self._lens[owner]
            raise
        return self.pages(owner)

    def extend(self, owner: Hashable, num_tokens: int) -> list[tuple[int, int]]:
        """Make room for `num_tokens` more.

        Returns:
          (old page, new page) of each shared page that the sequence would write into: it now owns the new one, and the
          caller copies the old page's contents there before it writes.

        Raises:
          ValueError: the owner is unknown or the number is negative.
          OutOfPages: too few pages are free; nothing has changed then.
        """
        held, length = self._known(owner), self._lens[owner]
        _check_count(num_tokens)
        total = length + num_tokens
        more = max(-(-total // self.page_size) - len(held), 0)
        first = length // self.page_size  # the first page that will be written
        shared = [i for i in range(first, len(held)) if num_tokens and self._owners[held[i]] > 1]
        need = more + len(shared)
        if need > len(self._free):
            raise OutOfPages(
                f"num_tokens: got {num_tokens} more tokens for {owner!r}, which take {need} pages, expected at most"
                f" {len(self._free)} free pages; free a sequence or make the pool larger"
            )
        copies = []
        for i in shared:
            old, new = held[i], self._take()
            self._owners[old] -= 1
            held[i] = new
            copies.append((old, new))
        held.extend(self._take() for _ in range(more))
        self._lens[owner] = total
        return copies

    def fork(self, parent: Hashable, child: Hashable, num_tokens: int | None = None) -> tuple[int, ...]:
        """Open `child` on the pages of the parent's first `num_tokens` tokens (all, by default), shared; its pages.

        Raises:
          ValueError: the parent is unknown, the child exists, or the parent has fewer tokens.
        """
        held, length = self._known(parent), self._lens[parent]
        expect(child not in self._pages, "child", repr(child), "a sequence that is not open yet")
        tokens = length if num_tokens is None else num_tokens
        _check_count(tokens)
        expect(0 <= tokens <= length, "num_tokens", tokens, f"at most the parent's {length} tokens")
        prefix = held[: -(-tokens // self.page_size)]
        for page in prefix:
            self._owners[page] += 1
        self._pages[child], self._lens[child] = list(prefix), tokens
        return tuple(prefix)

    def free(self, owner: Hashable) -> None:
        """Close a sequence; pages that nobody shares return to the pool.

        Raises:
          ValueError: the owner is unknown.
        """
        for page in reversed(self._known(owner)):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)
        del self._pages[owner], self._lens[owner]

    def _known(self, owner: Hashable) -> list[int]:
        expect(owner in self._pages, "owner", repr(owner), "an open sequence")
        return self._pages[owner]

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] += 1
        return page


def _check_count(num_tokens: object) -> None:
    ok = isinstance(num_tokens, int | np.integer) and not isinstance(num_tokens, bool) and num_tokens >= 0
    expect(bool(ok), "num_tokens", repr(num_tokens), "an int >= 0")
