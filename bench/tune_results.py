"""What the tuner has measured: kept in a file as it goes, and turned into entries of the tuned table."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from bench.tune_candidates import USUAL, Job
from pallas_kernels import hopper_plan, triton_plan, tuned

Results = dict[str, dict[str, Any]]  # candidate -> {"ms", "spread_ms", "error"} or {"failed"}


class State:
    """The results so far, in a JSON file that each finished job rewrites."""

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        """Open or begin a file.

        Raises:
          ValueError: the file is of another device or another jax.
        """
        self.path, self.environment = path, environment
        self.jobs: dict[str, Results] = {}
        if path.exists():
            found = json.loads(path.read_text())
            if found["environment"] != environment:
                raise ValueError(
                    f"{path} holds results of {found['environment']}, and this is {environment}: times of both cannot be "
                    "compared. Remove it, or name another with --state"
                )
            self.jobs = found["jobs"]

    def has(self, job: Job, candidates: list[str]) -> bool:
        """Whether a job is done: all its present candidates were measured, side by side."""
        return set(candidates) <= self.jobs.get(job.name, {}).keys()

    def keep(self, job: Job, results: Results) -> None:
        """Add a job's results and write the file, whole or not at all."""
        self.jobs[job.name] = results
        text = json.dumps({"environment": self.environment, "jobs": self.jobs}, indent=1)
        replace_file(self.path, text + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The best sizes for one entry's key, over all jobs that share it."""

    key: dict[str, Any]
    fixed: dict[str, Any]
    jobs: tuple[Job, ...]
    best: str  # USUAL where nothing beats the heuristic by more than the spread
    fields: dict[str, Any]
    gain: float  # how many times faster than the heuristic, geometric mean


def outcomes(jobs: list[Job], state: State, arch: str) -> list[Outcome]:
    """One for each key among the measured jobs."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if "ms" in state.jobs.get(job.name, {}).get(USUAL, {}):
            name = json.dumps([job.key(arch), job.fixed(arch)])
            groups.setdefault(name, []).append(job)
    return [_outcome(tuple(group), state, arch) for group in groups.values()]


def _outcome(jobs: tuple[Job, ...], state: State, arch: str) -> Outcome:
    results = [state.jobs[job.name] for job in jobs]
    fields = jobs[0].candidates(arch)
    for job in jobs[1:]:  # sizes that one of them lacks
        fields = {name: x for name, x in fields.items() if name in job.candidates(arch)}
    best, gain = USUAL, 0.0
    for name in fields:
        mean = mean_gain([r[USUAL] for r in results], [r.get(name, {}) for r in results])
        if mean is not None and mean > gain:
            best, gain = name, mean
    return Outcome(jobs[0].key(arch), jobs[0].fixed(arch), jobs, best, fields[best], math.exp(gain))


def mean_gain(usual: list[dict[str, Any]], other: list[dict[str, Any]]) -> float | None:
    """Mean log of the speed-up; None unless it is more than the spread, and nowhere a loss of more than that."""
    if not all("ms" in row for row in other):
        return None
    gains = [math.log(a["ms"] / b["ms"]) for a, b in zip(usual, other, strict=True)]
    noise = [max(a["spread_ms"], b["spread_ms"]) / a["ms"] for a, b in zip(usual, other, strict=True)]
    if any(g < -n for g, n in zip(gains, noise, strict=True)):
        return None
    mean = sum(gains) / len(gains)
    return mean if mean > sum(noise) / len(noise) else None


def merged(table: list[dict[str, Any]], found: list[Outcome], arch: str) -> list[dict[str, Any]]:
    """A table with the entries of the measured keys replaced.

    Where the heuristic stayed the fastest there is no entry, unless a neighbour's would then be taken for it: an entry
    that holds the heuristic's own sizes keeps that one off.
    """
    kept = [entry for entry in table if not any(_is_of(entry, o) for o in found)]
    entries = kept + [{**o.key, "tile": o.fields | o.fixed, "gain": round(o.gain, 3)} for o in found if o.best != USUAL]
    for o in found:
        if o.best == USUAL and _misled(entries, o, arch):
            entries.append({**o.key, "tile": _usual_fields(o, arch)})
    return entries


def _is_of(entry: dict[str, Any], o: Outcome) -> bool:
    return o.key.items() <= entry.items() and o.fixed.items() <= entry["tile"].items()


def _misled(entries: list[dict[str, Any]], o: Outcome, arch: str) -> bool:
    request = o.jobs[0].request()
    fields = tuned.nearest(entries, o.key["kernel"], o.key["work"], request, **o.fixed)
    if fields is None:
        return False
    if o.key["kernel"] == "triton":
        return fields != _usual_fields(o, arch)
    usual = hopper_plan.heuristic(request)
    return hopper_plan.with_fields(request, usual, fields) != usual


def _usual_fields(o: Outcome, arch: str) -> dict[str, Any]:
    if o.key["kernel"] == "hopper":
        return {}
    return dataclasses.asdict(triton_plan.heuristic(o.jobs[0].request(), arch, o.fixed.get("rows")))


def table_text(entries: list[dict[str, Any]]) -> str:
    """A table as its file has it, one entry a line."""
    return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n]\n"


def read_table(path: Path) -> list[dict[str, Any]]:
    """The entries of a file; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else []
