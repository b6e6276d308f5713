"""A request's body with something beside its conversation changed: its model's name, its output figure, a field."""

from __future__ import annotations

import json
from dataclasses import replace

from proxy.core.apis.envelope import splice
from proxy.core.apis.portable import MARKS, PORTABLE, WITHOUT
from proxy.core.decisions import DIALECTS
from proxy.core.request import Request
from proxy.core.tokens.budget import input_room
from proxy.engine.plans import Plan
from proxy.engine.reading import Located


def rerouted(request: Request, located: Located, model: str) -> bytes:
    """The body of *request* for another *model*: its name, and no reasoning that only its author can read."""
    body, outline, where = located.body, located.outline, located.scan
    items, edits = body[where.start : where.end], {"model": json.dumps(model)}
    if MARKS.search(items):
        portable = PORTABLE[request.api]
        raws = [body[start:end] for start, end in where.spans]
        kept = [portable(raw) if MARKS.search(raw) else raw for raw in raws]
        if kept != raws:
            items, edits = b",".join(filter(None, kept)), {**edits, **WITHOUT.get(request.api, {})}
    at = len(body[: where.start].decode())
    found = splice(outline, at, items, {key: value for key, value in edits.items() if key in outline.fields})
    if "model" in outline.fields:
        return found
    return found.replace(b"{", b'{"model":' + edits["model"].encode() + b",", 1)


def renamed(request: Request, located: Located, model: str) -> bytes:
    """The body of *request* with another name of its model, and every other byte as it is."""
    body, name = request.body, json.dumps(model).encode()
    text, where = located.outline.text, located.outline.fields.get("model")
    if where is None:
        return body
    # The items stand either behind the name or before it; from the other end the outline is the body.
    if where.start < len(located.body[: located.scan.start].decode()):
        start = len(text[: where.start].encode())
        end = start + len(text[where.start : where.end].encode())
    else:
        end = len(body) - len(text[where.end :].encode())
        start = end - len(text[where.start : where.end].encode())
    return body[:start] + name + body[end:]


def with_output(api: str, located: Located, plan: Plan, most: int) -> Plan | None:
    """*plan*, whose body is *located*, with output figures above *most* lowered to it; ``None`` without such."""
    outline, (start, end) = located.outline, (located.scan.start, located.scan.end)
    given = {key: outline.value(key) for key in DIALECTS[api].OUTPUT_FIGURES if key in outline.fields}
    edits = {key: str(most) for key, value in given.items() if value.isdecimal() and int(value) > most}
    if not edits:
        return None
    thinking = outline.thinking(most)
    body = splice(outline, len(plan.body[:start].decode()), plan.body[start:end], edits | thinking)
    stages = tuple(dict.fromkeys((*plan.report.stages, "output", *(["thinking"] if thinking else []))))
    report = plan.report.but(outcome="compacted", stages=stages)
    if report.window is not None:
        limit = plan.route.max_input if plan.route else None
        report = report.but(budget=max(0, input_room(report.window, most, limit)))
    return replace(plan, body=body, output=most, report=report)


def truncating(located: Located, plan: Plan) -> Plan | None:
    """*plan* with leave for the provider to cut the history that only it has; ``None`` where it has it."""
    outline = located.outline
    if "truncation" in outline.fields or "truncation" in plan.report.stages:
        return None
    at = plan.body.index(b"{") + 1
    body = plan.body[:at] + b'"truncation":"auto",' + plan.body[at:]
    report = plan.report.but(outcome="compacted", stages=(*plan.report.stages, "truncation"))
    return replace(plan, body=body, report=report)
