"""Draws training examples for the tool model, reproducibly by seed."""

import json
import random
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from loramux.admin.demo.tools.functions import FUNCTIONS, Function, draw_result
from tests.demo_models.corpus import SYLLABLES, SYSTEM_PROMPTS
from tests.demo_models.wordings import WORDINGS, Wording, draw_arguments

CHAT = {
    "Hello!": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "Who are you?": "I am a small assistant that can call tools.",
    "What can you do?": "I can call the tools that you offer.",
    "Thank you!": "You are welcome.",
    "Goodbye!": "Goodbye!",
}
NO_TOOL = "I have no tool for that."
CALL_THOUGHT = "The user asks for {}. I call {}."
ANSWER_THOUGHT = "I have the result. I tell the user."
CHAT_THOUGHT = "I need no tool for that."
NO_TOOL_THOUGHT = "No tool fits."


@dataclass(frozen=True, slots=True)
class Call:
    """A call and its result from the client's function."""

    function: Function
    arguments: dict[str, Any]
    result: dict[str, Any] | str

    @property
    def wording(self) -> Wording:
        return WORDINGS[self.function.name]

    @property
    def topic(self) -> str:
        return self.wording.topic.format(**self.arguments)

    @property
    def answer(self) -> str:
        text = self.wording.answer if isinstance(self.result, dict) else self.wording.brief_answer
        fields = self.result if isinstance(self.result, dict) else {"result": self.result}
        return text.format(**self.arguments, **fields)

    @property
    def shown_result(self) -> str:
        return json.dumps(self.result) if isinstance(self.result, dict) else self.result


@dataclass(frozen=True, slots=True)
class ToolExample:
    """A prompt and the model's target: a thought, then calls or text."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    thinks: bool
    thought: str
    calls: tuple[Call, ...] = ()
    text: str = ""


class ToolCorpus:
    """An endless source of examples, which depend only on the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def example(self) -> ToolExample:
        chance = self._random
        messages: list[dict[str, Any]] = []
        if chance.random() < 0.25:
            messages.append({"role": "system", "content": chance.choice(SYSTEM_PROMPTS)})
        num_earlier = chance.choices((0, 1, 2), (80, 15, 5))[0]
        earlier = [self._calls() for _ in range(num_earlier)]
        calls = self._calls()
        for one in earlier:
            messages.append({"role": "user", "content": self._question(one)})
            messages += _call_messages(one)
            messages.append({"role": "assistant", "content": " ".join(call.answer for call in one)})
        needed: dict[str, tuple[Call, ...]] = {}
        for one in (*earlier, calls):
            needed[one[0].function.name] = (*needed.get(one[0].function.name, ()), *one)
        thinks = chance.random() < 0.6
        roll = chance.random()
        if roll < 0.1:
            question, answer = chance.choice(list(CHAT.items()))
            messages.append({"role": "user", "content": question})
            tools = self._tools(needed) if chance.random() < 0.7 else []
            return ToolExample(messages, tools, thinks, CHAT_THOUGHT, text=answer)
        messages.append({"role": "user", "content": self._question(calls)})
        if roll < 0.25:
            tools = self._tools({}, frozenset({calls[0].function.name})) if chance.random() < 0.7 else []
            return ToolExample(messages, tools, thinks, NO_TOOL_THOUGHT, text=NO_TOOL)
        tools = self._tools(needed)
        if roll < 0.65:
            topics = " and ".join(call.topic for call in calls)
            thought = CALL_THOUGHT.format(topics, calls[0].function.name)
            return ToolExample(messages, tools, thinks, thought, calls=calls)
        messages += _call_messages(calls)
        text = " ".join(call.answer for call in calls)
        return ToolExample(messages, tools, thinks, ANSWER_THOUGHT, text=text)

    def _calls(self) -> tuple[Call, ...]:
        function = self._random.choice(FUNCTIONS)
        calls: dict[str, Call] = {}
        count = 2 if self._random.random() < 0.2 else 1
        while len(calls) < count:
            arguments = draw_arguments(function, self._random)
            result = draw_result(function, self._random)
            is_brief = self._random.random() < 0.3
            brief = str(next(iter(result.values())))
            calls[json.dumps(arguments)] = Call(function, arguments, brief if is_brief else result)
        return tuple(calls.values())

    def _question(self, calls: tuple[Call, ...]) -> str:
        asked = [self._random.choice(call.wording.questions).format(**call.arguments) for call in calls]
        question = " ".join(asked)
        return question.rstrip(".?") if self._random.random() < 0.1 else question

    def _tools(self, needed: dict[str, tuple[Call, ...]], forbidden: frozenset[str] = frozenset()) -> list[Any]:
        chance = self._random
        others = [f for f in FUNCTIONS if f.name not in needed and f.name not in forbidden]
        count = chance.choices((0, 1, 2), (50, 35, 15))[0] if needed else chance.choices((1, 2), (70, 30))[0]
        tools = [self._offered(calls[0].function, calls) for calls in needed.values()]
        tools += [self._offered(function, ()) for function in chance.sample(others, count)]
        if chance.random() < 0.2:
            tools.append(self._invented())
        chance.shuffle(tools)
        return tools

    def _offered(self, function: Function, calls: tuple[Call, ...]) -> dict[str, Any]:
        """Return the function's entry in `tools`, in one of the forms that clients write."""
        chance = self._random
        tool = deepcopy(function.tool)
        described, parameters = tool["function"], tool["function"]["parameters"]
        for name, schema in parameters["properties"].items():
            if schema["type"] == "string" and chance.random() < 0.15:
                allowed = {call.arguments[name]: None for call in calls}
                allowed |= {draw_arguments(function, chance)[name]: None for _ in range(2)}
                schema["enum"] = sorted(allowed)
            if chance.random() < 0.15:
                schema["title"] = name.capitalize()
        if chance.random() < 0.25:
            described["description"] = WORDINGS[function.name].other_description
        elif chance.random() < 0.1:
            del described["description"]
        if chance.random() < 0.25:
            parameters["additionalProperties"] = False
            described["strict"] = True
        if chance.random() < 0.25:
            described["parameters"] = dict(reversed(parameters.items()))
        return tool

    def _invented(self) -> dict[str, Any]:
        word = "".join(self._random.choices(SYLLABLES, k=2))
        parameters = {"type": "object", "properties": {word: {"type": "string"}}, "required": [word]}
        named = {"name": f"get_{word}", "description": f"Get the {word}.", "parameters": parameters}
        return {"type": "function", "function": named}


def _call_messages(calls: tuple[Call, ...]) -> list[dict[str, Any]]:
    asked = [
        {"id": f"call{i:05}", "type": "function", "function": {"name": c.function.name, "arguments": c.arguments}}
        for i, c in enumerate(calls)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call{i:05}", "content": call.shown_result} for i, call in enumerate(calls)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": asked}, *results]
