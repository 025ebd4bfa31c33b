"""Floor 1 of jattn: paged attention kernels, arrays in and arrays out. Import `jattn` for the public call."""
