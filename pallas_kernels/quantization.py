"""Storing floats in a cache's type."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


def store_as(x: Array, dtype: DTypeLike) -> Array:
    """`x` in a cache's type: 8-bit values saturate, int8 rounds half away from zero, floats round to nearest even."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize > 1:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    if dtype == jnp.int8:
        rounded = jnp.trunc(x + jnp.copysign(0.5, x))
        return jnp.where(jnp.isnan(x), 0.0, jnp.clip(rounded, -128, 127)).astype(jnp.int8)
    limit = float(jnp.finfo(dtype).max)
    # A plain conversion turns what is too large into NaN or Inf; clip keeps NaN.
    return jnp.clip(x, -limit, limit).astype(dtype)
