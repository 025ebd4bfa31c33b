"""Which backend a layer gets: the one that was asked for, or the first of the platform's that has no reasons against it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import textwrap
import warnings
from collections.abc import Mapping

from backends.contract import AttentionBackend, AttentionConfig, AttentionType, Platform
from backends.platforms import parse_platform
from backends.registry import AttentionBackendEnum, generation
from pallas_kernels.request import expect

NOT_PROVIDED = "not provided by jattn"
Name = AttentionBackendEnum | str | None


class KVCacheSpecKind(enum.StrEnum):
    """Kinds of layers that may be given backends of their own."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


def get_attn_spec_kind(config: AttentionConfig) -> KVCacheSpecKind:
    """The kind of a configuration's layer; sinks do not change it."""
    if config.attn_type is AttentionType.ENCODER_ONLY:
        return KVCacheSpecKind.ENCODER_ONLY_ATTENTION
    if config.attn_type is AttentionType.ENCODER_DECODER:
        return KVCacheSpecKind.CROSS_ATTENTION
    if config.use_mla:
        return KVCacheSpecKind.SLIDING_WINDOW_MLA if config.has_sliding_window else KVCacheSpecKind.MLA_ATTENTION
    return KVCacheSpecKind.SLIDING_WINDOW if config.has_sliding_window else KVCacheSpecKind.FULL_ATTENTION


@dataclasses.dataclass(frozen=True)
class Row:
    """One backend's verdict."""

    backend: str
    verdict: str  # "chosen", "valid", "refused", or "by name": valid, but the platform does not try it unasked
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Every backend's verdict on a configuration, in the order of trial; printing it gives a table of 80 columns."""

    config: AttentionConfig
    platform: Platform
    requested: str | None
    rows: tuple[Row, ...]

    @property
    def chosen(self) -> str | None:
        """The backend that `select_backend` takes."""
        return next((row.backend for row in self.rows if row.verdict == "chosen"), None)

    def __str__(self) -> str:
        """The table."""
        asked = f", asked for {self.requested}" if self.requested else ""
        lines = [f"attention backends on {_where(self.platform)}{asked}"]
        lines += textwrap.wrap(_asks(self.config), 80, initial_indent="  ", subsequent_indent="  ")
        lines += ["", f"{'backend':<27} {'verdict':<8} reasons", "-" * 80]
        for row in self.rows:
            reasons = [line for reason in row.reasons for line in textwrap.wrap(reason, 43)] or [""]
            lines.append(f"{row.backend:<27} {row.verdict:<8} {reasons[0]}".rstrip())
            lines += [" " * 37 + line for line in reasons[1:]]
        return "\n".join(lines)


def _where(platform: Platform) -> str:
    return platform.name if platform.device == platform.name else f"{platform.name} {platform.device}"


def _asks(config: AttentionConfig) -> str:
    parts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            parts.append(f"{field.name}={value.value if isinstance(value, enum.Enum) else value}")
    return ", ".join(parts)


def get_attn_backend(
    config: AttentionConfig,
    platform: Platform | str,
    requested: Name = None,
    backend_per_kind: Mapping[str, Name] | None = None,
) -> type[AttentionBackend]:
    """The class of the backend for a layer.

    Args:
      config: what the layer asks.
      platform: a `Platform` or a short name of one.
      requested: a backend's name or member: it alone is tried, nothing takes its place. None or "auto": the platform's
        priorities.
      backend_per_kind: `requested` for some kinds of layers (`KVCacheSpecKind`).

    Raises:
      ValueError: the requested backend cannot run the configuration, or none can; the text holds all reasons.
      NotImplementedError: the platform has no attention of this kind at all.
    """
    for kind, name in (backend_per_kind or {}).items():
        known = [k.value for k in KVCacheSpecKind]
        expect(kind in known, "backend_per_kind", repr(kind), f"one of {', '.join(known)}")
        if kind == get_attn_spec_kind(config):
            requested = name
    member = _member(requested)
    return _cached_get_attn_backend(config, parse_platform(platform), member, generation())


def explain(config: AttentionConfig, platform: Platform | str, requested: Name = None) -> Explanation:
    """Every backend's verdict on a configuration, as data.

    Args:
      config: what the layer asks.
      platform: a `Platform` or a short name of one.
      requested: as in `get_attn_backend`; then it alone can be chosen.
    """
    member = _member(requested)
    return _cached_explain(config, parse_platform(platform), member, generation())


def reasons_against(member: AttentionBackendEnum, config: AttentionConfig, platform: Platform) -> tuple[str, ...]:
    """All reasons why a backend cannot run a configuration."""
    if not member.is_provided():
        return ("no class registered",) if member.value == "" else (NOT_PROVIDED,)
    return tuple(member.get_class().validate_configuration(config, platform))


def _member(requested: Name) -> AttentionBackendEnum | None:
    if requested is None or isinstance(requested, AttentionBackendEnum):
        return requested
    expect(isinstance(requested, str), "requested", repr(requested), "a backend's name, a member or None")
    return None if requested.lower() == "auto" else AttentionBackendEnum[requested]


@functools.cache
def _cached_explain(
    config: AttentionConfig, platform: Platform, requested: AttentionBackendEnum | None, changes: int
) -> Explanation:
    try:
        tried = (requested.name,) if requested else platform.priorities(config)
    except NotImplementedError:  # the platform has nothing of this kind to try
        tried = ()
    ours = [m.name for m in AttentionBackendEnum if m.is_provided() and m.name not in tried]
    rows, chosen = [], False
    for name in (*tried, *ours):
        reasons = reasons_against(AttentionBackendEnum[name], config, platform)
        verdict = "refused" if reasons else "by name"
        if not reasons and name in tried:
            verdict = "valid" if chosen else "chosen"
            chosen = True
        rows.append(Row(name, verdict, reasons))
    return Explanation(config, platform, requested.name if requested else None, tuple(rows))


@functools.cache
def _cached_get_attn_backend(
    config: AttentionConfig, platform: Platform, requested: AttentionBackendEnum | None, changes: int
) -> type[AttentionBackend]:
    if requested is not None:
        requested.get_path()  # says what is wrong with a name that has no class
        reasons = list(reasons_against(requested, config, platform))
        if reasons:
            raise ValueError(
                f"Selected backend {requested.name} is not valid for this configuration on {platform.device}."
                f" Reason: {reasons}. {config}"
            )
        return requested.get_class()
    explanation = _cached_explain(config, platform, None, changes)
    tried = explanation.rows[: len(platform.priorities(config))]
    if explanation.chosen is None:
        listed = ", ".join(f"{row.backend}: [{', '.join(row.reasons)}]" for row in tried)
        raise ValueError(f"No valid attention backend found for {platform.device} with {config}. Reasons: {{{listed}}}")
    _warn_of_block_size(config, tried, explanation.chosen)
    return AttentionBackendEnum[explanation.chosen].get_class()


def _warn_of_block_size(config: AttentionConfig, tried: tuple[Row, ...], chosen: str) -> None:
    """Say where the block size that the user chose is all that speaks against a better backend."""
    for row in tried:
        if row.backend == chosen:
            return
        if row.reasons == (f"block_size {config.block_size} not supported",):
            warnings.warn(
                f"{row.backend} comes before {chosen} here, but does not take block_size={config.block_size}",
                stacklevel=4,
            )
