"""jattn is three packages side by side; another `backends` on a user's path would shadow ours."""

from __future__ import annotations

import importlib
from pathlib import Path


def check_neighbours() -> None:
    """Import the lower floors and check that they are this installation's own.

    Raises:
      ImportError: a package of that name from elsewhere comes first on the path.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("pallas_kernels", "backends"):
        package = importlib.import_module(name)
        found = [Path(p).resolve() for p in package.__path__]
        if found != [home / name]:
            raise ImportError(
                f"jattn needs its own package {name!r} in {home}, but Python found {', '.join(map(str, found))}."
                f" Rename that package, or put {home} before it on sys.path."
            )
