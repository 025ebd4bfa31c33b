"""A small real model on three prompts at once, checked against a dense forward; then the same texts speculatively."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.dflash.speculate import SpeculationStats, Speculator, compile_all
from jattn.generate import Completion, Generator, Sampling, generate
from jattn.interrupts import until_interrupted
from jattn.models.dense import dense_forward
from jattn.models.load_any import load
from jattn.models.loaded import LoadedModel
from jattn.speculate_command import CONTROLS, proposer_named, shipped_draft
from jattn.stream import OrderedPrinter

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "A farmer has three fields. In the first he grows wheat, in the second barley, and the third lies fallow this year"
    " so that the soil can rest. Next year he will move each crop one field on. Which field will lie fallow then, and why"
    " does he do it?",
)
TOLERANCE = 1e-3


def run(path: Path | str, max_tokens: int = 64) -> int:
    """Generate, print the texts as they come, then a table; the exit code.

    Args:
      path: the model.
      max_tokens: of each answer.

    Returns:
      0, or 1 if a logit differs from the dense forward's by more than `TOLERANCE`, or a speculative text from plain one.
    """
    sampling = Sampling(max_tokens)
    sampling.check()
    print("Loading the model ...", flush=True)
    model = load(path)
    print(f"{model.name}: {model.config.num_layers} layers, float32. Compiling ...\n", flush=True)
    # A short step, so that the long prompt takes several while the others already decode.
    generator = Generator(model.params, model.config, num_slots=3, step_tokens=64, max_len=512, keep_logits=True)
    for prompt in PROMPTS:
        generator.submit(model.tokenizer.encode_chat([{"role": "user", "content": prompt}]), sampling)
    printer = OrderedPrinter(model.tokenizer, [f"> {prompt}" for prompt in PROMPTS], sys.stdout)
    for request, token in until_interrupted(generator):
        printer.push(request, token)
        if generator.completions[request].finished:
            printer.finish(request)
    print("\nComparing with a dense, cache-free forward ...\n", flush=True)
    worst = [worst_difference(model, completion) for completion in generator.completions]
    _table(generator, worst)
    same = speculation(model, generator.completions, max_tokens)
    return int(max(worst) > TOLERANCE or not same)


def speculation(model: LoadedModel, greedy: Sequence[Completion], max_tokens: int) -> bool:
    """The same prompts with every proposer, greedy and drawn, and a table; whether all texts are the plain ones.

    Args:
      model: the model.
      greedy: what plain decoding made of the prompts.
      max_tokens: of each answer.
    """
    prompts = [c.prompt for c in greedy]
    drawing = Sampling(max_tokens, 1.0, seed=1)
    drawn = generate(model.params, model.config, prompts, drawing, num_slots=3, step_tokens=64, max_len=512)
    plain = [[c.tokens for c in done] for done in (greedy, drawn)]
    own = shipped_draft(model)
    if own is None:
        print(f"No draft is shipped for {model.name}: only the controls are shown. `jattn train-draft` makes one.\n")
    named: dict[str, tuple[Any, ...]] = {"plain": ()}  # in the same loop, with blocks of one
    named |= {name: proposer_named(name, model) for name in (*CONTROLS, *(["draft"] if own else []))}

    def start(name: str) -> Speculator:
        return Speculator(model.params, model.config, *named[name], num_slots=3, step_tokens=64, max_len=512)

    print(f"Compiling {', '.join(named)} ...", flush=True)
    compile_all([start(name) for name in named])
    rows: list[tuple[str, bool, SpeculationStats, SpeculationStats]] = []
    for name in named:
        print(f"Speculating with {name} ..." if named[name] else "Decoding plainly ...", flush=True)
        all_stats, same = [], True
        for sampling, want in zip((Sampling(max_tokens), drawing), plain, strict=True):
            speculator = start(name)
            same = same and [c.tokens for c in until_done(speculator, prompts, sampling)] == want
            all_stats.append(speculator.stats)
        rows.append((name, same, all_stats[0], all_stats[1]))
    _speculation_table(rows)
    return all(row[1] for row in rows)


def until_done(speculator: Speculator, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
    """All completions; Ctrl-C stops between some blocks."""
    done = {n: completion for n, completion, _ in until_interrupted(speculator.stream(prompts, sampling, cycles=64))}
    return [done[n] for n in sorted(done)]


def _speculation_table(rows: Sequence[tuple[str, bool, SpeculationStats, SpeculationStats]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Speculation: tokens a pass of the model, greedy and drawn at temperature 1")
    names = ("proposer", "same texts", "greedy", "drawn", "passes saved", "tokens/s")
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    for name, same, greedy, drawn in rows:
        saved = f"{100 * greedy.saved:.0f} %, {100 * drawn.saved:.0f} %"
        taus = (f"{greedy.tau:.2f}", f"{drawn.tau:.2f}")
        rates = f"{greedy.rate:.1f}, {drawn.rate:.1f}"
        table.add_row(name, "yes" if same else "NO", *taus, saved, rates)
    console = Console()
    console.print(table)
    console.print("Share of the blocks that were kept up to each position:")
    for name, _, *both in rows:
        for kind, stats in zip(("greedy", "drawn"), both, strict=True):
            if len(stats.acceptance):
                kept = " ".join(f"{x:.2f}" for x in stats.acceptance)
                console.print(f"  {kept}  {name}, {kind}", highlight=False)


def worst_difference(model: LoadedModel, completion: Completion) -> float:
    """Largest absolute difference between the logits that the text was drawn from and the dense forward's."""
    tokens = completion.prompt + completion.tokens
    padded = jnp.asarray(tokens + [0] * (-len(tokens) % 128))  # few shapes, few compilations; causal, so harmless
    first = len(completion.prompt) - 1  # the row that predicts the first generated token
    dense = np.asarray(dense_forward(model.params, model.config, padded))[first : first + len(completion.tokens)]
    return float(np.abs(dense - np.stack(completion.logits)).max())


def _table(generator: Generator, worst: list[float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("", "prompt 1", "prompt 2", "prompt 3", "all"):
        table.add_column(column, justify="left" if not column else "right")
    done, stats = generator.completions, generator.stats
    prompt, new = [len(c.prompt) for c in done], [len(c.tokens) for c in done]
    table.add_row("prompt tokens", *map(str, prompt), str(sum(prompt)))
    table.add_row("new tokens", *map(str, new), str(sum(new)))
    table.add_row("prefill tokens/s", "", "", "", f"{stats.prefill_rate:.1f}")
    table.add_row("decode tokens/s", "", "", "", f"{stats.decode_rate:.1f}")
    table.add_row("pages used at the peak", "", "", "", f"{stats.pages_peak} of {stats.pages}")
    table.add_row("worst |paged - dense|", *(f"{x:.1e}" for x in worst), f"{max(worst):.1e}")
    console = Console()
    console.print(table)
    verdict = "within" if max(worst) <= TOLERANCE else "NOT within"
    console.print(f"The logits are {verdict} {TOLERANCE:g} of the dense forward's.")
