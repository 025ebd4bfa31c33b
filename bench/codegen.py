"""Compile the portable GPU kernel to real machine code on a host without a GPU: `python -m bench.codegen --help`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU that is present is not needed

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from bench.sections import replace_section
from pallas_kernels import paged_triton
from pallas_kernels.request import make_request

HELP = """Lowers each configuration of the portable kernel for each target, compiles it to a code object through the
compilers in the triton wheel, and fails on register spills, LDS or shared memory overflow, or a matrix product without
matrix instructions. Prints one table; --write keeps it in docs/codegen.md. No GPU is needed or used.

  python -m bench.codegen --core         a look: on NVIDIA only the kinds of call that differ most
  python -m bench.codegen -t sm80 -c D   one target, the configurations whose name holds a D"""

BEGIN, END = "<!-- triton: begin, written by python -m bench.codegen --write -->", "<!-- triton: end -->"
EXACT = "0: float32 FMA"  # of NVIDIA's matrix instructions none multiplies float32; TF32 keeps 10 bits

# Target -> (device kind for the lowering, platform, threads a warp, shared memory a program may have).
TARGETS = {
    "gfx942": ("gfx942", "rocm", 64, 65536),
    "gfx950": ("gfx950", "rocm", 64, 65536),  # it has 160 KiB; two programs a core need less
    "sm80": ("NVIDIA A100-SXM4-80GB", "cuda", 32, 166912),
    "sm89": ("NVIDIA L40", "cuda", 32, 101376),
    "sm90": ("NVIDIA H200", "cuda", 32, 232448),
}
MATRIX = re.compile(r"v_(?:s?mfma)_|\b(?:mma\.sync|wgmma\.mma_async)\b")


@dataclasses.dataclass(frozen=True)
class Config:
    """One call's static side."""

    name: str
    tokens: int = 2048
    seqs: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    core: bool = False  # compiled for NVIDIA targets with --core too


@dataclasses.dataclass(frozen=True)
class Row:
    """What the compiler reports of one kernel."""

    target: str
    config: str
    kernel: str
    tile: str
    registers: int
    spills: int
    shared: int
    matrix: str  # matrix instructions in the code
    fault: str


def configs() -> Iterator[Config]:
    """Every kind of tile in use: head sizes, types, groups, page sizes and the options that change the body."""
    decode = {"tokens": 64, "seqs": 64}
    once = (("max_query_len", 1),)
    draft = {"tokens": 512, "seqs": 32}
    block = (("max_query_len", 16), ("causal", False))
    yield Config("prefill", core=True)
    yield Config("decode", options=once, core=True, **decode)
    yield Config("draft", options=block, core=True, **draft)
    for head_dim in (32, 64, 80, 96, 112, 192, 256):
        yield Config(f"D {head_dim}", head_dim=head_dim, core=head_dim == 256)
    yield Config("D 64, decode", head_dim=64, options=once, **decode)
    yield Config("D 256, decode", head_dim=256, options=once, **decode)
    scales = (("k_scale", 0.5), ("v_scale", 0.5))
    by_token = (("k_scale", "token"), ("v_scale", "token"))
    new = (("new", True),)
    yield Config("KV float8_e4m3fn", kv_dtype="float8_e4m3fn", options=scales)
    for kv_dtype in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int8"):
        core = kv_dtype == "float8_e4m3fn"
        yield Config(f"KV {kv_dtype}, draft", kv_dtype=kv_dtype, options=block + scales, core=core, **draft)
    yield Config("float16", dtype="float16")
    yield Config("float32", dtype="float32", core=True)
    yield Config("float32, decode", dtype="float32", options=once, **decode)
    yield Config("float32, D 256", head_dim=256, dtype="float32")
    yield Config("float32, D 256, all", head_dim=256, dtype="float32", options=(*new, ("ranges", 2), ("tree", 16)))
    eight = {"head_dim": 256, "kv_dtype": "float8_e4m3fn"}
    yield Config("KV e4m3fn, D 256, new K/V", options=scales + new, **eight)
    yield Config("KV int8, D 256, by token", options=(*by_token, *new), **(eight | {"kv_dtype": "int8"}))
    yield Config("KV int8, f16, by token", dtype="float16", kv_dtype="int8", options=by_token)
    yield Config("MHA", kv_heads=32)
    yield Config("MQA 64", heads=64, kv_heads=1)
    yield Config("group 7, decode", heads=28, kv_heads=4, options=once, **decode)
    for page_size in (1, 128, 784):
        yield Config(f"page {page_size}", page_size=page_size)
    yield Config("cap, window", options=(("soft_cap", 50.0), ("window", (4095, None))))
    yield Config("sinks, ALiBi", options=(("sinks", "heads"), ("alibi_slopes", "heads")))
    yield Config("new K/V, two-sided", options=(("new", True), ("causal", False), ("window", (1023, 1023))), core=True)
    yield Config("ranges, tree", options=(("ranges", 2), ("tree", 16)), core=True)


