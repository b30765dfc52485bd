"""Each layer imports only from layers below it, and `import commlib` needs no optional package."""

import ast
import subprocess
import sys
from pathlib import Path

import commlib

ROOT = Path(commlib.__file__).parent
LAYERS = [  # from the top; what stands in one line may import each other
    {"cli"},
    {"ddp", "horovod", "embrace", "clip", "parallel", "svm"},
    {"frontend"},
    {"reducers", "schedule"},
    {"collectives", "topology"},
    {"stats", "route", "rows", "errors", "ops", "_fake"},
]


def test_layers():
    level = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [f"{node.module}.{a.name}" for a in node.names]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            for name in names:
                parts = name.split(".")
                if parts[0] == "commlib" and len(parts) > 1 and own in level and parts[1] in level:
                    assert level[parts[1]] >= level[own], f"{path} imports {name}"


def test_import_needs_no_optional_package():
    code = """
import sys
for name in ("horovod", "cupy", "matplotlib", "typer", "rich", "scipy", "mmh3"):
    sys.modules[name] = None
import commlib
assert not [m for m in sys.modules if m.startswith("commlib.cli")]
print(commlib.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    if done.returncode and "No module named 'commlib'" in done.stderr:  # not installed, in a tree
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent
        )
    assert done.returncode == 0, done.stderr
