"""A Ray cluster on this machine: the program is its driver, `RayNodes` what a test or a benchmark has of it.

Each node has an address of its own on the loopback interface; replicas are found by the titles that Ray gives their
processes. A driver of its own, as Ray leaves threads in one.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / "deploy" / "ray" / "serve.yaml"
MARK = "TEST_RAY_CLUSTER"
"""A variable that all processes of a cluster inherit, by which a test finds them."""
MEMORY_BYTES = 100 * 2**20  # of objects on a node; nothing here is large
LIMIT_S = 300
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # the machine is shared: its memory is not only ours
}


class RayNodes:
    """A cluster with the application of deploy/ray/serve.yaml, changed by `deployments`, from `with` on.

    The servers are on the first node, with Ray's own processes, and an engine can be on each other one.
    """

    def __init__(
        self, num_nodes: int, arguments: dict[str, object], deployments: dict[str, dict[str, Any]], **variables: str
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._variables = variables
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        configuration = yaml.safe_load(CONFIGURATION.read_text())
        configuration["proxy_location"] = "HeadOnly"
        configuration["http_options"] = {"host": "127.0.0.1", "port": port}
        [application] = configuration["applications"]
        application["args"] = arguments
        for deployment in application["deployments"]:
            deployment |= deployments[deployment["name"]]
        self._order = {"num_nodes": num_nodes, "configuration": configuration}

    def __enter__(self) -> RayNodes:
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "bench.ray_nodes", json.dumps(self._order)],
            cwd=ROOT,
            env=os.environ | VARIABLES | self._variables | {MARK: self._mark, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.tell("start")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._driver.communicate("stop\n", timeout=LIMIT_S)
        finally:
            left = self.processes()
            for process in left:
                process.kill()
            psutil.wait_procs(left)
        assert self._driver.returncode == 0
        assert left == [], "Ray has ended all its processes"

    def tell(self, order: str) -> None:
        """Have the driver do something, and wait until it is done."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(f"{order}\n")
        self._driver.stdin.flush()
        for line in self._driver.stdout:
            if line == f"done {order}\n":
                return
        raise AssertionError(f"the driver ended and was told to {order}")

    def kill(self, deployment: str) -> None:
        """Kill a replica, and return when it is gone."""
        replica = self.replicas(deployment)[0]
        replica.kill()
        psutil.wait_procs([replica])

    def heal(self, deployment: str, num_replicas: int) -> None:
        """Wait until all replicas of a deployment run again."""
        while len(self.replicas(deployment)) < num_replicas:
            time.sleep(0.2)
        self.tell("start")

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Return the processes of this cluster whose titles have this part."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and title in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue  # it has ended, or is another user's
        return found

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Return the processes of the replicas of a deployment."""
        return self.processes(f"ray::ServeReplica:gptserve:{deployment}")


def main(num_nodes: int, configuration: dict[str, Any]) -> None:
    """Start a cluster, and do what the lines of standard input tell."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve._private import api
    from ray.serve.schema import ServeDeploySchema

    cluster = Cluster()
    numbers = itertools.count()

    def add_node() -> Any:
        number = next(numbers)
        return cluster.add_node(
            num_cpus=4,
            resources={"engines" if number else "servers": 1},
            node_ip_address=f"127.0.0.{number + 2}",
            object_store_memory=MEMORY_BYTES,
            include_dashboard=False,
        )

    nodes = [add_node() for _ in range(num_nodes)]
    ray.init(cluster.address, log_to_driver=False, _node_ip_address="127.0.0.2")
    deploy = ServeDeploySchema.model_validate(configuration)
    client = api.serve_start(http_options=configuration["http_options"], proxy_location="HeadOnly")
    client.deploy_apps(deploy)

    def is_whole() -> bool:
        application = serve.status().applications["gptserve"]
        if application.status == "DEPLOY_FAILED":
            raise RuntimeError(application.message)
        return application.status == "RUNNING"

    for line in sys.stdin:
        match line.strip():
            case "start":
                while not is_whole():
                    time.sleep(0.2)
            case "lose a node":
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            case "add a node":
                nodes.append(add_node())
            case "stop":
                break
        print(f"done {line}", end="", flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
