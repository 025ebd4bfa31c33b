"""Drafts on disk, in the format that z-lab's have: config.json beside one model.safetensors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jattn.dflash import draft
from jattn.dflash.draft import Convention, DraftConfig
from jattn.models.decoder import DecoderConfig, Params
from jattn.models.load_huggingface import open_tensors, read_json, read_rope, read_tensor
from jattn.models.loaded import stop

TENSORS = {
    "fc": "fc.weight",
    "hidden_norm": "hidden_norm.weight",
    "norm": "norm.weight",
    "attn_norm": "layers.{}.input_layernorm.weight",
    "mlp_norm": "layers.{}.post_attention_layernorm.weight",
    "q_norm": "layers.{}.self_attn.q_norm.weight",
    "k_norm": "layers.{}.self_attn.k_norm.weight",
    **{x: f"layers.{{}}.self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"{x}_bias": f"layers.{{}}.self_attn.{x}_proj.bias" for x in "qkvo"},
    **{x: f"layers.{{}}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{
        f"markov_{x}": f"markov.{x}.weight" for x in ("before", "row", "out")
    },  # ours; engines that lack it pass it over
}
SCALE = "_scale"  # beside an int8 weight: float32 [out, 1], one a row, as the compressed-tensors library names it
_DEFAULT_BLOCK = 16
_UNKNOWN = {
    "sample_from_anchor": "rows that predict the token after their own",
    "attention_sink_bias": "attention sinks",
    "final_logit_softcapping": "a soft cap of its own",
    "markov_rank": "a Markov head of DSpark's kind",
}
_MISSING: Any = object()


def load_draft(
    path: Path | str, target: DecoderConfig | None = None, dtype: Any = np.float32
) -> tuple[DraftConfig, Params]:
    """Load a draft. Embedding and head, if its file has them, are left out: the target's are used, as in training.

    Args:
      path: the folder.
      target: the model that it is for; checked, if given.
      dtype: of the parameters.

    Raises:
      ValueError: a file is missing, damaged or of another kind, or the draft is not for this target.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        came = "a file" if path.exists() else "no such folder"
        raise stop(path, came, "a folder with config.json and model.safetensors", "check the path")
    config = read_config(path / "config.json", read_json(path / "config.json"), target)
    if target is not None:
        draft.check_fits(config, target)
    with contextlib.ExitStack() as files:
        where = open_tensors(path, files)
        alien = sorted(name for name in where if name in ("d2t", "t2d") or "sink" in name or "qkv_proj" in name)
        if alien:
            raise stop(path, f"the tensor {alien[0]}", "the tensors of a z-lab draft", "take a draft without it")
        return config, _read_params(path, config, where)(dtype)


