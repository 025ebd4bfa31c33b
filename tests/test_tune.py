"""Tuned tile sizes: what the lookup takes and leaves, and what the tuner measures, keeps and writes. No GPU is needed."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from bench import tune, tune_candidates
from bench.tune_candidates import USUAL, Job
from bench.tune_results import State, merged, outcomes
from bench.workloads import WORKLOADS, Workload
from pallas_kernels import hopper_plan, triton_plan, tuned
from pallas_kernels.request import AttentionRequest

ARCH = "sm90"
D1, D2, P1, P2 = (Job(WORKLOADS[name], "hopper", 16, "bfloat16", "bfloat16") for name in ("D1", "D2", "P1", "P2"))


@pytest.fixture
def table(monkeypatch):
    """A function that sets the tuned table of the GPU that is pretended to be there."""
    monkeypatch.setattr(tuned, "gpu_arch", lambda: ARCH)

    def use(*entries):
        monkeypatch.setattr(tuned, "_table", lambda arch: entries if arch == ARCH else ())

    tuned.say_once.cache_clear()
    use()
    return use


def entry(job: Job, key: dict | None = None, **tile) -> dict:
    return job.key(ARCH) | (key or {}) | {"tile": tile}


# ------------------------------------------------------------------------------------------------------------ lookup


def test_the_exact_shape_is_taken_before_a_nearer_line(table):
    near, exact = entry(D1, {"page_size": 32}, q_in_registers=True), entry(D1, q_slots=1)
    table(near, exact)
    usual = hopper_plan.heuristic(D1.request())
    assert hopper_plan.choose_tiling(D1.request()) == dataclasses.replace(usual, q_slots=1)


@pytest.mark.parametrize("change", [{"page_size": 64}, {"heads": 16}, {"kv_heads": 4}])
def test_a_near_shape_is_taken(table, change):
    table(entry(D1, change, q_slots=1))
    usual = hopper_plan.heuristic(D1.request())
    assert hopper_plan.choose_tiling(D1.request()) == dataclasses.replace(usual, q_slots=1)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 64},
        {"q": "float16"},
        {"kv": "float8_e4m3fn"},
        {"kernel": "triton"},
        {"work": D2.key(ARCH)["work"]},
        {"work": P1.key(ARCH)["work"]},
    ],
    ids=lambda change: "-".join(change),
)
def test_no_entry_near_means_the_heuristic_and_one_message(table, change, caplog):
    table(entry(D1, change, q_slots=1))
    with caplog.at_level(logging.INFO, "pallas_kernels.tuned"):
        for _ in range(2):
            assert hopper_plan.choose_tiling(D1.request()) == hopper_plan.heuristic(D1.request())
    assert [x.message for x in caplog.records] == [
        "no tuned hopper tile for decode, many tiles on sm90: using its heuristic"
    ]


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        ({"stages": 4}, "shared memory"),
        ({"registers": [240, 40, 0], "wgs": 2}, "more than 504"),
        ({"registers": [230, 40, 0], "wgs": 2}, "multiple of 8"),
        ({"registers": [160, 40, 0], "wgs": 2}, "168 to 248 for computing"),
        ({"registers": [168, 176, 0], "wgs": 2, "block_kv": 64}, "24 to 168 for the others"),
        ({"block_kv": 192, "stages": 2, "q_slots": 1}, "to hold"),
        ({"q_slots": 4, "block_kv": 64}, "q_slots=4"),
        ({"wgs": 3}, "wgs=3"),
        ({"block_kv": 96}, "block_kv=96"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_an_entry_that_does_not_fit_is_not_used(table, caplog, tile, reason):
    table(entry(D1, **tile))
    with caplog.at_level(logging.INFO, "pallas_kernels.tuned"):
        assert hopper_plan.choose_tiling(D1.request()) == hopper_plan.heuristic(D1.request())
    assert reason in caplog.text


def test_a_field_that_the_tuner_does_not_write_is_an_error(table):
    table(entry(D1, programs=7))
    with pytest.raises(ValueError, match="programs"):
        hopper_plan.choose_tiling(D1.request())


def test_smaller_tiles_of_keys_are_copied_in_smaller_chunks(table):
    table(entry(D1, block_kv=64, stages=4))
    request = dataclasses.replace(D1.request(), page_size=128)
    assert hopper_plan.choose_tiling(request).chunk == 64


def test_batch_invariance_never_splits_nor_sums_in_another_order(table):
    request = dataclasses.replace(D1.request(), batch_invariant=True)
    table(entry(D1, split=True, block_kv=64, q_slots=1))
    usual = hopper_plan.heuristic(request)
    assert hopper_plan.choose_tiling(D1.request()).split
    assert hopper_plan.choose_tiling(request) == dataclasses.replace(usual, q_slots=1)


def test_without_a_gpu_there_are_no_entries(table, monkeypatch):
    table(entry(D1, q_slots=1))
    monkeypatch.setattr(tuned, "gpu_arch", lambda: None)
    assert hopper_plan.choose_tiling(D1.request()) == hopper_plan.heuristic(D1.request())


def shape(**changes) -> AttentionRequest:
    usual = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_pages": 64, "page_size": 16, "max_pages": 64}
    dtype = np.dtype(jnp.bfloat16)
    return AttentionRequest(**usual | {"num_tokens": 64, "num_seqs": 64, "q_dtype": dtype, "kv_dtype": dtype} | changes)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_heuristic_always_fits(kv_dtype):
    for group in (1, 2, 3, 5, 7, 8, 16, 17):
        for dim in (64, 96, 128, 192, 256):
            for tokens in (64, 4096):
                r = shape(num_heads=group, num_kv_heads=1, head_dim=dim, num_tokens=tokens, max_query_len=tokens)
                r = dataclasses.replace(r, kv_dtype=np.dtype(jnp.dtype(kv_dtype)))
                assert hopper_plan.misfits(r, hopper_plan.heuristic(r)) == (), (group, dim, tokens)


@pytest.mark.parametrize("path", sorted(tune.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_the_tables_hold_what_the_kernels_can_use(path):
    for e in json.loads(path.read_text()):
        names = {"num_heads": e["heads"], "num_kv_heads": e["kv_heads"]}
        names |= {n: e[n] for n in ("head_dim", "page_size")}
        names |= {f"{n}_dtype": np.dtype(jnp.dtype(e[n])) for n in ("q", "kv")}
        long = 1 if "decode" in e["work"] else 4096 if "prefill" in e["work"] or "mixed" in e["work"] else 16
        r = shape(**names, num_tokens=64 * long, max_query_len=long)
        if e["kernel"] == "triton":
            assert triton_plan.Tile(**e["tile"]).keys & (e["tile"]["keys"] - 1) == 0
        else:
            tiling = hopper_plan.with_fields(r, hopper_plan.heuristic(r), e["tile"])
            assert hopper_plan.misfits(r, tiling) == ()


# ------------------------------------------------------------------------------------------------------------ the tuner


def times(**ms: float) -> dict:
    """Results by candidate; `usual` is the heuristic."""
    names = {"usual": USUAL, "slots": "q_slots=1", "inside": "q_in_registers=True"}
    return {names[name]: {"ms": x, "spread_ms": 0.01, "error": 1e-3} for name, x in ms.items()}


def state_of(tmp_path: Path, **jobs: dict) -> State:
    state = State(tmp_path / "state.json", {"device": "x"})
    state.jobs = {{"P1": P1, "P2": P2, "D1": D1}[name].name: results for name, results in jobs.items()}
    return state


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ({"P1": times(usual=1.0, inside=0.9, slots=0.95)}, "q_in_registers=True"),
        ({"P1": times(usual=1.0, inside=0.995)}, USUAL),  # not more than the spread
        ({"P1": times(usual=1.0, inside=0.9), "P2": times(usual=1.0, inside=1.05)}, USUAL),  # a loss where the key is
        ({"P1": times(usual=1.0, inside=0.9), "P2": times(usual=1.0, inside=0.999)}, "q_in_registers=True"),
        ({"P1": times(usual=1.0) | {"q_slots=1": {"failed": "an error of 1.0e-01"}}}, USUAL),
    ],
    ids=["faster", "within the spread", "slower elsewhere", "no slower elsewhere", "wrong"],
)
def test_only_sizes_that_are_faster_for_all_that_share_the_key_win(tmp_path, results, best):
    (outcome,) = outcomes([P1, P2], state_of(tmp_path, **results), ARCH)
    assert outcome.best == best
    assert len(merged([], [outcome], ARCH)) == (best != USUAL)


def test_a_neighbour_does_not_replace_a_heuristic_that_was_measured_best(tmp_path, table):
    found = outcomes([P1], state_of(tmp_path, P1=times(usual=1.0, inside=1.1)), ARCH)
    neighbour = entry(P1, {"page_size": 64}, q_in_registers=True)
    table(*merged([neighbour], found, ARCH))
    assert hopper_plan.choose_tiling(P1.request()) == hopper_plan.heuristic(P1.request())


def test_measuring_again_replaces_the_entry_and_keeps_the_others(tmp_path):
    old, other = entry(P1, q_slots=1), entry(D1, q_slots=1)
    found = outcomes([P1], state_of(tmp_path, P1=times(usual=1.0, inside=0.9)), ARCH)
    assert merged([old, other], found, ARCH) == [other, entry(P1, q_in_registers=True) | {"gain": 1.111}]
    found = outcomes([P1], state_of(tmp_path, P1=times(usual=1.0, inside=1.1)), ARCH)
    assert merged([old, other], found, ARCH) == [other]


def test_a_triton_entry_is_for_its_rows(tmp_path, table):
    job = dataclasses.replace(D1, kernel="triton")
    name, fields = list(job.candidates(ARCH).items())[1]
    state = State(tmp_path / "state.json", {})
    state.jobs[job.name] = times(usual=1.0) | {name: {"ms": 0.5, "spread_ms": 0.01}}
    table(*merged([], outcomes([job], state, ARCH), ARCH))
    assert dataclasses.asdict(triton_plan.choose_tile(job.request(), ARCH, fields["rows"])) == fields
    assert triton_plan.choose_tile(job.request(), ARCH, 32) == triton_plan.heuristic(job.request(), ARCH, 32)


class NoCompiler:
    """In place of the one that needs a GPU."""

    def __init__(self, jobs, arch, threads):
        self.jobs = jobs

    def close(self):
        pass


@pytest.fixture
def pretended_gpu(monkeypatch, tmp_path):
    """The tuner on a GPU that always finds one warpgroup's queries in registers faster; the jobs that it measured."""
    seen = []
    device = type("Device", (), {"platform": "gpu", "device_kind": "NVIDIA H200"})()
    monkeypatch.setattr(tune.jax, "devices", lambda: [device])
    monkeypatch.setattr(tuned, "gpu_arch", lambda: ARCH)
    monkeypatch.setattr(tune, "Compiler", NoCompiler)

    def measure(job, *_):
        seen.append(job.workload.name)
        row = {"ms": 1.0, "spread_ms": 0.01, "error": 1e-3}
        return {n: row | {"ms": 0.8 if n == "q_in_registers=True" else 1.0} for n in job.candidates(ARCH)}

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tuned.resources, "files", lambda _: tmp_path)
    tuned._table.cache_clear()
    yield seen
    tuned._table.cache_clear()


