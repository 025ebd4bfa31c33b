"""The TPU tuner as far as a host without a TPU can tell."""

from __future__ import annotations

import json

from bench import tune_tpu
from pallas_kernels import tuned


def test_without_a_tpu_it_says_so(capsys):
    assert tune_tpu.main([]) == 1
    assert "no TPU" in capsys.readouterr().err


def test_a_second_run_takes_up_where_the_first_stopped(tmp_path):
    todo = tune_tpu.trials(["D1"], [16], ["bfloat16"])
    path, measured = tmp_path / "times.json", []

    def measure(trial):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(trial.key)
        return {"ms": float(trial.keys)}

    try:
        tune_tpu.run(todo, path, measure, lambda text: None)
    except KeyboardInterrupt:
        assert len(json.loads(path.read_text())) == 3
    measured.clear()
    results = tune_tpu.run(todo, path, lambda trial: {"ms": 1.0, "fault": "wrong"}, lambda text: None)
    assert len(results) == len(todo)
    ((best, ms),) = tune_tpu.fastest(todo, results)
    assert (best.keys, ms) == (128, 128.0)


def test_what_it_writes_is_what_the_kernel_looks_up(tmp_path):
    path = tmp_path / "v6e.json"
    other = {"kernel": "triton", "work": "wide", "q": "bfloat16", "kv": "bfloat16", "tile": {"rows": 1, "keys": 1}}
    path.write_text(json.dumps([other]))
    for rows in (128, 256):
        trials = [(tune_tpu.Trial("P1", 16, "bfloat16", rows, 512), 1.0)]
        tune_tpu.write_tuned(path, tune_tpu.entries(trials))
    first, entry = json.loads(path.read_text())
    assert first == other
    assert (entry["work"], entry["head_dim"]) == ("wide", 128)
    assert tuned.Tile(**entry["tile"]).rows == 256
