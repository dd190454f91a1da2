"""A small world with something to learn, and a model that trains on it in a second.

Every document has one of eight topics, and each topic has twelve words of its own. Guessing a
hidden word without its context costs ln(96) = 4.56 nats a word; knowing the topic, ln(12) = 2.48.
"""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path

NUM_TOPICS = 8
WORDS_PER_TOPIC = 12
LABELS = tuple(f"topic {chr(97 + t)}" for t in range(NUM_TOPICS))


def topic_words() -> list[list[str]]:
    """Eight lists of twelve made-up words, all different."""
    words = [a + v + b + w for a in "bdfgklmn" for v in "aeo" for b in "rst" for w in "iu"]
    return [words[t::NUM_TOPICS][:WORDS_PER_TOPIC] for t in range(NUM_TOPICS)]


def sentences(num: int, *, seed: int) -> list[tuple[str, str]]:
    """Texts of 6 to 20 words with their labels."""
    rng = random.Random(seed)
    topics = topic_words()
    made = []
    for _ in range(num):
        topic = rng.randrange(NUM_TOPICS)
        made.append((" ".join(rng.choices(topics[topic], k=rng.randint(6, 20))), LABELS[topic]))
    return made


def write_table(path: Path, rows: Sequence[tuple[str, str]]) -> Path:
    """A CSV with the columns text and label."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows(rows)
    return path


def write_model_config(path: Path) -> Path:
    """The shape of a model that trains in a second."""
    shape = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "vocab_size": 300,
    }
    path.write_text(json.dumps(shape))
    return path
