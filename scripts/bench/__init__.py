"""Benchmarks of sidesave beside its peers, each a module to run:
``python -m scripts.bench.save --help``.

    save            call time, time until the state may change, time until durable, against peers
                    and the raw disk
    training_loop   wall time that one save adds to a real training loop
    load            cold and warm reads
    memory          what the writer costs: private memory, staging memory, start
    ranks           what it costs that several ranks make one checkpoint: calls, bytes, commit,
                    resharding
    raw_limits      what the machine can do at best
    gpu             a CUDA machine: copies, overlap, latency beside a save, exactness
    run_all         all of these, one report a script
    busy_slot       the call that finds the staging slot busy

Everything that is compared is measured in the same run, round by round: A B C, then B C A. Tables
show the minimum, the median and the maximum over rounds, and ratios are taken within a round, pair
by pair, before their median is taken. No figure here is a test: the machine decides.
"""
