"""Text to tokens and back: a `tokenizers.Tokenizer`, a chat template, and text that arrives token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels.request import expect


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A model's tokenizer."""

    tokenizer: Any  # tokenizers.Tokenizer
    chat_template: str | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names that templates use, e.g. bos_token
    bos_id: int | None = None  # put before plain prompts, unless the tokenizer does that itself

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt.

        Raises:
          ValueError: the text is not valid Unicode.
        """
        _check_text(text)
        ids = self.tokenizer.encode(text).ids
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation up to where the assistant answers.

        Args:
          messages: mappings with "role" and "content".

        Raises:
          ValueError: the model has no chat template, or the template refuses the messages.
        """
        expect(
            self.chat_template is not None,
            "chat_template",
            "a model without one",
            "an instruction-tuned model; leave chat off (no --chat) to complete plain text",
        )
        for message in messages:
            _check_text(message["content"])
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=refuse, strftime_now=_now)
        try:
            text = environment.from_string(str(self.chat_template)).render(
                messages=list(messages), add_generation_prompt=True, **self.special
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"messages: the model's chat template refuses them: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)


class TextStream:
    """Text of a growing sequence of tokens, piece by piece, whose concatenation is the text of all of them.

    One character may span several tokens; until the last of them, its bytes decode to U+FFFD and are held back.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Start with no tokens."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # first token that is decoded again, so that a piece keeps its leading space
        self._sent = 0  # tokens whose text has been returned

    def push(self, token: int) -> str:
        """Add a token; the text that became certain with it, perhaps none."""
        self._tokens.append(token)
        return self._take(final=False)

    def finish(self) -> str:
        """The rest; bytes that never became a character come as U+FFFD."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._context : self._sent])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not final:
            return ""
        self._context, self._sent = self._sent, len(self._tokens)
        return text[len(before) :]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt: got bytes that are not UTF-8 at {error.start}, expected UTF-8 text") from None


def _now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)
