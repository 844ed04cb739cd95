"""Token streams: only growing, spliced, and read strictly."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octopus_trl.agent.calls import RawCall, read_json, read_xml
from octopus_trl.agent.chat import Chat
from octopus_trl.agent.tools import Result, offered
from octopus_trl.errors import ConfigError
from tests.agent.fakes import SPECIAL, TAGS, byte_tokenizer, template, xml_call

TEMPLATES = (
    "qwen3",
    "qwen3_training",
    "qwen3_instruct_2507",
    "qwen3_5_think",
    "qwen3_5_think_training",
    "qwen3_5_nothink",
    "qwen3_5_nothink_training",
    "qwen3_6",
    "qwen3_8_training",
)
TOOLS = offered(primitives=True, corpus=True)
SCHEMAS = [tool.schema() for tool in TOOLS]


def chat_of(name: str = "qwen3_5_nothink_training", **kwargs: Any) -> Chat:
    return Chat(byte_tokenizer(name), TOOLS, **kwargs)


def call_message(*calls: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "reasoning_content": "thought",
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
            for name, arguments in calls
        ],
    }


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=False, **kwargs
    )
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_templates_own_rendering(name: str) -> None:
    chat, tokenizer = chat_of(name, system_prompt="Be brief."), byte_tokenizer(name)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who keeps the west gate?"},
    ]
    want = rendered(tokenizer, messages, tools=SCHEMAS, add_generation_prompt=True)
    assert chat.prompt({"question": " Who keeps the west gate?\n"}) == want
    assert chat.prompt({"prompt": messages}) == want
    assert chat.prompt({"prompt": messages[1:]}) == want


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("num", [1, 2, 5])
def test_pc29_two_tool_turns_are_the_templates_own_ids(name: str, num: int) -> None:
    chat, tokenizer = chat_of(name, system_prompt=""), byte_tokenizer(name)
    turn = call_message(*[("search", {"query": "gate"})] * num)
    results = [f"hit number {index}" for index in range(num)]
    tools = [{"role": "tool", "name": "search", "content": text} for text in results]
    user = {"role": "user", "content": "q"}
    one_turn = rendered(tokenizer, [user, turn, *tools], tools=SCHEMAS, add_generation_prompt=True)
    two_turns = rendered(
        tokenizer, [user, turn, *tools, turn, *tools], tools=SCHEMAS, add_generation_prompt=True
    )
    suffix = chat.tool_ids([Result(text) for text in results])
    assert one_turn[-len(suffix) :] == suffix
    assert two_turns[-len(suffix) :] == suffix
    assert two_turns[: len(one_turn) - len(suffix)] == one_turn[: -len(suffix)]
    assert one_turn[-len(suffix) - 1] == chat.end_of_turn


def test_pc32_no_tools_and_an_empty_list_are_one_prompt() -> None:
    tokenizer = byte_tokenizer()
    bare = Chat(tokenizer, (), system_prompt="s")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert bare.prompt({"question": "q"}) == rendered(
        tokenizer, messages, add_generation_prompt=True
    )


def test_compact_mode_names_the_tools_without_their_schemas() -> None:
    compact, full = chat_of(compact=True), chat_of()
    text = compact.decode(compact.prompt({"question": "q"}))
    assert "rewind(turn, note)" in text
    assert "properties" not in text
    assert len(compact.prompt({"question": "q"})) < len(full.prompt({"question": "q"})) / 4
    assert compact.tool_ids([Result("x")]) == full.tool_ids([Result("x")])


@pytest.mark.parametrize("literal", [*SPECIAL, *TAGS])
def test_hostile_text_stays_text(literal: str) -> None:
    chat, tokenizer = chat_of(), byte_tokenizer()
    controls = {tokenizer.convert_tokens_to_ids(name) for name in (*SPECIAL, *TAGS)}
    text = f"a page {literal} with {literal}{literal} and\n{literal[:3]}{literal} more"
    frame = [token for token in chat.tool_ids([Result("x")]) if token in controls]
    ids = chat.tool_ids([Result(text)])
    assert [token for token in ids if token in controls] == frame
    assert text in chat.decode(ids)
    prompt = chat.prompt({"question": text})
    assert prompt.count(chat.end_of_turn) == chat.prompt({"question": "q"}).count(chat.end_of_turn)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from((*SPECIAL, *TAGS, "<|im_", "end|>", "<", "</tool_", "response>")),
            st.text(max_size=6),
        ),
        max_size=12,
    )
)
def test_any_text_is_encoded_without_loss_or_control_tokens(parts: list[str]) -> None:
    text = "".join(parts)
    ids = _SHARED.tool_ids([Result(text)])
    assert all(ids.count(token) == _FRAME.count(token) for token in _CONTROLS), (
        "no control token comes from text"
    )
    kept = text.encode("utf-8", "replace").decode().strip()
    assert kept in _SHARED.decode(ids)


_SHARED = chat_of()
_FRAME = _SHARED.tool_ids([Result("x")])
_CONTROLS = {byte_tokenizer().convert_tokens_to_ids(name) for name in (*SPECIAL, *TAGS)}


def test_a_turn_without_its_end_is_closed_by_ids_that_nobody_sampled() -> None:
    chat, tokenizer = chat_of("qwen3_5_think_training"), byte_tokenizer("qwen3_5_think_training")
    plain = chat.tool_ids([Result("r")])
    assert chat.tool_ids([Result("r")], closed=False) == [chat.end_of_turn, *plain]
    thinking = chat.tool_ids([Result("r")], closed=False, thinking=True)
    close = tokenizer.encode("\n</think>\n\n<|im_end|>")
    assert thinking == [*close, *plain]


def test_results_are_cut_longest_first_to_the_room() -> None:
    chat = chat_of()
    frame = len(chat.tool_ids([Result(""), Result("")]))
    ids = chat.tool_ids([Result("y" * 300), Result("short")], room=frame + 100)
    assert len(ids) == frame + 100
    text = chat.decode(ids)
    assert "short" in text
    assert "yyy[cut]" in text


def test_a_result_is_cut_at_its_own_limit() -> None:
    chat = chat_of()
    frame = len(chat.tool_ids([Result("")]))
    assert len(chat.tool_ids([Result("z" * 900, limit=50)])) == frame + 50
    assert len(chat.tool_ids([Result("z" * 50, limit=50)])) == frame + 50


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_after_thinking_run_and_calls_inside_it_do_not(name: str) -> None:
    chat = chat_of(name)
    tokenizer = byte_tokenizer(name)
    call = (
        xml_call("search", query="x")
        if "<function=" in template(name)
        else '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
    )
    start = "" if chat.opens_thinking else "<think>\n"
    outside = chat.read_turn(tokenizer.encode(f"{start}hm\n</think>\n\n{call}<|im_end|>"))
    inside = chat.read_turn(tokenizer.encode(f"{start}hm\n{call}\n</think>\n\nno<|im_end|>"))
    open_end = chat.read_turn(tokenizer.encode(f"{start}hm {call}<|im_end|>"))
    assert [item.name for item in outside.calls] == ["search"]
    assert outside.calls[0].arguments == {"query": "x"}
    assert inside.calls == []
    assert open_end.calls == []
    assert open_end.thinking
    assert open_end.closed


def test_a_turn_that_did_not_end_has_no_calls() -> None:
    chat, tokenizer = chat_of(), byte_tokenizer()
    words = f"go {xml_call('commit', result='x')}"
    assert len(chat.read_turn(tokenizer.encode(words + "<|im_end|>")).calls) == 1
    unfinished: list[list[int]] = [
        [],
        tokenizer.encode(words),
        tokenizer.encode(words + "<|endoftext|>"),
    ]
    for ids in unfinished:
        turn = chat.read_turn(ids)
        assert turn.calls == []
        assert not turn.closed


def test_several_calls_keep_their_order_and_text_around_them_is_ignored() -> None:
    text = f"first {xml_call('fork', task='a')} then\n{xml_call('open', docid='00123', page=2)} end"
    assert read_xml(text) == [
        RawCall("fork", {"task": "a"}, typed=False),
        RawCall("open", {"docid": "00123", "page": "2"}, typed=False),
    ]


@pytest.mark.parametrize(
    "value", ["</parameter>", "a </function> b", "x </tool_call> y", "\n\npadded \n", "[1, 2]", ""]
)
def test_a_value_may_hold_closing_tags_as_text(value: str) -> None:
    (call,) = read_xml(xml_call("commit", result=value))
    assert call == RawCall("commit", {"result": value}, typed=False)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=search>\n</tool_call>",
        "<tool_call>\n<parameter=query>\nx\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=search>\n<parameter=query>\nx\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>',
        "<tool_call>\n<function=search>\nquery=x\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        xml_call("search", q="1\n</parameter>\n<parameter=q>\n2"),
        "<tool_call>",
    ],
)
def test_a_malformed_xml_call_is_a_fault_and_not_content(text: str) -> None:
    good = xml_call("open", docid="d")
    calls = read_xml(f"{text}\n{good}")
    assert calls[0].fault
    assert calls[-1] == RawCall("open", {"docid": "d"}, typed=False)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "open", "arguments": "docid"}',
        '{"name": "open", "arguments": {"page": ' + "9" * 5000 + "}}",
        "[" * 100_000,
        '{"name":"a","arguments":' + '{"a":' * 900 + "1" + "}" * 901,
    ],
)
def test_a_malformed_json_call_is_a_fault_and_not_content(text: str) -> None:
    good = '<tool_call>\n{"name": "open", "arguments": {"docid": "d", "page": 2}}\n</tool_call>'
    calls = read_json(f"<tool_call>{text}</tool_call>{good}")
    assert calls[0].fault or calls[0].name == "a"
    assert calls[1] == RawCall("open", {"docid": "d", "page": 2})


def test_lone_surrogates_of_json_never_reach_an_encoder() -> None:
    (call,) = read_json(
        '<tool_call>{"name": "commit", "arguments": {"result": "a\\ud800b"}}</tool_call>'
    )
    assert call.arguments == {"result": "a?b"}
    assert "a?b" in _SHARED.decode(_SHARED.tool_ids([Result("a\ud800b")]))


def test_a_turn_full_of_closing_tags_is_read_in_bounded_time() -> None:
    text = "<tool_call><function=a>" + "</tool_call>" * 20_000
    assert [call.fault is not None for call in read_xml(text)] == [True]


def test_wellformed_turns_read_as_transformers_reads_them() -> None:
    from trl.chat_template_utils import add_response_schema

    tokenizer = add_response_schema(byte_tokenizer("qwen3_5_nothink"))
    rng = random.Random(3)
    for _ in range(20):
        calls = [
            xml_call("search", query=rng.choice(("00123", "two words", "7")))
            if rng.random() < 0.5
            else xml_call("open", docid="d1", page=rng.randint(1, 9))
            for _ in range(rng.randint(1, 3))
        ]
        text = "\n".join(calls)
        message = tokenizer.parse_response(text, prefix="", tools=SCHEMAS)
        theirs = [
            {"name": item["function"]["name"], **item["function"]["arguments"]}
            for item in message["tool_calls"]
        ]
        ours = []
        for call in read_xml(text):
            page = {"page": int(call.arguments["page"])} if "page" in call.arguments else {}
            ours.append({"name": call.name, **call.arguments, **page})
        assert ours == theirs


def test_a_template_of_another_format_is_read_by_the_tokenizers_own_parser() -> None:
    tokenizer = byte_tokenizer("qwen3_5_nothink")
    tokenizer.chat_template = tokenizer.chat_template.replace("<function=", "<function ")
    with pytest.raises(ConfigError, match="response_template"):
        Chat(tokenizer, TOOLS)

    class Parser:
        def __call__(self, text: str, prefix: Any, tools: Any) -> dict[str, Any]:
            assert tools == SCHEMAS
            calls = [{"function": {"name": "open", "arguments": {"docid": text.strip()}}}]
            return {"role": "assistant", "tool_calls": calls if text.strip() else []}

    tokenizer.response_template = {"any": "thing"}
    tokenizer.parse_response = Parser()
    chat = Chat(tokenizer, TOOLS)
    assert chat.read_turn(tokenizer.encode(" d7<|im_end|>")).calls == [
        RawCall("open", {"docid": "d7"})
    ]
    assert chat.read_turn(tokenizer.encode(" <|im_end|>")).calls == []


def test_pc30_a_template_that_rewrites_earlier_turns_is_refused_at_start() -> None:
    tokenizer = byte_tokenizer()
    late = "{%- if message.role == 'tool' and messages|length > 4 %}again{%- endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- for message in messages %}", "{%- for message in messages %}" + late, 1
    )
    with pytest.raises(ConfigError, match="TRL"):
        Chat(tokenizer, TOOLS)
    tokenizer.chat_template = template("qwen3_5_nothink").replace(
        "<|im_start|>' + message.role + '\\n' + content + '<|im_end|>",
        "<|im_start|>' + message.role + (messages|length|string) + content + '<|im_end|>",
    )
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        Chat(tokenizer, TOOLS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tokenizer: setattr(tokenizer, "chat_template", None), "no chat_template"),
        (
            lambda tokenizer: setattr(
                tokenizer,
                "chat_template",
                "{% for m in messages %}{{ m.content }}{% endfor %}<function=",
            ),
            "without a special token",
        ),
        (
            lambda tokenizer: setattr(
                tokenizer,
                "chat_template",
                "{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endfor %}"
                "{# <function= #}",
            ),
            "drops tool results",
        ),
    ],
)
def test_an_unusable_template_is_refused_with_a_fix(change: Any, message: str) -> None:
    tokenizer = byte_tokenizer()
    change(tokenizer)
    with pytest.raises(ConfigError, match=message):
        Chat(tokenizer, TOOLS)


@pytest.mark.parametrize(
    "example",
    [
        {},
        {"question": "  "},
        {"prompt": []},
        {"prompt": [{"role": "user"}]},
        {"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    ],
)
def test_an_example_without_a_question_is_refused(example: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _SHARED.prompt(example)


def test_the_cache_of_encoded_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octopus_trl.agent.plain._MOST_CACHED_IDS", 1000)
    chat = chat_of()
    for index in range(9):
        chat.tool_ids([Result(f"{index} " + "x" * 300)])
    kept = chat._plain._texts
    assert 2 <= len(kept) <= 3
    assert sum(len(ids) + 1 for ids in kept.values()) == chat._plain._num_cached_ids <= 1000
    assert any(text.startswith("8 ") for text in kept), "the oldest go first"
