"""The standard workloads by name, and the arrays, operations and bytes of each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Workload:
    """A batch of requests (query_len, context_len), and the head shape it is measured with."""

    name: str
    what: str
    requests: tuple[tuple[int, int], ...]
    causal: bool = True
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    window: tuple[int | None, int | None] = (None, None)

    @property
    def query_lens(self) -> list[int]:
        """Of each request."""
        return [q for q, _ in self.requests]

    @property
    def seq_lens(self) -> list[int]:
        """Of each request, queries included."""
        return [q + c for q, c in self.requests]

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs."""
        left, right = self.window
        total = 0
        for q, c in self.requests:
            p = np.arange(c, c + q)
            end = p if self.causal else np.full(q, c + q - 1)
            end = end if right is None else np.minimum(end, p + right)
            total += int((end - (0 if left is None else np.maximum(p - left, 0)) + 1).sum())
        return total

    @property
    def flops(self) -> int:
        """Of both matrix products, over visible pairs only."""
        return 4 * self.head_dim * self.num_heads * self.pairs

    def min_bytes(self, kv_itemsize: int, q_itemsize: int = 2) -> int:
        """Each visible K and V row, each q row and each output row, moved once."""
        left = self.window[0]
        keys = sum(q + (c if left is None else min(c, left)) for q, c in self.requests)
        queries = sum(self.query_lens)
        kv = 2 * keys * self.num_kv_heads * self.head_dim * kv_itemsize
        return kv + 2 * queries * self.num_heads * self.head_dim * q_itemsize


def _table() -> dict[str, Workload]:
    w = [
        Workload("P1", "prefill 4 x 4096", ((4096, 0),) * 4),
        Workload("P2", "chunk 8 x 1024 @ 8192", ((1024, 8192),) * 8),
        Workload("P3", "prefill 1 x 16384", ((16384, 0),)),
        Workload("D1", "decode 64 x 1 @ 8191", ((1, 8191),) * 64),
        Workload("D2", "decode 1 x 1 @ 65535", ((1, 65535),)),
        Workload("D3", "decode 256 x 1 @ 1023", ((1, 1023),) * 256),
        Workload("F1", "draft 32 x 16 @ 4096", ((16, 4096),) * 32, causal=False),
        Workload("F2", "verify 32 x 16 @ 4096", ((16, 4096),) * 32),
        Workload("F3", "draft 4 x 16 @ 4096", ((16, 4096),) * 4, causal=False),
        Workload("M1", "2 x 2048 @ 2048 + 62 x 1 @ 4095", ((2048, 2048),) * 2 + ((1, 4095),) * 62),
        Workload("C1", "CPU prefill 1 x 2048", ((2048, 0),), num_heads=16, num_kv_heads=4),
        Workload("C2", "CPU decode 8 x 1 @ 4095", ((1, 4095),) * 8, num_heads=16, num_kv_heads=4),
    ]
    by_name = {x.name: x for x in w}
    for base in ("P2", "D1", "F1"):
        x = by_name[base]
        oss = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "window": (127, 0 if x.causal else 127)}
        w.append(dataclasses.replace(x, name=f"{base}-oss", what=f"{x.what}, gpt-oss shape, window 128", **oss))
        gemma = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 256}
        w.append(dataclasses.replace(x, name=f"{base}-gemma", what=f"{x.what}, Gemma shape", **gemma))
    return {x.name: x for x in w}


WORKLOADS = _table()
GPU_STANDARD = ("P1", "P2", "P3", "D1", "D2", "D3", "F1", "F2", "F3", "M1")
CPU_STANDARD = ("C1", "C2")


