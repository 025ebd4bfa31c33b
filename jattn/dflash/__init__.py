"""Block-diffusion speculative decoding (DFlash): draft a block without causality, verify it causally, lose nothing."""
