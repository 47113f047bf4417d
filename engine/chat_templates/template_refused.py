"""The error for conversations that cannot become prompts."""

from __future__ import annotations


class TemplateRefused(ValueError):
    """The conversation cannot be rendered. The message says why, `param` names the field, and `code` is the error's
    code in the API.
    """

    def __init__(self, message: str, param: str = "messages", code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
