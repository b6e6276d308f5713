"""The store that replicas share: encrypted tables on Redis, in a SQLite file, or in the memory of one process."""

from proxy.store.backend import StoreMisconfigured, StoreUnsupported
from proxy.store.breaker import Breaker, Patience
from proxy.store.sqlite_file import has_data
from proxy.store.store import INSTEAD, Store, StoreState, describe_store, open_store, store_status
from proxy.store.summary_table import Lease, SummaryTable

__all__ = [
    "INSTEAD",
    "Breaker",
    "Lease",
    "Patience",
    "Store",
    "StoreMisconfigured",
    "StoreState",
    "StoreUnsupported",
    "SummaryTable",
    "describe_store",
    "has_data",
    "open_store",
    "store_status",
]
