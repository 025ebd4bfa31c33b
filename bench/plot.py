"""The roofline picture: `python -m bench.plot results.json roofline.svg` draws one from `bench.run --json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.workloads import WORKLOADS

# Measured on an H200: a device copy (read + write) and an 8192^3 bf16 matrix product.
COPY_GBS, MATMUL_TFLOPS = 4260.0, 690.0


def roofline(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw achieved TFLOP/s over operations a byte, one mark for each peer and workload, under the two ceilings.

    A path without a suffix gives two files, PNG and SVG.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(9, 6))
    x = np.logspace(0, 4, 200)
    axes.plot(x, np.minimum(x * COPY_GBS / 1e3, MATMUL_TFLOPS), color="black", lw=1, label="ceilings")
    peers = sorted({row["peer"] for row in rows if "ms" in row})
    for n, peer in enumerate(peers):
        points = [row for row in rows if row["peer"] == peer and "ms" in row]
        intensity = [_intensity(row) for row in points]
        axes.scatter(intensity, [row["tflops"] for row in points], s=28, marker="ov^s*DPX"[n % 8], label=peer)
        if peer == "jattn":
            for a, row in zip(intensity, points, strict=True):
                axes.annotate(row["workload"], (a, row["tflops"]), xytext=(4, 4), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    for file in [path] if path.suffix else [path.with_suffix(".png"), path.with_suffix(".svg")]:
        figure.savefig(file, dpi=150)


def _intensity(row: dict[str, Any]) -> float:
    w = WORKLOADS[row["workload"]]
    item = 1 if "8" in row["kv_dtype"] else 2
    return w.flops / w.min_bytes(item)


def main() -> None:
    """Draw a saved result."""
    parser = argparse.ArgumentParser("bench.plot", description=__doc__)
    parser.add_argument("results", type=Path, help="JSON of bench.run")
    parser.add_argument("picture", type=Path, help=".png or .svg; without a suffix both")
    args = parser.parse_args()
    roofline(json.loads(args.results.read_text())["rows"], args.picture)


if __name__ == "__main__":
    main()
