"""Text generation by continuous batching: a host loop around one jitted step of fixed shapes.

S slots hold the requests in flight; the others wait. A step is one ragged call of T rows, in which some slots decode (one
row each) while others work through their prompts in chunks; when nobody has prompt rows left, T = S. Two programs, then,
whatever the lengths. A finished slot idles with query length 0.

Pages for a request's prompt and all tokens that it may generate are reserved when it enters a slot, so that nobody who
runs can run out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from jattn.cache import KVCache
from jattn.metadata import AttentionMetadata
from jattn.models.decoder import DecoderConfig, Params, create_cache, forward, head
from jattn.page_allocator import OutOfPages, PageAllocator
from pallas_kernels.request import expect

OnToken = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request's tokens are drawn."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0: the most likely token
    seed: int = 0
    stop: tuple[int, ...] | None = None  # tokens that end the text; None: the model's own

    def check(self) -> None:
        """Check the values.

        Raises:
          ValueError: one is out of range.
        """
        expect(self.max_tokens > 0, "max_tokens", self.max_tokens, "a positive number")
        warm = bool(np.isfinite(self.temperature)) and self.temperature >= 0
        expect(warm, "temperature", self.temperature, "a finite number >= 0; 0 takes the most likely token")
        expect(0 <= self.seed < 2**31, "seed", self.seed, "a number in [0, 2**31)")


@dataclasses.dataclass
class Completion:
    """What a request has become."""

    prompt: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)  # the stop token, if one came, is the last
    reason: Literal["waiting", "running", "stop", "length"] = "waiting"
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)  # [V] for each token, if kept

    @property
    def finished(self) -> bool:
        """Whether no token will follow."""
        return self.reason in ("stop", "length")


@dataclasses.dataclass
class Stats:
    """Counts of a generator's life."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0  # rows of steps without chunks
    prefill_seconds: float = 0.0  # of steps with chunks of prompts
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0  # in no rate
    pages: int = 0
    pages_used: int = 0
    pages_peak: int = 0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens a second in steps without chunks."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's input."""

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    metadata: AttentionMetadata
    temperature: Float[Array, " S"]
    seed: Int[Array, " S"]


def sample(
    logits: Float[Array, "R V"], temperature: Float[Array, " R"], seed: Int[Array, " R"], position: Int[Array, " R"]
) -> Int[Array, " R"]:
    """Draw a token from each row by the Gumbel-max trick.

    Args:
      logits: float32.
      temperature: 0 takes the most likely token.
      seed: the request's.
      position: of the token that is drawn.
    """
    return jnp.argmax(perturb(logits, temperature, seed, position), -1).astype(jnp.int32)


def perturb(
    logits: Float[Array, "R V"], temperature: Float[Array, " R"], seed: Int[Array, " R"], position: Int[Array, " R"]
) -> Float[Array, "R V"]:
    """What a draw takes the largest of: logits over the temperature with Gumbel noise, or the logits at temperature 0.

    The noise is keyed by the request's seed and the position that the row predicts, nothing else: the same draw alone,
    in any batch, and when a speculative decoder verifies many rows at once.

    Args:
      logits: float32.
      temperature: of each row.
      seed: the request's.
      position: of the token that is drawn.
    """

    def noisy() -> Array:
        def gumbel(seed: Array, position: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jax.random.gumbel(key, logits.shape[1:], logits.dtype)

        noise = jax.vmap(gumbel)(seed, position)
        warm = temperature[:, None] > 0
        scaled = logits / jnp.where(warm, temperature[:, None], 1.0)
        return jnp.where(warm, scaled + noise, logits)

    return lax.cond((temperature > 0).any(), noisy, lambda: logits)


@functools.partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames="cache")
def step(
    params: Params, config: DecoderConfig, cache: KVCache, batch: Batch, implementation: str | None = None
) -> tuple[Int[Array, " S"], Float[Array, "S V"], KVCache]:
    """One ragged step: the next token of every slot, and the logits that it came from.

    Args:
      params: the weights.
      config: the model.
      cache: donated; the write happens in place.
      batch: rows of slots with prompt left to work through are chunks; their draw counts once the prompt has ended.
      implementation: as in `jattn.attend`.
    """
    meta = batch.metadata
    hidden, cache, _ = forward(
        params, config, batch.tokens, batch.positions, cache, meta, implementation=implementation
    )
    last = jnp.clip(meta.query_start_loc[1:] - 1, 0, hidden.shape[0] - 1)
    logits = head(params, hidden[last])
    return sample(logits, batch.temperature, batch.seed, meta.seq_lens), logits, cache


def room(prompt_len: int, sampling: Sampling, max_len: int) -> int:
    """Tokens that a request has in the cache at most: the last one drawn is never written."""
    return min(prompt_len + sampling.max_tokens, max_len) - 1


