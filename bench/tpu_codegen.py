"""Compile the TPU kernel to real TPU programs on a host without a TPU: `python -m bench.tpu_codegen --help`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from bench.sections import replace_section
from pallas_kernels import paged_tpu, tpu_plan
from pallas_kernels.kv_write import write_kv
from pallas_kernels.request import AttentionRequest, make_request

HELP = """Compiles each configuration of the TPU kernel with the compiler in the libtpu wheel (pip install 'jax[tpu]') and
prints whether it compiled or why not, its VMEM and SMEM, and the size of the program. --peer does the same for
jax's ragged_paged_attention. --write keeps the result in docs/codegen.md. No TPU is needed or used. Exits with 1
if a configuration fails, exceeds the chip's memory, or makes XLA copy the page pool."""

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
KINDS = {"decode": {"tokens": 64, "seqs": 64, "max_query_len": 1}, "mixed": {"tokens": 1024, "seqs": 64}}
BEGIN, END = "<!-- tpu: begin, written by python -m bench.tpu_codegen --write -->", "<!-- tpu: end -->"
POOL_BYTES = 1 << 29  # more than VMEM holds: XLA fetches small pools into it whole


@dataclasses.dataclass(frozen=True)
class Config:
    """One call's static side: bfloat16, 4 query heads a KV head."""

    kind: str
    head_dim: int = 128
    kv_heads: int = 8
    page_size: int = 16
    kv_dtype: str = "bfloat16"
    tokens: int = 1024
    seqs: int = 64
    max_pages: int = 256
    max_query_len: int | None = None
    dtype: str = "bfloat16"
    layout: str = "NHD"
    group: int = 4
    options: tuple[str, ...] = ()  # arrays beside the usual ones
    static: tuple[tuple[str, Any], ...] = ()
    writes: bool = False  # a step: the tokens' keys and values are first written into the caches, which are donated

    @property
    def name(self) -> str:
        """Short and unique."""
        return f"D{self.head_dim} KVH{self.kv_heads} page {self.page_size} {self.kv_dtype} {self.kind}"


@dataclasses.dataclass(frozen=True)
class Row:
    """What the compiler says of one configuration on one chip."""

    chip: str
    config: Config
    tile: str = ""
    vmem: int = 0  # bytes, by the compiler
    planned: int = 0  # bytes, by the plan's estimate that chooses the tile
    smem: int = 0
    code: int = 0
    copies: int = 0  # instructions that make another array of the pool's size
    seconds: float = 0.0
    fault: str = ""


