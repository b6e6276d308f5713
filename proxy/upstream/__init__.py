"""HTTP out: aiohttp, bytes in, bytes out."""

from proxy.upstream.direct import DirectReply, DirectUpstream, Target, Timeouts
from proxy.upstream.probes import Probes, may_answer

__all__ = ["DirectReply", "DirectUpstream", "Probes", "Target", "Timeouts", "may_answer"]
