"""However long or deep or many what a file says: one clear error, in a bounded time.

The time limit is some hundred times what each case takes, and far below what it took when it grew with the square.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from outfitter_proto.support.units import parse_duration
from outfitter_service.config import inspect, options
from outfitter_service.config.names import resource_names
from outfitter_service.config.sources import MAX_BYTES, MAX_KEY

MANY = 100_000
TOML = {
    "a number of 5,000 digits": "lease = " + "1" * 5_000,
    "a number of a million digits": "lease = " + "1" * 1_000_000,
    "hexadecimal": "lease = 0x" + "f" * 100_000,
    "binary": "lease = 0b" + "1" * 100_000,
    "a digit's float": "lease = 1." + "1" * 500_000,
    "dots": "a" + ".a" * MANY + " = 1",
    "quoted dots": '"a"' + '."a"' * MANY + " = 1",
    "dots with blanks": "a" + " . a" * MANY + " = 1",
    "dots behind an equals sign": '"="' + ".a" * MANY + " = 1",
    "dots in an inline table": "x = {a" + ".a" * MANY + " = 1}",
    "dots in a header": "[a" + ".a" * MANY + "]",
    "dots in an array of tables": "[[a" + ".a" * MANY + "]]",
    "tables in tables": "x = " + "{a = " * MANY + "1" + "}" * MANY,
    "arrays in arrays": "x = " + "[" * MANY + "]" * MANY,
    "a long key": "a" * 900_000 + " = 1",
    "a long quoted key": '"' + "=" * 900_000 + '" = 1',
    "an unclosed quote": '"' + "'a\"" * 200_000,
    "many keys": "".join(f"k{n} = 1\n" for n in range(50_000)),
    "many headers": "".join(f"[external-resource.r{n}]\namount = 1\n" for n in range(15_000)),
    "many unknown keys": "".join(f"unknown-{n} = 1\n" for n in range(15_000)),
    "many names": f"external-resources = {[f'r{n}' for n in range(20_000)]}",
    "many names in a text": 'external-resources = "' + ";".join(f"r{n}" for n in range(20_000)) + '"',
    "a long duration": 'lease = "' + "1s" * 400_000 + 'x"',
    "a long amount": 'external-resources = ["g"]\n[external-resource.g]\namount = "' + "9" * 900_000 + '"',
    "a long name": 'host = "' + "h" * 900_000 + '"',
}
FLINK = {
    "a long number": "outfitter.lease: " + "1" * 900_000,
    "a long key": "a" * 900_000 + ": 1",
    "dots": "external-resource" + ".a" * MANY + ": 1",
    "many names": "external-resources: " + ";".join(f"r{n}" for n in range(20_000)),
    "a long amount": "external-resources: g\nexternal-resource.g.amount: " + "9" * 900_000,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", TOML)
def test_whatever_toml_says_without_measure_is_one_clear_error(tmp_path: Path, case: str) -> None:
    assert len(TOML[case]) <= MAX_BYTES
    path = tmp_path / "a.toml"
    path.write_text(TOML[case])
    inspection = inspect(path, {}, {})
    assert inspection.problems
    assert all(len(str(problem)) < 8_000 for problem in inspection.problems)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.yaml", "flink-conf.yaml"])
@pytest.mark.parametrize("case", FLINK)
def test_whatever_flinks_file_says_without_measure_is_one_clear_error(tmp_path: Path, case: str, name: str) -> None:
    path = tmp_path / name
    path.write_text(FLINK[case])
    inspection = inspect(path, {}, {})
    assert inspection.errors
    assert all(len(str(problem)) < 8_000 for problem in inspection.problems)


@pytest.mark.parametrize("text", ["9" * 100_000, "1s" * 50_000 + "x", "1." * 50_000, " " * 100_000])
def test_a_duration_of_any_length_is_read_or_refused_in_few_words(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration") as caught:
        parse_duration(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("parse", [option.parse for option in (*options.SETTINGS, *options.RESOURCE_OPTIONS)])
@pytest.mark.parametrize("text", ["9" * 500_000, "a." * 250_000, "=;" * 250_000])
@pytest.mark.timeout(60)
def test_no_option_takes_long_over_a_value_of_any_length(parse: options.Parse, text: str) -> None:
    with suppress(ValueError):
        parse(text)


def test_keys_of_32_parts_and_of_the_longest_length_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    longest, deepest = "p" * (MAX_KEY - 30), "x" + ".x" * 27
    path.write_text(
        'external-resources = ["g"]\n[external-resource.g]\namount = 1\n'
        f'param.{longest} = "a.b"\nparam.{deepest} = "{"1." * 200}"\n'
    )
    inspection = inspect(path, {}, {})
    assert not inspection.errors, inspection.errors


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a;b", ["a", "b"]),
        (" a ; 'b' ;", ["a", "b"]),
        ("'a;b'", ["a;b"]),
        ("a;;b", ["a", "", "b"]),
        ("'it''s';x", ["it's", "x"]),
        ('"a" ; "b"', ["a", "b"]),
        ("a; ", ["a"]),
    ],
)
def test_a_list_is_split_as_before(text: str, items: list[str]) -> None:
    from outfitter_service.config.names import _split

    assert _split(text, ";") == items


def test_a_thousand_resources_are_read() -> None:
    names, errors = resource_names(";".join(f"r{n}" for n in range(1_000)))
    assert (len(names), errors) == (1_000, [])
