"""HTTP out: aiohttp, bytes in, bytes out."""

from proxy.upstream.direct import DirectReply, DirectUpstream, Target, Timeouts

__all__ = ["DirectReply", "DirectUpstream", "Target", "Timeouts"]
