"""Language models through jattn's paged cache: one decoder, weights from GGUF and from Hugging Face folders."""

from jattn.models.decoder import DecoderConfig, create_cache, embed, forward, head, init_params, layer
from jattn.models.dense import dense_forward
from jattn.models.load_any import default_model, load
from jattn.models.loaded import LoadedModel
from jattn.models.tokenizer import TextStream, TextTokenizer

__all__ = [
    "DecoderConfig",
    "LoadedModel",
    "TextStream",
    "TextTokenizer",
    "create_cache",
    "default_model",
    "dense_forward",
    "embed",
    "forward",
    "head",
    "init_params",
    "layer",
    "load",
]
