"""The scores of pairs of texts: how well the two go together.

A classifier with one label reads both texts as one prompt, and its logit is the score. Other models make embeddings of
the texts, and the score is their cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from loramux.adapter_store.formats.version_files.adapter_task import Activation
from loramux.engine.sequences.class_probabilities import class_probabilities
from loramux.engine.sequences.embedding import embedding_of
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.pooling_api.pair_request import PairRequest
from loramux.platform.pooling_api.pooled_plan import TextPair, check_text_sizes, classifier_of, pooled_plan
from loramux.platform.requests.endpoint import Received
from loramux.platform.requests.services import GatewayServices

Pairs: TypeAlias = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ClassifiedPairs:
    """Pairs that are classified: prompt `i` is pair `i`."""

    activation: Activation

    def scores(self, deltas: Sequence[ChoiceDelta]) -> list[float]:
        ordered = sorted(deltas, key=lambda delta: delta.index)
        return [float(class_probabilities(delta.pooled, self.activation)[0]) for delta in ordered]


@dataclass(frozen=True, slots=True)
class ComparedPairs:
    """Pairs whose texts have embeddings: prompts `places[i]` are those of pair `i`."""

    places: Sequence[tuple[int, int]]

    def scores(self, deltas: Sequence[ChoiceDelta]) -> list[float]:
        vectors = {delta.index: embedding_of(delta.pooled, None, is_normalized=True) for delta in deltas}
        return [float(vectors[first] @ vectors[second]) for first, second in self.places]


ScoredPairs: TypeAlias = ClassifiedPairs | ComparedPairs


async def pairs_plan(
    services: GatewayServices, name: str, target: Target, received: Received[PairRequest]
) -> tuple[Plan, ScoredPairs]:
    """Return the plan of a request of the endpoint `name` that scores pairs, and what makes the scores.

    Raises InvalidRequest.
    """
    body, task, param = received.body, classifier_of(target), received.body.names[1]
    pairs = await _shortened(services, target, received)
    if task is None:
        # Each text is run, and billed, once.
        named = _names(body, pairs)
        place = {text: index for index, text in enumerate(named)}
        kind, names = target.settings.pooling.kind, list(named.values())
        plan = await pooled_plan(services, name, target, received, list(named), kind, param, names=names)
        return plan, ComparedPairs([(place[first], place[second]) for first, second in pairs])
    if len(task.labels) != 1:
        raise InvalidRequest(
            f"{target.model.name} has {len(task.labels)} classes, but a score needs a classifier with one: "
            "call /classify",
            param="model",
            code="wrong_task",
        )
    joined = [TextPair(first, second) for first, second in pairs]
    plan = await pooled_plan(services, name, target, received, joined, "last", param, num_labels=1)
    return plan, ClassifiedPairs("identity" if body.use_activation is False else task.activation)


def _names(body: PairRequest, pairs: Pairs) -> dict[str, str]:
    """Return each text with the place in the body where it first occurs, such as `documents[1]`."""
    found: dict[str, str] = {}
    for field, texts in zip(body.names, zip(*pairs, strict=True), strict=True):
        given = getattr(body, field)
        # One text can be paired with many.
        is_alone = isinstance(given, str) or len(given) == 1
        for index, text in enumerate(texts):
            found.setdefault(text, field if is_alone else f"{field}[{index}]")
    return found


async def _shortened(services: GatewayServices, target: Target, received: Received[PairRequest]) -> Pairs:
    """Return the pairs, with each side within its limit of tokens."""
    body, pairs = received.body, received.body.pairs
    if not body.max_tokens_per_query and not body.max_tokens_per_doc:
        return pairs
    check_text_sizes(services, [text for pair in pairs for text in pair], body.names[1])

    def within(texts: Sequence[str], limit: int | None) -> list[str]:
        if not limit:
            return list(texts)
        # A query is the same in all pairs, and is encoded once.
        found = {text: target.tokenizer.shortened(text, limit) for text in set(texts)}
        return [found[text] for text in texts]

    def shortened() -> Pairs:
        first, second = zip(*pairs, strict=True)
        return list(zip(within(first, body.max_tokens_per_query), within(second, body.max_tokens_per_doc), strict=True))

    return await services.compute_if_long(received.num_bytes, shortened)
