"""Each kind of knowledge has one place: the rules of the house, read from the syntax trees."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("omniqueue", "web", "workers", "bench", "stage_configs", "examples")
HEAVY = {"torch", "vllm", "vllm_omni", "transformers", "diffusers", "torchvision"}
MAX_LINES = 350
MAX_BYTES = 20 << 20


def tracked() -> list[Path]:
    """The files of the project: what git knows, or would if it were added."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Every module of the project outside its tests, by path."""
    names = [str(path.relative_to(ROOT)) for path in tracked() if path.suffix == ".py"]
    return {name: ast.parse((ROOT / name).read_text()) for name in names if name.startswith(PACKAGES)}


def imports(tree: ast.AST) -> Iterator[str]:
    """The full names of what is imported anywhere in a tree, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func).endswith(("import_module", "__import__")):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def imported_at_once(tree: ast.Module) -> Iterator[str]:
    """What importing the module imports: functions and type-checking blocks left out."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from imports(node)


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield _name(node.func), node


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of code; docstrings and other bare strings are prose."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def users(*modules: str) -> set[str]:
    """The files that import any of these modules or something in them."""
    return {
        path
        for path, tree in sources().items()
        for name in imports(tree)
        if any(name == module or name.startswith(f"{module}.") for module in modules)
    }


def test_the_rules_see_the_project() -> None:
    assert {"omniqueue/store.py", "omniqueue/payloads.py", "workers/host.py", "web/app.py"} <= sources().keys()


# -- one place for each kind of knowledge ------------------------------------------------------------------------------


def test_engines_and_platforms_alone_import_the_model_libraries() -> None:
    assert {
        path
        for path in users(*HEAVY)
        if not path.startswith(("omniqueue/engines/", "omniqueue/platforms/", "examples/tiny_glm_image/"))
    } == set()


def test_the_protocol_and_the_fake_engine_import_none_of_them() -> None:
    for name in ("base", "fake", "__init__"):
        tops = {module.split(".")[0] for module in imports(sources()[f"omniqueue/engines/{name}.py"])}
        assert not tops & (HEAVY | {"numpy"})


def test_importing_the_library_the_router_or_a_worker_never_imports_them() -> None:
    for path, tree in sources().items():
        if not path.startswith(("omniqueue/engines/", "omniqueue/platforms/", "bench/", "examples/")):
            assert not {name.split(".")[0] for name in imported_at_once(tree)} & (HEAVY | {"numpy", "PIL"}), path


def test_the_router_imports_no_engine_and_no_worker() -> None:
    for path, tree in sources().items():
        if path.startswith("web/"):
            assert not [n for n in imports(tree) if n.startswith(("workers", "omniqueue.engines."))], path


STORE = {"omniqueue/store.py", "omniqueue/heartbeats.py", "omniqueue/meters.py"}
#: embedded.py waits for the server that it starts; connection.py, link.py, those that use it and redis_facts.py name no
#: key; the bench measures Redis by itself.
_NO_KEYS = ("connection", "embedded", "exchange", "hotpath", "link", "redis_facts")
REDIS_CLIENTS = STORE | {f"omniqueue/{name}.py" for name in _NO_KEYS}
REDIS_CLIENTS |= {"bench/floor.py"}


def test_the_store_alone_speaks_to_redis() -> None:
    assert users("redis", "valkey") <= REDIS_CLIENTS
    assert users("hiredis") == {"omniqueue/link.py"}
    outside = {
        f"{path}: {name}"
        for path, tree in sources().items()
        if path not in STORE
        for name, _ in calls(tree)
        if re.search(r"(^|\.)(client|records|store)\.client\.|\._key$|\._call$", name)
    }
    assert outside == set()


def test_the_store_alone_names_redis_keys() -> None:
    kinds = (
        r"(job|jobs|live|wait|leases|reply|control|hand|ended|idem|count|worker|workers|lead|pipeline|said|meter|"
        r"traffic)"
    )
    named = {
        f"{path}: {text}"
        for path, tree in sources().items()
        if path not in STORE
        for text in texts(tree)
        if re.fullmatch(rf"oq:.*|:{kinds}:.*", text)
    }
    assert named == set()
    for path, tree in sources().items():
        joined = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        assert not [text for text in joined if re.search(r"\{[\w.]*namespace\}:", text)], path


def test_payloads_alone_names_segments() -> None:
    named = {f"{path}: {text}" for path, tree in sources().items() for text in texts(tree) if "oq_" in text}
    assert {entry.partition(":")[0] for entry in named} == {"omniqueue/payloads.py"}


def test_payloads_alone_opens_shared_memory() -> None:
    assert users("mmap") == {"omniqueue/payloads.py", "omniqueue/segments.py"}
    assert users("multiprocessing.shared_memory") == set()


#: up.py, demo.py and the bench ask our own router on this machine; remote.py opens what a client names.
HTTP_CLIENTS = {
    "omniqueue/up.py",
    "omniqueue/demo.py",
    "omniqueue/remote.py",
    "bench/deployment.py",
    "bench/cancels.py",
}


