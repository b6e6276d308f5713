"""The store: Redis protocol, embedded Valkey, key names, sealed records, memory."""

from proxy.store.errors import StoreError, StoreMisconfigured, StoreUnsupported
from proxy.store.opener import Store, open_store
from proxy.store.records import StoreState

__all__ = ["Store", "StoreError", "StoreMisconfigured", "StoreState", "StoreUnsupported", "open_store"]
