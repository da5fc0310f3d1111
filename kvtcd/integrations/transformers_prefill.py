"""A long prompt read in passes, each stored as it ends.

Importing this loads neither torch nor transformers; using it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtcd.client import BlockResult
from kvtcd.client.call import Salt
from kvtcd.core.errors import BadRequest, KvtcdError
from kvtcd.integrations.transformers_cache import PrefixCache
from kvtcd.integrations.transformers_release import require_release

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """A cache of all tokens but the last.

    Attributes:
        cache: what `generate` goes on from.
        tokens: leading tokens that were fetched; the others were computed.
        results: what became of each block that was sent.
        failure: what the daemon failed with, if it did; from then on nothing was asked of it.
    """

    cache: DynamicCache
    tokens: int
    results: tuple[BlockResult, ...]
    failure: KvtcdError | None


def prefill(
    prefixes: PrefixCache | None,
    model: PreTrainedModel,
    token_ids: Sequence[int],
    *,
    step: int = 2048,
    durable: bool = False,
    salt: Salt | None = None,
    deadline: float | None = None,
) -> PrefillReport:
    """Let a model read all of a sequence but its last token; what is stored of it is fetched.

    The rest is computed in passes, which bounds memory, and the blocks of each are stored when it ends: who
    reads the same text meanwhile, or after a crash, finds them. A daemon that fails costs nothing but time.

    Args:
        prefixes: of this model; None: nothing is fetched and nothing stored.
        model: what reads.
        token_ids: one sequence.
        step: tokens of a pass.
        durable: have the blocks of each pass on disk before the next.
        salt: parts these blocks from others of the same user; None: that of `prefixes`.
        deadline: seconds for each call of the daemon.

    Raises:
        BadRequest: `step` is no number of tokens.
        Unavailable: transformers is too old.
        BlockMismatch: the model makes other caches than those of `prefixes`.
    """
    if type(step) is not int or step < 1:
        raise BadRequest("step", f"is {step!r}, not a number of tokens, 1 or more")
    require_release()
    import torch  # noqa: PLC0415 - takes seconds
    from transformers import DynamicCache  # noqa: PLC0415 - takes seconds

    cache, known, last = DynamicCache(), 0, len(token_ids) - 1
    results: list[BlockResult] = []
    failure: KvtcdError | None = None
    if prefixes:
        found = prefixes.load(token_ids, device=model.device, salt=salt, deadline=deadline)
        cache, known, failure = found.cache, found.tokens, found.failure
    for start in range(known, last, step):
        stop = min(start + step, last)
        with torch.no_grad():
            model(torch.tensor([token_ids[start:stop]], device=model.device), cache=cache, logits_to_keep=1)
        if prefixes and failure is None:
            saved = prefixes.save(
                cache, token_ids, partial=stop == last, durable=durable, salt=salt, deadline=deadline
            )
            results += saved.results
            failure = saved.failure
    return PrefillReport(cache, known, tuple(results), failure)
