"""`AppOptions`: what whoever starts a server can choose about its answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jpaged.api.errors import InvalidParameterError
from jpaged.serving.limits import ServerLimits

DEMO_MODEL_NAME = "jpaged-demo"


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """How the application answers.

    Args:
        served_model_names: what clients may call the model; the first is what answers say.
        api_keys: of which a request must have one; with none, all are served.
        allowed_origins: web pages of these origins may ask; "*": of any.
        metrics_prefix: of the names in /metrics.
        trust_request_chat_template: take `chat_template` from requests. It runs in a sandbox under a time limit, yet a
            single operation of it may take all memory.
        limits: of requests.

    Raises:
        InvalidParameterError: an empty name or key, or a string where a list belongs.
    """

    served_model_names: Sequence[str] = (DEMO_MODEL_NAME,)
    api_keys: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    metrics_prefix: str = "jpaged"
    trust_request_chat_template: bool = False
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        for name in ("served_model_names", "api_keys", "allowed_origins"):
            if isinstance(getattr(self, name), str):  # a sequence too: of its letters
                raise InvalidParameterError(f"{name} must be a list of strings, got one string.")
            if not all(getattr(self, name)):
                raise InvalidParameterError(f"{name} holds an empty string; leave it out or give a value.")
        if not self.served_model_names:
            raise InvalidParameterError("served_model_names is empty; give at least one name.")
        if not self.metrics_prefix.isidentifier():
            raise InvalidParameterError(
                f"metrics_prefix must be letters, digits and underscores, got {self.metrics_prefix!r}."
            )
