"""What the checker takes for a device that meets a clause is what a manager takes for one."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outfitter_proto import clauses
from outfitter_proto.records import Clause
from outfitter_verify.ledger.choices import meets

VALUES = st.sampled_from(["a", "A", "b*", "*", "?", "a?c", "*b*", "8", "8.0", "8.10", "40Gi", "41943040Ki", 8, 550])
PROPERTIES = st.none() | st.sampled_from(
    [
        "",
        "a",
        "abc",
        "a,b",
        "a, 8",
        "8",
        "8.0",
        "8.9",
        "8.10",
        "550",
        "550.54",
        "42949672960",
        "40 GiB",
        "40GB",
        "-1",
        ",",
        ",".join(["z"] * 64),
        ",".join(["z"] * 65),
        ",".join(["z"] * 64) + ",8",
    ]
)
SOME = VALUES | st.lists(VALUES, min_size=1, max_size=3)
BOUNDS = st.sampled_from([8, "8.9", "40Gi", "40k", "550.54.14", -2])
CLAUSES = SOME | st.dictionaries(st.just("is"), SOME).flatmap(
    lambda said: st.fixed_dictionaries(
        {name: st.just(value) for name, value in said.items()},
        optional={"not": SOME, "min": BOUNDS, "max": BOUNDS, "exists": st.booleans()},
    )
)


@settings(max_examples=1000)
@given(CLAUSES, PROPERTIES)
@example({"not": "a"}, ",".join(["z"] * 65))
def test_both_judge_each_clause_alike(clause: Any, text: str | None) -> None:
    where = msgspec.convert({"p": clause}, dict[str, Clause])
    info = {} if text is None else {"p": text}
    ours = clauses.Sieve(clauses.clauses_of(where, None)).fault(info) is None
    assert meets(clause, "p", info) == ours
