"""What a batch looks like: lengths, pages and masks in one pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from pallas_kernels.request import as_array, as_int32, describe, expect

_DATA = (
    "query_start_loc",
    "seq_lens",
    "block_table",
    "slot_mapping",
    "kv_start",
    "bidirectional_ranges",
    "tree_mask",
)


@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Lengths, pages and masks of one step's batch; a pytree.

    `causal` is static while it is a bool (another value compiles another program) and data when it is bool[S]. All other
    arrays are data, `max_query_len` is static. Flattening checks nothing; build instances with `make` or `from_lengths`.
    """

    query_start_loc: Int[Array, " S+1"]
    seq_lens: Int[Array, " S"]
    block_table: Int[Array, "S max_pages"]
    slot_mapping: Int[Array, " T"]
    causal: bool | Bool[Array, " S"] = True
    kv_start: Int[Array, " S"] | None = None
    bidirectional_ranges: Int[Array, "S R 2"] | None = None
    tree_mask: Bool[Array, "S Q Q"] | None = None
    max_query_len: int | None = None

    @property
    def num_seqs(self) -> int:
        """Rows of the block table, padding included."""
        return self.seq_lens.shape[0]

    def replace(self, **changes: Any) -> AttentionMetadata:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def make(
        cls,
        query_start_loc: Any,
        seq_lens: Any,
        block_table: Any,
        slot_mapping: Any,
        *,
        causal: bool | Any = True,
        kv_start: Any = None,
        bidirectional_ranges: Any = None,
        tree_mask: Any = None,
        max_query_len: int | None = None,
    ) -> AttentionMetadata:
        """Build from arrays, checking shapes and dtypes.

        Args:
          query_start_loc: int [S+1].
          seq_lens: int [S].
          block_table: int [S, max_pages].
          slot_mapping: int [T]; negative: not written.
          causal: a bool or bool[S].
          kv_start: int [S] or None.
          bidirectional_ranges: int [S, R, 2] or None.
          tree_mask: bool [S, Q, Q] or None.
          max_query_len: static hint or None.

        Raises:
          ValueError: a shape or dtype does not fit.
        """
        seq_lens = _integers("seq_lens", seq_lens, 1)
        num_seqs = seq_lens.shape[0]
        loc = _integers("query_start_loc", query_start_loc, 1)
        expect(loc.shape == (num_seqs + 1,), "query_start_loc", describe(loc), f"int[S+1] = int[{num_seqs + 1}]")
        table = _integers("block_table", block_table, 2)
        expect(table.shape[0] == num_seqs, "block_table", describe(table), f"int[S, max_pages] with S = {num_seqs}")
        if not isinstance(causal, bool | np.bool_):
            causal = as_array("causal", causal)
            ok = causal.dtype == bool and causal.shape in ((), (num_seqs,))
            expect(ok, "causal", describe(causal), f"a bool or bool[S] = bool[{num_seqs}]")
            causal = jnp.broadcast_to(causal, (num_seqs,))
        else:
            causal = bool(causal)
        if kv_start is not None:
            kv_start = _integers("kv_start", kv_start, 1)
            expect(kv_start.shape == (num_seqs,), "kv_start", describe(kv_start), f"int[S] = int[{num_seqs}]")
        if bidirectional_ranges is not None:
            bidirectional_ranges = _integers("bidirectional_ranges", bidirectional_ranges, 3)
            ok = bidirectional_ranges.shape[::2] == (num_seqs, 2)
            came = describe(bidirectional_ranges)
            expect(ok, "bidirectional_ranges", came, f"int[S, R, 2] = int[{num_seqs}, R, 2]")
        if tree_mask is not None:
            tree_mask = as_array("tree_mask", tree_mask)
            ok = tree_mask.ndim == 3 and tree_mask.dtype == bool and tree_mask.shape[0] == num_seqs
            ok = ok and tree_mask.shape[1] == tree_mask.shape[2]
            expect(ok, "tree_mask", describe(tree_mask), f"bool[S, Q, Q] with S = {num_seqs}")
        if max_query_len is not None:
            ok = isinstance(max_query_len, int | np.integer) and max_query_len > 0
            expect(ok, "max_query_len", repr(max_query_len), "a positive int or None (it is static)")
        slots = _integers("slot_mapping", slot_mapping, 1)
        return cls(loc, seq_lens, table, slots, causal, kv_start, bidirectional_ranges, tree_mask, max_query_len)

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        pages: Sequence[Sequence[int]],
        *,
        page_size: int,
        num_tokens: int | None = None,
        num_seqs: int | None = None,
        max_pages: int | None = None,
        causal: bool | Sequence[bool] = True,
        max_query_len: int | None = None,
    ) -> AttentionMetadata:
        """Build on the host from plain lists, padded to fixed shapes.

        Args:
          query_lens: this step's tokens of each sequence.
          seq_lens: tokens of each sequence, this step's included.
          pages: page ids of each sequence, in order.
          page_size: tokens a page.
          num_tokens: rows of q to pad to (T); the sum of `query_lens` by default. Padding rows get slot -1.
          num_seqs: sequences to pad to (S); padding sequences have length 0.
          max_pages: columns to pad the block table to; padding entries are -1.
          causal: one flag, or one for each sequence (padding gets True).
          max_query_len: static hint; None leaves it open.

        Raises:
          ValueError: lengths contradict each other, or a sequence has too few pages.
        """
        count = len(query_lens)
        expect(len(seq_lens) == count, "seq_lens", f"{len(seq_lens)} entries", f"{count}, one a sequence")
        expect(len(pages) == count, "pages", f"{len(pages)} entries", f"{count}, one a sequence")
        for name, numbers in (("page_size", [page_size]), ("query_lens", query_lens), ("seq_lens", seq_lens)):
            whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in numbers)
            expect(whole, name, repr(list(numbers)[:8]), "ints")
        expect(page_size > 0, "page_size", page_size, "a positive number of tokens")
        for s, (q, n, held) in enumerate(zip(query_lens, seq_lens, pages, strict=True)):
            expect(q >= 0, "query_lens", f"{q} for sequence {s}", "lengths >= 0")
            expect(n >= q, "seq_lens", f"{n} for sequence {s} with {q} queries", "seq_len >= query_len")
            need = -(-n // page_size)
            expect(len(held) >= need, "pages", f"{len(held)} for sequence {s} of {n} tokens", f"at least {need}")
            named = all(-1 <= p < 2**31 // page_size for p in held)
            expect(
                named,
                "pages",
                f"{list(held)[:8]} for sequence {s}",
                f"ids in [0, {2**31 // page_size}), or -1 for none",
            )
        total = sum(query_lens)
        rows = total if num_tokens is None else num_tokens
        expect(rows >= total, "num_tokens", rows, f"room for {total} query tokens")
        size = count if num_seqs is None else num_seqs
        expect(size >= count, "num_seqs", size, f"room for {count} sequences")
        width = max([1, *map(len, pages)])
        columns = width if max_pages is None else max_pages
        expect(columns >= width, "max_pages", columns, f"room for {width} pages of one sequence")

        loc = np.full(size + 1, total, np.int32)
        loc[: count + 1] = np.concatenate([[0], np.cumsum(np.asarray(query_lens, np.int64))])
        lens = np.zeros(size, np.int32)
        lens[:count] = seq_lens
        table = np.full((size, columns), -1, np.int32)
        slots = np.full(rows, -1, np.int32)
        for s, (q, n, held) in enumerate(zip(query_lens, seq_lens, pages, strict=True)):
            table[s, : len(held)] = held
            position = np.arange(n - q, n)
            slots[loc[s] : loc[s + 1]] = np.asarray(held, np.int32)[position // page_size] * page_size + (
                position % page_size
            )
        flags: bool | np.ndarray
        if isinstance(causal, bool | np.bool_):
            flags = bool(causal)
        else:
            expect(len(causal) == count, "causal", f"{len(causal)} flags", f"{count}, one a sequence")
            known = all(isinstance(c, bool | np.bool_) for c in causal)
            expect(known, "causal", repr(list(causal)[:8]), "bools")
            flags = np.ones(size, bool)
            flags[:count] = causal
        return cls.make(loc, lens, table, slots, causal=flags, max_query_len=max_query_len)


def _integers(name: str, value: Any, ndim: int) -> Array:
    array = as_int32(name, value)
    expect(array.ndim == ndim, name, describe(array), f"integers with {ndim} axes")
    return array


def _flatten_with_keys(m: AttentionMetadata) -> tuple[list[tuple[Any, Any]], tuple[bool | None, int | None]]:
    static = m.causal if isinstance(m.causal, bool) else None
    data = [(jax.tree_util.GetAttrKey(name), getattr(m, name)) for name in _DATA]
    data.append((jax.tree_util.GetAttrKey("causal"), None if static is not None else m.causal))
    return data, (static, m.max_query_len)


def _flatten(m: AttentionMetadata) -> tuple[list[Any], tuple[bool | None, int | None]]:
    data, static = _flatten_with_keys(m)
    return [value for _, value in data], static


def _unflatten(static: tuple[bool | None, int | None], data: Sequence[Any]) -> AttentionMetadata:
    *arrays, causal = data
    flag, max_query_len = static
    fields = dict(zip(_DATA, arrays, strict=True))
    return AttentionMetadata(**fields, causal=causal if flag is None else flag, max_query_len=max_query_len)


# By hand, because whether `causal` is data depends on the instance.
jax.tree_util.register_pytree_with_keys(AttentionMetadata, _flatten_with_keys, _unflatten, _flatten)
