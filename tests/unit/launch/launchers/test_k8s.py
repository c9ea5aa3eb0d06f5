"""Manifests for Kubernetes, against the definitions of what takes them; what is refused before; what kubectl gets."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_texts import naming

from bigbatch.errors import JobRefused, LaunchOptionError, SchedulerError
from bigbatch.launch.jobs.restarts import may_restart
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.jobs.validation import UNLIMITED
from bigbatch.launch.launchers import k8s
from bigbatch.launch.start import main

GOLDEN = Path(__file__).parents[3] / "golden"
TRAIN = ("train", "--config", "quickstart")
FOLDERS = ("--data.root", "/d/shapes", "--run.directory", "/r/x")
IN_PODS = ("--image", "bb", "--mount", "data:/d:ro", "--mount", "runs:/r")
TYPES = {"string": (str,), "integer": (int,), "boolean": (bool,), "object": (dict,)}
OLDEST = "1.31"
"""Version of Kubernetes from which on all fields are there for everyone."""


def pods_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]]


def jobset(*, command: tuple[str, ...] = (*TRAIN, *FOLDERS), ranks: int = 16, **options: Any) -> dict[str, Any]:
    """The manifest as Kubernetes reads it."""
    loaded: dict[str, Any] = yaml.safe_load(k8s.manifest(JobSpec(command, ranks, image="bb", **options), name="a-b"))
    return loaded


def misfits(value: Any, fields: Any, *, where: str = "") -> list[str]:
    """Return the places of a manifest with fields that k8s-fields.yaml lacks; Kubernetes may drop these silently."""
    if fields in ("job", "pod"):
        return core_misfits(value, kind=fields, where=where)
    if isinstance(fields, str):
        return [] if type(value) in TYPES[fields] else [f"{where}: {value!r} is not {fields}"]
    if isinstance(fields, list):
        return [line for part in value for line in misfits(part, fields[0], where=f"{where}[]")]
    known = {name.rstrip("!"): part for name, part in fields.items()}
    missing = [
        f"{where}.{name[:-1]}: missing" for name in fields if name.endswith("!") and name.rstrip("!") not in value
    ]
    found = [f"{where}.{name}: unknown" for name in value if name not in known and "*" not in known]
    parts = {name: known.get(name, known.get("*")) for name in value}
    return missing + found + [x for n, f in parts.items() if f for x in misfits(value[n], f, where=f"{where}.{n}")]


def core_misfits(spec: dict[str, Any], *, kind: str, where: str) -> list[str]:
    """Return the violations of Kubernetes' own schemas."""
    import kubernetes_validate

    version = {"job": "batch/v1", "pod": "v1"}[kind]
    whole = {"apiVersion": version, "kind": kind.title(), "metadata": {"name": "a"}, "spec": spec}
    try:
        kubernetes_validate.validate(whole, OLDEST, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{where}.{'.'.join(map(str, error.path))}: {error.message}"]
    return []


EXAMPLE = GOLDEN.parents[1] / "examples/mpijob.yaml"
MANIFESTS = [EXAMPLE, *sorted(set(GOLDEN.glob("k8s-*.yaml")) - {GOLDEN / "k8s-fields.yaml"})]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_k8s_definitions_take_every_manifest(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    fields = yaml.safe_load((GOLDEN / "k8s-fields.yaml").read_text())[manifest["kind"]]
    assert not misfits(manifest, fields)
    spec = manifest["spec"]
    spec["ttlSecondsAfterFinish"] = 1
    if manifest["kind"] == "JobSet":
        spec["replicatedJobs"][0]["replicas"] = "1"
        spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["runAsUser"] = 1
    else:
        spec["mpiReplicaSpecs"]["Launcher"]["replicas"] = "1"
        spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["runAsUser"] = 1
    told = misfits(manifest, fields)
    for word in (".spec.ttlSecondsAfterFinish: unknown", "'1' is not integer", "'runAsUser' was unexpected"):
        assert any(word in line for line in told), told
    assert len(told) == 3


def test_k8s_jobset_has_what_restricted_pod_security_asks_for() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards: each field that it restricts."""
    (pod,) = pods_of(jobset(num_nodes=2, mounts=("data:/d", "runs:/r")))
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.keys()
    assert {key for volume in pod["volumes"] for key in volume} == {"name", "emptyDir", "persistentVolumeClaim"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    of_pod = pod["securityContext"]
    assert of_pod["runAsNonRoot"] is True
    assert of_pod["runAsUser"] > 0
    assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert not container.get("ports")
    (pod,) = pods_of(jobset(rdma="rdma/hca=2", user="7:8"))
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["resources"]["limits"]["rdma/hca"] == 2
    assert [pod["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")] == [7, 8, 8]


@pytest.mark.parametrize("is_python", [False, True])
def test_k8s_jobset_restarts_by_the_exit_codes_of_the_failure_model(is_python: bool) -> None:
    manifest = jobset(is_python=is_python, restarts=5)
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 5
    assert jobset(restarts=0)["spec"]["failurePolicy"]["maxRestarts"] == 0
    rules = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    messages = {0: "Pod default/a-b-node-0-0 has condition DisruptionTarget matching FailJob rule at index 0"}
    codes = dict.fromkeys(range(1, 256), ("BackoffLimitExceeded", "Job has reached the specified backoff limit"))
    for number, rule in reversed(list(enumerate(rules))):
        for code in rule.get("onExitCodes", {"values": []})["values"]:
            said = f"Container ranks for pod default/a failed with exit code {code} matching FailJob rule at index "
            codes[code] = ("PodFailurePolicy", f"{said}{number}")

    def action(reason: str, message: str) -> str:
        """Return the action of the first rule whose reason and message match, as JobSet's controller does."""
        for rule in policy["rules"]:
            patterns = rule.get("onJobFailureMessagePatterns", [""])
            if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
                return str(rule["action"])
        return "RestartJobSet"

    assert action("PodFailurePolicy", messages[0]) == "RestartJobSetAndIgnoreMaxRestarts", "evicted"
    assert action("DeadlineExceeded", "Job was active longer than specified deadline") == "FailJobSet"
    found = {code: action(*ended) for code, ended in codes.items()}
    # a drained node's ranks have asked all others to stop; a script may end so by itself, again and again
    assert found.pop(130) == ("RestartJobSet" if is_python else "RestartJobSetAndIgnoreMaxRestarts")
    for code in (126, 127):  # nothing started
        assert found.pop(code) == "FailJobSet"
    known = [1, 2, 3, 4, 5, 6, 7, 134, 135, 137, 139, 141, 143]
    expected = {code: "RestartJobSet" if may_restart(code, is_python=is_python) else "FailJobSet" for code in known}
    assert {code: found[code] for code in known} == expected


def test_k8s_pods_may_take_as_long_to_end_as_the_run_may_take_to_save() -> None:
    cases: tuple[tuple[tuple[str, ...], dict[str, int]], ...] = (
        ((*TRAIN, "--run.checkpoint_timeout_seconds", "1800"), {}),
        (TRAIN, {"stop_seconds": 90}),
        (("bench",), {}),
    )
    pods = [pods_of(jobset(command=command, **options))[0] for command, options in cases]
    assert [pod["terminationGracePeriodSeconds"] for pod in pods] == [1860, 90, 120]


def test_k8s_job_without_a_time_limit_has_no_deadline() -> None:
    for minutes, deadline in ((UNLIMITED, None), (90, 5400)):
        job = jobset(minutes=minutes)["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert job.get("activeDeadlineSeconds") == deadline


def test_k8s_resources_are_stated_in_its_own_units() -> None:
    for options, limits in (
        ({"memory": "200g"}, {"nvidia.com/gpu": 8, "memory": "200Gi"}),
        ({"device": "cpu", "cpus_per_rank": 2}, {"cpu": 16}),
        ({"gpus_per_node": 4}, {"nvidia.com/gpu": 4}),
    ):
        pod = pods_of(jobset(num_nodes=2, **options))[-1]
        assert pod["containers"][0]["resources"]["limits"] == limits
    with pytest.raises(LaunchOptionError, match=naming("--memory 0", "200G")):
        jobset(memory="0")


def test_k8s_replaces_nothing_in_the_command() -> None:
    command = pods_of(jobset(command=(*TRAIN, "$(HOME)/a: [b]\n#c")))[0]["containers"][0]["command"]
    assert command[-1] == "$$(HOME)/a: [b]\n#c"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--node-selector", "gpu"), ("--node-selector 'gpu'", "gpu=h200")),
        (("--toleration", "gpu:Never"), ("--toleration 'gpu:Never'", "NoSchedule")),
        (("--pull-secret", "A"), ("--pull-secret 'A'", "Secret")),
        (("--namespace", "a.b"), ("--namespace 'a.b'",)),
        (("--queue", "-q"), ("--queue",)),
        (("--rdma", "rdma/hca=0"), ("--rdma 'rdma/hca=0'", "rdma/hca_shared_devices_a")),
        (("--user", "0"), ("--user '0'", "1000:1000")),
        *((("--name", name), ("--name", "resnet50-32k")) for name in ("A", "1a", "a" * 39)),
    ],
)
def test_k8s_takes_words_of_its_own_only(
    words: tuple[str, ...], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((JobRefused, SystemExit)) as caught:
        main(["k8s", *IN_PODS, *words, "--dry-run", "--", *TRAIN, *FOLDERS])
    said = str(caught.value) + capsys.readouterr().err
    assert all(word in said for word in named), said


def test_k8s_needs_an_image() -> None:
    with pytest.raises(LaunchOptionError, match="--image"):
        k8s.manifest(JobSpec(TRAIN, 1), name="a-b")


@pytest.mark.parametrize(
    ("heal", "options", "expected"),
    [
        ("in_place", {}, "3"),
        ("in_place", {"restarts": 7}, "7"),
        ("in_place", {"restarts": 0}, None),
        ("in_place", {"num_nodes": 1}, None),  # in this pod all ranks would restart, and then again by the JobSet
        ("restart", {"restarts": 7}, None),
    ],
)
def test_k8s_pods_of_a_job_that_heals_restart_single_ranks(
    heal: str, options: dict[str, int], expected: str | None
) -> None:
    manifest = jobset(command=(*TRAIN, "--run.heal", heal), **{"num_nodes": 2, **options})
    words = pods_of(manifest)[0]["containers"][0]["command"]
    words = words[: words.index("--")]
    assert (words[words.index("--restarts") + 1] if "--restarts" in words else None) == expected
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == options.get("restarts", 3)


@pytest.mark.parametrize(
    ("mounts", "folders", "named"),
    [
        (
            ("d:/d:ro", "r:/r"),
            ("--data.root", "/d/x"),
            ("--run.directory runs/quickstart", "lost with", "/runs/quickstart"),
        ),
        ((), FOLDERS, ("--run.directory /r/x", "--mount runs:/runs", "--run.directory /runs/x")),
        (("r:/r:ro",), FOLDERS, ("--run.directory /r/x", "r:/r:ro", "read only")),
        (("r:/ru",), FOLDERS, ("--run.directory /r/x", "lost with")),
        (("r:/r", "s:/r/x:ro"), FOLDERS, ("s:/r/x:ro", "read only")),
        (("r:/r",), ("--run.directory", "/r/x"), ("--data.root data/shapes", "no such folder", "/data/shapes")),
    ],
)
def test_k8s_folders_that_end_with_a_pod_are_refused_before_anything_is_submitted(
    mounts: tuple[str, ...],
    folders: tuple[str, ...],
    named: tuple[str, ...],
    kubectl: Path,
) -> None:
    words = [word for mount in mounts for word in ("--mount", mount)]
    with pytest.raises(JobRefused, match=naming(*named)) as caught:
        main(["k8s", "--image", "bb", *words, "--", *TRAIN, *folders])
    assert len(caught.value.findings) == 1
    assert not (kubectl / "calls").exists()


def test_k8s_run_of_another_command_lies_in_a_mount() -> None:
    with pytest.raises(JobRefused, match=naming("evaluate runs/x", "--mount")):
        main(["k8s", *IN_PODS, "--dry-run", "--", "evaluate", "runs/x"])
    assert main(["k8s", *IN_PODS, "--dry-run", "--", "evaluate", "/r/x"]) == 0


KUBECTL = """#!/bin/sh
cd {folder}
number=$(cat calls 2>/dev/null | wc -l)
echo "$*" >> calls
cat > "input-$number"
[ -e "refuse-$number" ] && {{ cat "refuse-$number" >&2; exit 1; }}
echo '{{"apiVersion": "v1", "kind": "JobSet", "metadata": {{"name": "n", "namespace": "s", "uid": "u-1"}}}}'
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of one that keeps its words and input, and makes all that it is given."""
    (tmp_path / "kubectl").write_text(KUBECTL.format(folder=tmp_path))
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*words: str) -> int:
    return main(["k8s", *IN_PODS, *words, "--", *TRAIN, *FOLDERS])


def test_k8s_jobs_have_names_of_their_own(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start("--dry-run", "--name", "mine")
    printed = capsys.readouterr().out
    assert start("--name", "mine") == 0
    assert (kubectl / "calls").read_text() == "create -f - -o json\n"
    (drawn,) = set(re.findall(r"mine-[a-z0-9]{5}\b", printed))
    (other,) = set(re.findall(r"mine-[a-z0-9]{5}\b", (kubectl / "input-0").read_text()))
    assert other != drawn
    assert (kubectl / "input-0").read_text() == printed.replace(drawn, other)
    logs = f"kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={other} --prefix --tail=-1 --max-log-requests 1"
    assert capsys.readouterr().out == f"job {other}; its output:\n  {logs}\n"
    (kubectl / "refuse-1").write_text("no matches for kind JobSet\nensure CRDs are installed first\n")
    with pytest.raises(SchedulerError, match=naming("kubectl", "no matches for kind JobSet; ensure CRDs are")):
        start()


def test_k8s_jobs_secret_ends_with_the_job_and_is_in_no_manifest(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("--nodes", "2") == 0
    calls = (kubectl / "calls").read_text().splitlines()
    assert calls == ["create -f - -o json", "create -f -"]
    secret = json.loads((kubectl / "input-1").read_text())
    assert secret["kind"] == "Secret"
    owner = {"apiVersion": "v1", "kind": "JobSet", "name": "n", "uid": "u-1"}
    assert secret["metadata"] == {"name": "n", "namespace": "s", "ownerReferences": [owner]}
    value = secret["stringData"]["secret"]
    assert len(bytes.fromhex(value)) == 32
    shown = (kubectl / "input-0").read_text() + capsys.readouterr().out + "".join(calls)
    assert value not in shown
    (kubectl / "refuse-3").write_text("secrets is forbidden\n")
    with pytest.raises(SchedulerError, match="secrets is forbidden"):
        start("--nodes", "2")
    assert (kubectl / "calls").read_text().splitlines()[2:] == ["create -f - -o json", "create -f -", "delete -f -"]
    assert (kubectl / "input-4").read_text() == (kubectl / "input-2").read_text(), "the job that was made is deleted"


def test_k8s_without_kubectl_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match=naming("kubectl", "--dry-run")):
        start()


@pytest.mark.parametrize(
    ("word", "part"),
    [
        (
            "annotation.kueue.x-k8s.io/podset-required-topology=rack",
            {"metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"}}},
        ),
        ("label.team=vision", {"metadata": {"labels": {"team": "vision"}}}),
        ("service-account=s3-reader", {"serviceAccountName": "s3-reader"}),
        ("host-network", {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}),
        ("runtime-class=nvidia", {"runtimeClassName": "nvidia"}),
        ("scheduler=bin-packing", {"schedulerName": "bin-packing"}),
    ],
)
def test_k8s_fields_of_pods_are_where_kubernetes_has_them(word: str, part: dict[str, Any]) -> None:
    template = jobset(pod=(word,))["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    bare = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    added = {key: value for key, value in template["spec"].items() if key not in bare["spec"]}
    added |= {key: value for key, value in template.items() if key not in bare}
    assert added == part
    assert not misfits(jobset(pod=(word,)), yaml.safe_load((GOLDEN / "k8s-fields.yaml").read_text())["JobSet"])


def test_k8s_spread_is_over_the_pods_of_this_job() -> None:
    (pod,) = pods_of(manifest := jobset(pod=("spread=topology.kubernetes.io/zone",)))
    assert pod["topologySpreadConstraints"] == [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "a-b"}},
        }
    ]
    assert not misfits(manifest, yaml.safe_load((GOLDEN / "k8s-fields.yaml").read_text())["JobSet"])


