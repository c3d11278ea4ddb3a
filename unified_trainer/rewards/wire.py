"""One request to a server over HTTP with JSON bodies, and what its failures mean."""

import asyncio
import json
import os
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Seconds, range_of, reason
from unified_trainer.basics.secrets import masked

MAY_PASS = (408, 429)  # timeout and too many requests: the only codes below 500 that another request may not get
SHOWN = 2000  # characters of a server's message that an error repeats
OF_REQUEST = (400, 404, 405, 413, 422, 501)  # for its path or content; 401 and 403 refuse every request
MOST_BYTES = 2**26  # of an answer


class RefusedError(UserError):
    """A server refuses a request, and may accept others."""


def exchange(
    url: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout: float,
    token: str = "",
    most_bytes: int = MOST_BYTES,
) -> Any:
    """Return the JSON value that the server at `url` answers to a POST of `body`, or to a GET without one.

    `timeout` is the seconds until the whole answer must be here, and `token` is sent as a bearer token unless it is
    empty. No redirect is followed. Raise ConnectionError or TimeoutError if there is no answer or one that another
    request may not get (5xx, 408, 429), and UserError, with the server's message, for every other failure.
    """
    address = f"{url.rstrip('/')}/{path}"
    data = None if body is None else json.dumps(body, allow_nan=False).encode()
    code, place, text = _answer(address, data, timeout, token, most_bytes)
    message = text.decode(errors="replace").strip()[:SHOWN]
    if code > 501 or code == 500 or code in MAY_PASS:
        raise ConnectionError(f"{address} answered with code {code}: {message}")
    if 300 <= code < 400:
        raise UserError(f"{address} redirects to {masked(place)!r}: give that server's own address, if you trust it")
    if code >= 400:
        raise (RefusedError if code in OF_REQUEST else UserError)(
            f"{address} refused the request with code {code}: {message}"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{address} answered with no JSON: {message!r}") from error


def _answer(address: str, data: bytes | None, timeout: float, token: str, most_bytes: int) -> tuple[int, str, bytes]:
    """Return code, header Location and body of an answer."""
    import httpx2  # takes a third of a second

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    async def answer_of() -> tuple[int, str, bytes]:
        text = bytearray()
        async with asyncio.timeout(timeout), httpx2.AsyncClient(timeout=None) as client:
            method = "GET" if data is None else "POST"
            async with client.stream(method, address, content=data, headers=headers) as answer:
                async for part in answer.aiter_bytes():
                    text += part
                    if len(text) > most_bytes:
                        raise UserError(f"{address} answered with more than {most_bytes} bytes, which no answer has")
                return answer.status_code, answer.headers.get("location", ""), bytes(text)

    try:
        return asyncio.run(answer_of())
    except TimeoutError as error:
        raise TimeoutError(f"{address} gave no answer in {timeout:g} s") from error
    except (OSError, httpx2.HTTPError) as error:
        raise ConnectionError(f"{address} gave no answer: {str(error) or type(error).__name__}") from error


def check_server(url: str, timeout: float, token_variable: str = "", prefix: str = "") -> None:
    """Raise UserError unless a server can be asked so; `prefix` stands before the names in the message."""
    import httpx2

    try:
        parts = httpx2.URL(url)
        right = parts.scheme in ("http", "https") and parts.host and not len(url) - len(url.strip()) > 0
    except (httpx2.InvalidURL, ValueError) as error:
        raise UserError(f"{prefix}url {masked(url)!r} is no address: {error}") from error
    if not right or (parts.port or 0) >= 2**16:
        raise UserError(
            f"{prefix}url must begin with http:// or https:// and name a host, such as http://10.0.0.7:8000, but is "
            f"{masked(url)!r}"
        )
    if masked(url) != url:
        raise UserError(
            f"{prefix}url {masked(url)!r} holds a password or key, which the run would store: leave it out, and name "
            f"the environment variable that holds the server's token by {prefix}token_variable"
        )
    if why := reason(range_of(Seconds), timeout):
        raise UserError(f"{prefix}timeout {why}")
    if token_variable and not os.environ.get(token_variable):
        raise UserError(f"{prefix}token_variable: the environment has no {token_variable}")


def token_of(variable: str) -> str:
    """Return the token that an environment variable holds; "" without a variable."""
    return os.environ[variable] if variable else ""