def run(tmp_path, *more: str) -> int:
    return tune.main(["-w", "P1,D1", "--out", str(tmp_path / "tuned" / "sm90.json"), *more])


def test_what_is_written_is_what_the_lookup_reads(pretended_gpu, tmp_path, capsys):
    assert run(tmp_path) == 0
    for job in (P1, D1):
        usual = hopper_plan.heuristic(job.request())
        assert hopper_plan.choose_tiling(job.request()) == dataclasses.replace(usual, q_in_registers=True)
    printed = capsys.readouterr().out
    assert "1.250x" in printed
    assert max(map(len, printed.splitlines()[-4:-1])) <= 80


def test_a_second_run_measures_only_what_the_first_did_not(pretended_gpu, tmp_path, monkeypatch, capsys):
    measure = tune.measure

    def stop_at_d1(job, *rest):
        if job.workload.name == "D1":
            raise KeyboardInterrupt
        return measure(job, *rest)

    monkeypatch.setattr(tune, "measure", stop_at_d1)
    assert run(tmp_path) == 130
    assert "goes on from there" in capsys.readouterr().err
    monkeypatch.setattr(tune, "measure", measure)
    assert run(tmp_path) == 0
    assert pretended_gpu == ["P1", "D1"]
    assert run(tmp_path) == 0
    assert pretended_gpu == ["P1", "D1"]


