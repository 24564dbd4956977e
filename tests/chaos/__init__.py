"""Rounds of runs that lose a process: `python -m tests.chaos --rounds 100 --seed 1`, or `make chaos`.

    main ──forks──▶ round, one of a few at a time ──forks──▶ driver ──▶ the processes of its run
                      └── watches the run, kills or stops what its plan says, resumes, checks, says what it found

Everything is imported once, in the first process, so that a driver starts at once. A round's process adopts whatever
its run orphans, so that it sees all of it; the directory for temporary files is its own. A plan (plan.py) follows from
the seed and the round's number alone.
"""
