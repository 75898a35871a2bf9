"""What rounding weights to int8 changes: logits and perplexity of a fixed text, beside those of float32."""

from __future__ import annotations

import pathlib

import tokenizers
import torch
import torch.nn.functional as F

from kvrelay.bench.engine.weights import load_weights
from kvrelay.bench.harness.report import Target
from kvrelay.bench.harness.scenario import Results
from kvrelay.config import ModelOptions
from kvrelay.kernels.base import AttentionBatch, ForwardBatch
from kvrelay.models.registry import Model

TARGETS = {"int8_over_float32_perplexity": Target("<=", 1.01)}

# The Tale of Peter Rabbit and Alice in Wonderland begin so; both are in the public domain.
TEXT = """Once upon a time there were four little Rabbits, and their names were Flopsy, Mopsy, Cotton-tail,
and Peter. They lived with their Mother in a sand-bank, underneath the root of a very big fir-tree.
'Now my dears,' said old Mrs. Rabbit one morning, 'you may go into the fields or down the lane, but
don't go into Mr. McGregor's garden: your Father had an accident there; he was put in a pie by Mrs.
McGregor. Now run along, and don't get into mischief. I am going out.' Then old Mrs. Rabbit took a
basket and her umbrella, and went through the wood to the baker's. She bought a loaf of brown bread
and five currant buns.

Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to
do: once or twice she had peeped into the book her sister was reading, but it had no pictures or
conversations in it, 'and what is the use of a book,' thought Alice 'without pictures or
conversation?' So she was considering in her own mind (as well as she could, for the hot day made
her feel very sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the
trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close
by her. There was nothing so very remarkable in that; nor did Alice think it so very much out of the
way to hear the Rabbit say to itself, 'Oh dear! Oh dear! I shall be late!'
"""


def measure(model: ModelOptions) -> Results:
    folder = pathlib.Path(model.model)
    tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    rounded, floats = (logits_of(load_weights(model, choice)[0], tokens) for choice in ("int8", "float32"))
    error = (rounded - floats).abs()
    results = {"int8_perplexity": perplexity(rounded, tokens), "float32_perplexity": perplexity(floats, tokens)}
    return results | {
        "int8_over_float32_perplexity": results["int8_perplexity"] / results["float32_perplexity"],
        "int8_logit_error_mean": error.mean().item(),
        "int8_logit_error_max": error.max().item(),
        "float32_logit_spread": floats.std(dim=1).mean().item(),
        "int8_same_best_token": (rounded.argmax(1) == floats.argmax(1)).float().mean().item(),
    }


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    """Of each token after the first, given those before it."""
    return F.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).exp().item()


def logits_of(model: Model, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], in one pass over one block of KV."""
    spec, count = model.spec, len(tokens)
    kv = torch.zeros(spec.num_layers, 2, 1, count, spec.num_kv_heads, spec.head_dim)
    places = torch.arange(count)
    attention = AttentionBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        max_query=count,
        max_context=count,
    )
    batch = ForwardBatch(token_ids=torch.tensor(tokens), positions=places, slots=places, attention=attention, logit_rows=places)
    return model.forward(batch, kv)
