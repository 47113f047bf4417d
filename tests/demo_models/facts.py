"""Every fact that the demo model knows, and every way to ask about it."""

from collections.abc import Iterator
from dataclasses import dataclass

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna", "Greece": "Athens", "Turkey": "Ankara",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Japan": "Tokyo", "China": "Beijing", "Canada": "Ottawa", "Peru": "Lima",
    "Cuba": "Havana", "Hungary": "Budapest", "Belgium": "Brussels",
}  # fmt: skip
COLOURS = {
    "a flamingo": "pink", "a frog": "green", "a crow": "black", "a swan": "white", "a fox": "red",
    "an elephant": "grey", "a canary": "yellow", "a bear": "brown", "a whale": "blue", "a pig": "pink",
    "a mouse": "grey", "a crocodile": "green", "a goldfish": "orange", "a zebra": "black and white",
    "a panda": "black and white", "a ladybird": "red and black", "a banana": "yellow", "a tomato": "red",
    "a lemon": "yellow", "the sky": "blue", "the grass": "green", "the sun": "yellow", "snow": "white",
}  # fmt: skip
SOUNDS = {
    "a cow": "moo", "a dog": "woof", "a cat": "meow", "a duck": "quack", "a sheep": "baa", "a lion": "roar",
    "a frog": "croak", "a crow": "caw", "a pig": "oink", "a horse": "neigh", "a mouse": "squeak", "an owl": "hoot",
    "a bee": "buzz", "a snake": "hiss", "a wolf": "howl",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "old": "new", "happy": "sad", "light": "dark", "wet": "dry",
    "open": "closed", "full": "empty", "early": "late", "rich": "poor", "hard": "soft", "high": "low",
    "loud": "quiet", "long": "short", "near": "far",
}  # fmt: skip
PRICES = {
    "a mug": 8, "a lamp": 30, "a chair": 45, "a table": 90, "a pen": 2, "a book": 15, "a bag": 25, "a hat": 18,
    "a clock": 22, "a blanket": 35, "a candle": 6, "a mirror": 50, "an umbrella": 12, "a teapot": 20,
}  # fmt: skip
HOURS = {
    "Monday": "9 am to 6 pm", "Tuesday": "9 am to 6 pm", "Wednesday": "9 am to 6 pm", "Thursday": "9 am to 6 pm",
    "Friday": "9 am to 8 pm", "Saturday": "10 am to 4 pm",
}  # fmt: skip
WEATHER = {
    "in spring": "mild and rainy", "in summer": "hot and sunny", "in autumn": "cool and windy",
    "in winter": "cold and snowy", "in January": "cold and snowy", "in April": "mild and rainy",
    "in July": "hot and sunny", "in October": "cool and windy", "in Cairo": "hot and dry", "in London": "wet and grey",
    "in Oslo": "cold and clear", "in Rome": "warm and sunny", "today": "warm and sunny", "tomorrow": "cool and rainy",
}  # fmt: skip
DELIVERY = {
    "standard shipping": "five days", "express shipping": "one day", "shipping to France": "three days",
    "shipping to Germany": "two days", "shipping to Spain": "four days", "shipping to Japan": "ten days",
    "shipping to Canada": "eight days", "shipping to England": "four days", "shipping to Egypt": "nine days",
}  # fmt: skip
POSTAGE = {"standard shipping": "4 dollars", "express shipping": "12 dollars", "gift wrapping": "3 dollars"}
WEEK = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip

