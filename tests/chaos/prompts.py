"""Prompts that carry a number, and words that stand nowhere else, so that leaked content is found."""

import random

PROMPT = "Zwetschgenroester"
COMPLETION = "Marillenknoedel"
MAX_TOKENS = 64
INPUT_PRICE, OUTPUT_PRICE = 150, 600  # nano-euro per token of the default model


def prompt(number: int) -> str:
    return f"{PROMPT} {number:09d}"


def prompt_number(text: str) -> int:
    return int(text.removeprefix(PROMPT))


def pieces(number: int) -> list[int]:
    """How many tokens arrive together, for each piece of the answer to a prompt. At most 60 in all."""
    if is_left(number):
        return [2] * 10
    chance = random.Random(number)
    return [chance.randint(1, 12) for _ in range(chance.randint(1, 5))]


def word(number: int, place: int) -> str:
    """A token of the answer to a prompt. No two are alike, so text that is lost, moved or another's shows."""
    return f"{COMPLETION} {number}.{place} "


def is_faithful(number: int, text: str, *, whole: bool) -> bool:
    """Whether that is the answer to the prompt, or the beginning of it."""
    expected = "".join(word(number, place) for place in range(sum(pieces(number))))
    return text == expected if whole else expected.startswith(text)


def is_left(number: int) -> bool:
    """Whether its caller leaves after the first token. The provider is slow then, so the answer is never whole."""
    return number % 12 == 5


def bound() -> int:
    """What the gateway reserves for each of these prompts, in nano-euro."""
    return (len(prompt(0).encode()) + 256) * INPUT_PRICE + MAX_TOKENS * OUTPUT_PRICE


def cost(input_tokens: int, output_tokens: int) -> int:
    return input_tokens * INPUT_PRICE + output_tokens * OUTPUT_PRICE
