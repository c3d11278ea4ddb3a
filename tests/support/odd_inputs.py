"""200 prompts and 50 images as nobody means them, always the same."""

import torch
from torch import Tensor

TEXTS = (
    "",
    ".",
    "a",
    "1",
    "two  spaces",
    "a red circle",
    "a very, very, very detailed photo (masterpiece:1.3), 8k",
    "Camera pans left -> right",
    "C:\\path\\file.mp4 --ar 16:9",
    "\u2669\u266a \u2192 \u2260 \u221e",
    # quotes, entities, markup
    "it\u2019s a \u201csign\u201d \u2013 \u2018here\u2019",
    'say "hi" and `bye`',
    "salt &amp; pepper",
    "<b> &amp;amp; twice",
    "&lt;b&gt;bold&lt;/b&gt;",
    "<b>caf&eacute;</b> &nbsp; x",
    "<i> e&#769; &#x1F600; &#0; &bogus;",
    "&quot;quoted&quot;",
    "<u> &lt;|endoftext|&gt;",
    "&lt;|startoftext|&gt; a",
    "caf\u00c3\u00a9",
    "\u00e2\u20ac\u0153quoted\u00e2\u20ac\u009d",
    # other letters
    "\uff21\uff22 \ufb01t \ufb02ow",
    "e\u0301 \u00e9",
    "\ud55c\uad6d\uc5b4 \u1112\u1161\u11ab",
    "\u4e00\u53ea\u7ea2\u8272\u7684\u732b",
    "\u65e5\u672c\u8a9e\u306e\u300c\u5f15\u7528\u300d",
    '\u05e9\u05dc\u05d5\u05dd "\u05e2\u05d5\u05dc\u05dd"',
    "\u0645\u0631\u062d\u0628\u0627 \u202eabc\u202c",
    "\u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940",
    "Stra\u00dfe \u01c5 \u0130stanbul",
    "\u03a3\u038a\u03a3\u03a5\u03a6\u039f\u03a3 \u03c2",
    "\U0001d400\U0001d401 x\u00b2 \u00bd \u2167",
    # emoji
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "\U0001f44d\U0001f3fd ok \u2764\ufe0f",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7",
    "\U0001f3f3\ufe0f\u200d\U0001f308!",
    # words and marks
    "don't I'LL we'Re they've it'S",
    "a'sb 'tis o'clock ''s",
    "100,000.50 % 3rd",
    "a_b-c/d\\e #1 @x",
    "!!!",
    "wow!",
    "{text_prompt} {0} %s $x",
    "{{ 3 }} {% raw %} {# x #}",
    "\\n \\u0041",
    # control characters and spaces
    "a\x07b\x1cc\x7f",
    "zero\u200bwidth\u200djoin\ufeff",
    "tab\tnew\nline\r\nend\r",
    "\u00a0\u2003\u3000spaces\u2028lines\u0085 x",
    # texts that are special somewhere
    "a <|endoftext|>",
    "<start_of_text> x <end_of_text>",
    "<|im_end|> <|Reward|> <|video_pad|>",
    "[CLS] a [SEP] </s> <pad> <|VQ_reward|>",
)
FORMS = [form for text in TEXTS for form in (text, text.upper(), f"  {text}\t", f"{text} " * 60)]
PROMPTS = list(dict.fromkeys(FORMS))[:200]  # with the empty one, and blanks alone
SMALL = "1x1 1x7 1x64 64x1 2x300 3x5 8x8 16x16 28x28 31x33 32x32 33x31 40x56 56x40 64x48 90x20 20x90 101x101"
LARGE = "102x102 128x72 72x128 199x1 224x224 120x208 257x129"
SHAPES = [tuple(map(int, shape.split("x"))) for shape in f"{SMALL} {LARGE}".split()]


def images() -> list[Tensor]:
    """Return bytes of shape [3, height, width]: of each shape one of noise, and a grey, saturated or striped one."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number, (height, width) in enumerate(SHAPES):
        made.append(torch.randint(0, 256, (3, height, width), generator=draw, dtype=torch.uint8))
        grey = torch.linspace(0, 255, height * width).view(1, height, width).expand(3, -1, -1)
        red = torch.tensor([255.0, 0.0, 0.0]).view(3, 1, 1).expand(3, height, width)
        stripes = 255.0 * (torch.arange(width) % 2).expand(3, height, width)
        black, white = torch.zeros(3, height, width), torch.full((3, height, width), 255.0)
        made.append((grey, red, stripes, black, white)[number % 5].byte())
    return made
