"""A prefix cache for transformers: what a model has read once is fetched instead of computed again.

Blocks are named by our own chain over token ids (`core.keys`), so that any program with the same model finds
them. Importing this loads neither torch nor transformers; using it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtcd.client import BlockHead, BlockResult, Client
from kvtcd.client.weights import weights_digest
from kvtcd.core.errors import BadIdentity, BadRequest, BlockMismatch
from kvtcd.core.identity import Identity
from kvtcd.core.keys import ChainBlock, EngineKey, chain
from kvtcd.core.layout import Dtype
from kvtcd.integrations.namespaces import register
from kvtcd.integrations.transformers_identity import HASH_SCHEME, identity_of

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What became of a cache.

    Attributes:
        tokens: tokens of the cache.
        found: leading tokens that were stored already, and were not sent.
        results: what became of each block that was sent.
    """

    tokens: int
    found: int
    results: tuple[BlockResult, ...]

    @property
    def complete(self) -> bool:
        """Whether all of the cache is stored now."""
        return all(result.outcome != "dropped" for result in self.results)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A cache of the first `tokens` tokens, empty if nothing was stored."""

    cache: DynamicCache
    tokens: int


class PrefixCache:
    """Saves and loads the caches of one model.

    Args:
        client: of the daemon that keeps the blocks.
        model_or_identity: a model that was loaded from a folder, or the identity of its caches. A model with
            adapters, or with weights that no folder holds, needs an identity.
        block_tokens: tokens of a block, for a model; an identity says it itself.
        salt: parts these blocks from others of the same user.

    Raises:
        UnsupportedCache: the model has a layer that does not keep its whole past.
        UnsupportedRope: its keys are rotated in a way that cannot be undone.
        BadIdentity: the identity is not one of such caches.
        Unavailable: no daemon, or no weight files in the model's folder.

    Example:
        Read a long document once, and answer from then on without reading it::

            prefixes = PrefixCache(Client(), model)
            known = prefixes.load(ids)
            output = model.generate(torch.tensor([ids]), cache=known.cache)
            prefixes.save(known.cache, output[0])
    """

    def __init__(
        self,
        client: Client,
        model_or_identity: PreTrainedModel | Identity,
        *,
        block_tokens: int = 256,
        salt: bytes = b"",
    ) -> None:
        self.identity = (
            model_or_identity
            if isinstance(model_or_identity, Identity)
            else _identity_of_model(model_or_identity, block_tokens)
        )
        _require_ours(self.identity)
        self.namespace = register(client, self.identity)
        self._client, self._salt = client, salt

    def save(
        self,
        cache: DynamicCache,
        token_ids: Sequence[int] | torch.Tensor,
        *,
        durable: bool = False,
        deadline: float | None = None,
    ) -> SaveReport:
        """Store a cache: full blocks, and the last one even if it is partial. Only what is missing is sent.

        Args:
            cache: filled by a forward pass over one sequence; its tensors are only read.
            token_ids: the tokens that were read, at least as many as the cache holds: ``generate`` returns
                one more, which it has not read.
            durable: return only once all is on disk.
            deadline: seconds for the daemon.

        Raises:
            UnsupportedCache: a layer does not keep its whole past.
            BlockMismatch: the cache has another shape or dtype than the model of this namespace.
            Busy: the daemon has no room for now.
        """
        from kvtcd.integrations.transformers_blocks import require_full_attention  # noqa: PLC0415 - loads torch

        require_full_attention(cache)
        held = cache.get_seq_length()
        tokens = _tokens(token_ids)
        if len(tokens) < held:
            raise BlockMismatch("tokens", f"at least the {held} of the cache", len(tokens))
        links = list(chain(self.identity.digest, tokens[:held], self.identity.block_tokens))
        stored = self._client.match_tokens(self.namespace, tokens[:held], salt=self._salt).prefix
        known = {block.key for block in stored}
        missing = [link for link in links if link.key not in known]
        # A stored block that is none of these is a partial one that begins like the first one missing.
        shorter = next((b.key for b in stored if b.key not in {link.key for link in links}), None)
        results = self._client.put_many(
            self.namespace,
            self._blocks(cache, missing, shorter),
            durable=durable,
            salt=self._salt,
            deadline=deadline,
        )
        return SaveReport(held, sum(link.tokens for link in links if link.key in known), results)

    def load(
        self,
        token_ids: Sequence[int] | torch.Tensor,
        *,
        device: torch.device | str = "cpu",
        deadline: float | None = None,
    ) -> LoadReport:
        """Return the cache of the longest stored prefix of a sequence, the partial last block included.

        It leaves at least the last token out, since a model needs one to go on from.

        Args:
            token_ids: the sequence that the model is about to read.
            device: where the model is.
            deadline: seconds for the daemon; what comes later counts as not stored.
        """
        import torch  # noqa: PLC0415 - takes seconds
        from transformers import DynamicCache  # noqa: PLC0415 - takes seconds

        from kvtcd.integrations.transformers_blocks import cache_from_raw  # noqa: PLC0415 - loads torch

        tokens, layout = _tokens(token_ids), self.identity.layout
        found = self._client.match_tokens(self.namespace, tokens, salt=self._salt).prefix
        blocks: list[torch.Tensor] = []
        keys = [block.key for block in found]
        for _, data in self._client.get_many(self.namespace, keys, salt=self._salt, deadline=deadline):
            if data is None:
                break
            blocks.append(torch.frombuffer(data, dtype=torch.uint8).to(device))
        count = sum(block.numel() for block in blocks) // layout.token_bytes
        if min(count, len(tokens) - 1) < 1:
            return LoadReport(DynamicCache(), 0)
        cache = cache_from_raw(blocks, layout)
        if count == len(tokens):
            cache.crop(-1)
            count -= 1
        return LoadReport(cache, count)

    def _blocks(
        self, cache: DynamicCache, links: Sequence[ChainBlock], shorter: EngineKey | None
    ) -> Iterator[tuple[BlockHead, memoryview]]:
        from kvtcd.integrations.transformers_blocks import raw_block  # noqa: PLC0415 - loads torch

        for number, link in enumerate(links):
            head = BlockHead(link.key, link.tokens, link.first, link.parent, None if number else shorter)
            raw = raw_block(cache, link.first, link.first + link.tokens, self.identity.layout)
            yield head, raw.cpu().numpy().data


def _tokens(token_ids: Sequence[int] | torch.Tensor) -> list[int]:
    """Return the tokens of one sequence, from a list or a tensor of shape ``[T]`` or ``[1, T]``."""
    tokens: Any = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    if tokens and isinstance(tokens[0], list):
        if len(tokens) != 1:
            raise BadRequest("token_ids", f"a batch of {len(tokens)} sequences; save and load one at a time")
        tokens = tokens[0]
    return list(tokens)


def _identity_of_model(model: PreTrainedModel, block_tokens: int) -> Identity:
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
    return identity_of(
        model.config,
        weights=weights_digest(folder),
        model=folder.name,
        dtype=dtype,
        block_tokens=block_tokens,
    )


def _require_ours(identity: Identity) -> None:
    """Refuse an identity under which other programs keep other bytes or other keys."""
    for field, want in (
        ("hash_scheme", HASH_SCHEME),
        ("page_format", "canonical"),
        ("parallel", "canonical"),
        ("scales", "none"),
    ):
        if getattr(identity, field) != want:
            raise BadIdentity(field, f"is {getattr(identity, field)!r}; caches of transformers need {want!r}")
