"""From a target to a trained draft in a folder: write texts, train, measure. What `jattn train-draft` runs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jattn.dflash import draft, prompts, teacher, train
from jattn.dflash.checkpoint import load_draft, save_draft
from jattn.dflash.draft import DraftConfig
from jattn.dflash.model_card import model_card
from jattn.dflash.proposers import DFlash, NGram, Proposer, Repeat
from jattn.dflash.speculate import Speculator, compile_all
from jattn.dflash.train import Recipe
from jattn.dflash.train_progress import Bar
from jattn.generate import Completion, Sampling
from jattn.interrupts import until_interrupted
from jattn.models import decoder
from jattn.models.decoder import Params
from jattn.models.loaded import LoadedModel
from pallas_kernels.request import expect

_MEASURED_TOKENS = 128  # of each answer

Texts = tuple[np.ndarray, np.ndarray]  # tokens int32 [b, n], and which count


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to train, and on what."""

    layers: int = 2
    block_size: int = 8
    markov_rank: int = 0  # of a head that makes the block's rows agree; 0: none
    begin_with: Path | None = None  # folder of a draft of the same shape, to train on; None: random weights
    taps: tuple[int, ...] | None = None  # None: by the rule, one more than layers
    mask_id: int | None = None  # None: a special token that the texts hardly use
    sequences: int = 16384
    length: int = 384
    write_batch: int = 1024
    held_out: int = 64  # questions to measure on
    measured: int = 16  # of them, run through the loop at the end
    save_every: int = 1000
    int8: bool = False  # the file's weights, instead of bfloat16
    minutes: float | None = None  # of training, after compiling; the learning rate falls within them
    recipe: Recipe = dataclasses.field(default_factory=Recipe)

    def check(self) -> None:
        """Check the values.

        Raises:
          ValueError: one is out of range.
        """
        self.recipe.check()
        for name in ("layers", "sequences", "length", "write_batch", "save_every"):
            expect(getattr(self, name) > 0, name, getattr(self, name), "a positive number")
        expect(self.markov_rank >= 0, "markov_rank", self.markov_rank, "a rank, or 0 for no Markov head")
        expect(self.block_size >= 2, "block_size", self.block_size, "at least 2")
        some = not self.recipe.only_markov or (self.markov_rank > 0 and self.begin_with is not None)
        expect(
            some, "only_markov", True, "it with markov_rank and begin_with: a head to train, on a draft that is there"
        )
        expect(self.minutes is None or self.minutes > 0, "minutes", self.minutes, "a positive number")
        known = len(prompts.HELD_OUT)
        for name in ("held_out", "measured"):
            expect(0 < getattr(self, name) <= known, name, getattr(self, name), f"a number in [1, {known}]")