def _read_params(path: Path, config: DraftConfig, where: dict[str, tuple[Path, Any]]) -> Any:
    shapes = draft.weight_shapes(config)
    prefix = "model." if "model.fc.weight" in where else ""
    if prefix + "fc.weight" in where:
        name = prefix + "fc.weight"
        width, wanted = where[name][1].get_slice(name).get_shape()[-1], shapes["fc"][-1]
        if width != wanted:
            taps = f"{len(config.taps)} taps x {config.decoder.hidden_size} features = {wanted}"
            raise stop(path, f"fc.weight with {width} columns", taps, "check that config.json belongs to these weights")

    def one(leaf: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
        name = prefix + TENSORS[leaf].format(layer)
        if name + SCALE not in where:
            return read_tensor(path, where, name, shape)
        scale = read_tensor(path, where, name + SCALE, (shape[0], 1)).astype(np.float32)
        return read_tensor(path, where, name, shape, ("I8",)) * scale

    def read(dtype: Any) -> Params:
        import jax.numpy as jnp

        params: Params = {"layers": {}}
        for name, shape in shapes.items():
            inside, _, leaf = name.rpartition(".")
            if inside:
                stacked = [one(leaf, i, shape) for i in range(config.decoder.num_layers)]
                params["layers"][leaf] = jnp.asarray(np.stack(stacked).astype(dtype))
            else:
                params[leaf] = jnp.asarray(one(leaf, None, shape).astype(dtype))
        return params

    return read


def read_config(path: Path, settings: dict[str, Any], target: DecoderConfig | None = None) -> DraftConfig:
    """The draft's config from config.json, whose keys may stand at the top or in `dflash_config`.

    Args:
      path: the file, for error texts.
      settings: its contents.
      target: gives what older files leave out.

    Raises:
      ValueError: an entry is missing or wrong, or asks for what this draft model lacks.
    """
    inner = settings.get("dflash_config") or {}
    then = "check that it is a DFlash draft's config.json"

    def get(name: str, default: Any = _MISSING) -> Any:
        value = inner.get(name)
        value = settings.get(name) if value is None else value
        if value is None and default is _MISSING:
            raise stop(path, f"no {name}", f"{name} in dflash_config or at the top", then)
        return default if value is None else value

    def number(name: str, default: Any = _MISSING) -> int:
        value = get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise stop(path, f"{name} = {value!r}", "a whole number", then)
        return value

    for name, what in _UNKNOWN.items():
        if get(name, None):
            raise stop(path, name, f"a draft without {what}", "this draft model does not have them; take another")
    if get("hidden_act", "silu") != "silu":
        raise stop(path, f"hidden_act {get('hidden_act')!r}", "'silu'", then)
    hidden, heads, layers = number("hidden_size"), number("num_attention_heads"), number("num_hidden_layers")
    wide = number("target_hidden_size", hidden)
    if wide != hidden:
        raise stop(path, f"target_hidden_size {wide}", f"the draft's own {hidden}", "take a draft of the target's size")
    head_dim = number("head_dim", hidden // max(heads, 1))
    theta, factors = read_rope(path, settings, head_dim)
    neox = get("is_neox_style", get("rope_is_neox_style", True))
    bias = bool(get("attention_bias", False))
    stack = DecoderConfig(
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=head_dim,
        rope_theta=theta,
        rope_factors=factors,
        rope_layout="half" if neox else "interleaved",
        rms_norm_eps=float(get("rms_norm_eps", 1e-6)),
        qk_norm=True,
        attention_bias=bias,
        output_bias=bias,
        max_position_embeddings=number("max_position_embeddings", 40960),
    )
    count = number("num_target_layers", target.num_layers if target else _MISSING)
    taps = get("target_layer_ids", None)
    config = DraftConfig(
        decoder=stack,
        taps=draft.default_taps(count, layers) if taps is None else tuple(taps),
        mask_id=number("mask_token_id"),
        num_target_layers=count,
        block_size=number("block_size", _DEFAULT_BLOCK),
        markov_rank=number("tied_markov_rank", 0),
    )
    return dataclasses.replace(config, **_masks(settings, inner, layers))


def _masks(settings: dict[str, Any], inner: dict[str, Any], layers: int) -> dict[str, Any]:
    """Causality and windows; the top's `is_causal` goes before dflash_config's `causal`, that before the layer's kind."""
    flag = settings.get("is_causal")
    flag = inner.get("causal") if flag is None else flag
    kinds = settings.get("layer_types") or ["full_attention"] * layers
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    swa = bool(inner.get("use_swa", settings.get("use_swa")))
    if swa and not any(sliding):
        sliding = (True,) * layers
    if not any(sliding):
        return {"causal": bool(flag)}
    convention: Convention = "causal" if flag or (flag is None and not swa) else "bidirectional" if swa else "symmetric"
    if settings.get("sliding_window_non_causal") is not None:  # the speculators library
        convention = "anchored" if settings["sliding_window_non_causal"] else "anchored_causal"
    named = inner.get("window_convention", convention)
    window = inner.get("swa_window_size") or settings.get("sliding_window")
    return {"causal": bool(flag), "sliding": sliding, "window": window, "convention": named}


def settings_of(config: DraftConfig) -> dict[str, Any]:
    """Contents of config.json."""
    d = config.decoder
    kinds = ["sliding_attention" if s else "full_attention" for s in config.sliding or (False,) * d.num_layers]
    inner: dict[str, Any] = {"mask_token_id": config.mask_id, "target_layer_ids": list(config.taps)}
    if any(config.sliding):
        inner["window_convention"] = config.convention
    if config.causal:
        inner["causal"] = True
    if config.markov_rank:
        inner["tied_markov_rank"] = config.markov_rank
    settings: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": inner,
        "vocab_size": d.vocab_size,
        "hidden_size": d.hidden_size,
        "intermediate_size": d.intermediate_size,
        "num_hidden_layers": d.num_layers,
        "num_attention_heads": d.num_heads,
        "num_key_value_heads": d.num_kv_heads,
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": d.rms_norm_eps,
        "rope_theta": d.rope_theta,
        "max_position_embeddings": d.max_position_embeddings,
        "attention_bias": d.attention_bias,
        "layer_types": kinds,
        "sliding_window": config.window,
        "use_sliding_window": any(config.sliding),
        "tie_word_embeddings": True,
    }
    if d.rope_layout == "interleaved":
        settings["is_neox_style"] = False
    return settings


def _stored(name: str, value: np.ndarray, dtype: Any) -> dict[str, np.ndarray]:
    if np.dtype(dtype) != np.int8:
        return {name: np.ascontiguousarray(value.astype(dtype))}
    if value.ndim == 1:
        return {name: value.astype(ml_dtypes.bfloat16)}
    wide = value.astype(np.float32)
    scale = np.maximum(np.abs(wide).max(1, keepdims=True), 1e-12) / 127
    return {name: np.rint(wide / scale).astype(np.int8), name + SCALE: scale}


def save_draft(path: Path | str, config: DraftConfig, params: Params, dtype: Any = ml_dtypes.bfloat16) -> Path:
    """Write a draft's folder; its path.

    Args:
      path: the folder; made if it is not there.
      config: the draft.
      params: its parameters.
      dtype: of the file; int8 gives matrices a scale a row, and leaves norms in bfloat16.
    """
    from safetensors.numpy import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    flat: dict[str, np.ndarray] = {}
    for name in draft.weight_shapes(config):
        inside, _, leaf = name.rpartition(".")
        value = np.asarray(params["layers"][leaf] if inside else params[leaf])
        parts = {TENSORS[leaf].format(i): part for i, part in enumerate(value)} if inside else {TENSORS[leaf]: value}
        for tensor, part in parts.items():
            flat |= _stored(tensor, part, dtype)
    save_file(flat, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(settings_of(config), indent=2) + "\n", encoding="utf-8")
    return path
