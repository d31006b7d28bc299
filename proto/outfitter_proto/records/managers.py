"""The signs of life of managers, in a topic of their own that everybody may do without."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from outfitter_proto.records.registrations import Owner
from outfitter_proto.records.values import Utc


class Beat(Struct, frozen=True, kw_only=True, tag_field="type", tag="beat", gc=False):
    """The commit loop of a writer's tenure lives: the record under the writer's name.

    `instance` and `version` are as in `ManagerIdentity`. `sweeps`: it also writes the dead letters of hosts without a
    manager, wherever nobody else must. `stopped_at`: when it stopped in order. Left out: it goes on. `process`: the
    manager's, if it watches processes itself, so that others on its machine can see its end. The record's append time
    says when it lived.
    """

    writer: str
    instance: str
    version: str
    sweeps: bool = False
    stopped_at: Utc | UnsetType = UNSET
    process: Owner | UnsetType = UNSET

    @property
    def key(self) -> str:
        return self.writer
