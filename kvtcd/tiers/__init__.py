"""Bytes at rest: blocking code that knows no event loop, no codec and no catalog."""