def pages_needed(prompt_len: int, sampling: Sampling, page_size: int, max_len: int) -> int:
    """Pages that a request reserves."""
    return -(-room(prompt_len, sampling, max_len) // page_size)


@dataclasses.dataclass
class _Slot:
    request: int
    done: int = 0  # tokens in the cache


class Generator:
    """Requests in, tokens out."""

    def __init__(
        self,
        params: Params,
        config: DecoderConfig,
        *,
        num_slots: int = 4,
        step_tokens: int = 128,
        page_size: int = 16,
        num_pages: int | None = None,
        max_len: int | None = None,
        cache_dtype: Any = None,
        keep_logits: bool = False,
        implementation: str | None = None,
    ) -> None:
        """Reserve the cache.

        Args:
          params: the weights.
          config: the model.
          num_slots: S, requests in flight.
          step_tokens: T, rows of a step that works on prompts; more than S.
          page_size: tokens a page.
          num_pages: pages a layer; by default enough for S requests of 1024 tokens, or of `max_len` if that is less.
          max_len: longest prompt plus generated text; the model's context by default.
          cache_dtype: float32, bfloat16 or float16; the weights' dtype by default.
          keep_logits: keep every generated token's logits on the host.
          implementation: as in `jattn.attend`.

        Raises:
          ValueError: a size does not fit.
        """
        for name, size in {"num_slots": num_slots, "page_size": page_size}.items():
            expect(size > 0, name, size, "a positive number")
        expect(step_tokens > num_slots, "step_tokens", step_tokens, f"more than the {num_slots} slots")
        limit = config.max_position_embeddings
        self.max_len = limit if max_len is None else max_len
        expect(0 < self.max_len <= limit, "max_len", self.max_len, f"a length in [1, {limit}], the model's context")
        per_request = -(-min(self.max_len, 1024) // page_size)
        num_pages = num_slots * per_request if num_pages is None else num_pages
        self.params, self.config = params, config
        self._slots: list[_Slot | None] = [None] * num_slots
        self._rows, self._page_size = step_tokens, page_size
        self._max_pages = min(-(-self.max_len // page_size), num_pages)
        dtype = params["embed"].dtype if cache_dtype is None else cache_dtype
        self.cache = create_cache(config, num_pages, page_size, dtype)
        self._pages = PageAllocator(num_pages, page_size)
        self._implementation, self._keep_logits = implementation, keep_logits
        self._waiting: collections.deque[int] = collections.deque()
        self._sampling: list[Sampling] = []
        self._compiled: set[int] = set()
        self.completions: list[Completion] = []
        self.stats = Stats(pages=num_pages)

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None) -> int:
        """Queue a request; its number, an index of `completions`.

        Raises:
          ValueError: it can never run. Nothing has changed then.
        """
        s = sampling or Sampling()
        prompt = [int(t) for t in prompt]
        expect(len(prompt) > 0, "prompt", "no tokens", "at least one; write something, or use the chat format")
        vocab = self.config.vocab_size
        bad = [t for t in prompt if not 0 <= t < vocab]
        expect(not bad, "prompt", f"the token {bad[:1]}", f"ids in [0, {vocab}); use this model's tokenizer")
        s.check()
        longest = f"at most {self.max_len - 1} tokens, so that one more fits the context of {self.max_len}; shorten it"
        expect(len(prompt) < self.max_len, "prompt", f"{len(prompt)} tokens", longest)
        need, have = pages_needed(len(prompt), s, self._page_size, self.max_len), self._pages.num_pages
        came = f"{len(prompt)} tokens and up to {s.max_tokens} more, which take {need} pages"
        expect(
            need <= have, "prompt", came, f"at most the pool's {have}; shorten it, lower max_tokens or give more pages"
        )
        self.completions.append(Completion(prompt))
        self._sampling.append(s)
        self._waiting.append(len(self.completions) - 1)
        return len(self.completions) - 1

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting) or any(slot is not None for slot in self._slots)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Step until every request is done; requests' numbers and tokens as they come."""
        while self.busy:
            yield from self.step()

    def run(self, on_token: OnToken | None = None) -> list[Completion]:
        """Step until every request is done; all completions so far.

        Args:
          on_token: called with the request's number and the token as soon as it is there.
        """
        for request, token in self:
            if on_token is not None:
                on_token(request, token)
        return self.completions

    def step(self) -> list[tuple[int, int]]:
        """Admit what fits, compute one step, and say which requests got which token."""
        self._admit()
        rows = self._plan()
        if not sum(rows):
            return []
        batch = self._batch(rows)
        size = len(batch.tokens)
        if size not in self._compiled:
            self._compiled.add(size)
            self.stats.compile_seconds += self._compute(self._batch([0] * len(rows), size))[2]
        drawn, logits, seconds = self._compute(batch)
        self._count(rows, size, seconds)
        events = []
        for s, slot in enumerate(self._slots):
            if slot is None or not rows[s]:
                continue
            slot.done += rows[s]
            completion = self.completions[slot.request]
            if slot.done < len(completion.prompt) + len(completion.tokens):
                continue
            if self._keep_logits:
                completion.logits.append(np.asarray(logits[s]))
            events.append((slot.request, int(drawn[s])))
            self._append(s, slot, int(drawn[s]))
        return events

    def _compute(self, batch: Batch) -> tuple[np.ndarray, Array, float]:
        start = time.perf_counter()
        tokens, logits, self.cache = step(self.params, self.config, self.cache, batch, self._implementation)
        return np.asarray(tokens), logits, time.perf_counter() - start

    def _admit(self) -> None:
        for s, slot in enumerate(self._slots):
            if slot is not None or not self._waiting:
                continue
            request = self._waiting[0]  # in order: nobody is overtaken for ever
            completion = self.completions[request]
            try:
                self._pages.allocate(request, room(len(completion.prompt), self._sampling[request], self.max_len))
            except OutOfPages:
                break
            self._waiting.popleft()
            completion.reason = "running"
            self._slots[s] = _Slot(request)
        self.stats.pages_used = self._pages.num_pages - self._pages.num_free
        self.stats.pages_peak = max(self.stats.pages_peak, self.stats.pages_used)

    def _plan(self) -> list[int]:
        """Rows of each slot in this step: decoding slots first, the rest to prompts, first come first."""
        left = {s: self._total(slot) - slot.done for s, slot in enumerate(self._slots) if slot is not None}
        rows = [min(left.get(s, 0), 1) for s in range(len(self._slots))]
        spare = self._rows - sum(rows)
        for s in sorted(left, key=lambda s: self._slots[s].request):  # type: ignore[union-attr]
            more = min(left[s] - rows[s], spare)
            rows[s] += more
            spare -= more
        return rows

    def _total(self, slot: _Slot) -> int:
        completion = self.completions[slot.request]
        return len(completion.prompt) + len(completion.tokens)

    def _batch(self, rows: list[int], num_tokens: int | None = None) -> Batch:
        """Arrays of a step, in one of two shapes; with no rows at all, of one that changes nothing."""
        size = len(self._slots)
        if num_tokens is None:
            num_tokens = size if max(rows) == 1 else self._rows
        tokens, positions = np.zeros((2, num_tokens), np.int32)
        temperature, seed = np.zeros(size, np.float32), np.zeros(size, np.int32)
        lens, at = [0] * size, 0
        pages: list[tuple[int, ...]] = [()] * size
        for s, slot in enumerate(self._slots):
            if slot is None or not rows[s]:
                continue
            completion, end = self.completions[slot.request], slot.done + rows[s]
            tokens[at : at + rows[s]] = (completion.prompt + completion.tokens)[slot.done : end]
            positions[at : at + rows[s]] = np.arange(slot.done, end)
            at += rows[s]
            lens[s], pages[s] = end, self._pages.pages(slot.request)
            temperature[s], seed[s] = self._sampling[slot.request].temperature, self._sampling[slot.request].seed
        metadata = AttentionMetadata.from_lengths(
            rows,
            lens,
            pages,
            page_size=self._page_size,
            num_tokens=num_tokens,
            max_pages=self._max_pages,
            max_query_len=1 if num_tokens == size else None,
        )
        inputs = [jnp.asarray(x) for x in (tokens, positions, temperature, seed)]
        return Batch(inputs[0], inputs[1], metadata, inputs[2], inputs[3])

    def _append(self, s: int, slot: _Slot, token: int) -> None:
        completion, sampling = self.completions[slot.request], self._sampling[slot.request]
        completion.tokens.append(token)
        stop = self.config.eos_ids if sampling.stop is None else sampling.stop
        if token in stop:
            completion.reason = "stop"
        elif len(completion.tokens) == sampling.max_tokens or self._total(slot) == self.max_len:
            completion.reason = "length"
        else:
            return
        self._pages.free(slot.request)
        self._slots[s] = None
        self.stats.pages_used = self._pages.num_pages - self._pages.num_free

    def _count(self, rows: list[int], size: int, seconds: float) -> None:
        """Count a step, before its rows are counted as done."""
        stats, slots = self.stats, self._slots
        left = [0 if x is None else max(len(self.completions[x.request].prompt) - x.done, 0) for x in slots]
        stats.steps += 1
        stats.prefill_tokens += sum(map(min, rows, left))
        if size == len(slots):
            stats.decode_tokens += sum(rows)
            stats.decode_seconds += seconds
        else:
            stats.prefill_seconds += seconds


def generate(
    params: Params,
    config: DecoderConfig,
    prompts: Iterable[Sequence[int]],
    sampling: Sampling | None = None,
    **options: Any,
) -> list[Completion]:
    """Complete some prompts at once.

    Args:
      params: the weights.
      config: the model.
      prompts: token ids.
      sampling: of all of them.
      **options: of `Generator`.

    Raises:
      ValueError: a prompt is empty or too long; none has run then.
    """
    generator = Generator(params, config, **options)
    for prompt in prompts:
        generator.submit(prompt, sampling)
    return generator.run()
