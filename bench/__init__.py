"""Measurements: `python -m bench.run` times jattn beside its peers."""
