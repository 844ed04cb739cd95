"""Tool calls in the text of a turn, read strictly.

Two formats have a reader of our own, Qwen3.5's XML and Qwen3's JSON; any other template goes
through the tokenizer's own `parse_response`. Ours is not for speed (0.18 ms against 0.02 ms):
transformers' parser gives a malformed call back as plain content, so the thread could not be
told, cuts a value at a literal `</parameter>` without a word, and turns a call whose end is
missing into one without arguments (measured with transformers 5.24).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_MOST_ENDS = 16  # closing tags tried for one call; bounds the work on a turn full of them
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as the model wrote it.

    Attributes:
        name: what stands where the tool's name belongs.
        arguments: by name; strings where `typed` is false.
        typed: whether the format itself carries types (JSON), so that none may be inferred.
        fault: why it cannot be read; name and arguments then hold what could be.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    typed: bool = True
    fault: str | None = None


def read_xml(text: str) -> list[RawCall]:
    """Read the calls of Qwen3.5's format in order, malformed ones with their fault."""
    return _read(text, _xml_call)


def read_json(text: str) -> list[RawCall]:
    """Read the calls of Qwen3's format in order, malformed ones with their fault."""
    return _read(text, _json_call)


def read_message(message: dict[str, Any]) -> list[RawCall]:
    """Read the calls of a message as transformers' `parse_response` returns it."""
    calls = []
    for item in message.get("tool_calls") or []:
        function = item.get("function", item) if isinstance(item, dict) else {}
        name, arguments = function.get("name"), function.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            calls.append(RawCall(str(name), fault="a name and an object of arguments are needed"))
        else:
            calls.append(RawCall(name, {str(k): clean(v) for k, v in arguments.items()}))
    return calls


def clean(value: Any) -> Any:
    """Replace lone surrogates, which JSON can spell but no encoder takes, in nested strings."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8") if not value.isascii() else value
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    return value


def _read(text: str, read_one: Callable[[str], RawCall]) -> list[RawCall]:
    calls: list[RawCall] = []
    at = text.find(OPEN)
    while at >= 0:
        start = at + len(OPEN)
        at = text.find(OPEN, start)
        calls.append(_read_block(text[start : at if at >= 0 else None], read_one))
    return calls


def _read_block(block: str, read_one: Callable[[str], RawCall]) -> RawCall:
    """Read from one opening tag up to the next.

    A value may hold the closing tag as text, so a block that does not read is tried again with
    each later closing tag.
    """
    fault = f"{CLOSE} is missing"
    end = block.find(CLOSE)
    for attempt in range(_MOST_ENDS):
        if end < 0:
            break
        try:
            return read_one(block[:end].strip())
        except ValueError as error:
            fault = str(error) if attempt == 0 else fault
        end = block.find(CLOSE, end + len(CLOSE))
    return RawCall(_guess_name(block), fault=fault)


def _xml_call(block: str) -> RawCall:
    if not block.startswith(_FUNCTION):
        raise ValueError(f"{_FUNCTION}NAME> must come first")
    if not block.endswith(_FUNCTION_END):
        raise ValueError(f"{_FUNCTION_END} must come last")
    name, closed, body = block[len(_FUNCTION) : -len(_FUNCTION_END)].partition(">")
    if not closed or not name.strip() or "\n" in name:
        raise ValueError(f"{_FUNCTION}NAME> has no name")
    arguments: dict[str, Any] = {}
    rest = body.strip()
    while rest:
        if not rest.startswith(_PARAMETER):
            raise ValueError(f"only {_PARAMETER}KEY> may stand in a function")
        key, closed, rest = rest[len(_PARAMETER) :].partition(">")
        if not closed or not key.strip() or "\n" in key:
            raise ValueError(f"{_PARAMETER}KEY> has no key")
        value, rest = _xml_value(rest, key)
        if key.strip() in arguments:
            raise ValueError(f"parameter {key.strip()} is given twice")
        arguments[key.strip()] = clean(value)
    return RawCall(name.strip(), arguments, typed=False)


def _xml_value(text: str, key: str) -> tuple[str, str]:
    """Split at the first end tag that another parameter or nothing follows."""
    end = text.find(_PARAMETER_END)
    while end >= 0:
        rest = text[end + len(_PARAMETER_END) :].lstrip()
        if not rest or rest.startswith(_PARAMETER):
            # The template puts exactly one line end on each side of a value.
            return text[:end].removeprefix("\n").removesuffix("\n"), rest
        end = text.find(_PARAMETER_END, end + 1)
    raise ValueError(f"{_PARAMETER_END} of {key.strip()} is missing")


def _json_call(block: str) -> RawCall:
    try:
        record = clean(json.loads(block))
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"no valid JSON ({error.msg})") from error
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        raise ValueError('an object with "name" and "arguments" is needed')
    arguments = record.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" must be an object')
    return RawCall(record["name"], arguments)


def _guess_name(block: str) -> str:
    """Find the name in a broken block, for the error text and the record only."""
    if _FUNCTION in block:
        return block.partition(_FUNCTION)[2].partition(">")[0].strip()[:40]
    return block.partition('"name"')[2].partition('"')[2].partition('"')[0][:40]
