"""Query tiles as rows of one integer array, computed in the graph: whose rows each tile has and which keys it may see."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import masks
from pallas_kernels.request import AttentionOperands, AttentionRequest
from pallas_kernels.work_plan import QueryTiles, Sequences

# Columns of the plan, int32 a tile or a piece of one.
SEQ, ROW, COUNT, POSITION, FIRST, END, WHOLE, WHOLE_END, CONTEXT, CAUSAL, SEQ_LEN, START, REAL = range(13)
FIELDS = 16


def compute_dtype(r: AttentionRequest) -> np.dtype:
    """Of the matrix products: the wider of both; 8-bit values fit every float type exactly."""
    return r.q_dtype if r.quantized else np.dtype(jnp.promote_types(r.q_dtype, r.kv_dtype))


def plan(r: AttentionRequest, ops: AttentionOperands, seqs: Sequences, tiles: QueryTiles, tokens: int) -> Array:
    """The tiles as rows of the plan, int32 [N, FIELDS]; unused ones have no rows and no keys."""
    seq, offset = tiles.seq, tiles.offset
    real = jnp.minimum(seq, r.num_seqs - 1)  # the padding rows' sequences own no table
    context, query_len, seq_len = seqs.context_len[seq], seqs.query_len[seq], seqs.seq_len[seq]
    used = jnp.arange(seq.shape[0]) < tiles.num_tiles
    count = jnp.where(used, jnp.minimum(tokens, query_len - offset), 0)
    q_first, q_last = context + offset, context + offset + count - 1
    causal = ops.causal[real] if ops.causal is not None else r.causal
    kv_start = None if ops.kv_start is None else ops.kv_start[real]
    options: dict[str, Any] = {"seq_len": seq_len, "causal": causal, "window": r.window, "kv_start": kv_start}
    ranges = square_start = None
    if ops.bidirectional_ranges is not None:
        ranges = (ops.bidirectional_ranges[real, :, 0], ops.bidirectional_ranges[real, :, 1])
    if r.tree_size:
        square_start = seq_len - jnp.minimum(query_len, r.tree_size)
    first, end = masks.key_span(q_first, q_last, **options, ranges=ranges, square_start=square_start)
    end = jnp.where(used & (end > first), end, 0)
    whole, whole_end = masks.common_span(q_first, q_last, **options)
    values = {
        SEQ: real,
        ROW: seqs.start[seq] + offset,
        COUNT: count,
        POSITION: q_first,
        FIRST: jnp.where(end > 0, first, 0),
        END: end,
        WHOLE: whole,
        WHOLE_END: whole_end,
        CONTEXT: context,
        CAUSAL: causal,
        SEQ_LEN: seq_len,
        START: seqs.start[seq],
        REAL: seq < r.num_seqs,
    }
    blank = jnp.zeros(seq.shape, jnp.int32)
    return jnp.stack([jnp.broadcast_to(values.get(i, blank), seq.shape).astype(jnp.int32) for i in range(FIELDS)], -1)
