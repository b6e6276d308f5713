"""The messages that finished requests become, read back from their bytes."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import TraceFlags

from proxy.core.report import Report, SummaryReport, Usage
from proxy.telemetry.spans import FinishedSpans, RequestTrace, UpstreamCall, add_request, add_summary
from tests.support.exported_spans import Collected, Exported, decoded

REPORT = Report("r1", "chat", model="gpt-4o", upstream="stub", status=200, usage=Usage(90, 12, None))


def opened(number: int = 1, **more: Any) -> RequestTrace:
    """A request under way with one call that was answered."""
    facts = {"parent": None, "state": None, "flags": TraceFlags(1), "attributes": {}, **more}
    trace = RequestTrace(number, number, 1_000 + number, **facts)
    trace.calls = [UpstreamCall(50 + number, "stub", 2_000, 3_000, 200)]
    return trace


def exported(*requests: tuple[RequestTrace, Report]) -> list[Exported]:
    """The spans of *requests*, exported as one batch."""
    exporter = Collected(Resource({"service.name": "test"}))
    spans = [
        FinishedSpans(lambda scope, trace=trace, report=report: add_request(scope, trace, report, 4_000, 9))
        for trace, report in requests
    ]
    exporter.export(spans)
    assert len(exporter.messages) == 1
    return decoded(exporter.messages)


def test_requests_of_one_kind_keep_what_is_their_own() -> None:
    """What they share is encoded once; ids, times and figures are each one's."""
    first, second = REPORT, REPORT.with_(request_id="r2", usage=Usage(7, 1, 5), tokens_before=9, tokens_after=4)
    one, one_wait, two, two_wait = exported((opened(1), first), (opened(2), second))
    assert [each.name for each in (one, one_wait, two, two_wait)] == ["SERVER chat gpt-4o", "CLIENT wait"] * 2
    assert [each.span.trace_id[-1] for each in (one, one_wait, two, two_wait)] == [1, 1, 2, 2]
    assert [each.span.span_id[-1] for each in (one, one_wait, two, two_wait)] == [1, 51, 2, 52]
    assert (one.times, two.times, two_wait.times) == ((1_001, 4_000), (1_002, 4_000), (2_000, 3_000))
    own = {"ullage.request_id", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"}
    assert {name for name, value in one.attributes.items() if two.attributes[name] != value} == own
    assert two.attributes.keys() - one.attributes.keys() == {
        "gen_ai.usage.cache_read.input_tokens", "ullage.tokens_before", "ullage.tokens_after",
    }  # fmt: skip


def test_odd_names_and_figures_cost_no_batch() -> None:
    """Half characters are replaced, and what is larger than OTLP has room for is cut: one would cost 511 others."""
    odd = REPORT.with_(model="m\ud800" + "x" * 999, usage=Usage(2**70, -(2**70), None), project="\udfff")
    server, _, usual, _ = exported((opened(1), odd), (opened(2), REPORT))
    assert server.name == "SERVER chat m?" + "x" * 198
    assert server.attributes["gen_ai.request.model"] == "m?" + "x" * 198
    assert server.attributes["gen_ai.usage.input_tokens"] == 2**63 - 1
    assert server.attributes["gen_ai.usage.output_tokens"] == -(2**63) + 1
    assert server.attributes["ullage.project"] == "?"
    assert usual.attributes["gen_ai.request.model"] == "gpt-4o"


def test_a_sampler_adds_its_attributes() -> None:
    """What a sampler of one's own says of a request stands in its span, whatever its type."""
    attributes = {"rule": "all", "weight": 2, "share": 0.5, "is_rare": False, "names": ("a", "b")}
    server, _ = exported((opened(attributes=attributes), REPORT))
    assert attributes.items() <= server.attributes.items()


def test_a_call_without_an_end_ends_with_its_request() -> None:
    """A client may leave while its call waits."""
    trace = opened()
    trace.calls = [UpstreamCall(5, "stub", 2_000)]
    _, wait = exported((trace, REPORT))
    assert wait.times == (2_000, 4_000)


def test_a_compaction_and_a_summary_are_children() -> None:
    """Both are inside the request's trace, below its own span."""
    exporter = Collected(Resource({}))
    report = REPORT.with_(event=True, stages=("fold", "clip"), tokens_before=90, tokens_after=40)
    summary = SummaryReport("written", "", "t", "small", "up", 1, 900, 80, 2e-6)
    exporter.export([
        FinishedSpans(lambda scope: add_request(scope, opened(), report, 4_000, 9)),
        FinishedSpans(lambda scope: add_summary(scope, opened(), 8, summary, 6_000)),
    ])  # fmt: skip
    server, _, compaction, job = decoded(exporter.messages)
    assert compaction.span.parent_span_id == job.span.parent_span_id == server.span.span_id
    assert compaction.attributes == {"ullage.stages": ("fold", "clip"), "ullage.tokens_removed": 50}
    assert compaction.times == (1_001, 2_000)
    assert job.times == (4_000, 6_000)
    assert job.attributes["gen_ai.usage.output_tokens"] == 80


def test_a_compaction_after_an_overflow_lies_between_the_two_calls() -> None:
    """What was planned before the overflow is not what was answered."""
    trace = opened()
    trace.calls = [UpstreamCall(50, "stub", 2_000, 2_500, 400), UpstreamCall(51, "stub", 2_900, 3_000, 200)]
    report = REPORT.with_(event=True, stages=("fold",), tokens_before=90, tokens_after=40, overflows=1, retries=1)
    *_, retry, compaction = exported((trace, report))
    assert retry.name == "CLIENT retry"
    assert compaction.times == (2_500, 2_900)
