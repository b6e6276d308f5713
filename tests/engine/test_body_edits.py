"""Bodies with a field changed: that one, and no other byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.engine.bodies import renamed, rerouted, truncating, with_output
from proxy.engine.plans import Plan

from proxy.core.report import Report
from proxy.core.request import Request
from proxy.engine.reading import Located
from tests.support.engine_fixtures import TENANT, DictRecords, Replica

LISTS = {"chat": "messages", "messages": "messages", "responses": "input"}


def located(body: bytes, api: str = "chat") -> tuple[Request, Located]:
    request = Request(api, body, TENANT, "r")
    return request, Replica(DictRecords()).measurer.locate(request)


def planned(body: bytes, stages: tuple[str, ...] = ()) -> Plan:
    return Plan(body, Report("r", "chat", "m", "u", False, stages=stages))


@given(st.permutations(["model", "messages", "stop", "metadata"]), st.sampled_from(["m", 'na"me', "modèle", "\ud83d"]))
def test_a_new_name_changes_no_other_byte(order: list[str], name: str) -> None:
    """Wherever the name stands, before the conversation or behind it, only its own bytes change."""
    values: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "é model"}]}
    members = [f"{json.dumps(key)} : {json.dumps(values.get(key, 'é'))}" for key in order]
    body = f"{{{', '.join(members)}}}"
    request, where = located(body.encode())
    assert renamed(request, where, "ü").decode() == body.replace(json.dumps(name), json.dumps("ü"), 1)


def test_a_body_without_a_name_stays() -> None:
    """The path names the model: there is nothing to change."""
    request, where = located(b'{"messages": []}')
    assert renamed(request, where, "x") is request.body


def test_another_model_gets_no_reasoning_that_it_cannot_read() -> None:
    """Encrypted reasoning goes, its neighbours stay byte for byte; a name is added where none was."""
    user = b'{"role" : "user", "content": "Hello"}'
    reasoning = b'{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "b64"}'
    body = b'{"input": [' + user + b", " + reasoning + b'], "include": ["reasoning.encrypted_content"]}'
    request, where = located(body, "responses")
    sent = rerouted(request, where, "other")
    assert user in sent
    assert b"b64" not in sent
    assert json.loads(sent)["model"] == "other"


@pytest.mark.parametrize(("given_", "sent"), [({"max_tokens": 900}, 500), ({"max_tokens": 400}, None), ({}, None)])
def test_an_output_figure_is_only_lowered(given_: dict[str, int], sent: int | None) -> None:
    """A figure above what the model can write comes down to it; smaller ones, and none, are left alone."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **given_}).encode()
    _, where = located(body)
    plan = with_output("chat", where, planned(body), 500)
    assert (plan and json.loads(plan.body)["max_tokens"]) == sent
    assert plan is None or (plan.output, plan.report.stages) == (500, ("output",))


def test_leave_to_cut_a_stored_history_is_given_once() -> None:
    """It is added where the client said nothing of it, and not where it did or it was added before."""
    body = b'{"previous_response_id": "resp_1", "input": "Hi"}'
    _, where = located(body, "responses")
    plan = truncating(where, planned(body))
    assert plan is not None
    assert plan.body == b'{"truncation":"auto","previous_response_id": "resp_1", "input": "Hi"}'
    assert truncating(where, plan) is None
    _, said = located(plan.body, "responses")
    assert truncating(said, planned(plan.body)) is None
