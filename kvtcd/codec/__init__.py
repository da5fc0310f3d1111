"""The codec room: raw blocks to packed blobs and back. Torch only; no loop, no tier, no model."""