def write_texts(model: LoadedModel, params: Params, plan: Plan, report: Any) -> tuple[Texts, Texts]:
    """Texts to train on, and greedy answers to the held-out questions.

    Half of the training answers are to questions that the model asks itself, half to those of `prompts.TRAIN`. Of the
    former, half are greedy and half drawn at 1; of the latter the first to each question is greedy, the others drawn.
    """
    before, turn = teacher.chat_format(model.tokenizer)
    rng = np.random.default_rng(plan.recipe.seed)
    asked = [model.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in prompts.TRAIN]
    beginnings, answering, warmth = [], [], []
    for i in range(plan.sequences):
        direct = i % 2 == 0
        beginnings.append(asked[i // 2 % len(asked)] if direct else before)
        answering.append(direct)
        warmth.append(float(i // 2 >= len(asked)) if direct else float(rng.integers(2)))
    held = [model.tokenizer.encode_chat([{"role": "user", "content": t}]) for t in spread(plan.held_out)]
    beginnings += held
    answering += [True] * len(held)
    warmth += [0.0] * len(held)
    longest = max(map(len, beginnings))
    room = f"more than the {longest} tokens of the longest question and {plan.block_size} of an answer"
    expect(plan.length > longest + plan.block_size, "length", plan.length, room)

    tokens, counted = [], []
    for at in until_interrupted(range(0, len(beginnings), plan.write_batch)):
        some = range(at, at + plan.write_batch)
        grid = np.full((len(some), plan.length), -1, np.int32)
        for row, i in zip(grid, some, strict=True):
            begin = beginnings[min(i, len(beginnings) - 1)]
            row[: len(begin)] = begin
        pad = [min(i, len(beginnings) - 1) for i in some]
        ready = np.asarray(answering)[pad]
        heat = np.asarray(warmth, np.float32)[pad]
        seeds = np.asarray(some, np.int32) + plan.recipe.seed * 1_000_003 % 2**30
        came = np.asarray(teacher.write(params, model.config, *map(jnp.asarray, (grid, ready, heat, seeds)), turn=turn))
        tokens.append(came)
        counted.append(teacher.answers_in(came, (grid >= 0).sum(1), ready, turn))
        report(min(at + plan.write_batch, len(beginnings)), len(beginnings))
    all_tokens, all_counted = (np.concatenate(x)[: len(beginnings)] for x in (tokens, counted))
    cut = plan.sequences
    useful = all_counted[:cut].sum(1) >= plan.block_size
    expect(bool(useful.any()), "sequences", f"{cut} texts without an answer", "answers; give more --length")
    return (all_tokens[:cut][useful], all_counted[:cut][useful]), (all_tokens[cut:], all_counted[cut:])


def spread(count: int) -> list[str]:
    """`count` of the held-out questions, over all of their kinds."""
    at = np.linspace(0, len(prompts.HELD_OUT) - 1, count).round().astype(int)
    return [prompts.HELD_OUT[i] for i in at]


def rarest_special(model: LoadedModel, tokens: np.ndarray) -> int:
    """A token for the mask: special, neither begin nor end, and in the fewest texts, best in none."""
    vocab = model.config.vocab_size
    uses = np.bincount(tokens.reshape(-1), minlength=vocab)
    taken = {*model.config.eos_ids, model.config.bos_id}
    special = [i for i, t in model.tokenizer.tokenizer.get_added_tokens_decoder().items() if t.special]
    free = [i for i in [*sorted(special, reverse=True), vocab - 1] if i < vocab and i not in taken]
    return int(min(free, key=lambda i: uses[i]))


def draft_config(model: LoadedModel, plan: Plan, mask_id: int) -> DraftConfig:
    """The draft's shape: the target's layers, with norms on q and k."""
    c = model.config
    taps = plan.taps or draft.default_taps(c.num_layers, plan.layers + 1)
    stack = dataclasses.replace(
        c,
        num_layers=plan.layers,
        qk_norm=True,
        rope_layout="half",
        attention_bias=False,
        output_bias=False,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        bos_id=None,
        eos_ids=(),
    )
    return DraftConfig(stack, taps, mask_id, c.num_layers, plan.block_size, markov_rank=plan.markov_rank)


def train_draft(model: LoadedModel, output: Path | str, plan: Plan, *, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Write texts, train, measure, and leave the draft in a folder; what training.json says.

    Run again with the same arguments, it goes on where it was stopped.

    Args:
      model: the target.
      output: the folder.
      plan: of the training.
      dtype: to compute in; the draft's own weights are float32 while they are trained.

    Raises:
      ValueError: the plan does not fit the model, or the folder holds a training of another one.
    """
    plan.check()
    plan = _like_the_first(model, plan)
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    target = jax.tree.map(lambda x: jnp.asarray(x, dtype), model.params)
    texts, held = _texts(model, target, plan, output / "texts.npz")
    mask_id = rarest_special(model, texts[0]) if plan.mask_id is None else plan.mask_id
    config = draft_config(model, plan, mask_id)
    draft.check_fits(config, model.config)
    report = _Training(model, target, config, plan, output, held, dtype).run(texts)
    _, params = load_draft(output, model.config)  # what is measured is what the folder holds
    report |= {
        "texts": len(texts[0]),
        "answer_tokens": int(texts[1].sum()),
        "begun_with": None if plan.begin_with is None else Path(plan.begin_with).resolve().name,
        "recipe": dataclasses.asdict(plan.recipe),
        "questions": plan.measured,
        "measured_tokens": _MEASURED_TOKENS,
        "measured": measure_taus(model, target, config, params, spread(plan.measured), plan),
    }
    (output / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    count = sum(x.size for x in jax.tree.leaves(params))
    (output / "README.md").write_text(model_card(model.name, config, report, count), encoding="utf-8")
    return report


def _like_the_first(model: LoadedModel, plan: Plan) -> Plan:
    """What the plan leaves open, as in the draft that it begins with."""
    if plan.begin_with is None:
        return plan
    first, _ = load_draft(plan.begin_with, model.config)
    mask_id = first.mask_id if plan.mask_id is None else plan.mask_id
    plan = dataclasses.replace(plan, taps=plan.taps or first.taps, mask_id=mask_id)
    config = draft_config(model, plan, mask_id)
    if not first.markov_rank:  # it gets a new head
        first = dataclasses.replace(first, markov_rank=plan.markov_rank)
    for field in dataclasses.fields(DraftConfig):
        if field.name != "decoder":
            _expect_same(plan, field.name, getattr(first, field.name), getattr(config, field.name))
    for name in ("num_layers", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "qk_norm"):
        _expect_same(plan, name, getattr(first.decoder, name), getattr(config.decoder, name))
    return plan


def _expect_same(plan: Plan, name: str, came: Any, wanted: Any) -> None:
    expect(came == wanted, "begin_with", f"{plan.begin_with} with {name} {came}", f"{wanted}, as the plan has it")


def _texts(model: LoadedModel, target: Params, plan: Plan, file: Path) -> tuple[Texts, Texts]:
    if not file.exists():
        with Bar("Writing texts") as bar:
            (tokens, counted), held = write_texts(model, target, plan, bar.update)
        small = np.uint16 if model.config.vocab_size <= 2**16 else np.int32
        few, fewer = tokens.astype(small), held[0].astype(small)
        np.savez_compressed(file, tokens=few, held=fewer, counted=counted, held_counted=held[1])
    with np.load(file) as saved:
        tokens, held_tokens = (saved[name].astype(np.int32) for name in ("tokens", "held"))
        counted, held_counted = saved["counted"], saved["held_counted"]
    same = tokens.shape[1] == plan.length
    expect(same, "output", f"{file} with texts of {tokens.shape[1]}", f"{plan.length} tokens; name another --output")
    return (tokens, counted), (held_tokens, held_counted)


@dataclasses.dataclass
class _Training:
    """From random weights, or those of a stopped training, to trained ones."""

    model: LoadedModel
    target: Params
    config: DraftConfig
    plan: Plan
    output: Path
    held: Texts
    dtype: Any

    def __post_init__(self) -> None:
        """Start, or go on."""
        recipe, self.file = self.plan.recipe, self.output / "progress.npz"
        params, self.kept = train.divide(self._beginning(), recipe)
        state = train.make_optimizer(recipe).init(params)
        self.params, self.state, self.steps, self.before = params, state, 0, 0.0
        if self.file.exists():
            came = train.load_progress(self.file, params, state)
            self.params, self.state, self.steps, self.before = came
        self.saved = self.steps
        self.start: float | None = None  # after the first step, which compiles

    def _beginning(self) -> Params:
        params = draft.init_params(self.config, jax.random.key(self.plan.recipe.seed))
        if self.plan.begin_with is not None:
            _, first = load_draft(self.plan.begin_with, self.model.config)
            return params | jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), first)
        # So that the target's head gives logits of spread 1 at first, whatever the size of its rows.
        rows = decoder.head_table(self.target).astype(jnp.float32)
        return params | {"norm": params["norm"] / (jnp.std(rows) * len(params["norm"]) ** 0.5)}

    @property
    def seconds(self) -> float:
        """Of training so far."""
        return self.before + (0.0 if self.start is None else time.monotonic() - self.start)

    @property
    def done(self) -> float:
        """Share of the plan that is behind, by steps or by time."""
        limit = self.plan.minutes
        return max(self.steps / self.plan.recipe.steps, self.seconds / (60 * limit) if limit else 0.0)

    def run(self, texts: Texts) -> dict[str, Any]:
        """Train to the end; what the report says of it."""
        first_loss = last_loss = None
        try:
            with Bar("Training") as bar:
                for loss in until_interrupted(self._losses(texts)):
                    saving = self.steps % self.plan.save_every == 0 or self.done >= 1
                    if self.steps % 20 == 1 or saving:
                        last_loss = float(loss)
                        first_loss = last_loss if first_loss is None else first_loss
                        bar.update(self.steps, max(self.steps, round(self.steps / self.done)), f"loss {last_loss:.3f}")
                    if saving:
                        self.save()
                        lost, share = self._measure()
                        at = f"step {self.steps}: loss {last_loss:.3f}"
                        bar.note(f"{at}, held out {lost:.3f}, kept {_shares(share)}")
        except KeyboardInterrupt:
            if not any(x.is_deleted() for x in jax.tree.leaves((self.params, self.state))):  # not inside a step
                self.save()
            raise
        if self.saved != self.steps:  # the time ran out between two steps
            self.save()
        lost, share = self._measure()
        return {
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "minutes": self.plan.minutes,
            "first_loss": first_loss,
            "last_loss": last_loss,
            "held_out_loss": lost,
            "held_out_share_of_first_j_right": share.tolist(),
        }

    def _losses(self, texts: Texts) -> Iterator[jax.Array]:
        recipe = self.plan.recipe
        step = train.make_step(self.config, self.model.config, recipe, self.dtype)
        data = tuple(jnp.asarray(x) for x in texts)
        while self.done < 1:
            rate = jnp.float32(train.rate_at(recipe, self.done))
            # In one statement: nothing may come between what the step donates and what it returns.
            self.params, self.state, loss, _ = step(
                self.params, self.state, self.kept, self.target, *data, jnp.int32(self.steps), rate
            )
            self.steps += 1
            if self.start is None:
                jax.block_until_ready(loss)
                self.start = time.monotonic()
            yield loss

    def save(self) -> None:
        """Write what resuming needs, and the draft as it is."""
        train.save_progress(self.file, self.params, self.state, self.steps, self.seconds)
        self.saved = self.steps
        save_draft(self.output, self.config, self.kept | self.params, np.int8 if self.plan.int8 else ml_dtypes.bfloat16)

    def _measure(self) -> tuple[float, np.ndarray]:
        c, recipe = self.model.config, self.plan.recipe
        return train.evaluate(self.kept | self.params, self.config, self.target, c, recipe, self.held, self.dtype)


def measure_taus(
    model: LoadedModel, target: Params, config: DraftConfig, weights: Params, questions: Sequence[str], plan: Plan
) -> dict[str, Any]:
    """Acceptance of the draft and of the controls through the real loop, greedy and drawn.

    Returns:
      For each of "greedy" and "drawn": tau and acceptance by position of each proposer, and the share of different
      8-grams of the texts, which says how much of the acceptance repetition may explain.
    """
    asked = [model.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in questions]
    drafting = {"draft": jax.tree.map(lambda x: x.astype(target["embed"].dtype), weights), "target": target}
    proposers: dict[str, tuple[Proposer, Any]] = {
        "draft": (DFlash(config), drafting),
        "causal": (DFlash(dataclasses.replace(config, causal=True)), drafting),
        **(
            {"rows alone": (DFlash(dataclasses.replace(config, markov_rank=0)), drafting)} if config.markov_rank else {}
        ),
        "ngram": (NGram(), None),
        "repeat": (Repeat(), None),
    }
    longest = min(max(map(len, asked)) + _MEASURED_TOKENS, model.config.max_position_embeddings)
    sizes: dict[str, Any] = {"block_size": plan.block_size, "num_slots": min(8, len(asked)), "max_len": longest}
    start = lambda name: Speculator(target, model.config, *proposers[name], **sizes)  # noqa: E731
    compile_all([start(name) for name in proposers])
    result: dict[str, Any] = {}
    for kind, heat in (("greedy", 0.0), ("drawn", 1.0)):
        entry: dict[str, Any] = {}
        for name in proposers:
            speculator = start(name)
            done = speculator.run(asked, Sampling(_MEASURED_TOKENS, heat, plan.recipe.seed))
            stats = speculator.stats
            entry[name] = {"tau": stats.tau, "acceptance": stats.acceptance.round(4).tolist()}
            entry["different_8_grams"] = different_grams(done)
        result[kind] = entry
    return result


def different_grams(done: Sequence[Completion], size: int = 8) -> float:
    """Share of the texts' n-grams that are different from each other."""
    grams = [tuple(c.tokens[i : i + size]) for c in done for i in range(len(c.tokens) - size + 1)]
    return len(set(grams)) / max(len(grams), 1)


def _shares(share: np.ndarray) -> str:
    return f"{1 + share.sum():.2f} tokens a block (" + " ".join(f"{x:.2f}" for x in share) + ")"
