"""Train the byte-level model and its draft that the tests use, from text that this file makes up.

python -m bench.byte_pair --write tests/data/byte_pair    # a few minutes of CPU; the same bytes on the same machine

Both are small (under 2 MB together) but really trained, so that drafts are accepted in runs of every length.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tokenizers
from jax import Array
from tokenizers import decoders, models, pre_tokenizers

from jattn.dflash import draft, teacher, train
from jattn.dflash.checkpoint import load_draft, save_draft
from jattn.dflash.draft import DraftConfig
from jattn.dflash.proposers import DFlash, NGram, Repeat
from jattn.dflash.speculate import speculate
from jattn.dflash.train import Recipe
from jattn.generate import Sampling
from jattn.models import decoder, load_any
from jattn.models.decoder import DecoderConfig, Params
from jattn.models.load_huggingface import TENSORS
from tests.tiny_models import hf_settings

SPECIAL = ("<|end|>", "<|mask|>")
LENGTH, BLOCK = 128, 8
CONFIG = DecoderConfig(
    vocab_size=258,
    hidden_size=96,
    intermediate_size=256,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    qk_norm=True,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    eos_ids=(0,),
)
ADJECTIVES = ["red", "small", "old", "quiet", "brave", "green", "tall", "hungry"]
NOUNS = ["fox", "house", "river", "girl", "mountain", "letter", "horse", "garden", "sailor", "clock", "bridge", "cat"]
VERBS = ["sees", "follows", "remembers", "paints", "carries", "finds", "forgets", "greets"]
PLACES = ["in the morning", "near the sea", "without a word", "after the storm", "on the hill", "at noon"]


_CARD = """\
# A byte-level model and its draft, for tests

Written by `python -m bench.byte_pair --write tests/data/byte_pair`: {steps} steps each, seeds fixed, on sentences that
the script makes up. Apache-2.0, as the project. Held out: the model {target:.3f} nats a byte, the draft {draft:.3f} a row.

24 held-out beginnings of 40 bytes, 96 bytes each; tokens a block of 8, and the share of blocks kept up to each position:

| | proposer | tau | kept |
|---|---|---|---|
{lines}
"""


def sentence(rng: random.Random) -> str:
    """One of some kinds: plain prose, counting, a sum, a quotation."""
    kind = rng.randrange(5)
    if kind == 0:
        start, step = rng.randrange(1, 80), rng.randrange(1, 4)
        return "count " + " ".join(str(start + i * step) for i in range(rng.randrange(5, 9))) + ". "
    if kind == 1:
        word = rng.choice(NOUNS)
        return f"spell {word}: {' '.join(word)}. "
    subject = f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    action = f"{subject} {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if kind == 2:
        return f"{rng.choice(PLACES)}, {action}. "
    return f"{action} {rng.choice(PLACES)}. "


def corpus(seed: int, texts: int, length: int = LENGTH) -> list[str]:
    """Texts of `length` characters that begin with a sentence."""
    rng = random.Random(seed)
    made = []
    for _ in range(texts):
        text = ""
        while len(text) < length:
            text += sentence(rng)
        made.append(text[:length])
    return made


def tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and two special tokens."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    t = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in SPECIAL])
    return t


def encoded(texts: list[str]) -> np.ndarray:
    """Tokens [b, n] of texts of one length."""
    return np.asarray([t.ids for t in tokenizer().encode_batch(texts)], np.int32)


def nats(params: Params, tokens: Array) -> Array:
    """Mean loss of a next byte."""
    _, hidden = teacher.taps_of(params, CONFIG, tokens, (0,))
    rows = hidden[:, :-1].reshape(-1, CONFIG.hidden_size)
    log_p = jax.nn.log_softmax(decoder.head(params, rows))
    return -jnp.take_along_axis(log_p, tokens[:, 1:].reshape(-1, 1), 1).mean()


def train_target(tokens: np.ndarray, held: np.ndarray, steps: int) -> tuple[Params, float]:
    """The byte model, its weights rounded to bfloat16 values as the file has them; and its held-out loss."""
    import optax

    recipe = Recipe(steps=steps, learning_rate=1e-2, batch=16)
    optimizer = train.make_optimizer(recipe)
    params = decoder.init_params(CONFIG, jax.random.key(0))
    params["embed"] *= 0.3
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, batch: Array, rate: Array) -> tuple[Params, Any, Array]:
        value, slope = jax.value_and_grad(nats)(params, batch)
        change, state = optimizer.update(slope, state, params)
        return optax.apply_updates(params, jax.tree.map(lambda x: x * rate, change)), state, value

    rng = np.random.default_rng(0)
    for number in range(steps):
        batch = jnp.asarray(tokens[rng.integers(0, len(tokens), recipe.batch)])
        rate = jnp.float32(train.rate_at(recipe, number / steps))
        params, state, loss = step(params, state, batch, rate)
        if number % 100 == 99:
            print(f"target: step {number + 1}: {float(loss):.3f}", flush=True)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    return params, float(jax.jit(nats)(params, jnp.asarray(held)))


def train_pair_draft(
    target: Params, tokens: np.ndarray, held: np.ndarray, steps: int, markov_rank: int = 0
) -> tuple[DraftConfig, Params, float]:
    """A draft of one layer, whose heads are not the target's; and its held-out loss."""
    stack = decoder.DecoderConfig(
        CONFIG.vocab_size, 96, 256, 1, 4, 1, 24, rms_norm_eps=1e-6, qk_norm=True, max_position_embeddings=512
    )
    config = DraftConfig(stack, (0, 1, 2), 1, CONFIG.num_layers, BLOCK, markov_rank=markov_rank)
    recipe = Recipe(steps=steps, learning_rate=2e-2, batch=8, anchors=24, chunk=1024)
    params = draft.init_params(config, jax.random.key(1))
    params["norm"] /= jnp.std(target["embed"]) * CONFIG.hidden_size**0.5
    state = train.make_optimizer(recipe).init(params)
    step = train.make_step(config, CONFIG, recipe, jnp.float32)
    data = (jnp.asarray(tokens), jnp.ones(tokens.shape, bool))
    for number in range(steps):
        rate = jnp.float32(train.rate_at(recipe, number / steps))
        params, state, loss, share = step(params, state, {}, target, *data, jnp.int32(number), rate)
        if number % 100 == 99:
            print(f"draft: step {number + 1}: {float(loss):.3f}, kept {1 + float(share.sum()):.2f}", flush=True)
    examples = (held, np.ones(held.shape, bool))
    lost, _ = train.evaluate(params, config, target, CONFIG, recipe, examples, jnp.float32)
    return config, params, lost