def test_time_that_is_over_begins_nothing_and_says_what_is_left(pretended_gpu, tmp_path, capsys):
    assert run(tmp_path, "--minutes", "1e-9") == 0
    assert pretended_gpu == []
    assert "P1 hopper bfloat16 page 16, D1" in capsys.readouterr().out


def test_results_of_another_device_are_not_mixed_in(pretended_gpu, tmp_path):
    state = tmp_path / "tuned" / "sm90.state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"environment": {"device": "NVIDIA H100", "jax": "0"}, "jobs": {}}))
    with pytest.raises(SystemExit, match="NVIDIA H100"):
        run(tmp_path)


def test_a_wrong_result_is_not_timed(monkeypatch):
    tiny = Workload("tiny", "", ((3, 9),), num_heads=4, num_kv_heads=2, head_dim=64)
    job = Job(tiny, "hopper", 16, "bfloat16", "bfloat16")

    good = jax.jit(functools.partial(jattn.paged_attention, implementation="xla"))
    calls = {USUAL: good, "off": lambda *args: 1.01 * good(*args), "nan": lambda *args: jnp.nan * good(*args)}
    calls["broken"] = RuntimeError("ptxas")
    compiler = type("Compiled", (), {"take": lambda self, job: calls})()
    monkeypatch.setattr(tune, "device_times", lambda call, repeats, args: [1.0] * repeats)
    results = tune.measure(job, compiler, 2, 3)
    assert "ms" in results[USUAL]
    assert [name for name, row in results.items() if "failed" in row] == ["off", "nan", "broken"]
    assert not any("ms" in results[name] for name in ("off", "nan", "broken"))


