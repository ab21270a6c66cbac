#!/usr/bin/env python3
"""`chorale run --elastic` from the outside: jobs whose processes are killed on schedule, and what is refused.

  elastic_test.py BIN      BIN is the folder of the built programs
"""
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from processes import LIMIT_S
from unittest_main import main

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
CHORALE = str(BIN / "chorale")
# Trains a small model in f64, and compares each loss with that of one rank (src/chorale/elastic/job_test_util.h).
JOB = [str(BIN / "elastic_test"), "--gtest_also_run_disabled_tests", "--gtest_filter=RankOfAnElasticJob.*", "--gtest_brief=1"]
PHASES = ["begin", "forward", "backward", "bucket", "commit", "update", "applied", "agreement", "meeting", "transfer", "finish"]
SCHEDULES = int(os.environ.get("CHORALE_TEST_SCHEDULES", "10"))
SHARDED = (SCHEDULES + 2) // 3
EPOCHS = int(os.environ.get("CHORALE_TEST_EPOCHS", "20"))


def run(*arguments, kills="", steps=8, **variables):
    environment = {**os.environ, "ELASTIC_KILLS": kills, "ELASTIC_STEPS": str(steps), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([CHORALE, "run", *arguments], capture_output=True, text=True, timeout=LIMIT_S, env=environment)


def schedule(seed, phases=PHASES):
    """One to three deaths among four ranks, some at the same moment. Every phase has its turn."""
    rng = random.Random(seed)
    kills = []
    for i in range(rng.randint(1, 3)):
        phase = phases[seed % len(phases)] if i == 0 else rng.choice(phases)
        step = 8 if phase == "finish" else rng.randrange(8)
        if i > 0 and rng.random() < 0.5:
            phase, step = kills[-1][1:]
        kills.append((rng.randrange(4), phase, step))
    # The phases of a change of ranks come with another death.
    if kills[0][1] in ("agreement", "meeting", "transfer"):
        kills.append(((kills[0][0] + 1) % 4, "backward", kills[0][2]))
    return " ".join(f"{rank}@{step}:{phase}" for rank, phase, step in kills[:3])


class Elastic(unittest.TestCase):
    def check(self, job, kills):
        """All processes that came to the end have the same bits, and the losses of one rank."""
        text = f"{kills}\n{job.stdout}\n{job.stderr}"
        self.assertEqual(job.returncode, 0, text)
        ends = re.findall(r"member (\d+) rank (\d+) bits (-?\d+) sizes([ \d]*)", job.stdout)
        self.assertTrue(ends, text)
        self.assertEqual(len({(bits, sizes) for _, _, bits, sizes in ends}), 1, text)
        self.assertNotIn("FAILED", job.stdout, text)
        return ends

    def test_schedules_of_kills(self):
        for seed in range(SCHEDULES):
            kills = schedule(seed)
            with self.subTest(seed=seed, kills=kills):
                self.check(run("-n", "4", "--elastic", "1:4", *JOB, kills=kills), kills)

    def test_schedules_of_kills_where_each_rank_has_a_part(self):
        phases = ["copy", "forward", "transfer", *PHASES]  # neighbours that die at once leave the checkpoint
        for seed in range(SHARDED):
            kills = schedule(seed, phases)
            with self.subTest(seed=seed, kills=kills), tempfile.TemporaryDirectory() as folder:
                self.check(run("-n", "4", "--elastic", "1:4", *JOB, kills=kills, ELASTIC_COPY_EVERY="2", ELASTIC_SAVED=f"{folder}/saved"), kills)

    def test_a_dead_ranks_part_is_with_its_neighbour(self):
        job = run("-n", "3", "--elastic", "3:3", *JOB, kills="1@5:backward", ELASTIC_COPY_EVERY="3")
        ends = self.check(job, "1@5:backward")
        self.assertIn(", 2 back; rank 1 (member 1) died", job.stderr + job.stdout)
        self.assertIn("copies of parts: 1 of", job.stderr + job.stdout)
        self.assertEqual(set(ends[0][3].split()), {"3"})

    def test_a_killed_rank_is_named_and_replaced(self):
        # Many steps, so that the replacement comes in time.
        job = run("-n", "2", "--elastic", "1:2", *JOB, kills="0@3:backward", steps=4000)
        ends = self.check(job, "0@3:backward")
        self.assertIn("epoch 2, 1 ranks: rank 0 (member 0) died: killed by SIGKILL", job.stderr)
        self.assertRegex(job.stderr, r"epoch 3, 2 ranks: member 2 joins")
        self.assertEqual(sorted(end[:2] for end in ends), [("1", "0"), ("2", "1")])  # survivors first
        sizes = ends[0][3].split()
        # Step 3 is repeated by one rank, or by two if the replacement is quick.
        self.assertEqual((sizes[0], sizes[-1]), ("2", "2"))
        self.assertIn(sizes[3], ("1", "2"))

    def test_a_stopped_rank_is_killed_and_replaced(self):
        # Rank 1 stops itself before it meets the others; a replacement does not.
        program = ["sh", "-c", 'if [ "$RANK" = 1 ]; then kill -STOP $$; fi; exec "$0" "$@"', *JOB]
        job = run("-n", "2", "--elastic", "1:2", *program, CHORALE_STOP_PATIENCE="1")
        self.check(job, "stop")
        self.assertIn("member 1 was stopped for 1 s", job.stderr)
        self.assertIn("rank 1 (member 1) died: killed by SIGKILL", job.stderr)

    def test_a_slow_rank_is_never_killed(self):
        # Rank 0 computes for three times as long as a stopped rank may be stopped; the others wait for it in a call.
        job = run("-n", "3", "--elastic", "1:3", *JOB, steps=4, CHORALE_STOP_PATIENCE="1", ELASTIC_BUSY_S="3")
        ends = self.check(job, "slow")
        self.assertEqual([(end[0], end[3].split()) for end in sorted(ends)], [(str(rank), ["3"] * 4) for rank in range(3)])
        self.assertNotIn("epoch 2", job.stderr)

    def test_epochs_leave_nothing_behind(self):
        """The youngest rank is killed and replaced again and again: neither the launcher nor a survivor keeps anything of it."""
        kills = max(4, EPOCHS // 2)
        environment = {**os.environ, "ELASTIC_KILLS": "", "ELASTIC_STEPS": "100000000", "ELASTIC_QUIET": "1", "OMP_NUM_THREADS": "1", "CHORALE_TEST_TIMEOUT_S": "7200"}
        with tempfile.NamedTemporaryFile("w+") as said:
            launcher = subprocess.Popen([CHORALE, "run", "-n", "2", "--elastic", "1:2", *JOB], stdout=said, stderr=subprocess.STDOUT, env=environment)

            def ranks():
                children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
                found = [int(pid) for pid in children if b"RankOfAnElasticJob" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
                return sorted(found, key=lambda pid: int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]))  # by their start

            def wait_for_both(begin):
                """Behind this place of what was said. A death and the replacement's joining may be one epoch, or two."""
                end = time.monotonic() + LIMIT_S
                while not re.search(r"\[elastic\] epoch [0-9]+: 2 ranks", pathlib.Path(said.name).read_text()[begin:]):
                    self.assertIsNone(launcher.poll(), pathlib.Path(said.name).read_text()[-3000:])
                    self.assertLess(time.monotonic(), end, pathlib.Path(said.name).read_text()[-3000:])
                    time.sleep(0.005)

            def counts(pid):
                proc = pathlib.Path(f"/proc/{pid}")
                maps = (proc / "maps").read_text()
                memory = int(re.search(r"VmRSS:\s+(\d+) kB", (proc / "status").read_text())[1])
                return {"descriptors": len(os.listdir(proc / "fd")), "threads": len(os.listdir(proc / "task")), "shared": maps.count(" rw-s "), "KiB": memory}

            try:
                wait_for_both(0)
                survivor = ranks()[0]
                shared_files = len(os.listdir("/dev/shm"))
                early = None
                for kill in range(kills):
                    begin = len(pathlib.Path(said.name).read_text())
                    os.kill(ranks()[-1], signal.SIGKILL)
                    wait_for_both(begin)
                    if kill + 1 == max(2, kills // 10):
                        early = [counts(launcher.pid), counts(survivor)]
                late = [counts(launcher.pid), counts(survivor)]
                self.assertEqual(len(ranks()), 2)
            finally:
                launcher.terminate()
                launcher.wait()
        print(f"from {max(2, kills // 10)} to {kills} kills, launcher and survivor: {early} to {late}", flush=True)
        for before, after in zip(early, late):
            for what in ("descriptors", "threads", "shared"):
                self.assertLessEqual(after[what], before[what] + 2, what)
            self.assertLess(after["KiB"], before["KiB"] + 4096 + 16 * kills)
        self.assertLessEqual(len(os.listdir("/dev/shm")), shared_files)

    def test_too_few_ranks_end_the_job(self):
        # The program ends at once where it is a replacement.
        program = ["sh", "-c", 'if [ "$RANK" -ge 2 ]; then exit 5; fi; exec "$0" "$@"', *JOB]
        job = run("-n", "2", "--elastic", "2:2", *program, kills="1@2:commit")
        self.assertEqual(job.returncode, 128 + signal.SIGKILL, job.stderr)
        self.assertIn("1 ranks are left, at least 2 are wanted", job.stderr)
        self.assertIn("replacements ended before they took part", job.stderr)

    def test_a_program_that_does_not_use_it_fails_as_ever(self):
        with tempfile.TemporaryDirectory() as folder:
            # Rank 0 fails when rank 1 is gone, as a rank would whose call failed.
            script = f"""cd {folder}; if [ $RANK = 1 ]; then echo $$ >new; mv new pid; kill -9 $$; fi
                while [ ! -e pid ] || kill -0 $(cat pid) 2>/dev/null; do sleep 0.02; done; exit 1"""
            job = run("-n", "2", "--elastic", "1:2", "sh", "-c", script)
        self.assertEqual(job.returncode, 128 + signal.SIGKILL, job.stderr)
        job = run("-n", "2", "--elastic", "1:2", "sh", "-c", "exit $((RANK * 3))")
        self.assertEqual(job.returncode, 3, job.stderr)
        self.assertEqual(run("-n", "2", "--elastic", "1:2", "true").returncode, 0)

    def test_what_cannot_be(self):
        for arguments, reason in [(["--elastic", "2:1", "-n", "2", "true"], "MIN is more than MAX"),
                                  (["--elastic", "two", "-n", "2", "true"], "MIN:MAX"),
                                  (["--elastic", "3:4", "-n", "2", "true"], "not within --elastic 3:4"),
                                  (["--elastic", "1:1", "-n", "2", "true"], "not within --elastic 1:1"),
                                  (["--elastic", "1:2", "-n", "2", "--nnodes", "2", "--max-restarts", "1", "true"], "goes on instead"),
                                  (["--elastic", "1:2", "-n", "2", "--join", "a:1", "--rdzv", "b:1", "true"], "takes the place of"),
                                  (["-n", "2", "--join", "a:1", "true"], "needs the --elastic")]:
            job = run(*arguments)
            self.assertEqual(job.returncode, 2, (arguments, job.stderr))
            self.assertIn(reason, job.stderr)
        for arguments, reason in [(["gpt", "--tp", "2", "-n", "2"], "models that --tp splits"), (["gpt", "--dp", "2"], "leave out --dp"),
                                  (["fashion-mnist", "--dry-run"], "--dry-run"), (["fashion-mnist", "--join", "a:1"], "leave out --join"),
                                  (["fashion-mnist", "--nnodes", "2", "--rdzv", "a:1"], "needs --out")]:
            train = subprocess.run([CHORALE, "train", *arguments, "--elastic", "1:2"], capture_output=True, text=True, timeout=LIMIT_S)
            self.assertEqual(train.returncode, 2, train.stderr)
            self.assertIn(reason, train.stderr)
        for variables in ({"RANK": "0", "WORLD_SIZE": "2"}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}):
            train = subprocess.run([CHORALE, "train", "fashion-mnist", "--elastic", "1:2"], capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **variables})
            self.assertEqual(train.returncode, 2, train.stderr)
            self.assertIn("is for ranks that it starts itself", train.stderr)


if __name__ == "__main__":
    main()
