"""JSON over HTTP with retries, for search servers and judges.

Messages name the method, the address and the status, never a body: bodies hold questions and
answers that must not reach a log.
"""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from octopus_trl.errors import ConfigError, ServiceDown, ServiceError

_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_WAIT_S = 60.0


class HttpJson:
    """A server at one address. Safe to use from several threads.

    Args:
        url: `http://` or `https://` and all that precedes the paths of `call`.
        headers: sent with every request.
        timeout_s: seconds that one request may take.
        retries: further tries after a lost connection, a time-out or a status of overload.
        backoff_s: pause before the first retry; it doubles, with up to as much again at random.
    Raises:
        ConfigError: no such address, or a number out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        retries: int = 4,
        backoff_s: float = 0.5,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url={url!r}: must be http://HOST:PORT or https://HOST")
        if timeout_s <= 0 or retries < 0 or backoff_s < 0:
            raise ConfigError(
                f"timeout_s={timeout_s}, retries={retries}, backoff_s={backoff_s}: a time-out is "
                "above 0, the others at least 0"
            )
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s

    def call(self, method: str, path: str, body: Any = None, *, retry: bool = True) -> Any:
        """Send a request and give the JSON of its answer, None for an empty one.

        Args:
            path: starts with `/`, quoted already.
            body: sent as JSON; bytes are sent as they are, as lines of JSON.
            retry: False for one try only.
        Raises:
            ServiceDown: no answer, or one of overload, after the last try.
            ServiceError: the server refused, or its answer is no JSON.
        """
        tries = 1 + (self._retries if retry else 0)
        for attempt in range(tries):
            try:
                return self._once(method, path, body)
            except ServiceDown as error:
                if attempt + 1 == tries:
                    raise ServiceDown(f"{error}; tried {tries} times", error.status) from None
                # Not the global generator: a retry must not move a run's random numbers.
                pause = self._backoff_s * 2**attempt * (1 + random.SystemRandom().random())
                time.sleep(min(max(pause, error.retry_after_s), _LONGEST_WAIT_S))
        raise AssertionError("the last try returns or raises")

    def _once(self, method: str, path: str, body: Any) -> Any:
        lines = isinstance(body, bytes)
        payload = body if lines or body is None else json.dumps(body).encode()
        kind = "application/x-ndjson" if lines else "application/json"
        request = urllib.request.Request(
            self.url + path,
            data=payload,
            method=method,
            headers={"Content-Type": kind, "Accept": "application/json", **self._headers},
        )
        place = f"{method} {self.url}{path}"
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                data = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                text, code = f"{place}: status {error.code} {error.reason}", error.code
                after = error.headers.get("Retry-After", "")
            if code in _AGAIN:
                wait = float(after) if after.isdigit() else 0.0
                raise ServiceDown(text, code, wait) from None
            raise ServiceError(text, code) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ServiceDown(f"{place}: no answer ({reason})") from None
        try:
            return json.loads(data) if data.strip() else None
        except ValueError:
            raise ServiceError(f"{place}: the answer is no JSON ({len(data)} bytes)") from None
