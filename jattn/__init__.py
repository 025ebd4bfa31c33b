"""Paged attention for JAX: one call, one meaning, on NVIDIA, AMD, TPU and CPU, causal and non-causal.

The same words everywhere: T query tokens, flattened over sequences; S sequences; H query heads; KVH KV heads; D head_dim;
P pages in the pool; page_size tokens a page; query_start_loc int32[S+1]; seq_lens int32[S], the KV length with this step's
queries; block_table int32[S, max_pages]; slot_mapping int32[T], page * page_size + offset, negative: not written; context
length = seq_len - query_len; LSE natural log.
"""

from jattn._neighbours import check_neighbours

check_neighbours()

from backends.contract import AttentionConfig  # noqa: E402
from jattn.attention import attend, paged_attention  # noqa: E402
from jattn.cache import KVCache, gather_pages, merge_states, write_kv  # noqa: E402
from jattn.checks import debug_checks  # noqa: E402
from jattn.metadata import AttentionMetadata  # noqa: E402
from jattn.page_allocator import OutOfPages, PageAllocator  # noqa: E402
from jattn.selection import explain, select_backend  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "AttentionMetadata",
    "KVCache",
    "OutOfPages",
    "PageAllocator",
    "attend",
    "debug_checks",
    "explain",
    "gather_pages",
    "merge_states",
    "paged_attention",
    "select_backend",
    "write_kv",
]
