"""Which requests are captured, which are refused, and which would end the server."""

from types import SimpleNamespace
from typing import Any

import pytest

from hashtap.requests import check_ids, check_no_beams, mark_as_warm_up, refusal, wants_capture

HEALTH = "HEALTH_CHECK"
PLAIN: dict[str, Any] = {
    "rid": "0" * 32,
    "to_finish": None,
    "finished_reason": None,
    "lora_id": None,
    "multimodal_inputs": None,
    "input_embeds": None,
    "positional_embed_overrides": None,
    "token_type_ids": None,
    "multi_item_delimiter_indices": None,
    "session": None,
    "extra_key": None,
    "cache_salt": None,
    "beam_group": None,
}


def request(custom_params: Any = None, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**PLAIN, **changes}, sampling_params=SimpleNamespace(custom_params=custom_params))


@pytest.mark.parametrize(
    ("custom_params", "tagged", "everything"),
    [
        (None, False, True),
        ({}, False, True),
        ({"other": 1}, False, True),
        ({"hashtap": True}, True, True),
        ({"hashtap": False}, False, False),  # how the launching process marks warm-up
        ({"hashtap": "yes"}, False, False),
    ],
)
def test_whose_prompts(custom_params: Any, tagged: bool, everything: bool) -> None:
    assert wants_capture(request(custom_params), "tagged", HEALTH) is tagged
    assert wants_capture(request(custom_params), "all", HEALTH) is everything


@pytest.mark.parametrize(
    "changes", [{"rid": f"{HEALTH}_1"}, {"to_finish": "abort"}, {"finished_reason": "abort"}], ids=str
)
def test_health_checks_and_aborted_requests_are_never_captured(changes: dict[str, Any]) -> None:
    for requests in ("tagged", "all"):
        assert not wants_capture(request({"hashtap": True}, **changes), requests, HEALTH)


def test_beam_searches_are_never_captured() -> None:
    """SGLang takes the custom_params away from them, whatever they said."""
    for requests in ("tagged", "all"):
        assert not wants_capture(request(beam_group=object()), requests, HEALTH)


BEAMS = {"beam_width": 4, "custom_params": {"hashtap": True}}


@pytest.mark.parametrize("params", [BEAMS, [{"n": 1}, BEAMS]])
def test_a_tagged_beam_search_is_refused(params: Any) -> None:
    with pytest.raises(ValueError, match="beam_width 4: hashtap captures no prompt of a beam search"):
        check_no_beams(params)


@pytest.mark.parametrize(
    "params",
    [None, {}, [], {"beam_width": 4}, BEAMS | {"beam_width": 1}, BEAMS | {"custom_params": {"hashtap": False}}],
)
def test_other_requests_are_not(params: Any) -> None:
    check_no_beams(params)


def test_refusals() -> None:
    assert refusal(request()) is None
    for name in ("lora_id", "multimodal_inputs", "input_embeds", "positional_embed_overrides", "token_type_ids"):
        assert refusal(request(**{name: "x"})) is not None
    assert "adapter" in str(refusal(request(lora_id="a", extra_key="a")))
    assert "session" in str(refusal(request(session=object())))
    assert "several items" in str(refusal(request(multi_item_delimiter_indices=[4, 9])))
    assert "salt" in str(refusal(request(cache_salt="s")))


@pytest.mark.parametrize("input_ids", [None, [], [0, 511], [[1], [511, 2]], "text"])
def test_sound_ids(input_ids: Any) -> None:
    check_ids(input_ids, 512)


@pytest.mark.parametrize(("input_ids", "wrong"), [([1, 512], 512), ([-1, 5], -1), ([[1], [2, 2**40]], 2**40)])
def test_ids_that_the_model_does_not_have(input_ids: Any, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary of 512"):
        check_ids(input_ids, 512)


@pytest.mark.parametrize("sampling_params", [None, {"temperature": 0}, {"custom_params": None}, [{}, {"n": 1}]])
def test_warm_up_is_marked(sampling_params: Any) -> None:
    obj = SimpleNamespace(sampling_params=sampling_params)
    mark_as_warm_up(obj)
    params = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    assert all(one["custom_params"] == {"hashtap": False} for one in params)


def test_a_tagged_request_stays_tagged() -> None:
    obj = SimpleNamespace(sampling_params={"custom_params": {"hashtap": True, "other": 1}})
    mark_as_warm_up(obj)
    assert obj.sampling_params == {"custom_params": {"hashtap": True, "other": 1}}
