"""The arithmetic of a layer: what all backends share.

A backend's `forward` is one ragged call of the kernels, or one for each phase where the builder has cut the batch into
decodes and prefills. What an engine means by a window, by scales and by "the new tokens" is settled here, by methods
that each backend overrides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from backends.contract import UNQUANTIZED_CACHE_DTYPES, AttentionType, Platform
from backends.kv_layouts import KVCacheArray, KVPools, write_pools
from pallas_kernels import dispatch
from pallas_kernels.quantization import store_as
from pallas_kernels.request import QUERY_DTYPES, describe, expect, make_request

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
# Backends of this project that run non-causal attention, for messages.
NON_CAUSAL_BACKENDS = "ROCM_ATTN, ROCM_AITER_FA, FLASHINFER, JATTN"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerScales:
    """A layer's factors: true value = stored value * scale. Without a quantised array its scale counts as 1."""

    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None


class Phase(NamedTuple):
    """A run of requests that one call answers."""

    first_req: int
    num_reqs: int
    first_token: int
    num_tokens: int
    max_query_len: int
    from_cache: bool = False  # none of its requests takes new tokens from the arguments


class Batch(NamedTuple):
    """What the kernels need of any backend's metadata."""

    query_start_loc: Int[Array, " S+1"]
    seq_lens: Int[Array, " S"]
    block_table: Int[Array, "S max_blocks"]
    causal: bool | Bool[Array, " S"]
    max_query_len: int
    phases: Sequence[Phase] = ()  # none: all requests in one call
    ranges: Int[Array, "S R 2"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionImpl:
    """One layer's attention, with vLLM's constructor arguments in vLLM's order.

    Raises:
      ValueError: arguments do not fit each other.
      NotImplementedError: the backend lacks what they ask for.
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    alibi_slopes: Float[Array, " H"] | None = None
    sliding_window: int | None = None  # keys that a query sees, itself included; None or <= 0: all
    kv_cache_dtype: str = "auto"
    logits_soft_cap: float | None = None
    attn_type: AttentionType = AttentionType.DECODER
    kv_sharing_target_layer_name: str | None = None
    sinks: Float[Array, " H"] | None = None
    platform: Platform | None = None

    backend_name: ClassVar[str] = ""
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = (AttentionType.DECODER,)
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = UNQUANTIZED_CACHE_DTYPES
    metadata_cls: ClassVar[type] = object
    can_return_lse_for_decode: ClassVar[bool] = False
    lse_base_on_e: ClassVar[bool] = True
    supports_pcp: ClassVar[bool] = False
    takes_q_scale: ClassVar[bool] = False
    per_head_scales: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        fits = self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0
        came = f"{self.num_kv_heads} beside num_heads={self.num_heads}"
        expect(fits, "num_kv_heads", came, "a divisor of num_heads")
        for name in ("num_heads", "head_size"):
            size = getattr(self, name)
            positive = isinstance(size, int | np.integer) and size > 0
            expect(bool(positive), name, repr(size), "a positive int")
        window, cap = self.sliding_window, self.logits_soft_cap
        whole = window is None or (isinstance(window, int | np.integer) and not isinstance(window, bool))
        expect(whole, "sliding_window", repr(window), "an int, or None")
        finite = isinstance(self.scale, int | float | np.number) and np.isfinite(self.scale)
        expect(bool(finite), "scale", repr(self.scale), "a finite number")
        capped = cap is None or (isinstance(cap, int | float | np.number) and cap >= 0)
        expect(capped, "logits_soft_cap", repr(cap), "a number >= 0 (0: none), or None")
        for name in ("sinks", "alibi_slopes"):
            value = getattr(self, name)
            ok = value is None or jnp.shape(value) == (self.num_heads,)
            expect(ok, name, describe(value), f"one number for each of num_heads={self.num_heads} query heads")
        types = [t.value for t in AttentionType]
        expect(self.attn_type in types, "attn_type", repr(self.attn_type), f"one of {', '.join(types)}")
        object.__setattr__(self, "attn_type", AttentionType(self.attn_type))
        if self.attn_type not in self.supported_attn_types:
            self._refuse(f"attn_type={self.attn_type.value!r}: {self._why_not_attn_type()}")
        if self.kv_cache_dtype not in self.supported_kv_cache_dtypes:
            self._refuse(f"kv_cache_dtype={self.kv_cache_dtype!r}, of {', '.join(self.supported_kv_cache_dtypes)}")
        if self.attn_type in ENCODERS and self.quantized:
            self._refuse(f"kv_cache_dtype={self.kv_cache_dtype!r} with an encoder, which keeps no cache")
        if self.attn_type is AttentionType.ENCODER_DECODER and self.window_size > 0:
            self._refuse("a sliding window in cross-attention, where positions of the two sides do not compare")

    # What a backend overrides.

    def _why_not_attn_type(self) -> str:
        return f"only {', '.join(t.value for t in self.supported_attn_types)}"

    def window(self, causal: bool) -> tuple[int | None, int | None]:
        """The engine's window as (left, right) tokens besides the query itself, by absolute distance."""
        left = self.window_size - 1
        return (left, None if causal else left) if self.window_size > 0 else (None, None)

    def check_call(self, batch: Batch) -> None:
        """Raise what this backend refuses about a batch."""

    def batch(self, metadata: Any) -> Batch:
        """What the kernels need of this backend's metadata."""
        raise NotImplementedError

    def dense_queries(self, query_lens: Array, metadata: Any) -> Bool[Array, " S"] | None:
        """Requests whose new K and V come unquantised from the arguments of `forward`; None: all from the cache."""
        return None

    def split_cache(self, kv_cache: Array) -> KVPools:
        """The pools of the engine's cache array."""
        raise NotImplementedError

    def write_cache(self, kv_cache: Array, k: Array, v: Array, slots: Array, k_scale: Any, v_scale: Any) -> Array:
        """The engine's cache array with new tokens."""
        raise NotImplementedError

    def fused_output_quant_supported(self) -> bool:
        """Whether `forward` takes an `output_scale`."""
        return False

    # What users call.

    @property
    def supports_quant_query_input(self) -> bool:
        """Whether the engine quantises queries before it calls the layer."""
        return False

    @property
    def window_size(self) -> int:
        """Keys in the window; 0: no window."""
        return max(self.sliding_window or 0, 0)

    @property
    def quantized(self) -> bool:
        """Whether the cache holds 8-bit values."""
        return self.kv_cache_dtype not in UNQUANTIZED_CACHE_DTYPES

    def do_kv_cache_update(
        self,
        layer: LayerScales,
        key: Float[Array, "T KVH D"],
        value: Float[Array, "T KVH D"],
        kv_cache: KVCacheArray,
        slot_mapping: Int[Array, " T"],
    ) -> KVCacheArray:
        """The cache with this step's keys and values; call it before `forward`.

        Encoders, and layers that share the cache of an earlier one, write nothing.
        """
        if self.attn_type in ENCODERS or self.kv_sharing_target_layer_name is not None:
            return kv_cache
        k_scale, v_scale = self._scales(layer)
        if isinstance(kv_cache, KVPools):
            return write_pools(self._typed(kv_cache), key, value, slot_mapping, k_scale, v_scale)
        as_stored = kv_cache.dtype
        new = self.write_cache(self._typed_array(kv_cache), key, value, slot_mapping, k_scale, v_scale)
        return new if new.dtype == as_stored else jax.lax.bitcast_convert_type(new, as_stored)

    def forward(
        self,
        layer: LayerScales,
        query: Float[Array, "T H D"],
        key: Float[Array, "T KVH D"] | None,
        value: Float[Array, "T KVH D"] | None,
        kv_cache: KVCacheArray | None,
        attn_metadata: Any,
        output_scale: Float[Array, ""] | float | None = None,
        output_block_scale: Any = None,
        *,
        output_dtype: Any = None,
        return_lse: bool = False,
        implementation: str | None = None,
    ) -> Any:
        """Attention of this step's queries. The cache holds this step's K and V already.

        Args:
          layer: scales.
          query: rows of all requests, one after the other; or 8-bit, with `layer.q_scale`.
          key: this step's keys; None: they are read from the cache.
          value: this step's values.
          kv_cache: the engine's cache array, or `KVPools`; encoders have none.
          attn_metadata: of this backend's class. None is an engine's profiling run: the result is zeros.
          output_scale: the result is stored as 8-bit floats of result / output_scale.
          output_block_scale: no backend here has it.
          output_dtype: of the result; the query's by default, bfloat16 for 8-bit queries.
          return_lse: also return the natural-log LSE [T, H].
          implementation: as in `pallas_kernels.dispatch.attend`.

        Returns:
          [T, H, D]; rows past the last request are 0.

        Raises:
          ValueError: an argument does not fit.
          NotImplementedError: the engine refuses the combination.
        """
        want = (self.num_heads, self.head_size)
        expect(query.ndim == 3 and query.shape[1:] == want, "query", describe(query), f"[T, H, D] = [T, {want}]")
        query, dtype = self._query(layer, query, output_dtype)
        if attn_metadata is None:
            return jnp.zeros(query.shape, dtype)
        found = type(attn_metadata).__name__
        fits = isinstance(attn_metadata, self.metadata_cls)
        expect(fits, "attn_metadata", found, f"{self.metadata_cls.__name__}, from the builder of {self.backend_name}")
        if output_block_scale is not None:
            self._refuse("output_block_scale: block-quantised results")
        if output_scale is not None and not self.fused_output_quant_supported():
            self._refuse("output_scale: quantised results")
        batch = self.batch(attn_metadata)
        self.check_call(batch)
        if self.attn_type in ENCODERS:
            out, lse = self._encode(query, key, value, batch, implementation)
        else:
            out, lse = self._paged(layer, query, key, value, kv_cache, attn_metadata, batch, implementation)
        if output_scale is not None:
            fp8 = "float8_e4m3fn" if self.platform is None else self.platform.fp8_dtype
            out = store_as(out.astype(jnp.float32) / output_scale, fp8)
        else:
            out = out.astype(dtype)
        return (out, lse) if return_lse else out

    # The parts of `forward`.

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{self.backend_name} does not support {what}")

    def _query(self, layer: LayerScales, query: Array, output_dtype: Any) -> tuple[Array, Any]:
        if query.dtype.name in QUERY_DTYPES:
            return query, query.dtype if output_dtype is None else jnp.dtype(output_dtype)
        expect(query.dtype.itemsize == 1, "query", describe(query), f"a dtype of {', '.join(QUERY_DTYPES)} or 8 bits")
        scale = layer.q_scale
        if not self.takes_q_scale and not _is_one(scale):
            self._refuse(f"8-bit queries with q_scale={scale!r}; only 1")
        dtype = jnp.dtype(jnp.bfloat16 if output_dtype is None else output_dtype)
        values = query.astype(jnp.float32) * (1.0 if scale is None else scale)
        return values.astype(dtype), dtype

    def _scales(self, layer: LayerScales) -> tuple[Any, Any]:
        """K and V scale; an unquantised cache has none."""
        if not self.quantized:
            return None, None
        scales = [1.0 if s is None else s for s in (layer.k_scale, layer.v_scale)]
        for name, value in zip(("k_scale", "v_scale"), scales, strict=True):
            if jnp.ndim(value) != 0 and not self.per_head_scales:
                self._refuse(f"{name} of shape {list(jnp.shape(value))}; one number for all heads only")
        return scales[0], scales[1]

    def _storage_dtype(self) -> jnp.dtype:
        if self.kv_cache_dtype == "fp8_e5m2":
            return jnp.dtype("float8_e5m2")
        return jnp.dtype("float8_e4m3fn" if self.platform is None else self.platform.fp8_dtype)

    def _typed_array(self, cache: Array) -> Array:
        """Engines keep 8-bit caches as bytes; this gives the bytes their type."""
        if not self.quantized:
            ok = cache.dtype.name in QUERY_DTYPES
            expect(ok, "kv_cache", describe(cache), f"floats, for kv_cache_dtype={self.kv_cache_dtype!r}")
            return cache
        dtype = self._storage_dtype()
        ok = cache.dtype in (dtype, jnp.uint8)
        expect(ok, "kv_cache", describe(cache), f"uint8 or {dtype}, for kv_cache_dtype={self.kv_cache_dtype!r}")
        return jax.lax.bitcast_convert_type(cache, dtype) if cache.dtype == jnp.uint8 else cache

    def _typed(self, pools: KVPools) -> KVPools:
        return dataclasses.replace(pools, k=self._typed_array(pools.k), v=self._typed_array(pools.v))

    def _options(self, causal: bool | Array) -> dict[str, Any]:
        # Flags of each request: the window must mean the same for all of them (see JATTN).
        flag = causal if isinstance(causal, bool) else False
        return {
            "scale": self.scale,
            "causal": causal,
            "window": self.window(flag),
            "soft_cap": self.logits_soft_cap or None,
            "sinks": self.sinks,
            "alibi_slopes": self.alibi_slopes,
        }

    def _encode(
        self, query: Array, key: Array | None, value: Array | None, batch: Batch, implementation: str | None
    ) -> tuple[Array, Array]:
        """Every token of a request sees every other, within the window; there is no cache."""
        expect(
            key is not None and value is not None, "key", None, "this step's keys and values: encoders have no cache"
        )
        nothing = jnp.zeros((1, 1, self.num_kv_heads, self.head_size), query.dtype)
        num_reqs = batch.seq_lens.shape[0]
        request, operands = make_request(
            query,
            nothing,
            nothing,
            jnp.zeros((num_reqs, 1), jnp.int32),
            batch.query_start_loc[1:] - batch.query_start_loc[:-1],
            batch.query_start_loc,
            new_k=_rows(key, query),
            new_v=_rows(value, query),
            max_query_len=max(batch.max_query_len, 1),
            return_lse=True,
            **self._options(False),
        )
        out, lse = dispatch.attend(request, operands, implementation)
        assert lse is not None
        return out, lse

    def _paged(
        self,
        layer: LayerScales,
        query: Array,
        key: Array | None,
        value: Array | None,
        kv_cache: KVCacheArray | None,
        metadata: Any,
        batch: Batch,
        implementation: str | None,
    ) -> tuple[Array, Array]:
        expect(kv_cache is not None, "kv_cache", None, "the cache")
        pools = (
            kv_cache if isinstance(kv_cache, KVPools) else self.split_cache(self._typed_array(jnp.asarray(kv_cache)))
        )
        pools = self._typed(pools)
        k_scale, v_scale = self._scales(layer)
        num_tokens, num_reqs = query.shape[0], batch.seq_lens.shape[0]
        phases = batch.phases or (Phase(0, num_reqs, 0, num_tokens, batch.max_query_len),)
        dense = None
        if key is not None and value is not None:
            dense = self.dense_queries(batch.query_start_loc[1:] - batch.query_start_loc[:-1], metadata)
        if dense is not None:
            # A request outside `dense` reads its own tokens as the cache holds them.
            index = jnp.searchsorted(batch.query_start_loc[1:], jnp.arange(num_tokens), side="right")
            from_argument = dense[jnp.minimum(index, num_reqs - 1)][:, None, None]
            key, value = (
                jnp.where(from_argument, _rows(x, query), _as_cached(_rows(x, query), s, pools.k.dtype))
                for x, s in ((key, k_scale), (value, v_scale))
            )
        outs, lses, answered = [], [], 0
        for phase in phases:
            if phase.num_reqs == 0 or phase.num_tokens == 0:
                continue
            rows = slice(phase.first_token, phase.first_token + phase.num_tokens)
            reqs = slice(phase.first_req, phase.first_req + phase.num_reqs)
            ends = slice(phase.first_req, phase.first_req + phase.num_reqs + 1)
            causal = batch.causal if isinstance(batch.causal, bool) else batch.causal[reqs]
            request, operands = make_request(
                query[rows],
                pools.k,
                pools.v,
                batch.block_table[reqs],
                batch.seq_lens[reqs],
                batch.query_start_loc[ends] - phase.first_token,
                k_scale=k_scale,
                v_scale=v_scale,
                new_k=None if dense is None or key is None or phase.from_cache else key[rows],
                new_v=None if dense is None or value is None or phase.from_cache else value[rows],
                bidirectional_ranges=None if batch.ranges is None else batch.ranges[reqs],
                layout=pools.layout,
                max_query_len=max(phase.max_query_len, 1),
                return_lse=True,
                **self._options(causal),
            )
            out, lse = dispatch.attend(request, operands, implementation)
            outs.append(out)
            lses.append(lse)
            answered += phase.num_tokens
        rest = num_tokens - answered
        outs.append(jnp.zeros((rest, *query.shape[1:]), query.dtype))
        lses.append(jnp.full((rest, self.num_heads), -jnp.inf))
        return jnp.concatenate(outs), jnp.concatenate(lses)


def _rows(x: Any, query: Array) -> Array:
    """Keys or values for the kernels: the query's type and number of rows."""
    x = jnp.asarray(x)
    expect(x.shape[0] >= query.shape[0], "key", describe(x), f"at least the query's {query.shape[0]} rows")
    return x[: query.shape[0]].astype(query.dtype)


def _as_cached(x: Array, scale: Any, dtype: Any) -> Array:
    """What a reader of the cache finds in place of `x`."""
    if scale is None:
        return x.astype(dtype).astype(x.dtype)
    scale = jnp.asarray(scale, jnp.float32)
    scale = scale if scale.ndim == 0 else scale[:, None]
    return (store_as(x.astype(jnp.float32) / scale, dtype).astype(jnp.float32) * scale).astype(x.dtype)


def _is_one(scale: Any) -> bool:
    if scale is None:
        return True
    return not isinstance(scale, jax.core.Tracer) and bool(np.all(np.asarray(scale) == 1))
