"""A small checkpoint as transformers saves it: random weights, a tokenizer trained on a few sentences, a chat template;
and the answers of transformers itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Ein Käfer läuft über die Straße; naïve cafés déjà vu.",
    "今日は世界 — 你好，世界。",
    "Emoji are four bytes: 🦊🐶👩‍🚀 and more 🎉.",
    "Prompts that share a prefix share its keys and values.",
] * 4
MARKS = ["<|begin|>", "<|end|>", "<|pad|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'developer' %}{{ raise_exception('there are no developers here') }}"
    "{% endif %}{{ '<|begin|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)


def byte_level(vocabulary: int = 420) -> PreTrainedTokenizerFast:
    """Byte-level BPE: a character may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(SENTENCES, trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=MARKS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))  # fmt: skip
    return _wrapped(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: a blank begins a word, what is not in the vocabulary is a token for each byte."""
    pieces = [*MARKS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "t", "h", "e"]
    tokenizer = Tokenizer(models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    begin, end, pad = MARKS
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad,
                                   chat_template=TEMPLATE)  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    """The checkpoint, in ``folder``. Wide weights, so that every prompt has an answer of its own."""
    tokenizer = byte_level()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "initializer_range": 0.3, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**settings | changes), dtype=torch.float32).eval()
    model.generation_config.do_sample = True
    model.generation_config.repetition_penalty = 1.5  # the server leaves such settings to whoever asks
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def said(folder: Path, prompt: str | list[dict[str, str]], count: int) -> str:
    """The likeliest answer, by ``model.generate`` and ``tokenizer.decode``."""
    tokens = generated(folder, prompt, count)
    return str(loaded(folder)[1].decode(tokens, skip_special_tokens=True))


def prompt_tokens(folder: Path, prompt: str | list[dict[str, str]]) -> list[int]:
    tokenizer = loaded(folder)[1]
    if isinstance(prompt, str):
        found = tokenizer(prompt)["input_ids"]
    else:
        found = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    return [int(token) for token in found]


@cache
def _made(folder: Path, tokens: tuple[int, ...], count: int) -> list[int]:
    model, _ = loaded(folder)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                             repetition_penalty=1.0)  # fmt: skip
    return [int(token) for token in out[0, len(tokens) :]]


def generated(folder: Path, prompt: str | list[dict[str, str]], count: int) -> list[int]:
    return _made(folder, tuple(prompt_tokens(folder, prompt)), count)
