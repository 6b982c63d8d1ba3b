"""What `/metrics` says: read back by prometheus_client's parser, and compared with its own histograms."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import stat
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.outputs import RequestMetrics
from quire.log import RequestSummary
from quire.server.engine_metrics import STATES, EngineReading
from quire.server.metrics import FINISH_REASONS, REJECTIONS, ROUTES, Metrics

DASHBOARD = Path(__file__).parent.parent / "dashboards" / "grafana.json"
ENGINE = {
    "running": 3,
    "waiting": 2,
    "num_blocks": 100,
    "block_size": 16,
    "held_blocks": 25,
    "free_blocks": 60,
    "prompt_tokens": 500,
    "cached_tokens": 200,
    "output_tokens": 70,
    "preemptions": 4,
    "steps": 90,
    "prefill_tokens": 310,
    "prefill_seconds": 1.5,
    "decode_tokens": 60,
    "decode_seconds": 2.5,
    "pid": os.getpid(),
}
SPECULATION = {"verifications": 10, "drafted": 40, "accepted": 21, "accepted_by_position": [9, 8, 4], "draft_depth": 4}
# Name, type: vLLM's, from its sources (vllm/v1/metrics/loggers.py).
VLLM_ENGINE = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:num_preemptions_total": "counter",
    "vllm:prompt_tokens_total": "counter",
    "vllm:prompt_tokens_cached_total": "counter",
    "vllm:generation_tokens_total": "counter",
}
VLLM_HTTP = {
    "vllm:request_success_total": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_num_preemptions": "histogram",
}


def text_of(metrics: Metrics, engine: Any = None, **more: Any) -> str:
    return metrics.render([EngineReading(engine, **more)])[0].decode()


def types_in(text: str) -> dict[str, str]:
    """Exposed name to type, as the `# TYPE` lines have it; each must be there once."""
    pairs = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Sample name to (labels, value)."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(text: str, name: str, **labels: str) -> float:
    """The value of the only sample with these labels, among others."""
    [found] = [v for have, v in samples(text).get(name, []) if labels.items() <= have.items()]
    return found


def finish(
    metrics: Metrics, *reasons: str, output_tokens: tuple[int, ...] = (5,), seconds: float = 1.5, decode: float = 0.0
) -> None:
    metrics.finished(
        reasons or ["stop"],
        RequestMetrics(decode_seconds=decode),
        prompt_tokens=10,
        cached_tokens=4,
        output_tokens=output_tokens,
        e2e_seconds=seconds,
        tokenize_seconds=0.0,
        max_tokens=None,
    )


def test_names_and_types_are_vllms() -> None:
    types = types_in(text_of(Metrics(model_name="m"), engine=ENGINE, state="ready"))
    assert (VLLM_ENGINE | VLLM_HTTP).items() <= types.items()


def test_every_vllm_metric_carries_model_name_and_engine() -> None:
    metrics = Metrics(model_name="demo")
    for name, found in samples(text_of(metrics, engine=ENGINE)).items():
        for labels, _ in found:
            assert not name.startswith("vllm:") or (labels["model_name"], labels["engine"]) == ("demo", "0")


def test_successful_requests_are_in_opentelemetrys_histograms_by_operation() -> None:
    gen_ai = pytest.importorskip("opentelemetry.semconv._incubating.metrics.gen_ai_metrics")
    names = gen_ai.GEN_AI_SERVER_REQUEST_DURATION, gen_ai.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN
    names = *names, gen_ai.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN
    exposed = [f"{name.replace('.', '_')}_seconds" for name in names]
    metrics = Metrics(model_name="m")
    done = RequestSummary(request_id="a", output_tokens=5, first_token_seconds=0.5, total_seconds=2.5)
    for route, reason in (
        ("/v1/chat/completions", "stop"),
        ("/v1/messages", "length, stop"),
        ("/v1/completions", "length"),
        ("/v1/completions", "refused 429"),
        ("/v1/completions", "stop, abort"),
        ("/tokenize", "stop"),
    ):
        metrics.request_received()
        metrics.request_done(route, 200, replace(done, reason=reason))
    text = text_of(metrics)
    for name, seconds in zip(exposed, (2.5, 0.5, 0.5), strict=True):
        assert types_in(text)[name] == "histogram"
        labels = {"gen_ai_provider_name": "quire", "gen_ai_request_model": "m"}
        for operation, count in {"chat": 2, "text_completion": 1}.items():
            labels["gen_ai_operation_name"] = operation
            assert value(text, f"{name}_count", **labels) == value(text, f"{name}_bucket", le="+Inf", **labels) == count
            assert value(text, f"{name}_sum", **labels) == count * seconds
        assert 'operation_name="embeddings"' not in text


def test_engine_numbers_are_told_as_they_are() -> None:
    text = text_of(Metrics(), engine=ENGINE, state="ready", restarts=2)
    assert value(text, "vllm:num_requests_running") == 3
    assert value(text, "vllm:num_requests_waiting") == 2
    assert value(text, "vllm:kv_cache_usage_perc") == 0.25
    assert value(text, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100", engine="0") == 1
    assert value(text, "vllm:prefix_cache_queries_total") == 500
    assert value(text, "vllm:prefix_cache_hits_total") == 200
    assert value(text, "vllm:generation_tokens_total") == 70
    assert value(text, "vllm:num_preemptions_total") == 4
    assert [value(text, "quire:kv_blocks", state=state) for state in ("held", "cached", "free")] == [25, 15, 60]
    assert value(text, "quire:engine_restarts_total") == 2
    assert {state: value(text, "quire:engine_state", state=state) for state in STATES} == {
        state: float(state == "ready") for state in STATES
    }


def test_each_of_several_engines_tells_its_own_and_what_http_processes_count_is_of_all() -> None:
    third = EngineReading(ENGINE | {"running": 1, "pid": None}, "ready", 2)
    metrics = Metrics(model_name="demo")
    text = metrics.render([EngineReading(ENGINE, "ready"), EngineReading(None, "restarting", 1), third])[0].decode()
    types_in(text)  # each name once
    running = [(labels["engine"], count) for labels, count in samples(text)["vllm:num_requests_running"]]
    assert running == [("0", 3), ("2", 1)]
    assert [value(text, "quire:engine_restarts_total", engine=engine) for engine in "012"] == [0, 1, 2]
    assert value(text, "quire:engine_state", engine="1", state="restarting") == 1
    assert value(text, "quire:kv_blocks", engine="2", state="held") == 25
    assert {labels["engine"] for labels, _ in samples(text)["vllm:request_success_total"]} == {"all"}
    assert value(text, "quire:memory_resident_bytes", process="engine") > 2**20


def test_the_balance_of_the_experts_load_is_told_by_layer_where_there_are_experts() -> None:
    assert "expert_load" not in text_of(Metrics(), engine=ENGINE)
    balances = {"expert_load_balance": 1.75, "expert_load_balance_by_layer": {"1": 1.25, "2": 1.75}}
    text = text_of(Metrics(), engine=ENGINE | balances)
    assert types_in(text)["quire:expert_load_balance"] == "gauge"
    for layer, balance in {"all": 1.75, "1": 1.25, "2": 1.75}.items():
        assert value(text, "quire:expert_load_balance", layer=layer) == balance


def test_drafts_are_counted_under_vllms_names_where_the_engine_speculates() -> None:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    idle = {"verifications": 0, "drafted": 0, "accepted": 0, "accepted_by_position": []}
    assert "spec_decode" not in text_of(Metrics(), engine=ENGINE | idle)
    text = text_of(Metrics(model_name="m"), engine=ENGINE | SPECULATION)
    for name, count in zip(names, (10, 40, 21), strict=False):
        assert value(text, f"vllm:spec_decode_{name}_total", model_name="m", engine="0") == count
    by_position = samples(text)["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert [(labels["position"], count) for labels, count in by_position] == [("0", 9), ("1", 8), ("2", 4), ("3", 0)]
    assert {types_in(text)[f"vllm:spec_decode_{name}_total"] for name in names} == {"counter"}
    assert "spec_decode" in text_of(Metrics(), engine=ENGINE | idle | {"draft_depth": 4})  # none was verified yet


def test_what_passes_between_ranks_is_counted() -> None:
    assert "quire:gathers" not in text_of(Metrics(), engine=ENGINE)
    told = {"ranks": 2, "gathers": 7, "gathered_bytes": 4096, "rank_imbalance": 1.5, "expert_moves": 3}
    text = text_of(Metrics(), engine=ENGINE | told | {"imbalance_before": 1.75, "imbalance_after": 1.25})
    assert types_in(text)["quire:gathered_bytes_total"] == "counter"
    assert types_in(text)["quire:rank_imbalance"] == "gauge"
    assert value(text, "quire:gathers_total") == 7 and value(text, "quire:ranks") == 2
    assert value(text, "quire:expert_moves_total") == 3
    assert value(text, "quire:rank_imbalance_after_move") == 1.25


def test_tiers_of_kv_count_blocks_and_bytes():
    assert "kv_tier" not in text_of(Metrics(), engine=ENGINE)
    sizes = {"host": {"stored": 5000, "loaded": 3000}}
    told = {"kv_tiers": {"host": {"stored": 5, "loaded": 3, "bad": 1}}, "kv_tier_bytes": sizes}
    text = text_of(Metrics(), engine=ENGINE | told)
    assert value(text, "quire:kv_tier_blocks_total", tier="host", event="bad") == 1
    assert value(text, "quire:kv_tier_bytes_total", tier="host", event="loaded") == 3000
    assert (
        types_in(text)["quire:kv_tier_blocks_total"] == "counter" and 'event="bad"' not in text.split("tier_bytes")[-1]
    )
    slots = {"free": 4, "filling": 2, "kept": 3, "quarantined": 1}
    text = text_of(Metrics(), engine=ENGINE | told | {"kv_slots": slots})
    assert types_in(text)["quire:kv_host_slots"] == "gauge"
    assert {state: value(text, "quire:kv_host_slots", state=state) for state in slots} == slots


def test_how_busy_the_stages_of_a_pipeline_are() -> None:
    text = text_of(Metrics(), engine=ENGINE | {"stage_busy": [0.75, 0.5]})
    assert value(text, "quire:stage_busy", stage="0") == 0.75
    assert value(text, "quire:stage_busy", stage="1") == 0.5


def test_the_tokens_of_each_expert_are_counted() -> None:
    text = text_of(Metrics(), engine=ENGINE | {"expert_tokens": {"1": [3, 0], "2": [1, 2]}})
    assert types_in(text)["quire:expert_tokens_total"] == "counter"
    assert value(text, "quire:expert_tokens_total", layer="1", expert="0") == 3
    assert value(text, "quire:expert_tokens_total", layer="2", expert="1") == 2


def test_engine_metrics_are_absent_while_there_is_no_engine() -> None:
    text = text_of(Metrics(), state="loading")
    assert not VLLM_ENGINE.keys() & types_in(text).keys()
    assert VLLM_HTTP.keys() <= types_in(text).keys()
    assert value(text, "quire:engine_state", state="loading") == 1


def test_an_engine_that_tells_nothing_or_nonsense_breaks_nothing() -> None:
    assert not VLLM_ENGINE.keys() & types_in(text_of(Metrics(), engine={})).keys()
    odd = {"running": None, "num_blocks": 0, "held_blocks": 0, "free_blocks": 0, "pid": -1, "steps": math.nan}
    assert value(text_of(Metrics(), engine=odd, state="on fire"), "quire:engine_state", state="unknown") == 1


def test_http_processes_are_summed_and_the_engine_is_told_once(tmp_path: Path) -> None:
    first, second = (Metrics(tmp_path, worker=worker, model_name="m") for worker in (0, 1))
    for metrics, count in ((first, 3), (second, 4)):
        for _ in range(count):
            finish(metrics)
            metrics.first_token(0.05)
            metrics.request_received()
            metrics.request_done("/v1/completions", 200, RequestSummary(request_id="a"))
        metrics.queue(count, 100 * count)
    texts = [text_of(metrics, engine=ENGINE) for metrics in (first, second)]
    for text in texts:
        assert value(text, "vllm:request_success_total", finished_reason="stop") == 7
        assert value(text, "vllm:time_to_first_token_seconds_count") == 7
        assert value(text, "vllm:time_to_first_token_seconds_sum") == pytest.approx(0.35)
        assert value(text, "quire:http_requests_total", route="/v1/completions", status="200") == 7
        assert (value(text, "quire:queued_requests"), value(text, "quire:queued_tokens")) == (7, 700)
        assert value(text, "vllm:num_requests_running") == 3


def test_what_a_killed_process_counted_stays_counted_and_its_gauges_go(tmp_path: Path) -> None:
    code = """if True:
        import sys, pathlib
        from quire.server.metrics import Metrics
        metrics = Metrics(pathlib.Path(sys.argv[1]), worker=7)
        metrics.rejected("draining"); metrics.queue(5, 50); metrics.token_gap(0.03, 1); metrics.request_received()
        print("done", flush=True)
        sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin and child.stdout
    with child:
        assert child.stdout.readline() == "done\n"
        metrics = Metrics(tmp_path, worker=8)
        metrics.queue(1, 10)
        assert value(text_of(metrics), "quire:queued_requests") == 6
        child.send_signal(signal.SIGKILL)
        child.wait()
    text = text_of(metrics)
    assert (value(text, "quire:queued_requests"), value(text, "quire:queued_tokens")) == (1, 10)
    assert value(text, "quire:http_requests_in_progress") == 0
    assert value(text, "quire:requests_rejected_total", reason="draining") == 1
    assert value(text, "vllm:inter_token_latency_seconds_count") == 1


