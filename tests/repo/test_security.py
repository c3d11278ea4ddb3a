"""What the package never does: run data as code, start a shell, trust remote code, or use the network unsaid."""

import ast
from pathlib import Path

from rules import each

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "unified_trainer"
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}

# Modules that unpickle, and modules that open connections.
UNPICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
NETWORK = {
    "urllib.request",
    "http.client",
    "http.server",
    "requests",
    "httpx",
    "httpx2",
    "aiohttp",
    "socket",
    "socketserver",
}
NETWORK |= {"ftplib", "smtplib", "telnetlib", "xmlrpc", "ssl", "asyncio.streams", "huggingface_hub", "uvicorn"}
# Files that use the network, each with the word of its docstring that says so.
CONNECTED = {
    "tools/export/push.py": "Hugging Face hub",
    "models/hub.py": "Hugging Face hub",
    "rewards/wire.py": "over HTTP",
    "parallel/arrival.py": "over TCP",
    "tools/serve/web_server.py": "web server",
    "run/workers/launch.py": "on Ray",
    "rewards/scorer_process.py": "in a process with a Python",
    "rewards/scorer_child.py": "over a socket",
}
NAMES_ONLY = {"gethostname"}  # functions of socket that open nothing
TENSORS_ALONE = "models/tensor_file.py"  # reads files of torch.save, with weights_only
ONE_PLACE = {"models/folder.py", "tools/export/export.py"}  # that may call from_pretrained


def called(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def constant(node: ast.Call, name: str) -> object:
    """The value of a keyword; an Ellipsis if it is absent."""
    given = [word.value for word in node.keywords if word.arg == name]
    return ast.literal_eval(given[0]) if given and isinstance(given[0], ast.Constant) else given or ...


def imported(tree: ast.AST) -> set[str]:
    """Modules that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def below(names: set[str], modules: set[str]) -> list[str]:
    return sorted(name for name in names if any(name == one or name.startswith(f"{one}.") for one in modules))


def dangers(tree: ast.AST, file: str) -> list[str]:
    """What in a file runs data as code."""
    found = below(imported(tree), UNPICKLING)
    for node in ast.walk(tree):
        name = called(node)
        if not isinstance(node, ast.Call):
            continue
        last = name.rpartition(".")[2]
        found += [name] if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "input") else []
        tensors_alone = file == TENSORS_ALONE and constant(node, "weights_only") is True
        unpickles = name.endswith("torch.load") and not tensors_alone
        found += [name] if unpickles or name.endswith("pd.read_pickle") or last == "unpickle" else []
        found += [name] if name in ("pickle.load", "pickle.loads") else []
        found += [name] if name.endswith("yaml.load") and "SafeLoader" not in ast.unparse(node) else []
        found += [name] if name.startswith("yaml.") and last in ("unsafe_load", "full_load", "load_all") else []
        found += (
            [name] if last in ("load", "open_memmap") and constant(node, "allow_pickle") not in (..., False) else []
        )
        found += [f"{name} with a shell"] if constant(node, "shell") not in (..., False) else []
        found += [f"{name} trusts"] if constant(node, "trust_remote_code") not in (..., False) else []
        found += [name] if last == "from_pretrained" and file not in ONE_PLACE else []
    return found


def connections(tree: ast.AST) -> list[str]:
    """What in a file uses the network."""
    used = below(imported(tree), NETWORK)
    if used != ["socket"]:
        return used
    names = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "socket"
    }
    return used if names - NAMES_ONLY else []


def test_nothing_runs_data_as_code():
    assert {file: found for file, tree in TREES.items() if (found := dangers(tree, file))} == {}


def test_only_files_that_say_so_use_the_network():
    assert {file: used for file, tree in TREES.items() if (used := connections(tree))}.keys() == CONNECTED.keys()


@each(CONNECTED)
def test_files_that_use_the_network_say_so(file):
    assert connections(TREES[file]) and CONNECTED[file] in " ".join(ast.get_docstring(TREES[file]).split())


@each(
    [
        "torch.load(file)",
        "import pickle",
        "from joblib import load",
        "eval(text)",
        "exec(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "numpy.load(file, allow_pickle=True)",
        "subprocess.run(words, shell=True)",
        "subprocess.run(words, shell=chosen)",
        "os.system(words)",
        "AutoTokenizer.from_pretrained(folder)",
        "AutoModel.from_config(config, trust_remote_code=True)",
    ]
)
def test_the_scan_finds(line):
    assert dangers(ast.parse(line), "commands/other.py")


@each(
    [
        "import requests",
        "import urllib.request",
        "from urllib import request",
        "from huggingface_hub import HfApi",
        "def later():\n    import httpx",
        "import socket\nsocket.create_connection(place)",
    ]
)
def test_the_scan_finds_the_network(line):
    assert connections(ast.parse(line))


def test_the_scan_lets_pass():
    lines = (
        "yaml.safe_load(text)\nsubprocess.run(words, shell=False)\nfrom urllib.parse import urlsplit\nmodel.eval()\n"
    )
    tree = ast.parse(lines + "import socket\nsocket.gethostname()\nre.compile('a')\nyaml.load(text, SafeLoader)")
    assert dangers(tree, "a.py") == connections(tree) == []
