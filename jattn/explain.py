"""May a configuration run on a backend, and if not, why not: asked before running anything."""

from __future__ import annotations

import argparse
import dataclasses

from backends import selector
from backends.contract import AttentionBackend, AttentionConfig, AttentionType, Platform
from backends.selector import Explanation, Name

_FLAGS = tuple(f.name for f in dataclasses.fields(AttentionConfig) if f.type == "bool")


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
    parser.add_argument("--platform", default="cpu", help="sm90, cuda:8.9, gfx942, cpu, tpu:v6e, ... (default: cpu)")
    parser.add_argument("--backend", default=None, help="ask about this backend alone")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--block-size", type=int, default=None)
    parser.add_argument("--num-heads", type=int, default=None)
    parser.add_argument("--num-kv-heads", type=int, default=None)
    parser.add_argument("--attn-type", choices=[t.value for t in AttentionType], default="decoder")
    for name in _FLAGS:
        parser.add_argument(_option(name), dest=name, action="store_true")


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
