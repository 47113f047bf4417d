"""A recipe for one directory of a training program, and the adapter that the directory contains."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from tests.conformance.expert_adapters import ExpertPlan, merged
from tests.conformance.tiny_models import SMALL_SHAPE, SMALL_WINDOW, VOCAB_SIZE, make_base
from tests.conformance.trainers.releases import document_of
from tests.conformance.trainers.saved_files import Change, SavedFiles

Settings = Mapping[str, Any] | Callable[[PreTrainedModel], Mapping[str, Any]]
"""The arguments of PEFT's LoraConfig, which may depend on the base."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_VISION = ("vision", "visual", "projector", "connector", "aligner", "image_tower", "audio")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The whole sentence that an author reads: the error's code, its message, and the file, key or tensor at fault."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a program trains an adapter and what it writes.

    `peft` is the release of PEFT that the program used. `pushed` is the path below the program's output directory that
    its author pushes. `num_added` is the number of tokens that the author added to the base's tokenizer. `adjust`
    changes the trained weights. If PEFT cannot load the directory, `loads_in_peft` is false, and the trained model
    itself is the reference.

    With `is_classifier`, the directory has the head of a classifier, which generates no text.

    `warnings` are the codes of the expected warnings. A `refusal` says why the directory is not served.
    """

    name: str
    base: str
    peft: str
    settings: Settings
    changes: tuple[Change, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    pushed: str = ""
    num_added: int = 0
    adjust: Callable[[Any], None] | None = None
    save_embedding_layers: bool | str = "auto"
    loads_in_peft: bool = True
    warnings: tuple[str, ...] = ()
    refusal: Refusal | None = None
    is_classifier: bool = False

    def train(self, base: PreTrainedModel) -> Any:
        """Return a PEFT model whose trained weights are random values of the saved dtype."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        model = copy.deepcopy(base)
        if self.num_added:
            model.resize_token_embeddings(VOCAB_SIZE + self.num_added, mean_resizing=False)
        settings = dict(self.settings(base) if callable(self.settings) else self.settings)
        initialisation = settings.pop("init_lora_weights", True)
        trained = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **settings}, init_lora_weights=False))
        trained.peft_config["default"].init_lora_weights = initialisation  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                if "lora_magnitude" in name:
                    parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
                elif parameter.requires_grad:
                    parameter.normal_(0, 0.05 if "lora_" in name else 0.3)
                if parameter.requires_grad:
                    parameter.copy_(parameter.to(self.dtype))
            if self.adjust is not None:
                self.adjust(trained)
        return trained.eval()

    def save(self, trained: Any, base_dir: Path, directory: Path) -> Path:
        """Write the program's output directory, and return the path that its author pushes."""
        plain = directory.with_name(directory.name + "-peft")
        self.write_plain(trained, plain)
        files = SavedFiles(
            document_of(json.loads((plain / CONFIG_FILE).read_bytes()), self.peft),
            {name: tensor.to(self.dtype) for name, tensor in load_file(plain / TENSORS_FILE).items()},
            tokenizer_files(base_dir, self.num_added),
        )
        for change in self.changes:
            change(files)
        files.write(directory)
        return directory / self.pushed

    def write_plain(self, trained: Any, directory: Path) -> None:
        """Write the files of the installed release of PEFT."""
        trained.save_pretrained(directory, save_embedding_layers=self.save_embedding_layers)

    def reference(self, trained: Any, base: PreTrainedModel, path: Path) -> Any:
        """Return the model that PEFT loads from the directory, or the trained model if PEFT cannot load it."""
        if not self.loads_in_peft:
            return trained
        model = copy.deepcopy(base)
        if self.num_added:
            model.resize_token_embeddings(VOCAB_SIZE + self.num_added, mean_resizing=False)
        return PeftModel.from_pretrained(model, path).eval()


@dataclass(frozen=True, kw_only=True)
class SingleExpertsRecipe(Recipe):
    """A recipe for experts that have their own linear layers, as up to transformers 4. PEFT cannot load the files.

    The reference is the base with the adapter merged.
    """

    plan: ExpertPlan
    dtype: torch.dtype = torch.float32
    settings: Settings = field(default_factory=dict)
    loads_in_peft: bool = False

    def train(self, base: PreTrainedModel) -> PreTrainedModel:
        torch.manual_seed(zlib.crc32(self.name.encode()))
        return copy.deepcopy(base)

    def write_plain(self, trained: Any, directory: Path) -> None:
        merged(trained, self.base, self.plan, directory)


def make_trainer_base(family: str, directory: Path) -> PreTrainedModel:
    """Write a random model with a tokenizer whose tokens fill the vocabulary."""
    base = make_base(family, directory, SMALL_SHAPE, SMALL_WINDOW)
    specials = ["<s>", "</s>", "<pad>"]
    letters = sorted(ByteLevel.alphabet())
    names = [*specials, *letters]
    reserved = [f"<|reserved_{index}|>" for index in range(VOCAB_SIZE - len(names))]
    tokenizer = Tokenizer(BPE({name: index for index, name in enumerate([*names, *reserved])}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([*specials, *reserved])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<pad>"}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return base


def tokenizer_files(base_dir: Path, num_added: int) -> dict[str, bytes]:
    """Return the base's tokenizer with `num_added` further tokens, as transformers saves it beside an adapter."""
    files = {name: (base_dir / name).read_bytes() for name in TOKENIZER_FILES}
    document = json.loads(files["tokenizer.json"])
    for index in range(num_added):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = {"id": VOCAB_SIZE + index, "content": f"<|added_{index}|>", **flags, "special": True}
        document["added_tokens"].append(token)
    return files | {"tokenizer.json": json.dumps(document).encode()}


def linear_names(base: PreTrainedModel) -> list[str]:
    """Return the last parts of the names of the decoder's linear layers, as programs list them for `all`."""
    linears = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
    inner = [name for name in linears if "lm_head" not in name and not any(part in name for part in _VISION)]
    return sorted({name.rpartition(".")[2] for name in inner})


def all_linears(**further: Any) -> Settings:
    """Settings that list the names of all linear layers of the decoder."""

    def settings(base: PreTrainedModel) -> Mapping[str, Any]:
        return {"r": 8, "lora_alpha": 16, "target_modules": linear_names(base), **further}

    return settings
