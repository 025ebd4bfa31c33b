"""The README's Python blocks run, in order, in one namespace."""

import re
from pathlib import Path

import numpy as np

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    out = np.asarray(names["out"])
    assert out.shape == (22, 8, 64)
    assert np.isfinite(out).all() and (out != 0).all()


def test_the_first_example_is_short():
    first = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    assert len(first.splitlines()) <= 24
