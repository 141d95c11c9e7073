"""What starts seqarch elsewhere: commands in docker/ and docs/cluster.md parse, and the files that they name exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from seqarch.cli import COMMANDS
from tests.test_recipes import parse

DOCKER = Path("docker")
DOCKERFILE = DOCKER / "Dockerfile"
SCRIPTS = sorted(DOCKER.glob("**/*.sbatch"))
YAML = sorted(DOCKER.glob("**/*.yaml"))
TEXTS = [*SCRIPTS, *YAML, DOCKERFILE, Path("docs/cluster.md")]
LAUNCH = ("nnodes", "nproc-per-node", "max-restarts", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf")


def documents(file):
    return [d for d in yaml.safe_load_all(file.read_text()) if d is not None]


def containers():
    """The words of every container's command, with the file that it stands in."""
    for service in documents(DOCKER / "compose.yaml")[0]["services"].values():
        yield pytest.param(service["entrypoint"] + service["command"], id="compose")
    (job,) = (d for d in documents(DOCKER / "k8s" / "job.yaml") if d["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    yield pytest.param(container["command"] + container["args"], id="job")
    for name, replica in documents(DOCKER / "k8s" / "pytorchjob.yaml")[0]["spec"]["pytorchReplicaSpecs"].items():
        (container,) = replica["template"]["spec"]["containers"]
        yield pytest.param(container["command"] + container["args"], id=f"pytorchjob-{name}")


COMMAND = re.compile(r"""(?:seqarch (?:fit|plan)|[ /]fit\.sbatch) (--config [^"|&;\n]*)""")


def lines():
    """The commands in the texts: what follows `seqarch fit`, `seqarch plan` or fit.sbatch, up to the line's end."""
    for file in TEXTS:
        for match in COMMAND.finditer(file.read_text()):
            yield pytest.param(shlex.split(match[1].split("`")[0]), id=f"{file.name}-{match.start()}")


def settle(words):
    """The options of `seqarch fit` that a command gives, with stand-ins for what a shell would put in."""
    words = [re.sub(r"\$\(?\w+\)?|\"", "1", word) for word in words]
    pairs = [word for text in words for word in (text.split("=", 1) if text.startswith("--") else [text])]
    own = ("--ckpt_path", "--run_dir", "--gpu", "--gpus", "--checkpoint_every_n_steps")
    recipes, options = [], {}
    for option, value in zip(pairs[::2], pairs[1::2], strict=True):
        assert option.startswith("--")
        if option == "--config":
            assert Path(value).is_file(), f"{value} does not exist"
            recipes.append(value)
        elif option not in own:
            options[option.removeprefix("--")] = value
    return recipes, options


def check(words):
    recipes, options = settle(words)
    parser, _ = parse(*recipes)
    given = [word for recipe in recipes for word in ("--config", recipe)]
    parser.parse_args(given + [word for name, value in options.items() for word in (f"--{name}", value)])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda f: f.name)
def test_batch_scripts_are_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_batch_script_goes_on_where_it_was():
    text = (DOCKER / "slurm" / "fit.sbatch").read_text()
    assert text.startswith("#!/bin/bash\n")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, flags=re.M))
    assert options["signal"].startswith("USR1@")  # without B: to the processes, not to the script
    assert {"requeue", "open-mode"} <= options.keys()
    assert "--ckpt_path last" in text
    assert "scontrol requeue" in text
    head, *rest = text.split("\nsrun ")
    assert "#SBATCH" in head
    assert "#SBATCH" not in "".join(rest)  # Slurm reads none after the first command
    command = re.search(r"seqarch\} fit \"\$@\" (.*?)\n", text.replace("\\\n", " "))[1]
    _, options = settle(["--config", "recipes/quickstart.yaml", *shlex.split(command)])
    assert options == {"trainer.num_nodes": "1", "trainer.devices": "1"}
    check(["--config", "recipes/quickstart.yaml", *shlex.split(command)])


