"""Holds the package's habits that show in its source: who imports whom, and what no file does.

Every check is a function of the folder that holds `dflash_jax/` and returns its findings as lines;
one test holds it for this repository, another plants a violation in a temporary folder and asks
for exactly that finding. Modules are parsed, not imported, except by the two child processes.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dflash_jax"

# From the bottom up. A folder imports from lower rows only, never from its own row's neighbours.
LAYERS = (
    ("errors", "progress", "version"),
    ("config",),
    ("arena",),
    ("models",),
    ("planning", "weights"),
    ("decoding",),
    ("serving", "training", "ablation"),
    ("__init__",),
    ("cli",),
)
RANK = {folder: rank for rank, row in enumerate(LAYERS) for folder in row}
# Named tuples publish these with an underscore, to keep clear of field names.
PUBLIC_UNDERSCORES = {"_replace", "_asdict", "_make", "_fields", "_field_defaults"}
# What an extra or the test run installs, and gguf: nothing of it is needed to import the package.
OPTIONAL = (
    "gguf starlette uvicorn prometheus_client matplotlib tensorboardX torch transformers".split()
    + "beartype chex hypothesis".split()
)
OPEN_END = "TO" + "DO"  # in two pieces, or this file would be a finding
# Import names that differ from the name of what is installed.
IMPORT_NAMES = {"orbax-checkpoint": "orbax", "prometheus-client": "prometheus_client"}


def _modules(root: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    for path in sorted((root / PACKAGE).rglob("*.py")):
        yield path, str(path.relative_to(root)), ast.parse(path.read_text(encoding="utf-8"))


def _imports(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, module and bound name of each import, relative ones resolved, wherever it stands."""
    parents = path.relative_to(root).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield node.lineno, alias.name, bound
        elif isinstance(node, ast.ImportFrom):
            prefix = parents[: len(parents) - node.level + 1] if node.level else ()
            base = ".".join((*prefix, *(node.module or "").split("."))).strip(".")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", alias.asname or alias.name


def _folder(root: Path, module: str) -> str:
    """`dflash_jax.arena.kv.KVArena` -> `arena`; a name of the package itself -> `__init__`."""
    first = module.split(".")[1] if "." in module else ""
    exists = (root / PACKAGE / first).is_dir() or (root / PACKAGE / f"{first}.py").is_file()
    return first if first and exists else "__init__"


def wrong_way_imports(root: Path) -> list[str]:
    found = []
    for path, name, tree in _modules(root):
        own = path.relative_to(root).with_suffix("").parts[1]
        if own not in RANK:
            found.append(f"{name}: {own} is in no row of LAYERS")
            continue
        for line, module, _ in _imports(root, path, tree):
            other = _folder(root, module)
            if module.partition(".")[0] != PACKAGE or other == own:
                continue
            if RANK.get(other, len(LAYERS)) >= RANK[own]:
                found.append(f"{name}:{line}: {own} imports {module}")
    return found


def private_reads(root: Path) -> list[str]:
    found = []
    for path, name, tree in _modules(root):
        imports = list(_imports(root, path, tree))
        for line, module, _ in imports:
            if any(_is_private(part) for part in module.split(".")):
                found.append(f"{name}:{line}: imports {module}")
        bound = {alias for _, _, alias in imports}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                if isinstance(base := _base(node), ast.Name) and base.id in bound:
                    found.append(f"{name}:{node.lineno}: reads {ast.unparse(node)}")
    return found


def _is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not dunder and name not in PUBLIC_UNDERSCORES


