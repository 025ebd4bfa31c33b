"""Temporaries of the XLA path, by XLA's own account: no array of size T x KV length, no gathered copy of the KV."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jattn

MIB = 2**20
KV_HEADS, PAGE_SIZE, LENGTH = 8, 16, 16384
PREFILL = {
    "causal": {},
    "noncausal": {"causal": False},
    "window": {"window": (1023, None)},
    "soft_cap_sinks": {"soft_cap": 30.0, "sinks": True},
    "fp8": {"kv_dtype": jnp.float8_e4m3fn, "k_scale": True, "v_scale": True},
    "int8": {"kv_dtype": jnp.int8, "k_scale": True, "v_scale": True},
    "new_kv": {"new_kv": True},
    "hnd": {"layout": "HND"},
    "batch_invariant": {"batch_invariant": True},
}


def temporaries(num_tokens, num_seqs, num_pages, *, heads=32, head_dim=128, **options):
    """Bytes of temporaries and of the output of one compiled call; nothing is allocated or run."""
    kv_dtype = options.pop("kv_dtype", jnp.bfloat16)
    per_page = (PAGE_SIZE, KV_HEADS) if options.get("layout", "NHD") == "NHD" else (KV_HEADS, PAGE_SIZE)
    shapes = {
        "q": ((num_tokens, heads, head_dim), jnp.bfloat16),
        "k_cache": ((num_pages, *per_page, head_dim), kv_dtype),
        "v_cache": ((num_pages, *per_page, head_dim), kv_dtype),
        "block_table": ((num_seqs, LENGTH // PAGE_SIZE), jnp.int32),
        "seq_lens": ((num_seqs,), jnp.int32),
        "query_start_loc": ((num_seqs + 1,), jnp.int32),
    }
    if options.pop("new_kv", False):
        shapes |= dict.fromkeys(("new_k", "new_v"), ((num_tokens, KV_HEADS, head_dim), jnp.bfloat16))
    for name, shape in {"sinks": (heads,), "k_scale": (), "v_scale": ()}.items():
        if options.pop(name, False):
            shapes[name] = (shape, jnp.float32)
    arrays = {name: jax.ShapeDtypeStruct(*spec) for name, spec in shapes.items()}
    call = jax.jit(lambda arrays: jattn.paged_attention(**arrays, **options))
    memory = call.lower(arrays).compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.output_size_in_bytes


@pytest.mark.parametrize("options", PREFILL)
def test_prefill_of_16384_tokens(options):
    temp, output = temporaries(LENGTH, 1, LENGTH // PAGE_SIZE + 1, **PREFILL[options])
    assert output >= LENGTH * 32 * 128 * 2
    assert temp <= 1.25 * output + 64 * MIB, f"{temp / MIB:.0f} MiB beside an output of {output / MIB:.0f} MiB"


@pytest.mark.parametrize("options", PREFILL)
def test_decode_over_long_contexts(options):
    num_seqs = 64
    temp, output = temporaries(num_seqs, num_seqs, num_seqs * LENGTH // PAGE_SIZE + 1, **PREFILL[options])
    assert temp <= 1.25 * output + 64 * MIB, f"{temp / MIB:.0f} MiB beside an output of {output / MIB:.0f} MiB"
