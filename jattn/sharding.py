"""The call on a mesh of devices: heads over one axis, sequences over another, and the context of long ones over a third.

Built on `jax.shard_map`; across hosts through `jax.distributed`, like any JAX program. In a `jax.shard_map` of
your own pass `check_vma=False`: the kernels' loops do not carry the types that it checks (jax 0.12).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Num

from jattn.attention import paged_attention
from jattn.cache import merge_states
from pallas_kernels.request import expect

# Which axis of an argument counts heads (H or KVH) and which sequences (S, T or P); caches and scales see `_specs`.
_HEADS = {"q": 1, "new_k": 1, "new_v": 1, "sinks": 0, "alibi_slopes": 0}
_SEQUENCES: tuple[str, ...] = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc")
_SEQUENCES += ("new_k", "new_v", "bidirectional_ranges", "tree_mask", "kv_start", "causal")


def sharded_paged_attention(
    mesh: Mesh,
    q: Float[Array, "T H D"],
    k_cache: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"],
    v_cache: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"],
    block_table: Int[Array, "S max_pages"],
    seq_lens: Int[Array, " S"],
    query_start_loc: Int[Array, " N"],
    *,
    heads: str | None = None,
    sequences: str | None = None,
    **options: Any,
) -> Any:
    """`jattn.paged_attention` with each device working on its own heads and sequences; no communication.

    Along `sequences`, every device has a batch of its own: T, S and P are divided into equal parts, page ids and row
    numbers count within a part, and `query_start_loc` is the parts' prefix sums one after the other,
    [devices * (S / devices + 1)].

    Args:
      mesh: the devices.
      q: as in `paged_attention`.
      k_cache: as there.
      v_cache: as there.
      block_table: as there.
      seq_lens: as there.
      query_start_loc: as there, or one for each part.
      heads: mesh axis over which query heads and KV heads are divided.
      sequences: mesh axis over which sequences and their pages are divided.
      **options: the keyword arguments of `paged_attention`.

    Returns:
      As `paged_attention`, divided in the same way.

    Raises:
      ValueError: an axis is not one of the mesh, or does not divide what it should.
    """
    arrays: dict[str, Any] = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
    }
    static: dict[str, Any] = {}
    for name, value in options.items():
        (arrays if isinstance(value, Array) or hasattr(value, "shape") else static)[name] = value
    layout = options.get("layout", "NHD")
    for axis, size, what in (
        (heads, k_cache.shape[2 if layout == "NHD" else 1], "KVH"),
        (sequences, len(seq_lens), "S"),
    ):
        if axis is not None:
            expect(axis in mesh.shape, "mesh", f"axes {tuple(mesh.shape)}", f"an axis {axis!r}")
            expect(size % mesh.shape[axis] == 0, axis, f"{mesh.shape[axis]} devices", f"a divisor of {what} = {size}")
    names = tuple(arrays)
    specs = tuple(_spec(name, arrays[name], layout, heads, sequences) for name in names)

    def local(*parts: Array) -> Any:
        here: dict[str, Any] = dict(zip(names, parts, strict=True))
        return paged_attention(**here, **static)

    out: Any = P(sequences, heads, None)
    if options.get("return_lse"):
        out = (out, P(sequences, heads))
    # Kernels do not say over which axes their results vary.
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return run(*(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays.values(), specs, strict=True)))


def _spec(name: str, value: Any, layout: str, heads: str | None, sequences: str | None) -> P:
    axes: list[str | None] = [None] * jnp.ndim(value)
    if name in _HEADS:
        axes[_HEADS[name]] = heads
    elif name in ("k_cache", "v_cache") or (name in ("k_scale", "v_scale") and len(axes) == 3):
        axes[2 if layout == "NHD" else 1] = heads
        axes[0] = sequences
    elif name in ("k_scale", "v_scale") and len(axes) == 1:
        axes[0] = heads
    if name in _SEQUENCES and axes:
        axes[0] = sequences
    return P(*axes)


def context_parallel_attention(
    q: Float[Array, "T H D"],
    k_cache: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"],
    v_cache: Num[Array, "P page_size KVH D"] | Num[Array, "P KVH page_size D"],
    block_table: Int[Array, "S max_pages"],
    local_context_lens: Int[Array, " S"],
    query_start_loc: Int[Array, " S+1"],
    new_k: Float[Array, "T KVH D"],
    new_v: Float[Array, "T KVH D"],
    *,
    axis_name: str,
    causal: Any = True,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention over a context that is divided among devices (decode context parallelism); call it in `jax.shard_map`.

    Each device holds some of each sequence's context in its own pool, in any division: every query sees all of it. This
    step's tokens are given to all. One all-gather of partial results and their LSE, then `merge_states`.

    Args:
      q: this step's queries, the same on every device of the axis.
      k_cache: this device's pages.
      v_cache: this device's pages.
      block_table: this device's page ids.
      local_context_lens: tokens before this step that this device holds of each sequence.
      query_start_loc: as in `paged_attention`.
      new_k: this step's keys, the same on every device.
      new_v: this step's values.
      axis_name: mesh axis of the division.
      causal: among this step's tokens.
      return_lse: also return the LSE.
      **options: scale, soft_cap, k_scale, v_scale, layout, max_query_len, batch_invariant and implementation of
        `paged_attention`.

    Returns:
      As `paged_attention`, the same on every device of the axis.

    Raises:
      NotImplementedError: an option that needs positions in the whole sequence (window, alibi_slopes, masks), or sinks.
    """
    known = {"scale", "soft_cap", "k_scale", "v_scale", "layout", "max_query_len", "batch_invariant", "implementation"}
    if other := sorted(set(options) - known):
        raise NotImplementedError(f"{other[0]}: not with a divided context; expected one of {', '.join(sorted(known))}")
    call = {"return_lse": True, **options}
    context = paged_attention(
        q, k_cache, v_cache, block_table, local_context_lens, query_start_loc, causal=False, **call
    )
    # The new tokens alone are a batch without context; scales belong to the cache, of which this reads nothing.
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    fresh = paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        query_lens,
        query_start_loc,
        new_k=new_k,
        new_v=new_v,
        causal=causal,
        **call,
    )
    packed = jnp.concatenate([context[0].astype(jnp.float32), context[1][..., None]], axis=-1)
    parts = lax.all_gather(packed, axis_name)  # [devices, T, H, D + 1]
    outs = jnp.concatenate([parts[..., :-1], fresh[0].astype(jnp.float32)[None]])
    out, lse = merge_states(outs, jnp.concatenate([parts[..., -1], fresh[1][None]]))
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out
