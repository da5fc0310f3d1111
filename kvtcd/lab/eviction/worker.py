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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kvpress import ObservedAttentionPress, TOVAPress
from kvpress.presses.scorer_press import ScorerPress
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


@dataclass
class Thinned(ScorerPress):  # type: ignore[misc]  # kvpress has no types
    """Keep the first, the last and the best `kept` of the others, in their order."""

    scored: ScorerPress | None = None
    first: int = 0
    last: int = 0
    kept: int = 0

    def compress(  # noqa: PLR0917 - kvpress calls it so
        self,
        module: nn.Module,
        hidden: Tensor,
        keys: Tensor,
        values: Tensor,
        weights: Tensor,
        extra: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[1, H, kept tokens, D]`` of a layer."""
        assert self.scored is not None
        scores = self.scored.score(module, hidden, keys, values, weights, extra).to(torch.float32)
        scores[..., : self.first] = torch.inf
        scores[..., scores.shape[-1] - self.last :] = torch.inf
        best = scores.topk(self.first + self.kept + self.last, dim=-1).indices.sort(dim=-1).values[..., None]
        return tuple(x.gather(2, best.expand(-1, -1, -1, x.shape[-1])) for x in (keys, values))  # type: ignore[return-value]  # two


def read(model: Any, tokens: list[int], context: int, press: Thinned | None) -> Tensor:  # noqa: ANN401 - of an older transformers
    """Return float32 logits ``[tokens, vocabulary]`` of what follows the context."""
    ids = torch.tensor([tokens])
    cache = DynamicCache()
    with torch.no_grad():
        if press is None:
            model(ids[:, :context], past_key_values=cache, logits_to_keep=1)
        else:
            with press(model):
                model(ids[:, :context], past_key_values=cache, logits_to_keep=1)
        positions = torch.arange(context, len(tokens))[None]
        logits: Tensor = model(ids[:, context:], past_key_values=cache, position_ids=positions).logits
    return logits[0].to(torch.float32).contiguous()


def main(path: str) -> None:
    """Do a job."""
    job = Job(**json.loads(Path(path).read_text("utf-8")))
    torch.set_num_threads(job.threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # not annotated there
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, dtype="bfloat16", attn_implementation="eager", local_files_only=True, use_safetensors=True
    )
    model.eval()
    presses = {
        name: Thinned(scored=SCORES[method](), first=job.first, last=job.last, kept=kept)
        for name, (method, kept) in job.methods.items()
    }
    for number, tokens in enumerate(job.documents):
        logits = {"whole": read(model, tokens, job.context, None)}
        logits |= {name: read(model, tokens, job.context, press) for name, press in presses.items()}
        save_file(logits, Path(job.out, f"{number}.safetensors"))
        print(number, flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main(sys.argv[1])
