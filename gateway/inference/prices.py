"""The models that may be asked for, and what they cost. A change of price is a change of this table and its date."""

from __future__ import annotations

import msgspec

PRICED_ON = "2026-07-02"
DEFAULT_MODEL = "gpt-oss-120b"
MAX_OUTPUT_TOKENS = 2_000

# Tokens that the provider's chat template may add to the text of one message, and to each further one.
TEMPLATE_TOKENS = 256
MESSAGE_TOKENS = 16


class Price(msgspec.Struct, frozen=True):
    """Nano-euro a token."""

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


def worst_case(model: str, text_bytes: int, max_tokens: int) -> int:
    """Nano-euro that a request can cost at most: a byte is never less than a token."""
    price = PRICES[model]
    return (text_bytes + TEMPLATE_TOKENS) * price.input + max_tokens * price.output


def cost(model: str, usage: Usage) -> int:
    price = PRICES[model]
    return usage.input * price.input + usage.output * price.output