@pytest.mark.parametrize(
    "word", ["hostNetwork", "annotation.=x", "label.a=b c", "service-account=A", "annotation.a=b\nc", "privileged"]
)
def test_k8s_fields_of_pods_that_are_none_are_refused(word: str) -> None:
    with pytest.raises(JobRefused, match=naming("--pod", "host-network, annotation.NAME=VALUE")):
        main(["k8s", "--dry-run", *IN_PODS, "--pod", word, "--", *TRAIN, *FOLDERS])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("spread=a", "spread=b"), ("--pod spread", "2 times")),
        (("label.team=a", "label.team=a"), ("--pod label.team", "2 times")),
        (("label.jobset.sigs.k8s.io/jobset-name=x",), ("label.jobset.sigs.k8s.io/jobset-name", "leave it out")),
        (("label.batch.kubernetes.io/job-name=x",), ("label.batch.kubernetes.io/job-name", "leave it out")),
    ],
)
def test_k8s_fields_of_pods_that_would_be_lost_or_replace_kubernetes_own_are_refused(
    words: tuple[str, ...], named: tuple[str, ...]
) -> None:
    options = [word for field in words for word in ("--pod", field)]
    with pytest.raises(JobRefused, match=naming(*named)):
        main(["k8s", "--dry-run", *IN_PODS, *options, "--", *TRAIN, *FOLDERS])


