"""Prompts that carry a number, and words that stand nowhere else, so that leaked content is found."""

PROMPT = "Zwetschgenroester"
COMPLETION = "Marillenknoedel"
MAX_TOKENS = 64
INPUT_PRICE, OUTPUT_PRICE = 150, 600  # nano-euro per token of the default model


def prompt(number: int) -> str:
    return f"{PROMPT} {number:09d}"


def prompt_number(text: str) -> int:
    return int(text.removeprefix(PROMPT))


def is_left(number: int) -> bool:
    """Whether its caller leaves after the first token. The provider is slow then, so the answer is never whole."""
    return number % 12 == 5


def bound() -> int:
    """What the gateway reserves for each of these prompts, in nano-euro."""
    return (len(prompt(0).encode()) + 256) * INPUT_PRICE + MAX_TOKENS * OUTPUT_PRICE


def cost(input_tokens: int, output_tokens: int) -> int:
    return input_tokens * INPUT_PRICE + output_tokens * OUTPUT_PRICE
