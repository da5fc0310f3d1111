"""A prefix cache for transformers: what a model has read once is fetched instead of computed again.

Blocks are named by our own chain over token ids (`core.keys`), so that any program with the same model finds
them. Importing this loads neither torch nor transformers; using it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvtcd.client import BlockHead, Client
from kvtcd.client.call import Salt
from kvtcd.core.errors import BadRequest, BlockMismatch, KvtcdError
from kvtcd.core.identity import Identity
from kvtcd.core.keys import ChainBlock, EngineKey, chain
from kvtcd.integrations.transformers_daemon import Daemon
from kvtcd.integrations.transformers_identity import require_ours
from kvtcd.integrations.transformers_release import require_release
from kvtcd.integrations.transformers_reports import LoadBatchReport, LoadReport, SaveReport
from kvtcd.integrations.transformers_sequences import one_each, tokens_of

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

    from kvtcd.integrations.transformers_weights import WeightsWatch


class PrefixCache:
    """Saves and loads the caches of one model.

    Every method takes a `salt` of its own, for servers of several users, and a `deadline`, seconds for the
    daemon. While that fails nothing is found or stored, as reports say; it is found again by itself.

    Args:
        client: of the daemon that keeps the blocks.
        model_or_identity: a model that was loaded from a folder, or the identity of its caches. A model with
            adapters, or with weights that no folder holds, needs an identity.
        block_tokens: tokens of a block, for a model; an identity says it itself.
        variant: names weights that are not those of the files: quantised when loaded, or changed since.
        salt: parts these blocks from others of the same user.
        deadline: seconds for the daemon to register the namespace; it may have to read a large profile.

    Raises:
        UnsupportedCache: the model has a layer that does not keep its whole past.
        UnsupportedRope: its keys are rotated in a way that cannot be undone.
        BadIdentity: it is not one of such caches, or the weights are not those of the files, or not any more.
        IdentityConflict: the daemon has others under its name.
        Unavailable: no weight files in the model's folder, or transformers is too old.

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
        variant: str = "",
        salt: Salt = "",
        deadline: float | None = None,
    ) -> None:
        require_release()
        self._weights: WeightsWatch | None = None
        if isinstance(model_or_identity, Identity):
            if variant:
                raise BadRequest("variant", "is for a model; an identity says by its weights whose it is")
            self.identity = model_or_identity
        else:
            from kvtcd.integrations import transformers_weights as loaded  # noqa: PLC0415 - loads torch

            self._weights = loaded.WeightsWatch(model_or_identity)
            self.identity = loaded.identity_of_model(model_or_identity, block_tokens, variant)
        require_ours(self.identity)
        self._daemon, self._salt = Daemon(client, self.identity, deadline=deadline), salt

    @property
    def namespace(self) -> str:
        """Name of the namespace in the daemon.

        Raises:
            Unavailable: the daemon is away, and was so when this was made.
        """
        return self._daemon.name()

    @property
    def failure(self) -> KvtcdError | None:
        """What the daemon failed with when it was asked last, None if it answered."""
        return self._daemon.failure

    @property
    def failures(self) -> int:
        """How often it did not answer so far."""
        return self._daemon.failures

    def save(
        self,
        cache: DynamicCache,
        token_ids: Sequence[int] | torch.Tensor,
        *,
        partial: bool = True,
        durable: bool = False,
        salt: Salt | None = None,
        deadline: float | None = None,
    ) -> SaveReport:
        """Store a cache: full blocks, and the last one even if it is partial. Only what is missing is sent.

        Args:
            cache: filled by a forward pass over one sequence; its tensors are only read.
            token_ids: the tokens that were read, at least as many as the cache holds: ``generate`` returns
                one more, which it has not read.
            partial: whether a partial last block is stored; it is of use only to who goes on from there.
            durable: return only once all is on disk.
            salt: see the class.
            deadline: see the class.

        Raises:
            UnsupportedCache: a layer does not keep its whole past.
            BlockMismatch: the cache has another shape or dtype than the model of this namespace.
        """
        from kvtcd.integrations.transformers_blocks import require_full_attention  # noqa: PLC0415 - loads torch

        require_full_attention(cache)
        held, tokens = cache.get_seq_length(), tokens_of(token_ids)
        if len(tokens) < held:
            raise BlockMismatch("tokens", f"at least the {held} of the cache", len(tokens))
        whole = held if partial else held - held % self.identity.block_tokens
        return self._store(cache, tokens[:whole], durable=durable, salt=salt, deadline=deadline)

    def load(
        self,
        token_ids: Sequence[int] | torch.Tensor,
        *,
        device: torch.device | str = "cpu",
        salt: Salt | None = None,
        deadline: float | None = None,
    ) -> LoadReport:
        """Return the cache of the longest stored prefix of a sequence, the partial last block included.

        It leaves at least the last token out, since a model needs one to go on from.

        Args:
            token_ids: the sequence that the model is about to read.
            device: where the model is.
            salt: see the class.
            deadline: see the class; what comes later counts as not stored.
        """
        import torch  # noqa: PLC0415 - takes seconds
        from transformers import DynamicCache  # noqa: PLC0415 - takes seconds

        from kvtcd.integrations.transformers_blocks import cache_from_raw  # noqa: PLC0415 - loads torch

        tokens, layout, salt = (
            tokens_of(token_ids),
            self.identity.layout,
            self._salt if salt is None else salt,
        )
        client = self._asked()

        def fetched(name: str) -> list[torch.Tensor]:
            blocks: list[torch.Tensor] = []
            found = client.match_tokens(name, tokens, salt=salt, deadline=deadline).prefix
            keys = [block.key for block in found]
            for _, data in client.get_many(name, keys, salt=salt, deadline=deadline):
                if data is None:
                    break
                blocks.append(torch.frombuffer(data, dtype=torch.uint8).to(device))
            return blocks

        blocks = self._daemon.ask(fetched)
        if isinstance(blocks, KvtcdError):
            return LoadReport(DynamicCache(), 0, blocks)
        count = sum(block.numel() for block in blocks) // layout.token_bytes
        if min(count, len(tokens) - 1) < 1:
            return LoadReport(DynamicCache(), 0)
        cache = cache_from_raw(blocks, layout)
        if count == len(tokens):
            cache.crop(-1)
            count -= 1
        return LoadReport(cache, count)

    def load_batch(
        self,
        sequences: Sequence[Sequence[int] | torch.Tensor],
        *,
        pad: int,
        device: torch.device | str = "cpu",
        salts: Sequence[Salt] | None = None,
        deadline: float | None = None,
    ) -> LoadBatchReport:
        """Return several sequences as a batch for `generate`, with the longest stored prefix of each.

        The mask goes to `save_batch` again.

        Args:
            sequences: what the model is about to read, of any lengths and without padding.
            pad: token id for slots without a token, which the mask hides.
            device: where the model is.
            salts: one for each sequence.
            deadline: see the class; for each sequence.
        """
        from kvtcd.integrations.transformers_batches import padded, stacked  # noqa: PLC0415 - loads torch

        if not sequences:
            raise BadRequest("sequences", "there is none")
        tokens = [tokens_of(sequence) for sequence in sequences]
        known = [
            self.load(ids, device=device, salt=salt, deadline=deadline)
            for ids, salt in zip(tokens, one_each(salts, len(tokens)), strict=True)
        ]
        counts = tuple(report.tokens for report in known)
        ids, mask = padded(tokens, counts, pad)
        cache = stacked([report.cache for report in known], self.identity.layout)
        failure = next((report.failure for report in known if report.failure), None)
        return LoadBatchReport(ids.to(device), mask.to(device), cache, counts, failure)

    def save_batch(
        self,
        cache: DynamicCache,
        token_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        *,
        durable: bool = False,
        salts: Sequence[Salt] | None = None,
        deadline: float | None = None,
    ) -> tuple[SaveReport, ...]:
        """Store each sequence of a padded batch; see `save`.

        Padding may be on the left, on the right or in between, but positions must have counted tokens alone:
        `generate` sees to that, a bare forward pass with padding on the left needs ``position_ids``.

        Args:
            cache: of the batch.
            token_ids: ``[B, W]``, at least as many slots as the cache has.
            attention_mask: ``[B, V]``, 0 where a slot holds no token; slots behind its end hold one.
            durable: return only once all is on disk.
            salts: one for each sequence.
            deadline: see the class; for each sequence.

        Raises:
            UnsupportedCache, BlockMismatch: see `save`; or tokens or mask are of another batch.
        """
        from kvtcd.integrations.transformers_batches import rows  # noqa: PLC0415 - loads torch

        parts = list(rows(cache, token_ids, attention_mask))
        return tuple(
            self._store(part, ids, durable=durable, salt=salt, deadline=deadline)
            for (part, ids), salt in zip(parts, one_each(salts, len(parts)), strict=True)
        )

    def _asked(self) -> Client:
        if self._weights:
            self._weights.require_same()
        return self._daemon.client

    def _store(
        self,
        cache: DynamicCache,
        tokens: Sequence[int],
        *,
        durable: bool,
        salt: Salt | None,
        deadline: float | None,
    ) -> SaveReport:
        """Store the first tokens of a cache, which has at least as many."""
        salt, client = self._salt if salt is None else salt, self._asked()
        links = list(chain(self.identity.digest, tokens, self.identity.block_tokens))

        def stored(name: str) -> SaveReport:
            matches = client.match_tokens(name, tokens, salt=salt, deadline=deadline)
            known = {block.key for block in matches.prefix}
            missing = [link for link in links if link.key not in known]
            # A stored block that is none of these is a partial one that begins like the first one missing.
            shorter = next((b.key for b in matches.prefix if b.key not in {link.key for link in links}), None)
            blocks = self._blocks(cache, missing, shorter)
            results = client.put_many(name, blocks, durable=durable, salt=salt, deadline=deadline)
            return SaveReport(len(tokens), sum(link.tokens for link in links if link.key in known), results)

        report = self._daemon.ask(stored)
        return SaveReport(len(tokens), 0, (), report) if isinstance(report, KvtcdError) else report

    def _blocks(
        self, cache: DynamicCache, links: Sequence[ChainBlock], shorter: EngineKey | None
    ) -> Iterator[tuple[BlockHead, memoryview]]:
        from kvtcd.integrations.transformers_blocks import raw_block  # noqa: PLC0415 - loads torch

        for number, link in enumerate(links):
            head = BlockHead(link.key, link.tokens, link.first, link.parent, None if number else shorter)
            raw = raw_block(cache, link.first, link.first + link.tokens, self.identity.layout)
            yield head, raw.cpu().numpy().data
