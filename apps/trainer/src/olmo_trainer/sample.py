"""Continue a text with a trained model, a token at a time.

The whole context is recomputed for each token: right for any model, quick enough for a small one.
"""

import torch
from olmo_ep_comm import create_dispatcher

from olmo_trainer.build import build_part
from olmo_trainer.checkpoint import load_model_state
from olmo_trainer.checkpoint_manifest import Manifest
from olmo_trainer.data import ByteTokenizer, Tokenizer
from olmo_trainer.model.transformer import Transformer

_BYTES = ByteTokenizer()


def load_model(manifest: Manifest) -> Transformer:
    """Return the checkpoint's whole model on the CPU, in FP32, whatever layout saved it."""
    config = manifest.config
    dispatcher = create_dispatcher("local", num_experts=config.model.moe.num_experts)
    model = build_part(config, range(config.model.num_layers), dispatcher, num_expert_ranks=1)
    load_model_state(model, manifest)
    return model.eval()


@torch.no_grad()
def continue_text(
    model: Transformer,
    prompt: str,
    num_tokens: int,
    *,
    context: int,
    tokenizer: Tokenizer = _BYTES,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """Return `num_tokens` sampled tokens that follow `prompt`, as text.

    Args:
        model: A whole model.
        prompt: Text to continue; empty starts a new document.
        num_tokens: Most tokens to draw; the end of the document ends the text earlier.
        context: Positions the model was trained on; older ones are forgotten.
        tokenizer: That of the text the model was trained on; bytes unless given.
        temperature: Divides the logits; 0 takes the likeliest token.
        seed: Of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = [tokenizer.end_of_document, *tokenizer.encode(prompt).tolist()]
    start = len(tokens)
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-context:]])
        logits, _ = model(window, torch.ones_like(window, dtype=torch.bool))
        last = logits[0, -1, : tokenizer.vocab_size].float()
        if temperature == 0:
            token = int(last.argmax())
        else:
            # The likeliest is 0 before the division, so a low temperature cannot overflow.
            chances = torch.softmax((last - last.max()).double() / temperature, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=generator))
        if token == tokenizer.end_of_document:
            break
        tokens.append(token)
    return printable(tokenizer.decode(tokens[start:]))


def printable(text: str) -> str:
    """Return `text` with control characters, which a terminal would obey, as U+FFFD."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)