def arguments(config: Config) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, Any]]:
    """Arrays and static options of a configuration's call."""
    c = config
    kv_dtype = jnp.dtype(c.kv_dtype or c.dtype)
    shapes = {
        "q": ((c.tokens, c.heads, c.head_dim), jnp.dtype(c.dtype)),
        "k_cache": ((4096, c.page_size, c.kv_heads, c.head_dim), kv_dtype),
        "v_cache": ((4096, c.page_size, c.kv_heads, c.head_dim), kv_dtype),
        "block_table": ((c.seqs, 512), jnp.int32),
        "seq_lens": ((c.seqs,), jnp.int32),
        "query_start_loc": ((c.seqs + 1,), jnp.int32),
    }
    static: dict[str, Any] = {}
    for name, value in c.options:
        if value == "heads":
            shapes[name] = ((c.heads,), jnp.float32)
        elif value == "token":
            shapes[name] = ((4096, c.page_size, c.kv_heads), jnp.float32)
        elif name == "new":
            shapes |= {n: ((c.tokens, c.kv_heads, c.head_dim), jnp.dtype(c.dtype)) for n in ("new_k", "new_v")}
        elif name == "ranges":
            shapes["bidirectional_ranges"] = ((c.seqs, value, 2), jnp.int32)
        elif name == "tree":
            shapes["tree_mask"] = ((c.seqs, value, value), jnp.bool_)
        else:
            static[name] = value

    return {name: jax.ShapeDtypeStruct(*x) for name, x in shapes.items()}, static


def lower(config: Config, target: str) -> list[tuple[str, str, int, int]]:
    """(kernel, Triton IR as text, warps, stages) of each launch of a configuration's call."""
    shapes, static = arguments(config)

    def call(arrays: dict[str, jax.Array]) -> Any:
        request, operands = make_request(**arrays, **static)
        if reasons := paged_triton.why_not(request):
            raise NotImplementedError("; ".join(reasons))
        return paged_triton.attend(request, operands)

    return lower_call(call, shapes, target)


