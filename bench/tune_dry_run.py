"""`bench.tune --dry-run`: what would be tried, and what the compilers say of it, on a host without a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax

from bench import codegen, hopper_codegen
from bench.tune_candidates import Job


def dry_run(jobs: list[Job], arch: str, compile_: bool) -> int:
    """List the candidates of each job; 1 if a compiler is asked for and missing."""
    if compile_:
        jax.config.update("jax_platforms", "cpu")  # the compiler's plugin would look for a GPU
        needs_cuda = any(job.kernel == "hopper" for job in jobs)
        if needs_cuda and (lacking := hopper_codegen.why_no_compiler()):
            raise SystemExit(f"--compile needs {lacking}; `make codegen` installs what it needs into .venv")
    for job in jobs:
        if reasons := job.why_not():
            print(f"{job.name}: cannot run. {'; '.join(reasons)}")
            continue
        print(f"{job.name}: {job.key(arch)['work']}")
        for name, fields in job.candidates(arch).items():
            reasons = job.misfits(fields, arch)
            verdict = f"does not fit: {'; '.join(reasons)}" if reasons else "fits"
            if compile_ and not reasons:
                verdict = code_of(job, fields, arch)
            print(f"  {name:40s} {verdict}", flush=True)
    return 0


def code_of(job: Job, fields: dict[str, Any], arch: str) -> str:
    """Registers and spills of the kernel that does the work."""
    call, shapes = job.call(fields, arch), job.shapes()
    try:
        if job.kernel == "hopper":
            compile_ = functools.partial(hopper_codegen.compile_for_h200, call, [(x.shape, x.dtype) for x in shapes])
            _, registers, frame = hopper_codegen.ptxas_report(compile_)[0]
            return f"{registers} registers, {frame.split(',')[1].strip()}"
        launches = codegen.lower_call(lambda arrays: call(*arrays), shapes, arch)
        work = "paged_" + job.key(arch)["work"]
        _, text, warps, stages = next(x for x in launches if x[0].startswith(work))
        registers, spilled, shared, matrix = codegen.compile_kernel(arch, text, warps, stages)
    except Exception as failure:  # the others still count
        return f"fails: {type(failure).__name__}: {failure}"[:100]
    over = " (too much)" if shared > codegen.TARGETS[arch][3] else ""
    return f"{registers} registers, {spilled} bytes spilt, {shared} bytes shared{over}, {matrix} matrix instructions"
