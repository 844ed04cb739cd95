"""Between text and token streams that only grow.

The stream of a thread is the truth: prompt ids, sampled ids, inserted ids, appended and never
rendered again, because a template that re-renders a parsed message gives other ids in about half
of the cases (data notes §6). What the template is asked for once, at start-up, is the text around
a question and around tool results; payloads are spliced in between as plain text, so that a page
that holds `<|im_end|>` or `</tool_response>` stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octopus_trl.agent.calls import RawCall, read_json, read_message, read_xml
from octopus_trl.agent.plain import PlainText, cut, fit
from octopus_trl.agent.tools import Result, ToolSpec
from octopus_trl.errors import ConfigError
from octopus_trl.protocols import Tokenizer

THINK, THINK_END = "<think>", "</think>"
_MARK = "octopuspayload{}mark"
_JSON_CALL = re.compile(r'\\?"arguments\\?": ')  # as a template spells it, quotes escaped or not
_QUERY = {"role": "user", "content": "dummy"}

SYSTEM_PROMPT = (
    "You work on a question as several threads. Fork children for parts that can be looked up "
    "side by side, read what a thread has found, rewind out of dead ends, and end every thread "
    "with commit; the commit of thread 0 is the answer."
)
SYSTEM_PROMPT_ALONE = "Look up what you need and end with commit; its result is the answer."


@dataclass(frozen=True, slots=True)
class Turn:
    """What one sampled turn says.

    Attributes:
        calls: in order; empty where the turn did not end by itself.
        closed: whether its last id is the end of turn.
        thinking: whether the thinking block is still open at its end.
    """

    calls: list[RawCall]
    closed: bool
    thinking: bool


class Chat:
    """Token streams of one tokenizer and one set of tools.

    Args:
        tokenizer: a transformers tokenizer with a chat template that knows tool results.
        tools: what the prompt offers.
        system_prompt: system text; None takes this module's own.
        compact: name the tools in the system text instead of rendering their JSON schemas.
        template_kwargs: passed on to the template, `enable_thinking` for example.

    Raises:
        ConfigError: the template has no end of turn, knows no tool results, or rewrites earlier
            turns.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[ToolSpec],
        *,
        system_prompt: str | None = None,
        compact: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat_template, episodes are built from one: set "
                "tokenizer.chat_template, TRL ships several in trl/chat_templates"
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._schemas = [tool.schema() for tool in tools]
        self._tool_name = tools[0].name if tools else "commit"
        self._system = _system_text(tools, system_prompt, compact)
        # An empty list is not "no tools" for every template, None is.
        self._shown = None if compact else self._schemas or None
        self._plain = PlainText(tokenizer)
        self._prompts: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
        self._read = self._choose_reader()
        self._end_text = self._find_end_of_turn()
        self._pieces, self.opens_thinking = self._find_pieces()
        end_ids = self._encode_template(self._end_text)
        if len(end_ids) != 1:
            raise ConfigError(f"the end of turn {self._end_text!r} is {len(end_ids)} tokens, not 1")
        self.end_of_turn = end_ids[0]
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset({self.end_of_turn} | ({eos} if eos is not None else set()))
        self._close = end_ids
        self._cut_sign = self._plain.encode("[cut]")
        self._close_thinking = self._encode_template(f"\n{THINK_END}\n\n{self._end_text}")

    def prompt(self, example: Mapping[str, Any], *, more: str = "") -> list[int]:
        """Give the ids that open an episode, through the generation prompt.

        `example["question"]`, or `example["prompt"]` as text or as a list of messages.

        Args:
            more: text below the question.

        Raises:
            ConfigError: neither is there, or a message has no text.
        """
        messages = self._messages(example)
        if more:
            messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n\n{more}"}
        return self._open(messages)

    def task_prompt(self, example: Mapping[str, Any], task: str) -> list[int]:
        """Give the ids of a fresh context: the episode's system text and a task as its question."""
        system = [message for message in self._messages(example) if message["role"] == "system"]
        return self._open([*system, {"role": "user", "content": task}])

    def _open(self, messages: Sequence[dict[str, str]]) -> list[int]:
        payloads: list[str] = []
        shown: list[dict[str, str]] = []
        for message in messages:
            if message["role"] == "user":
                shown.append({"role": "user", "content": _MARK.format(len(payloads))})
                payloads.append(message["content"])
            else:
                shown.append(message)
        key = tuple(f"{message['role']}:{message['content']}" for message in shown)
        pieces = self._prompts.get(key)
        if pieces is None:
            text = self._render(shown, tools=self._shown, generate=True)
            pieces = tuple(self._encode_template(part) for part in _split(text, len(payloads)))
            self._prompts[key] = pieces
        ids = list(pieces[0])
        for payload, piece in zip(payloads, pieces[1:], strict=True):
            ids += self._plain.encode(payload)
            ids += piece
        return ids

    def tool_ids(
        self,
        results: Sequence[Result],
        *,
        closed: bool = True,
        thinking: bool = False,
        room: int | None = None,
    ) -> list[int]:
        """Give the ids that follow a turn: its results and the next generation prompt.

        Args:
            closed: whether the turn ended with the end of turn; else it is closed here, by ids
                that nobody sampled, so they belong to the tool segment.
            thinking: whether its thinking block is open and must be closed first.
            room: most ids to return; results are cut, longest first, to meet it. The frame
                around them is never cut.
        """
        head, between, tail = self._pieces
        payloads = [self._payload(result) for result in results]
        lead: tuple[int, ...] = ()
        if not closed:
            lead = self._close_thinking if thinking else self._close
        if room is not None:
            frame = len(lead) + len(head) + len(tail) + len(between) * (len(payloads) - 1)
            payloads = fit(payloads, max(0, room - frame), self._cut_sign)
        ids = [*lead, *head]
        for index, payload in enumerate(payloads):
            if index:
                ids += between
            ids += payload
        ids += tail
        return ids

    def read_turn(self, ids: Sequence[int], *, thinking: bool | None = None) -> Turn:
        """Read the calls of a sampled turn; one that did not end by itself has none.

        Args:
            thinking: whether the turn began inside a thinking block; by default as the
                generation prompt leaves it. Calls inside the block are thoughts, not calls.
        """
        thinking = self.opens_thinking if thinking is None else thinking
        closed = bool(ids) and ids[-1] == self.end_of_turn
        body = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        text = self.decode(body)
        if text.lstrip().startswith(THINK):
            thinking = True
        if thinking:
            _, ended, text = text.partition(THINK_END)
            if not ended:
                return Turn([], closed, thinking=True)
        return Turn(self._read(text) if closed else [], closed, thinking=False)

    def words(self, ids: Sequence[int]) -> str:
        """Give what a turn says: its text without the end and without a closed thinking block."""
        body = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        text = self.decode(body)
        return text.rpartition(THINK_END)[2].replace(THINK, "").strip()

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids with every control token shown."""
        if not ids:
            return ""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _payload(self, result: Result) -> tuple[int, ...]:
        ids = self._plain.encode(result.text)
        if result.limit is not None and len(ids) > result.limit:
            return cut(ids, result.limit, self._cut_sign)
        return ids

    def _messages(self, example: Mapping[str, Any]) -> list[dict[str, str]]:
        given = example.get("prompt", example.get("question"))
        if isinstance(given, str) and given.strip():
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list) or not given:
            raise ConfigError(
                f"an example has the columns {sorted(example)}: it needs a non-empty "
                "question (text) or prompt (text or messages)"
            )
        messages = []
        for message in given:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise ConfigError(f"a prompt message needs a role and text, got {message!r}")
            messages.append({"role": role, "content": content})
        if messages[-1]["role"] != "user":
            raise ConfigError("a prompt ends with a user message, the threads write what follows")
        if self._system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        return messages

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        generate: bool = False,
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=generate,
            tokenize=False,
            **self._kwargs,
        )
        return text

    def _encode_template(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def _assistant(self, num_calls: int, reasoning: bool) -> dict[str, Any]:
        calls = [
            {
                "type": "function",
                "id": f"call{index:05}",  # nine characters, as some templates insist
                "function": {"name": self._tool_name, "arguments": {}},
            }
            for index in range(num_calls)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": "dummy"}
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message["reasoning_content"] = "dummy"
        return message

    def _tool_messages(self, num: int) -> list[dict[str, Any]]:
        return [
            {
                "role": "tool",
                "name": self._tool_name,
                "tool_call_id": f"call{index:05}",
                "content": _MARK.format(index),
            }
            for index in range(num)
        ]

    def _find_end_of_turn(self) -> str:
        text = self._render([_QUERY, self._assistant(0, reasoning=False)])
        names = [
            str(token)
            for token in self._tokenizer.added_tokens_decoder.values()
            if token.special and str(token) in text
        ]
        if not names:
            raise ConfigError(
                "the chat template ends an assistant turn without a special token, so a turn has "
                "no end to sample: use a template with one, like <|im_end|>"
            )
        return max(names, key=text.rfind)

    def _find_pieces(self) -> tuple[tuple[tuple[int, ...], ...], bool]:
        """Find the text before, between and after tool results, and check that it only appends."""
        fault = ""
        # Templates that drop or add an empty thinking block keep a filled one.
        for reasoning in (False, True):
            try:
                head, between, tail = self._derive_pieces(reasoning)
            except ConfigError as error:
                fault = fault or str(error)
                continue
            opens = tail.rfind(THINK) > tail.rfind(THINK_END)
            pieces = tuple(self._encode_template(part) for part in (head, between, tail))
            return pieces, opens
        raise ConfigError(fault)

    def _derive_pieces(self, reasoning: bool) -> tuple[str, str, str]:
        head, tail = self._suffix([_QUERY], 1, reasoning)
        first, between, last = self._suffix([_QUERY], 2, reasoning)
        again = self._suffix([_QUERY], 3, reasoning)
        earlier = [_QUERY, self._assistant(1, reasoning), *self._tool_messages(1)]
        later = self._suffix(earlier, 1, reasoning)
        if (first, last) != (head, tail) or again != [head, between, between, tail]:
            raise ConfigError(
                "the chat template does not render several tool results of one turn alike; use "
                "one that does, TRL's training templates do"
            )
        if later != [head, tail]:
            raise ConfigError(
                "the chat template renders a second tool result unlike the first; use one that "
                "only appends, TRL's get_training_chat_template gives one"
            )
        return head, between, tail

    def _suffix(self, earlier: Sequence[Mapping[str, Any]], num: int, reasoning: bool) -> list[str]:
        """Render with and without `num` tool results and give what the results add, in parts."""
        turn = [*earlier, self._assistant(num, reasoning)]
        without = self._render(turn)
        with_results = self._render([*turn, *self._tool_messages(num)], generate=True)
        # Some templates write a line end after the end of turn; it is part of what is added.
        kept = without[: without.rindex(self._end_text) + len(self._end_text)]
        if not with_results.startswith(kept):
            raise ConfigError(
                "the chat template rewrites earlier turns when a tool result follows, so a "
                "token stream could not only grow: use TRL's get_training_chat_template(tokenizer)"
            )
        added = with_results[len(kept) :]
        for index in range(num):
            if _MARK.format(index) not in added:
                raise ConfigError(
                    "the chat template drops tool results: use one that renders the role 'tool'"
                )
        return _split(added, num)

    def _choose_reader(self) -> Callable[[str], list[RawCall]]:
        template = str(self._tokenizer.chat_template)
        if "<function=" in template:
            return read_xml
        if "<tool_call>" in template and _JSON_CALL.search(template):
            return read_json
        if getattr(self._tokenizer, "response_template", None) is not None:
            return self._read_by_template
        raise ConfigError(
            "the chat template's tool-call format is unknown: use one of Qwen3 or Qwen3.5, or set "
            "tokenizer.response_template (TRL's add_response_schema does for known templates)"
        )

    def _read_by_template(self, text: str) -> list[RawCall]:
        message = self._tokenizer.parse_response(text, prefix="", tools=self._schemas)
        return read_message(message)


def _system_text(tools: Sequence[ToolSpec], given: str | None, compact: bool) -> str:
    if given is None:
        alone = not any(tool.primitive for tool in tools)
        given = SYSTEM_PROMPT_ALONE if alone else SYSTEM_PROMPT
    if compact and tools:
        names = " ".join(tool.signature() for tool in tools)
        return f"{given}\ntools: {names}".strip()
    return given


def _split(text: str, num: int) -> list[str]:
    parts = []
    for index in range(num):
        mark = _MARK.format(index)
        before, found, text = text.partition(mark)
        if not found:
            raise ConfigError("the chat template drops or reorders message contents")
        parts.append(before)
    return [*parts, text]