def lower_call(call: Callable[[Any], Any], arrays: Any, target: str) -> list[tuple[str, str, int, int]]:
    """(kernel, Triton IR as text, warps, stages) of each launch of a call on arrays of these shapes."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib.triton import dialect

    kind, platform, _, _ = TARGETS[target]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, platform))):
        module = jax.jit(call).trace(arrays).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    launches = []
    for attributes in _triton_calls(module.operation):
        context = mlir.make_ir_context()
        dialect.register_dialect(context)
        with context:
            text = ir.Module.parse(ir.StringAttr(attributes["ir"]).value_bytes).operation.get_asm()
        name = ir.StringAttr(attributes["name"]).value
        warps, stages = (ir.IntegerAttr(attributes[key]).value for key in ("num_warps", "num_stages"))
        launches.append((name, text, warps, stages))
    return launches


def _triton_calls(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                name = inner.operation.name
                if name == "stablehlo.custom_call" and "triton" in str(inner.attributes["call_target_name"]):
                    yield inner.attributes["mhlo.backend_config"]
                yield from _triton_calls(inner.operation)


def compile_kernel(target: str, text: str, warps: int, stages: int) -> tuple[int, int, int, int]:
    """(registers, spills, shared bytes, matrix instructions) of a kernel compiled for a target."""
    import triton
    from triton.backends.compiler import GPUTarget

    backend = "hip" if target.startswith("gfx") else "cuda"
    arch = target if backend == "hip" else int(target[2:])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(text)
        path.write_text(_optimise(path, target))
        options = {"num_warps": warps, "num_stages": stages}
        done = triton.compile(str(path), target=GPUTarget(backend, arch, TARGETS[target][2]), options=options)
        if backend == "hip":
            code = done.asm["amdgcn"]
            report = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", code))
            # Scalar registers spill into lanes of vector registers, which is no memory traffic.
            registers, spills = int(report["vgpr_count"]), int(report["vgpr_spill_count"])
        else:
            code = done.asm["ptx"]
            registers, spills = _ptxas_report(target, code, Path(folder))
    return registers, spills, done.metadata.shared, len(MATRIX.findall(code))


def _optimise(path: Path, target: str) -> str:
    """Run the passes on Triton IR that XLA runs before the backends (and that `triton.compile` skips for IR files)."""
    from triton._C.libtriton import ir, passes
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = "hip" if target.startswith("gfx") else "cuda"
    arch = target if backend == "hip" else int(target[2:])
    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget(backend, arch, TARGETS[target][2])).load_dialects(context)
    module = ir.parse_mlir_module(str(path), context)
    module.context = context
    pipeline = ir.pass_manager(context)
    passes.common.add_inliner(pipeline)
    passes.common.add_canonicalizer(pipeline)
    passes.ttir.add_combine(pipeline)
    passes.ttir.add_reorder_broadcast(pipeline)
    passes.common.add_cse(pipeline)
    passes.ttir.add_triton_licm(pipeline)
    passes.common.add_symbol_dce(pipeline)
    pipeline.run(module, "optimise")
    return str(module)


def _ptxas_report(target: str, ptx: str, folder: Path) -> tuple[int, int]:
    """Registers and spilled bytes by the assembler that the triton wheel brings."""
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    arch = re.search(r"\.target (sm_\w+)", ptx)
    command = [
        get_ptxas(int(target[2:])).path,
        "-v",
        f"--gpu-name={arch[1] if arch else target}",
        source,
        "-o",
        "/dev/null",
    ]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", text)
    return int(registers[1]) if registers else 0, sum(map(int, re.findall(r"(\d+) bytes spill stores", text)))


def report(target: str, config: Config) -> list[Row]:
    """Compile every launch of a configuration."""
    rows = []
    for name, text, warps, stages in lower(config, target):
        products = len(re.findall(r"\btt\.dot\b", text))
        registers, spills, shared, matrix = compile_kernel(target, text, warps, stages)
        faults = ["spills"] if spills else []
        faults += ["shared memory"] if shared > TARGETS[target][3] else []
        exact = config.dtype == "float32" and not target.startswith("gfx")
        faults += ["no matrix instruction in a product"] if not exact and matrix < products else []
        count = EXACT if exact and products else str(matrix)
        shape = re.search(r"tt\.dot.*?tensor<(\d+)x(\d+)x.*?-> tensor<(\d+)x(\d+)x", text)
        tile = f"{shape[3]}x{shape[4]}/{warps}w/{stages}s" if shape else f"{warps}w"
        rows.append(Row(target, config.name, name, tile, registers, spills, shared, count, ", ".join(faults)))
    return rows


def _report(work: tuple[str, Config]) -> list[Row]:
    """`report` for a pool of processes; a refusal or a failure of the compiler is a row."""
    warnings.filterwarnings("ignore", "The Pallas Triton", DeprecationWarning)
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION", UserWarning)  # on, as XLA has it
    try:
        return report(*work)
    except NotImplementedError as refusal:
        return [Row(work[0], work[1].name, "-", "-", 0, 0, 0, "-", f"refused: {refusal}")]
    except Exception as failure:  # the table shall show all that is at fault
        text = str(failure).strip().splitlines()
        fault = f"{type(failure).__name__}: {text[0][:80] if text else ''}"
        return [Row(work[0], work[1].name, "-", "-", 0, 0, 0, "-", fault)]


def markdown(rows: list[Row]) -> str:
    """The table and what it means, as a section between its markers."""
    import triton

    lines = [
        BEGIN,
        "## The portable kernel",
        "",
        "Written by `make codegen` (`python -m bench.codegen --write`), on a host without a GPU: every configuration is",
        f"lowered by jax {jax.__version__} and compiled by the compilers of triton {triton.__version__} to a real code",
        "object. **No AMD device has run any of these kernels yet**; the same source runs on an NVIDIA H200.",
        "",
        "Tile: rows x keys of the first matrix product / warps / pipeline stages. Registers: VGPRs (with AGPRs) on AMD,",
        "registers a thread on NVIDIA. Spills: of vector registers on AMD, bytes on NVIDIA. Shared: bytes of LDS or",
        "shared memory. Matrix: MFMA on AMD, mma.sync or wgmma on NVIDIA; `merge` has no products. float32 on NVIDIA is",
        "multiplied by FMA: the matrix instruction there rounds operands to TF32, 10 bits, and the result shall be right",
        "to 5e-6. AMD's matrix instructions for float32 are exact.",
        "",
        "| target | configuration | kernel | tile | registers | spills | shared | matrix | fault |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(str(x) for x in dataclasses.astuple(row))} |" for row in rows]
    return "\n".join([*lines, END]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Compile everything; 1 where something is at fault."""
    parser = argparse.ArgumentParser(
        "bench.codegen", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-t", "--targets", default=",".join(TARGETS), metavar="T,..", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("-c", "--configs", metavar="TEXT", help="only configurations whose name holds this")
    parser.add_argument("--core", action="store_true", help="for NVIDIA only the configurations that differ most")
    parser.add_argument("-j", "--jobs", type=int, default=2, metavar="N", help="compile in N processes (default 2)")
    parser.add_argument("--write", action="store_true", help="write the section in docs/codegen.md")
    args = parser.parse_args(argv)
    if args.write and (args.configs or args.core or args.targets != ",".join(TARGETS)):
        parser.error("--write keeps the whole table: not with -t, -c or --core")
    if unknown := set(args.targets.split(",")) - set(TARGETS):
        parser.error(f"-t: got {', '.join(sorted(unknown))}, expected some of {', '.join(TARGETS)}")
    chosen = [c for c in configs() if not args.configs or args.configs in c.name]
    if not chosen:
        parser.error(f"-c: got {args.configs!r}, expected text in one of: {'; '.join(c.name for c in configs())}")
    work = [
        (target, c)
        for target, c in itertools.product(args.targets.split(","), chosen)
        if not args.core or args.configs or c.core or target.startswith("gfx")
    ]
    rows: list[Row] = []
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for i, found in enumerate(pool.imap(_report, work)):
            print(f"\r{i + 1}/{len(work)} {work[i][0]} {work[i][1].name:<30}", end="", file=sys.stderr, flush=True)
            rows += found
    print(f"\r{len(rows)} kernels in {time.monotonic() - began:.0f} s{'':40}", file=sys.stderr)
    header = ("target", "configuration", "kernel", "tile", "regs", "spills", "shared", "matrix", "fault")
    layout = "{:7} {:25} {:12} {:16} {:>5} {:>6} {:>7} {:>14} {}"
    print(layout.format(*header))
    for row in rows:
        print(layout.format(*dataclasses.astuple(row)))
    if args.write:
        replace_section(Path("docs/codegen.md"), markdown(rows), BEGIN, END)
    faults = [row for row in rows if row.fault]
    print(
        f"{len(faults)} at fault"
        if faults
        else "no spills, no overflow, matrix instructions in every product that has one"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
