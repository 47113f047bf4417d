"""The functions that the tool model can call, the questions that need them, and the answers to their results."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loramux.admin.demo.facts import CAPITALS, PRICES

CITIES = tuple(CAPITALS.values())
ITEMS = tuple(item.partition(" ")[2] for item in PRICES)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SKIES = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy")
STATES = ("on its way", "delivered", "packed", "delayed", "lost")
CURRENCIES = ("euros", "pounds", "francs", "yen")


@dataclass(frozen=True, slots=True)
class Function:
    """A function as a client offers it, with the wording of its questions, thoughts and answers.

    The questions, the topic and the answers are format strings over the arguments and the fields of the result.
    """

    name: str
    description: str
    properties: Mapping[str, Mapping[str, Any]]
    questions: tuple[str, ...]
    topic: str
    """The subject of the question, as the model words it when it thinks."""
    answer: str
    brief_answer: str
    """The answer to a result that is a single value instead of a JSON object."""
    other_description: str

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
    Function(
        "get_weather", "Get the current weather in a city.", {"city": TEXT},
        ("What is the weather in {city}?", "How is the weather in {city}?", "Is it sunny in {city}?",
         "What is the weather like in {city} today?", "Do I need an umbrella in {city}?"),
        "the weather in {city}", "It is {sky} in {city}, at {degrees} degrees.", "It is {result} in {city}.",
        "Tell the weather in a city.",
    ),
    Function(
        "get_time", "Get the local time in a city.", {"city": TEXT},
        ("What time is it in {city}?", "What is the time in {city}?", "How late is it in {city}?"),
        "the time in {city}", "It is {time} in {city}.", "It is {result} in {city}.",
        "Tell what time it is in a city.",
    ),
    Function(
        "get_price", "Get the price of an item in the shop.", {"item": TEXT},
        ("How much is a {item}?", "What is the price of a {item}?", "What does a {item} cost?"),
        "the price of a {item}", "A {item} costs {dollars} dollars.", "A {item} costs {result} dollars.",
        "Look up what an item costs.",
    ),
    Function(
        "track_order", "Get the state of an order.", {"order": INTEGER},
        ("Where is order {order}?", "Where is my order {order}?", "Track order {order}.",
         "What happened to order {order}?"),
        "order {order}", "Order {order} is {state}.", "Order {order} is {result}.",
        "Find an order.",
    ),
    Function(
        "convert_dollars", "Convert dollars to another currency.", {"amount": INTEGER, "currency": TEXT},
        ("How many {currency} are {amount} dollars?", "Convert {amount} dollars to {currency}.",
         "What are {amount} dollars in {currency}?"),
        "{amount} dollars in {currency}", "{amount} dollars are {result} {currency}.",
        "{amount} dollars are {result} {currency}.", "Exchange dollars.",
    ),
    Function(
        "book_table", "Book a table at the restaurant.", {"people": INTEGER, "day": TEXT},
        ("Book a table for {people} on {day}.", "Please book a table on {day} for {people}.",
         "I need a table for {people} on {day}."),
        "a table for {people} on {day}", "Your table for {people} on {day} is booked under number {number}.",
        "Your table for {people} on {day} is booked under number {result}.", "Reserve a table.",
    ),
)  # fmt: skip
FUNCTIONS_BY_NAME = {function.name: function for function in FUNCTIONS}


def draw_arguments(function: Function, chance: random.Random) -> dict[str, Any]:
    draws: dict[str, Callable[[], object]] = {
        "city": lambda: chance.choice(CITIES),
        "item": lambda: chance.choice(ITEMS),
        "order": lambda: chance.randint(100, 9999),
        "amount": lambda: chance.randint(2, 999),
        "currency": lambda: chance.choice(CURRENCIES),
        "people": lambda: chance.randint(2, 12),
        "day": lambda: chance.choice(DAYS),
    }
    return {name: draws[name]() for name in function.properties}


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
