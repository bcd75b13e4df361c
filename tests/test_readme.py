"""Holds the README to what is there: its commands, its examples, its links, its trees.

Commands are looked up (program, subcommand, options), not run; the `slow` tests at the end run
those that need no hub, and `.ci/run` runs these tests. The other documents are held to the same.
"""

import ast
import doctest
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest

from server_process import started

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SET_UP = ["pip install -e . && dflash-jax demo", 'pip install -e ".[test]" && pytest']
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def fences(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def command_lines(path: Path) -> list[str]:
    return [line for block in fences(path, "bash") for line in block.splitlines() if line]


def commands(path: Path) -> list[list[str]]:
    """Words of each command, `&&` split, comments and environment settings left out."""
    parts = [part for line in command_lines(path) for part in line.split("&&")]
    return [shlex.split(part, comments=True) for part in parts]


ALL_COMMANDS = sorted({tuple(words) for path in DOCUMENTS for words in commands(path)})


def unknown_in(words: tuple[str, ...]) -> list[str]:
    """What a command names that does not exist: program, subcommand, option, extra or marker."""
    match words:
        case ("pip", "install", *rest):
            extras = re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*)\]", " ".join(rest))))
            return sorted(set(extras) - set(PROJECT["project"]["optional-dependencies"]))
        case ("pytest", *rest):
            given = [rest[i + 1] for i, word in enumerate(rest) if word == "-m"]
            known = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
            return sorted(set(given) - {marker.partition(":")[0] for marker in known})
        case ("dflash-jax", command, *rest):
            return _unknown_options(command, [word for word in rest if word.startswith("-")])
        case ("python", "-m", module, *_):
            return (
                [] if (ROOT / module.replace(".", "/")).with_suffix(".py").is_file() else [module]
            )
        case ("python", path, *_):
            return [] if (ROOT / path).is_file() else [path]
        case ("pre-commit", "install"):
            return []
        case (path, *_) if (ROOT / path).is_file() and os.access(ROOT / path, os.X_OK):
            return []
    return [words[0]]


def _unknown_options(command: str, options: list[str]) -> list[str]:
    help_text = _dflash_jax(command, "--help")
    if help_text.returncode != 0:
        return [command]
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_text.stdout + help_text.stderr))
    return sorted({option.partition("=")[0] for option in options} - known)


def dead_links(path: Path) -> list[str]:
    """Relative links of a document that lead to no file."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    return [link for link in links if "://" not in link and not (path.parent / link).exists()]


def missing_entries(tree: str) -> list[str]:
    """Entries of a tree that do not exist: names, two spaces, what is said of them."""
    missing, folder = [], Path()
    for line in tree.splitlines():
        names = [Path(name) for name in re.split(r"\s{2,}", line.strip())[0].split()]
        if line.startswith(" "):
            names = [folder / name for name in names]
        else:
            folder = names[0]
        missing += [str(name) for name in names if not (ROOT / name).exists()]
    return missing


def _dflash_jax(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from dflash_jax.cli.main import main; main()"
    wide = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | wide | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_the_readme_names_exactly_two_set_up_commands():
    installs = [line for line in command_lines(README) if line.startswith("pip install")]
    gpu = 'pip install -e ".[cuda12]"'
    assert installs == [*SET_UP, gpu]


def test_ci_runs_both_set_up_commands_as_the_readme_has_them():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in SET_UP:
        assert f"'{command}'" in script


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_every_documented_command_exists_with_its_options(words: tuple[str, ...]):
    assert unknown_in(words) == []


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("conda install x", "conda"),
        ('pip install -e ".[nothing]"', "nothing"),
        ("pytest -m fast", "fast"),
        ("dflash-jax nothing", "nothing"),
        ("dflash-jax demo --nothing", "--nothing"),
        ("missing/script --x", "missing/script"),
        ("python missing/script.py", "missing/script.py"),
        ("python -m dflash_jax.nothing", "dflash_jax.nothing"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, finding: str):
    assert unknown_in(tuple(shlex.split(line))) == [finding]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_every_entry_of_a_tree_exists(path: Path):
    assert dead_links(path) == []
    trees = [block for block in fences(path, "text") if re.match(r"\S+/", block)]
    assert [entry for tree in trees for entry in missing_entries(tree)] == []


def test_a_dead_link_and_a_missing_entry_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("[a](page.md#part) [b](gone.md) [c](https://x.org/y)")
    assert dead_links(page) == ["gone.md"]
    tree = (
        "tests/        text\n  conftest.py gone.py  text\ngone/         text\ntests/data/  text\n"
    )
    assert missing_entries(tree) == ["tests/gone.py", "gone"]


def test_no_figure_is_left_to_fill_in():
    left = [f"{p.name}: {m}" for p in DOCUMENTS for m in re.findall(r"\{\{.*?\}\}", p.read_text())]
    assert left == []


def test_the_readme_is_short_enough_to_be_read():
    prose = re.sub(r"^```.*?^```$", "", README.read_text(encoding="utf-8"), flags=re.S | re.M)
    assert 400 <= len(prose.split()) <= 750


def test_sessions_in_the_readme_give_what_it_says():
    for number, block in enumerate(fences(README, "pycon")):
        test = doctest.DocTestParser().get_doctest(block, {}, f"README block {number}", None, 0)
        assert test.examples
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_python_examples_use_only_what_the_package_offers():
    import dflash_jax

    for block in fences(README, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "dj":
                    assert node.attr in dflash_jax.__all__


@pytest.mark.slow
def test_the_offline_example_runs_as_it_stands():
    (block,) = [block for block in fences(README, "python") if '"demo"' in block]
    run = subprocess.run(
        [sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) > 20


def documented(command: str) -> list[tuple[str, ...]]:
    """The documents' uses of one command of the program."""
    return [words for words in ALL_COMMANDS if words[:2] == ("dflash-jax", command)]


# CI runs `demo` as it stands; `train` needs a prompt file and hours (its own test is tiny); `serve`
# runs until it is told to end.
NOT_RUN = {("dflash-jax", command) for command in ("demo", "train", "serve")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [w for w in ALL_COMMANDS if w[:1] == ("dflash-jax",) and w[:2] not in NOT_RUN],
    ids=" ".join,
)
def test_every_command_that_needs_no_hub_runs(words: tuple[str, ...], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = _dflash_jax(*words[1:])
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", documented("serve"), ids=" ".join)
def test_every_server_starts_and_ends_when_told(words: tuple[str, ...], tmp_path: Path):
    with started(tmp_path, *words[2:]) as server:
        with urllib.request.urlopen(f"{server.address}/ready") as answer:
            assert answer.status == 200
        server.interrupt()
        assert server.process.wait(60) == 0
