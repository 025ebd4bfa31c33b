"""What an engine's scheduler knows of a batch, as a pytree: the input of every metadata builder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from pallas_kernels.request import describe, expect

PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0  # reserved by the engines, never written

T = TypeVar("T")


def metadata_pytree(*static: str) -> Callable[[type[T]], type[T]]:
    """Register a frozen dataclass as a pytree whose `causal` is static while it is a bool and data while an array.

    Args:
      *static: the other static fields.
    """

    def register(cls: type[T]) -> type[T]:
        names = [f.name for f in dataclasses.fields(cast(Any, cls))]
        data = [name for name in names if name not in static and name != "causal"]
        causal = ["causal"] if "causal" in names else []

        def flatten_with_keys(m: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
            values, aux = [getattr(m, name) for name in data], [getattr(m, name) for name in static]
            for name in causal:
                flag = getattr(m, name)
                is_static = isinstance(flag, bool)
                aux.append(flag if is_static else None)
                values.append(None if is_static else flag)
            keys = [jax.tree_util.GetAttrKey(name) for name in data + causal]
            return list(zip(keys, values, strict=True)), tuple(aux)

        def flatten(m: Any) -> tuple[list[Any], tuple[Any, ...]]:
            values, aux = flatten_with_keys(m)
            return [value for _, value in values], aux

        def unflatten(aux: tuple[Any, ...], values: Sequence[Any]) -> T:
            # Around __init__: a transformation may put anything in an array's place.
            out = object.__new__(cls)
            fields = dict(zip(data + causal, values, strict=True)) | dict(zip(static, aux, strict=False))
            if causal and aux[-1] is not None:
                fields["causal"] = aux[-1]
            for name in names:
                object.__setattr__(out, name, fields[name])
            return out

        jax.tree_util.register_pytree_with_keys(cast(Any, cls), flatten_with_keys, cast(Any, unflatten), flatten)
        return cls

    return register


@metadata_pytree("num_actual_tokens", "max_query_len", "max_seq_len")
@dataclasses.dataclass(frozen=True)
class CommonAttentionMetadata:
    """One step's batch. `causal` is static while it is a bool, data while it is bool[S].

    The static numbers are upper bounds: keep them the same from step to step, and nothing compiles again. Build with
    `make`, which checks; under `jit` all arrays may be traced.
    """

    query_start_loc: Int[Array, " S+1"]
    seq_lens: Int[Array, " S"]
    block_table_tensor: Int[Array, "S max_blocks"]
    slot_mapping: Int[Array, " T"]
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: bool | Bool[Array, " S"] = True
    is_prefilling: Bool[Array, " S"] | None = None
    positions: Int[Array, " T"] | None = None
    encoder_seq_lens: Int[Array, " S"] | None = None
    dcp_local_seq_lens: Int[Array, " S"] | None = None
    mm_prefix_ranges: Int[Array, "S R 2"] | None = None  # half-open positions that see each other fully

    @classmethod
    def make(
        cls,
        query_start_loc: Any,
        seq_lens: Any,
        block_table_tensor: Any,
        slot_mapping: Any,
        *,
        num_actual_tokens: int | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        causal: Any = True,
        is_prefilling: Any = None,
        positions: Any = None,
        encoder_seq_lens: Any = None,
        dcp_local_seq_lens: Any = None,
        mm_prefix_ranges: Any = None,
    ) -> CommonAttentionMetadata:
        """Build from arrays, checking shapes and dtypes.

        Args:
          query_start_loc: int [S+1].
          seq_lens: int [S], this step's tokens included.
          block_table_tensor: int [S, max_blocks].
          slot_mapping: int [T]; negative: not written.
          num_actual_tokens: tokens of the batch, padding included; T by default.
          max_query_len: a bound on the query lengths; T by default, or the longest where the lengths are concrete.
          max_seq_len: a bound on `seq_lens`; likewise.
          causal: a bool or bool [S].
          is_prefilling: bool [S]: the request's prompt is not all in the cache yet.
          positions: int [T].
          encoder_seq_lens: int [S]: keys of cross-attention.
          dcp_local_seq_lens: int [S]: keys on this rank of decode context parallelism.
          mm_prefix_ranges: int [S, R, 2].

        Raises:
          ValueError: something does not fit.
        """
        lens = _integers("seq_lens", seq_lens, (None,))
        size = lens.shape[0]
        loc = _integers("query_start_loc", query_start_loc, (size + 1,))
        table = _integers("block_table_tensor", block_table_tensor, (size, None))
        slots = _integers("slot_mapping", slot_mapping, (None,))
        tokens = slots.shape[0] if num_actual_tokens is None else num_actual_tokens
        expect(0 <= tokens <= slots.shape[0], "num_actual_tokens", tokens, f"0 to T = {slots.shape[0]}")
        if max_query_len is None:
            max_query_len = int(np.diff(np.asarray(loc)).max(initial=0)) if is_concrete(loc) else tokens
        if max_seq_len is None:
            max_seq_len = int(np.max(np.asarray(lens), initial=0)) if is_concrete(lens) else 2**31 - 1
        if isinstance(causal, bool | np.bool_):
            causal = bool(causal)  # a NumPy bool is no static flag
        else:
            causal = _flags("causal", causal, size)
        return cls(
            loc,
            lens,
            table,
            slots,
            tokens,
            max_query_len,
            max_seq_len,
            causal,
            None if is_prefilling is None else _flags("is_prefilling", is_prefilling, size),
            None if positions is None else _integers("positions", positions, (None,)),
            None if encoder_seq_lens is None else _integers("encoder_seq_lens", encoder_seq_lens, (size,)),
            None if dcp_local_seq_lens is None else _integers("dcp_local_seq_lens", dcp_local_seq_lens, (size,)),
            None if mm_prefix_ranges is None else _integers("mm_prefix_ranges", mm_prefix_ranges, (size, None, 2)),
        )

    @property
    def num_reqs(self) -> int:
        """Requests, padding included."""
        return self.seq_lens.shape[0]

    @property
    def concrete(self) -> bool:
        """Whether lengths can be looked at: outside `jit`."""
        return is_concrete(self.query_start_loc) and is_concrete(self.seq_lens)

    def batch_size(self) -> int:
        """Same as `num_reqs`."""
        return self.num_reqs

    def naive_query_lens(self) -> Int[Array, " S"]:
        """Tokens of each request in this step."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    def compute_num_computed_tokens(self) -> Int[Array, " S"]:
        """Tokens of each request before this step: the context lengths."""
        return self.seq_lens - self.naive_query_lens()

    def token_to_req_indices(self) -> Int[Array, " T"]:
        """The request of each token; tokens past the last request belong to none and get S."""
        index = jnp.arange(self.slot_mapping.shape[0])
        return jnp.searchsorted(self.query_start_loc[1:], index, side="right").astype(jnp.int32)

    def replace(self, **changes: Any) -> CommonAttentionMetadata:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> CommonAttentionMetadata:
        """The first requests and tokens alone; flags of each request are cut as well."""
        t, n = num_actual_tokens, num_actual_reqs

        def cut(x: Any) -> Any:
            return None if x is None else x[:n]

        return self.replace(
            query_start_loc=self.query_start_loc[: n + 1],
            seq_lens=self.seq_lens[:n],
            block_table_tensor=self.block_table_tensor[:n],
            slot_mapping=self.slot_mapping[:t],
            num_actual_tokens=t,
            causal=self.causal if isinstance(self.causal, bool) else self.causal[:n],
            is_prefilling=cut(self.is_prefilling),
            positions=None if self.positions is None else self.positions[:t],
            encoder_seq_lens=cut(self.encoder_seq_lens),
            dcp_local_seq_lens=cut(self.dcp_local_seq_lens),
            mm_prefix_ranges=cut(self.mm_prefix_ranges),
        )


