"""The remote tier: a store that several daemons share, below the disk, which nobody here depends on."""
