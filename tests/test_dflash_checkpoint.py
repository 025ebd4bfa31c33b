"""Drafts on disk: what is written is read, keys are found in either place, and what does not fit is refused."""

from __future__ import annotations

import json

import chex
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jattn.dflash.checkpoint import TENSORS, load_draft, save_draft
from jattn.dflash.draft import CONVENTIONS
from tests import tiny_drafts
from tests import tiny_models as tiny

CONFIG = tiny_drafts.config()
TARGET = tiny.config("qwen3")
ZLAB = {  # key by key as the published files have them
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 8,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 0]},
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "vocab_size": TARGET.vocab_size,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}


def write(folder, *, prefix="", tensors=None, inner=None, **changes):
    """A z-lab folder; None takes an entry out."""
    save_draft(folder, CONFIG, tiny_drafts.params(CONFIG), np.float32)
    settings = ZLAB | changes | {"dflash_config": ZLAB["dflash_config"] | (inner or {})}
    settings = {k: v for k, v in settings.items() if v is not None}
    settings["dflash_config"] = {k: v for k, v in settings["dflash_config"].items() if v is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    flat = load_file(folder / "model.safetensors") | (tensors or {})
    save_file({prefix + k: v for k, v in flat.items() if v is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_published_folder(tmp_path, prefix):
    extra = {"rotary_emb.inv_freq": np.ones(4, np.float32), "lm_head.weight": np.ones((2, 2), np.float32)}
    config, params = load_draft(write(tmp_path, prefix=prefix, tensors=extra), TARGET)
    assert config == tiny_drafts.config(block_size=8)
    chex.assert_trees_all_equal(params, tiny_drafts.params(CONFIG))


@pytest.mark.parametrize("changes", [{}, {"causal": True}, *({"convention": c} for c in CONVENTIONS)])
def test_what_is_written_is_read(tmp_path, changes):
    if "convention" in changes:
        changes = changes | {"sliding": (True, False), "window": 20}
    config = tiny_drafts.config(block_size=8, **changes)
    weights = tiny_drafts.params(CONFIG)
    came, params = load_draft(save_draft(tmp_path / "draft", config, weights), TARGET, ml_dtypes.bfloat16)
    assert came == config
    chex.assert_trees_all_equal(params, {k: _bf16(v) for k, v in weights.items()})
    assert sorted(load_file(tmp_path / "draft" / "model.safetensors"))[0] == "fc.weight"


def test_int8_weights_have_a_scale_a_row(tmp_path):
    """Within half a step of each row's largest weight; half the size; a scale that is missing is an error."""
    weights = tiny_drafts.params(CONFIG)
    folder = save_draft(tmp_path / "draft", CONFIG, weights, np.int8)
    _, came = load_draft(folder, TARGET)
    for name, value in weights["layers"].items():
        step = np.abs(value).max(-1, keepdims=True) / (127 if value.ndim == 3 else 256)
        assert (np.abs(came["layers"][name] - value) <= 0.501 * step).all(), name
    assert (np.asarray(came["fc"]) != weights["fc"]).any()
    flat = load_file(folder / "model.safetensors")
    assert flat["fc.weight"].dtype == np.int8 and flat["fc.weight_scale"].shape == (len(flat["fc.weight"]), 1)
    save_file({k: v for k, v in flat.items() if k != "fc.weight_scale"}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc.weight of type I8"):
        load_draft(folder, TARGET)


def _bf16(value):
    return {k: _bf16(v) for k, v in value.items()} if isinstance(value, dict) else value.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": None, "inner": {"block_size": 8}},
        {"block_size": 4, "inner": {"block_size": 8}},  # dflash_config goes first
        {"inner": {"mask_token_id": None}, "mask_token_id": 1},
        {"inner": {"target_layer_ids": None}, "target_layer_ids": [1, 0]},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
        {"num_target_layers": None},  # from the target
        {"is_neox_style": True},
    ],
)
def test_keys_in_either_place(tmp_path, changes):
    config, _ = load_draft(write(tmp_path, **changes), TARGET)
    assert config == tiny_drafts.config(block_size=8)


def test_head_dim_is_what_it_says_and_taps_have_a_rule(tmp_path):
    assert ZLAB["head_dim"] != ZLAB["hidden_size"] // ZLAB["num_attention_heads"]
    many = {"fc.weight": np.zeros((40, 80), np.float32)}
    path = write(tmp_path, tensors=many, inner={"target_layer_ids": None}, num_target_layers=36)
    assert load_draft(path)[0].taps == (1, 33)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        (SLIDING, {"sliding": (True, False), "window": 20}),
        (SLIDING | {"is_causal": False}, {"sliding": (True, False), "window": 20, "convention": "symmetric"}),
        (
            SLIDING | {"is_causal": False, "inner": {"causal": True}},
            {"sliding": (True, False), "window": 20, "convention": "symmetric"},
        ),
        ({"inner": {"causal": True}}, {"causal": True}),
        (
            {"inner": {"use_swa": True, "swa_window_size": 9}, "sliding_window": 20},
            {"sliding": (True, True), "window": 9, "convention": "bidirectional"},
        ),
        (
            SLIDING | {"sliding_window_non_causal": True},
            {"sliding": (True, False), "window": 20, "convention": "anchored"},
        ),
        (
            SLIDING | {"sliding_window_non_causal": False},
            {"sliding": (True, False), "window": 20, "convention": "anchored_causal"},
        ),
    ],
)
def test_windows_and_causality(tmp_path, changes, want):
    config, _ = load_draft(write(tmp_path, **changes), TARGET)
    assert config == tiny_drafts.config(block_size=8, **want)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inner": {"mask_token_id": None}}, "config.json: got no mask_token_id"),
        ({"inner": {"mask_token_id": 10**6}}, "mask_id: got 1000000, expected an id in"),
        ({"inner": {"mask_token_id": "1"}}, "mask_token_id = '1'"),
        ({"inner": {"target_layer_ids": [0, 2]}}, "taps: got"),
        ({"inner": {"target_layer_ids": [0]}}, "fc.weight with 80 columns, expected 1 taps x 40 features = 40"),
        ({"num_target_layers": 3}, "draft num_target_layers: got 3, expected 2 layers"),
        ({"vocab_size": 7}, "draft vocab_size: got 7"),
        ({"target_hidden_size": 80}, "target_hidden_size 80"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"inner": {"sample_from_anchor": True}}, "sample_from_anchor"),
        ({"markov_rank": 256}, "markov_rank"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
        ({"tensors": {"d2t": np.zeros(3, np.int64)}}, "the tensor d2t"),
        ({"tensors": {TENSORS["norm"]: None}}, "no tensor norm.weight"),
        ({"tensors": {TENSORS["q"].format(1): np.zeros((3, 3), np.float32)}}, r"of shape \(3, 3\)"),
    ],
)
def test_what_does_not_fit(tmp_path, changes, text):
    with pytest.raises(ValueError, match=text):
        load_draft(write(tmp_path, **changes), TARGET)


def test_no_folder(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_draft(tmp_path / "x")
    with pytest.raises(ValueError, match=r"config.json: got no such file"):
        load_draft(tmp_path)
