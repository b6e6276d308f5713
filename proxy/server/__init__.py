"""Serves clients over HTTP: routes, access, limits and deadlines, health, admin."""

from proxy.server.access import tenants_of
from proxy.server.config import HeadersOf, Limits, NameOf, ServerConfig, no_headers, same_name
from proxy.server.models import ListedUpstream, Models
from proxy.server.server import Server

__all__ = ["HeadersOf", "Limits", "ListedUpstream", "Models", "NameOf", "Server", "ServerConfig"]
__all__ += ["no_headers", "same_name", "tenants_of"]
