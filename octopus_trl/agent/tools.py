"""The seven tools: what the model is told, what it may pass, and the texts that it gets back.

Effects on threads live in `episode.py`; here are the names, the types, and the two tools that
only read the corpus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octopus_trl.agent.calls import RawCall
from octopus_trl.errors import ToolError
from octopus_trl.protocols import SearchBackend

ParamType = Literal["string", "integer", "integers"]

_INTEGER = re.compile(r"-?[0-9]{1,9}")
_LONGEST_QUOTE = 60  # characters of the model's own value that an error text repeats


@dataclass(frozen=True, slots=True)
class Param:
    """One argument of a tool."""

    name: str
    type: ParamType
    description: str
    required: bool = True

    def schema(self) -> dict[str, Any]:
        """Give the JSON schema of this argument."""
        if self.type == "integers":
            kind: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
        else:
            kind = {"type": self.type}
        return {**kind, "description": self.description}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model knows it.

    Attributes:
        last: whether it must be the last call of its turn.
        primitive: whether it acts on threads; `tools_exposed=False` hides those but `commit`.
    """

    name: str
    description: str
    params: tuple[Param, ...]
    last: bool = False
    primitive: bool = False

    def schema(self) -> dict[str, Any]:
        """Give the function schema that a chat template renders."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {param.name: param.schema() for param in self.params},
                    "required": [param.name for param in self.params if param.required],
                },
            },
        }

    def signature(self) -> str:
        """Give the short form for the compact system text, `fork(task)`."""
        return f"{self.name}({', '.join(param.name for param in self.params)})"


TOOLS: tuple[ToolSpec, ...] = (
    ToolSpec(
        "fork",
        "Start a child thread that continues from here on its own task, at once.",
        (Param("task", "string", "What the child is to find out."),),
        primitive=True,
    ),
    ToolSpec(
        "read_thread",
        "Make everything that another thread has written so far readable to you.",
        (Param("thread_id", "integer", "Number of the thread."),),
        primitive=True,
    ),
    ToolSpec(
        "wait_threads",
        "Sleep until these threads have ended; returns the status and result of each.",
        (
            Param(
                "thread_ids",
                "integers",
                "Numbers of the threads; your own children if left out.",
                required=False,
            ),
        ),
        primitive=True,
    ),
    ToolSpec(
        "rewind",
        "Go back to the end of one of your earlier turns and forget what came after it. Must be "
        "the last call of its turn.",
        (
            Param("turn", "integer", "Turn to go back to; 0 is before your first turn."),
            Param("note", "string", "The lesson to keep; all that survives of the dead end."),
        ),
        last=True,
        primitive=True,
    ),
    ToolSpec(
        "commit",
        "End this thread with its result; for thread 0 this is the answer. Must be the last call "
        "of its turn.",
        (Param("result", "string", "The result, as short as it can be."),),
        last=True,
    ),
    ToolSpec(
        "search",
        "Search the corpus by keywords; returns docids, titles and snippets.",
        (Param("query", "string", "Keywords."),),
    ),
    ToolSpec(
        "open",
        "Read one page of a document.",
        (
            Param("docid", "string", "Identifier from a search result."),
            Param("page", "integer", "Page number from 1; 1 if left out.", required=False),
        ),
    ),
)
BY_NAME = {tool.name: tool for tool in TOOLS}
ALIASES = {"wait": "wait_threads", "done": "commit"}
CORPUS_TOOLS = ("search", "open")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the schema accepts; `name` is never an alias."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """Text for the thread that called; `limit` is the most tokens of it, None for all."""

    text: str
    limit: int | None = None


def offered(*, primitives: bool, corpus: bool) -> tuple[ToolSpec, ...]:
    """List the tools that a prompt names, in their fixed order."""
    return tuple(
        tool
        for tool in TOOLS
        if (primitives or not tool.primitive) and (corpus or tool.name not in CORPUS_TOOLS)
    )


def canonical(name: str) -> str:
    """Give a tool's own name for itself or for an alias."""
    return ALIASES.get(name, name)


def bind(raw: RawCall, tools: Iterable[str], disabled: Collection[str] = ()) -> ToolCall:
    """Check a call against the schema of its tool.

    Args:
        tools: names of the tools that the prompt offers.
        disabled: names that are offered and refused all the same, so that the same prompt can
            be evaluated without them.
    Raises:
        ToolError: malformed, unknown, disabled, or an argument is missing, unknown or of another
            type; the text is for the model.
    """
    if raw.fault is not None:
        raise ToolError(f"malformed call: {raw.fault}")
    name = canonical(raw.name)
    known = list(tools)
    if name not in known:
        raise ToolError(f"unknown tool {_quote(raw.name)}; the tools are {', '.join(known)}")
    if name in disabled:
        raise ToolError(f"{name} is disabled")
    spec = BY_NAME[name]
    allowed = [param.name for param in spec.params]
    if unknown := [key for key in raw.arguments if key not in allowed]:
        raise ToolError(
            f"{name} has no argument {_quote(unknown[0])}; the call is {spec.signature()}"
        )
    arguments: dict[str, Any] = {}
    for param in spec.params:
        if param.name in raw.arguments:
            value = raw.arguments[param.name]
            arguments[param.name] = _typed(name, param, value, raw.typed)
        elif param.required:
            raise ToolError(f"{name} needs {param.name}; the call is {spec.signature()}")
    return ToolCall(name, arguments)


def run_corpus_tool(
    call: ToolCall, corpus: Callable[[], SearchBackend], *, k: int, page_tokens: int
) -> Result:
    """Run `search` or `open`; runs on a worker thread, touches nothing but the corpus.

    Raises:
        ToolError: what the corpus refuses, as text for the model.
    """
    backend = corpus()
    if call.name == "search":
        query = call.arguments["query"].strip()
        hits = backend.search(query, k) if query else []
        lines = [f"{hit.docid} | {_line(hit.title)} | {_line(hit.snippet)}" for hit in hits]
        return Result("\n".join(lines) or "no hits", limit=page_tokens)
    page = backend.open(call.arguments["docid"].strip(), call.arguments.get("page", 1))
    head = f"{page.docid} | {_line(page.title)} | page {page.page} of {page.num_pages}"
    return Result(f"{head}\n{page.text}", limit=page_tokens)


def wait_text(ends: Sequence[tuple[int, str, str | None]]) -> str:
    """Say how each awaited thread ended: `(thread, status, commit text)`."""
    lines = [
        f"thread {thread} {status}" + (f": {result}" if result is not None else "")
        for thread, status, result in ends
    ]
    return "\n".join(lines)


def _typed(tool: str, param: Param, value: Any, typed: bool) -> Any:
    """Enforce the type; text is read as the schema's type only where the format has no types."""
    if param.type == "string":
        if isinstance(value, str):
            return value
    elif not typed and isinstance(value, str):
        text = value.strip()
        if param.type == "integer" and _INTEGER.fullmatch(text):
            return int(text)
        if param.type == "integers" and len(text) < 1000:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                value = text
    if param.type == "integer" and _is_integer(value):
        return value
    if param.type == "integers" and isinstance(value, list):
        if all(_is_integer(item) for item in value):
            return value
    want = {"string": "a string", "integer": "an integer", "integers": "a list of integers"}
    raise ToolError(f"{tool}: {param.name} must be {want[param.type]}, got {_quote(value)}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**9


def _quote(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = _line(text)
    return f'"{text[:_LONGEST_QUOTE]}{"…" if len(text) > _LONGEST_QUOTE else ""}"'


def _line(text: str) -> str:
    return " ".join(text.split())
