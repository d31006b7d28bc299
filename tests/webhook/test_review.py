"""The answer to a review: a patch of one container, or a denial in words, or nothing."""

from __future__ import annotations

import base64
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_service.config import ResourceConfig, inspect
from outfitter_service.requests import annotated_amounts
from outfitter_service.webhook.review import LONGEST_DENIAL, AmountsOf, NoReviewError, ReviewOutcome, answer
from support.webhook import CONFIG, patched, review

GPU = {"outfitter.dev/resources": "gpu=2"}
TWO = {"nvidia.com/gpu": "2"}


@pytest.fixture(scope="module")
def amounts_of(tmp_path_factory: pytest.TempPathFactory) -> AmountsOf:
    file = tmp_path_factory.mktemp("review") / "outfitter.toml"
    file.write_text(CONFIG)
    resources: tuple[ResourceConfig, ...] = inspect(file, {}, {}).resources
    return partial(annotated_amounts, resources=resources)


def answered(body: bytes, amounts_of: AmountsOf) -> dict[str, Any]:
    """The answer, which must belong to the request."""
    made = json.loads(answer(body, amounts_of)[0])
    assert (made["apiVersion"], made["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert made["response"]["uid"] == json.loads(body)["request"]["uid"]
    return dict(made)


def resources_of(body: bytes, amounts_of: AmountsOf) -> list[Any]:
    """The containers' resources after the patch. Nothing else may have changed."""
    made = answered(body, amounts_of)
    assert made["response"]["allowed"] is True
    before = json.loads(body)["request"]["object"]
    after = patched(before, made)
    found = [container.pop("resources", None) for container in after["spec"]["containers"]]
    for container in before["spec"]["containers"]:
        container.pop("resources", None)
    assert after == before
    return found


def denial(body: bytes, amounts_of: AmountsOf) -> str:
    response = answered(body, amounts_of)["response"]
    assert response["allowed"] is False
    assert "patch" not in response
    assert response["status"]["code"] == 422
    return str(response["status"]["message"])


def test_the_only_container_gets_requests_and_limits_and_keeps_its_others(amounts_of: AmountsOf) -> None:
    (found,) = resources_of(review(GPU), amounts_of)
    assert found == {"limits": {"cpu": "2"} | TWO, "requests": {"cpu": "500m"} | TWO}


@pytest.mark.parametrize("resources", [{}, None, {"limits": None}, {"claims": [{"name": "x"}]}])
def test_a_container_without_quantities_gets_them_and_keeps_its_claims(amounts_of: AmountsOf, resources: Any) -> None:
    (found,) = resources_of(review(GPU, {"name": "a", "resources": resources}), amounts_of)
    assert found == {**(resources or {}), "requests": TWO, "limits": TWO}
    (found,) = resources_of(review(GPU, {"name": "a"}), amounts_of)
    assert found == {"requests": TWO, "limits": TWO}


@pytest.mark.parametrize(
    ("annotations", "position"),
    [(GPU, 1), (GPU | {"outfitter.dev/container": "sidecar"}, 0), (GPU | {"outfitter.dev/container": "c"}, 2)],
)
def test_of_several_containers_flinks_or_the_named_one_is_changed(
    amounts_of: AmountsOf, annotations: dict[str, str], position: int
) -> None:
    containers = [{"name": "sidecar"}, {"name": "flink-main-container"}, {"name": "c"}]
    found = resources_of(review(annotations, *containers), amounts_of)
    assert [index for index, resources in enumerate(found) if resources] == [position]


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        (GPU, "the pod has no container named flink-main-container; its containers are a, b"),
        (GPU, "(name the worker's with the annotation outfitter.dev/container)"),
        (GPU | {"outfitter.dev/container": "init"}, "the pod has no container named init; its containers are a, b"),
        ({"outfitter.dev/resources": "gpu=two"}, "gpu: must be a whole number"),
        ({"outfitter.dev/resources": "npu"}, "npu: is no configured resource"),
        ({"outfitter.dev/resources": ""}, "is empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_requested_is_denied_with_what_to_write(
    amounts_of: AmountsOf, annotations: dict[str, str], words: str
) -> None:
    body = json.loads(review(annotations, {"name": "a"}, {"name": "b"}))
    body["request"]["object"]["spec"]["initContainers"] = [{"name": "init"}]
    assert words in denial(json.dumps(body).encode(), amounts_of)


def test_a_denial_names_some_containers_counts_the_others_and_keeps_the_hint(amounts_of: AmountsOf) -> None:
    hint = "(name the worker's with the annotation outfitter.dev/container)"
    many = [{"name": f"c{number}"} for number in range(50_000)]
    assert denial(review(GPU, *many), amounts_of) == (
        "the pod has no container named flink-main-container; its containers are c0, c1, c2, c3, c4, c5, c6, c7 "
        f"and 49992 others {hint}"
    )
    assert "c6, c7 and 1 other (name" in denial(review(GPU, *many[:9]), amounts_of)
    assert "c6, c7 (name" in denial(review(GPU, *many[:8]), amounts_of)
    for long in (review(GPU, *[{"name": "a" * 100_000}] * 9), review(GPU, *[{"name": "\U000e0001" * 100_000}] * 9)):
        assert denial(long, amounts_of).endswith(f" and 1 other {hint}")
    asked = GPU | {"outfitter.dev/container": "x" * 100_000}
    assert denial(review(asked, {"name": "a"}), amounts_of).endswith("x…; its containers are a")
    other = review(GPU, {"name": "a" * 100_000, "resources": {"limits": {"nvidia.com/gpu": "3"}}})
    assert "differs from what the annotation" in denial(other, amounts_of)


def test_a_pod_without_a_container_is_denied_with_that(amounts_of: AmountsOf) -> None:
    for asked in (GPU, GPU | {"outfitter.dev/container": "a"}):
        body = json.loads(review(asked))
        body["request"]["object"]["spec"]["containers"] = []
        assert denial(json.dumps(body).encode(), amounts_of) == "the pod has no container"


def test_a_denial_is_no_longer_than_its_bound_and_moves_no_cursor(amounts_of: AmountsOf) -> None:
    message = denial(review(GPU, {"name": "\x1b[2J" + "a" * 100_000}, {"name": "b"}), amounts_of)
    assert message.isprintable()
    assert len(message) <= LONGEST_DENIAL + 1


@pytest.mark.parametrize("field", ["requests", "limits"])
@pytest.mark.parametrize("own", ["3", "1k", "500m", "x", 1, "-2", "2.1", "2e9999", "2e-9999", "2e99999", "2..0"])
def test_a_quantity_of_its_own_that_differs_is_denied_with_both(amounts_of: AmountsOf, field: str, own: Any) -> None:
    message = denial(review(GPU, {"name": "a", "resources": {field: {"nvidia.com/gpu": own}}}), amounts_of)
    assert message == (
        f"error: container a: resources.{field}.nvidia.com/gpu: differs from what the annotation "
        f"outfitter.dev/resources asks for, which is 2 (found '{own}'); keep one of them"
    )


@pytest.mark.parametrize(
    ("amount", "own"),
    [(2, "2"), (1000, "1k"), (1000, "1e3"), (2048, "2Ki"), (2, 2), (1, "1000m"), (1, "1.0"), (1, "1."), (1, "+1"),
     (1, "1e0"), (1, "1E0"), (1000, "1e+3"), (1, "1000e-3"), (1, "1000000u"), (1, "1000000000n"), (512, ".5Ki")],
)  # fmt: skip
def test_an_equal_quantity_of_its_own_stays_as_it_is(amounts_of: AmountsOf, amount: int, own: Any) -> None:
    same = {"requests": {"nvidia.com/gpu": own}, "limits": {"nvidia.com/gpu": own}}
    annotations = {"outfitter.dev/resources": f"gpu={amount}"}
    body = review(annotations, {"name": "a", "resources": same})
    assert answer(body, amounts_of)[1] is ReviewOutcome.UNCHANGED
    assert resources_of(body, amounts_of) == [same]


@pytest.mark.parametrize(
    ("own", "outcome"), [("3", ReviewOutcome.DENIED), ("0", ReviewOutcome.UNCHANGED), ("0.0", ReviewOutcome.UNCHANGED)]
)
@pytest.mark.parametrize("text", ["gpu=0", "none"])
def test_a_container_that_is_to_have_none_may_have_none_of_its_own(
    amounts_of: AmountsOf, text: str, own: str, outcome: ReviewOutcome
) -> None:
    none = {"outfitter.dev/resources": text}
    container = {"name": "a", "resources": {"limits": {"nvidia.com/gpu": own}}}
    assert answer(review(none, container), amounts_of)[1] is outcome
    assert answer(review(none, {"name": "a"}, {"name": "b"}), amounts_of)[1] is ReviewOutcome.UNCHANGED


@pytest.mark.parametrize("own", ["9" * 64, "2" + "0" * 100_000, "2." + "0" * 99, 2e300, True, ["2"]])
def test_a_quantity_that_no_quantity_has_is_denied_and_never_computed(amounts_of: AmountsOf, own: Any) -> None:
    message = denial(review(GPU, {"name": "a", "resources": {"limits": {"nvidia.com/gpu": own}}}), amounts_of)
    assert "differs from what the annotation" in message


@pytest.mark.parametrize(
    ("resources", "operations"),
    [
        (None, {"": {"requests": TWO, "limits": TWO}}),
        ({}, {"/requests": TWO, "/limits": TWO}),
        ({"limits": None, "requests": {}}, {"/requests/nvidia.com~1gpu": "2", "/limits": TWO}),
        ({"limits": {"cpu": "1"}, "requests": TWO}, {"/limits/nvidia.com~1gpu": "2"}),
        ({"limits": {"x": "A" * 3_000_000}, "y": "B" * 1000}, {"/requests": TWO, "/limits/nvidia.com~1gpu": "2"}),
    ],
)
def test_the_patch_adds_only_what_is_missing(amounts_of: AmountsOf, resources: Any, operations: dict[str, Any]) -> None:
    response = answered(review(GPU, {"name": "a", "resources": resources}), amounts_of)["response"]
    added = {each["path"]: each["value"] for each in json.loads(base64.b64decode(response["patch"]))}
    assert added == {f"/spec/containers/0/resources{path}": value for path, value in operations.items()}


@given(
    resources=st.none()
    | st.dictionaries(
        st.sampled_from(["requests", "limits", "claims"]),
        st.none() | st.dictionaries(st.sampled_from(["cpu", "a/b~c", "nvidia.com/gpu", "x"]), st.just("2"), max_size=3),
    )
)
def test_a_patch_gives_each_field_what_it_lacks_and_leaves_the_rest(amounts_of: AmountsOf, resources: Any) -> None:
    (found,) = resources_of(review(GPU, {"name": "a", "resources": resources}), amounts_of)
    before = resources or {}
    assert found == before | {field: TWO | (before.get(field) or {}) for field in ("requests", "limits")}


def test_a_name_with_signs_of_a_pointer_is_escaped() -> None:
    body = review(GPU, {"name": "a", "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}})
    (found,) = resources_of(body, lambda _: {"a/b~c": "2"})
    assert found == {"limits": {"cpu": "1", "a/b~c": "2"}, "requests": {"cpu": "1", "a/b~c": "2"}}


def test_a_pod_that_was_changed_is_not_changed_again(amounts_of: AmountsOf) -> None:
    body = review(GPU)
    once = patched(json.loads(body)["request"]["object"], answered(body, amounts_of))
    again = json.loads(body)
    again["request"]["object"] = once
    assert answer(json.dumps(again).encode(), amounts_of)[1] is ReviewOutcome.UNCHANGED


POD = {"group": "", "version": "v1", "kind": "Pod"}


@pytest.mark.parametrize(
    ("annotations", "request_fields"),
    [
        (None, {}),
        ({}, {}),
        ({"outfitter.dev/resource": "x"}, {}),
        ({"outfitter.dev/resources": "none"}, {}),
        (GPU, {"operation": "UPDATE"}),
        (GPU, {"operation": "DELETE", "object": None}),
        (GPU, {"operation": "CONNECT"}),
        (GPU, {"kind": POD | {"kind": "ReplicaSet"}}),
        (GPU, {"kind": POD | {"version": "v2"}}),
        (GPU, {"kind": POD | {"group": "example.org"}}),
    ],
)
def test_what_does_not_ask_or_is_no_creation_of_a_pod_is_let_through_unchanged(
    amounts_of: AmountsOf, annotations: dict[str, str] | None, request_fields: dict[str, Any]
) -> None:
    made = answered(review(annotations, **request_fields), amounts_of)
    assert made["response"].keys() == {"uid", "allowed"}
    assert made["response"]["allowed"] is True


def changed(body: bytes, **fields: Any) -> bytes:
    return json.dumps(json.loads(body) | fields).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}',
        b'{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": null}',
        changed(review(GPU), apiVersion="admission.k8s.io/v1beta1"),
        changed(review(GPU), kind="ConversionReview"),
        changed(review(GPU), kind="x" * 100_000),
        review(GPU, uid=""),
        review(GPU, uid="u" * 257),
        review(GPU, object=7),
        review(GPU, object={"metadata": {"annotations": {"outfitter.dev/resources": 7}}, "spec": {"containers": []}}),
        review(GPU, object={"metadata": {"annotations": GPU}, "spec": {"containers": [{"resources": []}]}}),
        review(GPU)[:-1],
        review(GPU) + b"x",
        b"[" * 100_000,
        review(GPU).replace(b'"oldObject": null', b'"oldObject": ' + b'{"a":' * 100_000),
        review(GPU).replace(b'"image": "worker:1"', b'"image": ' + b"[" * 50_000 + b"]" * 50_000),
        review(GPU).replace(b"worker", b"\\ud800"),
    ],
)
def test_what_is_no_review_of_v1_is_refused_in_a_short_message(amounts_of: AmountsOf, body: bytes) -> None:
    with pytest.raises(NoReviewError) as caught:
        answer(body, amounts_of)
    assert 10 < len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(annotations=JSON, containers=st.lists(JSON | st.fixed_dictionaries({"name": JSON, "resources": JSON})))
def test_any_pod_is_answered_or_refused(amounts_of: AmountsOf, annotations: Any, containers: list[Any]) -> None:
    pod = {"metadata": {"annotations": annotations}, "spec": {"containers": containers}}
    try:
        made, outcome = answer(review(None, object=pod), amounts_of)
    except NoReviewError:
        return
    assert json.loads(made)["response"]["allowed"] is (outcome is not ReviewOutcome.DENIED)


def test_a_whole_review_is_read_with_its_many_other_fields(amounts_of: AmountsOf) -> None:
    for file in sorted(Path(__file__).parent.glob("reviews/*.json")):
        assert answer(file.read_bytes(), amounts_of)[1] is ReviewOutcome.CHANGED, file.name
