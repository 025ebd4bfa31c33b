"""What the tuner tries: for each workload and kernel the heuristic's sizes, and a few others that may be faster."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bench.workloads import Workload
from pallas_kernels import hopper_plan, paged_hopper, paged_triton, triton_plan
from pallas_kernels.request import AttentionOperands, AttentionRequest, make_request
from pallas_kernels.tuned import Tile, shape_key

KERNELS = ("hopper", "triton")
USUAL = "heuristic"


@dataclasses.dataclass(frozen=True)
class Job:
    """One workload for one kernel, on pages of one size and dtypes."""

    workload: Workload
    kernel: str
    page_size: int
    dtype: str
    kv_dtype: str

    @property
    def name(self) -> str:
        """For people and for the state file."""
        kinds = self.dtype if self.dtype == self.kv_dtype else f"{self.dtype}/{self.kv_dtype}"
        return f"{self.workload.name} {self.kernel} {kinds} page {self.page_size}"

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays of the call, as `bench.workloads.build` makes them."""
        w = self.workload
        counts = [-(-n // self.page_size) for n in w.seq_lens]
        pool = (sum(counts), self.page_size, w.num_kv_heads, w.head_dim)
        shapes: list[tuple[tuple[int, ...], Any]] = [((sum(w.query_lens), w.num_heads, w.head_dim), self.dtype)]
        shapes += [(pool, self.kv_dtype)] * 2
        shapes += [((len(counts), max(counts)), "int32"), ((len(counts),), "int32"), ((len(counts) + 1,), "int32")]
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]

    def make(self, *arrays: Array) -> tuple[AttentionRequest, AttentionOperands]:
        """The request on arrays, or on tracers."""
        w = self.workload
        return make_request(*arrays, causal=w.causal, window=w.window, max_query_len=max(w.query_lens))

    def request(self) -> AttentionRequest:
        """The static side, without arrays."""
        return _request_of(self)

    def call(self, fields: dict[str, Any], arch: str) -> Callable[..., Array]:
        """The kernel's call on the arrays of `shapes`, with the fields of a candidate."""

        def attend(*arrays: Array) -> Array:
            request, operands = self.make(*arrays)
            if self.kernel == "hopper":
                tiling = hopper_plan.with_fields(request, hopper_plan.heuristic(request), fields)
                return paged_hopper.attend(request, operands, tiling=tiling)[0]
            rows = rows_of(request, arch)
            tile = Tile(**fields) if fields else triton_plan.heuristic(request, arch, rows)
            return paged_triton.attend(request, operands, tiles=(None, tile) if rows is None else (tile, None))[0]

        return attend

    def key(self, arch: str) -> dict[str, Any]:
        """What an entry for this job says before its tile."""
        request = self.request()
        work = hopper_plan.work_of(request)
        if self.kernel == "triton":
            work = triton_plan.work_of(rows_of(request, arch))
        return {"kernel": self.kernel, "work": work} | shape_key(request)

    def why_not(self) -> tuple[str, ...]:
        """Why the kernel cannot run it."""
        return paged_hopper.why_not(self.request()) if self.kernel == "hopper" else paged_triton.why_not(self.request())

    def fixed(self, arch: str) -> dict[str, Any]:
        """Fields that every tile of this job has."""
        rows = rows_of(self.request(), arch) if self.kernel == "triton" else None
        return {} if rows is None else {"rows": rows}

    def candidates(self, arch: str) -> dict[str, dict[str, Any]]:
        """Fields by name, the heuristic first (it has none); also those that do not fit."""
        return {USUAL: {}} | (hopper_candidates if self.kernel == "hopper" else triton_candidates)(self.request(), arch)

    def misfits(self, fields: dict[str, Any], arch: str) -> tuple[str, ...]:
        """Why a candidate cannot be tried."""
        request = self.request()
        if self.kernel == "hopper":
            tiling = hopper_plan.with_fields(request, hopper_plan.heuristic(request), fields)
            return hopper_plan.misfits(request, tiling)
        return ()  # the compiler tells: registers and shared memory of Triton's code are its own affair


@functools.cache
def _request_of(job: Job) -> AttentionRequest:
    found: list[AttentionRequest] = []
    jax.eval_shape(lambda *x: found.append(job.make(*x)[0]), *job.shapes())
    return found[0]


def rows_of(request: AttentionRequest, arch: str) -> int | None:
    """Rows of the narrow tiles that take most of the time; None where wide tiles do."""
    narrow, wide = triton_plan.geometries(request, arch)
    return narrow.tile.rows if wide is None else None


def hopper_candidates(r: AttentionRequest, arch: str) -> dict[str, dict[str, Any]]:
    """One size changed at a time, and the pairs that belong together. All compile for an H200 without spills of note."""
    t = hopper_plan.heuristic(r)
    query_len = hopper_plan.likely_query_len(r)
    prefill = query_len > 2 * t.wg_tokens
    tried: list[dict[str, Any]] = [{"q_in_registers": True}]
    if t.wgs == 2 and not t.convert:
        if r.head_dim > 128:  # shared memory has no second slot for two warpgroups
            tried += [{"wgs": 1, "q_slots": 2}, {"registers": (240, 24, 0)}]
        else:
            tried += [{"registers": (224, 56, 0)}, {"registers": (216, 72, 0)}] + ([] if prefill else [{"wgs": 1}])
    if t.wgs == 2 and t.convert:
        tried += [{"wgs": 1, "registers": (240, 40, 152)}, {"block_kv": 64}, {"block_kv": 64, "q_slots": 2}]
        tried += [{"convert": 2, "registers": (152, 40, 64), "block_kv": 64}]
    if t.wgs == 1 and t.convert:
        tried += [{"convert": 2, "registers": (216, 40, 128)}]
        if r.head_dim <= 128:
            tried += [{"stages": 3, "q_slots": 1}]
    if t.block_kv > 64 and not t.convert:
        tried += [{"block_kv": 64, "stages": most_stages(r, t, 64)}]
    tried += [{"q_slots": 3 - t.q_slots}]  # one or two
    if not prefill and not (t.split and 2 * r.num_seqs * r.num_kv_heads < hopper_plan.NUM_PROGRAMS):
        tried += [{"split": not t.split}]  # split prefill shares no keys in the cache: long known to lose
    if r.head_dim == 64 and t.stages < 4:
        tried += [{"stages": t.stages + 1}]
    return {describe(fields): fields for fields in tried}


def most_stages(r: AttentionRequest, t: hopper_plan.Tiling, block_kv: int) -> int:
    """As many stages of smaller KV tiles as fit, up to five."""
    fits = [
        n for n in (2, 3, 4, 5) if hopper_plan.free_bytes(r, dataclasses.replace(t, block_kv=block_kv, stages=n)) >= 0
    ]
    return max(fits, default=2)


def triton_candidates(r: AttentionRequest, arch: str) -> dict[str, dict[str, Any]]:
    """Around the heuristic's tile: other keys, warps and stages; wide tiles also of other rows."""
    rows = rows_of(r, arch)
    usual = triton_plan.heuristic(r, arch, rows)
    tried = [triton_plan.choose_tile(r, arch, rows)]  # what the table has so far
    tried += [dataclasses.replace(usual, keys=keys) for keys in (32, 64, 128)]
    tried += [dataclasses.replace(usual, num_stages=n) for n in (2, 3, 4) if not arch.startswith("gfx")]
    tried += [dataclasses.replace(usual, num_warps=n) for n in (4, 8)]
    if rows is None:
        tried += [dataclasses.replace(usual, rows=n) for n in (64, 128)]
    return {describe(fields): fields for t in dict.fromkeys(tried) if t != usual for fields in [dataclasses.asdict(t)]}


def describe(fields: dict[str, Any]) -> str:
    """`a=1;b=2,3`, as `bench.hopper_variants` reads it."""

    def text(x: Any) -> str:
        return ",".join(map(str, x)) if isinstance(x, tuple | list) else str(x)

    return ";".join(f"{name}={text(x)}" for name, x in fields.items()) or USUAL
