"""Floor 2 of jattn: the capability contracts of serving engines, as backends over the kernels."""
