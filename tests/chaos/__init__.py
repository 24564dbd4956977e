"""Rounds of runs that lose a process: `python -m tests.chaos --rounds 100 --seed 1`, or `make chaos`.

    main ──forks──▶ round, one of a few at a time ──forks──▶ driver ──▶ the processes of its run
                      └── watches the run, harms its processes as planned, resumes, checks, reports

The first process imports everything once, so that a driver starts at once. A round's process adopts the orphans of
its run, so that it sees every process. Each round has a directory of its own for temporary files. A plan (plan.py)
follows from the seed and the round's number alone.
"""
