"""A drafter's folder on the Hub: it works where nobody has imported this package, and what is uploaded is the folder.

The Hub is a small HTTP server with the calls of an upload. Whatever must not have seen the package before runs in a
process of its own, with an empty cache.
"""

import base64
import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import close_session
from packagings import file_names, make_drafter, make_target, write_deepspec
from safetensors import safe_open
from tiny import PAD, one_thread, padded_prompts, tiny_drafter, tiny_target  # noqa: F401
from typer.testing import CliRunner

import hf_dspark
from hf_dspark import DSparkDraftModel, LoadProfile, cli, custom_generate
from hf_dspark.formats import own


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target and its drafter, saved and bound as they are after use."""
    path = tmp_path_factory.mktemp("models")
    target = tiny_target()
    target.save_pretrained(path / "target")
    drafter = tiny_drafter(target)
    drafter.bind(target)
    drafter.save_pretrained(path / "my-drafter")
    return path


# ---- a process that has not imported the package ----


SCRIPT = """
import os, sys
import torch
from transformers import AutoModel, AutoModelForCausalLM

folder = sys.argv[1]
target = AutoModelForCausalLM.from_pretrained(folder + "/target")
inputs = {"input_ids": torch.tensor([[7, 30, 9, 12]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
plain = target.generate(**inputs, **options)
assert "hf_dspark" not in sys.modules


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "hf_dspark":
            raise ModuleNotFoundError("No module named 'hf_dspark'")


def alone():
    drafter = AutoModel.from_pretrained(folder + "/my-drafter", trust_remote_code=True)
    assert torch.equal(plain, target.generate(**inputs, **options, assistant_model=drafter))
    assert drafter.statistics.accepted
    drafter.save_pretrained(folder + "/again")


def custom():
    drafting = {"custom_generate": folder + "/my-drafter", "assistant_model": folder + "/my-drafter", "trust_remote_code": True}
    assert torch.equal(plain, target.generate(**inputs, **options, **drafting))
    from hf_dspark import custom_generate
    assert custom_generate._loaded[target][1].statistics.accepted


def missing():
    sys.meta_path.insert(0, Missing())
    AutoModel.from_pretrained(folder + "/my-drafter", trust_remote_code=True)


def missing_custom():
    sys.meta_path.insert(0, Missing())
    target.generate(**inputs, custom_generate=folder + "/my-drafter", trust_remote_code=True)


def untrusted():
    AutoModel.from_pretrained(folder + "/my-drafter", trust_remote_code=False)


for case in (alone, custom, missing, missing_custom, untrusted):
    sys.stdout.flush()
    child = os.fork()  # each as if it were the first to do anything
    if child:
        os.waitpid(child, 0)
        continue
    try:
        case()
        print(case.__name__ + ": works", flush=True)
    except Exception as error:
        print(case.__name__ + ": " + type(error).__name__ + " " + " ".join(str(error).split()), flush=True)
    os._exit(0)
"""


def test_folder_alone(models, tmp_path):
    """`AutoModel` and `custom_generate`, with nothing imported before; without the package, both say how to install it."""
    installed = tmp_path / "site" / "hf_dspark-0.dist-info"  # also where the tests run beside a checkout
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hf-dspark\nVersion: {hf_dspark.__version__}\n")
    paths = os.pathsep.join(map(str, (installed.parent, Path(hf_dspark.__file__).parents[1])))
    fresh = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(models)], env=os.environ | fresh, cwd=tmp_path, capture_output=True, text=True
    )
    said = dict(line.split(": ", 1) for line in run.stdout.splitlines() if ": " in line)
    assert said.keys() == {"alone", "custom", "missing", "missing_custom", "untrusted"}, run.stderr
    assert (said["alone"], said["custom"]) == ("works", "works"), run.stderr
    assert "pip install hf_dspark" in said["missing"] and "pip install hf_dspark" in said["missing_custom"]
    assert "trust_remote_code=True" in said["untrusted"]
    # What was loaded by way of the folder's own code saves the same folder again.
    folder, again = models / "my-drafter", models / "again"
    assert file_names(again) == file_names(folder)
    assert all(filecmp.cmp(folder / name, again / name, shallow=False) for name in file_names(folder))


def test_custom_generate_by_name_loads_once(models):
    """Each call is `generate`; the drafter is loaded by the first."""
    target = tiny_target()
    inputs, options = padded_prompts([5]), {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    plain = target.generate(**inputs, **options)
    kept = []
    for _ in range(2):
        out = custom_generate.generate(target, models / "my-drafter", **inputs, **options, local_files_only=True)
        assert torch.equal(out, plain)
        kept.append(custom_generate._loaded[target][1])
    assert kept[0] is kept[1] and kept[0].statistics.accepted
    target.double()
    custom_generate.generate(target, models / "my-drafter", **inputs, **options, local_files_only=True)
    assert custom_generate._loaded[target][1].dtype == torch.float64
    target.float()
    for wrong in (None, target):
        with pytest.raises(ValueError, match="`assistant_model` must be a DSpark drafter, or its folder or repo id"):
            custom_generate.generate(target, wrong, **inputs)


# ---- upload ----

# 2026-11-30: huggingface_hub 2.4 streams to LFS by an argument that its HTTP client no longer likes.
lfs_warning = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


class Hub(BaseHTTPRequestHandler):
    """The calls of an upload. `server.repositories` holds what was committed, `server.objects` what was sent aside by LFS."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        name, listed, _ = self.path.removeprefix("/api/models/").partition("/tree/")
        if not listed:
            self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        files = self.server.repositories[name]
        self.answer([{"type": "file", "path": path, "size": len(files[path]), "oid": "0"} for path in files])

    do_HEAD = do_GET

    def do_PUT(self):
        self.server.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def do_POST(self):
        path, body = self.path.partition("?")[0], self.body()
        url = f"http://127.0.0.1:{self.server.server_port}"
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
            self.server.repositories.setdefault(name, {})
            self.answer({"url": f"{url}/{name}", "name": name, "id": name})
        elif path == "/api/validate-yaml":
            self.server.cards.append(json.loads(body)["content"])
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [
                {"path": name, "uploadMode": "lfs" if name.endswith(".safetensors") else "regular", "shouldIgnore": False}
                for name in files
            ]
            self.answer({"files": modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {"oid": item["oid"], "size": item["size"], "actions": {"upload": {"href": f"{url}/lfs/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            files = self.server.repositories[name]
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "deletedFile":
                    del files[value["path"]]
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = self.server.objects[value["oid"]]
                    assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
            self.answer({"commitUrl": f"{url}/{name}/commit/1", "commitOid": "1", "success": True})
        else:
            self.answer({"error": f"unknown: {path}"}, 404)

    def answer(self, content, status=200, headers=None):
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch):
    """A Hub of this test's own; big files go by LFS, since Xet has a protocol of its own behind it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repositories, server.objects, server.cards = {}, {}, []
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
    close_session()
    huggingface_hub.utils.disable_progress_bars()
    yield server
    huggingface_hub.utils.enable_progress_bars()
    close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def assert_arrived(files, folder, drafter):
    """What arrived is the folder, and its weights are the drafter's own and nothing else."""
    assert {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in file_names(folder)
    }
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert set(weights.keys()) == set(drafter.state_dict())
        stored = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118 (it is no mapping)
    assert stored == sum(tensor.numel() for tensor in drafter.state_dict().values())


@lfs_warning
def test_push_sends_the_folder(hub, models, tmp_path):
    """An older folder is completed on the way; what else lies in it stays at home."""
    folder = tmp_path / "my-drafter"
    shutil.copytree(models / "my-drafter", folder)
    shutil.rmtree(folder / "custom_generate")
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    invoke("card", "--drafter", folder, "--base-model", "someone/target", "--license", "mit")
    strays = ("train.py", "optimizer.pt", "checkpoint-5/config.json", "checkpoint-5/model.safetensors", "states/0.safetensors")
    for stray in strays:
        (folder / stray).parent.mkdir(exist_ok=True)
        (folder / stray).write_text("mine")
    printed = invoke("push", "--drafter", folder, "--repo-id", "someone/my-drafter")
    assert "/someone/my-drafter" in printed
    assert "The card loads 'my-drafter': write it again with `hf-dspark card --name someone/my-drafter`" in printed
    for stray in strays:
        (folder / stray).unlink()
    (arrived,) = hub.repositories.values()
    assert_arrived(arrived, folder, DSparkDraftModel.from_pretrained(folder))
    assert arrived.keys() == {"README.md", "config.json", "model.safetensors", *own.CODE_FILES}
    assert json.loads(arrived["config.json"]) == config | {"auto_map": own.AUTO_MAP}
    assert {ModelCard(content).data.base_model for content in hub.cards} == {"someone/target"}
    invoke("card", "--drafter", folder, "--base-model", "someone/target", "--name", "someone/my-drafter")
    assert "The card loads" not in invoke("push", "--drafter", folder, "--repo-id", "someone/my-drafter")


@lfs_warning
def test_push_clears_what_an_earlier_drafter_left(hub, models, tmp_path):
    """Weights in pieces, which would stand beside those in one, and a load profile that the new one has not."""
    drafter = DSparkDraftModel.from_pretrained(models / "my-drafter")
    drafter.load_profile = LoadProfile({1: 20.0, 8: 10.0})
    drafter.save_pretrained(tmp_path / "pieces", max_shard_size=4000)
    arrived = hub.repositories["someone/my-drafter"] = {"notes.txt": b"mine"}
    for folder in (tmp_path / "pieces", models / "my-drafter"):
        invoke("push", "--drafter", folder, "--repo-id", "someone/my-drafter")
        assert sorted(arrived) == sorted([*file_names(folder), "notes.txt"])
    assert "load_profile.json" not in arrived and "model.safetensors" in arrived


@lfs_warning
def test_push_to_hub_sends_what_is_saved(hub, models):
    drafter = DSparkDraftModel.from_pretrained(models / "my-drafter")
    drafter.bind(tiny_target())
    drafter.push_to_hub("someone/other", commit_message="first")
    arrived = hub.repositories["someone/other"]
    del arrived["README.md"]  # transformers' own template
    assert_arrived(arrived, models / "my-drafter", drafter)


@lfs_warning
def test_foreign_packaging_is_sent_as_it_is(hub, tmp_path):
    folder, target = tmp_path / "deepspec", make_target()
    write_deepspec(folder, make_drafter(), target)
    before = file_names(folder)
    invoke("push", "--drafter", folder, "--repo-id", "someone/deepspec")
    arrived = hub.repositories["someone/deepspec"]
    assert sorted(arrived) == before == file_names(folder)
    assert all(arrived[name] == (folder / name).read_bytes() for name in before)


def invoke(*arguments):
    """Output of a command that must succeed."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output
