"""config.toml and policy files as frozen values, or an error with file, field and reason."""

from kvtcd.config.changes import changed
from kvtcd.config.daemon import Config, dump, load
from kvtcd.config.policies import load_policies, load_policy
from kvtcd.config.remote import BucketAt, Credentials, RedisAt, load_credentials
from kvtcd.config.tokens import load_tokens, tenant_name
from kvtcd.config.values import show_bytes, size

__all__ = [
    "BucketAt",
    "Config",
    "Credentials",
    "RedisAt",
    "changed",
    "dump",
    "load",
    "load_credentials",
    "load_policies",
    "load_policy",
    "load_tokens",
    "show_bytes",
    "size",
    "tenant_name",
]
