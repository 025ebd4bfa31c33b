"""Speculative decoding in the graph: prefill, draft, verify, accept, without a word from the host.

A request's text stands in `State.tokens`. `context` counts the tokens that the target has worked through; the next one, the
anchor, is known but not yet worked through. A cycle drafts N = block_size - 1 tokens after the anchor, runs the target once
over all of them, and keeps those that equal the target's own draws, plus one more draw. The draws are those of
`jattn.generate`: their noise is keyed by seed and position alone. So the text is the plain one, whatever was drafted.

Rejected rows leave stale keys and values at or past `context`; each cycle writes its slots before it reads them, and no
length ever counts a stale one. Near a request's end its block is shorter: rows past its last position do not exist.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jattn.cache import KVCache
from jattn.dflash import rows
from jattn.dflash.proposers import Proposer, View
from jattn.generate import sample
from jattn.models.decoder import DecoderConfig, Params, create_cache, forward, head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """What the requests of a batch ask for; S of them."""

    prompt_len: Int[Array, " S"]  # 0: none
    total: Int[Array, " S"]  # prompt and text end here at the latest
    table: Int[Array, "S max_pages"]
    temperature: Float[Array, " S"]
    seed: Int[Array, " S"]
    stop: Int[Array, "S K"]  # padded with -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the loop carries; donated."""

    tokens: Int[Array, "S max_len"]
    context: Int[Array, " S"]
    done: Bool[Array, " S"]
    cache: KVCache
    drafter: Any
    passes: Int[Array, ""]  # of the target: chunks of prompts and blocks together
    cycles: Int[Array, " S"]  # blocks of each request
    offered: Int[Array, "S N"]  # how often a j-th draft was there
    accepted: Int[Array, "S N"]  # and was kept


@dataclasses.dataclass(frozen=True)
class Setting:
    """The static side of the loop; hashable."""

    config: DecoderConfig
    proposer: Proposer
    block_size: int
    step_tokens: int = 128  # rows of a prefill step
    implementation: str | None = None


def new_state(
    setting: Setting,
    tokens: Int[Array, "S max_len"],
    done: Bool[Array, " S"],
    num_pages: int,
    page_size: int,
    dtype: Any,
) -> State:
    """A batch before its first step.

    Args:
      setting: of the loop.
      tokens: prompts, then anything.
      done: requests that do not exist.
      num_pages: P, of the target's pool and of the drafter's.
      page_size: tokens a page.
      dtype: of the caches.
    """
    s, n = tokens.shape[0], setting.block_size - 1
    zeros = [jnp.zeros(shape, jnp.int32) for shape in ((s,), (), (s,), (s, n), (s, n))]
    cache = create_cache(setting.config, num_pages, page_size, dtype)
    drafter = setting.proposer.init(num_pages, page_size, dtype)
    return State(tokens, zeros[0], done, cache, drafter, *zeros[1:])


def _target(
    params: Params,
    setting: Setting,
    requests: Requests,
    cache: KVCache,
    r: rows.Rows,
    tokens: Array,
    longest: int | None,
) -> tuple[Array, KVCache, Array]:
    meta = rows.metadata(r, requests.table, cache.page_size, causal=True, max_query_len=longest)
    taps, kernel = setting.proposer.taps, setting.implementation
    return forward(params, setting.config, tokens, r.position, cache, meta, taps=taps, implementation=kernel)


def _view(requests: Requests, state: State, r: rows.Rows) -> View:
    return View(state.tokens, state.context, r, requests.table, requests.seed, requests.temperature)


def _ends(requests: Requests, drawn: Int[Array, "S B"]) -> Bool[Array, "S B"]:
    return (drawn[:, :, None] == requests.stop[:, None, :]).any(-1)


def prefill_step(params: Params, drafting: Any, setting: Setting, requests: Requests, state: State) -> State:
    """Work through the next chunks of the prompts; prompts that end give their first token."""
    q, size = requests, setting.step_tokens
    left = jnp.where(state.done, 0, jnp.maximum(q.prompt_len - state.context, 0))
    before = jnp.cumsum(left) - left
    counts = jnp.clip(size - before, 0, left)
    r = rows.pack(state.context, counts, size)
    tokens = jnp.where(r.live, state.tokens[r.seq, r.position], 0)
    hidden, cache, tapped = _target(params, setting, q, state.cache, r, tokens, None)
    drafter = setting.proposer.observe(drafting, state.drafter, _view(q, state, r), tapped, r.live)
    last = jnp.maximum(r.query_start_loc[1:] - 1, 0)
    context = state.context + counts
    drawn = sample(head(params, hidden[last]), q.temperature, q.seed, context)
    ended = (counts > 0) & (context == q.prompt_len)
    column = jnp.where(ended, context, state.tokens.shape[1])
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[jnp.arange(len(drawn)), column].set(drawn, mode="drop"),
        context=context,
        done=state.done | (ended & (_ends(q, drawn[:, None])[:, 0] | (context + 1 >= q.total))),
        cache=cache,
        drafter=drafter,
        passes=state.passes + 1,
    )


