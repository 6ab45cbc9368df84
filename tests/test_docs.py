"""The texts: every code block of README and docs runs, links lead somewhere, the reference builds where mkdocs is installed.

Python blocks run in order, in one namespace a page, on tiny models that stand where the texts' names point. Shell blocks are
parsed by the real command line, so that a wrong option fails; test_cli.py runs the commands.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_lines import joined_lines, parse
from tiny import one_thread, tiny_drafter, tiny_target  # noqa: F401  # autouse
from tiny_tokenizer import text, tiny_tokenizer

from hf_dspark import LoadProfile, demo
from hf_dspark.formats import PACKAGINGS
from hf_dspark.formats.export import WRITTEN

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PROGRAMS = (
    "make",
    "git",
    "python",
    "pip",
    "vllm",
    "accelerate",
    "torchrun",
    "hf",
    "head",
    "export",
)  # not run: jobs of hours, or not ours
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def blocks(page, language):
    return [code for found, code in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the texts name: models, prompts, answers."""
    path = tmp_path_factory.mktemp("docs")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<unused{n}>" for n in range(8)], special_tokens=True)  # one becomes the mask token
    target = tiny_target("qwen3", vocab_size=len(tokenizer))
    target.save_pretrained(path / "my-target")
    tokenizer.save_pretrained(path / "my-target")
    for name in ("my-drafter", "path/or/repo"):
        tiny_drafter(target).save_pretrained(path / name)
    turns = [
        [{"role": "user", "content": text([7 + n])}, {"role": "assistant", "content": text([8, 9, 10 + n, 30])}]
        for n in range(12)
    ]
    (path / "answers.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    from hf_dspark.loading import drafter_by_name, target_by_name

    target, tokenizer = target_by_name("my-target")
    monkeypatch.setattr(demo, "load_default", lambda: (target, tokenizer, drafter_by_name("my-drafter")))
    measure = LoadProfile.measure
    monkeypatch.setattr(LoadProfile, "measure", lambda *models: measure(*models, batch_tokens=(1, 2, 6), repeats=1))
    # The words of the texts are unknown to the tiny tokenizer, whose unknown token is padding.
    tokenizer.unk_token = "w9"
    namespace = {}
    for number, code in enumerate(blocks(page, "python")):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, f"{page.name}, python block {number}", "exec"), namespace)
        if "print(" in code:
            assert printed.getvalue().strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_blocks(page):
    for code in blocks(page, "bash"):
        for line in joined_lines(code):
            command = line.split("| ")[-1]
            if command.split()[0] == "hf-dspark":
                parse(command)
            else:
                assert command.split()[0] in OTHER_PROGRAMS, line
            if command.startswith("accelerate launch"):
                parse("hf-dspark " + command.partition('"$(which hf-dspark)" ')[2])
            if found := re.match(r"make (\w+)", command):
                assert f"\n{found[1]}:" in (ROOT / "Makefile").read_text()
            if found := re.match(r"python (\S+\.py)", command):
                assert (ROOT / found[1]).is_file()


def test_a_wrong_option_is_noticed():
    with pytest.raises(Exception, match="--speed"):
        parse("hf-dspark generate hello --speed 3")


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    source = page.read_text(encoding="utf-8")
    assert {language for language, _ in BLOCK.findall(source)} <= {"python", "bash", ""}
    for target in re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", source)):
        if target.startswith("https://"):
            continue
        name, _, place = target.partition("#")
        linked = (page.parent / name) if name else page
        assert linked.exists(), target
        if page.parent == ROOT / "docs":
            assert linked.parent == page.parent, f"{target} is outside of the site"
        if place:
            assert place in {anchor(title) for title in re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE)}, (
                target
            )


def test_the_site_has_every_page():
    named = set(re.findall(r"^  - .*: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_format_table_has_every_packaging():
    table = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8").split("## Read")[1].split("## Refused")[0]
    rows = {row.split("|")[1].strip(): row for row in table.splitlines() if row.startswith("| ")}
    for packaging in PACKAGINGS:
        assert packaging.NAME in rows, f"a row of {packaging.NAME} is missing"
    for name, module in WRITTEN.items():
        assert rows[module.NAME].rstrip(" |").endswith(f"`{name}`")


@pytest.mark.skipif(find_spec("mkdocs") is None or find_spec("mkdocstrings_handlers") is None, reason="needs the extra [docs]")
def test_the_site_builds_without_a_warning(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
