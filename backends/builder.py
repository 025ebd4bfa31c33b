"""Making a backend's metadata from what the scheduler knows: what all backends share."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jax import Array

from backends.contract import AttentionCGSupport, AttentionType, Platform
from backends.metadata import CommonAttentionMetadata
from pallas_kernels.request import expect


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What a builder knows of the layers that share its metadata."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    attn_type: AttentionType = AttentionType.DECODER
    layer_windows: tuple[int | None, ...] = ()  # of each layer, as in `AttentionImpl.sliding_window`
    layer_soft_caps: tuple[float | None, ...] = ()
    has_sinks: bool = False
    num_speculative_tokens: int = 0
    parallel_drafting: bool = False
    dcp_world_size: int = 1
    dcp_rank: int = 0
    dcp_interleave: int = 1
    use_non_causal: bool = False


@dataclasses.dataclass(frozen=True)
class AttentionMetadataBuilder:
    """Makes a backend's metadata. Pure: the same arguments give the same pytree, and nothing is remembered."""

    spec: LayerSpec
    platform: Platform | None = None

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    spec_as_decode: ClassVar[bool] = False
    splits: ClassVar[bool] = False  # whether decodes have a path of their own

    @property
    def reorder_batch_threshold(self) -> int | None:
        """The longest query of a decode; None: the backend does not tell them apart."""
        if not self.splits:
            return None
        if self.spec.dcp_world_size > 1:  # ranks would disagree about queries of several tokens
            return 1
        drafted = self.spec.num_speculative_tokens if self._spec_as_decode() else 0
        return 1 + (2 if self.spec.parallel_drafting else 1) * drafted

    def _spec_as_decode(self) -> bool:
        return self.spec_as_decode

    def get_cudagraph_support(self) -> AttentionCGSupport:
        """For which batches the engine may capture a graph."""
        return self.cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """The backend's metadata of a batch.

        Args:
          common_prefix_len: tokens that all requests share at their start. The result of attention is the same with
            any value: the block table covers the prefix.
          common_attn_metadata: the batch; traced lengths give metadata for one ragged call.
          fast_build: prefer building fast to running fast; changes nothing here.
        """
        raise NotImplementedError

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> Any:
        """The same for step `draft_index` of a drafter."""
        return self.build(0, common_attn_metadata, fast_build=True)


def one_flag(backend: str, causal: bool | Array) -> bool:
    """The static flag of a backend whose engine knows only one for the batch.

    Raises:
      NotImplementedError: each request has its own.
    """
    if isinstance(causal, bool):
        return causal
    raise NotImplementedError(
        f"{backend} does not support per-request causal flags: its engine has one flag for the batch."
        " Pass a bool, or use JATTN."
    )


def uniform_window(spec: LayerSpec) -> int | None:
    """The one window of layers that share metadata; None where none of them has one.

    Raises:
      ValueError: they differ.
    """
    found = {None if window is None or window <= 0 else window for window in spec.layer_windows}
    came = ", ".join(map(str, spec.layer_windows))
    expect(len(found) <= 1, "layer_windows", came, "one window for all layers of a group, or sliding windows disabled")
    return next(iter(found), None)
