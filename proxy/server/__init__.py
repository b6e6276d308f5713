"""HTTP in: routes, the LLM handler, auth, limits and deadlines, health, admin."""

from proxy.server.access import tenants_of
from proxy.server.config import Limits, ServerConfig
from proxy.server.models import Models, Place
from proxy.server.server import Server

__all__ = ["Limits", "Models", "Place", "Server", "ServerConfig", "tenants_of"]
