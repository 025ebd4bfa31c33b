"""Speculation in the shape of a large model, with random weights made on the device: what a draft and a verification cost.

Everything runs in the loop of `jattn.dflash.loop`: a plain step is its cycle with blocks of one. Draft and verification are
also timed alone, each in a compiled loop. Random weights draft nothing right, so no acceptance is claimed here.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jattn.dflash import draft, loop, rows
from jattn.dflash.draft import DraftConfig, default_taps
from jattn.dflash.loop import Requests, Setting, State
from jattn.dflash.proposers import DFlash, Proposer, Repeat, View
from jattn.models import decoder
from jattn.models.decoder import DecoderConfig, Params

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a run; those of Qwen3-8B unless told otherwise."""

    layers: int = 36
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 12288
    vocab: int = 151936
    draft_layers: int = 5
    block_size: int = 16
    context: int = 4096
    page_size: int = 16
    cycles: int = 32  # a timed call
    repeats: int = 5

    @property
    def target(self) -> DecoderConfig:
        """The model."""
        longest = self.context + 2 * self.cycles * self.block_size + self.block_size
        sizes = (self.vocab, self.hidden, self.intermediate, self.layers, self.heads, self.kv_heads, self.head_dim)
        return DecoderConfig(*sizes, rope_theta=1e6, rms_norm_eps=1e-6, qk_norm=True, max_position_embeddings=longest)

    @property
    def draft(self) -> DraftConfig:
        """The draft, of the same layers."""
        stack = dataclasses.replace(self.target, num_layers=self.draft_layers)
        few = self.layers < 4
        taps = tuple(range(self.layers)) if few else default_taps(self.layers, self.draft_layers)
        return DraftConfig(stack, taps, self.vocab - 1, self.layers, self.block_size)


def random_tree(shapes: Any, dtype: Any) -> Any:
    """Arrays of these shapes, random, made on the device leaf by leaf; norms are 1."""

    @functools.partial(jax.jit, static_argnames=("shape", "norm"))
    def leaf(number: Array, shape: tuple[int, ...], norm: bool) -> Array:
        if norm:
            return jnp.ones(shape, dtype)
        keys = jax.random.split(jax.random.key(number, impl="rbg"), shape[0])
        scale = jnp.asarray(shape[-1] ** -0.5, dtype)
        if len(shape) > 2:  # one layer after the other: little besides the result
            return lax.map(lambda key: jax.random.normal(key, shape[1:], dtype) * scale, keys)
        return jax.random.normal(keys[0], shape, dtype) * scale

    paths, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    leaves = [leaf(i, shape, str(path[-1].key).endswith("norm")) for i, (path, shape) in enumerate(paths)]
    return jax.block_until_ready(jax.tree.unflatten(tree, leaves))


def _nested(flat: dict[str, tuple[int, ...]], layers: int) -> dict[str, Any]:
    tree: dict[str, Any] = {"layers": {}}
    for name, shape in flat.items():
        where, _, leaf = name.rpartition(".")
        (tree["layers"] if where else tree)[leaf] = (layers, *shape) if where else shape
    return tree


def make_params(shape: Shape, dtype: Any) -> tuple[Params, Params]:
    """Target and draft."""
    target = _nested(decoder.weight_shapes(shape.target), shape.layers)
    own = _nested(draft.weight_shapes(shape.draft), shape.draft_layers)
    return decoder.unstack(random_tree(target, dtype)), random_tree(own, dtype)


