"""What writes a judge's replies: an OpenAI-compatible server, or a transformers model here."""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from octopus_trl.agent.http_json import HttpJson
from octopus_trl.errors import ConfigError, ServiceDown, ServiceError

_WRONG_SETTING = frozenset({401, 403, 404})


class ServerModel:
    """A model behind `POST /chat/completions` of any server that speaks OpenAI's format.

    Args:
        url: address up to and without `/chat/completions`, such as `http://localhost:8000/v1`.
        model: name that the server knows it by.
        api_key_env: environment variable that holds the key; unset sends none.
        max_tokens: most tokens of a reply.
        extra: further fields of a request, such as
            `{"chat_template_kwargs": {"enable_thinking": False}}`.
        concurrency: requests at once.
        timeout_s, retries, backoff_s: see `HttpJson`.
    Raises:
        ConfigError: no such address, or a number out of range.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        max_tokens: int = 1024,
        extra: Mapping[str, Any] | None = None,
        concurrency: int = 16,
        timeout_s: float = 120.0,
        retries: int = 4,
        backoff_s: float = 0.5,
    ) -> None:
        if max_tokens < 1 or concurrency < 1:
            raise ConfigError(
                f"max_tokens={max_tokens}, concurrency={concurrency}: both must be at least 1"
            )
        key = os.environ.get(api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._server = HttpJson(
            url, headers=headers, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s
        )
        self._concurrency = concurrency
        self._fields = {
            "model": model,
            "temperature": 0,
            "seed": 0,
            "max_tokens": max_tokens,
            **(extra or {}),
        }

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of a request; not the address, which may move with the same model."""
        return {"kind": "server", **self._fields}

    def ask(self, prompts: Sequence[str]) -> list[str | None]:
        """Give a reply to each prompt; None where the server cannot give one.

        After one prompt has used up its retries the rest are tried once each, so that an outage
        costs one row of pauses and not one a prompt.

        Raises:
            ConfigError: the server does not know the address or the model, or refuses the key.
        """
        down = threading.Event()

        def one(prompt: str) -> str | None:
            body = {**self._fields, "messages": [{"role": "user", "content": prompt}]}
            try:
                retry = not down.is_set()
                answer = self._server.call("POST", "/chat/completions", body, retry=retry)
                content = answer["choices"][0]["message"].get("content")
            except ServiceDown:
                down.set()
                return None
            except ServiceError as error:
                if error.status in _WRONG_SETTING:
                    raise ConfigError(
                        f"judge: {error}; check the address (it ends before /chat/completions), "
                        "the model's name and the key"
                    ) from None
                return None  # this one prompt was refused, for its length for example
            except (KeyError, IndexError, TypeError, AttributeError):
                return None  # an answer of another shape is the server's fault, not the model's
            return content if isinstance(content, str) else ""

        with ThreadPoolExecutor(min(self._concurrency, max(len(prompts), 1))) as pool:
            return list(pool.map(one, prompts))


class LocalModel:
    """A causal language model that transformers loads into this process.

    Args:
        name: hub name or folder.
        revision: its commit; a hub name must have one, a judge is pinned.
        device, dtype: where and in what it runs.
        max_tokens: most tokens of a reply.
        batch_size: prompts at once.
    Raises:
        ConfigError: transformers is missing, a hub name has no revision, or it cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        *,
        revision: str | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        max_tokens: int = 512,
        batch_size: int = 8,
    ) -> None:
        if max_tokens < 1 or batch_size < 1:
            raise ConfigError(
                f"max_tokens={max_tokens}, batch_size={batch_size}: both must be at least 1"
            )
        if revision is None and not os.path.isdir(name):
            raise ConfigError(
                f"judge {name!r} is no folder and has no revision: a judge is pinned; give the "
                "commit of its hub repository"
            )
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise ConfigError(
                f"a local judge needs transformers ({error}): pip install transformers torch, or "
                "take a server as judge"
            ) from None
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                name, revision=revision, padding_side="left"
            )
            model = transformers.AutoModelForCausalLM.from_pretrained(
                name, revision=revision, dtype=dtype
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"judge {name!r} cannot be loaded ({str(error).splitlines()[0]}); give a folder "
                "with model and tokenizer, or download it once"
            ) from None
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"judge {name!r} has no chat template; take an instruct model")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = model.to(device).eval()
        self._device, self._batch_size, self._max_tokens = device, batch_size, max_tokens
        self._name, self._revision = name, revision or _folder_hash(name)

    @property
    def identity(self) -> dict[str, Any]:
        """Name, revision or hash of the folder, type of its numbers and length of its replies."""
        return {
            "kind": "local",
            "model": self._name,
            "revision": self._revision,
            "dtype": str(self._model.dtype),
            "max_tokens": self._max_tokens,
        }

    def ask(self, prompts: Sequence[str]) -> list[str | None]:
        """Give the greedy reply to each prompt, thinking off where the template knows it."""
        replies: list[str | None] = []
        for at in range(0, len(prompts), self._batch_size):
            replies.extend(self._reply(prompts[at : at + self._batch_size]))
        return replies

    def _reply(self, prompts: Sequence[str]) -> list[str]:
        texts = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=False,
            )
            for prompt in prompts
        ]
        inputs = self._tokenizer(
            texts, return_tensors="pt", padding=True, add_special_tokens=False
        ).to(self._device)
        tokens = self._model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=self._max_tokens,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        new = tokens[:, inputs["input_ids"].shape[1] :]
        return list(self._tokenizer.batch_decode(new, skip_special_tokens=True))


def _folder_hash(folder: str) -> str:
    """Hash weights, configuration and tokenizer of a folder: two fine-tunes have equal sizes."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json", ".jinja"):
            with path.open("rb") as stream:
                digest.update(path.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
