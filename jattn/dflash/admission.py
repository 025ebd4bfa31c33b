"""Who runs in which slot: requests wait in order, and enter with all the pages that they will need."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from jattn.generate import Completion, Sampling
from jattn.page_allocator import OutOfPages, PageAllocator


@dataclasses.dataclass
class Request:
    """One request on the host."""

    number: int
    completion: Completion
    sampling: Sampling
    room: int  # tokens that it has in the cache at most
    pages: tuple[int, ...] = ()  # while it runs


class Slots:
    """S slots and a pool of pages for requests in order: nobody is overtaken, who enters can end.

    A request that fits the pool at all gets in at the latest when nobody else runs.
    """

    def __init__(self, requests: Iterable[Request], num_slots: int, allocator: PageAllocator) -> None:
        """Everybody waits.

        Args:
          requests: in order.
          num_slots: S.
          allocator: of the pool, all of it free.
        """
        self.waiting = collections.deque(requests)
        self.running: list[Request | None] = [None] * num_slots
        self._allocator = allocator

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting) or self.free < len(self.running)

    @property
    def free(self) -> int:
        """Slots without a request."""
        return self.running.count(None)

    def fill(self) -> list[int]:
        """Put those who wait into free slots as long as there are pages for the next one; the slots that were filled."""
        filled = []
        for slot, request in enumerate(self.running):
            if request is not None or not self.waiting:
                continue
            first = self.waiting[0]
            try:
                first.pages = self._allocator.allocate(first.number, first.room)
            except OutOfPages:
                break
            self.running[slot] = self.waiting.popleft()
            filled.append(slot)
        return filled

    def leave(self, slot: int) -> None:
        """The request in a slot is done: slot and pages are free."""
        request = self.running[slot]
        assert request is not None
        self._allocator.free(request.number)
        request.pages, self.running[slot] = (), None
