"""The store: Redis protocol, embedded Valkey, key names, sealed records, memory."""

from proxy.store.breaker import Breaker, Patience
from proxy.store.embedded import Embedded, is_running
from proxy.store.errors import EmbeddedUnavailable, StoreError, StoreMisconfigured, StoreUnsupported
from proxy.store.master import existing as existing_key
from proxy.store.master import from_directory as master_key
from proxy.store.opener import Store, open_store
from proxy.store.state import INSTEAD, StoreState
from proxy.store.state import describe as describe_store
from proxy.store.state import status as store_status

__all__ = [
    "INSTEAD",
    "Breaker",
    "Embedded",
    "EmbeddedUnavailable",
    "Patience",
    "Store",
    "StoreError",
    "StoreMisconfigured",
    "StoreState",
    "StoreUnsupported",
    "describe_store",
    "existing_key",
    "is_running",
    "master_key",
    "open_store",
    "store_status",
]
