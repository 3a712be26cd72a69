"""Make a tiny chat model whose answers are known beforehand, for tests against real engines.

The model is a table: attention and feed-forward weights are zero, the embedding is the identity, and the output head
holds for each token the one that follows it. Any prompt leads to the same sentence; a prompt with tools whose last
message is the user's leads to one fixed tool call. Engines need no other kind of support than for plain Llama.

    python tools/scripted_model.py OUT_DIR NAME "The answer." [--loop] [--context 4096]

writes `OUT_DIR/NAME/` (safetensors, tokenizer, template) and `OUT_DIR/NAME.gguf`, in well under a second.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from safetensors.numpy import save as save_safetensors

END_OF_TEXT: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
PAD: Final = "<pad>"
CALL_TOOL: Final = "<|use_tool|>"
SPECIAL: Final = (END_OF_TEXT, START, END, PAD, CALL_TOOL)

HEAD_SIZE: Final = 64
"""Engines' CPU attention takes 32 or 64."""

FEED_FORWARD: Final = 64

TEMPLATE: Final = """\
{%- if tools -%}
<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% endif -%}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if tools and messages[-1].role == 'user' %}<|use_tool|>{% endif -%}
{%- endif -%}"""


def byte_alphabet() -> dict[int, str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(stand_ins)) for byte in range(0x100)}


@dataclass(slots=True)
class Vocabulary:
    """Tokens by their text in the byte alphabet; grows by what is to be said."""

    ids: dict[str, int] = field(default_factory=dict)
    letters: dict[int, str] = field(default_factory=byte_alphabet)

    def __post_init__(self) -> None:
        for text in (*SPECIAL, *(self.letters[byte] for byte in range(0x100))):
            self.ids[text] = len(self.ids)

    def spelled(self, text: str) -> str:
        """Text in the byte alphabet."""
        return "".join(self.letters[byte] for byte in text.encode())

    def add_chain(self, text: str) -> list[int]:
        """Make fresh tokens of which ``text`` consists, so that each has one successor only."""
        chain = []
        for piece in self._fresh_pieces(text):
            self.ids[piece] = len(self.ids)
            chain.append(self.ids[piece])
        return chain

    def _fresh_pieces(self, text: str) -> list[str]:
        taken = set(self.ids)
        pending = ""
        made: list[str] = []
        for part in re.findall(r"\s*[^\s{}:\",<]+|.", text, re.DOTALL):
            pending += self.spelled(part)
            if len(pending) > 1 and pending not in taken:
                made.append(pending)
                taken.add(pending)
                pending = ""
        if pending and made:
            made[-1] += pending
        elif pending:
            raise ValueError(f"too short to be said: {text!r}")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedModel:
    """What the files hold, and where they are."""

    name: str
    directory: Path
    gguf_file: Path
    answer: str


