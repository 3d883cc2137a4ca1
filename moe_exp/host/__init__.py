"""Code for this machine: devices, processes, files, the SLURM queue, and Megatron-Core without CUDA."""
