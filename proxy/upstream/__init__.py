"""HTTP out: aiohttp, bytes in, bytes out."""

from proxy.upstream.direct import DirectReply, Upstreams
from proxy.upstream.litellm import Bridge, Bridged
from proxy.upstream.probe_formats import find
from proxy.upstream.probes import OnTold, Probes, may_answer
from proxy.upstream.targets import Target, Timeouts

__all__ = [
    "Bridge",
    "Bridged",
    "DirectReply",
    "OnTold",
    "Probes",
    "Target",
    "Timeouts",
    "Upstreams",
    "find",
    "may_answer",
]
