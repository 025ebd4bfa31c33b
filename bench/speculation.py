"""Speculation on a real model: whether every text is the plain one, and how much faster it comes.

python -m bench.speculation lossless --draft FOLDER --questions 200 --out lossless.json
python -m bench.speculation speed --draft FOLDER --dtype bfloat16 --out speed.json
python -m bench.speculation shape --out shape.json    # Qwen3-8B's, random weights; --layers 4 --hidden 128 ... for a trial
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import speculation_shape
from bench.speculation_shape import Shape
from jattn.dflash.speculate import Speculator, compile_all
from jattn.dflash.train_draft import spread
from jattn.generate import Sampling, generate
from jattn.models.decoder import unstack
from jattn.models.load_any import default_model, load
from jattn.models.loaded import LoadedModel
from jattn.speculate_command import CONTROLS, proposer_named

MAX_LEN = 256
# (batch, page size, block size)
SHAPES = ((1, 16, 8), (8, 16, 8), (8, 1, 8), (8, 4, 8), (8, 128, 8), (8, 16, 2), (8, 16, 16))
REPEATS = 3
Row = dict[str, Any]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two texts part; None: nowhere."""
    if list(a) == list(b):
        return None
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def lossless(model: LoadedModel, draft: str, prompts: list[list[int]], tokens: int) -> Iterator[Row]:
    """Compare every shape with plain decoding, greedy and drawn."""
    proposer, drafting = proposer_named(draft, model)

    def speculator(batch: int, page_size: int, block_size: int) -> Speculator:
        sizes: dict[str, Any] = {"num_slots": batch, "page_size": page_size, "block_size": block_size}
        return Speculator(model.params, model.config, proposer, drafting, max_len=MAX_LEN, **sizes)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the draft was trained for")  # blocks of 16 are on purpose
        compile_all([speculator(*shape) for shape in SHAPES])
        for heat in (0.0, 1.0):
            sampling = Sampling(tokens, heat, seed=7)
            done = generate(model.params, model.config, prompts, sampling, num_slots=8, max_len=MAX_LEN)
            plain = [c.tokens for c in done]
            for shape in SHAPES:
                one = speculator(*shape)
                came = [c.tokens for c in one.run(prompts, sampling)]
                where = [first_difference(*pair) for pair in zip(came, plain, strict=True)]
                parted = {i: at for i, at in enumerate(where) if at is not None}
                row = dict(zip(("batch", "page_size", "block_size"), shape, strict=True))
                yield row | {
                    "draft": Path(draft).name,
                    "device": jax.devices()[0].device_kind,
                    "dtype": str(model.params["embed"].dtype),
                    "temperature": heat,
                    "texts": len(plain),
                    "different": len(parted),
                    "where": parted,
                    "tau": round(one.stats.tau, 3),
                }


def speed(model: LoadedModel, draft: str, prompts: list[list[int]], tokens: int) -> Iterator[Row]:
    """Tokens a second of plain and speculative decoding in the same loop, by turns, medians, compiled before."""
    proposers: dict[str, tuple[Any, ...]] = {"plain": ()}
    proposers |= {name: proposer_named(name, model) for name in dict.fromkeys([draft, *CONTROLS])}
    made = {
        (batch, name): Speculator(model.params, model.config, *args, num_slots=batch, max_len=MAX_LEN)
        for batch in (1, 8)
        for name, args in proposers.items()
    }
    compile_all(list(made.values()))
    for batch in (1, 8):
        for heat in (0.0, 1.0):
            rates: dict[str, list[float]] = {name: [] for name in proposers}
            taus = {}
            for _ in range(REPEATS):
                for name in proposers:
                    stats = made[batch, name].stats
                    stats.seconds, stats.tokens, stats.cycles = 0.0, 0, 0
                    made[batch, name].run(prompts[: 4 * batch], Sampling(tokens, heat, seed=3))
                    rates[name].append(stats.rate)
                    taus[name] = round(stats.tau, 3)
            plain = statistics.median(rates["plain"])
            for name in proposers:
                middle = statistics.median(rates[name])
                yield {
                    "batch": batch,
                    "draft": Path(name).name,
                    "device": jax.devices()[0].device_kind,
                    "dtype": str(model.params["embed"].dtype),
                    "temperature": heat,
                    "tau": taus[name],
                    "tokens_per_s": round(middle, 1),
                    "over_plain": round(middle / plain, 3),
                    "spread": [round(min(rates[name]), 1), round(max(rates[name]), 1)],
                }


def _shape(args: argparse.Namespace) -> Iterator[Row]:
    sizes = {f.name: getattr(args, f.name) for f in dataclasses.fields(Shape)}
    batches = tuple(int(x) for x in args.batches.split(","))
    dtype = jnp.dtype(args.dtype or "bfloat16")
    for row in speculation_shape.measure(Shape(**sizes), batches, dtype):
        print(speculation_shape.describe(row), flush=True)
        yield row


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    if args.what == "shape":
        yield from _shape(args)
        return
    model = load(args.model or default_model(), jnp.dtype(args.dtype or "float32"))
    if jax.default_backend() == "gpu" and not args.stacked:
        model = dataclasses.replace(model, params=unstack(model.params))
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in spread(args.questions)]
    measure = lossless if args.what == "lossless" else speed
    yield from measure(model, args.draft, prompts, args.tokens)


def main() -> int:
    """Run one of the three; the exit code: 1 if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lossless", "speed", "shape"))
    parser.add_argument("--draft", default="ngram", help="as for jattn generate --speculate")
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--questions", type=int, default=200, help="of the held-out list")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32; bfloat16 for shape")
    parser.add_argument("--stacked", action="store_true", help="leave the layers' weights stacked on a GPU, too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all rows as JSON")
    parser.add_argument("--batches", default="1,16", help="of shape")
    for field in dataclasses.fields(Shape):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=field.default, help=f"of shape (default: {field.default})")
    args = parser.parse_args()
    rows = []
    for row in _rows(args):
        rows.append(row)
        if args.what != "shape":
            print(json.dumps(row), flush=True)
        if args.out:  # after every row: a run that is cut short leaves what it has
            args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(row.get("different") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
