"""One request to a server over HTTP with JSON bodies, and what its failures mean."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Seconds, range_of, reason

MAY_PASS = (408, 429)  # timeout and too many requests: the only codes below 500 that another request may not get
SHOWN = 2000  # characters of a server's message that an error repeats


def exchange(url: str, path: str, body: dict[str, Any] | None = None, *, timeout: float, token: str = "") -> Any:
    """Return the JSON value that the server at `url` answers to a POST of `body`, or to a GET without one.

    `timeout` is in seconds, and `token` is sent as a bearer token unless it is empty. Raise ConnectionError or
    TimeoutError if there is no answer or one that another request may not get (5xx, 408, 429), and UserError, with the
    server's message, for every other failure.
    """
    address = f"{url.rstrip('/')}/{path}"
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body, allow_nan=False).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=timeout) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            message = error.read().decode(errors="replace").strip()[:SHOWN]
        if error.code >= 500 or error.code in MAY_PASS:
            raise ConnectionError(f"{address} answered with code {error.code}: {message}") from None
        raise UserError(f"{address} refused the request with code {error.code}: {message}") from None
    except TimeoutError as error:
        raise TimeoutError(f"{address} gave no answer in {timeout:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"{address} gave no answer: {error}") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{address} answered with no JSON: {text[:SHOWN].decode(errors='replace')!r}") from error


def check_server(url: str, timeout: float, prefix: str = "") -> None:
    """Raise UserError unless `exchange` can take these; `prefix` stands before their names in the message."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"{prefix}url must begin with http:// or https://, but is {url!r}")
    if why := reason(range_of(Seconds), timeout):
        raise UserError(f"{prefix}timeout {why}")
