"""The metrics that vLLM has too, under vLLM's names, for gateways and routers that look for fixed names.

`metrics.py` adds them with `--metrics-prefix vllm`. Sources of the names: the model server protocol of the Gateway API
inference extension, which llm-d and KServe follow; pkg/metrics/metrics.go of AIBrix; stats/engine_stats.py of vLLM's
production-stack, which still reads the names of vLLM 0.8. There are no adapters, so no vllm:lora_requests_info.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

OWN_PREFIX, VLLM_PREFIX = "gptserve_", "vllm:"
# The name after the prefix, and vLLM's where that is another or there are several.
_SAME = (
    *("num_requests_running", "num_requests_waiting", "cache_config_info", "num_preemptions", "request_success"),
    *("prompt_tokens", "generation_tokens", "request_prompt_tokens", "request_generation_tokens"),
    *("iteration_tokens_total", "time_to_first_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
_SEVERAL = {
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
}
STEMS = {**{stem: (stem,) for stem in _SAME}, **_SEVERAL}


def vllm_families(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield the families that vLLM has, once for each of its names, with the same labels and values."""
    for family in families:
        for stem in STEMS.get(family.name.removeprefix(OWN_PREFIX), ()):
            yield _renamed(family, VLLM_PREFIX + stem)


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [Sample(name + sample.name.removeprefix(family.name), *sample[1:]) for sample in family.samples]
    return renamed
