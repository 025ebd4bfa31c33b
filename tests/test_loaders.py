"""Loaders on small files that the tests write: right weights from good ones, a clear error from bad ones."""

from __future__ import annotations

import dataclasses
import json

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jattn import models
from jattn.models.decoder import llama3_factors
from tests import tiny_models as tiny

TOKENS = jnp.asarray([5, 9, 100, 7, 42, 42, 3, 11])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_folder(tmp_path, kind, shards, tied):
    config = tiny.config(kind, tie_word_embeddings=tied)
    model = models.load(tiny.write_hf(tmp_path / "m", config, kind, shards=shards))
    assert model.config == config
    chex.assert_trees_all_equal(model.params, tiny.params(config))
    assert model.name == "m"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_file_means_the_same_as_the_folder(tmp_path, kind, tied):
    config = tiny.config(kind, tie_word_embeddings=tied)
    model = models.load(tiny.write_gguf(tmp_path / "m.gguf", config, kind))
    eps = model.config.rms_norm_eps  # float32 in the file
    config = dataclasses.replace(config, rms_norm_eps=eps) if abs(eps - 1e-6) < 1e-12 else config
    if kind != "llama":
        assert model.config == config
        chex.assert_trees_all_equal(model.params, tiny.params(config))
        return
    assert model.config == dataclasses.replace(config, rope_layout="interleaved")
    came = models.dense_forward(model.params, model.config, TOKENS)
    expected = models.dense_forward(tiny.params(config), config, TOKENS)
    np.testing.assert_allclose(came, expected, rtol=0, atol=1e-5)


def test_the_two_tokenizers_agree(tmp_path):
    config = tiny.config()
    folder, file = (
        models.load(tiny.write_hf(tmp_path / "m", config)),
        models.load(tiny.write_gguf(tmp_path / "m.gguf", config)),
    )
    for text in ["the thing in there", "  è 日本 🙂\n\n", "it's 12345!", "<|user|>hi"]:
        tokens = folder.tokenizer.encode(text)
        assert tokens == file.tokenizer.encode(text)
        assert folder.tokenizer.tokenizer.decode(tokens, skip_special_tokens=False) == text
    chat = [{"role": "user", "content": "in"}]
    assert folder.tokenizer.encode_chat(chat) == file.tokenizer.encode_chat(chat) == [1, len(tiny.words()) - 1, 2]


def test_dtype(tmp_path):
    model = models.load(tiny.write_hf(tmp_path / "m", tiny.config()), ml_dtypes.bfloat16)
    assert model.params["layers"]["q"].dtype == model.params["norm"].dtype == jnp.bfloat16


def test_weights_in_bfloat16(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tiny.write_hf(tmp_path / "m", tiny.config())
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}, folder / "model.safetensors")
    embed = np.asarray(models.load(folder).params["embed"])
    np.testing.assert_array_equal(embed, tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16))


def test_head_dim_is_a_fraction_of_hidden_size_only_where_nothing_is_said(tmp_path):
    config = tiny.config(hidden_size=96)
    folder = tiny.write_hf(tmp_path / "m", config)
    settings = json.loads((folder / "config.json").read_text())
    del settings["head_dim"]
    (folder / "config.json").write_text(json.dumps(settings))
    assert models.load(folder).config.head_dim == 16


def llama3_by_the_book(head_dim, theta, factor, low, high, original):
    """The rule as Llama 3.1 published it, branch by branch."""
    out = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            new = frequency
        elif wavelength > original / low:
            new = frequency / factor
        else:
            smooth = (original / wavelength - low) / (high - low)
            new = (1 - smooth) * frequency / factor + smooth * frequency
        out.append(frequency / new)
    return out


def test_llama3_scaling(tmp_path):
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    book = llama3_by_the_book(16, 100.0, 8.0, 1.0, 4.0, 64)
    np.testing.assert_allclose(llama3_factors(16, 100.0, 8.0, 1.0, 4.0, 64), book, rtol=1e-12)
    assert len(set(book)) > 3  # a kept one, a divided one, and some between
    for where in ("rope_scaling", "rope_parameters"):
        folder = tiny.write_hf(tmp_path / where, tiny.config(rope_theta=100.0))
        settings = json.loads((folder / "config.json").read_text())
        settings[where] = {"rope_type": "llama3", "rope_theta": 100.0, **numbers}
        (folder / "config.json").write_text(json.dumps(settings))
        np.testing.assert_allclose(models.load(folder).config.rope_factors, book, rtol=1e-12)
    freqs = np.asarray(book, np.float32)
    config = tiny.config(rope_theta=100.0)
    file = tiny.write_gguf(tmp_path / "m.gguf", config, **{"rope_freqs.weight": freqs})
    np.testing.assert_allclose(models.load(file).config.rope_factors, book, rtol=1e-6)