@dataclasses.dataclass(frozen=True)
class Batch:
    """A workload's arrays: random, on shuffled pages of one exactly filled pool."""

    workload: Workload
    page_size: int
    q: Array  # [T, H, D]
    k_cache: Array  # [P, page_size, KVH, D]
    v_cache: Array
    block_table: Array  # int32 [S, max_pages]
    seq_lens: Array  # int32 [S]
    query_start_loc: Array  # int32 [S+1]
    pages: tuple[np.ndarray, ...]  # ids of each request

    def sequence(self, s: int) -> tuple[Array, Array]:
        """K and V of one request, dense: [seq_len, KVH, D]."""
        w = self.workload
        ids, length = jnp.asarray(self.pages[s]), w.seq_lens[s]
        shape = (-1, w.num_kv_heads, w.head_dim)
        return self.k_cache[ids].reshape(shape)[:length], self.v_cache[ids].reshape(shape)[:length]

    def dense(self) -> tuple[Array, Array, Array] | None:
        """(q, k, v) as [S, length, heads, D] for peers that cannot page; None where lengths differ."""
        w = self.workload
        if len(set(w.requests)) > 1:
            return None
        count = len(w.requests)
        kv = [jnp.stack(x) for x in zip(*(self.sequence(s) for s in range(count)), strict=True)]
        return self.q.reshape(count, -1, w.num_heads, w.head_dim), kv[0], kv[1]


def build(workload: Workload, page_size: int, dtype: str, kv_dtype: str, seed: int = 0) -> Batch:
    """Draw a batch on the default device."""
    w = workload
    counts = [-(-n // page_size) for n in w.seq_lens]
    total = sum(counts)
    keys = jax.random.split(jax.random.key(seed), 3)
    pool = (total, page_size, w.num_kv_heads, w.head_dim)
    order = np.random.default_rng(seed).permutation(total).astype(np.int32)
    pages = tuple(np.split(order, np.cumsum(counts)[:-1]))
    table = np.zeros((len(counts), max(counts)), np.int32)
    for s, ids in enumerate(pages):
        table[s, : len(ids)] = ids

    def draw(key: Array, shape: tuple[int, ...], as_dtype: str) -> Array:
        return jax.jit(lambda k: jax.random.normal(k, shape, jnp.bfloat16).astype(as_dtype))(key)

    return Batch(
        workload=w,
        page_size=page_size,
        q=draw(keys[0], (sum(w.query_lens), w.num_heads, w.head_dim), dtype),
        k_cache=draw(keys[1], pool, kv_dtype),
        v_cache=draw(keys[2], pool, kv_dtype),
        block_table=jnp.asarray(table),
        seq_lens=jnp.asarray(w.seq_lens, jnp.int32),
        query_start_loc=jnp.asarray(np.cumsum([0, *w.query_lens]), jnp.int32),
        pages=pages,
    )


def reference_error(batch: Batch, out: Array) -> float:
    """Relative error (norm over norm) of the last rows of the first and last request against float32 attention."""
    w, worst = batch.workload, 0.0
    group = w.num_heads // w.num_kv_heads
    for s in sorted({0, len(w.requests) - 1}):
        k, v = (x.astype(jnp.float32) for x in batch.sequence(s))
        end, rows = int(batch.query_start_loc[s + 1]), min(16, w.query_lens[s])
        q = batch.q[end - rows : end].astype(jnp.float32).reshape(rows, w.num_kv_heads, group, w.head_dim)
        highest = {"precision": jax.lax.Precision.HIGHEST}
        logits = jnp.einsum("qhgd,khd->hgqk", q, k, **highest) * w.head_dim**-0.5
        q_pos = jnp.arange(w.seq_lens[s] - rows, w.seq_lens[s])[:, None]
        distance = jnp.arange(w.seq_lens[s])[None] - q_pos
        seen = (distance <= 0) if w.causal else jnp.ones_like(distance, bool)
        left, right = w.window
        seen = seen if left is None else seen & (distance >= -left)
        seen = seen if right is None else seen & (distance <= right)
        p = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1)
        ref = jnp.einsum("hgqk,khd->qhgd", p, v, **highest).reshape(rows, w.num_heads, w.head_dim)
        got = jnp.asarray(out)[end - rows : end].astype(jnp.float32)
        # np.maximum, not max: max(0.0, nan) is 0.0, and NaN would pass for exact.
        worst = float(np.maximum(worst, jnp.linalg.norm(got - ref) / jnp.linalg.norm(ref)))
    return worst
