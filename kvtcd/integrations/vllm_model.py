"""The model behind a vLLM engine's pages."""

from __future__ import annotations

from kvtcd.integrations.model_files import Settings, adapters_digest, settings_digest
from kvtcd.integrations.vllm_identity import Attention, Model


def model_of(settings: Settings, attention: Attention | None) -> Model:
    """Return the model. With a `variant`, what its configuration says is not relied on: it may be overridden.

    Raises:
        Unavailable: a weight or adapter file is missing or cannot be read.
        Corrupt: a weight file is no credible one.
    """
    return Model(
        name=settings.name,
        weights=settings.weights_digest(),
        settings=settings_digest(settings.folder, settings.variant),
        adapter=adapters_digest(settings.adapters),
        attention=None if settings.variant else attention,
    )
