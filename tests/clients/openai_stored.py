from __future__ import annotations

import json
import os
import time
from typing import Any

from openai import BadRequestError, NotFoundError, OpenAI

URL, KEY, MODEL = (os.environ[name] for name in ("CLIENT_URL", "CLIENT_STORING_KEY", "CLIENT_MODEL"))
QUESTION = "What is the capital of France?"
CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 48}
ASKED: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 48}


def is_missing(call: Any) -> bool:
    try:
        call()
    except NotFoundError:
        return True
    return False


def stored_chats(client: OpenAI) -> dict[str, Any]:
    chats = client.chat.completions
    made = [chats.create(**CHAT, store=True, metadata={"turn": str(number)}) for number in range(3)]
    chats.update(made[2].id, metadata={"turn": "1"})
    found = {
        "text": chats.retrieve(made[0].id).choices[0].message.content,
        "messages": [message.content for message in chats.messages.list(made[0].id)],
        "listed": [one.id for one in chats.list(limit=2)] == [one.id for one in made],
        "filtered": [one.id for one in chats.list(metadata={"turn": "1"})] == [one.id for one in made[1:]],
        "deleted": [chats.delete(one.id).deleted for one in made],
    }
    return {**found, "missing": is_missing(lambda: chats.retrieve(made[0].id))}


def conversation(client: OpenAI) -> dict[str, Any]:
    made = client.conversations.create(metadata={"topic": "demo"})
    response = client.responses.create(**ASKED, conversation=made.id)
    items: list[Any] = list(client.conversations.items.list(made.id, order="asc", limit=1))
    reference: Any = {"type": "item_reference", "id": items[0].id}
    again = client.responses.create(**{**ASKED, "input": [reference]})
    found = {
        "text": response.output_text,
        "referred": again.output_text,
        "roles": [item.role for item in items],
        "is of it": response.conversation is not None and response.conversation.id == made.id,
        "deleted": client.conversations.delete(made.id).deleted,
    }
    return {**found, "missing": is_missing(lambda: client.conversations.retrieve(made.id))}


def end_of_cancelled(client: OpenAI, response_id: str) -> str | None:
    try:
        return client.responses.cancel(response_id).status
    except BadRequestError as error:
        return error.code


def in_background(client: OpenAI) -> dict[str, Any]:
    made = client.responses.create(**ASKED, background=True)
    first = made.status
    for _ in range(600):
        if made.status not in ("queued", "in_progress"):
            break
        time.sleep(0.1)
        made = client.responses.retrieve(made.id)
    stream = client.responses.create(**ASKED, background=True, stream=True)
    events: list[Any] = [next(stream), next(stream)]
    stream.close()
    response_id = events[0].response.id
    events += client.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
    # The answer has no limit, so it runs until it is cancelled or fills the context.
    long: Any = {"model": MODEL, "input": QUESTION, "extra_body": {"ignore_eos": True}}
    ended = end_of_cancelled(client, client.responses.create(**long, background=True).id)
    return {
        "first": first,
        "status": made.status,
        "text": made.output_text,
        "streamed": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "numbers": [event.sequence_number for event in events] == list(range(len(events))),
        "last": events[-1].type,
        "cancelled": ended,
    }


def main() -> None:
    client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    found = {"chats": stored_chats(client), "conversation": conversation(client), "background": in_background(client)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
