# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Starting a job: scripts and commands for Slurm, MPI and DeepSpeed, and what each rank does
first.
"""
