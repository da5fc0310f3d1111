"""The whole way on a real model: read, store, restart the daemon, fetch, answer, go on.

A model reads a document. Its cache goes to a daemon, which packs it to disk and is then stopped and started
again. The cache is fetched back, and the model answers questions behind it as behind the one that it
computed itself. Then a second turn: what the first one added, generated tokens included, is reused too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import DynamicCache

from kvtcd import terminal
from kvtcd.client import Client
from kvtcd.codec.choose import codec_for
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Identity
from kvtcd.core.policy import CodecChoice
from kvtcd.integrations.transformers_cache import PrefixCache
from kvtcd.lab import evaluate, models
from kvtcd.lab.calibrate import profile_for
from kvtcd.lab.codec_source import ProfileSource
from kvtcd.lab.codec_spec import Spec, policy_text
from kvtcd.lab.daemon import Daemon
from kvtcd.lab.demo_report import Answer, Figures, SecondTurn, show
from kvtcd.lab.figures import write_json
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.phases import Phases, timed

QUESTIONS = (
    "Where is Polonia's home venue located?",
    "When was Marconi's radio demonstration?",
    "A decision made by what entity restored Tesla's patents?",
    "What year did Tesla die?",
)
"""Asked about the document that ships with kvtcd; the last one in the second turn."""
OWN_QUESTIONS = (
    "What is this text about?", "Who is it about?", "Where does it take place?", "What else does it say?",
)  # fmt: skip
ANSWER_TOKENS = 24


def command(
    *,
    model: str,
    document: Path | None,
    tokens: int | None,
    profile: Path | None,
    codec: str,
    threads: int,
    json: Path | None,
) -> None:
    """Run the demo, show a table, and write the figures if asked.

    Raises:
        ConfigError: no such codec or dial, or a document that cannot be read.
        Unavailable: the model cannot be had, or the daemon does not start.
        UnsupportedCache, UnsupportedModel: the model's cache cannot be stored by prefix.
    """
    spec = Spec.parse(codec)
    if spec.swept:
        raise ConfigError("command line", "--codec", f"{codec!r} has no dial; write for instance kvtc2:0.02")
    torch.set_num_threads(threads)
    console = terminal.console()
    with terminal.progress(console) as progress, TemporaryDirectory(prefix="kvtcd-") as folder:
        demo = Demo(models.load(models.resolve(model, progress)), Phases(progress), spec.choice())
        own = document is not None
        figures = demo.run(Path(folder), text=_text(document), tokens=tokens, own=own, profile=profile)
    show(console, figures)
    if json:
        write_json(json, "demo", asdict(figures))


def _text(document: Path | None) -> str:
    if document is None:
        return files("kvtcd.lab.texts").joinpath("reader.txt").read_text("utf-8")
    try:
        return document.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(document, "", f"cannot be read as UTF-8 text: {error}") from None


class Demo:
    """One run with one model, under a policy that says `choice`."""

    def __init__(self, loaded: LoadedModel, phases: Phases, choice: CodecChoice) -> None:
        self.loaded, self.phases, self.choice = loaded, phases, choice
        self.identity: Identity = models.identity(loaded)

    def run(self, folder: Path, *, text: str, tokens: int | None, own: bool, profile: Path | None) -> Figures:
        """Go the whole way with everything in `folder`, over the first `tokens` tokens of a text."""
        profile = profile or profile_for(self.loaded, self.phases)
        document = models.tokenize(self.loaded, text.strip() + "\n\n")[:tokens]
        *questions, follow_up = OWN_QUESTIONS if own else QUESTIONS
        self._read(DynamicCache(), document[:64])  # the first pass of a model is slower than all others
        with self.phases("reading the document"):
            (computed, _), prefill_s = timed(lambda: self._read(DynamicCache(), document))
        raw_bytes = self.identity.layout.nbytes(len(document))
        policy = folder / "policy.toml"
        policy.write_text(policy_text(self.choice))
        daemon = Daemon(
            folder, host=4 * raw_bytes + (64 << 20), disk=1 << 30, profiles=profile.parent, policy=policy
        )  # fmt: skip
        with ExitStack() as stack:
            with self.phases("starting a daemon and storing the cache on disk"):
                stack.enter_context(daemon)
                stored_bytes = self._store(daemon, computed, document)
            with self.phases("restarting the daemon"):
                daemon.stop()
                restart_s = daemon.start()
            client = stack.enter_context(daemon.client())
            prefixes = PrefixCache(client, self.identity)
            answers = []
            for number, question in enumerate(questions, start=1):
                with self.phases(f"question {number}: recomputed and reused"):
                    answers.append(self._ask(client, prefixes, computed, document, question))
            with self.phases("first token from the beginning"):
                first = [*document, *self._prompt(questions[0])]
                _, ttft_recompute_s = timed(lambda: self._read(DynamicCache(), first))
            with self.phases("second turn"):
                second = self._second_turn(prefixes, document, questions[0], follow_up)
        reuse_s = answers[0].fetch_s
        question_s = timed(lambda: self._read(deepcopy(computed), self._prompt(questions[0])))[1]
        return Figures(
            model=self.loaded.folder.name, tokens=len(document), raw_bytes=raw_bytes,
            stored_bytes=stored_bytes, ratio=raw_bytes / stored_bytes,
            ratio_codec=self._codec_ratio(computed, profile), restart_s=restart_s, prefill_s=prefill_s,
            reuse_s=reuse_s, speedup=prefill_s / reuse_s, ttft_recompute_s=ttft_recompute_s,
            ttft_reuse_s=reuse_s + question_s, kl_mean=fmean(a.kl for a in answers),
            top1_agreement=fmean(a.top1 for a in answers), answers=tuple(answers), second_turn=second,
        )  # fmt: skip

    def _store(self, daemon: Daemon, cache: DynamicCache, tokens: Sequence[int]) -> int:
        """Save a cache, have it demoted, and return the bytes it takes on disk."""
        with daemon.client() as client:
            prefixes = PrefixCache(client, self.identity)
            saved = prefixes.save(cache, tokens, durable=True)
            if saved.failure:
                raise saved.failure
            client.demote(prefixes.namespace, [result.key for result in saved.results])
            disk: int = client.stats()["tiers"]["disk"]["used"]
            return disk

    def _ask(
        self,
        client: Client,
        prefixes: PrefixCache,
        computed: DynamicCache,
        document: Sequence[int],
        question: str,
    ) -> Answer:
        prompt = self._prompt(question)
        source = client.match_tokens(prefixes.namespace, [*document, *prompt]).blocks[0].tier
        known, fetch_s = timed(lambda: prefixes.load([*document, *prompt]))
        recomputed = self._answer(deepcopy(computed), prompt)
        reused = self._answer(deepcopy(known.cache), prompt)
        said = [*prompt, *recomputed]
        quality = evaluate.quality(
            self._logits(deepcopy(computed), said), self._logits(known.cache, said), said
        )
        return Answer(
            question,
            self._words(recomputed),
            self._words(reused),
            fetch_s,
            str(source),
            quality.kl,
            quality.top1,
        )

    def _second_turn(
        self, prefixes: PrefixCache, document: Sequence[int], question: str, follow_up: str
    ) -> SecondTurn:
        """Answer, store what that added, and go on with a question about it."""
        first = [*document, *self._prompt(question)]
        cache = prefixes.load(first).cache
        held = cache.get_seq_length()
        answer = self._answer(cache, first[held:])
        turn = [*first, *answer]
        prefixes.save(cache, turn, durable=True)
        prompt = [*turn, *models.tokenize(self.loaded, "\n"), *self._prompt(follow_up)]
        known, fetch_s = timed(lambda: prefixes.load(prompt))
        generated = max(0, known.tokens - len(first))
        said = self._words(self._answer(known.cache, prompt[known.tokens :]))
        return SecondTurn(follow_up, said, len(prompt), known.tokens, generated, fetch_s)

    def _codec_ratio(self, cache: DynamicCache, profile: Path) -> float:
        """Ratio over the coded tokens alone, without sinks and window."""
        blocks, choice = evaluate.cut(cache, self.identity), self.choice
        encoder = codec_for(self.identity, choice, ProfileSource(profile, self.identity)).encoder
        return evaluate.size(self.identity.layout, blocks, evaluate.encode(encoder, blocks)).ratio

    def _prompt(self, question: str) -> list[int]:
        return models.tokenize(self.loaded, f"Question: {question}\nAnswer:")

    def _words(self, tokens: Sequence[int]) -> str:
        return str(self.loaded.tokenizer.decode(list(tokens))).strip()

    def _read(self, cache: DynamicCache, tokens: Sequence[int]) -> tuple[DynamicCache, int]:
        """Let the model read tokens behind a cache, which grows; return it and the likeliest next token."""
        with torch.inference_mode():
            out = self.loaded.model(torch.tensor([tokens]), cache=cache, logits_to_keep=1)
        return cache, int(out.logits[0, -1].argmax())

    def _logits(self, cache: DynamicCache, tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            out = self.loaded.model(torch.tensor([tokens]), cache=cache)
        logits: Tensor = out.logits[0]
        return logits.to(torch.float32)

    def _answer(self, cache: DynamicCache, prompt: Sequence[int]) -> list[int]:
        """Generate greedily to the end of the line; the cache grows by all but the last token."""
        said: list[int] = []
        token = self._read(cache, prompt)[1]
        while len(said) < ANSWER_TOKENS:
            said.append(token)
            if "\n" in self.loaded.tokenizer.decode([token]) or token == self.loaded.tokenizer.eos_token_id:
                break
            token = self._read(cache, [token])[1]
        return said
