"""Checks of lengths and tables by value: at once where they are concrete, behind `debug_checks` where they are traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from pallas_kernels.request import AttentionOperands, AttentionRequest

# Part of the jit cache's key, so that a function traced without checks is traced again with them.
_enabled = jax.make_user_context(False)


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Check traced lengths and tables too, through `jax.experimental.checkify`.

    Inside the block, `paged_attention` under `jit` adds the checks that it otherwise makes for concrete arguments only.
    The caller turns them into an error:

        with jattn.debug_checks():
            err, out = checkify.checkify(step)(...)
        err.throw()

    Without it, contradictory traced input has a defined result and reads nothing out of bounds, but raises nothing:
    sequences begin at row 0, and none before the end of an earlier one; lengths and page ids go to the nearest that
    exists. Only the kernel "hopper" gives a row that two sequences claim to either of them.
    Under `vmap` put the `checkify` inside: JAX cannot check loops that are already batched.
    """
    with _enabled(True):
        yield


def check_lengths(request: AttentionRequest, operands: AttentionOperands, hint: int | None) -> None:
    """Check that lengths, table and hint agree with each other.

    Args:
      request: the static side.
      operands: the arrays.
      hint: `max_query_len` as the caller gave it.

    Raises:
      ValueError: they do not, and are concrete.
    """
    values = (operands.query_start_loc, operands.seq_lens, operands.block_table)
    traced = any(isinstance(x, jax.core.Tracer) for x in values)
    if traced and not _enabled.value:
        return
    if request.num_seqs == 0:
        return
    loc, lens, table = (jnp.asarray(x) if traced else np.asarray(x) for x in values)
    xp = jnp if traced else np
    query = loc[1:] - loc[:-1]
    from_pages = lens - query if request.new_kv else lens
    capacity = request.max_pages * request.page_size
    column = xp.arange(request.max_pages)
    start: Any = 0 if operands.kv_start is None else operands.kv_start
    if not traced and isinstance(start, jax.core.Tracer):
        start = lens  # nothing can be said about the table
    needed = (column * request.page_size < from_pages[:, None]) & (
        (column + 1) * request.page_size > xp.reshape(xp.asarray(start), (-1, 1))
    )
    needed = needed & (query > 0)[:, None] & _reads_all(request)
    bad_page = needed & ((table < 0) | (table >= request.num_pages))
    longest = request.num_tokens if hint is None else hint
    rules = (
        (loc[0] == 0, "query_start_loc", "its first entry is {0}", "0", (loc[0],)),
        (
            (query >= 0).all(),
            "query_start_loc",
            "{0} followed by {1}",
            "entries that never decrease",
            (loc[query.argmin()], loc[query.argmin() + 1]),
        ),
        (
            loc[-1] <= request.num_tokens,
            "query_start_loc",
            "its last entry is {0}",
            f"at most T = {request.num_tokens}, the rows of q",
            (loc[-1],),
        ),
        ((lens >= 0).all(), "seq_lens", "a length of {0}", "lengths >= 0", (lens.min(),)),
        (
            ((query <= 0) | (lens >= query)).all(),
            "seq_lens",
            "a length of {0} for a query length of {1}",
            "seq_len >= query_len: it includes this step's queries",
            (lens[(query - lens).argmax()], query[(query - lens).argmax()]),
        ),
        (
            (from_pages <= capacity).all(),
            "block_table",
            f"{request.max_pages} columns x {request.page_size} tokens = {capacity} for {{0}} tokens",
            "a table wide enough for seq_lens",
            (from_pages.max(),),
        ),
        (
            ~bad_page.any(),
            "block_table",
            "{0} entries in use that name no page",
            f"page ids in [0, {request.num_pages}) wherever a key may be visible",
            (bad_page.sum(),),
        ),
        (
            query.max() <= longest,
            "max_query_len",
            f"{longest} for a query length of {{0}}",
            "a bound on every query length",
            (query.max(),),
        ),
    )
    for ok, name, came, expected, numbers in rules:
        text = f"{name}: got {came}, expected {expected}"
        if traced:
            checkify.check(ok, text, *numbers)
        elif not ok:
            raise ValueError(text.format(*(int(n) for n in numbers)))


def _reads_all(request: AttentionRequest) -> bool:
    """Whether every page may be read: engines free those that a window has left, and a tree may hide some."""
    return request.window[0] is None and not request.tree_size
