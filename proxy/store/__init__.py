"""The store: Redis protocol, embedded Valkey, key names, sealed records, memory."""

from proxy.store.breaker import Breaker, Patience
from proxy.store.embedded import Embedded, is_running
from proxy.store.errors import EmbeddedUnavailable, StoreError, StoreMisconfigured, StoreUnsupported
from proxy.store.master import existing as existing_key
from proxy.store.master import from_directory as master_key
from proxy.store.opener import Store, open_store
from proxy.store.records import StoreState

__all__ = [
    "Breaker",
    "Embedded",
    "EmbeddedUnavailable",
    "Patience",
    "Store",
    "StoreError",
    "StoreMisconfigured",
    "StoreState",
    "StoreUnsupported",
    "existing_key",
    "is_running",
    "master_key",
    "open_store",
]
