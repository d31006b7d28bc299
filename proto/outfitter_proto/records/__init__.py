"""Every message and record that goes over the wire, as frozen msgspec structs.

Evolution is additive only: a new field gets a default, no field changes its type, and readers skip types
they do not know. `state` and the `*_code` fields are plain strings so that a reader of this version can
read a state of a later one; `AllocationState` lists those this version writes.

Units: `*_s` are seconds (float), times are UTC datetimes (RFC 3339 with `Z` on the wire), `*_ticks` are
clock ticks as in field 22 of proc(5) `/proc/<pid>/stat`.
"""

from outfitter_proto.records.history import *
from outfitter_proto.records.ledger import *
from outfitter_proto.records.registrations import *
from outfitter_proto.records.values import *
