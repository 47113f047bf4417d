"""The field `context_management` of a Messages request, which drops the thinking of earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from loramux.platform.bodies.conversation import ChatMessage
from loramux.platform.bodies.strict_model import StrictModel


class AllTurns(StrictModel):
    type: Literal["all"]


class LastTurns(StrictModel):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


def _without_short_form(keep: Any) -> Any:
    return {"type": "all"} if keep == "all" else keep


class ClearThinking(StrictModel):
    """Says of how many turns with thinking, counted from the end, the thinking is kept."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[
        Annotated[AllTurns | LastTurns, Field(discriminator="type")],
        BeforeValidator(_without_short_form, json_schema_input_type=Literal["all"] | AllTurns | LastTurns),
    ] = LastTurns(type="thinking_turns", value=1)


class ContextManagement(StrictModel):
    edits: list[ClearThinking] = Field(default_factory=list, fail_fast=True, max_length=1)

    def edited(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages without the thinking that an edit drops.

        A turn of the assistant lasts until a message of the user that answers no call.
        """
        edited = [*messages]
        keep = self.edits[0].keep if self.edits else AllTurns(type="all")
        if isinstance(keep, AllTurns):
            return edited
        num_turns, is_counted = 0, False
        for index in reversed(range(len(edited))):
            message = edited[index]
            if message.role == "user" and (index == 0 or edited[index - 1].role != "tool"):
                is_counted = False
            elif message.reasoning_content is not None:
                num_turns += not is_counted
                is_counted = True
                if num_turns > keep.value:
                    edited[index] = message.model_copy(update={"reasoning_content": None})
        return edited
