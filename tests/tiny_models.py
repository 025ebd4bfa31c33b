"""Small random models: as parameters, as Hugging Face folders and as GGUF files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jattn.models.decoder import DecoderConfig, init_params
from jattn.models.load_gguf import TENSORS as GGUF_TENSORS
from jattn.models.load_huggingface import TENSORS as HF_TENSORS

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n")]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


@functools.cache
def words() -> list[str]:
    """The vocabulary: special tokens, bytes, merges."""
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]


def config(kind: str = "llama", **changes: Any) -> DecoderConfig:
    """A model of two layers in the style of `kind`; the heads do not divide the hidden size."""
    sizes = {
        "vocab_size": len(words()),
        "hidden_size": 40,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "eos_ids": (0,),
        "qk_norm": kind == "qwen3",
        "attention_bias": kind == "qwen2",
    }
    return DecoderConfig(**sizes | changes)


@functools.cache
def params(c: DecoderConfig, seed: int = 0) -> dict[str, Any]:
    """Random float32 weights."""
    return init_params(c, jax.random.key(seed))


def tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE."""
    t = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words())}, MERGES))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in SPECIAL])
    return t


def named_tensors(c: DecoderConfig, names: dict[str, str], weights: dict[str, Any]) -> dict[str, np.ndarray]:
    """The weights one by one under a format's names."""
    flat = {names[name]: np.asarray(value) for name, value in weights.items() if name != "layers"}
    for name, stacked in weights["layers"].items():
        for i in range(c.num_layers):
            flat[names[name].format(i)] = np.array(stacked[i])
    return flat


def hf_settings(c: DecoderConfig, kind: str) -> dict[str, Any]:
    """Contents of config.json."""
    return {
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
        "max_position_embeddings": c.max_position_embeddings,
        "hidden_act": "silu",
        "eos_token_id": list(c.eos_ids),
        "torch_dtype": "float32",
    }


def write_hf(folder: Path, c: DecoderConfig, kind: str = "llama", *, shards: int = 1, seed: int = 0) -> Path:
    """Write a Hugging Face folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_settings(c, kind)))
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    tensors = named_tensors(c, HF_TENSORS, params(c, seed))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's conversion of Llama's q and k: rows i and i + D/2 of a head become neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, c: DecoderConfig, kind: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a GGUF file; `changes` replace metadata (None: leave out) or, under a tensor's name, the tensor."""
    import gguf

    writer = gguf.GGUFWriter(path, kind)
    fields = {
        f"{kind}.block_count": c.num_layers,
        f"{kind}.context_length": c.max_position_embeddings,
        f"{kind}.embedding_length": c.hidden_size,
        f"{kind}.feed_forward_length": c.intermediate_size,
        f"{kind}.attention.head_count": c.num_heads,
        f"{kind}.attention.head_count_kv": c.num_kv_heads,
        f"{kind}.attention.key_length": c.head_dim,
        f"{kind}.attention.value_length": c.head_dim,
        f"{kind}.rope.freq_base": float(c.rope_theta),
        f"{kind}.attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words(),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(words()) - len(SPECIAL)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
    tensors = named_tensors(c, GGUF_TENSORS, params(c, seed))
    if kind == "llama":
        for i in range(c.num_layers):
            for name, heads in (("q", c.num_heads), ("k", c.num_kv_heads)):
                key = GGUF_TENSORS[name].format(i)
                tensors[key] = permute(tensors[key], heads)
    for name, value in changes.items():
        (tensors if name.endswith((".weight", ".bias")) else fields)[name] = value
    for name, value in fields.items():
        if isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    for name, tensor in tensors.items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
