"""Support tickets, and the JSON with intent and priority that a ticket system expects."""

from __future__ import annotations

import json
import random

from examples import Example

SYSTEM = (
    "Turn the ticket into JSON: intent (refund, delivery, login, cancel, invoice or bug) and priority (low, normal or "
    "high)."
)

PRODUCTS = (
    "desk lamp", "office chair", "water filter", "bike helmet", "rain jacket", "coffee grinder", "standing desk",
    "phone case", "camping stove", "label printer", "garden hose", "wall clock",
)  # fmt: skip

WHO = ("we", "my colleague and I", "my wife and I", "the team and I", "my brother and I")

PROBLEMS = {
    "refund": (
        "{who} sent the {product} back and want the money returned",
        "{who} would like to have the money for the {product} back",
        "the {product} arrived broken and {who} ask for a refund",
        "{who} returned the {product} but have not been paid back",
        "please refund the {product} that {who} ordered by mistake",
    ),
    "delivery": (
        "{who} are still waiting for the {product} to arrive",
        "the parcel with the {product} has not been delivered and {who} wonder where it is",
        "tracking for the {product} that {who} ordered has not moved",
        "{who} want to know when the {product} will be shipped",
        "the courier left the {product} that {who} ordered at the wrong address",
    ),
    "login": (
        "{who} cannot sign in to see the order of the {product}",
        "the password is refused when {who} open the account to buy the {product}",
        "{who} are locked out of the account where the {product} was bought",
        "the reset link for the password fails when {who} try to reorder the {product}",
        "the login page rejects the code when {who} want to pay for the {product}",
    ),
    "cancel": (
        "{who} want to cancel the order of the {product}",
        "please stop the order of the {product}, {who} no longer need it",
        "the {product} must not be sent, {who} have found another one",
        "cancel the subscription for the {product} that {who} have",
        "{who} ordered the {product} twice, please cancel one of them",
    ),
    "invoice": (
        "{who} need an invoice for the {product}",
        "the bill for the {product} that {who} bought shows the wrong company name",
        "{who} cannot find the receipt for the {product}",
        "the tax number is missing on the invoice that {who} got for the {product}",
        "{who} need a copy of the bill for the {product} for the accountant",
    ),
    "bug": (
        "the page of the {product} shows an error when {who} open it",
        "the app crashes as soon as {who} tap on the {product}",
        "the picture of the {product} does not load when {who} visit the shop",
        "the search freezes when {who} look for the {product}",
        "the button to add the {product} does nothing when {who} click it",
    ),
}

DEADLINES = ("today", "before noon", "by tonight", "within the hour", "this morning", "before the shop opens")
TIMES = ("next week", "next month", "some time", "in a few days", "in spring", "at the weekend")
WORRIES = {
    "high": (
        "This is urgent, {we} need an answer {deadline}",
        "Please hurry, it has to be solved {deadline} or {we} lose a customer",
        "{we} cannot work until this is fixed, please help {deadline}",
        "As soon as possible please, {we} must have it {deadline}",
    ),
    "low": (
        "There is no rush, {we} only need it {time}",
        "It is not important, an answer {time} is fine for {us}",
        "Take your time, {we} can wait and look again {time}",
        "No hurry at all, {time} is early enough for {us}",
    ),
    "normal": (
        "The order number is {number}, in case that helps {us}",
        "{we} ordered it under the number {number}",
        "Thanks in advance, the reference is {number}",
        "You can reach {us} by mail about order {number}",
    ),
}
PEOPLE = (("I", "me"), ("we", "us"))


def draw(chance: random.Random) -> Example:
    intent = chance.choice(list(PROBLEMS))
    priority = chance.choice(list(WORRIES))
    problem = chance.choice(PROBLEMS[intent]).format(who=chance.choice(WHO), product=chance.choice(PRODUCTS))
    we, us = chance.choice(PEOPLE)
    worry = chance.choice(WORRIES[priority]).format(
        we=we, us=us, deadline=chance.choice(DEADLINES), time=chance.choice(TIMES), number=chance.randrange(1000, 9999)
    )
    sentences = tuple(part[0].upper() + part[1:] + "." for part in (problem, worry))
    shown = sentences if chance.random() < 0.7 else sentences[::-1]
    answer = json.dumps({"intent": intent, "priority": priority})
    return Example(SYSTEM, " ".join(shown), answer, sentences, expected=answer)
