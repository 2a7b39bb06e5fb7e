"""docs/kubernetes.yaml: as the API wants it, and what its pods run trains, stops and goes on.

There is no cluster here: the file is held against the schema of Kubernetes' API, and its command
runs in two network namespaces, with the names, variables and process numbers of pods.
"""

import copy
import os
import re
import signal

import kubernetes_validate
import pytest
import yaml
from conftest import PYTHON, ROOT, load, same_state

from tests.cluster.braked import FLAGS, STEP
from tests.cluster.ddp import TWO_THREADS, ddp
from tests.hosts import Hosts, first_child, needs_hosts

TEXT = (ROOT / "docs/kubernetes.yaml").read_text()
SERVICE, JOB = yaml.safe_load_all(TEXT)
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def validate(resource):
    kubernetes_validate.validate(resource, VERSION, strict=True)


VERSION = kubernetes_validate.latest_version()


@pytest.mark.parametrize("resource", [SERVICE, JOB], ids=["service", "job"])
def test_it_is_as_the_api_wants_it(resource):
    validate(resource)
    wrong = copy.deepcopy(resource)
    wrong["spec"]["clusterIPs" if resource is SERVICE else "completions"] = "two"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong)
    wrong = copy.deepcopy(resource)
    wrong["spec"]["completionmode"] = "Indexed"  # strict: no key that the API does not know
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong)


def test_its_parts_fit_together():
    """What the schema does not know."""
    spec, flags = JOB["spec"], dict(re.findall(r"--([\w-]+)=(\S+)", " ".join(CONTAINER["command"])))
    assert spec["completionMode"] == "Indexed"  # without it the pods have no number
    assert spec["completions"] == spec["parallelism"] == int(flags["nnodes"])
    # A pod's name is HOSTNAME.SUBDOMAIN, where a headless service of that name selects it.
    service = SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["clusterIP"] == "None" and POD["subdomain"] == service
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": JOB["metadata"]["name"]}
    assert flags["master-addr"] == f"{JOB['metadata']['name']}-0.{service}"
    assert flags["node-rank"] == "$(JOB_COMPLETION_INDEX)"
    limits = CONTAINER["resources"]["limits"]
    gpus, cores = limits["nvidia.com/gpu"], limits["cpu"]
    assert flags["nproc-per-node"] == str(gpus) and f"cpu: {cores}  # {cores // gpus} for" in TEXT
    said = f"`cpu: {cores}` is a quota, which the scripts keep to: each of {gpus} processes starts"
    assert f"{said} {cores // gpus} loader workers" in (ROOT / "docs/elastic.md").read_text()
    # The API server refuses a podFailurePolicy with another one.
    assert POD["restartPolicy"] == "Never" and spec["podFailurePolicy"]
    # torchrun kills after 30 s what is left of its processes, and needs some seconds to end.
    assert POD["terminationGracePeriodSeconds"] >= 45
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert sorted(mounts.values()) == sorted(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert CONTAINER["workingDir"] in mounts and flags["data"] in mounts


def expanded(words, env):
    """As Kubernetes does it with the words of a command."""
    return [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word) for word in words]


NAMES = [f"train-{i}.train.default.svc.cluster.local train-{i}.train train-{i}" for i in (0, 1)]


class Pods(Hosts):
    """Both pods. `folder` is the volume at /work, `images` the one at /data."""

    def __init__(self, folder, images):
        super().__init__(*NAMES)
        self.folder, self.images, self.brake = folder, images, folder / "brake"
        (folder / "distributed.py").symlink_to(ROOT / "distributed.py")
        self.brake.touch()  # as long as it is there a step takes a second

    def create(self, index):
        """The container's command with the variables of a pod."""
        env = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"train-{index}"}
        words = expanded(CONTAINER["command"], env)
        assert words[0] == "torchrun"
        words[:1] = [PYTHON, "-m", "torch.distributed.run"]
        data = f"--data={self.images}"
        replaced = {"--nproc-per-node=8": "--nproc-per-node=1", "--data=/data": data}
        assert replaced.keys() <= {*words}
        words = [replaced.get(word, word) for word in words]
        env |= TWO_THREADS | {"BRAKE": str(self.brake)}
        words += [*FLAGS, "--checkpoint-freq", "5"]
        return self.start(index, words, self.folder, env, pod=True)


def terminate(job):
    """As Kubernetes does it: SIGTERM to process 1 of the pod, SIGKILL after the grace period."""
    os.kill(first_child(job), signal.SIGTERM)


def end(jobs, code, limit=POD["terminationGracePeriodSeconds"]):
    """Wait for pods; returns what the first has printed since."""
    ends = [job.wait(limit) for job in jobs]
    assert [returned for returned, _ in ends] == [code] * len(jobs), ends
    return ends[0][1]


@pytest.mark.full
@needs_hosts
def test_two_pods_train_are_replaced_and_go_on(work, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    with Pods(folder, work / "data/digits") as pods:
        pods.know()  # there are no names yet: the name server knows a pod when it runs
        jobs = {1: pods.create(1)}
        jobs[1].wait_for("train-0.train", 60)  # torch warns that it cannot resolve this name
        pods.know(0, 1)
        jobs[0] = pods.create(0)
        assert "processes: 2, gloo" in jobs[0].wait_for(STEP, 120)
        for leaving in ([1], [0, 1]):  # one is evicted; then the whole job is
            for index in leaving:
                terminate(jobs[index])
            output = end([jobs[0], jobs[1]], code=1)
            (place,) = re.findall(r"^stopped at (.*), saved: --resume auto goes on$", output, re.M)
            jobs = {index: pods.create(index) for index in (1, 0)}
            output = jobs[0].wait_for(STEP, 120)
            assert f"resumed from {folder}/checkpoints/checkpoint.pth at {place}\n" in output
        pods.brake.unlink()
        end([jobs[0], jobs[1]], code=0, limit=150)
    straight = ddp(work, *FLAGS, "--data", work / "data/digits")
    assert same_state(load(folder / "checkpoints"), load(straight))
