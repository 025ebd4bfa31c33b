"""The TPU kernel beside jax's own ragged_paged_attention, as far as a host without a TPU can tell."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import tpu_codegen
from bench.sections import replace_section
from bench.tpu_codegen import Config, Row
from bench.workloads import WORKLOADS, Workload
from pallas_kernels import tpu_plan
from pallas_kernels.request import AttentionOperands, AttentionRequest, make_request

HELP = """Compiles the TPU kernel and jax's in-tree ragged_paged_attention at the same shapes for the same chips and prints
the VMEM, the program's size and the bytes of K and V that each copies on the standard workloads. Ours are counted from
the plan that drives the copies; jax's from its loops: for each block of queries and each sequence in it, all key blocks
up to the sequence's end, whole. --write keeps the tables in docs/performance.md. No TPU is needed or used."""

BEGIN, END = "<!-- tpu: begin, written by python -m bench.tpu_peer --write -->", "<!-- tpu: end -->"
GENERATION = {"v5e": "TPU v5", "v6e": "TPU v6", "7x": "TPU v7"}  # of its table of block sizes
TRAFFIC = {
    "D1": WORKLOADS["D1"],
    "F1": WORKLOADS["F1"],
    "F2": WORKLOADS["F2"],
    "P2": WORKLOADS["P2"],
    "M1": WORKLOADS["M1"],
    "D1, window 1024": dataclasses.replace(WORKLOADS["D1"], window=(1023, 0)),
    "P2, window 1024": dataclasses.replace(WORKLOADS["P2"], window=(1023, 0)),
}


