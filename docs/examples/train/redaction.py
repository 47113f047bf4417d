"""Notes of a support desk, and the same notes without personal data."""

from __future__ import annotations

import random
from string import Formatter

from examples import Example

SYSTEM = "Copy the note, but write [NAME], [EMAIL], [PHONE] and [ORDER] in place of personal data."

FIRST = (
    "Anna", "Boris", "Carla", "David", "Elif", "Fatima", "George", "Hanna", "Igor", "Julia", "Kwame", "Lena", "Marco",
    "Nadia", "Oscar", "Priya", "Quentin", "Rosa", "Samuel", "Tara", "Umar", "Vera", "Wei", "Yusuf",
)  # fmt: skip
LAST = (
    "Adler", "Brown", "Costa", "Dubois", "Eriksen", "Fischer", "Garcia", "Haddad", "Ivanov", "Jensen", "Kim", "Lopez",
    "Mensah", "Novak", "Okafor", "Patel", "Quinn", "Rossi", "Singh", "Tanaka", "Urban", "Vogel", "Wagner", "Young",
)  # fmt: skip
HOSTS = ("mail.example", "post.example", "office.example", "home.example")
PRODUCTS = ("desk lamp", "office chair", "water filter", "bike helmet", "rain jacket", "coffee grinder", "wall clock")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")

NOTES = (
    "{NAME} called on {day} about order {ORDER}.",
    "Please write to {EMAIL} when the {product} is back in stock.",
    "{NAME} wants the {product} by {day} and can be reached at {PHONE}.",
    "Order {ORDER} with the {product} was paid by {NAME}.",
    "The new number of {NAME} is {PHONE}.",
    "We sent the bill for the {product} to {EMAIL} on {day}.",
    "{NAME} returned the {product} on {day}.",
    "Call {PHONE} before the {product} is delivered on {day}.",
    "The {product} in order {ORDER} arrived broken on {day}.",
    "The courier asked for the {product} on {day}.",
    "{NAME} would rather get mail at {EMAIL}.",
    "Refund order {ORDER} and tell {NAME}.",
)


def draw(chance: random.Random) -> Example:
    notes = chance.sample(NOTES, chance.choice((1, 2, 2)))
    pairs = [_filled(note, chance) for note in notes]
    sentences = tuple(sentence for sentence, _ in pairs)
    answer = " ".join(redacted for _, redacted in pairs)
    return Example(SYSTEM, " ".join(sentences), answer, sentences, expected=answer)


def _filled(note: str, chance: random.Random) -> tuple[str, str]:
    """Return the note with invented data, and the note with placeholders for the personal part of it."""
    first, last = chance.choice(FIRST), chance.choice(LAST)
    values = {
        "NAME": chance.choice((first, f"{first} {last}")),
        "EMAIL": f"{first}.{last}@{chance.choice(HOSTS)}".lower(),
        "PHONE": f"555 {chance.randrange(10_000):04}",
        "ORDER": f"A-{chance.randrange(10_000):04}",
        "product": chance.choice(PRODUCTS),
        "day": chance.choice(DAYS),
    }
    fields = [name for _, name, _, _ in Formatter().parse(note) if name]
    redacted = {name: f"[{name}]" if name.isupper() else values[name] for name in fields}
    return note.format(**values), note.format(**redacted)