def write_target(folder: Path, params: Params) -> None:
    """A Hugging Face folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    settings = hf_settings(CONFIG, "qwen3") | {"eos_token_id": 0, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0]}) + "\n")
    flat = {TENSORS[name]: value for name, value in params.items() if name != "layers"}
    for name, stacked in params["layers"].items():
        flat |= {TENSORS[name].format(i): part for i, part in enumerate(stacked)}
    save_file({name: np.array(x).astype(ml_dtypes.bfloat16) for name, x in flat.items()}, folder / "model.safetensors")


def measure(folder: Path) -> list[str]:
    """Lines of a table: tokens a block of the pair as it was written, and of the controls, on held-out beginnings."""
    model = load_any.load(folder / "target")
    config, params = load_draft(folder / "draft", model.config)
    prompts = encoded(corpus(3, 24, 40)).tolist()
    proposers = {"draft": (DFlash(config), params), "ngram": (NGram(), None), "repeat": (Repeat(), None)}
    lines = []
    for kind, heat in (("greedy", 0.0), ("drawn at 1", 1.0)):
        for name, (proposer, drafting) in proposers.items():
            options = {"proposer": proposer, "drafting": drafting, "block_size": BLOCK, "num_slots": 8, "max_len": 160}
            sampling = Sampling(96, heat, seed=1)
            _, stats = speculate(model.params, model.config, prompts, sampling, **options)
            kept = " ".join(f"{x:.2f}" for x in stats.acceptance)
            lines.append(f"| {kind} | {name} | {stats.tau:.2f} | {kept} |")
    return lines


def main() -> None:
    """Train, write and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=300, help="of the model; its draft gets the same")
    parser.add_argument(
        "--markov-rank", type=int, default=0, help="of the draft's Markov head; the tests' draft has none"
    )
    args = parser.parse_args()
    tokens, held = encoded(corpus(1, 4000)), encoded(corpus(2, 64))
    target, nats_target = train_target(tokens, held, args.steps)
    write_target(args.write / "target", target)
    config, params, nats_draft = train_pair_draft(target, tokens, held, args.steps, args.markov_rank)
    save_draft(args.write / "draft", config, params)
    write_card(args.write, args.steps, nats_target, nats_draft)


def write_card(folder: Path, steps: int, nats_target: float, nats_draft: float) -> None:
    """README.md."""
    lines = "\n".join(measure(folder))
    text = _CARD.format(steps=steps, target=nats_target, draft=nats_draft, lines=lines)
    (folder / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
