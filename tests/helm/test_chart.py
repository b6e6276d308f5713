"""The chart, linted and rendered by Helm's own code without a cluster."""

from __future__ import annotations

import functools
import json
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from proxy.telemetry.metrics import PROCESS
from tests.support.forked_ullage import run_ullage

pytestmark = pytest.mark.slow  # it starts a process

CHART = Path(__file__).parents[2] / "helm" / "ullage"

needs_helm = pytest.mark.skipif(
    find_spec("helm_python") is None, reason="helm-python-sdk has no wheel for this platform, so nothing can render"
)

# In a process of its own: the library brings Go's runtime with its threads and signal handlers along.
HELM = """
import json, sys
import helm_python as helm

asked = json.load(sys.stdin)
if asked["do"] == "lint":
    answer = helm.lint(asked["chart"], asked["values"], strict=True)
elif asked["do"] == "render all":
    with helm.Chart.load(asked["chart"]) as chart:
        answer = []
        for values in asked["values"]:
            chart.validate_schema(values)
            answer.append(chart.render(values, name="demo", namespace="prod"))
else:
    with helm.Chart.load(asked["chart"]) as chart:
        try:
            chart.validate_schema(asked["values"])
            answer = {"rendered": chart.render(asked["values"], name="demo", namespace="prod")}
        except helm.HelmError as error:
            answer = {"refused": str(error)}
json.dump(answer, sys.stdout)
"""

EVERYTHING: dict[str, Any] = {
    "replicaCount": 3,
    "existingSecret": "ullage-keys",
    "env": [{"name": "LOCAL_KEY", "valueFrom": {"secretKeyRef": {"name": "local", "key": "key"}}}],
    "image": {"digest": "sha256:" + "0" * 64},
    "extraVolumes": [{"name": "ca", "configMap": {"name": "company-ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/company", "readOnly": True}],
    "extraContainers": [{"name": "log", "image": "busybox"}],
    "initContainers": [{"name": "wait", "image": "busybox"}],
    "priorityClassName": "high",
    "autoscaling": {"enabled": True, "targetInFlight": 200},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["ullage.example.com"]},
    "podDisruptionBudget": {"enabled": True},
    "ingress": {"enabled": True, "className": "nginx", "tls": [{"hosts": ["ullage.example.com"], "secretName": "tls"}]},
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "authorization": {"credentials": {"name": "ullage-keys", "key": "ULLAGE_SERVER__ADMIN_KEY"}},
    },
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "networkPolicy": {
        "enabled": True,
        "from": [{"namespaceSelector": {}}],
        "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "vllm"}}}], "ports": [{"port": 8000}]}],
    },
    "podLabels": {"team": "models"},
    "podAnnotations": {"note": "yes"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "imagePullSecrets": [{"name": "pull"}],
    "config": {
        "server": {"access_keys": "${ULLAGE_ACCESS_KEYS}"},
        "store": {"url": "${ULLAGE_STORE_URL}"},
        "upstreams": [{"name": "local", "base_url": "http://vllm:8000/v1", "api_key": "${LOCAL_KEY}"}],
        "models": [{"name": "*", "upstream": "local", "context_window": 1048576}],
    },
}


