"""The settings ``compression.client_compaction`` and ``upstreams[].compaction``."""

from __future__ import annotations

from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field

from proxy.settings import Compression, Settings, Upstream

COMPACTING_HOSTS: Final = ("api.openai.com", "chatgpt.com", ".openai.azure.com")
"""Ends of the hosts that are known to answer ``/v1/responses/compact``.

https://developers.openai.com/api/docs/guides/compaction
"""


class CompressionWithClientCompaction(Compression):
    """The section ``compression`` with how a client's own compaction is answered."""

    client_compaction: Literal["relay", "answer"] = Field(
        default="relay",
        description="A client's own compaction: asked of its model; answer: from the summary that is ready, if one is.",
    )


class UpstreamWithCompaction(Upstream):
    """An upstream with the setting that names who answers requests for a compaction."""

    compaction: Literal["auto", "relay", "own"] = Field(
        default="auto",
        description="Who answers requests to compact. auto: the upstream if it can; relay: the upstream; own: Ullage.",
    )

    @property
    def compacts(self) -> bool:
        """True if it is known to answer ``/v1/responses/compact``: OpenAI's and Azure's own servers."""
        host = urlsplit(self.base_url).hostname or ""
        return host.endswith(COMPACTING_HOSTS)


SECTIONS: Final = (CompressionWithClientCompaction, UpstreamWithCompaction)


def answers_from_summaries(settings: Settings) -> bool:
    """True if a client's own compaction is answered from a summary that is ready."""
    compression = settings.compression
    return isinstance(compression, CompressionWithClientCompaction) and compression.client_compaction == "answer"