def make_model(
    out_dir: Path,
    name: str,
    answer: str,
    *,
    loops: bool = False,
    tool: str = "get_weather",
    arguments: str = '{"city": "Oslo"}',
    context: int = 4096,
) -> ScriptedModel:
    """Write both forms of one model.

    Args:
        answer: what it says to every prompt without tools.
        loops: begin anew instead of ending: an endless stream.
        tool: name of the tool that it calls.
        arguments: JSON of the call.
        context: longest prompt and answer, in tokens.
    """
    vocabulary = Vocabulary()
    said = vocabulary.add_chain(answer)
    called = vocabulary.add_chain(
        f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'
    )
    width = -(-len(vocabulary.ids) // HEAD_SIZE) * HEAD_SIZE
    end = vocabulary.ids[END]
    after = np.full(width, said[0])
    for chain, last in ((said, said[0] if loops else end), (called, end)):
        after[chain] = [*chain[1:], last]
    after[vocabulary.ids[CALL_TOOL]] = called[0]
    weights = _weights(width, after)
    directory, gguf_file = out_dir / name, out_dir / f"{name}.gguf"
    directory.mkdir(parents=True, exist_ok=True)
    _write_directory(directory, vocabulary, weights, width=width, context=context)
    _write_gguf(gguf_file, name, vocabulary, weights, width=width, context=context)
    return ScriptedModel(name=name, directory=directory, gguf_file=gguf_file, answer=answer)


def _weights(width: int, after: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    head = np.zeros((width, width), np.float32)
    head[after, np.arange(width)] = 2.0
    layer = "model.layers.0."
    ones = np.ones(width, np.float32)

    def nothing(*shape: int) -> np.ndarray[Any, Any]:
        return np.zeros(shape, np.float32)

    return {
        "model.embed_tokens.weight": np.eye(width, dtype=np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": head,
        layer + "input_layernorm.weight": ones,
        layer + "post_attention_layernorm.weight": ones,
        layer + "self_attn.q_proj.weight": nothing(width, width),
        layer + "self_attn.k_proj.weight": nothing(HEAD_SIZE, width),
        layer + "self_attn.v_proj.weight": nothing(HEAD_SIZE, width),
        layer + "self_attn.o_proj.weight": nothing(width, width),
        layer + "mlp.gate_proj.weight": nothing(FEED_FORWARD, width),
        layer + "mlp.up_proj.weight": nothing(FEED_FORWARD, width),
        layer + "mlp.down_proj.weight": nothing(width, FEED_FORWARD),
    }


def _write_directory(
    directory: Path, vocabulary: Vocabulary, weights: dict[str, Any], *, width: int, context: int
) -> None:
    end, pad, begin = (vocabulary.ids[each] for each in (END, PAD, END_OF_TEXT))
    specials = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    files: dict[str, object] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": width,
            "hidden_size": width,
            "intermediate_size": FEED_FORWARD,
            "num_hidden_layers": 1,
            "num_attention_heads": width // HEAD_SIZE,
            "num_key_value_heads": 1,
            "head_dim": HEAD_SIZE,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            **specials,
        },
        "generation_config.json": specials,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
        "tokenizer.json": _tokenizer(vocabulary),
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "model.safetensors").write_bytes(save_safetensors(weights, metadata={"format": "pt"}))


def _tokenizer(vocabulary: Vocabulary) -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, text in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary.ids,
            "merges": [],
        },
    }


_GGUF_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _write_gguf(
    path: Path, name: str, vocabulary: Vocabulary, weights: dict[str, Any], *, width: int, context: int
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(width // HEAD_SIZE)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(width)
    writer.add_file_type(0)
    texts = {number: text for text, number in vocabulary.ids.items()}
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(number, f"[UNUSED{number}]") for number in range(width)])
    writer.add_token_types(
        [
            kinds.CONTROL if number < len(SPECIAL) else kinds.NORMAL if number in texts else kinds.UNUSED
            for number in range(width)
        ]
    )
    space = vocabulary.spelled(" ")
    writer.add_token_merges([f"{space} {space}"])  # the loader refuses an empty list
    writer.add_bos_token_id(vocabulary.ids[END_OF_TEXT])
    writer.add_eos_token_id(vocabulary.ids[END])
    writer.add_pad_token_id(vocabulary.ids[PAD])
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(TEMPLATE)
    for full, values in weights.items():
        stem = full.removesuffix(".weight")
        layer = stem.removeprefix("model.layers.0.")
        prefix = "blk.0." if layer != stem else ""
        writer.add_tensor(f"{prefix}{_GGUF_NAMES[layer]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("answer")
    parser.add_argument("--loop", action="store_true", help="never end: the last word leads to the first")
    parser.add_argument("--context", type=int, default=4096)
    chosen = parser.parse_args()
    made = make_model(chosen.out_dir, chosen.name, chosen.answer, loops=chosen.loop, context=chosen.context)
    sys.stdout.write(f"{made.directory}\n{made.gguf_file}\n")


if __name__ == "__main__":
    main()
