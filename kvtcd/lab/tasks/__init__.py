"""What a model can still do behind a cache that went through a codec."""
