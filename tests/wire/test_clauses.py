"""What a clause means, for one device and for several."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto import clauses
from outfitter_proto.clauses import Clause, Condition

_where = msgspec.json.Decoder(dict[str, Clause])


def where(text: str) -> clauses.Clauses:
    return clauses.clauses_of(_where.decode(text), None)


def fault(text: str, **properties: str) -> str | None:
    return clauses.Sieve(where(text)).fault({name.replace("__", "."): value for name, value in properties.items()})


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("41943040Ki", "40Gi"),
        ("40Gi", "42949672960"),
        ("40GiB", "40Gi"),
        ("80 GB", "80G"),
        ("1.5k", "1500"),
        ("8", "8.0"),
        ("007", "7"),
        ("-0", "0"),
    ],
)
def test_numbers_are_one_whatever_their_unit(text: str, other: str) -> None:
    assert clauses.number(text) == clauses.number(other) is not None
    assert fault(f'{{"size": "{text}"}}', size=other) is None


@pytest.mark.parametrize(("less", "more"), [("8.9", "8.10"), ("550", "1000"), ("550.54", "550.54.14"), ("-1", "0")])
def test_numbers_with_dots_compare_as_versions(less: str, more: str) -> None:
    first, second = clauses.number(less), clauses.number(more)
    assert first is not None
    assert second is not None
    assert first < second


@pytest.mark.parametrize(
    "text", ["", "abc", "0x10", "1e3", "8.", ".5", "1.2.3k", "0.0001k", "-1.5", "40gi", "40K", "1 2", "9" * 20, "٣"]
)
def test_other_texts_are_no_numbers(text: str) -> None:
    assert clauses.number(text) is None


@pytest.mark.parametrize(
    ("clause", "value", "found"),
    [
        ('"NVIDIA H100"', "NVIDIA H100", None),
        ('"NVIDIA H100"', "NVIDIA A100", "model is NVIDIA A100"),
        ('"*H100*"', "NVIDIA H100 80GB", None),
        ('"*H100*"', "NVIDIA A100", "model is NVIDIA A100"),
        ('["A100", "H?00"]', "H200", None),
        ('["A100", "H?00"]', "L4", "model is L4"),
        ("8", "8.0", None),
        ('{"min": "40Gi"}', "42949672960", None),
        ('{"min": "40Gi"}', "42949672959", "model below 40Gi"),
        ('{"max": 80}', "81", "model above 80"),
        ('{"min": 8}', "eight", "model is eight, which is no number"),
        ('{"not": "*PCIe*"}', "H100 PCIe", "model is H100 PCIe"),
        ('{"is": "*H100*", "not": "*PCIe*"}', "H100 SXM", None),
        ('{"exists": true}', "x", None),
        ('{"exists": false}', "x", "has model"),
    ],
)
def test_a_clause_says_what_a_device_is_instead(clause: str, value: str, found: str | None) -> None:
    assert fault(f'{{"model": {clause}}}', model=value) == found


@pytest.mark.parametrize("clause", ['"x"', '["x", "y"]', '"*"', '{"min": 1}', '{"max": 1}', '{"exists": true}'])
@pytest.mark.parametrize("value", [None, ""])
def test_a_device_without_the_property_does_not_meet_a_clause_about_its_value(clause: str, value: str | None) -> None:
    properties = {} if value is None else {"model": value}
    assert fault(f'{{"model": {clause}}}', **properties) == "no model"


@pytest.mark.parametrize("clause", ['{"not": "x"}', '{"exists": false}', '{"not": ["x", "*"]}'])
def test_a_device_without_the_property_meets_what_only_excludes(clause: str) -> None:
    assert fault(f'{{"model": {clause}}}') is None


def test_a_device_with_more_values_than_count_meets_no_clause_that_excludes_one() -> None:
    many = [str(number) for number in range(clauses.MAX_LISTED)]
    assert fault('{"m": {"not": "x"}}', m=",".join(many)) is None
    assert fault('{"m": {"not": "x"}}', m=",".join([*many, "x"])) is not None
    assert fault('{"m": "x"}', m=",".join([*many, "x"])) is not None


@pytest.mark.parametrize(
    ("clause", "found"),
    [
        ('"b"', None),
        ('"a, b,c"', None),
        ('"d"', "groups is a, b,c"),
        ('{"not": "b"}', "groups is a, b,c"),
        ('"a*c"', None),
    ],
)
def test_a_list_meets_a_clause_as_a_whole_or_with_one_of_its_values(clause: str, found: str | None) -> None:
    assert fault(f'{{"groups": {clause}}}', groups="a, b,c") == found


def test_one_value_of_a_list_must_meet_all_that_a_clause_says() -> None:
    assert fault('{"lanes": {"min": 4, "max": 8}}', lanes="2,16") == "lanes above 8"
    assert fault('{"lanes": {"min": 4, "max": 8}}', lanes="2,8,16") is None
    assert fault('{"lanes": {"is": [2, 8], "min": 4}}', lanes="2,16") == "lanes below 4"


def test_devices_are_the_same_if_they_have_a_value_in_common() -> None:
    asked = clauses.clauses_of(None, ["group"])
    assert clauses.fault(asked, [{"group": "g2-0,g4-0"}, {"group": "g4-0,g2-1"}]) is None
    assert clauses.fault(asked, [{"group": "40Gi"}, {"group": "42949672960"}]) is None
    found = clauses.fault(asked, [{"group": "a,b"}, {"group": "b,c"}, {"group": "c,a"}])
    assert found == "the 3 devices have no value of group in common"
    assert clauses.fault(asked, [{"group": "a"}, {}]) == "the 2 devices have no value of group in common"
    assert clauses.fault(asked, [{}]) is None, "one device is the same as itself"


def test_a_grant_is_judged_device_by_device() -> None:
    asked = clauses.clauses_of({"model": "H100"}, None)
    assert clauses.fault(asked, [{"id": "g0", "model": "H100"}]) is None
    found = clauses.fault(asked, [{"id": "g0", "model": "H100"}, {"id": "g1", "model": "A100"}])
    assert found == "device g1: model is A100"


def test_clauses_are_equal_however_they_are_written() -> None:
    first = clauses.clauses_of({"b": "x", "a": Condition(is_="y")}, ["q", "p", "q"])
    second = clauses.clauses_of({"a": "y", "b": Condition(is_="x")}, ["p", "q"])
    assert first == second
    assert hash(first) == hash(second)
    assert not clauses.clauses_of({}, [])
    assert not clauses.clauses_of(None, None)


def test_clauses_are_said_in_words() -> None:
    asked = clauses.clauses_of(
        _where.decode('{"model": {"is": "*H100*", "not": ["a", "b"]}, "size": {"min": "40Gi", "max": 9}, "x": '
                      '{"exists": false}}'),
        ["nvlink.group"],
    )  # fmt: skip
    assert clauses.in_words(asked) == (
        "model is *H100* and model is not a or b and size at least 40Gi and size at most 9 and x is not there, one "
        "nvlink.group for all"
    )


@pytest.mark.parametrize(
    ("text", "same", "problem"),
    [
        ('{"m": {}}', [], "where.m says nothing; write a value, a list, or one of is, not, min, max, exists"),
        ('{"m": []}', [], "where.m is an empty list, which nothing meets; write a value"),
        ('{"m": ""}', [], "where.m has a value of 0 characters; write 1 to 256"),
        (
            '{"m": {"min": "forty"}}',
            [],
            "where.m.min is 'forty', which is no number; write one such as 8, 8.10, 40Gi, 80GB",
        ),
        ('{"m": {"min": 9, "max": "8.10"}}', [], "where.m has min 9 above max 8.10, which nothing meets"),
        (
            '{"m": {"is": 1, "exists": false}}',
            [],
            "where.m says exists false and a value, which nothing meets; leave one out",
        ),
        (
            '{"local_index": 0}',
            [],
            "local_index is no property to choose by: a device has it only when it is granted",
        ),
        ("{}", [""], "'' is no property's name; write one of 1 to 256 characters"),
        ("{}", list("abcde"), "same names 5 properties; at most 4 are compared"),
        (
            msgspec.json.encode({"m": [str(n) for n in range(65)]}).decode(),
            [],
            "where.m has 65 values; at most 64 are compared",
        ),
        (
            msgspec.json.encode({f"p{n}": 1 for n in range(33)}).decode(),
            [],
            "where names 33 properties; at most 32 are compared",
        ),
        (
            msgspec.json.encode({"m": [f"{n}*" for n in range(17)]}).decode(),
            [],
            "where has 17 values with * or ?; at most 16 are compared",
        ),
    ],
)
def test_what_is_wrong_with_clauses_is_said_with_what_would_be_valid(text: str, same: list[str], problem: str) -> None:
    assert clauses.problem(clauses.clauses_of(_where.decode(text), same)) == problem


def test_valid_clauses_have_no_problem() -> None:
    text = (
        '{"memory.total_bytes": {"min": "40Gi"}, "model": "*H100*", "a": [1, "b"], "c": {"not": "x", "exists": true}}'
    )
    assert clauses.problem(clauses.clauses_of(_where.decode(text), ["nvlink.group"])) is None


@given(st.text("ab?*\n.", max_size=8), st.text("ab\n.", max_size=10))
def test_a_pattern_matches_as_the_regular_expression_does(pattern: str, text: str) -> None:
    regex = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern)
    assert clauses.pattern(pattern)(text) == bool(re.fullmatch(regex, text, re.DOTALL))


def test_a_hostile_pattern_ends() -> None:
    """A regular expression would not, before the test's time limit."""
    assert not clauses.pattern("*a" * 100 + "b")("a" * 5000)


