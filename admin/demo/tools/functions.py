"""The functions that the tool model can call, and their results."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SKIES = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy")
STATES = ("on its way", "delivered", "packed", "delayed", "lost")


@dataclass(frozen=True, slots=True)
class Function:
    """A function as a client offers it."""

    name: str
    description: str
    properties: Mapping[str, Mapping[str, Any]]

    @property
    def tool(self) -> dict[str, Any]:
        """The function's entry in the `tools` of a request."""
        parameters = {"type": "object", "properties": dict(self.properties), "required": list(self.properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


TEXT, INTEGER = {"type": "string"}, {"type": "integer"}

FUNCTIONS = (
    Function("get_weather", "Get the current weather in a city.", {"city": TEXT}),
    Function("get_time", "Get the local time in a city.", {"city": TEXT}),
    Function("get_price", "Get the price of an item in the shop.", {"item": TEXT}),
    Function("track_order", "Get the state of an order.", {"order": INTEGER}),
    Function("convert_dollars", "Convert dollars to another currency.", {"amount": INTEGER, "currency": TEXT}),
    Function("book_table", "Book a table at the restaurant.", {"people": INTEGER, "day": TEXT}),
)
FUNCTIONS_BY_NAME = {function.name: function for function in FUNCTIONS}


def draw_result(function: Function, chance: random.Random) -> dict[str, Any]:
    results: dict[str, dict[str, Any]] = {
        "get_weather": {"sky": chance.choice(SKIES), "degrees": chance.randint(1, 39)},
        "get_time": {"time": f"{chance.randint(0, 23):02}:{chance.randint(0, 59):02}"},
        "get_price": {"dollars": chance.randint(2, 250)},
        "track_order": {"state": chance.choice(STATES)},
        "convert_dollars": {"result": chance.randint(2, 2500)},
        "book_table": {"number": chance.randint(10, 999)},
    }
    return results[function.name]
