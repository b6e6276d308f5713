"""Calls upstreams over HTTP, directly or through LiteLLM, and probes their windows."""

from proxy.upstream.direct import Upstreams
from proxy.upstream.litellm import Bridge, Bridged, OptionsOf, no_options
from proxy.upstream.probe_formats import find_window
from proxy.upstream.probes import OnWindows, Probes, may_answer
from proxy.upstream.targets import Target, Timeouts

__all__ = [
    "Bridge",
    "Bridged",
    "OnWindows",
    "OptionsOf",
    "Probes",
    "Target",
    "Timeouts",
    "Upstreams",
    "find_window",
    "may_answer",
    "no_options",
]
