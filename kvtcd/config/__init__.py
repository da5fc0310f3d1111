"""config.toml and policy files as frozen values, or an error with file, field and reason."""

from kvtcd.config.daemon import Config, dump, load
from kvtcd.config.policies import load_policies, load_policy
from kvtcd.config.tokens import load_tokens, tenant_name
from kvtcd.config.values import show_bytes, size

__all__ = [
    "Config",
    "dump",
    "load",
    "load_policies",
    "load_policy",
    "load_tokens",
    "show_bytes",
    "size",
    "tenant_name",
]
