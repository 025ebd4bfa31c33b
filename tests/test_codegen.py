"""The page of compiled code: its table belongs to the present tiles, and each tool keeps to its own section."""

from __future__ import annotations

from pathlib import Path

import jax

from bench import codegen, sections
from pallas_kernels import triton_plan
from pallas_kernels.request import AttentionRequest, make_request

PAGE = Path(__file__).parent.parent / "docs" / "codegen.md"
STALE = "the table is of other tiles: run `make codegen`"


def request_of(config: codegen.Config) -> AttentionRequest:
    arrays, static = codegen.arguments(config)
    found = []
    jax.eval_shape(lambda x: found.append(make_request(**x, **static)[0]), arrays)
    return found[0]


def table() -> dict[tuple[str, str, str], list[str]]:
    """The rest of each row by target, configuration and kernel."""
    section = PAGE.read_text().partition(codegen.BEGIN)[2].partition(codegen.END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    return {(row[0], row[1], row[2]): row[3:] for row in rows[1:]}


def test_the_page_has_the_tiles_of_now_and_none_at_fault():
    rows, seen = table(), set()
    for config in codegen.configs():
        request = request_of(config)
        for target in codegen.TARGETS:
            for kind, g in zip(("narrow", "wide"), triton_plan.geometries(request, target), strict=True):
                if g is None:
                    continue
                at, t = (target, config.name, f"paged_{kind}"), g.tile
                tile, _, spills, _, matrix, fault = rows[at]
                assert tile == f"{t.rows}x{t.keys}/{t.num_warps}w/{t.num_stages}s", (at, STALE)
                assert (spills, fault) == ("0", ""), at
                exact = config.dtype == "float32" and target.startswith("sm")
                assert matrix == codegen.EXACT if exact else int(matrix) > 0, at
                seen.add(at)
    assert seen == {at for at in rows if at[2] != "paged_merge"}, STALE


def test_a_section_replaces_only_itself(tmp_path):
    page = tmp_path / "page.md"
    for text in ("old a", "a"):
        sections.replace_section(page, f"<a>\n{text}\n</a>\n", "<a>", "</a>")
        sections.replace_section(page, "<b>\nb\n</b>\n", "<b>", "</b>")
    title = "# Machine code, compiled without the hardware"
    assert page.read_text() == f"{title}\n\n<a>\na\n</a>\n\n<b>\nb\n</b>\n"
