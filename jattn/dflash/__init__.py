"""Block-diffusion speculative decoding (DFlash): draft a block without causality, verify it causally, lose nothing."""

from jattn.dflash.checkpoint import load_draft, save_draft
from jattn.dflash.draft import DraftConfig
from jattn.dflash.proposers import DFlash, NGram, Oracle, Proposer, Random, Repeat
from jattn.dflash.speculate import SpeculationStats, Speculator, speculate

__all__ = [
    "DFlash",
    "DraftConfig",
    "NGram",
    "Oracle",
    "Proposer",
    "Random",
    "Repeat",
    "SpeculationStats",
    "Speculator",
    "load_draft",
    "save_draft",
    "speculate",
]
