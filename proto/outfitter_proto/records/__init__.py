"""Every message and record on the wire, as frozen msgspec structs.

Versions only add: a new field gets a default, no field changes its type, and readers skip unknown types. `state` and
the `*_code` fields are plain strings, so that this version can read states of later ones; `AllocationState` lists those
that it writes.

Units: `*_s` are seconds (float), times are UTC datetimes (RFC 3339 with `Z` on the wire), `*_ticks` are
clock ticks as in field 22 of proc(5) `/proc/<pid>/stat`.
"""

from outfitter_proto.records.history import *
from outfitter_proto.records.ledger import *
from outfitter_proto.records.managers import *
from outfitter_proto.records.registrations import *
from outfitter_proto.records.values import *
