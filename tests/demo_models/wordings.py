"""How the tool model's training examples word the demo's functions: their questions, thoughts and answers."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loramux.admin.demo.tools.functions import Function
from tests.demo_models.facts import CAPITALS, PRICES, WEEK

CITIES = tuple(CAPITALS.values())
ITEMS = tuple(item.partition(" ")[2] for item in PRICES)
CURRENCIES = ("euros", "pounds", "francs", "yen")


@dataclass(frozen=True, slots=True)
class Wording:
    """The wording of one function. The questions, the topic and the answers are format strings over the arguments and
    the fields of the result.
    """

    questions: tuple[str, ...]
    topic: str
    """The subject of the question, as the model words it when it thinks."""
    answer: str
    brief_answer: str
    """The answer to a result that is a single value instead of a JSON object."""
    other_description: str


WORDINGS = {
    "get_weather": Wording(
        ("What is the weather in {city}?", "How is the weather in {city}?", "Is it sunny in {city}?",
         "What is the weather like in {city} today?", "Do I need an umbrella in {city}?"),
        "the weather in {city}", "It is {sky} in {city}, at {degrees} degrees.", "It is {result} in {city}.",
        "Tell the weather in a city.",
    ),
    "get_time": Wording(
        ("What time is it in {city}?", "What is the time in {city}?", "How late is it in {city}?"),
        "the time in {city}", "It is {time} in {city}.", "It is {result} in {city}.",
        "Tell what time it is in a city.",
    ),
    "get_price": Wording(
        ("How much is a {item}?", "What is the price of a {item}?", "What does a {item} cost?"),
        "the price of a {item}", "A {item} costs {dollars} dollars.", "A {item} costs {result} dollars.",
        "Look up what an item costs.",
    ),
    "track_order": Wording(
        ("Where is order {order}?", "Where is my order {order}?", "Track order {order}.",
         "What happened to order {order}?"),
        "order {order}", "Order {order} is {state}.", "Order {order} is {result}.",
        "Find an order.",
    ),
    "convert_dollars": Wording(
        ("How many {currency} are {amount} dollars?", "Convert {amount} dollars to {currency}.",
         "What are {amount} dollars in {currency}?"),
        "{amount} dollars in {currency}", "{amount} dollars are {result} {currency}.",
        "{amount} dollars are {result} {currency}.", "Exchange dollars.",
    ),
    "book_table": Wording(
        ("Book a table for {people} on {day}.", "Please book a table on {day} for {people}.",
         "I need a table for {people} on {day}."),
        "a table for {people} on {day}", "Your table for {people} on {day} is booked under number {number}.",
        "Your table for {people} on {day} is booked under number {result}.", "Reserve a table.",
    ),
}  # fmt: skip
"""By the functions' names."""


def draw_arguments(function: Function, chance: random.Random) -> dict[str, Any]:
    draws: dict[str, Callable[[], object]] = {
        "city": lambda: chance.choice(CITIES),
        "item": lambda: chance.choice(ITEMS),
        "order": lambda: chance.randint(100, 9999),
        "amount": lambda: chance.randint(2, 999),
        "currency": lambda: chance.choice(CURRENCIES),
        "people": lambda: chance.randint(2, 12),
        "day": lambda: chance.choice(WEEK),
    }
    return {name: draws[name]() for name in function.properties}
