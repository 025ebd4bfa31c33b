"""The one table of cases that every implementation is tested on: each feature alone, each pair, and each odd shape."""

from __future__ import annotations

import dataclasses
import itertools
import zlib

import numpy as np

from tests import batches


@dataclasses.dataclass(frozen=True)
class Case:
    """A named call. Its arrays are drawn by `build` from a seed that hangs on the name alone."""

    name: str
    # A decode, a chunk, a padding sequence with keys, one with neither, a prefill and a first token; then padding rows.
    query_lens: tuple[int, ...] = (1, 6, 0, 0, 11, 1)
    context_lens: tuple[int, ...] = (330, 37, 7, 0, 0, 0)
    padding_tokens: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    page_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None  # None: as `dtype`
    scales: str | tuple[str | None, str | None] | None = None  # "scalar", "head", "token", or a pair for K and V
    layout: str = "NHD"
    causal: bool | str = True  # "each": a flag for each sequence
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    soft_cap: float | None = None
    sinks: str | None = None  # "finite", or "some": some of them -inf, which is no sink
    alibi: bool = False
    new_kv: bool = False
    num_ranges: int = 0
    tree_size: int = 0
    kv_start: bool = False
    batch_invariant: bool = False
    return_lse: bool = True
    max_query_len: int | None = None