def _base(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def prints(root: Path) -> list[str]:
    return [
        f"{name}:{node.lineno}: prints"
        for _, name, tree in _modules(root)
        if not name.startswith(f"{PACKAGE}{os.sep}cli{os.sep}")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write")
    ]


def modules_without_opening(root: Path) -> list[str]:
    return [
        f"{name}: no docstring" for _, name, tree in _modules(root) if not ast.get_docstring(tree)
    ]


def open_ends(root: Path) -> list[str]:
    marks = re.compile(rf"\b({OPEN_END}|FIX[M]E)\b")
    return [
        f"{path.relative_to(root)}:{number}: {mark[0]}"
        for folder in (PACKAGE, "tests", "benchmarks")
        for path in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (mark := marks.search(line))
    ]


def _brought_by(root: Path, *extras: str) -> set[str]:
    """Import names of Python's own modules, the run-time requirements and these extras."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project.get("optional-dependencies", {})
    lines = [
        *project["dependencies"],
        *(line for extra in extras for line in optional.get(extra, [])),
    ]
    names = {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in lines}
    return {IMPORT_NAMES.get(name, name) for name in names} | set(sys.stdlib_module_names)


def undeclared_imports(root: Path) -> list[str]:
    """Imports of packages that neither Python nor the project's run-time requirements bring."""
    known = _brought_by(root, "serve", "train") | {PACKAGE}
    return [
        f"{name}:{line}: {module}"
        for path, name, tree in _modules(root)
        for line, module, _ in _imports(root, path, tree)
        if module.partition(".")[0] not in known
    ]


def needs_beyond_the_test_extra(root: Path) -> list[str]:
    """What tests, or benchmarks that tests import, import without the test extra bringing it.

    At module level, where it breaks the collection of tests that need no oracle.
    """
    own = {path.stem for path in (root / "tests").glob("*.py")}
    known = own | _brought_by(root, "serve", "test") | {PACKAGE}
    waiting, seen, found = sorted((root / "tests").glob("*.py")), set(), []
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'import_module\("(\w+)"\)', text):
            waiting += [root / "benchmarks" / f"{name}.py"]
        top: list[ast.stmt] = [
            node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        for line, module, _ in _imports(root, path, ast.Module(top, [])):
            first = module.partition(".")[0]
            if (own_script := root / "benchmarks" / f"{first}.py").is_file():
                waiting.append(own_script)
            elif first not in known:
                found.append(f"{path.relative_to(root)}:{line}: {module}")
    return found


CHECKS = (
    needs_beyond_the_test_extra,
    wrong_way_imports,
    private_reads,
    prints,
    modules_without_opening,
    open_ends,
    undeclared_imports,
)


def _plant(root: Path, files: dict[str, str]) -> Path:
    (root / "pyproject.toml").write_text('[project]\ndependencies = ["jax>=0.10; 1 < 2"]\n')
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_this_repository_has_no(check):
    assert check(ROOT) == []


CLEAN = {
    "errors.py": '"""Doc."""\n',
    "config.py": '"""Doc."""\nimport json\nfrom .errors import E\n',
    "arena/__init__.py": '"""Doc."""\nfrom dflash_jax.arena.kv import A\n',
    "arena/kv.py": '"""Doc."""\nimport jax.numpy as jnp\nself._x = A._make(jnp.__name__)\n',
    "cli/main.py": '"""Doc."""\nfrom dflash_jax import A\nprint(A)\n',
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_clean_package_has_no(check, tmp_path: Path):
    assert check(_plant(tmp_path, CLEAN)) == []


PLANTED = [
    # An upward import, however it is written and wherever it stands.
    (wrong_way_imports, "arena/kv.py", "from dflash_jax.models import x", ":2: arena imports"),
    (wrong_way_imports, "arena/kv.py", "import dflash_jax.cli.main", ":2: arena imports"),
    (wrong_way_imports, "arena/kv.py", "from ..cli.main import x", ":2: arena imports"),
    (wrong_way_imports, "arena/kv.py", "from .. import cli", ":2: arena imports"),
    (wrong_way_imports, "arena/kv.py", "def f():\n    import dflash_jax.cli", ":3: arena imports"),
    (wrong_way_imports, "errors.py", "from dflash_jax import config", ":2: errors imports"),
    (wrong_way_imports, "arena/kv.py", "from dflash_jax import A", ":2: arena imports"),
    (wrong_way_imports, "planning/fit.py", "import dflash_jax.weights", ":2: planning imports"),
    (wrong_way_imports, "utils.py", "", ": utils is in no row"),
    (private_reads, "config.py", "from dflash_jax.errors import _E", ":2: imports"),
    (private_reads, "config.py", "from jax._src import core", ":2: imports"),
    (private_reads, "config.py", "from . import errors as e\ne._x()", ":3: reads e._x"),
    (private_reads, "config.py", "import jax\njax.lax._y", ":3: reads jax.lax._y"),
    (prints, "arena/kv.py", "print(1)", ":2: prints"),
    (prints, "cli.py", "print(1)", ":2: prints"),
    (modules_without_opening, "arena/__init__.py", None, ": no docstring"),
    (open_ends, "arena/kv.py", f"x = 1  # {OPEN_END} later", f":2: {OPEN_END}"),
    (undeclared_imports, "arena/kv.py", "import torch.nn", ":2: torch.nn"),
]


@pytest.mark.parametrize("extra", [[], ["httpx"]], ids=["not brought", "brought"])
def test_a_benchmark_that_tests_import_needs_no_more_than_the_test_extra(
    tmp_path: Path, extra: list[str]
):
    project = f"[project]\ndependencies = []\noptional-dependencies = {{ test = {extra} }}\n"
    files = {
        "pyproject.toml": project,
        "tests/test_a.py": 'import_module("a")\ndef f():\n    import torch\n',
        "benchmarks/a.py": "import b\n",
        "benchmarks/b.py": "import httpx\n",
        "benchmarks/c.py": "import torch\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = [] if extra else ["benchmarks/b.py:1: httpx"]
    assert needs_beyond_the_test_extra(tmp_path) == expected


@pytest.mark.parametrize(
    ("check", "file", "line", "finding"), PLANTED, ids=lambda v: getattr(v, "__name__", None)
)
def test_a_planted_violation_is_found_with_its_line(check, file, line, finding, tmp_path: Path):
    text = "" if line is None else f'"""Doc."""\n{line}\n'
    (found,) = check(_plant(tmp_path, CLEAN | {"cli/__init__.py": '"""Doc."""\n', file: text}))
    assert found.startswith(f"{PACKAGE}/{file}{finding}")


def _run(root: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new process that finds the package of `root` first."""
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True
    )


# `None` in sys.modules is Python's own way to say that a module cannot be imported.
WITHOUT_OPTIONAL = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))
import {PACKAGE}
for name in {PACKAGE}.__all__:
    getattr({PACKAGE}, name)
"""

# JAX lets this option be set only while no backend has started, and raises after that.
BACKEND_IS_IDLE = f"""
import {PACKAGE}, jax
for name in {PACKAGE}.__all__:
    getattr({PACKAGE}, name)
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""


def test_every_public_name_imports_without_the_optional_packages():
    run = _run(ROOT, WITHOUT_OPTIONAL)
    assert run.returncode == 0, run.stderr


def test_importing_the_package_starts_no_jax_backend():
    run = _run(ROOT, BACKEND_IS_IDLE)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("code", "text", "complaint"),
    [
        (WITHOUT_OPTIONAL, "import gguf\nx = 1", "import of gguf halted"),
        (WITHOUT_OPTIONAL, "def __getattr__(name): import torch", "import of torch"),
        (BACKEND_IS_IDLE, "import jax\nx = jax.devices()", "before backends are"),
        (BACKEND_IS_IDLE, "import jax.numpy as jnp\nx = jnp.ones(2)", "before backends are"),
    ],
)
def test_an_import_that_does_too_much_is_found(code, text, complaint, tmp_path: Path):
    run = _run(_plant(tmp_path, {"__init__.py": f"__all__ = ['x']\n{text}\n"}), code)
    assert run.returncode != 0
    assert complaint in run.stderr
