"""`jattn generate --speculate` and `jattn train-draft`."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jattn import dflash
from jattn.dflash.checkpoint import load_draft
from jattn.dflash.proposers import DFlash, NGram, Proposer, Repeat
from jattn.dflash.speculate import SpeculationStats, Speculator
from jattn.generate import Sampling, pages_needed
from jattn.interrupts import until_interrupted
from jattn.models.loaded import LoadedModel
from jattn.stream import OrderedPrinter
from pallas_kernels.request import expect

MAX_SLOTS = 8
CONTROLS: dict[str, Proposer] = {"ngram": NGram(), "repeat": Repeat()}
DRAFTS = Path(dflash.__file__).parent / "drafts"  # those that the package brings


def shipped_draft(model: LoadedModel) -> Path | None:
    """The folder of the package's own draft for a model, if it has one: it is known by its target's shape."""
    c = model.config
    for path in sorted(DRAFTS.glob("*/config.json")):
        settings = json.loads(path.read_text(encoding="utf-8"))
        shape = tuple(settings[name] for name in ("num_target_layers", "hidden_size", "vocab_size"))
        if shape == (c.num_layers, c.hidden_size, c.vocab_size):
            return path.parent
    return None


def proposer_named(name: str, model: LoadedModel) -> tuple[Proposer, Any]:
    """A control by its name, the package's own draft as "draft", or the draft in a folder; with its parameters.

    Raises:
      ValueError: there is no such draft, or it is not for this model.
    """
    if name in CONTROLS:
        return CONTROLS[name], None
    if name == "draft":
        own = shipped_draft(model)
        then = "a model that the package has a draft for; name a draft's folder, ngram or repeat, or train one"
        expect(own is not None, "speculate", f"draft, but there is none for {model.name}", then)
        name = str(own)
    config, params = load_draft(Path(name), model.config, model.params["embed"].dtype)
    return DFlash(config), params


def run(args: argparse.Namespace, model: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling) -> int:
    """Generate speculatively, printing texts as they come; the exit code."""
    proposer, drafting = proposer_named(args.speculate, model)
    limit = model.config.max_position_embeddings
    longest = min(max(map(len, prompts)) + sampling.max_tokens, limit)
    needs = sorted(pages_needed(len(p), sampling, args.page_size, limit) for p in prompts)
    slots = min(len(prompts), MAX_SLOTS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        speculator = Speculator(
            model.params,
            model.config,
            proposer,
            drafting,
            block_size=args.block_size,
            num_slots=slots,
            page_size=args.page_size,
            num_pages=max(1, sum(needs[-slots:])),
            max_len=longest,
        )
    for warning in said:
        print(f"jattn: warning: {warning.message}", file=sys.stderr)
    titles = [f"> {text}" for text in args.prompts] if len(prompts) > 1 else [""]
    events = until_interrupted(speculator.stream(prompts, sampling))
    first = next(events)  # what cannot run is said before anything is printed
    printer = OrderedPrinter(model.tokenizer, titles, sys.stdout)
    for request, completion, new in itertools.chain([first], events):
        _show(printer, request, completion, new)
    if args.stats:
        print(describe(speculator.stats), file=sys.stderr)
    if args.plot:
        plot(Path(args.plot), {args.speculate: speculator.stats})
    return 0


def _show(printer: OrderedPrinter, request: int, completion: Any, new: Sequence[int]) -> None:
    for token in new:
        printer.push(request, token)
    if completion.finished:
        printer.finish(request)


def describe(stats: SpeculationStats) -> str:
    """Acceptance, passes and rates, in lines for people."""
    positions = " ".join(f"{x:.2f}" for x in stats.acceptance)
    return (
        f"acceptance length {stats.tau:.2f} of at most {len(stats.acceptance) + 1}; by position {positions}\n"
        f"{stats.tokens} tokens in {stats.cycles} blocks: {100 * stats.saved:.0f} % of the passes saved;"
        f" {stats.rate:.1f} tokens/s, compiled in {stats.compile_seconds:.1f} s"
    )


def plot(path: Path, curves: dict[str, SpeculationStats]) -> None:
    """Draw acceptance by position.

    Raises:
      ValueError: the file cannot be written, or its kind is unknown.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, stats in curves.items():
        share: np.ndarray = stats.acceptance
        label = f"{Path(name).name}: {stats.tau:.2f} tokens a block"
        axes.plot(np.arange(1, len(share) + 1), share, marker="o", label=label)
    axes.set(xlabel="position in the block", ylabel="share of blocks kept so far", ylim=(0, 1))
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"plot: got {path}, expected a file that can be written ({error}); name another") from None


def train(args: argparse.Namespace) -> int:
    """Train a draft; the exit code."""
    import jax.numpy as jnp

    from jattn.dflash.train import Recipe
    from jattn.dflash.train_draft import Plan, train_draft
    from jattn.models.load_any import default_model, load

    taps = None
    if args.taps is not None:
        parts = args.taps.split(",")
        ok = all(part.strip().isdecimal() for part in parts)
        expect(ok, "taps", repr(args.taps), "layers with commas between, as in 1,14,27")
        taps = tuple(int(part) for part in parts)
    recipe = Recipe(
        steps=args.steps,
        batch=args.batch,
        anchors=args.anchors,
        learning_rate=args.learning_rate,
        decay=args.decay,
        soft=args.soft,
        focus=args.focus,
        only_markov=args.only_markov,
        seed=args.seed,
    )
    plan = Plan(
        layers=args.layers,
        block_size=args.block_size,
        taps=taps,
        mask_id=args.mask_id,
        markov_rank=args.markov_rank,
        begin_with=Path(args.begin_with) if args.begin_with else None,
        sequences=args.sequences,
        length=args.length,
        write_batch=args.write_batch,
        held_out=args.held_out,
        measured=args.measured,
        save_every=args.save_every,
        minutes=args.minutes,
        int8=args.int8,
        recipe=recipe,
    )
    plan.check()
    model = load(args.model or default_model())
    report = train_draft(model, args.output, plan, dtype=jnp.dtype(args.dtype))
    for kind, entry in report["measured"].items():
        taus = ", ".join(f"{name} {x['tau']:.2f}" for name, x in entry.items() if isinstance(x, dict))
        print(f"{kind}: tokens a block: {taus}; different 8-grams {entry['different_8_grams']:.2f}")
    return 0
