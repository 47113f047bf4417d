"""The servers that other projects' tests and tools call: one for each of the demo's bases, each with an adapter."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from tests.conformance.served import deployment

DEMO = Path(__file__).parents[2] / "admin" / "demo"
CHAT = (DEMO / "base", DEMO / "adapters" / "pirate")
CONTEXTS = {f"chat-{length}": length for length in (100, 128, 512)}
"""The contexts, in tokens, of servers for tests that shorten the context. Their names are those of the base `chat`."""
BASES = {
    "chat": CHAT,
    "telling": CHAT,
    "tools": (DEMO / "tools" / "base", DEMO / "tools" / "adapters" / "concierge"),
    **dict.fromkeys(CONTEXTS, CHAT),
}
# One of vLLM's tests calls its server below this path, and others start it with options.
SETTINGS = {
    "LORAMUX_ROOT_PATH": "/llm",
    # vLLM's server and OpenAI's keep responses, and chats if asked.
    "LORAMUX_RESPONSE_KEY": "a key of at least 32 characters.",
    # vLLM's tests load the demo's adapter, and broken copies of it from pytest's temporary directories.
    "LORAMUX_LOAD_SOURCES": f"file://{DEMO},file://{Path(tempfile.gettempdir()).resolve()}",
}
SCOPES = ("adapters", "base", "tenant:develop")
TELLING = {**SETTINGS, "LORAMUX_FORCE_INCLUDE_USAGE": "true", "LORAMUX_RETURN_TOKENS_AS_TOKEN_IDS": "true"}
TENANT = "harbour"
CLASSES = (("LABEL_0",), ("Default", "Spoiled"))
"""The labels of the classifiers. vLLM's tests expect these names."""


@dataclass(frozen=True, slots=True)
class Served:
    """A running server. The fields are those that a suite's process reads."""

    host: str
    port: int
    key: str
    folder: str
    model: str
    adapter: str
    adapter_folder: str
    context: int
    vocabulary: int
    classifiers: dict[int, str]
    """The adapter with each number of classes, of the base `chat` and those with shorter contexts only."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextmanager
def served(scratch: Path, bases: tuple[str, ...] = tuple(BASES)) -> Iterator[dict[str, Served]]:
    """Serve bases in float32 during the block, so that answers do not depend on which requests share a batch."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(_one(name, scratch / name)) for name in bases}


def _greedy(source: Path, base: Path) -> Path:
    """Make a copy of a base whose requests are greedy unless they set a temperature, so that outcomes do not vary."""
    base.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "generation_config.json":
            (base / file.name).symlink_to(file)
    config = json.loads((source / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**config, "temperature": 0}))
    return base


def _classifier(base: Path, folder: Path, labels: tuple[str, ...]) -> Path:
    """Write an adapter for sequence classification with random weights."""
    torch.manual_seed(len(labels))
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=len(labels), dtype=torch.float32, pad_token_id=0
    )
    # The head is as large as a trained one, so that another activation gives other numbers.
    model.score.weight.data.normal_(std=0.5)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS", init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)
    document = json.loads((folder / "adapter_config.json").read_text())
    document["id2label"] = {str(number): label for number, label in enumerate(labels)}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


@contextmanager
def _one(name: str, scratch: Path) -> Iterator[Served]:
    source, adapter = BASES[name]
    base = _greedy(source, scratch / "base")
    settings = TELLING if name == "telling" else SETTINGS
    if name in CONTEXTS:
        settings = {**settings, "LORAMUX_MAX_MODEL_LEN": str(CONTEXTS[name])}
    made = deployment(base, scratch / "data", ("--dtype", "float32"), settings)
    config: dict[str, Any] = json.loads((base / "config.json").read_text())
    with made.running(scratch / "server.log"):
        made.json("tenants", "create", TENANT)
        assert made.command("tenants", "set", TENANT, "--response-days", "1").returncode == 0
        scopes = [part for scope in SCOPES for part in ("--scope", scope)]
        key = made.json("keys", "create", "--tenant", TENANT, *scopes)["secret"]
        pushed = made.json("adapters", "push", str(adapter), "--tenant", TENANT, "--name", adapter.name)
        classifiers = {}
        for labels in CLASSES if name.startswith("chat") else ():
            folder = _classifier(source, scratch / f"classifier-{len(labels)}", labels)
            pushed_classifier = made.json("adapters", "push", str(folder), "--tenant", TENANT, "--name", folder.name)
            classifiers[len(labels)] = pushed_classifier["model"]
        yield Served(
            host="127.0.0.1",
            port=made.port,
            key=key,
            folder=str(source),
            model="demo-base",
            adapter=pushed["model"],
            adapter_folder=str(adapter),
            context=CONTEXTS.get(name, config["max_position_embeddings"]),
            vocabulary=config["vocab_size"],
            classifiers=classifiers,
        )
