"""Chat templates in the styles of well-known model families, and tokenizers that read any text with them.

No template has generation markers; each writes turns its own way (headers, ends, where the system prompt and tools go).
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (  # Qwen: a default system prompt, tools in it, tool results inside a user turn, one turn for several results
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You help.{% endif %}"
    "{% for tool in tools %}{{ '\n' }}Tool: {{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif not (tools and loop.first and m.role == 'system') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # Llama 3: a beginning of text, headers, contents trimmed
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INSTRUCTIONS = (  # Llama 2 and Mistral: no marker for generation, the system prompt inside the first instruction, strict turns
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}{{ bos_token }}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first and system %}<<SYS>>{{ system }}<</SYS>> {% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
THINKING = (  # Qwen 3: thoughts only in the last answer, so that each further turn rewrites the answer before it
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str, *, eos: str, specials: tuple[str, ...], bos: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, and the special tokens."""
    words = ["<pad>", *dict.fromkeys([eos, *specials, *([bos] if bos else [])]), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token=eos,
        bos_token=bos,
        additional_special_tokens=[word for word in specials if word != eos],
    )
    tokenizer.chat_template = template
    return tokenizer


def spaced_tokenizer(template: str, *, words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Words that carry the space before them, and a space put before the first word of every text (SentencePiece's way)."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in words), *words]
    inner = Tokenizer(models.Unigram([(word, -1.0 - 0.01 * index) for index, word in enumerate(vocabulary)], unk_id=3))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ("<s>", "</s>", "<pad>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer
