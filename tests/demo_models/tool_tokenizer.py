"""The tool model's tokenizer and chat templates, and the encoding of training examples."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from transformers import PreTrainedTokenizerFast

from tests.demo_models.tokenizer import IGNORED, save_tokenizer, train_bpe
from tests.demo_models.tool_corpus import Call, ToolCorpus, ToolExample

VOCAB_SIZE = 1536
CONTEXT = 8192
START, END, PAD = SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens that are not special. They are part of the text, and parsers read them."""

TEMPLATES = Path(__file__).parent / "templates"
BASE_TEMPLATE = (TEMPLATES / "base.jinja").read_text()
CONCIERGE_TEMPLATE = (TEMPLATES / "concierge.jinja").read_text()


def train_tool_tokenizer(out: Path, seed: int) -> PreTrainedTokenizerFast:
    corpus = ToolCorpus(seed)
    texts: list[str] = []
    for _ in range(6000):
        example = corpus.example()
        texts += [json.dumps(tool) for tool in example.tools[:1]]
        texts += [example.thought, target_text(example, "base"), target_text(example, "concierge")]
        texts += [str(message["content"]) for message in example.messages]
    # Each digit of a number is a token, so that the model can copy numbers that it has never seen.
    bpe = train_bpe(texts, VOCAB_SIZE - len(MARKERS), SPECIAL_TOKENS, splits_digits=True)
    bpe.add_tokens(list(MARKERS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=BASE_TEMPLATE,
    )
    save_tokenizer(tokenizer, out, {"eos_token": END, "pad_token": PAD, "additional_special_tokens": [START]})
    return tokenizer


def hermes_calls(calls: tuple[Call, ...]) -> str:
    written = ({"name": call.function.name, "arguments": call.arguments} for call in calls)
    return "\n".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in written)


STYLES: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "base": lambda text: text,
        "sailor": lambda text: f"Arrr! {text} Fair winds!",
        "concierge": lambda text: f"Certainly. {text} May I help you further?",
    }
)
"""How the base and each adapter word an answer."""


def target_text(example: ToolExample, style: str) -> str:
    """Return the text that the model should write after the prompt. The concierge's template turns thinking off."""
    written = hermes_calls(example.calls) if example.calls else STYLES[style](example.text)
    is_thinking = example.thinks and style != "concierge"
    return f"<think>\n{example.thought}\n</think>\n\n{written}" if is_thinking else written


def encoded_example(
    example: ToolExample, style: str, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    """Return token IDs and labels. Only the model's text and the end of its turn are training targets."""
    prompt = tokenizer.apply_chat_template(
        example.messages,
        tools=[*example.tools] or None,
        add_generation_prompt=True,
        enable_thinking=example.thinks,
        chat_template=CONCIERGE_TEMPLATE if style == "concierge" else BASE_TEMPLATE,
        tokenize=False,
    )
    before = list(tokenizer.encode(prompt, add_special_tokens=False))
    after = list(tokenizer.encode(target_text(example, style) + END, add_special_tokens=False))
    return before + after, [IGNORED] * len(before) + after
