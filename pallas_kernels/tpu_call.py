"""The TPU kernel's launch and the loop that it runs.

One program works through a list of items, which is planned in the graph: an item is some queries of one sequence with
all heads, and the key tiles that they may see. While a tile is computed the copies of the next one are under way, also
across items. Query heads of one KV head are packed into the rows of a matrix product.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_copies as copies
from pallas_kernels import tpu_plan, tpu_steps
from pallas_kernels.request import AttentionOperands, AttentionRequest
from pallas_kernels.tile_plan import COUNT, ROW
from pallas_kernels.tpu_copies import Kernel, start, wait
from pallas_kernels.tpu_plan import TABLE_CHUNK, TILES, Items, Tiling


# jit keeps the trace: a model's layers, which have equal requests, trace the kernel once.
@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def attend(r: AttentionRequest, ops: AttentionOperands, t: Tiling, interpret: Any) -> tuple[Array, Array | None]:
    """Launch the kernel for a request `as_stored`; under `vmap` once for each element, one after the other."""
    # Pallas cannot batch arrays that stay in HBM (jax 0.12.0.1: "does not have trivial BlockSpec").

    def one(ops: AttentionOperands) -> tuple[Array, Array | None]:
        with jax.enable_x64(False):  # `vmap` traces again, outside of the call's own such block
            return _attend(r, ops, t, interpret)

    return jax.custom_batching.sequential_vmap(one)(ops)


def _attend(r: AttentionRequest, ops: AttentionOperands, t: Tiling, interpret: Any) -> tuple[Array, Array | None]:
    items = tpu_plan.items(r, ops, t)
    inputs = _inputs(r, ops, items)
    outputs = _outputs(r, t, items)
    scratch = _scratch(r, t)
    names = (*inputs, *outputs, *scratch)

    def paged_tpu(*refs: Any) -> None:
        _body(Kernel(r, t, dict(zip(names, refs, strict=True))))

    call = pl.pallas_call(
        paged_tpu,
        in_specs=[pl.BlockSpec(memory_space=space) for _, space in inputs.values()],
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(outputs),
        out_shape=list(outputs.values()),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=t.vmem_limit),
        interpret=interpret,
    )
    out, *lse = call(*(x for x, _ in inputs.values()))
    out = out.reshape(r.num_tokens, r.num_heads, r.head_dim)
    return out, _lse_by_token(r, t, items, lse[0]) if r.return_lse else None


def _inputs(r: AttentionRequest, ops: AttentionOperands, items: Items) -> dict[str, tuple[Array, Any]]:
    """The kernel's inputs by name, and the memory that each is in."""
    chunks = tpu_plan.table_chunks(r)
    table = jnp.pad(ops.block_table, ((0, 0), (0, chunks * TABLE_CHUNK - r.max_pages)))
    scalars: dict[str, Array | None] = {
        "items": items.fields.reshape(-1),
        "count": items.totals,
        "k_scale": None if ops.k_scale is None else jnp.broadcast_to(ops.k_scale, (r.num_kv_heads,)),
        "v_scale": None if ops.v_scale is None else jnp.broadcast_to(ops.v_scale, (r.num_kv_heads,)),
        "sinks": ops.sinks,
        "slopes": ops.alibi_slopes,
        "ranges": None if ops.bidirectional_ranges is None else ops.bidirectional_ranges.reshape(-1),
    }
    arrays: dict[str, Array | None] = {
        "q_hbm": ops.q.reshape(r.num_tokens, r.num_kv_heads, r.group_size, r.head_dim),
        "k_hbm": ops.k_cache,
        "v_hbm": ops.v_cache,
        "table_hbm": table.reshape(-1, 1, TABLE_CHUNK),
        "new_k_hbm": ops.new_k,
        "new_v_hbm": ops.new_v,
        "tree_hbm": None if ops.tree_mask is None else ops.tree_mask.astype(jnp.float32),
    }
    found = {name: (x, pltpu.SMEM) for name, x in scalars.items() if x is not None}
    return found | {name: (x, pl.ANY) for name, x in arrays.items() if x is not None}