_condition = st.builds(
    Condition,
    is_=st.sampled_from([msgspec.UNSET, "a", "*", 8, ("a", 8), "b*"]),
    not_=st.sampled_from([msgspec.UNSET, "a", ("8.0", "c")]),
    min=st.sampled_from([msgspec.UNSET, 8, "8.10"]),
    max=st.sampled_from([msgspec.UNSET, 9, "1k"]),
    exists=st.sampled_from([msgspec.UNSET, True, False]),
)
_property = st.none() | st.sampled_from(["", "a", "8", "8.0", "9", "a,8", "bc, 900", "c", ","])


@given(_condition, _property)
def test_a_clause_holds_as_its_parts_say(condition: Condition, text: str | None) -> None:
    """Compared with a plain reading of the page."""
    values = [] if not text else sorted({text, *clauses.listed(text)})

    def has(said: object, value: str) -> bool:
        each = said if isinstance(said, tuple) else (said,)
        return any(
            clauses.pattern(str(one))(value)
            if clauses.is_pattern(one)
            else clauses.alike(str(one)) == clauses.alike(value)
            for one in each
        )

    def fits(value: str) -> bool:
        number = clauses.number(value)
        return (
            (condition.is_ is msgspec.UNSET or has(condition.is_, value))
            and (
                condition.min is msgspec.UNSET or (number is not None and number >= clauses.number(str(condition.min)))
            )
            and (
                condition.max is msgspec.UNSET or (number is not None and number <= clauses.number(str(condition.max)))
            )
        )

    needs = any(part is not msgspec.UNSET for part in (condition.is_, condition.min, condition.max))
    expected = (
        (not needs or any(map(fits, values)))
        and (condition.not_ is msgspec.UNSET or not any(has(condition.not_, value) for value in values))
        and (condition.exists is msgspec.UNSET or condition.exists == bool(values))
    )
    properties = {} if text is None else {"p": text}
    assert (clauses.Sieve(clauses.clauses_of({"p": condition}, None)).fault(properties) is None) == expected
