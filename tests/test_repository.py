"""Repository files other than the package: workflows, container files, dashboard, changelog."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from check_jsonschema.cli import main as check_jsonschema
from click.testing import CliRunner

import toolroll
from toolroll.run.reporting.metrics import RUN_METRICS

ROOT = Path(__file__).parent.parent
KUBERNETES_VERSION = "1.33"
SCHEMAS = {
    ".github/workflows/*.yml": "vendor.github-workflows",
    ".github/dependabot.yml": "vendor.dependabot",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    ".github/ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    "docker/compose.yaml": "vendor.compose-spec",
    "CITATION.cff": "vendor.citation-file-format",
}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("pattern", SCHEMAS)
def test_file_matches_its_schema(pattern: str) -> None:
    paths = [str(path) for path in ROOT.glob(pattern)]
    assert paths
    options = ["--builtin-schema", SCHEMAS[pattern], "--force-filetype", "yaml"]
    result = CliRunner().invoke(check_jsonschema, [*options, *paths])
    assert result.exit_code == 0, result.output


def test_kubernetes_manifest_matches_its_schema() -> None:
    documents = [*yaml.safe_load_all((ROOT / "examples/sandbox/kubernetes.yaml").read_text())]
    kinds = ["StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"]
    assert [document["kind"] for document in documents] == kinds
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_service_monitor_selects_the_service() -> None:
    documents = [*yaml.safe_load_all((ROOT / "examples/sandbox/kubernetes.yaml").read_text())]
    service = next(document for document in documents if document["kind"] == "Service")
    monitor = yaml.safe_load((ROOT / "examples/sandbox/service-monitor.yaml").read_text())["spec"]
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_dockerfile_copies_the_sources_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {*wheel["packages"], *wheel["force-include"]}
    dockerfile = (ROOT / "docker/sandbox.Dockerfile").read_text()
    copied = {path for line in re.findall(r"^COPY (?!--)(.+) \S+$", dockerfile, re.MULTILINE) for path in line.split()}
    assert needed == copied


@pytest.mark.process
def test_dockerfile_passes_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    dockerfile = ROOT / "docker/sandbox.Dockerfile"
    done = subprocess.run([hadolint, "--no-color", dockerfile], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_container_has_the_rights_of_the_pod() -> None:
    service = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["sandbox"]
    stateful_set = next(yaml.safe_load_all((ROOT / "examples/sandbox/kubernetes.yaml").read_text()))
    [container] = stateful_set["spec"]["template"]["spec"]["containers"]
    capabilities = container["securityContext"]["capabilities"]
    assert (service["cap_drop"], service["cap_add"]) == (capabilities["drop"], capabilities["add"])
    assert "privileged" not in service


def test_ports_are_bound_to_loopback() -> None:
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    ports = [port for service in services.values() for port in service["ports"]]
    assert len(ports) == 3
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def sandbox_metrics() -> set[str]:
    """Return the names of all series of a sandbox server, from its exposition text."""
    from toolroll.sandbox.server.hub.hub import Hub
    from toolroll.sandbox.server.settings import ServerSettings

    text = Hub(ServerSettings()).metrics.render().decode()
    names = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names


def ray_metrics(module: str) -> set[str]:
    """Return the names of all metrics that a module exports, with the prefix and suffix that Ray adds."""
    source = (Path(toolroll.__file__).parent / module).read_text()
    found = re.findall(r"\b(Counter|Gauge)\(\s*\"(\w+)\"", source)
    return {f"ray_{name}_total" if kind == "Counter" else f"ray_{name}" for kind, name in found}


WORKER_METRICS = ray_metrics("rollout/distributed/worker_pool.py")
LIMITER_METRICS = ray_metrics("limiter/token_bucket.py")
RUN_METRIC_NAMES = {f"toolroll_{one.name}{'_total' if one.kind == 'counter' else ''}" for one in RUN_METRICS}


def test_dashboard_uses_existing_metrics() -> None:
    dashboard = json.loads((ROOT / "docker/grafana/dashboards/toolroll.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    metrics = sandbox_metrics() | WORKER_METRICS | LIMITER_METRICS | RUN_METRIC_NAMES
    used = [set(re.findall(r"\b(?:ray_)?toolroll_\w+", expression)) for expression in expressions]
    assert all(used)
    assert set().union(*used) - metrics == set()
    unused = {name for name in metrics - set().union(*used) if not name.endswith("_created")}
    assert unused == set(), "the dashboard does not show these metrics"


def test_rollout_page_lists_all_ray_metrics() -> None:
    page = (ROOT / "docs/rollout.md").read_text()
    assert set(re.findall(r"`(ray_toolroll_\w+)`", page)) == WORKER_METRICS


def test_limiter_page_lists_all_ray_metrics() -> None:
    page = (ROOT / "docs/limiter.md").read_text()
    assert set(re.findall(r"`(ray_toolroll_\w+)`", page)) == LIMITER_METRICS


def test_ci_runs_every_lane() -> None:
    # Importing conftest again would reset the hypothesis profile.
    [known] = re.findall(r"^LANES = (.+)$", (ROOT / "tests/conftest.py").read_text(), re.MULTILINE)
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    lanes = [lane for group in jobs["lanes"]["strategy"]["matrix"]["include"] for lane in group["lanes"].split()]
    assert sorted(lanes) == sorted({*ast.literal_eval(known), "bench"} - {"unit"})
    assert {"run": "make test"} in jobs["unit"]["steps"]


def test_ci_installs_the_packages_of_ci_run() -> None:
    packages = re.findall(r"\bneed \S+ (\S+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    packages += re.findall(r"missing\+=\(([\w-]+)\)", (ROOT / ".ci/run").read_text())
    assert len(packages) > 10
    installed = re.findall(r"apt-get install(.*?)\n +sudo", (ROOT / ".github/workflows/ci.yml").read_text(), re.DOTALL)
    assert set(packages) - set(" ".join(installed).split()) == set()


def test_changelog_has_section_for_next_release() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in ("Unreleased", VERSION)


def test_citation_names_the_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
