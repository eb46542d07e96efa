"""The models on offer and their prices. To change a price, change the table and its date."""

from collections.abc import Iterable

import msgspec

PRICED_ON = "2026-07-02"
DEFAULT_MODEL = "gpt-oss-120b"
MAX_OUTPUT_TOKENS = 2_000

# Tokens that the provider's chat template may add: to a request with one message, and for each further message.
TEMPLATE_TOKENS = 256
MESSAGE_TOKENS = 16


class Price(msgspec.Struct, frozen=True):
    """Nano-euro per token."""

    input: int
    output: int


PRICES = {
    "gpt-oss-120b": Price(150, 600),
    "qwen3.6-35b-a3b": Price(250, 1_500),
    "llama-3.3-70b-instruct": Price(900, 900),
}


class Usage(msgspec.Struct, frozen=True):
    """Tokens, as the provider reported them."""

    input: int
    output: int
    details: dict[str, dict[str, int]] | None = None  # of OpenAI's format, such as cached tokens; not priced


class Charge(msgspec.Struct, frozen=True):
    """The cost at which a request is settled."""

    cost: int  # nano-euro, at most the reservation's maximum cost
    anomaly: str | None = None  # why the cost is not the price of the usage: a label of `gateway_usage_anomalies`


NOTHING = Charge(0)


def choice_of(models: Iterable[str]) -> str:
    """Returns what to do after the request for another model."""
    return f"Choose one of the models offered here: {', '.join(models)}."


def worst_case_tokens(text_bytes: int, max_tokens: int) -> int:
    """Returns the most tokens that a request can use. A token is at least one byte of text."""
    return text_bytes + TEMPLATE_TOKENS + max_tokens


def worst_case_cost(model: str, text_bytes: int, max_tokens: int) -> int:
    """Returns the most that a request can cost, in nano-euro."""
    price = PRICES[model]
    return (text_bytes + TEMPLATE_TOKENS) * price.input + max_tokens * price.output


def charge_for_usage(model: str, usage: Usage, max_cost: int) -> Charge:
    price = PRICES[model]
    cost = usage.input * price.input + usage.output * price.output
    return Charge(cost) if cost <= max_cost else Charge(max_cost, "above bound")