def helm(do: str, values: dict[str, Any] | None = None) -> dict[str, Any]:
    asked = json.dumps({"do": do, "chart": str(CHART), "values": values or {}})
    done = subprocess.run([sys.executable, "-c", HELM], input=asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def helm_all(values: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The rendered files of each of *values*."""
    asked = json.dumps({"do": "render all", "chart": str(CHART), "values": values})
    done = subprocess.run([sys.executable, "-c", HELM], input=asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rendered: list[dict[str, str]] = json.loads(done.stdout)
    return rendered


def documents(values: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Every rendered manifest by its kind; the connection test is ``Pod``, Grafana's ConfigMap ``Dashboard``."""
    rendered = helm("render", values)["rendered"]
    manifests = [yaml.safe_load(text) for path, text in rendered.items() if path.endswith(".yaml")]
    return {_kind(manifest): manifest for manifest in manifests if manifest}


def _kind(manifest: dict[str, Any]) -> str:
    return "Dashboard" if manifest["metadata"]["name"].endswith("-dashboard") else manifest["kind"]


def config_of(manifests: dict[str, dict[str, Any]]) -> Any:
    return yaml.safe_load(manifests["ConfigMap"]["data"]["ullage.yaml"])


@needs_helm
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_chart_has_no_lint_findings(values: dict[str, Any]) -> None:
    """Helm's strict lint finds nothing worse than the missing icon."""
    report = helm("lint", values)
    assert [message for message in report["messages"] if message["error"] != "icon is recommended"] == []
    assert report["errors"] == []


@needs_helm
def test_defaults_render_the_small_set() -> None:
    """Without any value set there is a Deployment with Service, configuration and account, and nothing optional."""
    assert set(documents()) == {"ConfigMap", "Deployment", "Pod", "Service", "ServiceAccount"}


@needs_helm
def test_everything_renders_every_kind() -> None:
    """With every switch on, each optional object is there and the replica count is left to the autoscaler."""
    manifests = documents(EVERYTHING)
    optional = {"HorizontalPodAutoscaler", "PodDisruptionBudget", "Ingress", "ServiceMonitor", "NetworkPolicy"}
    optional |= {"Dashboard", "PrometheusRule", "HTTPRoute"}
    assert optional <= set(manifests)
    assert "replicas" not in manifests["Deployment"]["spec"]
    (scraped,) = manifests["ServiceMonitor"]["spec"]["endpoints"]
    assert scraped["authorization"]["credentials"]["key"] == "ULLAGE_SERVER__ADMIN_KEY"
    assert config_of(manifests)["models"][0]["context_window"] == 1048576


@needs_helm
def test_values_of_the_operating_guide_render() -> None:
    """The values that docs/operations.md shows are accepted, and its store and keys stay references."""
    guide = (CHART.parents[1] / "docs" / "operations.md").read_text()
    (sample,) = re.findall(r"^```yaml\n# values.yaml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    manifests = documents(yaml.safe_load(sample))
    assert "PodDisruptionBudget" in manifests
    assert config_of(manifests)["store"]["url"].startswith("${")


@needs_helm
def test_pod_is_locked_down() -> None:
    """The pod runs as nobody, without capabilities, token or a writable root; it can write to /data and /tmp only."""
    pod = documents(EVERYTHING)["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/data", "/tmp"}


CUSTOM = {"HTTPRoute", "PrometheusRule", "ServiceMonitor"}
"""Kinds that operators bring: Kubernetes has no schema of them."""

PERSISTENT: dict[str, Any] = {"persistence": {"enabled": True, "storageClassName": "fast"}}


@needs_helm
@pytest.mark.parametrize("values", [{}, EVERYTHING, PERSISTENT], ids=["defaults", "everything", "persistent"])
def test_manifests_follow_the_schemas_of_kubernetes(values: dict[str, Any]) -> None:
    """Kubernetes 1.29 knows every member of every manifest, at its place and with its type."""
    manifests = documents(values)
    for kind in manifests.keys() - CUSTOM:
        kubernetes_validate.validate(manifests[kind], "1.29", strict=True)


VARIANTS: dict[str, list[Any]] = {
    "nameOverride": ["x" * 70],
    "fullnameOverride": ["y" * 80],
    "existingSecret": ["keys"],
    "image": [{"digest": "sha256:" + "0" * 64}, {"tag": "1.0", "pullPolicy": "Always", "repository": "r:5000/u"}],
    "extraContainers": [EVERYTHING["extraContainers"]],
    "serviceAccount": [{"create": False}, {"name": "own", "annotations": {"a": "b"}}],
    "service": [{"type": "NodePort"}, {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}}],
    "resources": [{}, {"limits": {"nvidia.com/gpu": 1}}, None],
    "persistence": [PERSISTENT["persistence"], {"enabled": True, "existingClaim": "mine"}],
    "autoscaling": [{"enabled": True}, {"enabled": True, "targetInFlight": 5, "targetCPUUtilizationPercentage": None}],
    "podDisruptionBudget": [{"enabled": True}, {"enabled": True, "maxUnavailable": "25%"}],
    "ingress": [{"enabled": True}, {"enabled": True, "hosts": []}, EVERYTHING["ingress"]],
    "networkPolicy": [{"enabled": True}, {"enabled": True, "egressPorts": []}, EVERYTHING["networkPolicy"]],
    "dashboard": [{"enabled": True, "labels": {}}],
    "podLabels": [{"team": "models"}],
    "podSecurityContext": [None, {"runAsUser": None, "runAsGroup": None, "fsGroup": None, "supplementalGroups": [1]}],
    "securityContext": [None, {"runAsUser": 1000700000}],
    "topologySpreadConstraints": [EVERYTHING["topologySpreadConstraints"]],
    "preStopSeconds": [0],
    "config": [{}, {"server": {"workers": 4, "port": 9000}}],
}


def combinations(count: int) -> list[dict[str, Any]]:
    """Each variant alone, and *count* mixtures of them, the same ones each time."""
    alone = [{name: variant} for name, variants in VARIANTS.items() for variant in variants]
    dice = random.Random(16)
    for _ in range(count):
        names = dice.sample(list(VARIANTS), dice.randint(2, len(VARIANTS)))
        mixture = {name: dice.choice(VARIANTS[name]) for name in names}
        if "persistence" in mixture:
            mixture.pop("autoscaling", None)  # refused together
        alone.append(mixture)
    return alone


@functools.cache
def valid_manifest(text: str) -> dict[str, Any] | None:
    """The manifest in *text*, each of whose members Kubernetes knows. Most combinations render most files alike."""
    manifest: dict[str, Any] | None = yaml.safe_load(text)
    if manifest and manifest["kind"] not in CUSTOM:
        kubernetes_validate.validate(manifest, "1.29", strict=True)
    return manifest


@needs_helm
def test_any_combination_of_values_is_valid() -> None:
    """Whatever is set together, Kubernetes knows each member, and pods are selected and have what they mount."""
    values = combinations(20)
    for value, rendered in zip(values, helm_all(values), strict=True):
        manifests = [valid_manifest(text) for path, text in rendered.items() if path.endswith(".yaml")]
        for manifest in filter(None, manifests):
            assert all(len(label) <= 63 for label in manifest["metadata"]["labels"].values()), value
            if manifest["kind"] == "Deployment":
                template = manifest["spec"]["template"]
                selected = manifest["spec"]["selector"]["matchLabels"].items()
                assert selected <= template["metadata"]["labels"].items(), value
                volumes = {volume["name"] for volume in template["spec"]["volumes"]}
                mounted = {mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
                assert mounted <= volumes, value


@needs_helm
def test_a_company_can_add_its_own_parts() -> None:
    """Volumes, mounts, containers, a priority, a digest and rules of egress stand where a pod has them."""
    manifests = documents(EVERYTHING)
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["ullage", "log"]
    assert pod["initContainers"] == EVERYTHING["initContainers"]
    assert EVERYTHING["extraVolumes"][0] in pod["volumes"]
    assert EVERYTHING["extraVolumeMounts"][0] in pod["containers"][0]["volumeMounts"]
    assert pod["priorityClassName"] == "high"
    assert pod["containers"][0]["image"] == "ullage@sha256:" + "0" * 64
    assert manifests["Pod"]["spec"]["containers"][0]["image"] == pod["containers"][0]["image"]
    assert manifests["NetworkPolicy"]["spec"]["egress"][-1] == EVERYTHING["networkPolicy"]["egress"][0]


@needs_helm
def test_the_autoscaler_counts_requests_under_way() -> None:
    """By the metric that the proxy exposes, beside the processor or alone."""
    both = documents(EVERYTHING)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert [metric["type"] for metric in both] == ["Pods", "Resource"]
    assert both[0]["pods"]["metric"]["name"] in {metric.name for metric in PROCESS}
    assert both[0]["pods"]["target"]["averageValue"] == "200"
    alone = {"enabled": True, "targetInFlight": 50, "targetCPUUtilizationPercentage": None}
    (only,) = documents({"autoscaling": alone})["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert only["type"] == "Pods"


@needs_helm
def test_a_route_of_the_gateway_leads_to_the_service() -> None:
    """It names the Service and its port, and gives streams the time they take."""
    manifests = documents(EVERYTHING)
    (rule,) = manifests["HTTPRoute"]["spec"]["rules"]
    service = manifests["Service"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}]
    assert rule["timeouts"] == {"request": "0s"}


@needs_helm
def test_the_store_can_outlive_its_pod() -> None:
    """With persistence a claim is mounted at /data, and the old pod is gone before the new one opens the file."""
    manifests = documents({"persistence": {"enabled": True, "size": "5Gi"}})
    claim, spec = manifests["PersistentVolumeClaim"], manifests["Deployment"]["spec"]
    assert claim["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}
    (data,) = [volume for volume in spec["template"]["spec"]["volumes"] if volume["name"] == "data"]
    assert data["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert spec["strategy"] == {"type": "Recreate"}
    theirs = documents({"persistence": {"enabled": True, "existingClaim": "mine"}})
    assert "PersistentVolumeClaim" not in theirs


@needs_helm
def test_openshift_may_choose_the_user() -> None:
    """Keys that are null are left out of the pod's context and of the connection test's; the rest stays."""
    free = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    manifests = documents({"podSecurityContext": free})
    for pod in (manifests["Deployment"]["spec"]["template"]["spec"], manifests["Pod"]["spec"]):
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


@needs_helm
def test_rollouts_drop_no_request() -> None:
    """An old pod goes only after its successor is ready, and has longer to end than the proxy's drain takes."""
    manifests = documents()
    spec = manifests["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + 300
    assert container["startupProbe"]["httpGet"]["path"] == "/health/live"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"


@needs_helm
def test_service_reaches_the_pods_and_only_them() -> None:
    """The Service's selector and port meet the Deployment's pods, and not the connection test's."""
    manifests = documents(EVERYTHING)
    selector = manifests["Service"]["spec"]["selector"]
    template = manifests["Deployment"]["spec"]["template"]
    assert selector.items() <= template["metadata"]["labels"].items()
    assert not selector.items() <= manifests["Pod"]["metadata"]["labels"].items()
    (port,) = manifests["Service"]["spec"]["ports"]
    assert port["targetPort"] in {named["name"] for named in template["spec"]["containers"][0]["ports"]}


@needs_helm
def test_a_new_configuration_rolls_the_pods() -> None:
    """Changing one value in ``config`` changes the pod template."""
    checksums = {
        documents({"config": {"compression": {"high_mark": mark}}})["Deployment"]["spec"]["template"]["metadata"][
            "annotations"
        ]["checksum/config"]
        for mark in (0.9, 0.8)
    }
    assert len(checksums) == 2


@needs_helm
def test_secrets_come_by_reference() -> None:
    """The Secret reaches the proxy as environment, and the ConfigMap holds the reference as it was written."""
    manifests = documents(EVERYTHING)
    container = manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["envFrom"] == [{"secretRef": {"name": "ullage-keys"}}]
    assert container["env"] == EVERYTHING["env"]
    assert config_of(manifests)["upstreams"][0]["api_key"] == "${LOCAL_KEY}"


@needs_helm
@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"replicas": 2}, "replicas"),
        ({"image": {"tagg": "1"}}, "tagg"),
        ({"config": {"upstreams": [{"name": "a", "api_key": "sk-plain"}]}}, "api_key"),
        ({"config": {"upstreams": [{"name": "a", "headers": {"Authorization": "Bearer x"}}]}}, "Authorization"),
        ({"config": {"server": {"access_keys": ["plain"]}}}, "access_keys"),
        ({"config": {"server": {"admin_key": "plain"}}}, "admin_key"),
        ({"config": {"store": {"key": "plain"}}}, "key"),
        ({"config": {"store": {"url": "redis://user:plain@redis:6379"}}}, "url"),
        ({"config": {"store": {"path": "/var/lib/ullage"}}}, "path"),
        ({"config": {"server": {"host": "127.0.0.1"}}}, "host"),
        ({"env": [{"name": "A"}]}, "env"),
        ({"terminationGracePeriodSeconds": 300}, "terminationGracePeriodSeconds"),
        ({"image": {"digest": "sha256:1"}}, "digest"),
        ({"persistence": {"enabled": True}, "replicaCount": 2}, "replicaCount"),
        ({"persistence": {"enabled": True}, "autoscaling": {"enabled": True}}, "autoscaling"),
        ({"persistence": {"accessModes": ["ReadWriteMany"]}}, "accessModes"),
        ({"autoscaling": {"enabled": True, "targetCPUUtilizationPercentage": None}}, "autoscaling"),
        ({"httpRoute": {"enabled": True}}, "parentRefs"),
        ({"podLabels": {"app.kubernetes.io/name": "other"}}, "app.kubernetes.io/name"),
        ({"nameOverride": "Upper.case"}, "nameOverride"),
        ({"fullnameOverride": "-a"}, "fullnameOverride"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], word: str) -> None:
    """A key the chart does not know, a secret written out, or a pod killed while it drains is refused by name."""
    answer = helm("render", values)
    assert word in answer["refused"]


def test_values_follow_their_schema() -> None:
    """The chart's own values are valid, and every one of them is described."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema, cls=jsonschema.Draft7Validator)
    assert set(values) == set(schema["properties"]) - {"global"}


@pytest.mark.parametrize(
    "config",
    [
        {"server": {"access_keys": ["plain"]}},
        {"server": {"admin_key": "plain"}},
        {"store": {"key": "plain"}},
        {"store": {"other_keys": ["plain"]}},
        {"summaries": {"allow": ["plain"]}},
        {"upstreams": [{"name": "a", "api_key": "plain"}]},
    ],
    ids=str,
)
def test_secrets_written_out_are_refused(config: dict[str, Any]) -> None:
    """Each setting that holds a key takes a reference, and nothing else."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for section, settings in config.items():
        known = values["config"].get(section)
        values["config"][section] = {**known, **settings} if isinstance(known, dict) else settings
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema, cls=jsonschema.Draft7Validator)
    by_reference = json.loads(json.dumps(values).replace('"plain"', '"${KEY}"'))
    jsonschema.validate(by_reference, schema, cls=jsonschema.Draft7Validator)


@needs_helm
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_rendered_configuration_is_accepted_by_the_proxy(values: dict[str, Any], tmp_path: Path) -> None:
    """`ullage check` finds nothing wrong with what the ConfigMap holds."""
    file = tmp_path / "ullage.yaml"
    file.write_text(documents(values)["ConfigMap"]["data"]["ullage.yaml"])
    secrets = {"LOCAL_KEY": "sk-local", "ULLAGE_ACCESS_KEYS": "one,two", "ULLAGE_STORE_URL": "redis://redis:6379"}
    done = run_ullage("check", str(file), environment=secrets)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
def test_dashboard_and_alerts_are_the_files() -> None:
    """Grafana and Prometheus get what the files hold, to the letter, with the labels by which they find it."""
    manifests = documents(EVERYTHING)
    dashboard, rules = manifests["Dashboard"], manifests["PrometheusRule"]
    assert json.loads(dashboard["data"]["ullage.json"]) == json.loads((CHART / "files" / "dashboard.json").read_text())
    assert rules["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert rules["metadata"]["labels"]["release"] == "prometheus"
