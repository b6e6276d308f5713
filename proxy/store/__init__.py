"""The store: Redis protocol, embedded Valkey, key names, sealed records, memory."""

from proxy.store.backend import EmbeddedUnavailable, StoreError, StoreMisconfigured, StoreUnsupported
from proxy.store.breaker import Breaker, Patience
from proxy.store.embedded import Embedded, is_running
from proxy.store.encryption import ensure_master_key as master_key
from proxy.store.encryption import find_master_key as existing_key
from proxy.store.state import INSTEAD, StoreState
from proxy.store.state import describe as describe_store
from proxy.store.state import status as store_status
from proxy.store.store import Store, open_store
from proxy.store.summary_table import Lease, SummaryTable

__all__ = [
    "INSTEAD",
    "Breaker",
    "Embedded",
    "EmbeddedUnavailable",
    "Lease",
    "Patience",
    "Store",
    "StoreError",
    "StoreMisconfigured",
    "StoreState",
    "StoreUnsupported",
    "SummaryTable",
    "describe_store",
    "existing_key",
    "is_running",
    "master_key",
    "open_store",
    "store_status",
]
