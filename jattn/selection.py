"""May a configuration run on a backend, and if not, why not: asked before running anything."""

from __future__ import annotations

import argparse

from backends import selector
from backends.contract import AttentionBackend, AttentionConfig, AttentionType, Platform
from backends.selector import Explanation, Name

# Yes-or-no fields of a configuration, with what they ask for.
_FLAGS = {
    "use_non_causal": "queries see each other both ways, as a block drafter's do",
    "use_per_request_causal": "causal and non-causal requests in one batch",
    "has_sliding_window": "a sliding window",
    "has_sink": "attention sinks",
    "use_mm_prefix": "ranges of multimodal tokens that see each other fully",
    "use_per_head_quant_scales": "a scale for each KV head of a quantised cache",
    "use_mla": "multi-head latent attention",
    "use_sparse": "sparse attention",
    "use_batch_invariant": "the same bits whatever else is in the batch",
    "use_kv_connector": "blocks that move between processes",
    "use_pcp": "prefill context parallelism",
    "use_adaptive_verification": "query lengths that only the device knows",
    "is_encoder_decoder_model": "a model with cross-attention elsewhere",
}


def select_backend(
    config: AttentionConfig, *, platform: Platform | str, requested: Name = None
) -> type[AttentionBackend]:
    """The backend that a layer gets.

    Args:
      config: what the layer asks.
      platform: a `backends.platforms` description, or a short name such as "sm90", "gfx942", "cpu", "tpu".
      requested: a backend's name, which nothing replaces; None or "auto": the first valid one of the platform's.

    Raises:
      ValueError: the requested backend cannot run the configuration, or none can; the text holds all reasons.
    """
    return selector.get_attn_backend(config, platform, requested)


def explain(config: AttentionConfig, *, platform: Platform | str, requested: Name = None) -> Explanation:
    """Every backend's verdict on a configuration, with all reasons; `print` it for a table.

    Args:
      config: what the layer asks.
      platform: as in `select_backend`.
      requested: as in `select_backend`.
    """
    return selector.explain(config, platform, requested)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `jattn explain`."""
    parser.add_argument("--platform", default="cpu", metavar="P", help="sm90, gfx942, cpu, tpu:v6e, ... (default: cpu)")
    parser.add_argument("--backend", metavar="NAME", help="choose this one or none")
    types = [t.value for t in AttentionType]
    parser.add_argument("--head-size", type=int, default=128, metavar="D", help="(default: 128)")
    parser.add_argument("--dtype", default="bfloat16", metavar="T", help="of the queries (default: bfloat16)")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="T", help="auto, fp8, fp8_e5m2, ... (default: auto)"
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens a page (default: the backend chooses)")
    parser.add_argument("--num-heads", type=int, metavar="N", help="query heads, where they matter")
    parser.add_argument("--num-kv-heads", type=int, metavar="N", help="KV heads, where they matter")
    parser.add_argument("--attn-type", choices=types, default="decoder", help="(default: decoder)")
    for name, text in _FLAGS.items():
        parser.add_argument(_option(name), dest=name, action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Print the table; 0 where a backend was found, else 1."""
    config = AttentionConfig(
        head_size=args.head_size,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        block_size=args.block_size,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        attn_type=args.attn_type,
        **{name: getattr(args, name) for name in _FLAGS},
    )
    explanation = explain(config, platform=args.platform, requested=args.backend)
    print(explanation)
    return 0 if explanation.chosen else 1


def _option(name: str) -> str:
    for prefix in ("use_", "has_", "is_"):
        name = name.removeprefix(prefix)
    return "--" + name.replace("_", "-")
