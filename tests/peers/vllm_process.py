"""A vLLM engine in a process of its own that does what it is told, a line of JSON at a time.

The first line on standard input describes the engine, every further one is a command; each is answered by a
line on standard output. What vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    settings = json.loads(sys.stdin.readline())
    llm = build(**settings)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        answers.write(json.dumps(COMMANDS[command.pop("do")](llm, **command)) + "\n")
    llm.llm_engine.engine_core.shutdown()


def build(model, dtype, block_size, transfer, **engine):
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": engine.pop("processes", "0"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
    }
    sys.path.insert(0, str(HERE))
    from vllm import LLM  # noqa: PLC0415 - after the environment

    return LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=dtype,
        block_size=block_size,
        max_model_len=engine.pop("max_model_len", 512),
        num_gpu_blocks_override=engine.pop("blocks", 128),
        max_num_seqs=4,
        kv_transfer_config={"kv_role": "kv_both", "kv_load_failure_policy": "recompute"} | transfer,
        disable_log_stats=False,
        hf_overrides={"architectures": ["LlamaForCausalLM"]} | engine.pop("hf_overrides", {}),
        **engine,
    )


def generate(llm, prompts, max_tokens=8, salt=None, lora=None, logprobs=None):
    from vllm import SamplingParams  # noqa: PLC0415 - takes seconds
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - takes seconds

    extra = {} if salt is None else {"cache_salt": salt}
    outputs = llm.generate(
        [{"prompt_token_ids": tokens} | extra for tokens in prompts],
        SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        ),
        lora_request=LoRARequest(**lora) if lora else None,
        use_tqdm=False,
    )
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "logprobs": [
                {str(token): entry.logprob for token, entry in step.items()}
                for step in (output.outputs[0].logprobs or [])
            ],
        }
        for output in outputs
    ]


def forget(llm):
    """Empty the engine's own cache and the primary tier, so that only the secondary tier is left."""
    return llm.reset_prefix_cache(reset_running_requests=False, reset_connector=True)


def counters(llm):
    found = {}
    for metric in llm.get_metrics():
        if "kv_offload" in metric.name or "kvtcd" in metric.name:
            label = metric.labels.get("tier") or metric.labels.get("what") or ""
            found[f"{metric.name}:{label}"] = getattr(metric, "value", None)
    return found


COMMANDS = {"generate": generate, "forget": forget, "counters": counters}

if __name__ == "__main__":
    main()
