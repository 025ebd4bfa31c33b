# ruff: noqa: E402
"""Run by test_sharding.py in a process of its own, since the number of CPU devices is fixed at the first use of JAX."""

import jax

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jattn
from jattn.sharding import context_parallel_attention, sharded_paged_attention
from tests import batches, oracle

RNG = np.random.default_rng(0)
ARRAYS = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc")


def heads_and_sequences() -> None:
    """Two devices a head axis, two a sequence axis: as each part alone."""
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    parts = [batches.draw(RNG, (3, 1, 8), context, num_heads=8, num_kv_heads=2) for context in ((5, 20, 0), (9, 2, 7))]
    pages = max(len(p["k_cache"]) for p in parts)
    columns = max(p["block_table"].shape[1] for p in parts)
    for p in parts:
        for name in ("k_cache", "v_cache"):
            p[name] = np.pad(p[name], ((0, pages - len(p[name])), (0, 0), (0, 0), (0, 0)))
        p["block_table"] = np.pad(p["block_table"], ((0, 0), (0, columns - p["block_table"].shape[1])))
    sinks = RNG.normal(size=8).astype(np.float32)
    whole = {name: np.concatenate([p[name] for p in parts]) for name in ARRAYS}
    out, lse = sharded_paged_attention(
        mesh, **whole, heads="model", sequences="data", sinks=jnp.asarray(sinks), causal=False, return_lse=True
    )
    for n, p in enumerate(parts):
        want, want_lse = oracle.attention(**{name: p[name] for name in ARRAYS}, sinks=sinks, causal=False)
        rows = slice(n * len(want), (n + 1) * len(want))
        np.testing.assert_allclose(np.asarray(out)[rows], want, atol=5e-6)
        np.testing.assert_allclose(np.asarray(lse)[rows], want_lse, atol=5e-6)


def divided_context() -> None:
    """Four devices hold pages in turn; one of them has nothing of the short sequence."""
    mesh = jax.make_mesh((4,), ("context",))
    page_size, query_lens, contexts = 4, (3, 1, 5), (40, 9, 0)
    b = batches.draw(RNG, query_lens, contexts, num_heads=6, num_kv_heads=2, page_size=page_size)
    want, want_lse = oracle.attention(**{name: b[name] for name in ARRAYS})
    total = sum(query_lens)
    new = {name: np.zeros((total, 2, b["q"].shape[2]), np.float32) for name in ("k_cache", "v_cache")}
    local_lens = np.zeros((4, 3), np.int32)
    tables = np.zeros((4, 3, b["block_table"].shape[1]), np.int32)
    for s, (queries, context) in enumerate(zip(query_lens, contexts, strict=True)):
        position = np.arange(context, context + queries)
        pages = b["block_table"][s][position // page_size]
        for name in new:
            rows = slice(b["query_start_loc"][s], b["query_start_loc"][s + 1])
            new[name][rows] = b[name][pages, position % page_size]
        for column in range(-(-context // page_size)):
            rank = column % 4
            tables[rank, s, column // 4] = b["block_table"][s][column]
            local_lens[rank, s] += min(context - column * page_size, page_size)

    def step(table, lens):
        return context_parallel_attention(
            b["q"],
            b["k_cache"],
            b["v_cache"],
            table[0],
            lens[0],
            b["query_start_loc"],
            new["k_cache"],
            new["v_cache"],
            axis_name="context",
            return_lse=True,
        )

    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P("context"), P("context")), out_specs=(P(), P()), check_vma=False)
    )
    where = jax.NamedSharding(mesh, P("context"))
    out, lse = run(jax.device_put(tables, where), jax.device_put(local_lens, where))
    np.testing.assert_allclose(np.asarray(out)[:total], want[:total], atol=5e-6)
    np.testing.assert_allclose(np.asarray(lse)[:total], want_lse[:total], atol=5e-6)


def refusals() -> None:
    """What does not fit says so."""
    mesh = jax.make_mesh((4,), ("model",))
    b = batches.draw(RNG, (1,), (3,), num_heads=6, num_kv_heads=2)
    arrays = {name: b[name] for name in ARRAYS}
    for axis, words in (("model", "a divisor of KVH = 2"), ("heads", "an axis 'heads'")):
        try:
            sharded_paged_attention(mesh, **arrays, heads=axis)
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(axis)
    try:
        context_parallel_attention(**_context_arguments(arrays), axis_name="model", window=(4, None))
    except NotImplementedError as error:
        assert "window" in str(error)
    else:
        raise AssertionError("window")


def _context_arguments(arrays: dict) -> dict:
    rest = {name: value for name, value in arrays.items() if name != "seq_lens"}
    kv = np.zeros((len(arrays["q"]), 2, arrays["q"].shape[2]), np.float32)
    return rest | {"local_context_lens": arrays["seq_lens"], "new_k": kv, "new_v": kv}


if __name__ == "__main__":
    assert jattn.paged_attention is not None
    heads_and_sequences()
    divided_context()
    refusals()
    print("sharding: 3 passed")
