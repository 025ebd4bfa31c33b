"""Which chip a call is for, as far as can be told when it is traced."""

from __future__ import annotations

import jax


def cuda_is_hopper() -> bool:
    """Whether the CUDA devices of this process are all Hopper (sm90); False where there are none to ask.

    Kernels for sm90 use instructions of that chip alone (wgmma), so neither older nor newer ones can run them.
    """
    try:
        devices = jax.devices("cuda")
    except RuntimeError:  # no such platform here
        return False
    return all(device.compute_capability == "9.0" for device in devices)
