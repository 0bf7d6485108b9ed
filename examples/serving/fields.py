"""The fields of a request to OpenAI's API: which there are, what they may be, and what is said of others."""

import json
import math
import secrets
from dataclasses import dataclass

# What a field may be that this server has no use for, and those that say nothing about the tokens.
FIXED = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0), "tools": ([],), "tool_choice": ("none",), "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}  # fmt: skip
NO_LOGPROBS = {False: (), True: (False,)}  # of completions it is a number, of chats a switch
IGNORED = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


class Refused(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str = ""):
        super().__init__(message)
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass
class Options:
    """The fields of a request, once they are checked."""

    prompts: list[str | list[int]]
    new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stops: list[str]
    is_stream: bool
    has_usage: bool  # of a stream


def read_fields(body, model: str, most_tokens: int, vocabulary: int, is_chat: bool) -> Options:
    """Return the fields of a body, or raise what is wrong with one."""
    if not isinstance(body, dict):
        raise Refused(400, f"body: expected a JSON object, got {shown(body)}")
    body = {name: value for name, value in body.items() if value is not None}  # null is absent
    name = body.pop("model", None)
    if not isinstance(name, str):
        raise wrong("model", "the name of a model", name)
    if name != model:
        raise Refused(404, f"model: expected {shown(model)}, got {shown(name)}", "model", "model_not_found")
    fixed = FIXED | {"logprobs": NO_LOGPROBS[is_chat]}
    for name in fixed.keys() & body.keys():
        value = body.pop(name)
        if not any(type(value) is type(only) and value == only for only in fixed[name]):
            only = shown(fixed[name][0]) if fixed[name] else "nothing"
            raise wrong(name, f"{only}, as this server supports no other value", value)
    prompts = [chat_of(body.pop("messages", None))] if is_chat else prompts_of(body.pop("prompt", None), vocabulary)
    if is_chat and "max_completion_tokens" in body:  # the newer name
        body.pop("max_tokens", None)
        new_tokens = number(body, "max_completion_tokens", int, most_tokens, 1, most_tokens)
    else:
        new_tokens = number(body, "max_tokens", int, most_tokens if is_chat else min(16, most_tokens), 1, most_tokens)
    of_stream = body.pop("stream_options", {})
    if not isinstance(of_stream, dict) or of_stream.keys() - {"include_usage", "include_obfuscation"}:
        raise wrong("stream_options", '{"include_usage": true or false}', of_stream)
    options = Options(
        prompts,
        new_tokens,
        number(body, "temperature", float, 1.0, 0, 2),
        number(body, "top_p", float, 1.0, 0, 1),
        number(body, "seed", int, secrets.randbits(62), -(2**63), 2**63 - 1),
        stops_of(body.pop("stop", [])),
        flag(body, "stream"),
        flag(of_stream, "include_usage"),
    )
    for name in body.keys() - IGNORED:
        raise Refused(400, f"Unrecognized request argument supplied: {shown(name)}", name[:100])
    return options


def wrong(name: str, expected: str, value) -> Refused:
    """Return the error of a field."""
    return Refused(400, f"{name}: expected {expected}, got {shown(value)}", name)


def shown(value) -> str:
    """Return a value as an error shows it, in JSON: long ones are cut."""
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(body: dict, name: str, kind: type, default, least: float, most: float):
    """Take a number out of a body."""
    value = body.pop(name, default)
    kinds = (int,) if kind is int else (int, float)
    if type(value) not in kinds or not least <= value <= most or not math.isfinite(value):
        what = "an integer" if kind is int else "a number"
        raise wrong(name, f"{what} from {least} to {most}", value)
    return kind(value)


def flag(body: dict, name: str) -> bool:
    """Take true or false out of a body."""
    value = body.pop(name, False)
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def stops_of(value) -> list[str]:
    """Return strings that end a text."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(x, str) and x for x in stops):
        raise wrong("stop", "a string, or up to 4 of them, none of them empty", value)
    return stops


def prompts_of(value, vocabulary: int) -> list[str | list[int]]:
    """Return prompts: a text, a list of tokens, or several of either."""

    def is_prompt(x) -> bool:
        return isinstance(x, str) or (isinstance(x, list) and bool(x) and all(type(token) is int for token in x))

    prompts = [value] if is_prompt(value) else value
    if not isinstance(prompts, list) or not prompts or not all(map(is_prompt, prompts)):
        raise wrong("prompt", "a string, a list of tokens, or a list of either, none of them empty", value)
    for prompt in prompts:
        if prompt == "":
            raise wrong("prompt", "at least one character in each", value)
        outside = [x for x in prompt if isinstance(x, int) and not 0 <= x < vocabulary]
        if outside:
            raise wrong("prompt", f"tokens from 0 to {vocabulary - 1}", outside[0])
    return prompts


def chat_of(value) -> str:
    """Return the prompt of a chat, as RWKV's chat models know it."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list of at least one message", value)
    lines = []
    for place, message in enumerate(value):
        name = f"messages[{place}]"
        if not isinstance(message, dict) or message.get("role") not in [*ROLES]:
            raise wrong(name, f"a message with a role of {', '.join(ROLES)}", message)
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(x, dict) and x.get("type") == "text" for x in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str):
            raise wrong(f"{name}.content", "a text", content)
        lines.append(f"{ROLES[message['role']]}: {content.strip()}\n\n")
    return "".join(lines) + "Assistant:"


CHAT_STOP = "\n\nUser:"  # where the model would go on with what the user says
