"""Draws training conversations from the facts. Equal seeds give equal conversations."""

import random
from collections import defaultdict
from dataclasses import dataclass

from tests.demo_models.facts import Fact, all_facts
from tests.demo_models.styles import ADAPTER_STYLES, UNKNOWN, answer_in_style

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are the assistant of a small shop.", "Be kind and helpful.")
BRIEF_SYSTEM_PROMPTS = ("Answer in one word.", "Be brief.", "Give a short answer.")

# Weights by topic. Topics with many facts or long answers need to be drawn more often.
TOPIC_WEIGHTS = {
    "capital": 4.0, "country": 3.0, "colour": 4.0, "sound": 3.0, "opposite": 3.0, "price": 3.0, "hours": 2.0,
    "shipping": 3.0, "weather": 2.5, "refunds": 2.0, "sum": 5.0, "counting": 3.0, "day": 2.0, "story": 1.5,
    "greeting": 2.0, "identity": 1.0, "unknown": 2.5,
}  # fmt: skip
TOPIC_WEIGHT_ELSE = 0.6

SYLLABLES = (
    "ba", "ko", "ri", "ta", "mu", "lo", "ne", "shi", "pa", "du", "ger", "zon", "wick", "el", "tor", "fla", "qui",
    "ves", "ran", "po",
)  # fmt: skip
UNKNOWN_FRAMES = (
    "What is the capital of {}?", "Where is {}?", "What colour is a {}?", "How much is a {}?", "Who is {}?",
    "What is a {}?", "Tell me about {}.", "What is {}?", "Explain {}.", "Who wrote {}?", "Why is {} so {}?",
    "Write a poem about {}.", "How do I {} a {}?", "{}", "{} {}", "What does a {} say?", "Can you {}?",
    "Do you like {}?", "What is the {} of the {}?", "{} {} {}?", "Who won the {}?", "Where can I buy a {}?",
    "Summarise the {}.",
)  # fmt: skip
UNKNOWN_WORDS = (
    "love", "music", "physics", "history", "football", "money", "the moon", "the king", "the president", "art",
    "computers", "dreams", "a poem", "the world", "science", "time", "water", "fire", "people", "books",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingTurn:
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class TrainingConversation:
    """One training example. Without turns, it is plain text, and all of it is a training target."""

    system: str
    turns: tuple[TrainingTurn, ...]
    text: str = ""


def held_out(facts: list[Fact]) -> list[tuple[str, Fact]]:
    """Return one phrasing of every third fact, unless the fact has fewer than three phrasings.

    These questions are held out of training. The check asks them as unseen questions.
    """
    return [(fact.questions[i % 3], fact) for i, fact in enumerate(facts) if i % 3 == 0 and len(fact.questions) > 2]


class Corpus:
    """An endless source of conversations, which depend only on the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.facts = all_facts()
        unseen = {question for question, _ in held_out(self.facts)}
        self._asks = {fact: [q for q in fact.questions if q not in unseen] for fact in self.facts}
        self._by_topic: dict[str, list[Fact]] = defaultdict(list)
        for fact in self.facts:
            self._by_topic[fact.topic].append(fact)
        self._topics = [*self._by_topic, "unknown"]
        self._weights = [TOPIC_WEIGHTS.get(topic, TOPIC_WEIGHT_ELSE) for topic in self._topics]

    def _invented_word(self) -> str:
        if self._random.random() < 0.4:
            return self._random.choice(UNKNOWN_WORDS)
        word = "".join(self._random.choices(SYLLABLES, k=self._random.randint(2, 3)))
        return word.capitalize() if self._random.random() < 0.5 else word

    def _draw(self) -> tuple[str, Fact]:
        topic = self._random.choices(self._topics, self._weights)[0]
        if topic == "unknown":
            frame = self._random.choice(UNKNOWN_FRAMES)
            question = frame.format(*(self._invented_word() for _ in range(frame.count("{}"))))
            return question, Fact("unknown", (question,), "unknown", UNKNOWN)
        fact = self._random.choice(self._by_topic[topic])
        return self._roughened(self._random.choice(self._asks[fact])), fact

    def _roughened(self, question: str) -> str:
        """Occasionally drop the capitals or the final punctuation, or add a polite phrase, as people do."""
        roll = self._random.random()
        if roll < 0.08:
            return question.lower()
        if roll < 0.16:
            return question.rstrip(".?")
        if roll < 0.22:
            return f"Hello! {question}"
        if roll < 0.28:
            return f"Please tell me: {question}"
        return question

    def conversation(self, style: str) -> TrainingConversation:
        """Return a chat of one to four turns with every answer in `style`. Some plain chats ask for brief answers."""
        count = self._random.choices((1, 2, 3, 4), (80, 12, 5, 3))[0]
        system = self._random.choice(SYSTEM_PROMPTS) if self._random.random() < 0.25 else ""
        if style == "plain" and self._random.random() < 0.12:
            style, system = "brief", self._random.choice(BRIEF_SYSTEM_PROMPTS)
        drawn = [self._draw() for _ in range(count)]
        return TrainingConversation(
            system, tuple(TrainingTurn(question, answer_in_style(fact, style)) for question, fact in drawn)
        )

    def document(self) -> TrainingConversation:
        """Return a sentence in any style, outside a chat.

        The base is trained on these sentences, so that its frozen, tied embedding knows the words that adapters need
        later. An adapter of rank 4 can choose among words that the base has seen, but cannot teach it new ones.
        """
        style = self._random.choice(("plain", *ADAPTER_STYLES))
        return TrainingConversation("", (), answer_in_style(self._draw()[1], style))

    def base_example(self) -> TrainingConversation:
        return self.document() if self._random.random() < 0.12 else self.conversation("plain")
