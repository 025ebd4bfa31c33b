"""Requests in, tokens out, speculatively: the host side of `jattn.dflash.loop`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.dflash import loop
from jattn.dflash.admission import Request, Slots
from jattn.dflash.draft import check_fits
from jattn.dflash.loop import Requests, Setting, State
from jattn.dflash.proposers import DFlash, Proposer, Repeat
from jattn.generate import Completion, Sampling, room
from jattn.models.decoder import DecoderConfig, Params
from jattn.page_allocator import PageAllocator
from pallas_kernels.request import expect

ALL = 2**30  # cycles: more than any text has, and added to those of a run still an int32


@dataclasses.dataclass
class SpeculationStats:
    """Counts of a speculator's life."""

    passes: int = 0  # of the target, over blocks of the whole batch
    prefill_passes: int = 0
    cycles: int = 0  # blocks, of all requests
    tokens: int = 0  # that came from blocks; the first of each request comes from its prompt
    offered: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))  # [N]
    accepted: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    seconds: float = 0.0  # of blocks
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0  # in neither
    calls: int = 0  # of compiled programs

    def add_blocks(
        self, passes: int, cycles: int, offered: np.ndarray, accepted: np.ndarray, *, tokens: int, seconds: float
    ) -> None:
        """Count a call that worked on blocks."""
        self.passes += passes
        self.cycles += cycles
        self.offered = offered + (self.offered if len(self.offered) else 0)
        self.accepted = accepted + (self.accepted if len(self.accepted) else 0)
        self.tokens += tokens
        self.seconds += seconds

    @property
    def tau(self) -> float:
        """Acceptance length: tokens a block and request; 1 is plain decoding, the block size the most."""
        return self.tokens / self.cycles if self.cycles else 0.0

    @property
    def acceptance(self) -> np.ndarray:
        """[N]: share of the blocks that had a j-th draft in which it was kept."""
        return self.accepted / np.maximum(self.offered, 1)

    @property
    def saved(self) -> float:
        """Share of the target's passes, counted for each request, that plain decoding needs beyond these."""
        return 1 - self.cycles / self.tokens if self.tokens else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second from blocks."""
        return self.tokens / self.seconds if self.seconds else 0.0


def _counts(state: State) -> tuple[Any, ...]:
    """Of a state: passes, blocks, drafts by position that were there, and that were kept."""
    offered, accepted = (np.asarray(x).sum(0, dtype=np.int64) for x in (state.offered, state.accepted))
    return int(state.passes), int(np.asarray(state.cycles).sum()), offered, accepted


class Speculator:
    """A model, a proposer and a pool; its slots have one shape whoever sits in them, so that the same programs serve all.

    A request that is done makes room at once: its slot and its pages go to the next one, while its neighbours go on.
    """

    def __init__(
        self,
        params: Params,
        config: DecoderConfig,
        proposer: Proposer | None = None,
        drafting: Any = None,
        *,
        block_size: int | None = None,
        num_slots: int = 4,
        step_tokens: int = 128,
        page_size: int = 16,
        num_pages: int | None = None,
        max_len: int | None = None,
        cache_dtype: Any = None,
        implementation: str | None = None,
    ) -> None:
        """Check that target and draft fit.

        Args:
          params: the target's weights.
          config: the target.
          proposer: what drafts; None decodes plainly, in the same loop with blocks of one.
          drafting: the proposer's parameters; for `DFlash` those of the draft (the target's are added), or
            {"draft": ..., "target": ...}.
          block_size: anchor and drafts; by default what the draft was trained for, else 8.
          num_slots: S, requests at once.
          step_tokens: rows of a step that works on prompts.
          page_size: tokens a page.
          num_pages: pages of each pool; by default enough for S requests of `max_len`.
          max_len: longest prompt plus text; by default the model's context, at most 1024.
          cache_dtype: of both caches; the weights' by default.
          implementation: as in `jattn.attend`.

        Raises:
          ValueError: a size does not fit, or the draft is not for this target.
        """
        plain = proposer is None
        trained = proposer.config.block_size if isinstance(proposer, DFlash) else None
        block_size = (1 if plain else trained or 8) if block_size is None else block_size
        if plain:
            expect(block_size == 1, "block_size", block_size, "1 without a proposer; name one to speculate")
        else:
            expect(block_size >= 2, "block_size", block_size, "at least 2: an anchor and one draft")
        if trained is not None and block_size > trained:
            text = f"block_size: got {block_size}, but the draft was trained for {trained}; expect less acceptance"
            warnings.warn(text, UserWarning, stacklevel=2)
        if isinstance(proposer, DFlash):
            check_fits(proposer.config, config)
            drafting = drafting if "draft" in drafting else {"draft": drafting, "target": params}
        sizes = {"num_slots": num_slots, "page_size": page_size, "step_tokens": step_tokens}
        for name, size in sizes.items():
            expect(size > 0, name, size, "a positive number")
        limit = config.max_position_embeddings
        self.max_len = min(limit, 1024) if max_len is None else max_len
        expect(0 < self.max_len <= limit, "max_len", self.max_len, f"a length in [1, {limit}], the model's context")
        self.max_pages = -(-self.max_len // page_size)
        self.num_pages = num_slots * self.max_pages if num_pages is None else num_pages
        expect(self.num_pages > 0, "num_pages", self.num_pages, "a positive number of pages")
        self.params, self.drafting = params, drafting
        self.setting = Setting(config, proposer or Repeat(), block_size, step_tokens, implementation)
        self.num_slots, self.page_size = num_slots, page_size
        self.dtype = params["embed"].dtype if cache_dtype is None else cache_dtype
        self.stats = SpeculationStats()

    def check(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Tokens that a request has in the cache at most, its blocks included.

        Raises:
          ValueError: it can never run. Nothing has been written then.
        """
        sampling.check()
        vocab = self.setting.config.vocab_size
        expect(len(prompt) > 0, "prompt", "no tokens", "at least one; write something, or use the chat format")
        bad = [t for t in prompt if not 0 <= t < vocab]
        expect(not bad, "prompt", f"the token {bad[:1]}", f"ids in [0, {vocab}); use this model's tokenizer")
        longest = (
            f"at most {self.max_len - 1} tokens, so that one more fits {self.max_len}; shorten it or raise max_len"
        )
        expect(len(prompt) < self.max_len, "prompt", f"{len(prompt)} tokens", longest)
        size = room(len(prompt), sampling, self.max_len)
        need = -(-size // self.page_size)
        came = f"{len(prompt)} tokens and up to {sampling.max_tokens} more with their blocks, which take {need} pages"
        fits = f"at most the pool's {self.num_pages}; shorten it, lower max_tokens or give more pages"
        expect(need <= self.num_pages, "prompt", came, fits)
        return size

    def batch(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], pages: Sequence[Sequence[int]]
    ) -> tuple[Requests, State]:
        """A batch before its first step.

        Args:
          prompts: at most `num_slots`.
          samplings: one for each.
          pages: page ids for each, that nobody else owns.
        """
        running: list[Request | None] = [None] * self.num_slots
        for i, (prompt, s, own) in enumerate(zip(prompts, samplings, pages, strict=True)):
            running[i] = Request(i, Completion(list(prompt)), s, room(len(prompt), s, self.max_len), tuple(own))
        size = self.num_slots
        tokens, done = jnp.zeros((size, self.max_len), jnp.int32), jnp.ones(size, bool)
        state = loop.new_state(self.setting, tokens, done, self.num_pages, self.page_size, self.dtype)
        return self._asked(running, self._stops(samplings)), self._admit(running, range(len(prompts)), state)

    def _stop(self, sampling: Sampling) -> tuple[int, ...]:
        return self.setting.config.eos_ids if sampling.stop is None else sampling.stop

    def _stops(self, samplings: Iterable[Sampling]) -> int:
        """Columns for the stop tokens; at least some, so that nearly everybody has the same program."""
        return max([4, *(len(self._stop(s)) for s in samplings)])

    def _asked(self, running: Sequence[Request | None], stops: int) -> Requests:
        """What the requests in the slots ask for; a free slot asks for nothing and owns no page."""
        size = self.num_slots
        table, stop = np.full((size, self.max_pages), -1, np.int32), np.full((size, stops), -1, np.int32)
        lens, total, seed = np.zeros((3, size), np.int32)
        temperature = np.zeros(size, np.float32)
        for i, request in enumerate(running):
            if request is None:
                continue
            own, s = self._stop(request.sampling), request.sampling
            table[i, : len(request.pages)], stop[i, : len(own)] = request.pages, own
            lens[i], total[i] = len(request.completion.prompt), request.room + 1
            temperature[i], seed[i] = s.temperature, s.seed
        return Requests(*(jnp.asarray(x) for x in (lens, total, table, temperature, seed, stop)))

    def _admit(self, running: Sequence[Request | None], slots: Iterable[int], state: State) -> State:
        """Put the requests in some slots into the state."""
        fresh, prompts = np.zeros(self.num_slots, bool), np.zeros((self.num_slots, self.max_len), np.int32)
        for slot in slots:
            request = running[slot]
            assert request is not None
            fresh[slot], prompts[slot, : len(request.completion.prompt)] = True, request.completion.prompt
        now = (state.tokens, state.context, state.done)
        tokens, context, done = loop.admit(*now, jnp.asarray(fresh), jnp.asarray(prompts))
        return dataclasses.replace(state, tokens=tokens, context=context, done=done)

    def run(
        self, prompts: Iterable[Sequence[int]], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """Complete prompts: a call of each program for as many as slots and pages hold, two more whenever others enter."""
        done = {n: completion for n, completion, _ in self._events(prompts, sampling, ALL)}
        return [done[n] for n in sorted(done)]

    def stream(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        cycles: int = 4,
    ) -> Iterator[tuple[int, Completion, list[int]]]:
        """Complete prompts, and hand out numbers of requests, what they are now, and their new tokens.

        Args:
          prompts: token ids.
          sampling: of all of them, or one for each.
          cycles: between two looks at most; each is a round trip to the host.
        """
        return self._events(prompts, sampling, cycles)

    def _events(self, prompts: Any, sampling: Any, cycles: int) -> Iterator[tuple[int, Completion, list[int]]]:
        expect(cycles > 0, "cycles", cycles, "a positive number of blocks between two looks")
        cycles = min(cycles, ALL)
        prompts = [[int(t) for t in prompt] for prompt in prompts]
        samplings = list(sampling) if isinstance(sampling, Sequence) else [sampling or Sampling()] * len(prompts)
        expect(len(samplings) == len(prompts), "sampling", f"{len(samplings)} of them", f"{len(prompts)}, one a prompt")
        pairs = enumerate(zip(prompts, samplings, strict=True))
        requests = [Request(n, Completion(prompt), s, self.check(prompt, s)) for n, (prompt, s) in pairs]
        if requests:
            self.compile()
            slots = Slots(requests, self.num_slots, PageAllocator(self.num_pages, self.page_size))
            yield from self._serve(slots, self._stops(samplings), cycles)

    def _serve(self, slots: Slots, stops: int, cycles: int) -> Iterator[tuple[int, Completion, list[int]]]:
        """Work through prompts whenever somebody has entered, else through blocks, until the next may be able to."""
        asked, state = self.batch([], [], [])
        while slots.busy:
            filled, before = slots.fill(), _counts(state)
            if filled:
                asked = self._asked(slots.running, stops)
                state, seconds = self._call(loop.prefill, asked, self._admit(slots.running, filled, state))
            else:
                enough = slots.free + 1 if slots.waiting else self.num_slots
                state, seconds = self._call(loop.decode, asked, state, cycles, enough)
            events = self._look(slots, state)
            assert events, "a call gave nobody a token: it would go on for ever"
            added = [now - then for now, then in zip(_counts(state), before, strict=True)]
            if filled:
                self.stats.prefill_passes += added[0]
                self.stats.prefill_seconds += seconds
            else:
                self.stats.add_blocks(*added, tokens=sum(len(new) for _, _, new in events), seconds=seconds)
            yield from events

    def _look(self, slots: Slots, state: State) -> list[tuple[int, Completion, list[int]]]:
        """Take the new tokens of those who have some; who is done leaves."""
        done, context, tokens = jax.device_get((state.done, state.context, state.tokens))
        events = []
        for slot, request in enumerate(slots.running):
            if request is None:
                continue
            completion = request.completion
            new = tokens[slot, len(completion.prompt) + len(completion.tokens) : context[slot] + 1].tolist()
            completion.tokens.extend(new)
            completion.reason = "running"
            if done[slot]:
                stopped = completion.tokens[-1] in self._stop(request.sampling)
                completion.reason = "stop" if stopped else "length"
                slots.leave(slot)
            if new:
                events.append((request.number, completion, new))
        return events

    def compile(self) -> None:
        """Compile all programs, by a batch of no requests; the first `run` does so otherwise."""
        if self.stats.calls:
            return
        start = time.perf_counter()
        requests, state = self.batch([], [], [])  # nothing to do: the loops end at once
        state, _ = self._call(loop.prefill, requests, state)
        self._call(loop.decode, requests, state, ALL, self.num_slots)
        self.stats.compile_seconds += time.perf_counter() - start

    def _call(self, program: Any, requests: Requests, state: State, *limits: int) -> tuple[State, float]:
        start = time.perf_counter()
        extra = map(jnp.int32, limits)
        state = jax.block_until_ready(program(self.params, self.drafting, self.setting, requests, state, *extra))
        self.stats.calls += 1
        return state, time.perf_counter() - start


def compile_all(speculators: Sequence[Speculator]) -> None:
    """Compile the programs of several speculators side by side: XLA takes one core for each, and seconds."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(Speculator.compile, speculators))


def speculate(
    params: Params,
    config: DecoderConfig,
    prompts: Iterable[Sequence[int]],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    proposer: Proposer | None = None,
    drafting: Any = None,
    **options: Any,
) -> tuple[list[Completion], SpeculationStats]:
    """Complete some prompts, exactly as `jattn.generate.generate` would, in fewer passes of the target.

    Args:
      params: the target's weights.
      config: the target.
      prompts: token ids.
      sampling: of all of them, or one for each.
      proposer: what drafts; None decodes plainly.
      drafting: the proposer's parameters.
      **options: of `Speculator`.

    Raises:
      ValueError: a prompt cannot run, or the draft is not for this target; nothing has run then.
    """
    speculator = Speculator(params, config, proposer, drafting, **options)
    return speculator.run(prompts, sampling), speculator.stats
