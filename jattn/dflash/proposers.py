"""What drafts a block. A proposer is a hashable object of pure functions over its parameters and a state pytree.

The loop calls `prepare` once, `observe` after every target pass with the rows that it computed, and `propose` before the
next. Only `DFlash` has a state; the others look at the tokens alone and serve as controls and tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jattn.dflash import draft, markov, rows
from jattn.dflash.draft import DraftConfig
from jattn.dflash.rows import Rows
from jattn.generate import perturb

State = Any  # a pytree
_NOISE = (
    0.6  # share of the target's noise: drafted rows know less than the target will, so they are flatter than its own
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """What a proposer may look at before a block."""

    tokens: Int[Array, "S max_len"]  # prompt and text so far, up to the anchor at `context`
    context: Int[Array, " S"]  # C: tokens that the target has worked through
    rows: Rows  # the block's: anchor and drafts of each running request
    table: Int[Array, "S max_pages"]
    seed: Int[Array, " S"]
    temperature: Float[Array, " S"]

    @property
    def anchor(self) -> Int[Array, " S"]:
        """The last token of each text."""
        return jnp.take_along_axis(self.tokens, self.context[:, None], 1)[:, 0]


class Proposer(Protocol):
    """The interface."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output `observe` wants."""

    def init(self, num_pages: int, page_size: int, dtype: Any) -> State:
        """The state of an empty batch whose pages are those of the target's pool."""

    def prepare(self, params: Any) -> Any:
        """Parameters as the other functions take them."""

    def observe(
        self,
        params: Any,
        state: State,
        view: View,
        tapped: Float[Array, "T F E"],
        keep: Bool[Array, " T"],
    ) -> State:
        """Take in rows that the target has worked through; only those kept are part of the text."""

    def propose(self, params: Any, state: State, view: View, block_size: int) -> tuple[Int[Array, "S N"], State]:
        """Tokens for the N = block_size - 1 positions after the anchor; any will do for idle requests."""


@dataclasses.dataclass(frozen=True)
class _Stateless:
    """A proposer that looks at the tokens alone."""

    @property
    def taps(self) -> tuple[int, ...]:
        """None."""
        return ()

    def init(self, num_pages: int, page_size: int, dtype: Any) -> State:
        """Nothing."""
        return ()

    def prepare(self, params: Any) -> Any:
        """As they are."""
        return params

    def observe(self, params: Any, state: State, view: View, tapped: Array, keep: Array) -> State:
        """Nothing changes."""
        return state


@dataclasses.dataclass(frozen=True)
class DFlash:
    """A trained draft. Parameters: {"draft": the draft's, "target": the target's}."""

    config: DraftConfig
    implementation: str | None = None  # as in `jattn.attend`

    @property
    def taps(self) -> tuple[int, ...]:
        """The draft's."""
        return self.config.taps

    def init(self, num_pages: int, page_size: int, dtype: Any) -> State:
        """Its own pages."""
        return draft.create_cache(self.config, num_pages, page_size, dtype)

    def prepare(self, params: Any) -> Any:
        """Lay out the weights for the context."""
        return params | {"draft": draft.prepare(params["draft"])}

    def observe(self, params: Any, state: State, view: View, tapped: Array, keep: Array) -> State:
        """Append to the context; rejected rows have no slot."""
        where = rows.slots(view.rows, view.table, state.page_size, keep)
        return draft.append_context(params["draft"], self.config, state, tapped, view.rows.position, where)

    def propose(self, params: Any, state: State, view: View, block_size: int) -> tuple[Array, State]:
        """Draw each row's token with the noise that the target will use at that position; greedy, the most likely one.

        With common noise two draws agree wherever their distributions are close, which the most likely token does not:
        with SmolLM2 at temperature 1 it raised tau from 1.37 to 1.51. Less than all of the noise does as well there, and
        better with the tests' pair (3.15 against 2.57). What is drafted cannot change the text.

        With a Markov head the draws of a block follow each other, among the best candidates of each row.
        """
        r = view.rows
        meta = rows.metadata(r, view.table, state.page_size, causal=False, max_query_len=block_size)
        tokens = jnp.where(r.offset == 0, view.anchor[r.seq], self.config.mask_id)
        hidden, state = draft.draft_block(
            params["draft"],
            self.config,
            params["target"],
            state,
            tokens,
            r.position,
            meta,
            implementation=self.implementation,
        )
        logits = draft.logits(params["target"], hidden) / _NOISE
        scores = perturb(logits, view.temperature[r.seq], view.seed[r.seq], r.position)
        if not self.config.markov_rank:
            drawn = scores.argmax(-1).astype(jnp.int32)
            return rows.by_sequence(r, drawn, block_size)[:, 1:], state
        parts = (hidden, *markov.top(scores))
        hidden, score, token = (rows.by_sequence(r, x, block_size)[:, 1:] for x in parts)
        scale = 1 / (_NOISE * jnp.where(view.temperature > 0, view.temperature, 1.0))
        return markov.choose(params["draft"], params["target"], hidden, score, token, view.anchor, scale), state


@dataclasses.dataclass(frozen=True)
class Repeat(_Stateless):
    """The last token again and again."""

    def propose(self, params: Any, state: State, view: View, block_size: int) -> tuple[Array, State]:
        """N copies of the anchor."""
        return jnp.broadcast_to(view.anchor[:, None], (view.anchor.shape[0], block_size - 1)), state


@dataclasses.dataclass(frozen=True)
class NGram(_Stateless):
    """What followed the last tokens when they last occurred, in prompt or text."""

    longest: int = 3
    shortest: int = 1

    def propose(self, params: Any, state: State, view: View, block_size: int) -> tuple[Array, State]:
        """The continuation, going round where it reaches the end; without any match the anchor repeated."""
        tokens, last = view.tokens, view.context
        column = jnp.arange(tokens.shape[1])
        begin = last  # where the continuation starts: the anchor itself, unless something matches
        for n in range(self.shortest, self.longest + 1):
            same = (column >= n - 1) & (column < last[:, None])
            for back in range(n):
                want = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0)[:, None], 1)
                same &= jnp.roll(tokens, back, 1) == want
            begin = jnp.where(same.any(1), (jnp.where(same, column, -1)).max(1) + 1, begin)
        period = last + 1 - begin
        at = begin[:, None] + jnp.arange(block_size - 1) % period[:, None]
        return jnp.take_along_axis(tokens, at, 1), state


@dataclasses.dataclass(frozen=True)
class Oracle(_Stateless):
    """Knows the answer: parameters are int32 [S, max_len], prompt and text of the request in each slot."""

    def propose(self, params: Any, state: State, view: View, block_size: int) -> tuple[Array, State]:
        """What will come."""
        at = view.context[:, None] + 1 + jnp.arange(block_size - 1)
        return jnp.take_along_axis(params, jnp.minimum(at, params.shape[1] - 1), 1), state


@dataclasses.dataclass(frozen=True)
class Random(_Stateless):
    """Uniform draws: hardly ever right."""

    vocab_size: int = 2

    def propose(self, params: Any, state: State, view: View, block_size: int) -> tuple[Array, State]:
        """Keyed by seed and position."""

        def draw(seed: Array, position: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), 1)
            return jax.random.randint(key, (block_size - 1,), 0, self.vocab_size)

        return jax.vmap(draw)(view.seed, view.context), state