def build(case: Case) -> dict:
    """The arguments of the call by name."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    batch = batches.draw(
        rng,
        case.query_lens,
        case.context_lens,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        layout=case.layout,
        scales=case.scales,
        padding_tokens=case.padding_tokens,
    )
    num_seqs, seq_lens = len(case.query_lens), batch["seq_lens"]
    contexts = seq_lens - np.asarray(case.query_lens, np.int32)
    batch |= {"causal": case.causal, "window": case.window, "scale": case.scale, "soft_cap": case.soft_cap}
    batch |= {"batch_invariant": case.batch_invariant, "return_lse": case.return_lse}
    batch |= {"max_query_len": case.max_query_len}
    if case.causal == "each":
        batch["causal"] = np.arange(num_seqs) % 3 != 1
    if case.sinks:
        batch["sinks"] = rng.normal(1.0, 1.0, case.num_heads).astype(np.float32)
        if case.sinks == "some":
            batch["sinks"][::2] = -np.inf
    if case.alibi:
        batch["alibi_slopes"] = (0.7 ** (1 + np.arange(case.num_heads))).astype(np.float32)
    if case.new_kv:
        shape = (len(batch["q"]), case.num_kv_heads, case.head_dim)
        batch["new_k"], batch["new_v"] = (batches.normal(rng, shape, batch["q"].dtype) for _ in "kv")
    if case.num_ranges:
        batch["bidirectional_ranges"] = draw_ranges(rng, contexts, seq_lens, case.num_ranges)
    if case.tree_size:
        batch["tree_mask"] = rng.random((num_seqs, case.tree_size, case.tree_size)) < 0.5
    if case.kv_start:  # nothing hidden, a little hidden, some rows left with no key, and all rows left with none
        choices = np.stack([0 * seq_lens, seq_lens // 5, contexts + 2, seq_lens])
        batch["kv_start"] = choices[(3 + 2 * np.arange(num_seqs)) % 4, np.arange(num_seqs)].astype(np.int32)
        batch["kv_start"][:1] = seq_lens[:1] // 5
    return batch


def draw_ranges(rng, contexts, seq_lens, count):
    """Ranges in turn: over the border of context and queries; inside the queries, past the end; empty; reversed."""
    ranges = np.zeros((len(seq_lens), count, 2), np.int32)
    for s, (context, seq_len) in enumerate(zip(contexts, seq_lens, strict=True)):
        middle = (context + seq_len + 1) // 2
        kinds = [
            (max(0, context - int(rng.integers(1, 25))), middle),
            (middle, seq_len + int(rng.integers(0, 9))),
            (context, context),
            (seq_len, context),
        ]
        ranges[s] = [kinds[r % 4] for r in range(count)]
    return ranges


FEATURES: dict[str, dict] = {
    "noncausal": {"causal": False},
    "causal_by_sequence": {"causal": "each"},
    "window_left": {"window": (9, None)},
    "window_right": {"window": (None, 2)},
    "window_both": {"window": (20, 3)},
    "soft_cap": {"soft_cap": 1.5},
    "sinks": {"sinks": "finite"},
    "alibi": {"alibi": True},
    "fp8_scalar_scales": {"kv_dtype": "float8_e4m3fn", "scales": "scalar"},
    "fp8_head_scales": {"kv_dtype": "float8_e4m3fn", "scales": "head"},
    "fp8_token_scales": {"kv_dtype": "float8_e4m3fn", "scales": "token"},
    "int8_token_scales": {"kv_dtype": "int8", "scales": "token"},
    "new_kv": {"new_kv": True},
    "ranges": {"num_ranges": 4},
    "tree": {"tree_size": 6},
    "kv_start": {"kv_start": True},
    "hnd": {"layout": "HND"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "pages_of_12": {"page_size": 12},
    "batch_invariant": {"batch_invariant": True},
    "without_lse": {"return_lse": False},
}


def combine(*names: str) -> Case | None:
    """A case with several features; None where two of them set the same option."""
    options: dict = {}
    for name in names:
        if options.keys() & FEATURES[name].keys():
            return None
        options |= FEATURES[name]
    if options.get("window", (None, None))[1] is not None:
        options = {"causal": "each"} | options  # under causality a right side would say nothing
    return Case("+".join(names), **options)


ALONE = [combine(name) for name in FEATURES]
PAIRS = [case for pair in itertools.combinations(FEATURES, 2) if (case := combine(*pair))]
MANY = [
    combine("noncausal", "window_both", "soft_cap", "sinks", "fp8_head_scales", "kv_start", "hnd", "bfloat16"),
    combine("causal_by_sequence", "window_left", "alibi", "int8_token_scales", "new_kv", "ranges", "kv_start"),
    combine("causal_by_sequence", "window_both", "soft_cap", "sinks", "alibi", "new_kv", "ranges", "tree", "kv_start"),
    combine("tree", "fp8_token_scales", "new_kv", "hnd", "batch_invariant", "sinks", "window_left"),
    combine("noncausal", "fp8_scalar_scales", "new_kv", "float16", "batch_invariant", "pages_of_12"),
]


def _shapes():
    yield Case("plain")
    for page_size in (1, 2, 3, 8, 32, 48, 64, 100, 128, 256, 544, 784, 1024):
        context_lens = (2 * page_size + 3, page_size - 1, 7, 0, 0, 0)  # beyond two pages, and over a page's border
        yield Case(f"page_size_{page_size}", page_size=page_size, context_lens=context_lens, causal="each")
    for head_dim in (16, 32, 64, 80, 96, 112, 128, 192, 256, 512):
        yield Case(f"head_dim_{head_dim}", head_dim=head_dim, causal="each")
    for heads, kv_heads in ((1, 1), (6, 6), (3, 1), (6, 2), (5, 1), (14, 2), (16, 2), (17, 1), (34, 2), (64, 1)):
        yield Case(f"heads_{heads}_over_{kv_heads}", num_heads=heads, num_kv_heads=kv_heads, causal="each")


def _dtypes():
    for dtype in ("float32", "bfloat16", "float16"):
        for kv_dtype in ("float8_e4m3fn", "float8_e5m2", "int8"):
            scales = ("scalar", "head") if kv_dtype != "float8_e5m2" else ("token", "scalar")
            yield Case(f"{dtype}_over_{kv_dtype}", dtype=dtype, kv_dtype=kv_dtype, scales=scales, head_dim=32)
    yield Case("fp8_without_scales", kv_dtype="float8_e4m3fn")
    yield Case("fp8_with_a_scale_for_k_only", kv_dtype="float8_e4m3fn", scales=("token", None), layout="HND")
    yield Case("fp8_with_a_scale_for_v_only", kv_dtype="float8_e4m3fn", scales=(None, "head"))
    yield Case("fp8_fnuz", dtype="bfloat16", kv_dtype="float8_e4m3fnuz", scales="head")
    yield Case("int8_head_scales_hnd", kv_dtype="int8", scales="head", layout="HND")


def _workloads():
    def batch(name, queries, contexts, **options):
        return Case(name, query_lens=queries, context_lens=contexts, **{"padding_tokens": 0} | options)

    yield batch("one_token", (1,), (0,))
    yield batch("one_decode", (1,), (700,))
    yield batch("decodes_of_odd_lengths", (1,) * 9, (62, 63, 64, 126, 127, 128, 511, 512, 1023))
    yield batch("decodes_with_window", (1,) * 4, (30, 200, 900, 3), window=(63, None))
    yield batch("many_decodes", (1,) * 37, tuple(range(0, 37 * 5, 5)))
    yield batch("prefill", (300,), (0,), num_heads=2, num_kv_heads=1)
    yield batch("prefill_noncausal", (131, 70), (0, 5), num_heads=2, num_kv_heads=1, causal=False)
    yield batch("chunk_after_long_context", (65,), (1000,), num_heads=2, num_kv_heads=1)
    yield batch("prefills_with_window", (150, 20), (90, 200), num_heads=2, num_kv_heads=1, window=(15, None))
    yield batch("drafts", (16,) * 4, (16, 37, 0, 250), causal=False, num_heads=10)
    yield batch("drafts_with_window", (16,) * 3, (16, 137, 250), causal=False, window=(31, 31))
    yield batch("block_shorter_than_window_shorter_than_context", (4,) * 3, (90, 17, 33), window=(7, None))
    yield batch("trees", (8, 8, 5, 1), (40, 0, 9, 3), tree_size=8, sinks="finite")
    yield batch("tree_of_one", (1, 3), (5, 5), tree_size=1)
    yield batch("decodes_among_prefills", (1, 40, 1, 17, 1, 2), (100, 3, 0, 260, 64, 15), causal="each")
    yield batch("all_padding", (0, 0), (0, 5), padding_tokens=4, sinks="finite")
    yield batch("last_sequences_padding", (3, 1, 0, 0, 0), (4, 9, 0, 0, 0), padding_tokens=12, causal=False)
    yield batch("first_sequences_padding", (0, 0, 3, 1), (0, 6, 4, 9), padding_tokens=1)
    yield batch("custom_scale", (3, 5), (4, 30), scale=0.9)
    yield batch("zero_scale", (3, 5), (4, 30), scale=0.0)
    yield batch("sinks_some_absent", (3, 5, 1), (4, 30, 300), sinks="some", kv_start=True)
    yield batch("hint_exact", (3, 5, 1), (4, 30, 300), max_query_len=5)
    yield batch("hint_loose", (3, 5, 1), (4, 30, 300), max_query_len=64)
    yield batch("window_of_itself", (3, 5, 1), (4, 30, 300), window=(0, 0), causal=False)


CASES: list[Case] = [*_shapes(), *_dtypes(), *_workloads(), *ALONE, *MANY, *PAIRS]
