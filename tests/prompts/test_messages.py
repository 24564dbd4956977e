"""Conversations: those that are accepted, and the errors of the others."""

from typing import Any

import pytest

from tailrace.prompts.sources.cells import CellError
from tailrace.prompts.sources.messages import conversation

USER = {"role": "user", "content": "q"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}], "content": None}


def test_messages_keep_their_fields_without_nulls() -> None:
    system = {"role": "system", "content": "", "name": None}
    tool = {"role": "tool", "content": "", "tool_call_id": "1"}
    given = [system, USER, CALL, tool]
    call = {"role": "assistant", "tool_calls": CALL["tool_calls"]}
    assert conversation(given) == [{"role": "system", "content": ""}, USER, call, tool]


def test_text_parts_are_joined_to_one_text() -> None:
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b", "cache": None}]
    assert conversation([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(
    "ending", [[USER], [USER, CALL, {"role": "tool", "content": "4"}], [USER, {"role": "assistant", "content": "So"}]]
)
def test_a_conversation_ends_with_something_to_answer_or_to_continue(ending: list[Any]) -> None:
    assert len(conversation(ending)) == len(ending)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the prompt is empty"),
        ([{"role": "system", "content": "s"}], "ends with a message of the system, so there is nothing to answer"),
        ([USER, {"role": "developer", "content": "s"}], "ends with a message of the developer"),
        ([USER, {"role": "assistant", "content": " \n"}], "message 2, the last, is empty"),
        ([{"role": "user", "content": ""}], "message 1, the last, is empty"),
        ([{"role": "user", "content": []}], "message 1, the last, is empty"),
        ([USER, CALL], "message 2, the last, is empty"),
        (
            [{"role": "User", "content": "q"}],
            "role 'User'; expected one of system, developer, user, assistant, tool; did you mean 'user'?",
        ),
        ([{"role": "human", "content": "q"}], "unknown role 'human'; expected one of"),
        (
            [{"from": "human", "value": "q"}],
            "must have the texts role and content, not mapping {from",
        ),
        ([{"role": 1, "content": "q"}], "must have the texts role and content"),
        ([USER, {"role": "assistant", "content": None}, USER], "message 2, of the assistant, has no content"),
        ([USER, {"role": "assistant", "tool_calls": []}, USER], "message 2, of the assistant, has no content"),
        ([{"role": "user", "content": None}], "message 1, of the user, has no content"),
        ([{"role": "user", "content": 3}], "content must be a text or a list of text parts, not number 3"),
        (
            [{"role": "user", "content": {"text": "q"}}],
            "content must be a text or a list of text parts, not mapping",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}],
            "message 1 has a part of type 'image'; models are given text alone",
        ),
        ([{"role": "user", "content": ["q"]}], "message 1 has a part that is text 'q'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1 has a part that is mapping"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "message 1 has a part that is mapping"),
        (["q"], "message 1: a chat message must have"),
    ],
)
def test_other_conversations_are_refused_with_the_message(messages: list[Any], message: str) -> None:
    with pytest.raises(CellError) as caught:
        conversation(messages)
    assert message in str(caught.value)