def test_a_process_that_got_a_dead_ones_id_is_not_taken_for_it(tmp_path: Path) -> None:
    code = """if True:
        import sys, pathlib
        from quire.server.metrics import Metrics
        metrics = Metrics(pathlib.Path(sys.argv[1]), worker=7)
        metrics.queue(5, 50); metrics.rejected("draining")
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    file = tmp_path / "http-7.values"
    file.write_bytes(struct.pack("d", os.getppid()) + file.read_bytes()[8:])  # somebody else, by now
    text = text_of(Metrics(tmp_path, worker=8))
    assert value(text, "quire:queued_requests") == 0
    assert value(text, "quire:requests_rejected_total", reason="draining") == 1


def test_a_process_that_takes_anothers_number_goes_on_counting_from_there(tmp_path: Path) -> None:
    for _ in range(2):
        metrics = Metrics(tmp_path, worker=0)
        assert value(text_of(metrics), "quire:queued_requests") == 0
        metrics.disconnected()
        metrics.queue(9, 9)
    assert value(text_of(metrics), "quire:disconnects_total") == 2


def test_files_of_other_kinds_and_half_made_ones_are_passed_over(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics", worker=0)
    metrics.disconnected()
    (tmp_path / "metrics" / "http-1.values").write_bytes(b"")
    (tmp_path / "metrics" / "http-2.values").write_bytes(b"x" * 77)
    (tmp_path / "metrics" / "http-3.values").mkdir()
    (tmp_path / "metrics" / "notes.txt").write_text("hello")
    assert value(text_of(metrics), "quire:disconnects_total") == 1


def test_where_there_is_no_room_for_the_file_a_process_counts_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = Metrics(tmp_path, worker=0, model_name="demo")
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: len(data) // 2)  # the disk is full then
    metrics = Metrics(tmp_path, worker=1, model_name="demo")
    metrics.request_received()
    assert b"vllm" in metrics.render([])[0] and b"vllm" in other.render([])[0]
    assert "are not added to the others': No space left" in caplog.text


def test_files_are_private(tmp_path: Path) -> None:
    Metrics(tmp_path / "metrics", worker=0)
    assert stat.S_IMODE((tmp_path / "metrics").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "metrics" / "http-0.values").stat().st_mode) == 0o600


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.floats(0, 5000), st.sampled_from([0.001, 0.1, 2560.0, 0.0])), max_size=30))
def test_histograms_count_as_prometheus_clients_do(seconds: list[float]) -> None:
    metrics = Metrics()
    for one in seconds:
        metrics.first_token(one)
    mine = samples(text_of(metrics))
    name = "vllm:time_to_first_token_seconds"
    bounds = [float(labels["le"]) for labels, _ in mine[f"{name}_bucket"]]
    registry = prometheus_client.CollectorRegistry()
    oracle = prometheus_client.Histogram(name, "-", buckets=bounds, registry=registry)
    for one in seconds:
        oracle.observe(one)
    theirs = samples(prometheus_client.generate_latest(registry).decode())
    for suffix in ("_bucket", "_count"):
        assert [v for _, v in mine[name + suffix]] == [v for _, v in theirs[name + suffix]]
    assert mine[f"{name}_sum"][0][1] == pytest.approx(theirs[f"{name}_sum"][0][1])


def test_latency_buckets_are_vllms() -> None:
    text = samples(text_of(Metrics()))
    first = [labels["le"] for labels, _ in text["vllm:time_to_first_token_seconds_bucket"]]
    gaps = [labels["le"] for labels, _ in text["vllm:inter_token_latency_seconds_bucket"]]
    whole = [labels["le"] for labels, _ in text["vllm:e2e_request_latency_seconds_bucket"]]
    assert (first[0], first[-2:], len(first)) == ("0.001", ["2560.0", "+Inf"], 23)
    assert (gaps[0], gaps[-2:], len(gaps)) == ("0.01", ["80.0", "+Inf"], 20)
    assert (whole[0], whole[-2:], len(whole)) == ("0.3", ["7680.0", "+Inf"], 22)


def test_tokens_that_came_together_share_their_gap() -> None:
    metrics = Metrics()
    metrics.token_gap(0.12, 4)
    metrics.token_gap(0.2, 1)
    metrics.token_gap(1.0, 0)
    text = text_of(metrics)
    assert value(text, "vllm:inter_token_latency_seconds_count") == 5
    assert value(text, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.32)
    assert value(text, "vllm:inter_token_latency_seconds_bucket", le="0.05") == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_a_number_that_cannot_be_does_not_poison_the_sums(bad: float) -> None:
    metrics = Metrics()
    metrics.first_token(bad)
    metrics.token_gap(bad, 2)
    finish(metrics, seconds=bad, decode=bad)
    metrics.first_token(0.5)
    text = text_of(metrics)
    assert value(text, "vllm:time_to_first_token_seconds_sum") == 0.5
    assert all(math.isfinite(v) for found in samples(text).values() for _, v in found)


def test_a_finished_request_is_counted_once_and_its_choices_each() -> None:
    metrics = Metrics()
    finish(metrics, "stop", "length", "stop", output_tokens=(4, 5, 21), decode=2.0)
    text = text_of(metrics)
    assert value(text, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(text, "vllm:request_success_total", finished_reason="length") == 1
    assert value(text, "vllm:e2e_request_latency_seconds_count") == 1
    assert value(text, "vllm:request_params_n_sum") == 3
    assert value(text, "vllm:request_params_max_tokens_count") == 0
    assert value(text, "vllm:request_prefill_kv_computed_tokens_sum") == 6
    assert value(text, "vllm:request_max_num_generation_tokens_sum") == 21
    assert value(text, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.1)


def test_labels_come_from_closed_sets_whatever_is_asked() -> None:
    metrics = Metrics()
    for i in range(200):
        metrics.request_received()
        metrics.request_done(f"/secret/{i}", 200 + i, RequestSummary(request_id="a"))
        metrics.rejected(f"because {i}")
        finish(metrics, f"reason {i}")
    found = samples(text_of(metrics))
    assert {labels["route"] for labels, _ in found["quire:http_requests_total"]} == {"other"}
    assert {labels["reason"] for labels, _ in found["quire:requests_rejected_total"]} == set(REJECTIONS)
    assert {labels["finished_reason"] for labels, _ in found["vllm:request_success_total"]} == set(FINISH_REASONS)
    assert len(found["quire:http_requests_total"]) <= 14
    assert sum(v for _, v in found["quire:http_requests_total"]) == 200
    assert len(set(ROUTES)) == len(ROUTES)


def test_a_model_name_with_quotes_and_line_ends_stays_one_label() -> None:
    name = 'a"b\\c\nd{e="f"}'
    text = text_of(Metrics(model_name=name))
    assert {labels["model_name"] for labels, _ in samples(text)["vllm:request_success_total"]} == {name}


def test_content_type_is_prometheus_text_format() -> None:
    assert Metrics().render([])[1] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_resident_memory_is_told_by_kind_of_process(tmp_path: Path) -> None:
    text = text_of(Metrics(tmp_path), engine=ENGINE)
    assert value(text, "quire:memory_resident_bytes", process="http") > 2**20
    assert value(text, "quire:memory_resident_bytes", process="engine") > 2**20


# -- the dashboard ------------------------------------------------------------------------------------------------


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_dashboard_has_a_datasource_for_every_query_and_panels_that_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and all(x < 24 for x, _ in cells)
        taken |= cells
        assert all(target["datasource"]["type"] == "prometheus" for target in panel.get("targets", []))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert {one["name"] for one in dashboard["templating"]["list"]} == {"datasource", "instance", "model_name"}


def test_dashboard_asks_only_for_metrics_that_are_there_with_the_type_it_needs() -> None:
    experts = {"expert_load_balance": 1.5, "expert_load_balance_by_layer": {"0": 1.5}}
    types = types_in(text_of(Metrics(), engine=ENGINE | experts | SPECULATION))
    counters = {name for name, kind in types.items() if kind == "counter"}
    histograms = {name for name, kind in types.items() if kind == "histogram"}
    parts = {name + suffix for name in histograms for suffix in ("_bucket", "_sum", "_count")}
    gauges = {name for name, kind in types.items() if kind == "gauge"}
    assert expressions()
    for expression in expressions():
        asked = set(re.findall(r"(?:vllm|quire):[a-z0-9_:]+", expression))
        assert asked and asked <= counters | gauges | parts, expression
        over_time = set(re.findall(r"(?:rate|increase)\(([a-z0-9_:]+)", expression))
        assert over_time <= counters | parts, expression
        assert asked & parts <= over_time, expression
        if "histogram_quantile" in expression:
            assert {name.rpartition("_")[2] for name in asked} == {"bucket"} and "by (le)" in expression


def test_dashboard_selects_by_labels_that_the_metrics_have() -> None:
    found = samples(text_of(Metrics(), engine=ENGINE | SPECULATION))
    checked = set()
    for expression in expressions():
        for name, selector in re.findall(r"((?:vllm|quire):[a-z0-9_:]+)\{([^}]*)\}", expression):
            asked = set(re.findall(r"(\w+)=~", selector)) - {"instance"}  # Prometheus adds this one
            if name in found:  # a sparse counter has no series yet
                assert asked <= found[name][0][0].keys(), expression
                checked.add(name)
    assert len(checked) > 20


def test_dashboard_has_what_an_operator_looks_for() -> None:
    asked = set(re.findall(r"(?:vllm|quire):[a-z0-9_:]+", " ".join(expressions())))
    wanted = {"vllm:num_preemptions_total", "quire:requests_rejected_total", "quire:engine_restarts_total"}
    wanted |= {"vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"}
    wanted |= {"vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"}
    wanted |= {"vllm:e2e_request_latency_seconds_bucket", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total"}
    assert wanted <= asked
