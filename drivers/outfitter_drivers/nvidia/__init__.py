"""NVIDIA's GPUs by NVML: what the `gpu` driver asks where NVIDIA's library is there.

NVML is called in a child process only. Its calls may hang in the kernel for ever, it stays mapped after a driver's
upgrade, and whoever has it open keeps a GPU from being reset. A child can be abandoned, replaced and ended.

`snapshot` and `protocol` are what parent and child say to each other. `library`, `reading` and `child` run in the
child. The rest runs in the manager: `process` asks, `health`, `xid` and `inventory` judge, `driver` acts.
"""
