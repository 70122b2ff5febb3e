"""The tokenizer: byte-level BPE in which each word of the task grammar is one token.

Copying is what the small target is good at, and it copies tokens: a name of three tokens is three
chances to go wrong. Plain BPE training spends most of 2,048 entries on fragments that no text ever
shows, so the words go into the vocabulary whole (`ignore_merges`, as in Llama 3's tokenizer, looks
a word up before it merges), and what room is left goes to merges for text outside the grammar.
All 256 bytes are in it, so any text encodes and decodes to itself. Numbers are split into pairs of
digits without the space before them, so that a number is the same token wherever it stands; a
citation mark such as [K2] is one token, so that it follows from the word before it.
"""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
from tasks import (
    ADJECTIVES,
    ADVERBS,
    CITIES,
    COLOURS,
    FIFTH,
    FOURTH,
    ITEMS,
    LAST,
    LEVELS,
    MONTHS,
    MOVES,
    NAMES,
    NOUNS,
    PLACES,
    SECOND,
    SHOPS,
    STATUSES,
    TASKS,
    TEAMS,
    THIRD,
    TIMES,
    VERBS,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY_SIZE = 2048
SPLIT = r" ?\[K\p{N}\]| ?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENTITIES = [*NAMES, *CITIES, *ITEMS, *COLOURS, *MONTHS, *SHOPS, *STATUSES, *LEVELS, *TEAMS]
PROSE = [
    *NOUNS,
    *ADJECTIVES,
    *VERBS,
    *MOVES,
    *ADVERBS,
    *PLACES,
    *SECOND,
    *THIRD,
    *FOURTH,
    *FIFTH,
    *LAST,
    *TIMES,
]
# Roles other than these three (a tool's, say) are read as the user's.
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{% if message.role in ['system', 'assistant'] %}{{ '<|' + message.role + '|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}{{ message.content }}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_level() -> pre_tokenizers.Sequence:
    """Words with the space before them, digits in pairs, all as bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def make_tokenizer(seed: int, n_chats: int = 30_000) -> Tokenizer:
    """Count the words of many chats, keep them whole, and fill up with merges."""
    splitter, counts = byte_level(), Counter[str]()
    texts = Counter[str]()
    rng = np.random.default_rng(seed)
    tasks = list(TASKS.values())
    for i in range(n_chats):
        item = tasks[i % len(tasks)](rng)
        texts.update([item.answer, *(m["content"] for m in item.messages)])
    lists = [*ENTITIES, *PROSE, *(str(n) for n in range(100)), *(f"{n:02d}" for n in range(10))]
    texts.update(lists)
    texts.update(f" {word}" for word in ENTITIES)
    for text, n in texts.items():
        for word, _ in splitter.pre_tokenize_str(text):
            counts[word] += n
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    # Equal counts are ordered by the word itself: the same seed makes the same file.
    for word, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
        if len(vocabulary) < VOCABULARY_SIZE - 160 and word not in vocabulary:
            vocabulary[word] = len(vocabulary)
    merges = learn_merges(counts, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def learn_merges(counts: Counter[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Plain BPE over the distinct words (each counted once: outside the grammar, what the grammar
    says most often is no guide), until the vocabulary is full.
    """
    words = [list(word) for word in sorted(counts)]
    merges: list[tuple[str, str]] = []
    while len(vocabulary) < VOCABULARY_SIZE:
        pairs = Counter(p for w in words for p in itertools.pairwise(w))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        vocabulary.setdefault(best[0] + best[1], len(vocabulary))
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [best[0] + best[1]]
                i += 1
    return merges


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the files that transformers and vLLM expect beside the weights."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def render(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    """The chat template in Python, as (role, text) pieces: training needs to know whose text is
    whose, which the rendered string no longer says.
    """
    return [(m["role"], f"<|{m['role']}|>{m['content']}<|end|>") for m in messages]
