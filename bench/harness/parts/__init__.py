"""What is measured, one file a part. Each gives `measure(bench) -> report section`."""

from . import collectives, host_cost, memory, optimizer, scale, step

PARTS = {"host_cost": host_cost, "step": step, "scale": scale, "memory": memory,
         "collectives": collectives, "optimizer": optimizer}
