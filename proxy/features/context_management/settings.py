"""The setting ``upstreams[].context_management``."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from proxy.settings import Settings, Upstream


class UpstreamWithEdits(Upstream):
    """An upstream with the setting that names who applies the context edits of its requests."""

    context_management: Literal["pass", "own"] = Field(
        default="pass",
        description="Who does the context edits that /v1/messages asks for: it (pass), or Ullage.",
    )


SECTIONS: Final = (UpstreamWithEdits,)


def edited_upstreams(settings: Settings) -> list[str]:
    """Return the names of the upstreams whose requests Ullage edits."""
    return [
        upstream.name
        for upstream in settings.upstreams
        if isinstance(upstream, UpstreamWithEdits) and upstream.context_management == "own"
    ]