def _outputs(r: AttentionRequest, t: Tiling, items: Items) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (r.num_tokens, r.num_kv_heads, r.group_size, r.head_dim)
    found = {"out_hbm": jax.ShapeDtypeStruct(shape, r.q_dtype)}
    if r.return_lse:  # by item, since a copy of single rows of [T, H] would not be aligned
        shape_of_lse = (items.fields.shape[0], r.num_kv_heads, 1, t.tokens * r.group_size)
        found["lse_hbm"] = jax.ShapeDtypeStruct(shape_of_lse, jnp.float32)
    return found


def _scratch(r: AttentionRequest, t: Tiling) -> dict[str, Any]:
    found: dict[str, Any] = {name: pltpu.VMEM(*x) for name, x in tpu_plan.buffers(r, t).items()}
    found["table"] = pltpu.SMEM((2, tpu_plan.table_chunks(r), 1, TABLE_CHUNK), jnp.int32)
    return found | {name: pltpu.SemaphoreType.DMA((2,)) for name in ("q_sem", "kv_sem", "table_sem", "out_sem")}


def _lse_by_token(r: AttentionRequest, t: Tiling, items: Items, lse: Array) -> Array:
    """[T, H] from [items, KVH, 1, tokens * G]."""
    index = jnp.arange(t.tokens)
    rows = items.fields[:, ROW, None] + index
    rows = jnp.where(index < items.fields[:, COUNT, None], rows, r.num_tokens)
    lse = lse.reshape(-1, r.num_kv_heads, t.tokens, r.group_size).swapaxes(1, 2).reshape(-1, r.num_heads)
    blank = jnp.full((r.num_tokens, r.num_heads), -jnp.inf, jnp.float32)
    return blank.at[rows.reshape(-1)].set(lse, mode="drop")


# Below: inside the kernel.


def _body(k: Kernel) -> None:
    """Work through the items; `step` counts key tiles, whose buffers take turns."""
    count, busy = k.m["count"][0], k.m["count"][1]
    pl.when(count > 0)(lambda: _announce(k, jnp.int32(0)))

    @pl.when(busy > 0)
    def _() -> None:
        _first_keys(k, jnp.int32(0), jnp.int32(0))

    def item(n: Array, step: Array) -> Array:
        pl.when(n + 1 < count)(lambda: _announce(k, n + 1))
        copies.queries(k, n, wait)
        pl.when(n >= 2)(lambda: copies.results(k, n - 2, wait))
        _item(k, n, step)
        copies.results(k, n, start)
        return step + k.field(n, TILES)

    lax.fori_loop(0, count, item, jnp.int32(0))
    for back in (2, 1):
        pl.when(count >= back)(lambda back=back: copies.results(k, count - back, wait))


def _announce(k: Kernel, n: Array) -> None:
    """Start the copies of what item n needs before its keys."""
    copies.queries(k, n, start)
    copies.table_row(k, n, start)


def _first_keys(k: Kernel, n: Array, buffer: Array) -> None:
    copies.table_row(k, n, wait)
    copies.keys(k, n, jnp.int32(0), buffer, start)


def _item(k: Kernel, n: Array, step: Array) -> None:
    """Attention of item n."""
    if k.r.tree_size:
        copies.tree_mask(k, n)
    tpu_steps.begin(k, n)
    tiles, busy = k.field(n, TILES), k.m["count"][1]

    def tile(j: Array, _: None) -> None:
        buffer = (step + j) & 1
        pl.when(j + 1 < tiles)(lambda: copies.keys(k, n, j + 1, 1 - buffer, start))
        pl.when((j + 1 == tiles) & (n + 1 < busy))(lambda: _first_keys(k, n + 1, 1 - buffer))
        copies.keys(k, n, j, buffer, wait)
        tpu_steps.take_in(k, n, j, buffer)

    lax.fori_loop(0, tiles, tile, None)
    tpu_steps.finish(k, n)
