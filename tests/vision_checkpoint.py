"""A tiny random Qwen2.5-VL folder whose tokenizer and chat template know pictures, as a published one does."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from reference_models import VOCAB_SIZE
from reference_qwen_vl import IMAGE_TOKEN, save_qwen_vl
from tokenizers import AddedToken, Tokenizer

_PICTURE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_vision_model(folder: Path) -> Path:
    save_qwen_vl("qwen2_5_vl", folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    first = IMAGE_TOKEN - _PICTURE_TOKENS.index("<|image_pad|>")
    fillers = [f"<|filler_{i}|>" for i in range(first - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*fillers, *_PICTURE_TOKENS)])
    assert tokenizer.token_to_id("<|image_pad|>") == IMAGE_TOKEN > VOCAB_SIZE
    tokenizer.save(str(path))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def picture_bytes(seed: int, width: int = 160, height: int = 120, kind: str = "PNG") -> bytes:
    """A picture of coloured squares."""
    small = np.random.default_rng(seed).integers(0, 256, (-(-height // 24), -(-width // 24), 3), dtype=np.uint8)
    squares = small.repeat(24, 0).repeat(24, 1)[:height, :width]
    target = io.BytesIO()
    Image.fromarray(squares).save(target, kind)
    return target.getvalue()