def test_k8s_jobs_in_the_network_of_a_node_meet_at_ports_of_their_own() -> None:
    def port(name: str, **options: Any) -> int:
        manifest = yaml.safe_load(k8s.manifest(JobSpec(TRAIN, 2, num_nodes=2, image="bb", **options), name=name))
        words = pods_of(manifest)[0]["containers"][0]["command"]
        return int(words[words.index("--master") + 1].rpartition(":")[2])

    ports = [port(f"job-{number}", pod=("host-network",)) for number in range(2)]
    assert len(set(ports)) == 2
    assert all(20000 <= number < 30000 for number in ports), "services of Kubernetes begin at 30000"
    assert port("job-1", pod=("host-network",)) == ports[1], "all pods read one manifest, but it may be made again"
    assert port("job-1") == 29500


def test_k8s_without_requests_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s", "--dry-run", *IN_PODS, "--", *TRAIN, *FOLDERS]) == 0
    assert "warning: without --cpus-per-rank and --memory the pods request none" in capsys.readouterr().err
    main(["k8s", "--dry-run", *IN_PODS, "--memory", "8G", "--cpus-per-rank", "2", "--", *TRAIN, *FOLDERS])
    assert "warning" not in capsys.readouterr().err


def test_k8s_site_file_states_fields_of_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site.toml"
    site.write_text("[k8s]\npod = ['service-account=s3', 'label.team=a', 'host-network']\n")
    monkeypatch.setenv("BIGBATCH_SITE_FILE", str(site))
    assert main(["k8s", "--dry-run", *IN_PODS, "--pod", "label.team=b", "--", *TRAIN, *FOLDERS]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert pods_of(shown)[0]["serviceAccountName"] == "s3"
    assert shown["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"] == {"labels": {"team": "b"}}
