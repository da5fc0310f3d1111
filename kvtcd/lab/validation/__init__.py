"""Whether a profile may be trusted on caches it has not seen."""
