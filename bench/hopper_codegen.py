"""The Hopper kernel as sm90 machine code, on a host without a GPU: registers, spills and stack of each kind of call.

    python -m bench.hopper_codegen [--strict]

Needs jax-cuda13-plugin and jax-cuda13-pjrt (not their NVIDIA libraries) and `ptxas` of CUDA 13 on PATH. With --strict the
exit status is 1 if any kernel of the common kinds spills.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU that is present is not needed

import jax
import jax.numpy as jnp

from pallas_kernels import paged_hopper
from pallas_kernels.request import make_request

H200 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000
 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } device_description_str: "NVIDIA H200" """

# name: (tokens, sequences, options)
KINDS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "prefill": (16384, 4, {"max_query_len": 4096}),
    "decode": (64, 64, {"max_query_len": 1}),
    "decode split": (1, 1, {"max_query_len": 1}),
    "draft": (64, 4, {"max_query_len": 16, "causal": False}),
    "window": (4096, 4, {"window": (127, 0)}),
    "head_dim 64": (4096, 4, {"head_dim": 64}),
    "head_dim 256": (4096, 4, {"head_dim": 256}),
    "fp8 prefill": (16384, 4, {"max_query_len": 4096, "kv_dtype": jnp.float8_e4m3fn}),
    "fp8 decode": (64, 64, {"max_query_len": 1, "kv_dtype": jnp.float8_e4m3fn}),
}
COMMON = ("prefill", "decode", "decode split", "draft", "fp8 prefill", "fp8 decode")  # must not spill


def compile_kind(num_tokens: int, num_seqs: int, options: dict[str, Any]) -> None:
    """Compile one kind of call for an H200; ptxas reports on the way."""
    options = dict(options)
    dim, kv_dtype = options.pop("head_dim", 128), options.pop("kv_dtype", jnp.bfloat16)
    shapes = [((num_tokens, 32, dim), jnp.bfloat16), *[((4096, 16, 8, dim), kv_dtype)] * 2]
    shapes += [((num_seqs, 512), jnp.int32), ((num_seqs,), jnp.int32), ((num_seqs + 1,), jnp.int32)]
    compile_for_h200(lambda *args: paged_hopper.attend(*make_request(*args, **options)), shapes)


def compile_for_h200(call: Callable[..., Any], shapes: Sequence[tuple[tuple[int, ...], Any]]) -> None:
    """Compile a call of arrays of these shapes and dtypes."""
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=H200
    )
    place = SingleDeviceSharding(topology.devices[0])
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 1, "cuda"))):
        jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).compile()


def ptxas_report(compile_: Callable[[], None]) -> list[tuple[str, int, str]]:
    """(kernel, registers, stack frame and spills) of each kernel that a call of `compile_` compiles.

    The compiler writes them to the process's standard output, so that is caught meanwhile.
    """
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+") as caught:
        os.dup2(caught.fileno(), 1)
        try:
            compile_()
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
        caught.seek(0)
        lines = caught.read().splitlines()
    found = []
    kernel = frame = ""
    for line in lines:
        if name := re.search(r"entry function '(\w+?)_mosaic_gpu", line):
            kernel = name[1]
        elif "bytes stack frame" in line:
            frame = line.strip()
        elif registers := re.search(r"Used (\d+) registers", line):
            found.append((kernel, int(registers[1]), frame))
    return found


def spills(frame: str) -> bool:
    """Whether ptxas's line on the stack frame tells of any."""
    return " 0 bytes spill stores" not in frame


def why_no_compiler() -> str | None:
    """What this host lacks to compile for an H200."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "jax-cuda13-plugin and jax-cuda13-pjrt"
    return None if shutil.which("ptxas") else "ptxas on PATH"


def main() -> int:
    """Compile all kinds."""
    if lacking := why_no_compiler():
        print(f"bench.hopper_codegen needs {lacking}; see `make codegen`", file=sys.stderr)
        return 2
    spilled = False
    for name, kind in KINDS.items():
        for kernel, registers, frame in ptxas_report(functools.partial(compile_kind, *kind)):
            print(f"{name:14s} {kernel:24s} {registers:4d} registers, {frame}", flush=True)
            spilled |= name in COMMON and spills(frame)
    return int("--strict" in sys.argv and spilled)


if __name__ == "__main__":
    sys.exit(main())
