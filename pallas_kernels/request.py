"""What one attention call asks for: static options (`AttentionRequest`) and arrays (`AttentionOperands`), checked once.

Vocabulary: T query tokens, S sequences, H query heads, KVH KV heads, D head_dim, P pages.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.masks import FAR

Layout = Literal["NHD", "HND"]
ScaleKind = Literal["none", "scalar", "head", "token"]

QUERY_DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int8")


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """The static side of a call; hashable, so one compiled program serves every call that has an equal request."""

    num_tokens: int  # T
    num_seqs: int  # S
    num_heads: int  # H
    num_kv_heads: int  # KVH
    head_dim: int  # D
    num_pages: int  # P
    page_size: int
    max_pages: int  # width of the block table
    q_dtype: np.dtype
    kv_dtype: np.dtype
    layout: Layout = "NHD"
    scale: float = 1.0
    causal: bool | None = True  # None: the operands carry a flag for each sequence
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    k_scale: ScaleKind = "none"
    v_scale: ScaleKind = "none"
    new_kv: bool = False
    num_ranges: int = 0  # R
    tree_size: int = 0  # Q; 0: no tree mask
    kv_start: bool = False
    max_query_len: int = 1  # a hint for tiling, never a limit
    batch_invariant: bool = False
    return_lse: bool = False

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def quantized(self) -> bool:
        """Whether the cache holds 8-bit values."""
        return self.kv_dtype.name in QUANTIZED_DTYPES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOperands:
    """The arrays of a call; None where the request does not ask for the feature."""

    q: Array  # [T, H, D]
    k_cache: Array  # NHD [P, page_size, KVH, D], HND [P, KVH, page_size, D]
    v_cache: Array
    block_table: Array  # int32 [S, max_pages]
    seq_lens: Array  # int32 [S]
    query_start_loc: Array  # int32 [S+1]
    causal: Array | None = None  # bool [S], present iff request.causal is None
    sinks: Array | None = None  # float32 [H]
    alibi_slopes: Array | None = None  # float32 [H]
    k_scale: Array | None = None  # float32: [], [KVH], or the cache's shape without D
    v_scale: Array | None = None
    new_k: Array | None = None  # [T, KVH, D]
    new_v: Array | None = None
    bidirectional_ranges: Array | None = None  # int32 [S, R, 2]
    tree_mask: Array | None = None  # bool [S, Q, Q]
    kv_start: Array | None = None  # int32 [S]


def expect(ok: bool, name: str, came: object, expected: str) -> None:
    """Raise the house's ValueError: the argument's name, what came and what was expected."""
    if not ok:
        raise ValueError(f"{name}: got {came}, expected {expected}")


def describe(x: object) -> str:
    """Dtype and shape of an array in short form, e.g. `bfloat16[8, 16, 128]`."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    return repr(x)


def as_array(name: str, x: object) -> Array:
    """`x` as an array, or a ValueError that names the argument."""
    if isinstance(x, Array):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: got {type(x).__name__} {str(x)[:80]!r}, expected an array ({error})") from None


def as_int32(name: str, x: object, expected: str = "integers") -> Array:
    """Integers of any width as int32; what int32 cannot hold becomes its nearest value, so that it stays out of range.

    Raises:
      ValueError: they are no integers.
    """
    if not isinstance(x, Array):
        try:
            x = np.asarray(x)  # jnp would wrap 64-bit values
        except ValueError as error:
            raise ValueError(f"{name}: got {str(x)[:80]!r}, expected {expected} ({error})") from None
        x = x.astype(np.int32) if x.size == 0 else x
    expect(jnp.issubdtype(x.dtype, jnp.integer), name, describe(x), expected)
    if x.dtype != np.int32:
        own, limits = jnp.iinfo(x.dtype), np.iinfo(np.int32)
        low, high = max(own.min, limits.min), min(own.max, limits.max)
        x = x.clip(np.asarray(low, x.dtype), np.asarray(high, x.dtype))
    return jnp.asarray(x, jnp.int32)


