"""The store that replicas share: encrypted tables on Redis, a private Valkey, or the memory of one process."""

from proxy.store.backend import EmbeddedUnavailable, StoreError, StoreMisconfigured, StoreUnsupported
from proxy.store.breaker import Breaker, Patience
from proxy.store.embedded import EmbeddedServer, is_running
from proxy.store.encryption import ensure_master_key, find_master_key
from proxy.store.store import INSTEAD, Store, StoreState, describe_store, open_store, store_status
from proxy.store.summary_table import Lease, SummaryTable

__all__ = [
    "INSTEAD",
    "Breaker",
    "EmbeddedServer",
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
    "ensure_master_key",
    "find_master_key",
    "is_running",
    "open_store",
    "store_status",
]
