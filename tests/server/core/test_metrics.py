from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import gptserve
from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.engine.stats import EngineStats
from tests.server.conftest import MODEL, Api
from tests.server.fake_engine import FakeEngineClient


def samples(api: Api) -> dict[str, float]:
    """Return each sample by its name and its labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(api.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("gptserve_") and "_process_" not in sample.name:
                labels = {**sample.labels}
                assert labels.pop("model_name") == MODEL
                found[sample.name + "".join(f"|{value}" for value in labels.values())] = sample.value
    return found


def test_the_engines_counters_are_shown(api: Api) -> None:
    api.engine.stats = EngineStats(
        num_running=3,
        num_waiting=4,
        num_used_blocks=16,
        num_cached_blocks=2,
        num_steps=99,
        num_computed_tokens=1000,
        num_steps_by_tokens=(90, 0, 9, *(0,) * 10),
        num_prompt_tokens=10,
        num_generated_tokens=20,
        num_prefix_queried_tokens=30,
        num_prefix_hit_tokens=15,
        num_preemptions=1,
        num_draft_tokens=50,
        num_accepted_tokens=40,
    )
    found = samples(api)
    assert {name: found[f"gptserve_{name}"] for name in ("num_requests_running", "num_requests_waiting")} == {
        "num_requests_running": 3,
        "num_requests_waiting": 4,
    }
    assert found["gptserve_kv_cache_usage_perc"] == 16 / 64
    assert found["gptserve_prompt_tokens_total"] == 10
    name = "gptserve_iteration_tokens_total"
    assert [found[f"{name}_{part}"] for part in ("bucket|1.0", "bucket|8.0", "bucket|16.0", "bucket|+Inf")] == [
        *(90, 90, 99, 99)
    ]
    assert (found[f"{name}_count"], found[f"{name}_sum"]) == (99, 1000)
    assert found["gptserve_generation_tokens_total"] == 20
    assert found["gptserve_prefix_cache_queries_total"] == 30
    assert found["gptserve_prefix_cache_hits_total"] == 15
    assert found["gptserve_num_preemptions_total"] == 1
    assert found["gptserve_spec_decode_num_draft_tokens_total"] == 50
    assert found["gptserve_spec_decode_num_accepted_tokens_total"] == 40


def test_engines_that_were_replaced_are_counted_by_the_kind_of_their_death(api: Api) -> None:
    api.engine.restarts = {"killed": 2}
    found = samples(api)
    kinds = ("killed", "exited", "raised", "stalled", "load")
    assert [found[f"gptserve_engine_restarts_total|{kind}"] for kind in kinds] == [2, 0, 0, 0, 0]


def test_counters_with_labels_are_there_from_the_start(api: Api) -> None:
    found = samples(api)
    reasons = ("stop", "length", "abort", "error", "timeout")
    assert [found[f"gptserve_request_success_total|{reason}"] for reason in reasons] == [0] * 5
    answers = {name for name in found if name.startswith("gptserve_http_requests_total")}
    for expected in ("/v1/completions|POST|200", "/v1/completions/{id}|GET|404", "/health|GET|503"):
        assert f"gptserve_http_requests_total|{expected}" in answers


def test_requests_are_counted_by_the_template_of_their_route(api: Api) -> None:
    for completion_id in "ab":
        api.get(f"/v1/completions/{completion_id}")
        api.get(f"/nowhere/{completion_id}")
    api.request("HEAD", "/health")
    api.request("PATCH", "/health")
    api.request("PATCH", "/nowhere")
    api.request("DELETE", "/v1/responses/a")
    counted = {name.partition("|")[2]: value for name, value in samples(api).items() if "http_requests_total" in name}
    assert {name: value for name, value in counted.items() if value} == {
        "/v1/completions/{id}|GET|404": 2,
        "none|GET|404": 2,
        "none|other|404": 1,
        "/v1/responses/{id}|DELETE|404": 1,
        "/health|HEAD|200": 1,
        "/health|other|405": 1,
    }


def test_engine_and_build_are_described(api: Api) -> None:
    found = samples(api)
    assert found["gptserve_cache_config_info|16|float32|1048576|64"] == 1
    [build] = [name for name in found if name.startswith("gptserve_build_info|")]
    assert {"reference", "torch", "cpu", "float32", "fake-1", gptserve.__version__} < set(build.split("|"))
    text = api.get("/metrics").text
    assert re.search(r"^gptserve_engine_process_resident_memory_bytes [\d.e+]+$", text, re.MULTILINE)


def test_the_waits_of_a_choice_come_from_the_engine(make_api: Callable[..., Api]) -> None:
    def reply(request: Request) -> Iterator[TokenOutput]:
        yield TokenOutput(request.request_id, (97,), waits=(2.0, 3.0))
        yield TokenOutput(request.request_id, (98,), finish_reason=FinishReason.LENGTH)

    api = make_api(FakeEngineClient(reply))
    api.complete(prompt=["a", "b"], max_tokens=2)
    found = samples(api)
    assert found["gptserve_request_queue_time_seconds_sum"] == 4
    assert found["gptserve_request_prefill_time_seconds_sum"] == 6
    assert found["gptserve_request_inference_time_seconds_sum"] >= 6
    assert found["gptserve_request_decode_time_seconds_count"] == 2


@pytest.mark.parametrize("kept", [True, False])
def test_the_journal_is_measured(make_api: Callable[..., Api], tmp_path: Path, kept: bool) -> None:
    api = make_api(FakeEngineClient(), state_dir=tmp_path if kept else None)
    before = samples(api)
    api.complete(prompt="a", background=True)
    found = samples(api)
    assert found["gptserve_journal_write_seconds_count"] > before["gptserve_journal_write_seconds_count"]
    assert (found["gptserve_journal_bytes"] > 0) == kept


@pytest.mark.parametrize("stream", [True, False])
def test_a_completion_is_counted_and_timed(api: Api, stream: bool) -> None:
    api.complete(prompt=["a", "b"], max_tokens=3, stream=stream)
    api.complete(prompt="a", max_tokens=3, stop="b", stream=stream)
    found = samples(api)
    assert found["gptserve_request_success_total|length"] == 2
    assert found["gptserve_request_success_total|stop"] == 1
    assert found["gptserve_request_prompt_tokens_sum"] == 3
    assert found["gptserve_request_generation_tokens_sum"] == 2 * 3 + 2
    assert found["gptserve_time_to_first_token_seconds_count"] == 2
    assert found["gptserve_inter_token_latency_seconds_count"] == 2 * 2 + 1
    assert found["gptserve_e2e_request_latency_seconds_count"] == 2
    assert found["gptserve_e2e_request_latency_seconds_sum"] > 0


def test_tokens_that_come_at_once_are_timed_each(make_api: Callable[..., Api]) -> None:
    def reply(request: Request) -> Iterator[TokenOutput]:
        yield TokenOutput(request.request_id, (97, 98, 99))
        yield TokenOutput(request.request_id, (97, 98), finish_reason=FinishReason.LENGTH)

    api = make_api(FakeEngineClient(reply))
    api.complete(prompt="a", max_tokens=5)
    assert samples(api)["gptserve_inter_token_latency_seconds_count"] == 4


def test_rejections_are_counted_by_reason(api: Api) -> None:
    api.complete(prompt="a", temperature=-1)
    rejections = {name: value for name, value in samples(api).items() if "admission_rejections_total" in name}
    assert len(rejections) > 5, "each code is there from the start"
    assert not any(rejections.values()), "a bad request is no rejection"
    api.engine.max_requests = 0
    api.complete(prompt="a")
    api.app.state.lifecycle.drain()
    api.complete(prompt="a")
    api.get("/ready")
    found = samples(api)
    assert found["gptserve_admission_rejections_total|queue_full"] == 1
    assert found["gptserve_admission_rejections_total|draining"] == 1


def test_each_application_has_metrics_of_its_own(make_api: Callable[..., Api]) -> None:
    first, second = make_api(FakeEngineClient()), make_api(FakeEngineClient())
    first.complete(prompt="a")
    assert samples(first)["gptserve_e2e_request_latency_seconds_count"] == 1
    assert samples(second)["gptserve_e2e_request_latency_seconds_count"] == 0


def test_metrics_answer_without_an_engine(api: Api) -> None:
    api.engine.die()
    assert samples(api)["gptserve_kv_cache_usage_perc"] == 0
