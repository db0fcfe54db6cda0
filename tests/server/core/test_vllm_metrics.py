"""Gateways find the metrics that they look for by name, with the labels that they read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gptserve.server.core.vllm_metrics import OWN_PREFIX, STEMS
from tests.server.conftest import MODEL, Api
from tests.server.fake_engine import FakeEngineClient

# What each reads, by the name of the sample.
READ = {
    "llm-d and KServe": (
        *("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
        "vllm:cache_config_info",
    ),
    "AIBrix": (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:gpu_cache_usage_perc", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        *("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
        *("vllm:time_per_output_token_seconds_bucket", "vllm:e2e_request_latency_seconds_sum"),
        *("vllm:request_queue_time_seconds_count", "vllm:request_inference_time_seconds_count"),
        *("vllm:request_decode_time_seconds_count", "vllm:request_prefill_time_seconds_count"),
        *("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:num_preemptions_total"),
        *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
        "vllm:iteration_tokens_total_bucket",
    ),
    "production-stack": (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc"),
        *("vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total"),
    ),
}


def scraped(api: Api) -> list[Metric]:
    return list(text_string_to_metric_families(api.get("/metrics").text))


@pytest.mark.parametrize("gateway", READ)
def test_a_gateway_finds_its_names_with_the_models(gateway: str, make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), metrics_prefix="vllm")
    api.complete(prompt="a", max_tokens=3)
    samples = {sample.name: sample for family in scraped(api) for sample in family.samples}

    assert {name: samples[name].labels["model_name"] for name in READ[gateway]} == dict.fromkeys(READ[gateway], MODEL)


def test_the_blocks_of_the_cache_are_labels(make_api: Callable[..., Api]) -> None:
    families = scraped(make_api(FakeEngineClient(), metrics_prefix="vllm"))
    [info] = [family for family in families if family.name == "vllm:cache_config_info"]
    [sample] = info.samples

    assert (info.type, sample.labels["block_size"], sample.labels["num_gpu_blocks"]) == ("gauge", "16", "64")


def test_a_metric_has_one_value_and_one_type_under_all_its_names(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), metrics_prefix="vllm")
    api.complete(prompt="a", max_tokens=3)
    families = {family.name: family for family in scraped(api)}

    for stem, names in STEMS.items():
        own = families[OWN_PREFIX + stem]
        for name in names:
            other = families[f"vllm:{name}"]
            assert other.type == own.type
            assert [sample[1:] for sample in other.samples] == [sample[1:] for sample in own.samples]
    assert len(families) == len({*families}), "no name comes twice"


def test_without_the_prefix_there_is_none_of_vllms_names(api: Api) -> None:
    assert "vllm:" not in api.get("/metrics").text
