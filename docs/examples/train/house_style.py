"""Questions to a shop, and answers in its house style."""

from __future__ import annotations

import random

from examples import Example

SYSTEM = (
    "Answer as Northwind does: write 'Good day.', then one sentence with 'we' that names the product, "
    "then 'Yours, Northwind'. Use no exclamation marks."
)

PRODUCTS = (
    "desk lamp", "office chair", "water filter", "bike helmet", "rain jacket", "coffee grinder", "standing desk",
    "phone case", "camping stove", "label printer", "garden hose", "wall clock", "bread knife", "travel mug",
)  # fmt: skip

TOPICS = (
    (("How long is the warranty of the {product}", "Is there a guarantee on the {product}"),
     "We repair or replace the {product} for two years."),
    (("Can I send the {product} back", "May I return the {product} if it does not fit"),
     "We take the {product} back within 30 days."),
    (("When will the {product} be back in stock", "Is the {product} sold out"),
     "We expect the {product} within two weeks."),
    (("How do I clean the {product}", "What is the best way to wash the {product}"),
     "We advise a soft cloth and warm water for the {product}."),
    (("Do you sell spare parts for the {product}", "Where can I get parts for the {product}"),
     "We keep spare parts for the {product} for ten years."),
    (("What does it cost to ship the {product}", "Is shipping free for the {product}"),
     "We ship the {product} free of charge."),
    (("Is the {product} made in Europe", "Where is the {product} made"),
     "We make the {product} in Portugal."),
    (("Is there a discount if I buy ten of the {product}", "Do you give a discount on the {product}"),
     "We give ten percent off when you buy ten of the {product}."),
)  # fmt: skip

OPENINGS = ("", "Hello. ", "Quick question. ", "Hi there. ", "Good morning. ")
ENDINGS = ("?", ", please?", " these days?", " at the moment?", " in your shop?")


def draw(chance: random.Random) -> Example:
    questions, fact = chance.choice(TOPICS)
    product = chance.choice(PRODUCTS)
    question = chance.choice(questions).format(product=product) + chance.choice(ENDINGS)
    answer = f"Good day. {fact.format(product=product)} Yours, Northwind"
    # The grader knows the style and has to know the product. A greeting does not tell the splits apart.
    return Example(SYSTEM, chance.choice(OPENINGS) + question, answer, (question,), expected=product)
