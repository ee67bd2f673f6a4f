"""The messages of a chat as one text, by the template a tokenizer came with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ASSISTANT = "assistant"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For tokenizers that came without a template (https://github.com/openai/openai-python/blob/v0.28.1/chatml.md)."""


class ChatError(Exception):
    """What should be messages is none, or the template refuses them."""


def render(messages: Sequence[Any], template: str | None, *, ask: bool = False) -> str:
    """The text of a chat.

    Args:
        messages: each a mapping with ``role`` and ``content``.
        template: a Jinja template as `transformers` uses them; None: ChatML.
        ask: whether to end where the assistant is to answer.

    Raises:
        ChatError: a message lacks something, or the template refuses them.
    """
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatError(f"message {number} has no role")
        if not isinstance(message.get("content"), str):
            raise ChatError(f"message {number} has no content")
    try:
        return _compiled(template or CHATML).render(
            messages=list(messages), add_generation_prompt=ask, bos_token="", eos_token="", tools=None
        )
    except jinja2.TemplateError as error:
        raise ChatError(f"the chat template refuses it: {error}") from error


def parts(messages: Sequence[Any], template: str | None) -> list[tuple[str, bool]]:
    """A chat cut where the assistant begins to speak and where it is done: texts, and whether they are its own.

    What it says begins where the template asks for an answer, so a model is taught what it will be asked for.

    Raises:
        ChatError: as ``render``; also when the template does not put answers where it asks for them.
    """
    found: list[tuple[str, bool]] = []
    done = ""
    render(messages, template)  # refuses what is no chat
    for number, message in enumerate(messages):
        if message["role"] != _ASSISTANT:
            continue
        asked = render(messages[:number], template, ask=True)
        answered = render(messages[: number + 1], template)
        if not asked.startswith(done) or not answered.startswith(asked):
            raise ChatError("the chat template does not write an answer where it asks for one")
        found += [(asked[len(done) :], False), (answered[len(asked) :], True)]
        done = answered
    return found


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    # Templates come with models from anywhere: they may format text, and nothing else.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatError(f"the chat template is broken: {error}") from error


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
