"""Rows of a ragged step, planned in the graph: which sequence and position each of T rows belongs to."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int, Shaped

from jattn.metadata import AttentionMetadata


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """T rows handed out in order: sequence s has `counts[s]` of them, at positions from `first[s]` on."""

    first: Int[Array, " S"]
    counts: Int[Array, " S"]
    query_start_loc: Int[Array, " S+1"]
    seq: Int[Array, " T"]
    offset: Int[Array, " T"]  # counted within the sequence's rows
    position: Int[Array, " T"]
    live: Bool[Array, " T"]  # false: padding at the end


def pack(first: Int[Array, " S"], counts: Int[Array, " S"], num_rows: int) -> Rows:
    """Hand out rows.

    Args:
      first: position of each sequence's first row.
      counts: rows of each sequence; in sum at most `num_rows`. 0: the sequence idles.
      num_rows: T.
    """
    loc = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    row = jnp.arange(num_rows, dtype=jnp.int32)
    seq = jnp.minimum((row[:, None] >= loc[1:]).sum(1, dtype=jnp.int32), counts.shape[0] - 1)
    live = row < loc[-1]
    offset = jnp.where(live, row - loc[seq], 0)
    position = jnp.where(live, first[seq] + offset, 0)
    return Rows(first, counts, loc, seq, offset, position, live)


def slots(
    rows: Rows, table: Int[Array, "S max_pages"], page_size: int, keep: Bool[Array, " T"] | None = None
) -> Int[Array, " T"]:
    """Slot of each row; -1 for padding, for rows not kept, and where the sequence owns no page.

    Args:
      rows: the step.
      table: page ids; negative: none.
      page_size: tokens a page.
      keep: false: not written, as for rejected rows.
    """
    column = rows.position // page_size
    page = table[rows.seq, jnp.minimum(column, table.shape[1] - 1)]
    ok = rows.live & (column < table.shape[1]) & (page >= 0)
    ok = ok if keep is None else ok & keep
    return jnp.where(ok, page * page_size + rows.position % page_size, -1)


def metadata(
    rows: Rows, table: Int[Array, "S max_pages"], page_size: int, *, causal: bool, max_query_len: int | None
) -> AttentionMetadata:
    """The step as attention metadata; lengths include its rows, idle sequences have length 0."""
    return AttentionMetadata(
        query_start_loc=rows.query_start_loc,
        seq_lens=jnp.where(rows.counts > 0, rows.first + rows.counts, 0),
        block_table=table,
        slot_mapping=slots(rows, table, page_size),
        causal=causal,
        max_query_len=max_query_len,
    )


def by_sequence(rows: Rows, values: Shaped[Array, "T ..."], width: int) -> Shaped[Array, "S width ..."]:
    """The first `width` rows of each sequence; those past its count hold anything."""
    at = rows.query_start_loc[:-1, None] + jnp.arange(width)
    return values[jnp.minimum(at, values.shape[0] - 1)]