def test_media_alone_opens_urls() -> None:
    assert users("fsspec") == {"omniqueue/media.py"}
    assert users("urllib.request", "urllib3", "requests", "aiohttp", "httpx") == set()
    assert users("http.client") <= HTTP_CLIENTS
    opened = {
        f"{path}: {ast.unparse(call)}"
        for path, tree in sources().items()
        for name, call in calls(tree)
        if name.endswith(("urlopen", "Image.open", "url_to_fs", "urlretrieve"))
    }
    assert {entry.partition(":")[0] for entry in opened} <= {"omniqueue/media.py", "omniqueue/pictures.py"}
    # Pictures that clients send are opened as bytes in hand, never by a name.
    assert [entry for entry in opened if "pictures.py" in entry] == [
        "omniqueue/pictures.py: Image.open(io.BytesIO(content), formats=FORMATS)"
    ]


#: A stage's width is known only once its config is read, so its worker sets the concurrency itself.
CONCURRENCY = ("workers/stage_worker.py", "conf.worker_concurrency")


def test_celery_app_alone_sets_celery() -> None:
    found = set()
    for path, tree in sources().items():
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if re.search(r"(^|\.)conf(\.|\[)", ast.unparse(target)):
                    found.add((path, ast.unparse(target)))
        found |= {(path, name) for name, _ in calls(tree) if re.search(r"(^|\.)conf\.(update|setdefault)$", name)}
    assert {(path, name) for path, name in found if path != "omniqueue/celery_app.py"} == {CONCURRENCY}


def test_tracing_alone_imports_opentelemetry_and_only_when_asked_to() -> None:
    assert users("opentelemetry") == {"omniqueue/tracing.py"}
    at_once = [name for name in imported_at_once(sources()["omniqueue/tracing.py"]) if name.startswith("opentelemetry")]
    assert at_once == []


def test_there_is_one_celery_app() -> None:
    made = {path for path, tree in sources().items() for name, _ in calls(tree) if name.endswith("Celery")}
    assert made == {"omniqueue/celery_app.py", "bench/stock.py"}  # the second is what ours is compared with


# -- no code from data -------------------------------------------------------------------------------------------------


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert users("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib") == set()
    for path, tree in sources().items():
        for name, call in calls(tree):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert name not in ("eval", "exec"), path
            assert "allow_pickle" not in given, path
            if name in ("torch.load", "load") and "weights_only" not in given:
                assert name == "load", path
            assert given.get("weights_only", "True") == "True", path
            assert given.get("shell") != "True", path
            assert name not in ("os.system", "os.popen"), path


def test_yaml_is_read_by_safe_loaders() -> None:
    for path, tree in sources().items():
        assert not [name for name, _ in calls(tree) if re.search(r"yaml\.(unsafe_|full_)?load(_all)?$", name)] or (
            "SafeLoader" in ast.unparse(tree)
        ), path


# -- how it is written -------------------------------------------------------------------------------------------------


def test_no_module_is_longer_than_350_lines() -> None:
    long = {path: (ROOT / path).read_text().count("\n") for path in sources()}
    assert {path: lines for path, lines in long.items() if lines > MAX_LINES} == {}


def test_every_public_module_and_class_has_a_docstring() -> None:
    bare = []
    for path, tree in sources().items():
        if not ast.get_docstring(tree) and tree.body:
            bare.append(path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
                bare.append(f"{path}: {node.name}")
    assert bare == []


def test_every_function_is_annotated() -> None:
    bare = [
        f"{path}: {node.name}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None and node.name != "__init__"
    ]
    assert bare == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_no_file_is_large() -> None:
    assert {str(path) for path in tracked() if path.stat().st_size > MAX_BYTES} == set()


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    marks = re.compile(r"(mark\.(skip|skipif|xfail)|importorskip|pytest\.(skip|xfail))$")
    found = set()
    for path in tracked():
        if path.suffix == ".py" and path.is_relative_to(ROOT / "tests"):
            tree = ast.parse(path.read_text())
            names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            found |= {f"{path.relative_to(ROOT)}: {name}" for name in names if marks.search(name)}
    assert found == set()


# -- what an import brings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        "omniqueue", "omniqueue.cli", "omniqueue.tasks", "omniqueue.engines", "omniqueue.engines.fake", "web.app",
        "workers.stage_worker",
    ],
)  # fmt: skip
def test_an_import_brings_no_model_library(module: str) -> None:
    heavy = sorted(HEAVY | {"numpy"})
    program = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_bare_import_brings_no_celery_either() -> None:
    program = (
        "import sys, omniqueue, omniqueue.cli; print([n for n in ('celery', 'redis', 'flask') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_another_system_is_told_that_only_linux_will_do() -> None:
    program = "import sys; sys.platform = 'darwin'; import omniqueue"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert "omniqueue runs on Linux only" in done.stderr