def cycle(params: Params, drafting: Any, setting: Setting, requests: Requests, state: State) -> State:
    """Draft a block for every running request, verify all, keep what the target draws too."""
    q, width = requests, setting.block_size
    size = len(state.context)
    # The last token that a request may have is drawn by the row before it: rows from `total - 1` on are of no use.
    counts = jnp.where(state.done, 0, jnp.clip(q.total - 1 - state.context, 0, width))
    r = rows.pack(state.context, counts, size * width)
    view = _view(q, state, r)
    drafts, drafter = jnp.zeros((size, 0), jnp.int32), state.drafter
    if width > 1:
        drafts, drafter = setting.proposer.propose(drafting, drafter, view, width)
    block = jnp.concatenate([view.anchor[:, None], drafts], 1)
    tokens = jnp.where(r.live, block[r.seq, r.offset], 0)
    hidden, cache, tapped = _target(params, setting, q, state.cache, r, tokens, width)
    drawn = sample(head(params, hidden), q.temperature[r.seq], q.seed[r.seq], r.position + 1)
    drawn = rows.by_sequence(r, drawn, width)  # [S, B]: drawn[:, j] follows block[:, j]

    column = jnp.arange(width)
    kept, stopped = accept(block, drawn, counts, _ends(q, drawn))
    drafter = setting.proposer.observe(drafting, drafter, view, tapped, r.live & (r.offset < kept[r.seq]))
    at = jnp.where(column < kept[:, None], state.context[:, None] + 1 + column, state.tokens.shape[1])
    context = state.context + kept
    draft = column[1:]
    return State(
        tokens=state.tokens.at[jnp.arange(size)[:, None], at].set(drawn, mode="drop"),
        context=context,
        done=state.done | stopped | (context + 1 >= q.total),
        cache=cache,
        drafter=drafter,
        passes=state.passes + 1,
        cycles=state.cycles + (counts > 0),
        offered=state.offered + (draft < counts[:, None]),
        accepted=state.accepted + (draft < kept[:, None]),
    )


def accept(
    block: Int[Array, "S B"], drawn: Int[Array, "S B"], counts: Int[Array, " S"], ends: Bool[Array, "S B"]
) -> tuple[Int[Array, " S"], Bool[Array, " S"]]:
    """How many of the target's draws become text.

    Args:
      block: anchor and drafts.
      drawn: the target's draw after each of them, given that all before were right.
      counts: rows that exist.
      ends: draws that end the text.

    Returns:
      (kept, stopped): the drafts that equal the draws, up to the first that does not, and one draw more; cut after the
      first that ends the text.
    """
    column = jnp.arange(block.shape[1])
    right = (block[:, 1:] == drawn[:, :-1]) & (column[1:] < counts[:, None])
    kept = jnp.minimum(1 + jnp.cumprod(right, 1, dtype=jnp.int32).sum(1), counts)
    inside = ends & (column < kept[:, None])
    stopped = inside.any(1)
    return jnp.where(stopped, inside.argmax(1) + 1, kept).astype(jnp.int32), stopped


@functools.partial(jax.jit, donate_argnames=("tokens", "context", "done"))
def admit(
    tokens: Int[Array, "S max_len"],
    context: Int[Array, " S"],
    done: Bool[Array, " S"],
    fresh: Bool[Array, " S"],
    prompts: Int[Array, "S max_len"],
) -> tuple[Int[Array, "S max_len"], Int[Array, " S"], Bool[Array, " S"]]:
    """Put requests before their first step into slots; what of `State` changes by it, so that no cache passes through.

    Args:
      tokens: of the state; donated.
      context: of the state; donated.
      done: of the state; donated.
      fresh: the slots.
      prompts: for them; the rows of other slots hold anything.
    """
    return jnp.where(fresh[:, None], prompts, tokens), jnp.where(fresh, 0, context), done & ~fresh


@functools.partial(jax.jit, static_argnames="setting", donate_argnames="state")
def prefill(params: Params, drafting: Any, setting: Setting, requests: Requests, state: State) -> State:
    """Work through all prompts; requests that are past theirs stay as they are.

    Args:
      params: the target's weights.
      drafting: the proposer's parameters.
      setting: of the loop.
      requests: of the batch.
      state: donated.
    """
    ready = setting.proposer.prepare(drafting)

    def left(state: State) -> Array:
        return (~state.done & (state.context < requests.prompt_len)).any()

    return lax.while_loop(left, functools.partial(prefill_step, params, ready, setting, requests), state)


@functools.partial(jax.jit, static_argnames="setting", donate_argnames="state")
def decode(
    params: Params,
    drafting: Any,
    setting: Setting,
    requests: Requests,
    state: State,
    cycles: Int[Array, ""],
    enough: Int[Array, ""],
) -> State:
    """Draft and verify until enough requests are done.

    Args:
      params: the target's weights.
      drafting: the proposer's parameters.
      setting: of the loop.
      requests: of the batch.
      state: donated; after `prefill`.
      cycles: at most so many, for callers that want to show text in between.
      enough: done slots to stop at, those that are done already included, for callers with others to put there; S, or
        more, waits for all.
    """
    ready = setting.proposer.prepare(drafting)
    end, enough = state.passes + cycles, jnp.minimum(enough, len(state.done))

    def running(state: State) -> Array:
        return (state.done.sum() < enough) & (state.passes < end)

    return lax.while_loop(running, functools.partial(cycle, params, ready, setting, requests), state)
