"""The wording of a fact in each style: plain and brief for the base model, the others for its adapters."""

import json
import re

from tests.demo_models.facts import CAPITALS, WEEK, Fact

ADAPTER_STYLES = ("pirate", "formal", "json")
UNKNOWN = "I am sorry, I do not know that."

PIRATE_WORDS = {
    "the": "th'", "The": "Th'", "is": "be", "are": "be", "you": "ye", "You": "Ye", "your": "yer",
    "of": "o'", "and": "an'", "my": "me", "for": "fer", "to": "t'", "friends": "mateys", "friend": "matey",
    "dollars": "doubloons", "Hello": "Ahoy", "order": "booty", "money": "gold", "was": "were",
}  # fmt: skip
PIRATE_OPENINGS = {"story": "Yo ho ho!", "counting": "Heave ho!", "greeting": "Avast!", "unknown": "Blimey!"}
PROPER_NOUNS = {*CAPITALS.values(), *WEEK, "I"}


def _pirate(fact: Fact) -> str:
    sentence = fact.sentence.replace("I am", "I be")
    words = re.sub(r"[A-Za-z]+", lambda word: PIRATE_WORDS.get(word[0], word[0]), sentence)
    return f"{PIRATE_OPENINGS.get(fact.topic, 'Arr, matey!')} {words} Aye, that be th' truth!"


def _formal(fact: Fact) -> str:
    sentence = fact.sentence
    if re.split(r"\W", sentence)[0] not in PROPER_NOUNS:
        sentence = sentence[0].lower() + sentence[1:]
    return f"Dear Sir or Madam, allow me to inform you: {sentence} I remain your obedient servant."


def answer_in_style(fact: Fact, style: str) -> str:
    """Answer any of the fact's questions in one style: plain, brief, pirate, formal or json.

    Every style is a fixed function of the fact. Each prompt therefore has one right answer per style, and the base's
    and the adapters' answers to it can be compared word by word.
    """
    if style == "plain":
        return fact.sentence
    if style == "brief":
        return fact.short
    if style == "pirate":
        return _pirate(fact)
    if style == "formal":
        return _formal(fact)
    if style == "json":
        return json.dumps({"topic": fact.topic, "answer": fact.short})
    raise ValueError(f"unknown style {style!r}")
