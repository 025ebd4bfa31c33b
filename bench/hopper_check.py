"""Is the Hopper kernel right on this device? Every feature and odd shape against the float64 oracle.

    python -m bench.hopper_check [part of a name ...]

Each case runs three times: clean, again (the bits must not change), and with poison wherever no query may look (the bits
must not change either). Starts of sequences at rows 0 to 15 are a case each: the interpreter cannot see a copy that
starts off an 8-row boundary go wrong. For the sanitizer: `compute-sanitizer --tool memcheck python -m bench.hopper_check
sanitizer`, and the same with `--tool racecheck`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hopper_plan, paged_hopper
from pallas_kernels.request import make_request
from tests import batches, oracle
from tests.cases import FEATURES, Case, build

LIMIT = {"bfloat16": 4e-3, "float16": 1e-3}
BASE = Case(
    "base",
    query_lens=(1, 6, 0, 0, 77, 1),
    context_lens=(330, 37, 7, 0, 150, 0),
    head_dim=128,
    num_heads=8,
    dtype="bfloat16",
)


def cases() -> Iterator[Case]:
    """The table."""
    for start in range(16):
        yield dataclasses.replace(
            BASE, name=f"start {start}", query_lens=(start or 16, 35, 3), context_lens=(20, 200, 60)
        )
    for name, options in FEATURES.items():
        yield dataclasses.replace(BASE, name=name, **({} if "dtype" in options and name != "float16" else options))
    for page_size in (8, 24, 32, 64, 128, 256, 544):
        yield dataclasses.replace(BASE, name=f"page {page_size}", page_size=page_size)
    for group in (1, 2, 3, 5, 7, 8, 16, 17, 64):
        yield dataclasses.replace(BASE, name=f"group {group}", num_heads=2 * group)
    for dim in (64, 96, 192, 256):
        yield dataclasses.replace(BASE, name=f"head_dim {dim}", head_dim=dim)
        yield dataclasses.replace(
            BASE, name=f"head_dim {dim} fp8", head_dim=dim, kv_dtype="float8_e4m3fn", scales="head"
        )
    decode = {"query_lens": (1,) * 9, "context_lens": tuple(range(100, 1000, 100)), "max_query_len": 1}
    for kv_dtype in (None, "float8_e4m3fn", "float8_e5m2"):
        yield dataclasses.replace(BASE, name=f"decode {kv_dtype}", kv_dtype=kv_dtype, **decode)
        yield dataclasses.replace(BASE, name=f"whole {kv_dtype}", kv_dtype=kv_dtype, batch_invariant=True)
    idle = {"query_lens": (1, 1), "context_lens": (60, 0), "padding_tokens": 0}
    yield dataclasses.replace(BASE, name="idle programs, split", **idle)
    yield dataclasses.replace(BASE, name="idle programs, whole", batch_invariant=True, **idle)
    small = {"query_lens": (1, 21), "context_lens": (150, 30)}
    yield dataclasses.replace(BASE, name="sanitizer split", **small)
    yield dataclasses.replace(BASE, name="sanitizer whole", batch_invariant=True, **small)
    yield dataclasses.replace(BASE, name="sanitizer fp8", kv_dtype="float8_e4m3fn", **small)
    yield dataclasses.replace(BASE, name="sanitizer new", new_kv=True, **small)


def check(case: Case) -> tuple[str, str]:
    """(verdict, details) of a case, cut among programs although it is short, unless it is to be batch-invariant."""
    clean = build(case)
    arrays, static = batches.split(clean)
    request, operands = make_request(**{n: jnp.asarray(x) for n, x in arrays.items()}, **static)
    if reasons := paged_hopper.why_not(request):
        return "refused", "; ".join(reasons)
    tiling = dataclasses.replace(hopper_plan.choose_tiling(request), split=not case.batch_invariant)
    call = jax.jit(lambda operands: paged_hopper.attend(request, operands, tiling=tiling))
    out, lse = call(operands)
    want, want_lse = oracle.attention(**clean)
    got = np.asarray(out).astype(np.float64)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    dead = (got[~np.abs(want).any(-1)] == 0).all()
    again = all((a == b).all() for a, b in zip(call(operands), (out, lse), strict=True) if a is not None)
    dirty, _ = batches.split(batches.poison(np.random.default_rng(0), clean))
    _, dirty_operands = make_request(**{n: jnp.asarray(x) for n, x in dirty.items()}, **static)
    poisoned = call(dirty_operands)
    same = all((a == b).all() for a, b in zip(poisoned, (out, lse), strict=True) if a is not None)
    lse_error = 0.0
    if lse is not None:
        alive = np.isfinite(want_lse)
        lse_error = np.abs(np.asarray(lse)[alive] - want_lse[alive]).max(initial=0.0)
        lse_error = lse_error if (np.isneginf(np.asarray(lse)) == np.isneginf(want_lse)).all() else np.inf
    good = error < LIMIT[case.dtype] and lse_error < 2e-3 and dead and again and same
    kind = f"{'split' if tiling.split else 'whole'}, {tiling.warpgroups} warpgroups"
    marks = f"dead rows {dead}, repeats {again}, poison {same}"
    return "ok" if good else "WRONG", f"error {error:.1e}, lse {lse_error:.1e}, {marks} ({kind})"


def main() -> int:
    """Check the cases whose name holds one of the arguments; all without arguments."""
    wrong = 0
    for case in cases():
        if len(sys.argv) > 1 and not any(part in case.name for part in sys.argv[1:]):
            continue
        try:
            verdict, details = check(case)
        except Exception as error:  # one case that fails to compile must not hide the others
            verdict, details = "WRONG", f"{type(error).__name__}: {error}"[:200]
        wrong += verdict == "WRONG"
        print(f"{verdict:8s} {case.name:28s} {details}", flush=True)
    print(f"{wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
