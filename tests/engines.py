"""Batches for the engines' backends: a cache that only `do_kv_cache_update` has filled, everything else NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from backends.builder import LayerSpec
from backends.impl import LayerScales
from backends.metadata import CommonAttentionMetadata
from backends.registry import AttentionBackendEnum
from tests import batches, oracle

NAMES = ("ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_FA", "FLASHINFER", "JATTN")
# A decode, two verifications of five tokens, an extend, a prefill, a padding request; in the order that engines want.
QUERIES, CONTEXTS = (1, 1, 5, 5, 40, 33, 0), (0, 70, 18, 31, 19, 0, 0)
NON_CAUSAL = ("ROCM_ATTN", "ROCM_AITER_FA", "FLASHINFER", "JATTN")


@dataclasses.dataclass
class Case:
    """A batch with its keys and values in every form that a test wants."""

    batch: dict  # arguments of the oracle, poisoned
    query: np.ndarray
    key: np.ndarray  # of this step's tokens
    value: np.ndarray
    slots: np.ndarray  # of this step's tokens; padding: -1
    all_slots: np.ndarray  # of every token of every sequence, with their keys and values
    all_keys: np.ndarray
    all_values: np.ndarray

    def common(self, **changes: Any) -> CommonAttentionMetadata:
        b = self.batch
        return CommonAttentionMetadata.make(
            b["query_start_loc"], b["seq_lens"], b["block_table"], self.slots, **changes
        )


def draw(seed, query_lens, context_lens, *, padding_tokens=3, causal=True, window=(None, None), **options) -> Case:
    """Draw a batch; `options` are those of `batches.draw`."""
    rng = np.random.default_rng(seed)
    options = {"page_size": 16, "head_dim": 32, "num_heads": 4, "num_kv_heads": 2} | options
    clean = batches.draw(rng, query_lens, context_lens, padding_tokens=padding_tokens, **options)
    page_size, tokens = options["page_size"], len(clean["q"])
    slots, all_slots = np.full(tokens, -1, np.int32), []
    for s, seq_len in enumerate(clean["seq_lens"]):
        position = np.arange(seq_len)
        mine = clean["block_table"][s][position // page_size] * page_size + position % page_size
        start, stop = clean["query_start_loc"][s : s + 2]
        slots[start:stop] = mine[seq_len - (stop - start) :]
        all_slots.append(mine)
    all_slots = np.concatenate([np.zeros(0, np.int32), *all_slots]).astype(np.int32)
    by_slot = [clean[name].reshape(-1, *clean[name].shape[2:]) for name in ("k_cache", "v_cache")]
    key, value = (np.where(slots[:, None, None] >= 0, x[slots], np.nan).astype(x.dtype) for x in by_slot)
    batch = batches.poison(rng, clean | {"causal": causal, "window": window})
    return Case(batch, batch["q"], key, value, slots, all_slots, *(x[all_slots] for x in by_slot))


def backend(name):
    return AttentionBackendEnum[name].get_class()


def make_impl(name, case: Case, **options):
    """The backend's Impl for a case."""
    _, heads, dim = case.query.shape
    options = {"scale": dim**-0.5} | options
    return backend(name).get_impl_cls()(heads, dim, options.pop("scale"), case.key.shape[1], **options)


def make_builder(name, case: Case, platform=None, **options):
    """The backend's builder for a case."""
    _, heads, dim = case.query.shape
    page_size = case.batch["k_cache"].shape[1]
    spec = LayerSpec(heads, case.key.shape[1], dim, page_size, dtype=case.query.dtype.name, **options)
    return backend(name).get_builder_cls()(spec, platform)


def fill_cache(name, impl, case: Case, layer=LayerScales(), dtype=None):  # noqa: B008
    """The engine's cache with every token of the case written, NaN elsewhere."""
    num_pages, page_size, heads, dim = case.batch["k_cache"].shape
    shape = backend(name).get_kv_cache_shape(num_pages, page_size, heads, dim, impl.kv_cache_dtype)
    empty = jnp.full(shape, jnp.nan, case.query.dtype if dtype is None else dtype)
    return impl.do_kv_cache_update(layer, case.all_keys, case.all_values, empty, case.all_slots)


def run(
    name, case, *, causal=True, layer=None, builder=None, common=None, dtype=None, attend=lambda f: f, **impl_options
):
    """Write the cache, build the metadata outside jit, and attend (`attend` may be `jax.jit`)."""
    layer = LayerScales() if layer is None else layer
    impl = make_impl(name, case, **impl_options)
    cache = fill_cache(name, impl, case, layer, dtype)
    metadata = (builder or make_builder(name, case)).build(0, common or case.common(causal=causal))
    return attend(impl.forward)(layer, case.query, case.key, case.value, cache, metadata)


def numpy_attend(request, operands, implementation=None):
    """The oracle in the place of `pallas_kernels.dispatch.attend`: no compilation."""
    arrays = {f.name: getattr(operands, f.name) for f in dataclasses.fields(operands)}
    arrays = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
    if request.causal is not None:
        arrays["causal"] = request.causal
    static = {name: getattr(request, name) for name in ("scale", "window", "soft_cap", "layout")}
    out, lse = oracle.attention(**arrays, **static)
    return jnp.asarray(out, operands.q.dtype), jnp.asarray(lse, jnp.float32)


def expected(case: Case, **changes):
    """The oracle's answer."""
    return oracle.attention(**(case.batch | changes))


def close(got, want, atol=2e-5):
    """Equal within `atol`, padding included."""
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=atol)


def fp8_case(causal=True):
    case = draw(7, (1, 1, 20, 17), (0, 30, 18, 0), causal=causal, padding_tokens=0)
    return case, LayerScales(k_scale=np.float32(0.02), v_scale=np.float32(0.05))


def fp8_oracle(case, layer, dtype, dense):
    """The oracle over a cache of 8-bit floats; requests longer than `dense` take their own tokens as they are."""
    stored, real = {}, {}
    for name in ("k", "v"):
        scale = getattr(layer, f"{name}_scale")
        limit = float(ml_dtypes.finfo(dtype).max)
        with np.errstate(invalid="ignore"):
            clipped = np.clip(case.batch[f"{name}_cache"] / scale, -limit, limit)
        stored |= {f"{name}_cache": clipped.astype(dtype), f"{name}_scale": scale}
        real[f"new_{name}"] = case.key if name == "k" else case.value
    cached, _ = expected(case, **stored)
    mixed, _ = expected(case, **stored, **real)
    query_lens = np.diff(case.batch["query_start_loc"])
    return np.where(np.repeat(query_lens > dense, query_lens)[:, None, None], mixed, cached)


# The longest request that reads its own tokens back from the cache; None: all do.
READS_BACK = {
    "ROCM_ATTN": 1,
    "ROCM_AITER_UNIFIED_ATTN": None,
    "ROCM_AITER_FA": 1,
    "FLASHINFER": None,
    "JATTN": None,
}
