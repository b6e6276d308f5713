"""HTTP out: aiohttp, bytes in, bytes out."""

from proxy.upstream.direct import DirectReply, DirectUpstream, Target, Timeouts
from proxy.upstream.probes import OnTold, Probes, may_answer
from proxy.upstream.windows import find

__all__ = ["DirectReply", "DirectUpstream", "OnTold", "Probes", "Target", "Timeouts", "find", "may_answer"]
