from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.engine.stats import EngineStats
from tests.server.conftest import MODEL, Api
from tests.server.fake_engine import FakeEngineClient


def samples(api: Api) -> dict[str, float]:
    """Return each sample by its name and its labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(api.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("gptserve_"):
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


@pytest.mark.parametrize("stream", [True, False])
def test_a_completion_is_counted_and_timed(api: Api, stream: bool) -> None:
    api.complete(prompt=["a", "b"], max_tokens=3, stream=stream)
    api.complete(prompt="a", max_tokens=3, stop="b", stream=stream)
    found = samples(api)
    assert found["gptserve_request_success_total|length"] == 2
    assert found["gptserve_request_success_total|stop"] == 1
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
    assert not any("admission_rejections_total" in name for name in samples(api)), "a bad request is no rejection"
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
