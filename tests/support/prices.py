"""The prices for input and output in nano-euro per token, repeated here on purpose."""

PRICES = {
    "gpt-oss-120b": (150, 600),
    "qwen3.6-35b-a3b": (250, 1500),
    "llama-3.3-70b-instruct": (900, 900),
}
EURO = 1_000_000_000


def cost(prompt_tokens: int, completion_tokens: int, model: str = "gpt-oss-120b") -> int:
    into, out = PRICES[model]
    return prompt_tokens * into + completion_tokens * out


def max_cost(text: str, max_tokens: int = 2000, model: str = "gpt-oss-120b", messages: int = 1) -> int:
    """Returns the maximum cost, which is reserved."""
    return cost(len(text.encode()) + 256 + 16 * (messages - 1), max_tokens, model)
