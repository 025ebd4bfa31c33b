"""Merging attention over disjoint parts of the keys."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.request import as_array, describe, expect


def merge_states(
    outs: Float[Array, "N T H D"] | list[Float[Array, "T H D"]],
    lses: Float[Array, "N T H"] | list[Float[Array, "T H"]],
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """The result over all keys from results over disjoint parts of them.

    Args:
      outs: N partial outputs.
      lses: their natural-log LSEs. -inf (or +inf, which some kernels return) marks a part without keys: it is neutral,
        whatever its output holds.

    Returns:
      (out, lse): out in the outputs' dtype, 0 where every part is empty; LSE float32.

    Raises:
      ValueError: the shapes do not fit each other.
    """
    out, lse = _stack("outs", outs), _stack("lses", lses).astype(jnp.float32)
    ok = out.ndim == 4 and jnp.issubdtype(out.dtype, jnp.floating)
    expect(ok, "outs", describe(out), "N partial outputs, floats [T, H, D]")
    expect(lse.shape == out.shape[:3], "lses", describe(lse), f"an LSE for each row, {list(out.shape[:3])}")
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse)
    peak = lse.max(0)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    weight = jnp.exp(lse - base)
    total = weight.sum(0)
    # A part without keys may hold anything, NaN too.
    parts = jnp.where(weight[..., None] == 0, 0.0, out.astype(jnp.float32) * weight[..., None])
    merged = parts.sum(0) / jnp.where(total == 0, 1.0, total)[..., None]
    return merged.astype(out.dtype), jnp.where(total == 0, -jnp.inf, base + jnp.log(total))


def _stack(name: str, parts: Any) -> Array:
    if isinstance(parts, list | tuple):
        parts = [as_array(name, x) for x in parts]
        shapes = {x.shape for x in parts}
        expect(len(shapes) == 1, name, f"{len(parts)} parts of shapes {sorted(shapes)}", "parts of one shape")
        return jnp.stack(parts)
    return as_array(name, parts)
