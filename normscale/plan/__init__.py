"""What a run will take, on paper: parameters, FLOPs, memory by engine, communication, GPU-hours."""
