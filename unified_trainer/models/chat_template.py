"""Chat templates of a folder: Jinja programs, each of which runs twice, in a process with bounds, on texts of ours.

This file is also the program of that process, as `PYTHON chat_template.py`. It writes what the template gives for each
of the texts; the texts of users are put in its place later, so that no template sees them.
"""

import functools
import json
import resource
import subprocess
import sys

CPU_SECONDS, MEMORY, LONGEST = 2, 2**30, 2**20  # of the process; characters of a chat
SAMPLES = ("a <prompt> & 'one' \"two\" \\ {{ 3 }}", " \u00e9 \n")  # of which no template may change a character
WRITES_TOO_MUCH = "it writes more than"
TEXT = "\0"  # stands for the text in the messages

Chat = tuple[str, str]  # what stands before and after the text


@functools.cache
def fixed_chat(template: str, messages: str, tokens: str, place: str) -> Chat:
    """Return what a template writes around the text that is TEXT in `messages`, a list in JSON, with a turn to come.

    `tokens` is the object of the tokenizer's special tokens in JSON. Raise UserError, which begins with `place`, for a
    template that fails, takes more than CPU_SECONDS or MEMORY, or does not write the text once, as it is.
    """
    from unified_trainer.basics.errors import UserError  # the program below has no package

    asked = json.dumps(
        [template, [messages.replace(json.dumps(TEXT)[1:-1], json.dumps(s)[1:-1]) for s in SAMPLES], tokens]
    )
    ended, said = _written(asked)
    if ended.returncode:
        raise UserError(f"{place}: chat_template fails ({said[:500]}): fetch it again")
    chats = [tuple(chat.split(text)) for chat, text in zip(json.loads(ended.stdout), SAMPLES, strict=True)]
    if len(chats[0]) != 2 or chats[0] != chats[1]:
        raise UserError(f"{place}: chat_template does not write the text of a message once, as it is")
    before, after = chats[0]
    return before, after


@functools.cache
def check_bounds(template: str, place: str) -> None:
    """Raise UserError, which begins with `place`, for a template that takes or writes more than is allowed.

    It writes a chat of one turn, with the text as it is and as a part. Templates that fail by themselves pass: whoever
    calls them with other turns sees why.
    """
    from unified_trainer.basics.errors import UserError

    for content in (SAMPLES[0], [{"type": "text", "text": SAMPLES[0]}]):
        chat = json.dumps([{"role": "user", "content": content}])
        ended, said = _written(json.dumps([template, [chat], "{}"]))
        if ended.returncode < 0 or said.startswith(("MemoryError", f"ValueError: {WRITES_TOO_MUCH}")):
            raise UserError(f"{place}: chat_template takes too much time or memory ({said[:200]}): fetch it again")


def _written(asked: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the program below; return how it ended, and its exception."""
    words = [sys.executable, "-P", __file__]
    ended = subprocess.run(words, input=asked, capture_output=True, encoding="utf-8", check=False)
    lines = [line for line in ended.stderr.splitlines() if line[:1].strip()]  # the last one is the exception
    return ended, (lines or [f"it takes more than {CPU_SECONDS} s or {MEMORY} bytes"])[-1]


def _refuse(message: str) -> None:
    raise ValueError(message)


def _program() -> None:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    for kind, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, CPU_SECONDS)):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    template, chats, tokens = json.load(sys.stdin)
    known = {"add_generation_prompt": True, "tools": None, "documents": None, **json.loads(tokens)}  # as transformers
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"], environment.globals["raise_exception"] = json.dumps, _refuse
    written = [environment.from_string(template).render(messages=json.loads(chat), **known) for chat in chats]
    if max(map(len, written)) > LONGEST:
        raise ValueError(f"{WRITES_TOO_MUCH} {LONGEST} characters")
    json.dump(written, sys.stdout)


if __name__ == "__main__":
    _program()
