from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from transformers.models.auto import modeling_auto

from loramux.engine.architectures.missing_features import MISSING_FEATURES
from loramux.engine.architectures.multimodal import SUPPORTED, WRAPPERS
from tests.conformance.tiny_models import FAMILIES as TINY_MODELS
from tests.conformance.tiny_models import RARE_FAMILIES, SMALL_SHAPE, SMALL_WINDOW

HEAD = """# Models

`make docs` generates this page from the program, and a test checks that it is current. It lists every architecture that
`transformers` knows as a causal or an image-text model, by the name in `architectures` of `config.json`. Of {total}
architectures, {served} are served and {refused} are refused. `loramux check DIRECTORY` says, without a server, whether
a model directory would be served.

## Served

Tests compare a random model of each architecture with `transformers` and `peft`: logits and greedy tokens of the base
and of eight adapters of ranks 1 to 64, one request at a time and in one mixed batch. Some architectures are tested with
every change, the others in `make campaign NAME=parity`. If loramux does not support a setting in `config.json`, it
refuses the model and names the setting. `MiMoForCausalLM`, whose code is not in `transformers`, is served and compared
in the campaign, too. It and `Glm4MoeForCausalLM` can draft tokens with [the base's own
head](speculation.md#the-bases-own-head).

Two things follow vLLM instead of `transformers`. With YaRN, `attn_factor` in `config.json` multiplies the default of
`attention_factor`, while `transformers` ignores it. An answer ends at the `eos_token_id` of `generation_config.json`,
or of `config.json` if the former has none, and also at the tokenizer's own `eos_token`.

Not every format of tool calls is parsed: see [Tools](clients.md#tools).

| architecture | serves | compared |
|---|---|---|
"""

PARTLY_SERVED = {"GraniteMoeHybridForCausalLM": "text, without Mamba layers, as in Granite 4.0 Micro, 350M and 1B"}

REFUSED = """
## Refused

loramux refuses these architectures, and the error names the missing feature in the first column. A model may need
others as well.

| not supported | architectures |
|---|---|
"""


@cache
def architectures() -> frozenset[str]:
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    return frozenset(name for mapping in mappings for name in mapping.values())


@cache
def compared() -> dict[str, bool]:
    """Return the architectures with a tiny model, and whether each is compared with every change or only in a
    campaign.
    """
    found: dict[str, bool] = {}
    for family, make in TINY_MODELS.items():
        architecture = type(make(SMALL_SHAPE, SMALL_WINDOW)).__name__
        found[architecture] = found.get(architecture, False) or family not in RARE_FAMILIES
    return found


def models_page() -> str:
    names = architectures()
    served = sorted(names & SUPPORTED)
    head = HEAD.format(total=len(names), served=len(served), refused=len(names) - len(served))
    return head + "\n".join([*_served(served), *REFUSED.splitlines(), *_refused(names)]) + "\n"


def _served(names: list[str]) -> Iterator[str]:
    for name in names:
        kind = PARTLY_SERVED.get(name, "text decoder" if name in WRAPPERS else "text")
        yield f"| `{name}` | {kind} | {'with every change' if compared()[name] else 'in the campaign'} |"


def _refused(names: frozenset[str]) -> Iterator[str]:
    by_feature: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(names & MISSING_FEATURES.keys()):
        by_feature[MISSING_FEATURES[name]].append(f"`{name}`")
    for feature, found in by_feature.items():
        yield f"| {feature} | {', '.join(found)} |"
