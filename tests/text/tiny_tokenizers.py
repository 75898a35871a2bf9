"""Small real tokenizers, trained on the spot, saved as checkpoints have them."""

from __future__ import annotations

import functools
import json
import pathlib

import tokenizers
from scratch import scratch_folder
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "What is the capital of France? The capital of France is Paris.",
    "naïve café, Größe, 東京 is a city, emoji 🙂 and 👩‍🚀 too",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "one two three four five six seven eight nine ten",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Uses what templates in the wild use: tools, tojson, loop controls, namespaces, macros, bos_token, errors, generation.
RICH = """{{- bos_token }}
{%- macro show(text) %}[{{ text | trim }}]{% endmacro %}
{%- set state = namespace(count=0) %}
{%- if tools %}
<tools>
    {%- for tool in tools %}
{{ tool | tojson }}
    {%- endfor %}
</tools>
{%- endif %}
{% for message in messages %}
    {%- if message.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}
    {%- if message.content is none %}{% continue %}{% endif %}
    {%- set state.count = state.count + 1 %}
<|im_start|>{{ message.role }} {{ state.count }}
    {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
{{ show(call.function.name) }}{{ call.function.arguments | tojson(indent=2) }}
    {%- endfor %}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_tokens(["<tool_call>", "</tool_call>", "added word"])
    return backend


def sentence_piece_backend() -> tokenizers.Tokenizer:
    """As Llama 2 has it: "▁" for spaces, bytes for what is not in the vocabulary, one space before every text."""
    characters = sorted({character for text in CORPUS[:2] for character in text.replace(" ", "▁")})
    words = [f"▁{word}" for text in CORPUS[:2] for word in text.split()]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *words]
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def word_piece_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(CORPUS * 4, trainer)
    return backend


_BACKENDS = {"byte_level": byte_level_backend, "sentence_piece": sentence_piece_backend, "word_piece": word_piece_backend}


@functools.cache
def folder_of(kind: str, template: str = CHATML) -> pathlib.Path:
    """A checkpoint folder with the tokenizer of that kind, made once per test session."""
    folder = scratch_folder("tokenizer-")
    _BACKENDS[kind]().save(str(folder / "tokenizer.json"))
    bos, eos = ("<s>", "</s>") if kind == "sentence_piece" else ("<|im_start|>", "<|im_end|>")
    if kind == "word_piece":
        bos, eos = "[SEP]", "[SEP]"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": {"content": eos, "special": True, "__type": "AddedToken"},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
