"""docs/kubernetes.yaml: as the API wants it, and what its pods run trains, stops and goes on.

There is no cluster here: the file is held against the schema of Kubernetes' API, and its command
runs in two network namespaces, with the names, variables and process numbers of pods.
"""

import functools
import os
import re
import signal

import kubernetes_validate
import pytest
import yaml
from conftest import PYTHON, ROOT, load, same_state

from tests.hosts import MODEL, STEP, Hosts, first_child, needs_hosts
from tests.launched import straight

SERVICE, JOB = yaml.safe_load_all((ROOT / "docs/kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
NAME, SUBDOMAIN = JOB["metadata"]["name"], POD["subdomain"]
GRACE = POD["terminationGracePeriodSeconds"]
FLAGS = [*MODEL, *"--epochs 9 --max-steps 50".split()]  # no step is made until both are there


def test_it_is_as_the_api_wants_it():
    """strict: no key that the API does not know."""
    for resource in (SERVICE, JOB):
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(resource, version, strict=True)


def test_its_parts_fit_together():
    """What the schema does not know, and what the pods below do not need."""
    spec, flags = JOB["spec"], " ".join(CONTAINER["command"])
    assert spec["completionMode"] == "Indexed"  # without it the pods have no number
    assert f"--nnodes={spec['completions']} " in flags
    assert spec["completions"] == spec["parallelism"]
    assert f"--nproc-per-node={CONTAINER['resources']['limits']['nvidia.com/gpu']} " in flags
    # A pod's name is HOSTNAME.SUBDOMAIN, where a headless service of that name selects it.
    assert SERVICE["spec"]["clusterIP"] == "None" and SERVICE["metadata"]["name"] == SUBDOMAIN
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": NAME}
    # The API server refuses a podFailurePolicy with another one.
    assert POD["restartPolicy"] == "Never" and spec["podFailurePolicy"]
    # torchrun kills after 30 s what is left of its processes, and needs some seconds to end.
    assert GRACE >= 45
    mounts = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounts == {volume["name"] for volume in POD["volumes"]}


HOSTNAMES = [f"{NAME}-{i}.{SUBDOMAIN}" for i in (0, 1)]
NAMES = [f"{name}.default.svc.cluster.local {name} {name.split('.')[0]}" for name in HOSTNAMES]


class Pods(Hosts):
    """Both pods. `folder` is the volume at /work, `images` the one at /data."""

    def __init__(self, folder, images):
        super().__init__(folder / "brake", *NAMES)
        self.folder, self.images = folder, images
        (folder / "distributed.py").symlink_to(ROOT / "distributed.py")

    def create(self, index):
        """The container's command with the variables of a pod."""
        env = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{NAME}-{index}"}
        # $(NAME) as Kubernetes expands it
        expand = functools.partial(re.sub, r"\$\((\w+)\)", lambda match: env[match[1]])
        torchrun, *command = map(expand, CONTAINER["command"])
        replaced = {"--nproc-per-node=8": "--nproc-per-node=1"}
        replaced["--data=/data"] = f"--data={self.images}"
        assert torchrun == "torchrun" and replaced.keys() <= {*command}
        words = [PYTHON, "-m", "torch.distributed.run"]
        words += [replaced.get(word, word) for word in command]
        words += [*FLAGS, "--checkpoint-freq", "5"]
        return self.start(index, words, self.folder, env, pod=True)


def terminate(job):
    """As Kubernetes does it: SIGTERM to process 1 of the pod, SIGKILL after the grace period."""
    os.kill(first_child(job), signal.SIGTERM)


@pytest.mark.full
@needs_hosts
def test_two_pods_train_are_replaced_and_go_on(work, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    with Pods(folder, work / "data/digits") as pods:
        pods.know()  # there are no names yet: the name server knows a pod when it runs
        jobs = {1: pods.create(1)}
        jobs[1].wait_for(HOSTNAMES[0])  # torch warns that it cannot resolve this name
        pods.know(0, 1)
        jobs[0] = pods.create(0)
        assert "processes: 2, gloo" in jobs[0].wait_for(STEP)
        terminate(jobs[1])  # it is evicted; the other stops with it
        output, _ = [jobs[index].finish(1, 150) for index in (0, 1)]
        (place,) = re.findall(r"^stopped at (.*), saved: --resume auto goes on$", output, re.M)
        jobs = {index: pods.create(index) for index in (1, 0)}
        output = jobs[0].wait_for(STEP)
        assert f"resumed from {folder}/checkpoints/checkpoint.pth at {place}\n" in output
        pods.brake.unlink()
        for job in jobs.values():
            job.finish()
    undisturbed = straight("distributed", work, *FLAGS, "--data", work / "data/digits")
    assert same_state(load(folder / "checkpoints"), load(undisturbed))
