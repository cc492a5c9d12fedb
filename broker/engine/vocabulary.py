"""How many tokens a model knows."""

from typing import Any

from ..models import LoadedModel


def vocabulary_of(model: LoadedModel) -> int:
    """How many token ids the model has embeddings for."""
    config: dict[str, Any] = model.config
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size or len(model.tokenizer))