@pytest.mark.parametrize("words", list(containers()))
def test_containers_start_fit_with_options_that_exist(words):
    assert words[0] == "torchrun"
    module = words.index("-m")
    assert all(word.split("=")[0].removeprefix("--") in (*LAUNCH, "local-addr") for word in words[1:module])
    assert words[module + 1 : module + 3] == ["seqarch", "fit"]
    assert "--ckpt_path=last" in words
    check(words[module + 3 :])


def test_processes_nodes_and_devices_agree():
    service = documents(DOCKER / "compose.yaml")[0]["services"]
    job = next(d for d in documents(DOCKER / "k8s" / "job.yaml") if d["kind"] == "Job")["spec"]
    headless = next(d for d in documents(DOCKER / "k8s" / "job.yaml") if d["kind"] == "Service")
    container = job["template"]["spec"]["containers"][0]
    for words, nodes in ((service["node0"]["command"], len(service)), (container["args"], job["completions"])):
        given = dict(word.split("=", 1) for word in words if "=" in word)
        assert int(given["--nnodes"]) == int(given["--trainer.num_nodes"]) == nodes
        assert given["--nproc-per-node"] == given["--trainer.devices"]
    assert job["completions"] == job["parallelism"]
    assert int(given["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    host, port = given["--rdzv-endpoint"].split(":")
    assert host == f"{headless['metadata']['name']}-0.{job['template']['spec']['subdomain']}"
    assert int(port) == headless["spec"]["ports"][0]["port"]
    spec = documents(DOCKER / "k8s" / "pytorchjob.yaml")[0]["spec"]
    replicas = spec["pytorchReplicaSpecs"].values()
    for replica in replicas:
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert f"--trainer.num_nodes={sum(r['replicas'] for r in replicas)}" in container["args"]
        assert f"--trainer.devices={spec['nprocPerNode']}" in container["args"]


@pytest.mark.parametrize("words", list(lines()))
def test_commands_in_texts_have_options_that_exist(words):
    check(words)


def test_texts_name_files_and_commands_that_exist():
    for file in TEXTS:
        text = file.read_text()
        for path in re.findall(r"(?<![\w/.-])((?:recipes|docker|docs)/[\w./-]+\.\w+)", text):
            assert Path(path).exists(), f"{file}: {path}"
        for name in re.findall(r"^(?: {4}|#   )(?:\S+=\S+ )?seqarch ([\w-]+)", text, flags=re.M):
            assert name in COMMANDS, f"{file}: {name}"


def test_the_image_copies_what_exists_and_what_its_context_holds():
    text = DOCKERFILE.read_text()
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text, flags=re.M) for word in line.split()[:-1]]
    assert len(copied) >= 5
    ignored = Path(".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    let_in = [Path(".") / line[1:] for line in ignored if line.startswith("!")]
    for path in copied:
        assert Path(path).exists()
        assert any(Path(path).match(str(pattern)) for pattern in let_in), path
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, flags=re.M)
    names = [name for _, name in stages]
    assert {"cpu", "cuda"} <= set(names)
    assert all(base in ("${BASE_IMAGE}", *names) for base, _ in stages)


def test_the_image_pins_every_dependency():
    pinned = {}
    for file in ("constraints.txt", "cuda.txt"):
        for line in (DOCKER / file).read_text().splitlines():
            if line and not line.startswith("#"):
                name, version = line.split("==")
                assert pinned.setdefault(name, version) == version
    project = Path("pyproject.toml").read_text()
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", project, flags=re.M | re.S)[1]
    names = re.findall(r'"([\w-]+)', dependencies)
    assert len(names) > 5
    assert set(names) <= pinned.keys()
    constraint = dict(
        line.split("==") for line in Path("constraints/ci.txt").read_text().splitlines() if not line.startswith("#")
    )
    assert pinned["torch"] == constraint["torch"]
