"""Settings of scorers that ask a server over HTTP, with JSON bodies."""

from dataclasses import dataclass
from typing import Annotated, Any

from unified_trainer.basics.effects import CONTACTS, SENDS
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Seconds
from unified_trainer.rewards.base import ScorerConfig
from unified_trainer.rewards.own_settings import ScorerSettings
from unified_trainer.rewards.wire import check_server, exchange, token_of

LOOK = 30.0  # seconds within which a server must answer before the run


@dataclass(frozen=True, kw_only=True)
class Endpoint(ScorerSettings):
    """The settings of a scorer that asks a server over HTTP."""

    url: Annotated[str, CONTACTS]
    """Address of the server, such as http://10.0.0.7:8000."""
    timeout: Seconds = 600.0
    """Seconds within which the server must answer a request."""
    token_variable: Annotated[str, SENDS] = ""
    """Environment variable that holds the access token of the server; empty sends none."""

    own_timeout = apart = True

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        """Raise UserError, naming the key, for settings that cannot be."""
        check_server(self.url, self.timeout, self.token_variable, f"{key}.settings.")
        if config.path or config.device:
            raise UserError(f"{key}: {config.kind} has no weights here; leave {key}.path and {key}.device out")

    def look(self, path: str, key: str) -> Any:
        """Return the answer to a GET before the run; raise UserError, naming the key, if no server answers."""
        try:
            return exchange(self.url, path, timeout=min(self.timeout, LOOK), token=token_of(self.token_variable))
        except OSError as fault:
            raise UserError(f"{key}.settings.url: {fault}; start the server first") from fault

    def exchange(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON value that the server answers to a POST of `body`, or to a GET without one.

        Raise ConnectionError if there is no answer or one that another request may not get (5xx, 408, 429), and
        UserError, with the server's message, for every other failure.
        """
        return exchange(self.url, path, body, timeout=self.timeout, token=token_of(self.token_variable))
