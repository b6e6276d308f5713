"""Serves clients over HTTP: routes, access, limits and deadlines, health, admin."""

from proxy.server.access import tenants_of
from proxy.server.config import Limits, NameOf, ServerConfig, same_name
from proxy.server.models import Models
from proxy.server.server import Server

__all__ = ["Limits", "Models", "NameOf", "Server", "ServerConfig"]
__all__ += ["same_name", "tenants_of"]
