"""The demo's tokenizer and chat format, and the encoding of training conversations."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.demo_models.corpus import Corpus, TrainingConversation

VOCAB_SIZE = 1024
BOS, END, PAD, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('roles are system, user and assistant') }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
IGNORED = -100


def train_bpe(
    texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str], *, splits_digits: bool = False
) -> Tokenizer:
    """Train a byte-level BPE tokenizer. It can encode any text, so no prompt fails because a token is missing."""
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if splits_digits else []
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level]) if digits else byte_level
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path, named: Mapping[str, object]) -> None:
    """Write files that every version of transformers reads. `named` maps the roles of special tokens to the tokens."""
    tokenizer.save_pretrained(out, save_jinja_files=False)
    (out / "special_tokens_map.json").write_text(json.dumps(named, indent=2) + "\n")
    # Replace the settings that only transformers 5 writes and reads.
    config_path = out / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    for name in ("backend", "extra_special_tokens", "is_local", "local_files_only"):
        config.pop(name, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = named["additional_special_tokens"]
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def train_tokenizer(out: Path, seed: int) -> PreTrainedTokenizerFast:
    corpus = Corpus(seed)
    texts: list[str] = []
    for _ in range(12_000):
        example = corpus.base_example()
        texts += [example.text, example.system]
        for turn in example.turns:
            texts += [turn.question, turn.answer]
    bpe = train_bpe(texts, VOCAB_SIZE, SPECIAL_TOKENS)
    # As in the Llama tokenizer, plain text gets its <|bos|> here. A rendered chat already has one.
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    markers = [SYSTEM, USER, ASSISTANT]
    save_tokenizer(
        tokenizer,
        out,
        {"bos_token": BOS, "eos_token": END, "pad_token": PAD, "additional_special_tokens": markers},
    )
    return tokenizer


def encoded(example: TrainingConversation, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return token IDs and labels. In a chat, only each answer and its <|end|> are training targets."""

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    ids = tokens(BOS)
    if not example.turns:
        ids += tokens(example.text + END)
        return ids, [IGNORED, *ids[1:]]
    ids += tokens(f"{SYSTEM}{example.system}{END}") if example.system else []
    labels = [IGNORED] * len(ids)
    for turn in example.turns:
        prompt, answer = tokens(f"{USER}{turn.question}{END}{ASSISTANT}"), tokens(turn.answer + END)
        ids += prompt + answer
        labels += [IGNORED] * len(prompt) + answer
    return ids, labels
