"""Tokenizers made with `tokenizers`: from GGUF metadata, and a byte-level one in code. No MLX, no
files.

A `TokenizerFiles` is what a stock model directory holds: the contents of tokenizer.json and
tokenizer_config.json.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ..errors import ModelUnreadable

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
SPACE_MARK = "▁"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# How text is cut before merging, by GGUF's `tokenizer.ggml.pre`.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {"llama-bpe": LLAMA3_SPLIT, "llama3": LLAMA3_SPLIT, "qwen2": QWEN2_SPLIT}
DIGIT_WISE = {"smollm", "refact", "starcoder", "command-r", "codeshell"}
PLAIN = {"default", "gpt-2"}


class TokenizerFiles(NamedTuple):
    """The two tokenizer files of a stock model directory, as parsed JSON."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]


def from_gguf(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """The tokenizer that a GGUF file's metadata describe; raises `ModelUnreadable` if there is none
    or it is of a kind that is not supported (supported: `gpt2`, byte-level BPE, and `llama`,
    SentencePiece BPE)."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelUnreadable("the GGUF file has no tokenizer (no tokenizer.ggml.tokens)")
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise ModelUnreadable(
            f"the GGUF file has a tokenizer of kind {kind!r}; supported are {', '.join(builders)}"
        )
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    tokenizer = builders[kind](metadata, tokens, kinds)
    for token, token_kind in zip(tokens, kinds, strict=False):
        if token_kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        _prepend_bos(tokenizer, tokens, metadata.get("tokenizer.ggml.bos_token_id"))
    return TokenizerFiles(json.loads(tokenizer.to_str()), _config(metadata, tokens))


def byte_level(vocabulary: int | None = None) -> TokenizerFiles:
    """A tokenizer of one token a byte and ChatML's special tokens, padded with unused tokens if
    asked to."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*BYTE_SPECIALS, *letters]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in BYTE_SPECIALS]
    )
    config = _stock_config(bos=None, eos=BYTE_SPECIALS[2], pad=BYTE_SPECIALS[0], template=CHATML)
    files = TokenizerFiles(json.loads(tokenizer.to_str()), config)
    return files if vocabulary is None else padded(files, vocabulary)


def size_of(files: TokenizerFiles) -> int:
    """One more than the highest token id."""
    added = (entry["id"] for entry in files.tokenizer["added_tokens"])
    highest: int = max([*files.tokenizer["model"]["vocab"].values(), *added])
    return highest + 1


def padded(files: TokenizerFiles, vocabulary: int) -> TokenizerFiles:
    """The same tokenizer with a name for every id below `vocabulary`; the new ones never occur in
    text."""
    model = files.tokenizer["model"]
    unused = {f"<unused_{index}>": index for index in range(size_of(files), vocabulary)}
    grown = {**files.tokenizer, "model": {**model, "vocab": {**model["vocab"], **unused}}}
    return files._replace(tokenizer=grown)


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
    if any(len(pair) != 2 for pair in merges):
        raise ModelUnreadable("the GGUF file's tokenizer has a merge that is not two tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre in {"llama-bpe", "llama3"})
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelUnreadable(f"the GGUF file's tokenizer is broken: {error}") from error
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    if pre in PLAIN:
        return byte_level
    if pre in DIGIT_WISE:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level])
    known = ", ".join(sorted(PLAIN | DIGIT_WISE | set(SPLITS)))
    raise ModelUnreadable(
        f"the GGUF file's tokenizer cuts text as {pre!r}, which is not supported ({known} are)"
    )


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelUnreadable("the GGUF file's tokenizer has no score for each token")
    unknown = next(
        (token for token, kind in zip(tokens, kinds, strict=False) if kind == UNKNOWN), None
    )
    tokenizer = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            _merges_by_score(tokens, scores, kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    marks_start = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend(SPACE_MARK)] if marks_start else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(content=" ", left=1)] if marks_start else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result has the best score: so that order is the merge
    order."""
    rank = {
        token: (-score, index)
        for index, (token, score, kind) in enumerate(zip(tokens, scores, kinds, strict=False))
        if kind not in {UNKNOWN, CONTROL, BYTE}
    }
    merges = [
        (place, token[:cut], token[cut:])
        for token, place in rank.items()
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    merges.sort(key=lambda merge: (merge[0], rank[merge[1]][1], rank[merge[2]][1]))
    return [(left, right) for _, left, right in merges]


def _prepend_bos(tokenizer: Tokenizer, tokens: Sequence[str], bos: int | None) -> None:
    if bos is None or not 0 <= bos < len(tokens):
        raise ModelUnreadable(f"the GGUF file's tokenizer wants a first token, which is {bos}")
    template = processors.TemplateProcessing(
        single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
    )
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    steps = [processors.ByteLevel(trim_offsets=False), template] if byte_level else [template]
    tokenizer.post_processor = processors.Sequence(steps)


def _config(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    def named(role: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return tokens[index] if index is not None and index < len(tokens) else None

    config = _stock_config(
        bos=named("bos"),
        eos=named("eos"),
        pad=named("padding"),
        template=metadata.get("tokenizer.chat_template"),
    )
    if (unknown := named("unknown")) is not None:
        config["unk_token"] = unknown
    return config


def _stock_config(
    *, bos: str | None, eos: str | None, pad: str | None, template: str | None
) -> dict[str, Any]:
    given = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "chat_template": template}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: value for name, value in given.items() if value is not None},
    }
