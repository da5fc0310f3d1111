"""The identity of a model that was loaded: whether its weights are those of the files, by samples.

Quantisation at loading, a merged adapter and further training change what the model computes, and no file.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from kvtcd.client.weights import weights_digest
from kvtcd.core.errors import BadIdentity
from kvtcd.core.identity import Identity
from kvtcd.core.layout import Dtype, canonical_json
from kvtcd.integrations.transformers_identity import identity_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)
_SAMPLES, _RUN = 64, 16
"""Elements that are compared of each tensor: evenly spaced ones, and a run at each end."""
_WAY_OUT = "give `variant`, any text that names these weights and no others, or an identity"


def identity_of_model(model: PreTrainedModel, block_tokens: int, variant: str = "") -> Identity:
    """Return the identity of the caches of a model that was loaded from a folder.

    Args:
        model: what was loaded.
        block_tokens: tokens of a full block.
        variant: names what changes the cache and is in no file; with it the weights may be others than those
            of the files, and need no comparison.

    Raises:
        BadIdentity: it has an adapter, no folder, an element type that is not stored, or weights that are not
            those of its files.
        UnsupportedCache, UnsupportedRope: see `identity_of`.
        Unavailable: no weight files in the folder.
    """
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise BadIdentity(
            "adapter", "the model has an adapter; give an identity with the digest of its files"
        )
    folder = Path(model.name_or_path or "/dev/null")
    if not folder.is_dir():
        raise BadIdentity("weights", "the model was not loaded from a folder; give an identity")
    try:
        dtype = Dtype(str(model.dtype).removeprefix("torch."))
    except ValueError:
        raise BadIdentity("layout.dtype", f"{model.dtype} is not one of {', '.join(Dtype)}") from None
    weights = weights_digest(folder)
    if variant:
        weights = hashlib.sha256(canonical_json({"weights": weights, "variant": variant})).hexdigest()
    else:
        require_weights_of(folder, model)
    return identity_of(
        model.config,
        weights=weights,
        model=folder.name,
        dtype=dtype,
        block_tokens=block_tokens,
    )


def require_weights_of(folder: Path, model: PreTrainedModel) -> None:
    """Refuse a model whose weights are not, as far as samples tell, those of its folder's files.

    What transformers has renamed, fused or left on disk is found in no file, and is passed over.

    Raises:
        BadIdentity: they were quantised when they were loaded, or changed after that.
    """
    quantised = _quantised_files(folder)
    if getattr(getattr(model, "config", None), "quantization_config", None) and not quantised:
        raise BadIdentity("weights", f"the model was quantised when it was loaded from {folder}; {_WAY_OUT}")
    compared, parameters = 0, dict(model.named_parameters())
    with ExitStack() as opened:
        files = [
            opened.enter_context(safe_open(file, framework="pt"))
            for file in sorted(folder.glob("*.safetensors"))
        ]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no dict
        for name, parameter in parameters.items():
            known = next((one for one in _names(name, model.base_model_prefix) if one in where), None)
            if known is None or parameter.is_meta:
                continue
            if type(parameter.data) is not torch.Tensor:
                if quantised:
                    continue
                kind = type(parameter.data).__name__
                raise BadIdentity("weights", f"{name} is a {kind}: quantised, or split; {_WAY_OUT}")
            if not _alike(parameter.data, where[known].get_tensor(known)):
                raise BadIdentity(
                    "weights", f"were changed after loading: {name} is not that of {folder}; {_WAY_OUT}"
                )
            compared += 1
        if (gone := _replaced(model, where)) and not quantised:
            raise BadIdentity(
                "weights", f"were changed after loading: {gone} is no plain weight any more; {_WAY_OUT}"
            )
    if compared < len(parameters):
        _LOG.info("%d of %d weights are in no file by name", len(parameters) - compared, len(parameters))


class WeightsWatch:
    """Notes when weights change in memory: cheap enough to be asked before every load and save.

    A change in place counts a tensor's version up; one that goes around that, as merging an adapter does, is
    seen in samples. Moving a model to another device changes nothing.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._versions, self._sample = _versions(model), _sampled(model)

    def require_same(self) -> None:
        """Refuse weights that are not those of the beginning.

        Raises:
            BadIdentity: they are others.
        """
        versions = _versions(self._model)
        moved_on = any(
            before[0] == now[0] and before[1] != now[1]
            for before, now in (
                (self._versions[name], versions[name]) for name in versions & self._versions.keys()
            )
        )
        if moved_on or versions.keys() != self._versions.keys() or _sampled(self._model) != self._sample:
            raise BadIdentity(
                "weights", "have changed in memory since this cache was made; make another, with a `variant`"
            )
        self._versions = versions


def _quantised_files(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "config.json").read_text()).get("quantization_config"))
    except (OSError, ValueError, AttributeError):
        return False


def _names(name: str, prefix: str) -> tuple[str, ...]:
    """Return the names that a parameter may have in files: those of a base model lack its prefix."""
    return name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"


def _replaced(model: PreTrainedModel, names: Any) -> str | None:  # noqa: ANN401 - names, by file
    """Return a weight of the files whose module has none, as one that was quantised in its place."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    modules = dict(model.named_modules())
    for name in names:
        for one in _names(name, model.base_model_prefix):
            module, _, leaf = one.rpartition(".")
            if leaf == "weight" and module in modules and one not in held:
                return one
            if one in held:
                break
    return None


def _picked(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return torch.cat((flat[:: max(1, flat.numel() // _SAMPLES)][: 2 * _SAMPLES], flat[:_RUN], flat[-_RUN:]))


def _alike(held: torch.Tensor, filed: torch.Tensor) -> bool:
    if held.shape != filed.shape:
        return False
    one, other = _picked(held).cpu(), _picked(filed).to(held.dtype)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _plain(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and type(parameter.data) is torch.Tensor:
            yield name, parameter.data


def _versions(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return where each parameter lies, and how often it was written in place."""
    return {
        name: (id(parameter), 0 if parameter.is_inference() else parameter._version)  # noqa: SLF001 - torch has no other
        for name, parameter in model.named_parameters()
    }


def _sampled(model: PreTrainedModel) -> dict[str, bytes]:
    """Return samples of all parameters, one copy for each device and dtype."""
    picked: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for _, tensor in _plain(model):
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor[:1].reshape(-1)
        picked[str(tensor.dtype)].append(flat[:: max(1, flat.numel() // _RUN)][: 2 * _RUN])
    return {
        dtype: torch.cat([part.to(parts[0].device) for part in parts])
        .cpu()
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for dtype, parts in picked.items()
    }
