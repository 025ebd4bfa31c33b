"""Models from Hugging Face folders: config.json, safetensors (sharded too) and tokenizer.json."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jattn.models.decoder import DecoderConfig, llama3_factors
from jattn.models.loaded import LoadedModel, Progress, read_params, stop
from jattn.models.tokenizer import TextTokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")

TENSORS = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    **{x: f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"{x}_bias": f"model.layers.{{}}.self_attn.{x}_proj.bias" for x in "qkvo"},
    **{x: f"model.layers.{{}}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
}

_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
_AGAIN = "download the file again"


def load_huggingface(path: Path | str, dtype: Any = np.float32) -> LoadedModel:
    """Load a Llama-, Qwen2- or Qwen3-style model.

    Args:
      path: the folder.
      dtype: of the parameters.

    Raises:
      ValueError: a file is missing, damaged, of another architecture, or lacks a tensor; the text says what to do.
    """
    path = Path(path)
    if not path.is_dir():
        came = "a file" if path.exists() else "no such folder"
        raise stop(path, came, "a folder with config.json, tokenizer.json and safetensors", "check the path")
    settings = read_json(path / "config.json")
    config = read_config(path / "config.json", settings, _optional_json(path / "generation_config.json"))
    tokenizer = _tokenizer(path)
    with Progress(f"Loading {path.name}") as progress, contextlib.ExitStack() as files:
        where = open_tensors(path, files)

        def read(name: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
            return read_tensor(path, where, TENSORS[name].format(layer), shape)

        params = read_params(config, read, dtype, progress)
    return LoadedModel(path.resolve().name, config, params, tokenizer)


def read_config(path: Path, settings: dict[str, Any], generation: dict[str, Any] | None = None) -> DecoderConfig:
    """The decoder's config from config.json.

    Args:
      path: the file, for error texts.
      settings: its contents.
      generation: contents of generation_config.json, whose end tokens win.

    Raises:
      ValueError: another architecture, a feature that the decoder lacks, or a missing or wrong entry.
    """
    kind = settings.get("model_type")
    if kind not in ARCHITECTURES:
        raise stop(path, f"model_type {kind!r}", f"one of {', '.join(ARCHITECTURES)}", "take a model of one of these")

    def get(name: str, want: type, default: Any = None) -> Any:
        value = settings.get(name)
        value = default if value is None else value
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        ok = numeric and float(value).is_integer() if want is int else numeric if want is float else False
        if want is bool:
            ok = isinstance(value, bool)
        if not ok:
            came = f"no {name}" if value is None else f"{name} = {value!r}"
            raise stop(path, came, f"{name} to be of type {want.__name__}", _AGAIN)
        return want(value)

    if settings.get("hidden_act", "silu") != "silu":
        raise stop(path, f"hidden_act {settings['hidden_act']!r}", "'silu'", "take a model of a known architecture")
    sliding = settings.get("use_sliding_window") or "sliding_attention" in (settings.get("layer_types") or ())
    for name, on in (("sliding windows", sliding), ("mlp_bias", settings.get("mlp_bias"))):
        if on:
            raise stop(path, name, "a model without them", "this decoder does not have them yet; take another model")
    hidden, heads = get("hidden_size", int), get("num_attention_heads", int)
    head_dim = get("head_dim", int, hidden // max(heads, 1))
    theta, factors = read_rope(path, settings, head_dim)
    bias = get("attention_bias", bool, kind == "qwen2")
    eos = (generation or {}).get("eos_token_id", settings.get("eos_token_id"))
    return DecoderConfig(
        vocab_size=get("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=get("intermediate_size", int),
        num_layers=get("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        rope_theta=theta,
        rope_factors=factors,
        rope_layout="half",
        rms_norm_eps=get("rms_norm_eps", float, 1e-6),
        qk_norm=kind == "qwen3",
        attention_bias=bias,
        output_bias=bias and kind != "qwen2",
        tie_word_embeddings=get("tie_word_embeddings", bool, False),
        max_position_embeddings=get("max_position_embeddings", int, 2048),
        bos_id=settings.get("bos_token_id"),
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )


def read_rope(path: Path, settings: dict[str, Any], head_dim: int) -> tuple[float, tuple[float, ...] | None]:
    # transformers 5 moved theta and the scaling into one dictionary.
    scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", settings.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, (float(scaling["factor"]),) * (head_dim // 2)
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return theta, llama3_factors(head_dim, theta, *(scaling[name] for name in names))
    except KeyError as error:
        raise stop(path, f"RoPE scaling {scaling} without {error}", "all of its numbers", _AGAIN) from None
    known = "default, linear or llama3"
    raise stop(path, f"RoPE scaling {kind!r}", known, "remove it, if you stay within the trained length")


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise stop(path, "no such file", "it beside the model's other files", "download it too")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise stop(path, f"text that is not JSON ({error})", "a JSON object", _AGAIN) from None
    if not isinstance(value, dict):
        raise stop(path, f"a JSON {type(value).__name__}", "a JSON object", _AGAIN)
    return value


def _optional_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def open_tensors(folder: Path, files: contextlib.ExitStack) -> dict[str, tuple[Path, Any]]:
    """From a tensor's name to its file, path and opened."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise stop(index, "no weight_map", "one from tensor names to files", _AGAIN)
        paths = sorted({folder / name for name in names.values()})
    else:
        paths = [folder / "model.safetensors"]
    where = {}
    for path in paths:
        if not path.is_file():
            then = "download it too; weights in other formats (.bin, .pth) are not read"
            raise stop(path, "no such file", "the model's weights", then)
        try:
            opened = files.enter_context(safe_open(path, framework="np"))
        except SafetensorError as error:
            size = f"{path.stat().st_size} bytes"
            came = f"{size} that end early or are damaged ({error})"
            raise stop(path, came, "a whole safetensors file", _AGAIN) from None
        where.update(dict.fromkeys(opened.keys(), (path, opened)))
    return where


def read_tensor(
    folder: Path,
    where: dict[str, tuple[Path, Any]],
    name: str,
    shape: tuple[int, ...],
    kinds: Collection[str] = _FLOATS,
) -> np.ndarray:
    if name not in where:
        among = f"it among the {len(where)} tensors"
        raise stop(folder, f"no tensor {name}", among, "check that config.json belongs to these weights")
    path, opened = where[name]
    part = opened.get_slice(name)
    came, kind = tuple(part.get_shape()), part.get_dtype()
    if came != shape:
        then = "check that config.json belongs to these weights"
        raise stop(path, f"{name} of shape {came}", str(shape), then)
    if kind not in kinds:
        raise stop(path, f"{name} of type {kind}", f"one of {', '.join(kinds)}", "take the unquantised weights")
    return opened.get_tensor(name)


def _tokenizer(folder: Path) -> TextTokenizer:
    import tokenizers

    path = folder / "tokenizer.json"
    read_json(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise stop(path, f"a tokenizer that does not load ({error})", "a tokenizers file", _AGAIN) from None
    settings = _optional_json(folder / "tokenizer_config.json") or {}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[name] = value
    return TextTokenizer(tokenizer, template, special)