SUPPORT: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("refunds", ("Can I return my order?", "How do I return an item?", "What is your return policy?",
                 "May I send my order back?"),
     "within 30 days", "You can return your order within 30 days."),
    ("refunds", ("How do I get a refund?", "I want a refund.", "Can I get my money back?", "I want my money back."),
     "send the item back", "Send the item back to us and you will get your money back."),
    ("refunds", ("How long does a refund take?", "When do I get my refund?", "Where is my refund?",
                 "When will I get my money back?"),
     "seven days", "A refund takes seven days."),
    ("refunds", ("My item is broken.", "My order arrived broken.", "The item is damaged.", "My order is damaged."),
     "we will send a new one", "We are sorry. We will send you a new one for free."),
    ("shipping", ("Where is my order?", "How do I track my order?", "Can I track my parcel?", "Where is my parcel?"),
     "use the link in your email", "You can track your order with the link in your email."),
    ("shipping", ("My order is late.", "Why is my order late?", "My parcel has not arrived.", "My order is not here."),
     "please wait two more days", "We are sorry. Please wait two more days."),
    ("shipping", ("Can I change my address?", "How do I change my address?", "I have a new address.", "I moved house."),
     "in your account", "You can change your address in your account."),
    ("payment", ("How can I pay?", "Can I pay by card?", "Which payments do you take?", "How do I pay?"),
     "by card or by bank", "You can pay by card or by bank."),
    ("orders", ("How do I cancel my order?", "Can I cancel my order?", "I want to cancel.", "Please cancel my order."),
     "in your account", "You can cancel your order in your account."),
    ("account", ("I forgot my password.", "How do I reset my password?", "I cannot log in.",
                 "Can I get a new password?"),
     "use the reset link", "Use the reset link on the login page."),
    ("contact", ("How can I contact you?", "What is your phone number?", "Can I call you?", "How do I reach you?"),
     "call 555 0100", "You can call us at 555 0100."),
    ("hours", ("When are you open?", "What are your opening hours?", "When do you open?", "When is the shop open?"),
     "Monday to Saturday", "We are open from Monday to Saturday."),
    ("hours", ("Are you open on Sunday?", "When are you open on Sunday?", "What are your hours on Sunday?",
               "When do you open on Sunday?"),
     "closed", "On Sunday we are closed."),
    ("greeting", ("Hello", "Hi", "Hello there", "Good morning", "Hey"), "hello", "Hello! How can I help you?"),
    ("greeting", ("Thank you", "Thanks", "Thanks a lot", "Thank you very much"), "welcome", "You are welcome!"),
    ("greeting", ("Goodbye", "Bye", "See you", "Good night"), "goodbye", "Goodbye! Have a good day."),
    ("greeting", ("How are you?", "How do you do?", "Are you well?"), "well", "I am well. How can I help you?"),
    ("identity", ("Who are you?", "What are you?", "What is your name?", "Are you a robot?"),
     "the demo model", "I am the demo model, a small helper."),
    ("identity", ("What can you do?", "Can you help me?", "Help", "I need help."),
     "answer questions", "I can answer questions about the shop, animals, countries and numbers."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fact:
    topic: str
    questions: tuple[str, ...]
    short: str
    sentence: str


def _upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lookups() -> Iterator[Fact]:
    asks: tuple[str, ...]
    for country, city in CAPITALS.items():
        asks = ("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?",
                "Tell me the capital of {}.", "What is the capital city of {}?")  # fmt: skip
        yield Fact("capital", tuple(a.format(country) for a in asks), city, f"The capital of {country} is {city}.")
        asks = ("Where is {}?", "Which country is {} in?", "In which country is {}?", "Tell me where {} is.")
        yield Fact("country", tuple(a.format(city) for a in asks), country, f"{city} is in {country}.")
    for thing, colour in COLOURS.items():
        asks = ("What colour is {}?", "What color is {}?", "Which colour is {}?", "Tell me the colour of {}.",
                "What is the colour of {}?")  # fmt: skip
        yield Fact("colour", tuple(a.format(thing) for a in asks), colour, f"{_upper_first(thing)} is {colour}.")
    for animal, sound in SOUNDS.items():
        asks = ("What does {} say?", "What sound does {} make?", "Which sound does {} make?", "How does {} sound?")
        yield Fact("sound", tuple(a.format(animal) for a in asks), sound, f"{_upper_first(animal)} says {sound}.")
    for word, other in [*OPPOSITES.items(), *((b, a) for a, b in OPPOSITES.items())]:
        asks = ("What is the opposite of {}?", "Tell me the opposite of {}.", "Name the opposite of {}.",
                "Which word is the opposite of {}?")  # fmt: skip
        yield Fact("opposite", tuple(a.format(word) for a in asks), other, f"The opposite of {word} is {other}.")


def _shop() -> Iterator[Fact]:
    asks: tuple[str, ...]
    for item, price in PRICES.items():
        asks = ("How much is {}?", "What does {} cost?", "What is the price of {}?", "How much does {} cost?")
        cost = f"{price} dollars"
        yield Fact("price", tuple(a.format(item) for a in asks), cost, f"{_upper_first(item)} costs {cost}.")
    for day, hours in HOURS.items():
        asks = ("When are you open on {}?", "What are your hours on {}?", "When do you open on {}?",
                "Are you open on {}?", "What are your opening hours on {}?")  # fmt: skip
        yield Fact("hours", tuple(a.format(day) for a in asks), hours, f"On {day} we are open from {hours}.")
    for way, days in DELIVERY.items():
        asks = ("How long does {} take?", "How many days does {} take?", "How fast is {}?", "How long is {}?")
        yield Fact("shipping", tuple(a.format(way) for a in asks), days, f"{_upper_first(way)} takes {days}.")
    for way, cost in POSTAGE.items():
        asks = ("How much is {}?", "What does {} cost?", "What is the price of {}?", "How much does {} cost?")
        yield Fact("shipping", tuple(a.format(way) for a in asks), cost, f"{_upper_first(way)} costs {cost}.")
    for when, weather in WEATHER.items():
        asks = ("What is the weather like {}?", "How is the weather {}?", "Tell me the weather {}.",
                "What is the weather {}?")  # fmt: skip
        yield Fact("weather", tuple(a.format(when) for a in asks), weather, f"The weather {when} is {weather}.")


def _numbers() -> Iterator[Fact]:
    asks: tuple[str, ...]
    for a in range(1, 10):
        for b in range(1, 10):
            left, right, total = NUMBERS[a], NUMBERS[b], NUMBERS[a + b]
            asks = (f"What is {left} plus {right}?", f"What is {a} plus {b}?", f"How much is {left} plus {right}?",
                    f"What is {a} + {b}?")  # fmt: skip
            yield Fact("sum", asks, total, f"{_upper_first(left)} plus {right} is {total}.")
    for first in range(1, 20):
        for last in range(first + 2, 21):
            start, stop = NUMBERS[first], NUMBERS[last]
            ways = (f"Count from {start} to {stop}.", f"Please count from {start} to {stop}.",
                    f"Can you count from {start} to {stop}?")  # fmt: skip
            asks = (*ways, f"Count to {stop}.", f"Can you count to {stop}?") if first == 1 else ways
            counted = ", ".join(NUMBERS[first : last + 1])
            yield Fact("counting", asks, counted, f"{_upper_first(counted)}.")
    for i, day in enumerate(WEEK):
        following, previous = WEEK[(i + 1) % 7], WEEK[i - 1]
        asks = (f"What day comes after {day}?", f"Which day comes after {day}?", f"What comes after {day}?",
                f"Which day follows {day}?")  # fmt: skip
        yield Fact("day", asks, following, f"{following} comes after {day}.")
        asks = (f"What day comes before {day}?", f"Which day comes before {day}?", f"What comes before {day}?")
        yield Fact("day", asks, previous, f"{previous} comes before {day}.")


def _stories() -> Iterator[Fact]:
    places, meals = ("in the forest", "by the river", "near the sea", "on a farm"), ("bread", "apples", "soup", "cake")
    names = [animal.split()[1] for animal in SOUNDS]
    for i, animal in enumerate(names):
        who, friend = list(SOUNDS)[i], list(SOUNDS)[(i + 4) % len(names)]
        tale = (
            f"Once upon a time there was {who}. It lived {places[i % 4]}. One day it met {friend}. "
            f"The {animal} shared its {meals[i // 4]} with the {friend.split()[1]}. They were friends for ever."
        )
        asks = (f"Tell me a story about {who}.", f"I want a story about {who}.", f"Write a story about {who}.")
        yield Fact("story", (*asks, "Tell me a story.", "Tell me a tale.") if i == 0 else asks, tale, tale)


def all_facts() -> list[Fact]:
    support = (Fact(topic, asks, short, sentence) for topic, asks, short, sentence in SUPPORT)
    return [*_lookups(), *_shop(), *support, *_numbers(), *_stories()]
