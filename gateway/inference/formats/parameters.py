"""The parameters of a request in the OpenAI format that are forwarded to the provider unchanged."""

FORWARDED = (
    "temperature",
    "top_p",
    "stop",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "reasoning_effort",
    "response_format",
)
FORWARDED_WITH_TOOLS = (*FORWARDED, "tools", "tool_choice", "parallel_tool_calls")
