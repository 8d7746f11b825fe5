"""Cache table: which slots have a place in a bounded cache, and which place is reused next.

A cache slot has room for one row. `pin` pins the cache slots of slots that have one, `assign` assigns some to the
others: free ones, then clean ones without a pin, least recently used first. A cache slot that was changed is dirty. It
is reused only after `oldest_dirty` returned it to a writer and `written` reported that it is stored; until then it can
be found. The hash is bounded by the number of cache slots, not by that of slots.

Nothing here locks: callers in several threads must.
"""

from rowmesh.ops.cache_table.cpu import MAX_CACHE_SLOTS, MISSING, CacheTable

__all__ = ["MAX_CACHE_SLOTS", "MISSING", "CacheTable"]
