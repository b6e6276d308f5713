"""Bodies with a field changed: that one, and no other byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from proxy.core.decisions import KnownRoute, UncountedView
from proxy.core.models import Route
from proxy.core.request import Request
from proxy.engine.body_edits import renamed, rerouted, with_lower_output, with_truncation
from proxy.engine.reading import LocatedBody
from proxy.engine.run import report_of
from tests.support.engine_fixtures import POLICY, TENANT, DictRecords, Replica

LISTS = {"chat": "messages", "messages": "messages", "responses": "input"}


def located(body: bytes, api: str = "chat") -> tuple[Request, LocatedBody]:
    request = Request(api, body, TENANT, "r")
    return request, Replica(DictRecords()).measurer.locate(request)


def sent(request: Request, stages: tuple[str, ...] = ()) -> UncountedView:
    known = KnownRoute(Route("u", "m", None, None, "o200k_base", "unknown"), None, "unknown", None, 1.0)
    return UncountedView(request, known, "m", False, "", request.body, stages=stages)


@given(st.permutations(["model", "messages", "stop", "metadata"]), st.sampled_from(["m", 'na"me', "modèle"]))
def test_a_new_name_changes_no_other_byte(order: list[str], name: str) -> None:
    """Wherever the name stands, before the conversation or behind it, only its own bytes change."""
    values: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "é model"}]}
    members = [f"{json.dumps(key)} : {json.dumps(values.get(key, 'é'))}" for key in order]
    body = f"{{{', '.join(members)}}}"
    request, where = located(body.encode())
    assert renamed(request.body, where, "ü").decode() == body.replace(json.dumps(name), json.dumps("ü"), 1)


def test_a_model_in_the_path_stays_out_of_the_body() -> None:
    """Signatures give way, and nothing is added."""
    call = {"functionCall": {"name": "f"}, "thoughtSignature": "x"}
    body = json.dumps({"contents": [{"parts": [{"text": "a"}]}, {"role": "model", "parts": [call]}]}).encode()
    request, where = located(body, "gemini")
    made = rerouted(structs.replace(request, path_model="m"), where, "other")
    assert made.startswith(b'{"contents": [{"parts": [{"text": "a"}]},')
    assert json.loads(made)["contents"][1]["parts"][0]["thoughtSignature"] == "skip_thought_signature_validator"
    assert json.loads(made).keys() == {"contents"}


def test_a_body_without_a_name_stays() -> None:
    """The path names the model: there is nothing to change."""
    request, where = located(b'{"messages": []}')
    assert renamed(request.body, where, "x") is request.body


def test_another_model_gets_no_reasoning_that_it_cannot_read() -> None:
    """Encrypted reasoning goes, its neighbours stay byte for byte; a name is added where none was."""
    user = b'{"role" : "user", "content": "Hello"}'
    reasoning = b'{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "b64"}'
    body = b'{"input": [' + user + b", " + reasoning + b'], "include": ["reasoning.encrypted_content"]}'
    request, where = located(body, "responses")
    body = rerouted(request, where, "other")
    assert user in body
    assert b"b64" not in body
    assert json.loads(body)["model"] == "other"


@pytest.mark.parametrize(("given_", "figure"), [({"max_tokens": 900}, 500), ({"max_tokens": 400}, None), ({}, None)])
def test_an_output_figure_is_only_lowered(given_: dict[str, int], figure: int | None) -> None:
    """A figure above what the model can write comes down to it; smaller ones, and none, are left alone."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **given_}).encode()
    request, where = located(body)
    view = with_lower_output(where, sent(request), 500)
    assert (view and json.loads(view.body)["max_tokens"]) == figure
    assert view is None or (view.lowered_output, report_of(view, POLICY).stages) == (500, ("output",))


def test_leave_to_cut_a_stored_history_is_given_once() -> None:
    """It is added where the client said nothing of it, and not where it did or it was added before."""
    body = b'{"previous_response_id": "resp_1", "input": "Hi"}'
    request, where = located(body, "responses")
    view = with_truncation(where, sent(request))
    assert view is not None
    assert view.body == b'{"truncation":"auto","previous_response_id": "resp_1", "input": "Hi"}'
    assert with_truncation(where, view) is None
    again, allowed = located(view.body, "responses")
    assert with_truncation(allowed, sent(again)) is None


def test_an_output_figure_of_any_length_is_lowered() -> None:
    """A figure of more digits than Python reads is above every limit."""
    body = b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":%b}' % (b"9" * 5000)
    request, where = located(body)
    view = with_lower_output(where, sent(request), 500)
    assert view is not None
    assert json.loads(view.body)["max_tokens"] == 500
