"""Sections of a page that tools write, each between its own markers."""

from __future__ import annotations

from pathlib import Path


def replace_section(path: Path, section: str, begin: str, end: str) -> None:
    """Put a section between its markers, or at the end of the page where it has none yet; other sections stay."""
    text = path.read_text() if path.is_file() else "# Machine code, compiled without the hardware\n"
    before, found, rest = text.partition(begin)
    after = rest.partition(end)[2].removeprefix("\n") if found else ""
    path.parent.mkdir(exist_ok=True)
    path.write_text(before.rstrip("\n") + "\n\n" + section + after)
