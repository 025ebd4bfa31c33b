"""The page that goes with a trained draft."""

from __future__ import annotations

from typing import Any

from jattn.dflash.draft import DraftConfig

_CARD = """\
# A DFlash draft for {target}

A block drafter (arXiv:2602.06036) for speculative decoding: {layers} layers, block size {block}, taps of
the target's layers {taps}, mask id {mask}, {millions:.1f} million parameters{markov}. Embedding and head are the
target's. It changes no text, only how many passes of the target a text takes. Use it with
`jattn generate --speculate FOLDER`; the format is z-lab's.

## Training

{texts} texts ({tokens} tokens of answers) that the target wrote itself, half to questions of its own, half
to a list of others, greedy and at temperature 1. {steps} steps of {batch} texts x {anchors} blocks in
{seconds:.0f} s, Muon at {rate:g} with cosine decay, a share of {soft:g} of the loss against the target's
distribution. {begun}Held-out loss: {held:.3f} nats. Seed {seed}.

## Acceptance

On {questions} questions of the held-out list, answers of at most {measured} tokens, through the real loop.
Tokens a pass of the target; "causal" is the same draft with causal attention inside the block, "rows alone" the
same without its Markov head, if it has one.

| | {names} | different 8-grams |
|---|{rules}---|
{rows}

## Licence

As its target's, whose output it was trained on (SmolLM2's is Apache-2.0).
"""


def model_card(target: str, config: DraftConfig, report: dict[str, Any], parameters: int) -> str:
    """The text of README.md.

    Args:
      target: the target's name.
      config: the draft.
      report: of `train_draft`.
      parameters: how many the draft has.
    """
    lines = []
    names = [name for name, x in report["measured"]["greedy"].items() if isinstance(x, dict)]
    for kind, entry in report["measured"].items():
        taus = (f"{entry[name]['tau']:.2f}" for name in names)
        lines.append(f"| {kind} | {' | '.join(taus)} | {entry['different_8_grams']:.2f} |")
    recipe = report["recipe"]
    return _CARD.format(
        target=target,
        layers=config.decoder.num_layers,
        block=config.block_size,
        taps=", ".join(map(str, config.taps)),
        mask=config.mask_id,
        millions=parameters / 1e6,
        markov=f", a Markov head of rank {config.markov_rank}" if config.markov_rank else "",
        names=" | ".join(names),
        rules="---|" * len(names),
        texts=report["texts"],
        tokens=report["answer_tokens"],
        steps=report["steps"],
        seconds=report["seconds"],
        batch=recipe["batch"],
        anchors=recipe["anchors"],
        rate=recipe["learning_rate"],
        soft=recipe["soft"],
        begun=f"Begun with the weights of {report['begun_with']}. " if report["begun_with"] else "",
        held=report["held_out_loss"],
        seed=recipe["seed"],
        questions=report["questions"],
        measured=report["measured_tokens"],
        rows="\n".join(lines),
    )
