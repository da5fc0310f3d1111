"""Which module is which rival."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtcd.codec.rivals import cachegen, fp8, gear, kivi, qjl, sq, tq, tq_prod, xkv
from kvtcd.codec.rivals.method import Centred, Method, Site
from kvtcd.codec.rivals.setting import Setting
from kvtcd.core.dials import CodecName

_MAKERS: Mapping[CodecName, Callable[[Setting, Site], Method]] = {
    "tq": tq.make,
    "tq-prod": tq_prod.make,
    "qjl": qjl.make,
    "kivi": kivi.make,
    "gear": gear.make,
    "sq": sq.make,
    "xkv": xkv.make,
    "cachegen": cachegen.make,
    "fp8": fp8.make,
}


def method_for(setting: Setting, site: Site) -> Method:
    """Return the method of a stream, behind the removal of its mean if that is asked for."""
    method = _MAKERS[setting.codec](setting, site)
    return Centred(site, method) if "mean" in setting.options else method