def make_request(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    scale: float | None = None,
    causal: bool | Array = True,
    window: tuple[int | None, int | None] = (None, None),
    soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    new_k: Array | None = None,
    new_v: Array | None = None,
    bidirectional_ranges: Array | None = None,
    tree_mask: Array | None = None,
    kv_start: Array | None = None,
    layout: str = "NHD",
    max_query_len: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> tuple[AttentionRequest, AttentionOperands]:
    """Check the arguments of `jattn.paged_attention` by shape, dtype and static value; split them in two.

    Raises:
      ValueError: an argument does not fit; the text names it, says what came and what was expected.
    """
    q, k_cache, v_cache = as_array("q", q), as_array("k_cache", k_cache), as_array("v_cache", v_cache)
    for name, flag in (("batch_invariant", batch_invariant), ("return_lse", return_lse)):
        expect(isinstance(flag, bool | np.bool_), name, describe(flag), "True or False (it is static)")
    num_tokens, num_heads, head_dim = _query_shape(q)
    num_pages, page_size, num_kv_heads = _cache_shape(k_cache, v_cache, layout, head_dim)
    expect(
        num_heads % num_kv_heads == 0,
        "q",
        f"{num_heads} heads over {num_kv_heads} KV heads",
        "a number of query heads that is a multiple of the KV heads",
    )
    block_table = _int32(block_table, "block_table", 2, "[S, max_pages]")
    num_seqs, max_pages = block_table.shape
    expect(max_pages > 0, "block_table", describe(block_table), "at least one column")
    seq_lens = _int32(seq_lens, "seq_lens", 1, f"[S] = [{num_seqs}]", (num_seqs,))
    query_start_loc = _int32(query_start_loc, "query_start_loc", 1, f"[S+1] = [{num_seqs + 1}]", (num_seqs + 1,))

    per_seq_causal = None
    if isinstance(causal, bool | np.bool_):
        causal_flag: bool | None = bool(causal)
    else:
        causal_flag, per_seq_causal = None, _causal_array(causal, num_seqs)
    kinds, scales = [], []
    for name, value, cache in (("k_scale", k_scale, k_cache), ("v_scale", v_scale, v_cache)):
        kind, array = _scale(name, value, cache, num_kv_heads)
        kinds.append(kind)
        scales.append(array)
    new_k, new_v = _new_kv(new_k, new_v, (num_tokens, num_kv_heads, head_dim), q.dtype)
    ranges = None
    if bidirectional_ranges is not None:
        ranges = _int32(bidirectional_ranges, "bidirectional_ranges", 3, f"[S, R, 2] = [{num_seqs}, R, 2]")
        expect(
            ranges.shape[0] == num_seqs and ranges.shape[2] == 2,
            "bidirectional_ranges",
            describe(ranges),
            f"int32[{num_seqs}, R, 2]",
        )
        ranges = None if ranges.shape[1] == 0 else ranges
    tree = None
    if tree_mask is not None:
        tree = as_array("tree_mask", tree_mask)
        expect(
            tree.ndim == 3 and tree.shape[0] == num_seqs and tree.shape[1] == tree.shape[2] and tree.dtype == bool,
            "tree_mask",
            describe(tree),
            f"bool[S, Q, Q] with S = {num_seqs}",
        )
        tree = None if tree.shape[1] == 0 else tree
    if kv_start is not None:
        kv_start = _int32(kv_start, "kv_start", 1, f"[S] = [{num_seqs}]", (num_seqs,))
        kv_start = jnp.clip(kv_start, 0, FAR)  # so that kernels may add to it
    if max_query_len is not None:
        expect(_is_int(max_query_len) and max_query_len > 0, "max_query_len", repr(max_query_len), "a positive int")

    request = AttentionRequest(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
        q_dtype=np.dtype(q.dtype),
        kv_dtype=np.dtype(k_cache.dtype),
        layout=layout,  # type: ignore[arg-type]
        scale=_static_float("scale", scale, head_dim**-0.5),
        causal=causal_flag,
        window=_window(window),
        soft_cap=_soft_cap(soft_cap),
        sinks=sinks is not None,
        alibi=alibi_slopes is not None,
        k_scale=kinds[0],
        v_scale=kinds[1],
        new_kv=new_k is not None,
        num_ranges=0 if ranges is None else ranges.shape[1],
        tree_size=0 if tree is None else tree.shape[1],
        kv_start=kv_start is not None,
        max_query_len=min(max_query_len or num_tokens, max(num_tokens, 1)),
        batch_invariant=bool(batch_invariant),
        return_lse=bool(return_lse),
    )
    operands = AttentionOperands(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        causal=per_seq_causal,
        sinks=_per_head("sinks", sinks, num_heads),
        alibi_slopes=_per_head("alibi_slopes", alibi_slopes, num_heads),
        k_scale=scales[0],
        v_scale=scales[1],
        new_k=new_k,
        new_v=new_v,
        bidirectional_ranges=ranges,
        tree_mask=tree,
        kv_start=kv_start,
    )
    return request, operands


def _is_int(x: object) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _query_shape(q: Array) -> tuple[int, int, int]:
    expect(q.ndim == 3, "q", describe(q), "[T, H, D]")
    expect(q.dtype.name in QUERY_DTYPES, "q", describe(q), f"a dtype of {', '.join(QUERY_DTYPES)}")
    expect(q.shape[1] > 0 and q.shape[2] > 0, "q", describe(q), "at least one head and one element a head")
    num_tokens, num_heads, head_dim = q.shape
    return num_tokens, num_heads, head_dim


def _cache_shape(k_cache: Array, v_cache: Array, layout: str, head_dim: int) -> tuple[int, int, int]:
    expect(layout in ("NHD", "HND"), "layout", repr(layout), "'NHD' or 'HND'")
    shape = "[P, page_size, KVH, D]" if layout == "NHD" else "[P, KVH, page_size, D]"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        expect(cache.ndim == 4, name, describe(cache), f"{shape} for layout {layout}")
        dtypes = QUERY_DTYPES + QUANTIZED_DTYPES
        expect(cache.dtype.name in dtypes, name, describe(cache), f"a dtype of {', '.join(dtypes)}")
        expect(min(cache.shape) > 0, name, describe(cache), f"no empty axis in {shape}")
        expect(
            cache.shape[3] == head_dim, name, describe(cache), f"D = {head_dim}, the head_dim of q, as the last axis"
        )
    expect(v_cache.shape == k_cache.shape, "v_cache", describe(v_cache), f"the shape of k_cache, {describe(k_cache)}")
    expect(v_cache.dtype == k_cache.dtype, "v_cache", describe(v_cache), f"the dtype of k_cache, {k_cache.dtype}")
    pages, a, b, _ = k_cache.shape
    return (pages, a, b) if layout == "NHD" else (pages, b, a)


def _int32(x: object, name: str, ndim: int, shape: str, exact: tuple[int, ...] | None = None) -> Array:
    array = as_int32(name, x, f"int32{shape}")
    expect(array.ndim == ndim and (exact is None or array.shape == exact), name, describe(array), f"int32{shape}")
    return array


def _causal_array(causal: object, num_seqs: int) -> Array:
    array = as_array("causal", causal)
    expect(
        array.dtype == bool and array.shape in ((), (num_seqs,)),
        "causal",
        describe(array),
        f"a bool, or bool[S] = bool[{num_seqs}] with a flag for each sequence",
    )
    return jnp.broadcast_to(array, (num_seqs,))


def _window(window: Any) -> tuple[int | None, int | None]:
    ok = isinstance(window, tuple | list) and len(window) == 2
    ok = ok and all(side is None or (_is_int(side) and side >= 0) for side in window)
    expect(ok, "window", repr(window), "(left, right), each a number of tokens >= 0 or None for unlimited")
    # A side that reaches past every position is unlimited; as a number it would overflow int32 sums.
    left, right = (None if side is None or side >= FAR else int(side) for side in window)
    return left, right


def _soft_cap(given: Any) -> float | None:
    """The cap; None for one that caps nothing, whose reciprocal float32 may not hold either."""
    cap = None if given is None else _static_float("soft_cap", given, 0.0, positive=True)
    return None if cap is None or cap >= 1e30 else cap


def _static_float(name: str, value: Any, default: float, positive: bool = False) -> float:
    if value is None:
        return default
    ok = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    limits = np.finfo(np.float32)
    ok = ok and bool(abs(value) <= float(limits.max)) and (not positive or value >= float(limits.tiny))
    kind = "a positive float32" if positive else "a finite float32"
    expect(ok, name, describe(value), f"{kind} Python number (it is static; fold a traced factor into q)")
    return float(value)


def _per_head(name: str, value: object, num_heads: int) -> Array | None:
    if value is None:
        return None
    array = as_array(name, value)
    ok = array.shape == (num_heads,) and jnp.issubdtype(array.dtype, jnp.floating)
    expect(ok, name, describe(array), f"floats of shape [H] = [{num_heads}]")
    return array.astype(jnp.float32)


def _scale(name: str, value: object, cache: Array, num_kv_heads: int) -> tuple[ScaleKind, Array | None]:
    if value is None:
        return "none", None
    cache_name = f"{name[0]}_cache"
    expect(
        cache.dtype.name in QUANTIZED_DTYPES,
        name,
        f"a scale beside {cache_name} {describe(cache)}",
        f"none, or a quantised cache ({', '.join(QUANTIZED_DTYPES)})",
    )
    array = as_array(name, float(value) if _is_int(value) else value)  # type: ignore[arg-type]
    kinds: dict[tuple[int, ...], ScaleKind] = {cache.shape[:3]: "token", (num_kv_heads,): "head", (): "scalar"}
    expect(
        array.shape in kinds and jnp.issubdtype(array.dtype, jnp.floating),
        name,
        describe(array),
        f"float32 of shape [], [KVH] = [{num_kv_heads}] or, for each token and head, {list(cache.shape[:3])}",
    )
    return kinds[array.shape], array.astype(jnp.float32)


def _new_kv(new_k: object, new_v: object, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Array | None, Array | None]:
    if new_k is None and new_v is None:
        return None, None
    missing = "new_k" if new_k is None else "new_v"
    expect(new_k is not None and new_v is not None, missing, None, "both new_k and new_v, or neither")
    arrays = []
    for name, value in (("new_k", new_k), ("new_v", new_v)):
        array = as_array(name, value)
        expect(
            array.shape == shape and array.dtype == dtype,
            name,
            describe(array),
            f"[T, KVH, D] = {list(shape)} in q's dtype, {dtype}",
        )
        arrays.append(array)
    return arrays[0], arrays[1]
