"""Models from GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jattn.models.decoder import DecoderConfig
from jattn.models.loaded import LoadedModel, Progress, read_params, stop
from jattn.models.tokenizer import TextTokenizer

# Architectures whose tensors the decoder has a place for, and how the converter left the rows of q and k: it permutes
# Llama's so that the pairs of the rotation are neighbours.
ARCHITECTURES = {"llama": "interleaved", "qwen2": "half", "qwen3": "half"}

TENSORS = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}

# How each pre-tokenizer cuts text into words before the merges.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
PRETOKENIZERS = {"gpt-2": _GPT2, "smollm": _GPT2, "qwen2": _QWEN2, "llama-bpe": _LLAMA3}
_SINGLE_DIGITS = ("smollm",)

_AGAIN = "download the file again"


def load_gguf(path: Path | str, dtype: Any = np.float32) -> LoadedModel:
    """Load a Llama-, Qwen2- or Qwen3-style model.

    Args:
      path: the file.
      dtype: of the parameters; quantised weights are decoded to it.

    Raises:
      ValueError: the file is missing, damaged, of another architecture, or lacks a tensor; the text says what to do.
    """
    path = Path(path)
    with Progress(f"Loading {path.name}") as progress:
        reader = _open(path)
        fields = dict(reader.fields)
        architecture = _value(path, fields, "general.architecture", str)
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise stop(path, f"architecture {architecture!r}", f"one of {known}", "take a model of one of these")
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = _config(path, fields, tensors, architecture)
        tokenizer = _tokenizer(path, fields)

        def read(name: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
            from gguf.quants import dequantize

            tensor = _tensor(path, tensors, TENSORS[name].format(layer))
            came = tuple(int(n) for n in reversed(tensor.shape))
            if came != shape:
                raise stop(path, f"{tensor.name} of shape {came}", f"{shape}", "the metadata do not fit the tensors")
            try:
                return dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                then = "take a file with F16, BF16, Q8_0, Q4_0, Q4_1 or K-quant weights"
                raise stop(path, f"{tensor.name} in format {kind}", "a format that gguf decodes", then) from None

        params = read_params(config, read, dtype, progress)
    return LoadedModel(path.stem, config, params, tokenizer)


def _open(path: Path) -> Any:
    import gguf

    if not path.is_file():
        raise stop(path, "no such file" if not path.exists() else "a folder", "a .gguf file", "check the path")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise stop(path, f"a file that starts with {magic!r}", "a GGUF file, which starts with b'GGUF'", _AGAIN)
    try:
        # Truncated files surface as whatever the parser happens to hit first.
        return gguf.GGUFReader(path)
    except Exception as error:
        size = f"{path.stat().st_size} bytes"
        raise stop(path, f"{size} that end early or are damaged ({error})", "a whole GGUF file", _AGAIN) from error


def _value(path: Path, fields: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    if name not in fields:
        if default is None:
            raise stop(path, f"no {name} in the metadata", "it to be there", _AGAIN)
        return default
    value = fields[name].contents()
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted):
        raise stop(path, f"{name} = {value!r}", f"one {kind.__name__} for all layers", "take another conversion")
    return kind(value)


def _tensor(path: Path, tensors: dict[str, Any], name: str) -> Any:
    if name not in tensors:
        raise stop(path, f"no tensor {name}", f"it among the file's {len(tensors)} tensors", "take another conversion")
    return tensors[name]


def _config(path: Path, fields: dict[str, Any], tensors: dict[str, Any], architecture: str) -> DecoderConfig:
    def get(name: str, kind: type = int, default: Any = None) -> Any:
        return _value(path, fields, f"{architecture}.{name}", kind, default)

    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", default=hidden // max(heads, 1))
    scaling = get("rope.scaling.type", str, "none")
    factors = None
    if "rope_freqs.weight" in tensors:
        factors = tuple(float(x) for x in tensors["rope_freqs.weight"].data)
    elif scaling == "linear":
        factors = (get("rope.scaling.factor", float),) * (head_dim // 2)
    elif scaling != "none":
        raise stop(path, f"RoPE scaling {scaling!r}", "none, linear or llama3", "take a model without it")
    for kind in ("rope.dimension_count", "attention.value_length"):
        count = get(kind, default=head_dim)
        if count != head_dim:
            raise stop(path, f"{kind} {count}", f"{head_dim}, the head size", "take a model whose heads are uniform")
    experts = get("expert_count", default=0)
    if experts:
        raise stop(path, f"{experts} experts", "a dense model", "take one without experts")
    eos = _value(path, fields, "tokenizer.ggml.eos_token_id", int, -1)
    bos = _value(path, fields, "tokenizer.ggml.bos_token_id", int, -1)
    eot = _value(path, fields, "tokenizer.ggml.eot_token_id", int, -1)
    return DecoderConfig(
        vocab_size=int(_tensor(path, tensors, TENSORS["embed"]).shape[1]),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        rope_theta=get("rope.freq_base", float, 10000.0),
        rope_factors=factors,
        rope_layout=ARCHITECTURES[architecture],  # type: ignore[arg-type]
        rms_norm_eps=get("attention.layer_norm_rms_epsilon", float, 1e-5),
        qk_norm=TENSORS["q_norm"].format(0) in tensors,
        attention_bias=TENSORS["q_bias"].format(0) in tensors,
        tie_word_embeddings=TENSORS["head"] not in tensors,
        max_position_embeddings=get("context_length"),
        bos_id=bos if bos >= 0 else None,
        eos_ids=tuple(sorted({i for i in (eos, eot) if i >= 0})),
    )


def _tokenizer(path: Path, fields: dict[str, Any]) -> TextTokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    kind = _value(path, fields, "tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise stop(
            path, f"a {kind!r} tokenizer", "byte-level BPE ('gpt2')", "take the safetensors folder of this model"
        )
    pre = _value(path, fields, "tokenizer.ggml.pre", str, "gpt-2")
    if pre not in PRETOKENIZERS:
        then = "take the safetensors folder of this model"
        raise stop(path, f"pre-tokenizer {pre!r}", f"one of {', '.join(PRETOKENIZERS)}", then)
    words = _value(path, fields, "tokenizer.ggml.tokens", list)
    merges = [tuple(pair.split(" ", 1)) for pair in _value(path, fields, "tokenizer.ggml.merges", list)]
    try:
        model = models.BPE({word: i for i, word in enumerate(words)}, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:
        raise stop(path, f"merges that do not fit the tokens ({error})", "a whole vocabulary", _AGAIN) from error
    tokenizer = tokenizers.Tokenizer(model)
    split = pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZERS[pre]), "isolated")
    steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if pre in _SINGLE_DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    types = _value(path, fields, "tokenizer.ggml.token_type", list, [1] * len(words))
    control, user_defined = 3, 4
    added = [(w, t) for w, t in zip(words, types, strict=False) if t in (control, user_defined)]
    tokenizer.add_special_tokens([tokenizers.AddedToken(w, special=True) for w, t in added if t == control])
    tokenizer.add_tokens([tokenizers.AddedToken(w, normalized=False) for w, t in added if t == user_defined])

    special = {}
    for name in ("bos", "eos"):
        index = _value(path, fields, f"tokenizer.ggml.{name}_token_id", int, -1)
        if 0 <= index < len(words):
            special[f"{name}_token"] = words[index]
    adds_bos = "tokenizer.ggml.add_bos_token" in fields and bool(fields["tokenizer.ggml.add_bos_token"].contents())
    bos = _value(path, fields, "tokenizer.ggml.bos_token_id", int, -1)
    template = fields["tokenizer.chat_template"].contents() if "tokenizer.chat_template" in fields else None
    return TextTokenizer(tokenizer, template, special, bos if adds_bos and bos >= 0 else None)
