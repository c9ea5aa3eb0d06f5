"""All time limits of the failure detector, each with its reason. The user's are comm.timeout_seconds and the like."""

GONE_SECONDS = 0.1
"""Time after the end of a rank's last connection until it counts as gone. A live rank keeps one open, so this only
spans the moment in which one connection follows another. Each regrouping waits for it."""
STORE_LOOK_SECONDS = 0.05
"""Period in which the store checks for ranks that are gone: half of GONE_SECONDS."""
LOOK_SECONDS = 1.0
"""Longest pause between two checks of the operation under way, and limit of one wait for news."""
POLL_SECONDS = 0.05
"""Pause of a waiting rank between checks for failed ranks; no requests under a Watch. Each regrouping waits for it."""
PEER_CHECK_SECONDS = 1.0
"""Time limit of a check for failed ranks during another wait; also the longest pause between two checks."""
MAX_PEER_CHECKS_PER_SECOND = 1000
"""Most such checks of all ranks together while they wait for a text: a quarter of MAX_LOOKS_PER_SECOND."""
SILENCE_SECONDS = 3.0
"""Time after the end of a wait within which the store must answer; otherwise it is unreachable."""
STORE_LOST_SECONDS = 1.0
"""Time that an operation may take after the store is lost until its holder counts as lost, too: only the store may be,
and then the operation ends."""
ROLL_CALL_SECONDS = 5.0
"""Time for the ranks to answer; it ends earlier if only ranks whose processes have ended are missing."""
ANSWER_SECONDS = 0.5
"""Time for the ranks to answer after a time limit if only late ranks are missing, which had not come to the operation.
The event of the failure wakes each thread that answers."""
LINGER_SECONDS = 2.0
"""Additional time for the caller's verdict, to read it, and for the store's holder to wait for missing ranks, which may
still run and must read it, too."""
REQUESTS_SECONDS = 1.0
"""Additional time for the requests themselves."""
FIRST_PAUSE_SECONDS, COUNT_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.1, 0.8
"""Pauses between reads of the log: the first; the longest of a rank that counts or holds the store; of the others."""
MAX_LOOKS_PER_SECOND = 4000
"""Most looks of all ranks together while the log grows: a store on one core answers more."""
GRACE_SECONDS = 1.0
"""Time after a limit of torch's own before we give up: torch's error says more."""
FLIGHT_SECONDS = 2.0
"""Limit for dumping torch's flight recorder and writing its file."""
EXPLAIN_SECONDS = ROLL_CALL_SECONDS + LINGER_SECONDS + 2 * REQUESTS_SECONDS
"""Limit of the explanation of a failure: its own limits, and time for its requests."""
VERDICT_SECONDS = LOOK_SECONDS + FLIGHT_SECONDS + 2 * EXPLAIN_SECONDS
"""Time after the time limit for the verdict and the requests of others; a library's own limit must be longer."""
LEAVE_SECONDS = 10.0
"""Time after a rank failure in which a rank may finish the checkpoint that it is writing."""
STACK_DUMP_SECONDS = 1.0
"""Time between the stack dump and SIGALRM for a process whose shutdown hangs."""
