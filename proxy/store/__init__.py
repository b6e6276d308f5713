"""The store: Redis protocol, embedded Valkey, key names, sealed records, memory."""