def make_state(shape: Shape, setting: Setting, batch: int, dtype: Any) -> tuple[Requests, State]:
    """`batch` requests whose context is there already, its keys and values random, on pages one after the other."""
    longest = shape.target.max_position_embeddings
    each = -(-longest // shape.page_size)
    tokens = jax.random.randint(jax.random.key(1), (batch, longest), 0, shape.vocab, jnp.int32)
    table = jnp.arange(batch * each, dtype=jnp.int32).reshape(batch, each)
    full = lambda n: jnp.full(batch, n, jnp.int32)  # noqa: E731
    stop = jnp.full((batch, 4), -1, jnp.int32)
    requests = Requests(full(shape.context), full(longest), table, jnp.zeros(batch), full(0), stop)
    state = loop.new_state(setting, tokens, jnp.zeros(batch, bool), batch * each, shape.page_size, dtype)
    fill = jax.jit(_noise, donate_argnums=0)
    cache, drafter = jax.tree.map(lambda x: fill(x) if x.ndim == 4 else x, (state.cache, state.drafter))
    return requests, dataclasses.replace(state, cache=cache, drafter=drafter, context=full(shape.context))


def _noise(pool: Array) -> Array:
    """The same random page everywhere: a pool's worth of draws would need many times its memory."""
    page = jax.random.normal(jax.random.key(2), pool.shape[1:], pool.dtype)
    return jnp.broadcast_to(page, pool.shape)


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Of some calls, after one that compiles."""
    jax.block_until_ready(call())
    spent = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


@jax.jit
def _changed(x: Array) -> Array:
    return -x


def copy_rate(size: int, repeats: int = 9) -> float:
    """Bytes a second that the device reads and writes when it copies an array of `size` bytes."""
    x = jnp.ones(size // 4, jnp.float32)
    return 2 * x.nbytes / median_seconds(lambda: _changed(x), repeats)


def cycle_seconds(
    shape: Shape, batch: int, params: Params, drafting: Any, proposer: Proposer, width: int, dtype: Any
) -> float:
    """A cycle of the loop."""
    setting = Setting(shape.target, proposer, width)
    requests, state = make_state(shape, setting, batch, dtype)
    held = [state]

    def call() -> Array:
        again = dataclasses.replace(held[0], context=jnp.full(batch, shape.context, jnp.int32))
        held[0] = loop.decode(params, drafting, setting, requests, again, jnp.int32(shape.cycles), jnp.int32(batch))
        return held[0].passes

    seconds = median_seconds(call, shape.repeats) / shape.cycles
    assert int(held[0].passes) == shape.cycles * (1 + shape.repeats) and not bool(held[0].done.any())
    return seconds


def parts_seconds(shape: Shape, batch: int, params: Params, drafting: Any, dtype: Any) -> dict[str, float]:
    """Draft (context of some rows, then the block) and verification alone, both with the head over all rows."""
    proposer = DFlash(shape.draft)
    setting = Setting(shape.target, proposer, shape.block_size)
    ready = proposer.prepare(drafting)

    def view(state: State, requests: Requests) -> View:
        r = rows.pack(state.context, jnp.full_like(state.context, shape.block_size), batch * shape.block_size)
        return View(state.tokens, state.context, r, requests.table, requests.seed, requests.temperature)

    def one_draft(params: Params, ready: Any, requests: Requests, state: State, tapped: Array) -> State:
        v = view(state, requests)
        drafter = proposer.observe(ready, state.drafter, v, tapped, v.rows.offset < 3)
        drafts, drafter = proposer.propose(ready, drafter, v, shape.block_size)
        return _with_anchor(dataclasses.replace(state, drafter=drafter), drafts[:, 0])

    def one_verification(params: Params, ready: Any, requests: Requests, state: State, tapped: Array) -> State:
        v = view(state, requests)
        tokens = v.anchor[v.rows.seq] + v.rows.offset
        meta = rows.metadata(v.rows, requests.table, shape.page_size, causal=True, max_query_len=shape.block_size)
        at = v.rows.position
        hidden, cache, taps = decoder.forward(
            params, setting.config, tokens % shape.vocab, at, state.cache, meta, taps=proposer.taps
        )
        drawn = jnp.argmax(decoder.head(params, hidden), -1).astype(jnp.int32)
        moved = drawn[:: shape.block_size] + (taps.max() > 1e30)  # the taps are part of the work
        return _with_anchor(dataclasses.replace(state, cache=cache), moved)

    seconds = {}
    for name, one in (("draft", one_draft), ("verify", one_verification)):
        requests, state = make_state(shape, setting, batch, dtype)
        tapped = jnp.ones((batch * shape.block_size, len(proposer.taps), shape.hidden), dtype)
        several = _repeated(one, shape.cycles)
        held = [state]

        def call(
            several: Any = several, requests: Requests = requests, tapped: Array = tapped, held: Any = held
        ) -> Any:
            held[0] = several(params, ready, requests, held[0], tapped)
            return held[0].tokens

        seconds[name] = median_seconds(call, shape.repeats) / shape.cycles
        del state, held
    return seconds


def _with_anchor(state: State, anchor: Array) -> State:
    """The next round depends on this one's result."""
    size = jnp.arange(len(anchor))
    return dataclasses.replace(state, tokens=state.tokens.at[size, state.context].set(anchor))


def _repeated(one: Callable[..., State], times: int) -> Callable[..., State]:
    @functools.partial(jax.jit, donate_argnums=3)
    def several(params: Params, ready: Any, requests: Requests, state: State, tapped: Array) -> State:
        return lax.fori_loop(0, times, lambda _, s: one(params, ready, requests, s, tapped), state)

    return several


def plain_bytes(shape: Shape, batch: int, width: int) -> int:
    """What a plain step has to read: all weights but the embedding's rows, and the context's keys and values."""
    sizes = decoder.weight_shapes(shape.target)
    per_layer = sum(_count(s) for name, s in sizes.items() if name.startswith("layers."))
    weights = shape.layers * per_layer + _count(sizes["head"])
    kv = batch * shape.context * shape.layers * 2 * shape.kv_heads * shape.head_dim
    return (weights + kv) * width


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def measure(shape: Shape, batches: tuple[int, ...], dtype: Any) -> Iterator[Row]:
    """A row for each batch."""
    start = time.perf_counter()
    params, own = make_params(shape, dtype)
    made = time.perf_counter() - start
    drafting = {"draft": own, "target": params}
    rate = copy_rate(2**31 if jax.default_backend() == "gpu" else 2**24)
    for batch in batches:
        common = (shape, batch, params)
        plain = cycle_seconds(*common, None, Repeat(), 1, dtype)
        cycle = cycle_seconds(*common, drafting, DFlash(shape.draft), shape.block_size, dtype)
        parts = parts_seconds(*common, drafting, dtype)
        need = plain_bytes(shape, batch, jnp.dtype(dtype).itemsize)
        yield {
            "batch": batch,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "dtype": str(jnp.dtype(dtype)),
            "shape": dataclasses.asdict(shape),
            "plain_ms": 1e3 * plain,
            "draft_ms": 1e3 * parts["draft"],
            "verify_ms": 1e3 * parts["verify"],
            "cycle_ms": 1e3 * cycle,
            "draft_over_plain": parts["draft"] / plain,
            "verify_over_plain": parts["verify"] / plain,
            "cycle_over_plain": cycle / plain,
            "copy_bytes_per_s": rate,
            "plain_bytes": need,
            "share_of_memory_bound": need / rate / plain,
            "seconds_to_make_weights": made,
        }


def describe(row: Row) -> str:
    """A line for people."""
    return (
        f"batch {row['batch']:3d}: plain step {row['plain_ms']:8.3f} ms ({100 * row['share_of_memory_bound']:.0f} % of"
        f" the memory bound at {row['copy_bytes_per_s'] / 1e12:.2f} TB/s), draft {row['draft_over_plain']:.3f}, verify"
        f" {row['verify_over_plain']:.3f}, whole cycle {row['cycle_over_plain']:.3f} of it"
    )
