"""The store that replicas share: encrypted tables on Redis, in a SQLite file, or in the memory of one process.

The way of a compaction record into the store:

    called                 in                  does
    ---------------------  ------------------  --------------------------------------------------------------------
    ``RecordTable.save``   ``tables.py``       names the key (``key_names.py``)
    ``TableAccess.write``  ``tables.py``       seals the record (``encryption.py``), and returns it or the one that
                                               another replica has stored first
    ``TableAccess.run``    ``tables.py``       logs if the store went up or down
    ``Backend.run``        ``redis.py``,       keeps the deadline, if the breaker admits the operation; what they share
                           ``sqlite.py``,      is in ``backend.py``
                           ``operations.py``
    ``Claim``              ``operations.py``   stores the value on the server or in the table, unless there is one

``RecordTable.newest`` takes the same way with ``Read``, and opens the first value that it can.
"""

from proxy.store.backend import StoreMisconfigured, StoreUnsupported
from proxy.store.breaker import Breaker, Patience
from proxy.store.sqlite_file import has_data
from proxy.store.store import (
    EMBEDDED_ADVICE,
    INSTEAD,
    Store,
    StoreState,
    describe_store,
    embedded_problem,
    open_store,
    store_status,
)
from proxy.store.summary_table import Lease, SummaryTable

__all__ = [
    "EMBEDDED_ADVICE",
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
    "embedded_problem",
    "has_data",
    "open_store",
    "store_status",
]
