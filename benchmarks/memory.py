"""Whether the broker's memory grows with the groups that went through it.

One process is generator and learner in turn, so that every sample is taken at the same point of the same cycle: the
buffer is empty and everything trained is durable. What is left to see is what the broker does not give back.
"""

from __future__ import annotations

import psutil
import redis

from benchmarks.figures import BenchmarkError, Figure, slope
from benchmarks.processes import Backend, Running, Worker, running, workers
from benchmarks.samples import answer, group, prompts, rules, sampled_by
from broker.connect import connect
from broker.contract import PushOutcome
from broker.messages import Frontier

GROUPS_PER_STEP, MAX_STALENESS = 100, 1
STEPS_PER_CHECKPOINT, CYCLES = 10, 400  # a cycle is 1,000 groups
WARM_SHARE = 0.5  # allocators go on growing in steps for some 40,000 groups, and then stop
ANSWER_S = 1200.0


def memory(backend: Backend, quick: bool) -> list[Figure]:
    """The slope of the broker's memory, with its standard error, and the growth in all."""
    cycles = CYCLES // 10 if quick else CYCLES
    with running(backend) as broker:
        worker = Worker(_cycle, broker, cycles)
        with workers(worker):
            samples = worker.answer(ANSWER_S)
    warm = max(2, int(WARM_SHARE * cycles))
    thousands = [cycle * GROUPS_PER_STEP * STEPS_PER_CHECKPOINT / 1000 for cycle in range(warm, cycles)]
    kept = samples[warm:]
    value, error = slope(thousands, kept)
    growth = 100 * (kept[-1] / kept[0] - 1)
    what = "used_memory" if backend == "redis" else "RSS"
    note = f"{what} {kept[0] / 2**20:.1f} -> {kept[-1] / 2**20:.1f} MiB, {len(kept)} samples after {warm} cycles"
    return [
        Figure(
            measure="memory",
            backend=backend,
            name="slope",
            unit="B per 1,000 groups",
            ours=value,
            reference=error,
            ratio=abs(value) / error if error else None,
            target="|slope| <= 2 std errors",
            passed=abs(value) <= 2 * error,
            note=f"reference: its standard error; {note}",
        ),
        Figure(
            measure="memory",
            backend=backend,
            name="growth",
            unit="%",
            ours=growth,
            target="< 5 %",
            passed=growth < 5,
            note=f"over {thousands[-1] - thousands[0]:.0f},000 groups; {note}",
        ),
    ]


def _cycle(running_: Running, cycles: int) -> list[float]:
    """Bytes after each cycle."""
    broker = connect(running_.config, running_.url)
    broker.open_run(
        rules=rules(groups_per_step=GROUPS_PER_STEP, max_staleness=MAX_STALENESS), version=0, frontier=Frontier()
    )
    samples, version, small = [], 0, group(completions=2, tokens=16)
    for _ in range(cycles):
        for _ in range(STEPS_PER_CHECKPOINT):
            broker.feed(prompts(range(version * GROUPS_PER_STEP, (version + 1) * GROUPS_PER_STEP)))
            sample = sampled_by(small, version, version)
            leases = broker.lease(
                member_id="g", policy_version=version, incarnation=0, max_prompts=GROUPS_PER_STEP, wait_s=10.0
            )
            if any(broker.push(answer(sample, lease)) is not PushOutcome.ACCEPTED for lease in leases):
                raise BenchmarkError("a group was not accepted")
            batch = broker.take_batch(version=version, wait_s=10.0)
            if batch is None:
                raise BenchmarkError(f"no batch for version {version}: {broker.state().counts}")
            version += 1
            broker.trained(batch_id=batch.batch_id, version=version)
        broker.durable(version=version)
        samples.append(_bytes(running_))
    counts = broker.state().counts
    broker.close()
    if counts.durable != version * GROUPS_PER_STEP or not counts.balanced():
        raise BenchmarkError(f"{version * GROUPS_PER_STEP} groups should be durable: {counts}")
    return samples


def _bytes(broker: Running) -> float:
    if broker.backend == "zmq":
        return float(psutil.Process(broker.pid).memory_info().rss)
    with redis.Redis.from_url(broker.url, socket_timeout=10.0) as client:
        return float(client.info("memory")["used_memory"])
