"""The simulator: what it simulates adds up, and the policy in it does what it is for."""

from __future__ import annotations

import gzip
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.scheduler.__main__ import PEER, POLICIES, Case, compare
from benchmarks.scheduler.crowd import GPUS, JOBS, crowd
from benchmarks.scheduler.figures import figures, starved
from benchmarks.scheduler.simulation import EXPONENT, RESIZE_S, Simulation
from benchmarks.scheduler.traces import DAY, TracedJob, generated, offered, read_trace, window
from service.queue.policy import decide
from service.queue.terms import Action, Rules

TRACE = Path(os.environ.get("RUBATO_JOB_TRACE") or "philly_jobs.csv.gz")
needs_trace = pytest.mark.skipif(not TRACE.is_file(), reason="set RUBATO_JOB_TRACE to the CSV file of a trace")


def small(load: float, jobs: int = 300) -> Case:
    trace = [replace(job, gpus=min(job.gpus, 32)) for job in generated(jobs, 128, load, seed=0, crowded=True)]
    stretch = offered(trace, crowded=True) / (128 * load)
    return Case("small", [replace(job, submitted=job.submitted * stretch) for job in trace], 128, load)


@pytest.mark.parametrize("name", ["fifo", "gang"])
def test_without_resizes_a_job_takes_its_time_and_its_wait(name: str) -> None:
    jobs = [TracedJob(0, 0.0, 100.0, 4, "p"), TracedJob(1, 10.0, 50.0, 8, "p"), TracedJob(2, 20.0, 30.0, 4, "p")]
    ran = Simulation(jobs, 8, POLICIES[name], every=1.0).run()
    ends = [job.finished for job in ran.jobs]
    # The small one passes the large one under gang, which lets it, and would be over in time besides.
    assert ends == pytest.approx([100.0, 150.0, 180.0] if name == "fifo" else [100.0, 150.0, 50.0])
    assert sum(job.resizes for job in ran.jobs) == 0


def test_a_job_alone_runs_at_four_times_its_size() -> None:
    ran = Simulation([TracedJob(0, 0.0, 1000.0, 2, "p")], 64, POLICIES["elastic"]).run()
    assert ran.jobs[0].finished == pytest.approx(1000.0 / 4**EXPONENT)


def test_a_resize_takes_training_time() -> None:
    long = TracedJob(0, 0.0, 10_000.0, 4, "p")
    ran = Simulation([long, TracedJob(1, 500.0, 200.0, 8, "p")], 8, POLICIES["elastic"]).run()
    first, second = ran.jobs
    assert first.resizes == 2, "it made room, and was given it back"
    assert second.started == pytest.approx(500.0 + RESIZE_S), "room is there when the resize is done"
    work = 10_000.0 * 4**EXPONENT
    assert first.done == pytest.approx(work)
    assert first.finished is not None
    assert first.finished > work / 8**EXPONENT + 2 * RESIZE_S


def test_sharing_ends_jobs_sooner_than_gangs_and_starves_nobody() -> None:
    record = compare(small(0.9), [POLICIES[PEER], POLICIES["elastic"], POLICIES["elastic-blind"]])
    for name, most in (("elastic", 0.5), ("elastic-blind", 0.6)):  # of few jobs; the benchmark has many
        found = record["policies"][name]
        assert found["mean_ratio"] <= most
        assert found["p99_ratio"] <= 0.6
        assert found["resizes_a_job"] < 3
        assert found["starved"] == 0


def test_whoever_is_overtaken_for_too_long_has_starved() -> None:
    ran = Simulation(small(0.7, 60).jobs, 128, POLICIES["gang"]).run()
    assert starved(ran.jobs, 0.0) > 0, "backfill overtakes, for some time"
    assert starved(ran.jobs, 12 * 3600.0) == 0
    ran.jobs[0].finished = None
    with pytest.raises(RuntimeError, match="never ended, such as job-0"):
        figures(ran, 128, 1.0)


def test_generated_jobs_are_many_small_ones_and_few_large_by_day_more_than_by_night() -> None:
    jobs = generated(4000, 1024, 0.9, seed=3)
    assert offered(jobs) / 1024 == pytest.approx(0.9, rel=0.02)
    crowded = generated(4000, 1024, 0.9, seed=3, crowded=True)
    assert offered(crowded, crowded=True) / 1024 == pytest.approx(0.9, rel=0.02)
    assert crowded[-1].submitted < jobs[-1].submitted
    assert all(a.submitted <= b.submitted for a, b in pairwise(jobs))
    lengths = sorted(job.seconds for job in jobs)
    assert sum(lengths[-400:]) > 0.5 * sum(lengths), "a tenth of all jobs takes half of the time"
    assert sum(job.gpus == 1 for job in jobs) > 0.35 * len(jobs)
    assert max(job.gpus for job in jobs) == 128
    by_night = sum(not 0.25 < job.submitted % DAY / DAY < 0.75 for job in jobs)
    assert by_night < 0.45 * len(jobs)
    assert jobs == generated(4000, 1024, 0.9, seed=3)


def test_a_trace_is_read_as_it_is(tmp_path: Path) -> None:
    lines = "timestamp,duration,num_gpus,cluster\n2020-01-01 00:01:00,5,2,b\n2020-01-01 00:00:00,7.5,1,a\n"
    (tmp_path / "t.csv").write_text(lines)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(lines.encode()))
    expected = [TracedJob(0, 0.0, 7.5, 1, "a"), TracedJob(1, 60.0, 5.0, 2, "b")]
    assert read_trace(tmp_path / "t.csv") == read_trace(tmp_path / "t.csv.gz") == expected
    assert window(expected, 1, 5)[0].submitted == 0.0
    (tmp_path / "bad.csv").write_text(lines.replace("7.5", "long"))
    with pytest.raises(ValueError, match=r"bad.csv, line 3: could not convert"):
        read_trace(tmp_path / "bad.csv")
    (tmp_path / "short.csv").write_text("timestamp,duration\n")
    with pytest.raises(ValueError, match="has no column num_gpus, cluster"):
        read_trace(tmp_path / "short.csv")


def test_a_thousand_jobs_on_ten_thousand_gpus_are_decided_about() -> None:
    jobs, cluster = crowd(running=700, filled=0.97)
    decisions = decide(jobs, cluster, 0.0, Rules())
    assert len(jobs) == JOBS
    assert sum(count * room.gpus for room, count in cluster.total.items()) == GPUS
    free = sum(count * room.gpus for room, count in cluster.free.items())
    started = sum(each.workers for each in decisions if each.action is Action.START)
    assert 0 < started <= free
    shrunk = [each for each in decisions if each.action is Action.RESIZE]
    assert shrunk, "there is not room for all who wait"


@needs_trace
def test_on_a_published_trace() -> None:
    jobs = window(read_trace(TRACE), 42_000, 1_000)
    gpus = max(int(offered(jobs, crowded=True) / 0.9), *(job.gpus for job in jobs))
    found = compare(Case("trace", jobs, gpus, 0.9), [POLICIES[PEER], POLICIES["elastic"]])["policies"]["elastic"]
    assert found["mean_ratio"] <= 0.45
    assert found["p99_ratio"] <= 0.6
    assert found["starved"] == 0
