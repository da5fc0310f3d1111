"""kvtcd: keep language-model KV cache in tiers, compressed by a calibrated transform codec."""

__version__ = "0.1.0"