def break_config(**changes):
    def run(folder):
        path = folder / "config.json"
        settings = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))

    return run


def cut(name, keep):
    def run(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return run


def remove(name):
    return lambda folder: (folder / name).unlink()


def drop_tensor(name):
    def run(folder):
        from safetensors.numpy import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return run


LAST_NORM = "model.layers.1.input_layernorm.weight"
BAD_FOLDERS = {
    "no config": (remove("config.json"), "config.json.*no such file.*download"),
    "no weights": (remove("model.safetensors"), "model.safetensors.*no such file"),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer.json.*no such file"),
    "config is no JSON": (cut("config.json", 0.5), "config.json.*not JSON"),
    "tokenizer is no tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json.*does not load"),
    "truncated weights": (cut("model.safetensors", 0.9), "model.safetensors.*end early"),
    "truncated header": (cut("model.safetensors", 0.01), "model.safetensors.*end early"),
    "empty weights": (cut("model.safetensors", 0), "model.safetensors.*end early"),
    "architecture": (break_config(model_type="mamba"), "model_type 'mamba'.*llama, qwen2, qwen3"),
    "no architecture": (break_config(model_type=None), "model_type None"),
    "missing entry": (break_config(hidden_size=None), "no hidden_size"),
    "wrong type": (break_config(hidden_size="40"), "hidden_size = '40'.*int"),
    "sliding window": (break_config(use_sliding_window=True), "sliding windows"),
    "activation": (break_config(hidden_act="gelu"), "hidden_act 'gelu'"),
    "RoPE": (break_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "'yarn'.*default, linear or llama3"),
    "RoPE numbers": (break_config(rope_scaling={"rope_type": "llama3"}), "without 'factor'"),
    "missing tensor": (drop_tensor(LAST_NORM), LAST_NORM),
    "shapes": (break_config(head_dim=32), r"q_proj.weight of shape \(96, 40\), expected \(192, 40\)"),
    "heads": (break_config(num_key_value_heads=4), "6 heads over 4"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folder(tmp_path, case):
    folder = tiny.write_hf(tmp_path / "m", tiny.config())
    damage, text = BAD_FOLDERS[case]
    damage(folder)
    with pytest.raises(ValueError, match=text):
        models.load(folder)


def test_bad_shard(tmp_path):
    folder = tiny.write_hf(tmp_path / "m", tiny.config(), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors.*no such file"):
        models.load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index.json.*no weight_map"):
        models.load(folder)


BAD_GGUF = {
    "architecture": ({"general.architecture": "mamba"}, "architecture 'mamba'.*llama, qwen2, qwen3"),
    "missing entry": ({"llama.embedding_length": None}, "no llama.embedding_length"),
    "list": ({"llama.attention.head_count": [6, 6]}, "attention.head_count = .*one int"),
    "experts": ({"llama.expert_count": 8}, "8 experts"),
    "partial rotation": ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8"),
    "RoPE": ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
    "tokenizer": ({"tokenizer.ggml.model": "llama"}, "'llama' tokenizer"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "jais"}, "'jais'.*smollm"),
    "merges": ({"tokenizer.ggml.merges": ["xx yy"]}, "merges"),
    "missing tensor": ({"blk.1.ffn_up.weight": None}, "no tensor blk.1.ffn_up.weight"),
    "shape": ({"blk.1.ffn_up.weight": np.zeros((64, 8), np.float32)}, r"blk.1.ffn_up.weight of shape \(64, 8\)"),
}


@pytest.mark.parametrize("case", BAD_GGUF)
def test_bad_gguf(tmp_path, case):
    changes, text = BAD_GGUF[case]
    with pytest.raises(ValueError, match=text):
        models.load(tiny.write_gguf(tmp_path / "m.gguf", tiny.config(), **changes))


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.001, 0.02, 0.1, 0.5, 0.9, 0.999])
def test_truncated_gguf(tmp_path, keep):
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.config())
    cut("m.gguf", keep)(tmp_path)
    with pytest.raises(ValueError, match=r"m\.gguf: got .*, expected .*GGUF.*; download the file again"):
        models.load(path)


def test_not_a_model(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"hello, I am no model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "m.safetensors").write_bytes(b"")
    for name, text in {
        "nothing": "no such file",
        "m.gguf": "starts with b'hell'",
        "empty": "config.json",
        "m.safetensors": "name its folder",
    }.items():
        with pytest.raises(ValueError, match=text):
            models.load(tmp_path / name)


def test_progress_is_silent_without_a_terminal(tmp_path, capsys):
    models.load(tiny.write_hf(tmp_path / "m", tiny.config()))
    assert capsys.readouterr() == ("", "")
