"""Codecs that others have published, one module each, in the blobs of this program and with true accounts."""
