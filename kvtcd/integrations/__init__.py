"""Where engines meet kvtcd: each module speaks one engine's own interface.

`transformers_*` is for programs that call a model themselves. `vllm_*` is for vLLM: `vllm_tier` and
`vllm_connector` have its interfaces and nothing else, `vllm_threads` and `vllm_daemon` talk to the daemon,
`vllm_staging`, `vllm_worker` and `vllm_paged` touch tensors, `vllm_kernels`, `vllm_metrics` and
`vllm_prometheus` speak with vLLM, and all others are values and decisions, tested without it. `lmcache_*` is
LMCache's L2 adapter, in the same order: `lmcache_l2`, `lmcache_daemon`, and values and decisions. `sglang_*`
is SGLang's HiCache storage: `sglang_hicache` has its interface, `sglang_pools` and `sglang_store` talk to the
daemon, `sglang_pages` and `sglang_identity` know what its pools hold. `llamacpp_*` moves slots of llama.cpp's
server: `llamacpp_slots` between `llamacpp_server` and the daemon, while `llamacpp_file` and `llamacpp_blocks`
know what lies where.

What they share: the daemon that may be away (`link`), threads (`lanes`), names of identities (`namespaces`),
files of models (`model_files`), layouts of bytes that nobody knows (`opaque`).
"""
