"""Read documents behind caches that kvpress has thinned out; a script for the interpreter that has kvpress.

``python worker.py JOB.json``; the job (`Job`) names a model folder, methods, and documents. Of each document
the logits of what follows the context, float32 ``[tokens, vocabulary]``, are written to
``OUT/NUMBER.safetensors`` by method, and as ``whole`` behind the cache as it was; then its number to standard
output.

The context is read, and tokens of it are dropped, before the model sees what follows ("query-agnostic"): a
method that knows the question keeps what answers it, and is then no cache for any other question. The first
tokens and the last ones are kept by all methods, as codecs keep them exact. All runs, that behind the whole
cache too, use attention that shows its weights (`eager`), as H2O needs them; another kernel rounds otherwise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kvpress import BasePress, ObservedAttentionPress, TOVAPress
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

SCORES = {"h2o": ObservedAttentionPress, "tova": TOVAPress}
"""By method, what scores tokens. H2O as kvpress has it, by KV head: the attention that a token got, over the
queries that could see it; the paper's sum favours the oldest. TOVA: the attention of the last query, its mean
over heads, so that all heads of a layer keep the same tokens."""


class Job(NamedTuple):
    """What there is to do, as JSON has it.

    Attributes:
        model: folder.
        threads: of torch.
        methods: by name, the method of `SCORES` and the tokens it keeps between first and last ones.
        first, last: tokens that are kept in any case.
        context: tokens of a document that are its context.
        documents: token ids.
        out: folder for logits.
    """

    model: str
    threads: int
    methods: dict[str, tuple[str, int]]
    first: int
    last: int
    context: int
    documents: list[list[int]]
    out: str


class Thinning(BasePress):  # type: ignore[misc]  # kvpress has no types
    """While a context is read, make of each layer what every method keeps; the whole stays with the model.

    Methods drop tokens when all attention of a layer has been computed, so one reading serves them all.

    Args:
        methods, first, last: see `Job`.

    Attributes:
        caches: by method, of the context read last.
    """

    def __init__(self, methods: dict[str, tuple[str, int]], first: int, last: int) -> None:
        self._methods, self._first, self._last = methods, first, last
        self._scored = {method: SCORES[method]() for method, _ in methods.values()}
        self.caches: dict[str, DynamicCache] = {}

    def compress(  # noqa: PLR0917 - kvpress calls it so
        self,
        module: nn.Module,
        hidden: Tensor,
        keys: Tensor,
        values: Tensor,
        weights: Tensor,
        extra: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[1, H, T, D]`` of a layer as they are."""
        scores = {}
        for method, scored in self._scored.items():
            found = scored.score(module, hidden, keys, values, weights, extra).to(torch.float32)
            found[..., : self._first] = torch.inf
            found[..., found.shape[-1] - self._last :] = torch.inf
            scores[method] = found
        layer = int(module.layer_idx)  # type: ignore[arg-type]  # an attribute of attention modules
        for name, (method, kept) in self._methods.items():
            best = scores[method].topk(self._first + kept + self._last, dim=-1).indices.sort(dim=-1).values
            at = best[..., None].expand(-1, -1, -1, keys.shape[-1])
            self.caches[name].update(keys.gather(2, at), values.gather(2, at), layer)
        return keys, values

    def read(self, model: Any, tokens: list[int], context: int) -> dict[str, Tensor]:  # noqa: ANN401 - of an older transformers
        """Return float32 logits ``[tokens, vocabulary]`` of what follows the context, by method."""
        ids = torch.tensor([tokens])
        whole = DynamicCache()
        self.caches = {name: DynamicCache() for name in self._methods}
        with torch.no_grad(), self(model):
            model(ids[:, :context], past_key_values=whole, logits_to_keep=1)
        positions = torch.arange(context, len(tokens))[None]
        found = {}
        for name, cache in {"whole": whole, **self.caches}.items():
            with torch.no_grad():
                logits = model(ids[:, context:], past_key_values=cache, position_ids=positions).logits
            found[name] = logits[0].to(torch.float32).contiguous()
        return found


def main(path: str) -> None:
    """Do a job."""
    job = Job(**json.loads(Path(path).read_text("utf-8")))
    torch.set_num_threads(job.threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # not annotated there
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, dtype="bfloat16", attn_implementation="eager", local_files_only=True, use_safetensors=True
    )
    model.eval()
    thinning = Thinning(job.methods, job.first, job.last)
    for number, tokens in enumerate(job.documents):
        logits = thinning.read(model, tokens, job.context)
        save_file(logits, Path(job.out, f"{number}.safetensors"))
        print(number, flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main(sys.argv[1])