def is_concrete(x: Any) -> bool:
    """Whether an array's values are known now."""
    return not isinstance(x, jax.core.Tracer)


def compute_mm_prefix_ranges(
    ranges: Mapping[int, Sequence[tuple[int, int]]], num_reqs: int
) -> Int[Array, "S R 2"] | None:
    """Half-open ranges from an engine's document ranges, whose ends belong to them.

    Args:
      ranges: of each request, pairs (first, last) of positions; pairs with first >= last do not count.
      num_reqs: S.

    Returns:
      int32 [S, R, 2] with empty pairs as padding; None where nothing counts.

    Raises:
      ValueError: a request is out of range.
    """
    kept = {}
    for request, pairs in ranges.items():
        expect(0 <= request < num_reqs, "ranges", f"request {request}", f"requests 0 to {num_reqs - 1}")
        kept[request] = [(a, b + 1) for a, b in pairs if a < b]
    width = max(map(len, kept.values()), default=0)
    if width == 0:
        return None
    out = np.zeros((num_reqs, width, 2), np.int32)
    for request, spans in kept.items():
        out[request, : len(spans)] = np.reshape(spans, (-1, 2))
    return jnp.asarray(out)


def _integers(name: str, value: Any, shape: tuple[int | None, ...]) -> Array:
    array = jnp.asarray(value)
    ok = jnp.issubdtype(array.dtype, jnp.integer) and array.ndim == len(shape)
    ok = ok and all(want is None or want == has for want, has in zip(shape, array.shape, strict=True))
    text = ", ".join("any" if n is None else str(n) for n in shape)
    expect(ok, name, describe(array), f"integers of shape [{text}]")
    return array.astype(jnp.int32)


def _flags(name: str, value: Any, size: int) -> Array:
    array = jnp.asarray(value)
    expect(array.dtype == bool and array.shape == (size,), name, describe(array), f"bool[S] = bool[{size}]")
    return array
