"""Speculation on a real model: whether every text is the plain one, and how much faster it comes.

python -m bench.speculation lossless --draft FOLDER --questions 200
python -m bench.speculation speed --draft FOLDER --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn.dflash.speculate import Speculator
from jattn.dflash.train_draft import spread
from jattn.generate import Sampling, generate
from jattn.models.load_any import default_model, load
from jattn.models.loaded import LoadedModel
from jattn.speculate_command import proposer_named

MAX_LEN = 256
# (batch, page size, block size)
SHAPES = ((1, 16, 8), (8, 16, 8), (8, 1, 8), (8, 4, 8), (8, 128, 8), (8, 16, 2), (8, 16, 16))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two texts part; None: nowhere."""
    if list(a) == list(b):
        return None
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def lossless(model: LoadedModel, draft: str, prompts: list[list[int]], tokens: int) -> int:
    """Compare every shape with plain decoding, greedy and drawn; the number of texts that differ."""
    proposer, drafting = proposer_named(draft, model)
    wrong = 0
    for heat in (0.0, 1.0):
        sampling = Sampling(tokens, heat, seed=7)
        done = generate(model.params, model.config, prompts, sampling, num_slots=8, max_len=MAX_LEN)
        plain = [c.tokens for c in done]
        for batch, page_size, block_size in SHAPES:
            options: dict[str, Any] = {"num_slots": batch, "page_size": page_size, "block_size": block_size}
            speculator = Speculator(model.params, model.config, proposer, drafting, max_len=MAX_LEN, **options)
            came = [c.tokens for c in speculator.run(prompts, sampling)]
            where = [first_difference(*pair) for pair in zip(came, plain, strict=True)]
            parted = {i: at for i, at in enumerate(where) if at is not None}
            wrong += len(parted)
            row = options | {"temperature": heat, "texts": len(plain), "different": len(parted), "where": parted}
            print(json.dumps(row | {"tau": round(speculator.stats.tau, 3)}), flush=True)
    return wrong


def speed(model: LoadedModel, draft: str, prompts: list[list[int]], tokens: int) -> None:
    """Tokens a second of plain and speculative decoding in the same loop, compiled before."""
    proposer, drafting = proposer_named(draft, model)
    for batch in (1, 8):
        rates = {}
        for name, args in (("plain", ()), ("speculative", (proposer, drafting))):
            speculator = Speculator(model.params, model.config, *args, num_slots=batch, max_len=MAX_LEN)
            speculator.run(prompts[:batch], Sampling(tokens))
            speculator.stats.seconds = speculator.stats.tokens = speculator.stats.cycles = 0
            speculator.run(prompts[: 4 * batch], Sampling(tokens))
            rates[name] = round(speculator.stats.rate, 1)
            rates["tau"] = round(speculator.stats.tau, 3)
        ratio = round(rates["speculative"] / rates["plain"], 3)
        print(json.dumps({"batch": batch, "device": jax.devices()[0].device_kind, "ratio": ratio} | rates), flush=True)


def main() -> int:
    """Run one of the two; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lossless", "speed"))
    parser.add_argument("--draft", default="ngram", help="as for jattn generate --speculate")
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--questions", type=int, default=200, help="of the held-out list")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    model = load(args.model or default_model(), jnp.dtype(args.dtype))
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in spread(args.questions)]
    if args.what == "speed":
        speed(model, args.draft, prompts, args.tokens)
        return 0
    return int(lossless(model, args.draft, prompts, args.tokens) > 0)


if __name__ == "__main__":
    sys.exit(main())