def configs() -> Iterator[Config]:
    """Shapes that both are asked to compile."""
    caches = ((16, "bfloat16"), (64, "bfloat16"), (64, "float8_e4m3fn"))
    for (dim, heads), (page, kv) in itertools.product(((64, 8), (128, 1), (128, 8), (256, 8)), caches):
        for kind, options in tpu_codegen.KINDS.items():
            yield Config(kind, dim, heads, page, kv, max_pages=4096 // page, **options)


def block_sizes(chip: str, c: Config) -> tuple[int, int]:
    """(pages, queries) of the peer's block: from its table for the chip, else its default."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes as tuned

    shape = (c.kv_heads * c.group, c.kv_heads, c.head_dim, c.page_size, c.tokens, c.max_pages)
    key = tuned.simplify_key((jnp.dtype(c.dtype), jnp.dtype(c.kv_dtype), *shape))
    pages, queries = tuned.TUNED_BLOCK_SIZES.get(GENERATION[chip], {}).get(key, (128, 32))
    return min(c.max_pages, pages), min(c.tokens, queries)


def peer(chip: str, c: Config) -> Row:
    """Compile the peer."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    pages, queries = block_sizes(chip, c)
    shape = list(tpu_codegen.shapes(c)["k_cache"][0])
    shape[2] *= 2  # K and V heads in turn
    shape[0] //= 2
    given = [
        ((c.tokens, c.kv_heads * c.group, c.head_dim), jnp.dtype(c.dtype)),
        (tuple(shape), jnp.dtype(c.kv_dtype)),
        ((c.seqs,), jnp.int32),
        ((c.seqs, c.max_pages), jnp.int32),
        ((c.seqs + 1,), jnp.int32),
        ((1,), jnp.int32),
    ]
    scales = {"k_scale": 0.5, "v_scale": 0.5} if jnp.dtype(c.kv_dtype).itemsize == 1 else {}

    def call(*arrays: Any) -> Any:
        return ragged_paged_attention(
            *arrays,
            sm_scale=0.1,
            num_kv_pages_per_block=pages,
            num_queries_per_block=queries,
            vmem_limit_bytes=tpu_plan.CHIPS[chip].vmem * 7 // 8,
            **scales,
        )

    try:
        executable = tpu_codegen.compiled(chip, call, given)
    except Exception as failure:  # what it cannot compile is a result too
        return Row(chip, c, fault=f"{type(failure).__name__}: {' '.join(str(failure).split())[:160]}")
    code = executable.memory_analysis().generated_code_size_in_bytes
    return Row(
        chip, c, tile=f"{queries * c.group} x {pages * c.page_size}", vmem=tpu_codegen.vmem_of(executable), code=code
    )


def plan_of(w: Workload, page_size: int, chip: str) -> tuple[AttentionRequest, tpu_plan.Tiling, jax.Array]:
    """A workload's request, its tiles and its list of items."""
    seqs, tokens = len(w.requests), sum(w.query_lens)
    table = -(-max(w.seq_lens) // page_size)
    pool = (table * seqs, page_size, w.num_kv_heads, w.head_dim)
    found: list[AttentionRequest] = []

    def call(*arrays: Any) -> None:
        options = {"causal": w.causal, "window": w.window, "max_query_len": max(w.query_lens)}
        found.append(make_request(*arrays, **options)[0])

    given = [((tokens, w.num_heads, w.head_dim), jnp.bfloat16), (pool, jnp.bfloat16), (pool, jnp.bfloat16)]
    given += [((seqs, table), jnp.int32), ((seqs,), jnp.int32), ((seqs + 1,), jnp.int32)]
    jax.eval_shape(call, *(jax.ShapeDtypeStruct(*x) for x in given))
    lens = jnp.asarray(w.seq_lens, jnp.int32)
    starts = jnp.asarray(np.cumsum([0, *w.query_lens]), jnp.int32)
    none: Any = None
    operands = AttentionOperands(none, none, none, none, seq_lens=lens, query_start_loc=starts)
    tiling = tpu_plan.choose_tiling(found[0], chip)
    return found[0], tiling, tpu_plan.items(found[0], operands, tiling).fields


def bytes_of_peer(w: Workload, page_size: int, pages: int, queries: int) -> int | None:
    """K and V bytes that the peer copies; None where it lacks the workload."""
    if not w.causal or w.window[1]:
        return None
    page = 2 * page_size * w.num_kv_heads * w.head_dim * 2
    starts, block, total = np.cumsum([0, *w.query_lens]), pages * page_size, 0
    for s, length in enumerate(w.seq_lens):
        blocks_of_queries = (starts[s + 1] - 1) // queries - starts[s] // queries + 1
        total += int(blocks_of_queries) * -(-length // block) * pages * page
    return total


def traffic(chip: str, page_size: int) -> list[tuple[str, float, float, float | None]]:
    """(workload, GB of its visible keys once, GB that ours copies, GB that the peer copies)."""
    rows = []
    for name, w in TRAFFIC.items():
        request, _, fields = plan_of(w, page_size, chip)
        table = -(-max(w.seq_lens) // page_size)
        c = Config("", w.head_dim, w.num_kv_heads, page_size, tokens=sum(w.query_lens), max_pages=table)
        theirs = bytes_of_peer(w, page_size, *block_sizes(chip, c))
        once = w.min_bytes(2) - 2 * sum(w.query_lens) * w.num_heads * w.head_dim * 2
        ours = tpu_plan.copied_bytes(request, fields)
        rows.append((name, once / 1e9, ours / 1e9, None if theirs is None else theirs / 1e9))
    return rows


def markdown(pairs: list[tuple[Row, Row]], chips: list[str]) -> str:
    """Both tables."""
    lines = [BEGIN, "", "VMEM in MiB by the compiler, program in KiB; tile: query rows of a KV head x keys.", ""]
    lines += ["| chip | configuration | jattn: tile, VMEM, program | jax: tile, VMEM, program |", "|---|---|---|---|"]
    for ours, theirs in pairs:
        if not theirs.fault:
            lines.append(f"| {ours.chip} | {ours.config.name} | {_cell(ours)} | {_cell(theirs)} |")
    lines += ["", "What jax's kernel did not compile, and ours did:", ""]
    refused: dict[tuple[str, str], list[str]] = {}
    for ours, theirs in pairs:
        if theirs.fault and not ours.fault:
            refused.setdefault((ours.config.name, theirs.fault.partition(":")[0]), []).append(ours.chip)
    lines += [f"- {name} on {', '.join(on)}: {fault}" for (name, fault), on in refused.items()]
    lines += [
        "",
        "GB of K and V copied from HBM in bfloat16, for pages of 16 / 64; *once*: each visible key once, which several",
        "query tiles of one sequence cannot reach.",
        "",
        "| chips | workload | once | jattn | jax |",
        "|---|---|---|---|---|",
    ]
    by_row: dict[str, list[str]] = {}
    for chip in chips:
        for small, large in zip(traffic(chip, 16), traffic(chip, 64), strict=True):
            theirs = "not causal: refused" if small[3] is None else f"{small[3]:.2f} / {large[3]:.2f}"
            row = f"{small[0]} | {small[1]:.2f} | {small[2]:.2f} / {large[2]:.2f} | {theirs} |"
            by_row.setdefault(row, []).append(chip)
    lines += [f"| {', '.join(on)} | {row}" for row, on in by_row.items()]
    return "\n".join([*lines, "", END, ""])


def _cell(row: Row) -> str:
    return f"{row.tile}, {row.vmem / 2**20:.1f}, {row.code // 1024}" if not row.fault else "FAIL"


def main(argv: list[str] | None = None) -> int:
    """Compile both everywhere; 1 where ours fails."""
    parser = argparse.ArgumentParser("bench.tpu_peer", description=HELP)
    parser.add_argument("-t", "--chips", default=",".join(tpu_codegen.TOPOLOGIES), metavar="C,..")
    parser.add_argument("-c", "--configs", metavar="TEXT", help="only configurations whose name holds this")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="take our rows from those that tpu_codegen kept; jax's are kept beside",
    )
    parser.add_argument("--write", action="store_true", help="write the tables in docs/performance.md")
    args = parser.parse_args(argv)
    tpu_codegen.prepare_libtpu()
    chips, pairs = args.chips.split(","), []
    theirs_at = args.keep and args.keep.with_name(args.keep.name + ".jax")
    kept, kept_theirs = tpu_codegen.load(args.keep), tpu_codegen.load(theirs_at)
    for chip, c in itertools.product(chips, configs()):
        if not args.configs or args.configs in c.name:
            ours = kept.get((chip, c.name))
            ours = tpu_codegen.report(chip, c) if ours is None else dataclasses.replace(ours, config=c)
            theirs = kept_theirs.get((chip, c.name))
            if theirs is None:
                theirs = peer(chip, c)
                tpu_codegen.keep(theirs_at, theirs)
            pairs.append((ours, dataclasses.replace(theirs, config=c)))
            print(f"jattn {tpu_codegen.line(pairs[-1][0])}\njax   {tpu_codegen.line(pairs[-1][1])}", flush=True)
    for chip in chips:
        for row in traffic(chip, 16):
            print(chip, *(x if isinstance(x, str) or x is None else f"{x:.3f}" for x in row))
    if args.write:
        replace_section(Path("docs/performance.md"), markdown(pairs, chips), BEGIN, END)
    bad = sum(bool(ours.fault) for ours, _ in pairs)
    print(f"{bad} of {len(pairs)} of ours at fault", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
