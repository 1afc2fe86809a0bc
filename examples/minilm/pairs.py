"""Sentence pairs from Python's own sources: what a function is called, and what its docstring says it does."""

import ast
import random
import re
import sysconfig
from pathlib import Path

_SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "__pycache__"}


def read(count, seed=0):
    """``count`` pairs (words of a qualified name, first sentence of its docstring), shuffled by ``seed``; no sentence
    occurs twice. ValueError if the standard library has fewer."""
    library = Path(sysconfig.get_paths()["stdlib"])
    pairs = {}
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if not _SKIPPED.intersection(inside.parts):
            module = tuple(part for part in inside.with_suffix("").parts if part != "__init__")
            for name, sentence in _documented(path, module):
                pairs.setdefault(sentence, name)
    found = [(name, sentence) for sentence, name in pairs.items()]
    if len(found) < count:
        raise ValueError(f"asked for {count} pairs; the standard library in {library} gives {len(found)}")
    random.Random(seed).shuffle(found)
    return found[:count]


def _documented(path, module):
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    yield from _visit(tree, module)


def _visit(node, scope):
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        inner = (*scope, child.name)
        sentence = _first_sentence(ast.get_docstring(child) or "")
        if len(sentence.split()) >= 4:
            yield _words(inner), sentence
        yield from _visit(child, inner)


def _first_sentence(text):
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph)[0]


def _words(parts):
    """``("http", "client", "HTTPMessage", "get_all")``: ``http client http message get all``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", " ".join(parts))
    return " ".join(spaced.replace("_", " ").lower().split())