def grid() -> Iterator[Config]:
    """Head sizes x KV heads x page sizes x cache types x kinds of work, and a long page table."""
    for dim, heads, page, kv in itertools.product(
        (64, 128, 256), (1, 2, 8), (16, 64, 256), ("bfloat16", "float8_e4m3fn", "int8")
    ):
        for kind, options in KINDS.items():
            yield Config(kind, dim, heads, page, kv, max_pages=4096 // page, **options)
    yield Config("512 x 4096 table", tokens=512, seqs=512, max_pages=4096)


def features() -> Iterator[Config]:
    """What the grid leaves out, once each."""
    yield Config("HND", layout="HND")
    yield Config("HND", layout="HND", kv_dtype="float8_e4m3fn")
    yield Config("HND, pages of 8", layout="HND", page_size=8)
    yield Config("e5m2", kv_dtype="float8_e5m2")
    yield Config("float32", dtype="float32", kv_dtype="float32")
    for dim in (80, 96, 192, 512):
        yield Config("mixed", head_dim=dim)
    for group in (1, 3, 7, 17):
        yield Config(f"{group} heads a KV head", group=group, kv_heads=4)
    yield Config("32 KV heads", kv_heads=32, group=1)
    yield Config("pages of 8", page_size=8)
    yield Config("pages of 12", page_size=12)
    for heads in (3, 5, 6, 10, 12, 20):
        yield Config("stored by head", kv_heads=heads)
    for heads in (5, 10):
        yield Config("stored by head", kv_heads=heads, kv_dtype="int8")
    yield Config("stored by head", kv_heads=5, page_size=4)
    yield Config("stored by head", kv_heads=5, dtype="float32", kv_dtype="float32")
    yield Config("stored by head, new K/V", kv_heads=5, options=("new_k", "new_v"))
    for page_size, kv_dtype in ((12, "bfloat16"), (12, "int8"), (1, "bfloat16")):
        yield Config("HND, stored by token", layout="HND", page_size=page_size, kv_dtype=kv_dtype)
    for heads, kv_dtype in ((8, "bfloat16"), (5, "bfloat16"), (10, "int8")):
        yield Config("write and attend", kv_heads=heads, kv_dtype=kv_dtype, writes=True)
    for page_size in (16, 12):
        yield Config("HND, write and attend", layout="HND", page_size=page_size, writes=True)
    yield Config("cap, window, LSE", static=(("soft_cap", 50.0), ("window", (1023, 5)), ("return_lse", True)))
    yield Config("sinks, ALiBi, kv_start, flags", options=("sinks", "alibi_slopes", "kv_start", "causal"))
    yield Config("new K/V", options=("new_k", "new_v"))
    for page_size in (24, 48):
        yield Config("new K/V", page_size=page_size, options=("new_k", "new_v"))
    invariant = {"options": ("new_k", "new_v"), "static": (("batch_invariant", True),)}
    yield Config("new K/V, batch invariant", page_size=24, **invariant)
    for page_size, heads in ((40, 8), (104, 2)):
        yield Config("HND", layout="HND", page_size=page_size, kv_heads=heads, kv_dtype="int8")
    yield Config("ranges, tree", options=("bidirectional_ranges", "tree_mask"))


def shapes(c: Config) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each argument of the call."""
    dtype, heads = jnp.dtype(c.dtype), c.kv_heads * c.group
    axes = (c.page_size, c.kv_heads) if c.layout == "NHD" else (c.kv_heads, c.page_size)
    kv_dtype = jnp.dtype(c.kv_dtype)
    pages = POOL_BYTES // (c.page_size * c.kv_heads * c.head_dim * kv_dtype.itemsize)
    cache = ((pages, *axes, c.head_dim), kv_dtype)
    found: dict[str, tuple[tuple[int, ...], Any]] = {
        "q": ((c.tokens, heads, c.head_dim), dtype),
        "k_cache": cache,
        "v_cache": cache,
        "block_table": ((c.seqs, c.max_pages), jnp.int32),
        "seq_lens": ((c.seqs,), jnp.int32),
        "query_start_loc": ((c.seqs + 1,), jnp.int32),
    }
    if jnp.dtype(c.kv_dtype).itemsize == 1:
        found |= dict.fromkeys(("k_scale", "v_scale"), ((c.kv_heads,), jnp.float32))
    extra = {
        "sinks": ((heads,), jnp.float32),
        "alibi_slopes": ((heads,), jnp.float32),
        "kv_start": ((c.seqs,), jnp.int32),
        "causal": ((c.seqs,), jnp.bool_),
        "new_k": ((c.tokens, c.kv_heads, c.head_dim), dtype),
        "new_v": ((c.tokens, c.kv_heads, c.head_dim), dtype),
        "bidirectional_ranges": ((c.seqs, 2, 2), jnp.int32),
        "tree_mask": ((c.seqs, 16, 16), jnp.bool_),
    }
    found |= {name: extra[name] for name in c.options}
    if c.writes:
        found |= {"k": extra["new_k"], "v": extra["new_v"], "slot_mapping": ((c.tokens,), jnp.int32)}
    return found


def compiled(
    chip: str,
    call: Callable[..., Any],
    arguments: Iterable[tuple[tuple[int, ...], Any]],
    donated: tuple[int, ...] = (),
) -> Any:
    """The executable of `call` for a chip that this host lacks."""
    from jax.experimental import topologies

    device = topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices[0]
    place = SingleDeviceSharding(device)
    # XLA's own layout of a pool whose D is no multiple of 128 has pages along lanes and must be copied for any kernel.
    rows = Format(Layout((0, 1, 2, 3)), place)
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=rows if len(shape) == 4 and shape[-1] % 128 else place)
        for shape, dtype in arguments
    ]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(device.device_kind, 1, "tpu"))):
        call = jax.jit(call, donate_argnums=donated)
        return call.trace(*given).lower(lowering_platforms=("tpu",)).compile()


def vmem_of(executable: Any) -> int:
    """VMEM of the kernel in bytes, which the compiler records beside the call."""
    line = next(x for x in executable.as_text().splitlines() if 'custom_call_target="tpu_custom_call"' in x)
    found = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"', line)
    if found is None:
        raise RuntimeError("this libtpu does not record the kernel's use of VMEM where it used to")
    return int(found[1])


def pool_copies(executable: Any, c: Config) -> int:
    """Instructions of the program that make another array of the pool's size; of a step, pools in temporary memory."""
    if c.writes:
        return executable.memory_analysis().temp_size_in_bytes // (POOL_BYTES // 2)
    size = math.prod(shapes(c)["k_cache"][0])
    made = re.findall(r"= \w+\[([\d,]+)\]\S* (?!parameter|bitcast)[a-z-]+\(", executable.as_text())
    return sum(math.prod(map(int, extents.split(","))) >= size for extents in made)


def report(chip: str, c: Config) -> Row:
    """Compile a configuration; a refusal or a failure of the compiler is its fault."""
    arguments, static = shapes(c), dict(c.static) | {"layout": c.layout, "max_query_len": c.max_query_len}
    seen: list[tuple[AttentionRequest, tpu_plan.Tiling]] = []

    def call(*arrays: Any) -> Any:
        given, caches = dict(zip(arguments, arrays, strict=True)), ()
        if c.writes:
            scales = {name: given[name] for name in ("k_scale", "v_scale") if name in given}
            new = [given.pop(name) for name in ("k", "v", "slot_mapping")]
            caches = write_kv(given["k_cache"], given["v_cache"], *new, layout=c.layout, **scales)
            given |= dict(zip(("k_cache", "v_cache"), caches, strict=True))
        request, operands = make_request(**given, **static)
        if reasons := paged_tpu.why_not(request):
            raise NotImplementedError("; ".join(reasons))
        seen.append((request, tpu_plan.choose_tiling(request, chip)))
        return caches, paged_tpu.attend(request, operands)

    began = time.monotonic()
    donated = tuple(i for i, name in enumerate(arguments) if c.writes and name in ("k_cache", "v_cache"))
    try:
        executable = compiled(chip, call, arguments.values(), donated)
    except Exception as failure:  # the table shall show all that is at fault
        return Row(chip, c, fault=f"{type(failure).__name__}: {' '.join(str(failure).split())[:160]}")
    (request, tiling), memory = seen[-1], executable.memory_analysis()
    row = Row(
        chip,
        c,
        tile=f"{tiling.tokens * c.group} x {tiling.pages * c.page_size}",
        vmem=vmem_of(executable),
        planned=tpu_plan.vmem_bytes(tpu_plan.as_stored(request), tiling),
        smem=tpu_plan.smem_bytes(request, tiling),
        code=memory.generated_code_size_in_bytes,
        copies=pool_copies(executable, c),
        seconds=time.monotonic() - began,
    )
    return dataclasses.replace(row, fault=", ".join(faults(row)))


def faults(row: Row) -> list[str]:
    """What is wrong with a configuration that compiled."""
    facts = tpu_plan.CHIPS[row.chip]
    found = []
    if row.vmem > facts.vmem or row.smem > facts.smem:
        found.append("more memory than the chip has")
    if row.vmem > max(row.planned, 1 << 20) * 1.25:
        found.append(f"{row.vmem} bytes of VMEM, planned {row.planned}")
    if row.copies:
        found.append("XLA copies the page pool")
    return found


def line(row: Row) -> str:
    """A row for the terminal."""
    numbers = f"{row.tile:>11} {row.vmem / 2**20:7.2f} {row.smem / 2**10:7.1f} {row.code / 2**10:8.0f}"
    return f"{row.chip:4} {row.config.name:52} {numbers} {row.seconds:5.1f}  {row.fault or 'compiled'}"


def markdown(rows: list[Row]) -> str:
    """A compact section: the grid by chip, head size, KV heads and cache type, the rest one by one."""
    import libtpu

    most = max((row.smem for row in rows if not row.fault), default=0) // 1024
    lines = [
        BEGIN,
        "",
        "## TPU",
        "",
        f"Compiled by jax {jax.__version__} and libtpu {libtpu.__version__} on a host without a TPU; **no TPU has run",
        "it**. bfloat16 queries, 4 query heads a KV head, 4096 tokens a table row; decode: 64 sequences of one query;",
        "mixed: 1024 tokens of 64 sequences. A cell of the grid is `VMEM in MiB, program in KiB`, for pages of 16, 64",
        f"and 256 tokens. VMEM is what the compiler records; SMEM, by the plan, is at most {most} of 1024 KiB. Each",
        "program was read for a copy of the page pool; where D is no multiple of 128 the pool is declared row-major",
        "([tpu-kernel.md](tpu-kernel.md#how-the-pool-lies-in-memory)).",
        "",
        "| chip | D | KV heads | KV | decode | mixed |",
        "|---|---|---|---|---|---|",
    ]
    in_grid = [row for row in rows if row.config.kind in KINDS and row.config.head_dim in (64, 128, 256)]
    by_cell: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in in_grid:
        c = row.config
        cell = by_cell.setdefault((row.chip, c.head_dim, c.kv_heads, c.kv_dtype), {})
        cell.setdefault(c.kind, []).append(row)
    for key, kinds in by_cell.items():
        cells = [" / ".join(_cell(row) for row in kinds.get(kind, [])) for kind in KINDS]
        lines.append(f"| {' | '.join(str(x) for x in (*key, *cells))} |")
    lines += [
        "",
        "| chip | configuration | tile (rows x keys) | VMEM MiB | SMEM KiB | program KiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row not in in_grid and not row.fault:
            numbers = f"{row.tile} | {row.vmem / 2**20:.1f} | {row.smem // 1024} | {row.code // 1024}"
            lines.append(f"| {row.chip} | {row.config.name} | {numbers} |")
    bad = [row for row in rows if row.fault]
    lines += ["", f"{len(rows) - len(bad)} of {len(rows)} configurations compiled within the limits."]
    lines += [f"- {row.chip} {row.config.name}: {row.fault}" for row in bad]
    return "\n".join([*lines, "", END, ""])


def _cell(row: Row) -> str:
    return "FAIL" if row.fault else f"{row.vmem / 2**20:.1f}, {row.code // 1024}"


def load(path: Path | None) -> dict[tuple[str, str], Row]:
    """Rows of an earlier run by chip and configuration; their `config` is its name alone."""
    lines = path.read_text().splitlines() if path is not None and path.is_file() else []
    rows = [Row(**json.loads(text)) for text in lines]
    return {(row.chip, str(row.config)): row for row in rows}


def keep(path: Path | None, row: Row) -> None:
    """Add a row to those kept."""
    if path is not None:
        fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        with path.open("a") as file:
            file.write(json.dumps(fields | {"config": row.config.name}) + "\n")


def prepare_libtpu() -> None:
    """Let libtpu compile on a host that has no TPU: no metadata server, no lock, a slice that it need not find."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"


def main(argv: list[str] | None = None) -> int:
    """Compile everything; 1 where something is at fault."""
    parser = argparse.ArgumentParser("bench.tpu_codegen", description=HELP)
    parser.add_argument(
        "-t", "--chips", default=",".join(TOPOLOGIES), metavar="C,..", help=f"of {', '.join(TOPOLOGIES)}"
    )
    parser.add_argument("-c", "--configs", metavar="TEXT", help="only configurations whose name holds this")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep rows as JSON lines; take those that are there")
    parser.add_argument("--write", action="store_true", help="write the section in docs/codegen.md")
    args = parser.parse_args(argv)
    if unknown := set(args.chips.split(",")) - set(TOPOLOGIES):
        parser.error(f"-t: got {', '.join(sorted(unknown))}, expected some of {', '.join(TOPOLOGIES)}")
    prepare_libtpu()
    chosen = [c for c in (*grid(), *features()) if not args.configs or args.configs in c.name]
    if not chosen:
        parser.error(f"-c: got {args.configs!r}, expected text that is in a configuration's name, such as 'new K/V'")
    work = list(itertools.product(args.chips.split(","), chosen))
    began, rows = time.monotonic(), []
    print(f"{'chip':4} {'configuration':52} {'tile':>11} {'VMEM MB':>7} {'SMEM KB':>7} {'code KB':>8} {'s':>5}")
    kept = load(args.keep)
    for chip, config in work:
        row = kept.get((chip, config.name))
        if row is None:
            row = report(chip, config)
            keep(args.keep, row)
        else:
            row = dataclasses.replace(row, config=config)
        rows.append(row)
        print(line(row), flush=True)
    bad = sum(bool(row.fault) for row in rows)
    print(f"{len(rows) - bad} of {len(rows)} within the limits, {time.monotonic() - began:.0f} s", file=sys.stderr)
    if args.write:
        replace_section(Path("docs/codegen.md"), markdown(rows), BEGIN, END)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
