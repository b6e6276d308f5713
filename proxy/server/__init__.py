"""HTTP in: routes, the LLM handler, auth, limits and deadlines, health, admin."""

from proxy.server.access import tenants_of
from proxy.server.config import HeadersOf, Limits, ServerConfig, no_headers
from proxy.server.models import Models, Place
from proxy.server.server import Server

__all__ = ["HeadersOf", "Limits", "Models", "Place", "Server", "ServerConfig", "no_headers", "tenants_of"]