def test_a_job_of_which_nothing_ran_is_tried_again(pretended_gpu, tmp_path, monkeypatch, capsys):
    measure = tune.measure
    monkeypatch.setattr(tune, "measure", lambda job, *_: {n: {"failed": "lost"} for n in job.candidates(ARCH)})
    assert run(tmp_path) == 0
    assert "the heuristic failed: lost" in capsys.readouterr().out
    monkeypatch.setattr(tune, "measure", measure)
    assert run(tmp_path) == 0
    assert pretended_gpu == ["P1", "D1"]


def test_kernels_from_elsewhere_make_the_clock_be_asked_again(monkeypatch):
    answers = [RuntimeError("not divisible"), [1.0, 2.0]]
    client = type("Client", (), {"platform_version": "PJRT C API\ncuda 13000"})()
    monkeypatch.setattr(tune.jax, "devices", lambda: [type("Device", (), {"client": client})()])

    def clock(call, repeats, *args):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(tune, "cupti_times", clock)
    assert tune.device_times(None, 2, ()) == [1.0, 2.0]


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    host = jax.devices("cpu")

    def devices(platform="cpu"):
        if platform != "cpu":
            raise RuntimeError(f"no {platform} here")
        return host

    monkeypatch.setattr(tune.jax, "devices", devices)
    with pytest.raises(SystemExit, match=r"needs a GPU(.|\n)*jattn\[cuda\](.|\n)*--dry-run"):
        tune.main([])


def test_a_dry_run_lists_what_would_be_tried(capsys):
    assert tune.main(["--dry-run", "-w", "P2/float8_e4m3fn", "--kernel", "hopper,triton"]) == 0
    printed = capsys.readouterr().out
    assert "prefill, many tiles" in printed
    assert "does not fit: 232 registers" in printed
    assert "num_stages=3" in printed


def test_each_standard_workload_has_something_to_try():
    for job in tune.jobs_of(tune._parser().parse_args(["--kernel", "hopper,triton"])):
        assert 2 <= len(tune.fitting(job, ARCH)) <= 9
        assert job.why_not() == ()
    assert tune_candidates.describe({"registers": (224, 56, 0)}) == "registers=224,56,0"
