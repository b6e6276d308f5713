"""What a managed request asks of the engine: read from its path, its headers and its body."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from proxy.core.client_compaction import announced
from proxy.core.request import Origin, Request
from proxy.core.session_names import epoch_of, session_of
from proxy.engine.quick_check import model_of
from proxy.server.body import BodyReader, inflated
from proxy.server.config import Limits
from proxy.server.request import RequestHeaders, managed, options, window_variant

_MODEL_FIRST: Final = re.compile(rb'\s*\{\s*"model"\s*:\s*"([^"\\]{1,256})"')


async def read_request(
    plain: Request, path_qs: str, intake: RequestHeaders, reader: BodyReader, limits: Limits
) -> Request:
    """Add to *plain*, which has the body as it came, what the path and the headers say.

    A content-encoding is taken off, within *limits*, and its header with it. Raises ``InvalidRequest``.
    """
    asking, encoding = plain, intake.seen.get("content-encoding")
    if encoding is not None:
        asking = replace(asking, body=await inflated(asking.body, encoding, limits))
        reader.count(len(asking.body))
    _, model = managed(path_qs.partition("?")[0]) or ("", "")
    asking = replace(
        asking,
        options=options(intake.own),
        path_model=model,
        window_variant=window_variant(intake),
        session=session_of(intake.seen),
        epoch=epoch_of(intake.seen),
        client_compaction=announced(intake.seen),
    )
    if encoding is not None:
        intake.drop(("content-encoding",))
    return replace(asking, origin=Origin(path_qs, tuple(intake.forward)))


def named_model(body: bytes, *, complete: bool) -> str:
    """The model a JSON body names, or an empty string; of a part of a body only a leading ``model`` is seen."""
    if not complete:
        found = _MODEL_FIRST.match(body)
        return found[1].decode("utf-8", "replace") if found else ""
    return model_of(body)
